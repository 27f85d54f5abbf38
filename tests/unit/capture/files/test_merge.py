"""Merge of segments."""

import errno
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest

from specdecode_operator.capture.files import merge as merging
from specdecode_operator.capture.files.formats import CaptureError, TraceMeta, encode
from specdecode_operator.capture.files.merge import Merged, client_id, merge, scratch_database
from specdecode_operator.capture.files.validate import validate_capture
from tests.support.recordings import (
    ZERO_S,
    Recording,
    Scenario,
    closed,
    header,
    read_lines_of,
    scheduler_stats,
    write_lines,
)

META = TraceMeta(model="tiny/target", schema=1, speculative={"method": "ngram", "num_speculative_tokens": 4})


def merged(recording: Recording, folder: Path) -> Merged:
    return merge(recording.write(folder), META, ZERO_S)


def records(folder: Path) -> list[dict[str, Any]]:
    return read_lines_of(folder / "trace.jsonl.part")[1:]


def chunks(record: dict[str, Any]) -> list[int]:
    later = record.get("itl_tokens", [1] * len(record["itl_ms"]))
    return [record["output_tokens"] - sum(later), *later]


class TestOneServer:
    def test_merged_chunks_match_engine_chunks(self, tmp_path: Path) -> None:
        recording = Recording(Scenario())
        merged(recording, tmp_path)
        found = {record["request_id"]: chunks(record) for record in records(tmp_path)}
        expected = {name: sizes for name, sizes in recording.observed.chunks.items() if "warmup" not in name}
        assert found == expected

    def test_files_pass_validation(self, tmp_path: Path) -> None:
        merged(Recording(Scenario(token_ids=True)), tmp_path)
        found = validate_capture(tmp_path, [])
        assert found.problems == []
        assert set(found.gates) == {
            "accounting",
            "client_tokens",
            "dropped",
            "short_gap_share",
            "largest_chunk",
            "clock",
            "per_position",
            "step_counters",
        }

    def test_meta_line_is_first(self, tmp_path: Path) -> None:
        merged(Recording(Scenario()), tmp_path)
        first = read_lines_of(tmp_path / "trace.jsonl.part")[0]
        assert first["meta"]["model"] == "tiny/target"

    def test_records_are_in_order_of_finishing(self, tmp_path: Path) -> None:
        merged(Recording(Scenario(requests=30)), tmp_path)
        ends = [record["arrival_ms"] + record["ttft_ms"] + sum(record["itl_ms"]) for record in records(tmp_path)]
        assert ends == sorted(ends)

    def test_times_are_relative_to_zero_of_run(self, tmp_path: Path) -> None:
        recording = Recording(Scenario(requests=1))
        merged(recording, tmp_path)
        (record,) = records(tmp_path)
        line = next(line for line in recording.segments[0] if line.get("external_id") == "cmpl-demo-closed-0-0")
        assert record["arrival_ms"] == pytest.approx((line["arrival_monotonic_s"] - ZERO_S) * 1000, abs=1e-3)
        assert record["ttft_ms"] == pytest.approx((line["chunk_s"][0] - line["arrival_monotonic_s"]) * 1000, abs=1e-3)
        assert sum(record["itl_ms"]) == pytest.approx((line["chunk_s"][-1] - line["chunk_s"][0]) * 1000, abs=1e-3)
        assert record["queued_ms"] == pytest.approx(record["arrival_ms"] + 0.5, abs=1e-3)

    def test_client_fields_are_joined_to_records(self, tmp_path: Path) -> None:
        recording = Recording(Scenario())
        merged(recording, tmp_path)
        told = {line["id"]: (line["phase"], line["ttft_ms"]) for line in recording.clients if not line.get("warmup")}
        assert len(told) == 12
        joined = {each["request_id"]: (each["phase"], each["client_ttft_ms"]) for each in records(tmp_path)}
        assert joined == told

    def test_warmup_requests_are_left_out(self, tmp_path: Path) -> None:
        recording = Recording(Scenario(requests=3, warmup=4))
        for line in recording.clients:
            line["phase"] = "closed" if line["warmup"] else "warmup"  # a phase may have any name
        result = merged(recording, tmp_path)
        assert (result.records, result.warmup_records) == (3, 4)
        first_arrival_ms = min(record["arrival_ms"] for record in records(tmp_path))
        steps = read_lines_of(tmp_path / "step-stats.jsonl.part")
        assert min(step["ts_ms"] for step in steps) >= first_arrival_ms

    def test_steps_before_first_measured_arrival_are_left_out(self, tmp_path: Path) -> None:
        recording = Recording(Scenario(requests=1, warmup=0))
        (request,) = (line for line in recording.segments[0] if line["k"] == "request")
        steps = [line for line in recording.segments[0] if line["k"] == "step"]
        steps[0]["t"], steps[1]["t"] = request["arrival_monotonic_s"] - 0.001, request["arrival_monotonic_s"]
        merged(recording, tmp_path)
        written = read_lines_of(tmp_path / "step-stats.jsonl.part")
        assert len(written) == len(steps) - 1
        assert written[0]["ts_ms"] == pytest.approx((steps[1]["t"] - ZERO_S) * 1000, abs=1e-3)

    def test_step_statistics_are_complete_and_in_order(self, tmp_path: Path) -> None:
        recording = Recording(Scenario())
        merged(recording, tmp_path)
        steps = read_lines_of(tmp_path / "step-stats.jsonl.part")
        stats = [step["scheduler"]["spec_decoding_stats"] for step in steps]
        assert len(steps) == recording.observed.steps
        assert sum(each["num_accepted_tokens"] for each in stats if each) == recording.observed.accepted
        assert [step["ts_ms"] for step in steps] == sorted(step["ts_ms"] for step in steps)
        assert steps[0]["duration_ms"] == 4.5
        assert steps[0]["scheduler"]["num_kv_fetch_reqs_by_stage"] == {}

    def test_empty_chunks_are_left_out(self, tmp_path: Path) -> None:
        recording = Recording(Scenario(requests=1))

        def with_empty(line: dict[str, Any]) -> dict[str, Any]:
            for name, value in (("chunk_s", line["chunk_s"][-1] + 1), ("chunk_tokens", 0)):
                line[name] = [*line[name], value]
            for name in ("num_running", "prefill_tokens"):
                line[name] = [*line[name], 0]
            return line

        recording.change("demo-closed-0", with_empty)
        merged(recording, tmp_path)
        (record,) = records(tmp_path)
        assert chunks(record) == recording.observed.chunks["demo-closed-0"]

    def test_request_without_tokens_is_written_to_aborted(self, tmp_path: Path) -> None:
        recording = Recording(Scenario(requests=2))
        none: dict[str, list[float]] = {"chunk_s": [], "chunk_tokens": [], "num_running": [], "prefill_tokens": []}
        recording.change("demo-closed-1", lambda line: line | none | {"ended_by": "abort", "finish_reason": "abort"})
        result = merged(recording, tmp_path)
        assert (result.records, result.aborted) == (1, 1)
        (aborted,) = read_lines_of(tmp_path / "aborted.jsonl.part")
        assert (aborted["request_id"], aborted["ended_by"], aborted["phase"]) == ("demo-closed-1", "abort", "closed")

    def test_request_unknown_to_client_is_kept_without_phase(self, tmp_path: Path) -> None:
        """Somebody else asked the engine meanwhile."""
        recording = Recording(Scenario(requests=2))
        recording.clients = [line for line in recording.clients if line["id"] != "demo-closed-1"]
        assert merged(recording, tmp_path).records == 2
        found = {record["request_id"]: record.get("phase") for record in records(tmp_path)}
        assert found == {"demo-closed-0": "closed", "demo-closed-1": None}

    @pytest.mark.parametrize("lost", ["requests", "steps"])
    def test_segment_with_fewer_lines_than_recorder_counted_is_refused(self, tmp_path: Path, lost: str) -> None:
        recording = Recording(Scenario())
        end = recording.segments[0][-1]
        end[lost] += 1
        with pytest.raises(CaptureError, match=f"its recorder wrote {end['requests']} and {end['steps']}") as failure:
            merged(recording, tmp_path)
        assert failure.value.reason == "SegmentIncomplete"

    def test_invalid_client_line_is_reported_with_its_number(self, tmp_path: Path) -> None:
        recording = Recording(Scenario(requests=2, warmup=0))
        recording.write(tmp_path)
        with (tmp_path / "client.jsonl.part").open("ab") as stream:
            stream.write(b'{"id": "x"}\n')
        with pytest.raises(CaptureError, match=r"client.jsonl.part, line 3: .*phase"):
            merge(tmp_path, META, ZERO_S)


