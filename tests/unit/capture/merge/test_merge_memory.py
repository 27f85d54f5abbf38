"""Merging takes memory and room that do not grow with the capture."""

import errno
import sqlite3
import subprocess
import sys
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from specdecode_operator.capture.files import merge as merging
from specdecode_operator.capture.files.accounting import account
from specdecode_operator.capture.files.formats import encode
from specdecode_operator.capture.files.merge import merge, scratch_database
from specdecode_operator.capture.files.validate import validate_capture
from tests.support.recordings import (
    ZERO_S,
    Recording,
    Scenario,
    closed,
    scheduler_stats,
)
from tests.unit.capture.merge.test_merge import META

SORTING = """
import resource, sys
from pathlib import Path
from specdecode_operator.capture.files.merge import scratch_database

def peak_kib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

with scratch_database(Path(sys.argv[1]), "test") as database:
    before_kib = peak_kib()
    database.execute("CREATE TABLE lines (key REAL, line BLOB)")
    database.execute("CREATE INDEX in_order ON lines (key)")
    for number in range(60_000):
        database.execute("INSERT INTO lines VALUES (?, ?)", (-float(number), b"x" * 1000))
    last, rows = float("-inf"), 0
    for key, line in database.execute("SELECT key, line FROM lines ORDER BY key, rowid"):
        assert last < key and len(line) == 1000
        last, rows = key, rows + 1
print((peak_kib() - before_kib) // 1024, rows)
"""