class TestSeveralServersAndEngines:
    """Two API servers and two data-parallel ranks: only the union is complete."""

    def test_segments_of_all_servers_and_engines_are_merged(self, tmp_path: Path) -> None:
        recording = Recording(Scenario(requests=40, servers=2, engines=2))
        merged(recording, tmp_path)
        found = {record["request_id"]: chunks(record) for record in records(tmp_path)}
        assert found == {name: sizes for name, sizes in recording.observed.chunks.items() if "warmup" not in name}
        assert {record["engine"] for record in records(tmp_path)} == {0, 1}
        steps = read_lines_of(tmp_path / "step-stats.jsonl.part")
        assert len(steps) == recording.observed.steps
        assert validate_capture(tmp_path, []).problems == []

    def test_batch_context_covers_whole_engine(self, tmp_path: Path) -> None:
        recording = Recording(Scenario(requests=24, servers=2, engines=2))
        merged(recording, tmp_path)
        observed = recording.observed
        begin_s = ZERO_S + 10.0
        found = records(tmp_path)
        assert len(found) == 24
        for record in found:
            stamp_s = ZERO_S + (record["arrival_ms"] + record["ttft_ms"]) / 1000
            context = record["itl_ctx"]
            for gap_ms, running, prefill in zip(
                record["itl_ms"], context["num_running"], context["prefill_tokens"], strict=True
            ):
                stamp_s += gap_ms / 1000
                step = round((stamp_s - begin_s - record["engine"] * 0.0003) / 0.005)
                assert running == max(1, observed.running[record["engine"], step])
                assert prefill == observed.prefill[record["engine"], step]

    def test_batch_is_one_after_step_in_which_all_requests_end(self, tmp_path: Path) -> None:
        """A 0 of the statistics is a number, and no reason to ask the one API server that knows its own only."""
        recording = Recording(Scenario(requests=2, warmup=0, servers=2, output_tokens=12, k=0))
        merged(recording, tmp_path)
        assert [record["itl_ctx"]["num_running"][-1] for record in records(tmp_path)] == [1, 1]

    def test_concurrency_counts_requests_of_all_servers(self, tmp_path: Path) -> None:
        merged(Recording(Scenario(requests=8, warmup=0, servers=2)), tmp_path)
        in_flight = sorted(record["concurrency"] for record in records(tmp_path))
        assert in_flight == [1, 2, 3, 4, 5, 6, 7, 8]

    def test_request_without_tokens_does_not_count_as_concurrent(self, tmp_path: Path) -> None:
        recording = Recording(Scenario(requests=8, warmup=0, servers=2))
        none: dict[str, list[float]] = {"chunk_s": [], "chunk_tokens": [], "num_running": [], "prefill_tokens": []}
        recording.change("demo-closed-0", lambda line: line | none | {"ended_by": "abort", "finish_reason": "abort"})
        merged(recording, tmp_path)
        in_flight = sorted(record["concurrency"] for record in records(tmp_path))
        assert in_flight == [1, 2, 3, 4, 5, 6, 7], "when it ended is not known, so it counts for none that came later"

    def test_steps_without_statistics_are_counted(self, tmp_path: Path) -> None:
        recording = Recording(Scenario(servers=2))
        recording.segments[0][-1]["steps"] += 1
        recording.segments[0].insert(1, {"k": "step", "engine": 0, "t": ZERO_S, "scheduler": None})
        result = merged(recording, tmp_path)
        assert result.steps_without_stats == 1


class TestSeveralStarts:
    def test_segments_of_older_start_are_ignored(self, tmp_path: Path) -> None:
        recording = Recording(Scenario())
        recording.write(tmp_path)
        old = [header(boot="dead", pid=7, monotonic_s=ZERO_S - 100)]
        write_lines(tmp_path / "segments" / "segment-dead-7.jsonl", old)
        with (tmp_path / "segments" / "segment-dead-7.jsonl").open("ab") as stream:
            stream.write(b'{"k":"request","id":"cmpl-x')
        result = merge(tmp_path, META, ZERO_S)
        assert result.records == 12
        assert [(torn.path.name, torn.line) for torn in result.torn] == [("segment-dead-7.jsonl", 2)]


class TestRequestIds:
    @pytest.mark.parametrize(
        ("external", "expected"),
        [
            ("cmpl-demo-closed-16-7-0", "demo-closed-16-7"),
            ("cmpl-X-12", "X"),
            ("chatcmpl-demo-1", "demo-1"),
            ("something", "something"),
            ("cmpl-", "cmpl-"),
            ("cmpl-X", "cmpl-X"),
        ],
    )
    def test_client_id_is_derived_from_external_id(self, external: str, expected: str) -> None:
        assert client_id(external) == expected

    def test_several_answers_share_one_client_line(self, tmp_path: Path) -> None:
        recording = Recording(Scenario(requests=1, warmup=0))
        lines = recording.segments[0]
        place = next(index for index, line in enumerate(lines) if line["k"] == "request")
        # As vLLM 0.32 names them: the internal id differs in front, the external one is the same.
        lines[place] = lines[place] | {"id": "0_cmpl-demo-closed-0-0-1f2e3d4c"}
        lines.insert(place, lines[place] | {"id": "1_cmpl-demo-closed-0-0-1f2e3d4c"})
        lines[-1] = closed(2, lines[-1]["steps"])
        recording.clients[0] |= {"n": 2, "completion_tokens": 40}
        merged(recording, tmp_path)
        found = validate_capture(tmp_path, [])
        assert found.accounting is not None
        assert (found.accounting.sent, found.accounting.records, found.accounting.mismatches) == (1, 2, 0)