class TestMemory:
    def test_a_scratch_database_holds_its_cache_alone(self, tmp_path: Path) -> None:
        """In a process of its own: what SQLite takes, only the system counts."""
        found = subprocess.run([sys.executable, "-c", SORTING, tmp_path], capture_output=True, text=True, check=True)
        peak_mib, rows = map(int, found.stdout.split())
        assert rows == 60_000
        assert peak_mib < 40, "60 MB were sorted"
        assert list(tmp_path.iterdir()) == []

    def test_a_scratch_database_is_in_its_folder_whatever_that_is_called(self, tmp_path: Path) -> None:
        folder = tmp_path / "50%25? #1"
        folder.mkdir()
        with scratch_database(folder, "a") as database:
            database.execute("CREATE TABLE lines (line)")
            assert [path.name for path in folder.iterdir()] == ["a.scratch"]
        assert list(tmp_path.rglob("*")) == [folder]

    @pytest.mark.parametrize("link", [False, True])
    def test_what_a_killed_merge_left_is_replaced(self, tmp_path: Path, *, link: bool) -> None:
        (tmp_path / "other").write_bytes(b"no database" * 1000)
        path = tmp_path / "a.scratch"
        if link:
            path.symlink_to("other")
        else:
            path.write_bytes(b"no database" * 1000)
        with scratch_database(tmp_path, "a") as database:
            database.execute("CREATE TABLE lines (line)")
        assert list(tmp_path.iterdir()) == [tmp_path / "other"]
        assert (tmp_path / "other").read_bytes() == b"no database" * 1000

    def test_a_scratch_database_that_another_overwrites_is_an_error_of_the_volume(self, tmp_path: Path) -> None:
        def overwrite() -> None:
            with scratch_database(tmp_path, "a") as database:
                (tmp_path / "a.scratch").write_bytes(b"no database" * 1000)
                database.execute("CREATE TABLE lines (line)")

        with pytest.raises(OSError, match=r"not a database.*a\.scratch") as failure:
            overwrite()
        assert failure.value.errno == errno.EIO
        assert list(tmp_path.iterdir()) == []

    def test_nothing_is_sorted_outside_the_volume(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """SQLite's own temporary files are in the system's folder for them, and have no name any more."""
        opened: set[str] = set()

        def look() -> None:
            for descriptor in Path("/proc/self/fd").iterdir():
                with suppress(FileNotFoundError):  # the folder's own
                    opened.add(str(descriptor.readlink()))

        def watched(*arguments: Any, **options: Any) -> sqlite3.Connection:
            database = connect(*arguments, **options)
            database.set_progress_handler(look, 2_000)
            return database

        connect = sqlite3.connect
        monkeypatch.setattr(sqlite3, "connect", watched)
        monkeypatch.setattr(merging, "CACHE_KIB", 64)
        _write_many(tmp_path, 2_000)
        look()
        before = opened.copy()
        merge(tmp_path, META, ZERO_S)
        account(tmp_path / "client.jsonl.part", tmp_path / "trace.jsonl.part", None, tmp_path)
        new = opened - before
        assert {f"{tmp_path}/{name}.scratch" for name in ("requests", "steps", "accounting")} <= new
        assert [path for path in new if path.startswith("/") and not path.startswith(f"{tmp_path}/")] == []

    def test_the_volume_needs_no_room_for_what_is_merged_already(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _write_many(tmp_path, 200)
        there: dict[str, set[str]] = {}

        def look_and_encode(line: msgspec.Struct) -> bytes:
            there.setdefault(type(line).__name__, set()).update(path.name for path in tmp_path.glob("*.scratch"))
            return encode(line)

        monkeypatch.setattr(merging, "encode", look_and_encode)
        merge(tmp_path, META, ZERO_S)
        assert there == {"TraceRecord": {"requests.scratch", "steps.scratch"}, "StepStats": {"steps.scratch"}}
        assert not list(tmp_path.glob("*.scratch*"))

    def test_a_volume_that_is_full_is_told_as_any_file_tells_it(self, tmp_path: Path) -> None:
        def fill() -> None:
            with scratch_database(tmp_path, "a") as database:
                database.execute("CREATE TABLE lines (line BLOB)")
                database.execute("PRAGMA max_page_count = 4")
                database.execute("INSERT INTO lines VALUES (zeroblob(100000))")

        with pytest.raises(OSError, match="full") as failure:
            fill()
        assert failure.value.errno == errno.ENOSPC
        assert list(tmp_path.iterdir()) == []

    def test_a_volume_that_fails_is_not_said_to_be_full(self, tmp_path: Path) -> None:
        def fail() -> None:
            with scratch_database(tmp_path, "a") as database:
                database.execute("SELECT * FROM lines")

        with pytest.raises(OSError, match="no such table") as failure:
            fail()
        assert failure.value.errno == errno.EIO

    def test_merging_and_validating_do_not_grow_with_the_capture(self, tmp_path: Path) -> None:
        """Five times the lines must not need half as much memory again: 8 bytes a measure and request are held."""
        few, many = (_peak_of_a_capture(tmp_path / str(requests), requests) for requests in (200, 1000))
        size = sum(path.stat().st_size for path in (tmp_path / "1000").rglob("*.part"))
        assert many < 1.5 * few
        assert 2 * many < size


def _peak_of_a_capture(folder: Path, requests: int) -> int:
    _write_many(folder, requests)
    tracemalloc.start()
    merge(folder, META, ZERO_S)
    assert validate_capture(folder, [], scratch=folder).problems == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def _write_many(folder: Path, requests: int) -> None:
    """Write a long recording of one request after another, without holding it."""
    pattern = Recording(Scenario(requests=1, warmup=0, output_tokens=300))
    lines = pattern.segments[0]
    request = next(line for line in lines if line["k"] == "request")
    steps = [line | {"scheduler": scheduler_stats(1, [], 0, 4)} for line in lines if line["k"] == "step"]
    (folder / "segments").mkdir(parents=True)
    write = msgspec.json.encode
    with (
        (folder / "segments" / "segment-a-1.jsonl").open("wb") as segment,
        (folder / "client.jsonl.part").open("wb") as client,
    ):
        segment.write(write(lines[0]) + b"\n")
        for number in range(requests):
            later_s, name = number * 1.0, f"a-capture-with-a-long-name-closed-{number}"
            for step in steps[:4]:
                segment.write(write(step | {"t": step["t"] + later_s}) + b"\n")
            moved = {key: request[key] + later_s for key in ("arrival_monotonic_s", "queued_s", "scheduled_s")}
            stamps = [stamp_s + later_s for stamp_s in request["chunk_s"]]
            one = {"chunk_tokens": [1] * len(stamps)}
            segment.write(write(request | moved | one | {"external_id": f"cmpl-{name}-0", "chunk_s": stamps}) + b"\n")
            client.write(write(pattern.clients[0] | {"id": name, "completion_tokens": len(stamps)}) + b"\n")
        segment.write(write(closed(requests, 4 * requests)) + b"\n")