# Merging takes memory and room that do not grow with the capture.

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
    def test_scratch_database_sorts_in_bounded_memory(self, tmp_path: Path) -> None:
        """In a process of its own: what SQLite takes, only the system counts."""
        found = subprocess.run([sys.executable, "-c", SORTING, tmp_path], capture_output=True, text=True, check=True)
        peak_mib, rows = map(int, found.stdout.split())
        assert rows == 60_000
        assert peak_mib < 40, "60 MB were sorted"
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("link", [False, True])
    def test_scratch_file_of_killed_merge_is_replaced(self, tmp_path: Path, *, link: bool) -> None:
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

    def test_overwritten_scratch_database_is_an_io_error(self, tmp_path: Path) -> None:
        def overwrite() -> None:
            with scratch_database(tmp_path, "a") as database:
                (tmp_path / "a.scratch").write_bytes(b"no database" * 1000)
                database.execute("CREATE TABLE lines (line)")

        with pytest.raises(OSError, match=r"not a database.*a\.scratch") as failure:
            overwrite()
        assert failure.value.errno == errno.EIO
        assert list(tmp_path.iterdir()) == []

    def test_scratch_database_is_removed_once_merged(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        _write_many(tmp_path, 200)
        there: dict[str, set[str]] = {}

        def look_and_encode(line: msgspec.Struct) -> bytes:
            there.setdefault(type(line).__name__, set()).update(path.name for path in tmp_path.glob("*.scratch"))
            return encode(line)

        monkeypatch.setattr(merging, "encode", look_and_encode)
        merge(tmp_path, META, ZERO_S)
        assert there == {"TraceRecord": {"requests.scratch", "steps.scratch"}, "StepStats": {"steps.scratch"}}
        assert not list(tmp_path.glob("*.scratch*"))

    def test_full_volume_raises_enospc(self, tmp_path: Path) -> None:
        def fill() -> None:
            with scratch_database(tmp_path, "a") as database:
                database.execute("CREATE TABLE lines (line BLOB)")
                database.execute("PRAGMA max_page_count = 4")
                database.execute("INSERT INTO lines VALUES (zeroblob(100000))")

        with pytest.raises(OSError, match="full") as failure:
            fill()
        assert failure.value.errno == errno.ENOSPC
        assert list(tmp_path.iterdir()) == []

    def test_merge_and_validation_memory_does_not_grow_with_capture(self, tmp_path: Path) -> None:
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
