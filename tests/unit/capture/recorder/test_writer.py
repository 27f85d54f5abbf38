"""Writer of the recorder."""

import errno
import itertools
import json
import os
import subprocess
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdecode_operator.capture.recorder import writer
from specdecode_operator.capture.recorder.collector import BoundedQueue, Collector, RequestSample, StepSample
from specdecode_operator.capture.recorder.salting import Salt
from specdecode_operator.capture.recorder.writer import (
    ANCHOR_EVERY_S,
    LIVE_ANCHOR_EVERY_S,
    RESERVE_BYTES,
    SYNC_EVERY_S,
    LiveLines,
    Segment,
    SegmentWriteError,
    Writer,
)
from tests.support.engine_standins import EngineCoreOutputs, EngineCoreRequest, chunk, last_chunk
from tests.unit.capture.conftest import HEADER, Recorder


async def test_close_writes_unfinished_requests_and_totals(recorder: Recorder) -> None:
    server = recorder.server
    for name in "abc":
        server.add(name)
    await server.step(last_chunk("a", 2), chunk("b", 3), running=2)
    recorder.writer.close("ordered")
    header, *_, anchor, closed = recorder.lines()
    assert (header.boot, header.vllm, header.config.block_size) == (HEADER.boot, HEADER.vllm, 4)
    assert anchor.wall_s > 1_700_000_000
    records = {line.id: line for line in recorder.lines("request")}
    assert [records[name].ended_by for name in "abc"] == ["engine", "unfinished", "unfinished"]
    assert (records["b"].chunk_tokens, records["b"].finish_reason) == ([3], None)
    assert (closed.reason, closed.requests, closed.steps, closed.dropped, closed.unfinished) == ("ordered", 3, 1, 0, 2)
    assert recorder.writer.is_closed


def test_close_records_end_of_message_in_progress(recorder: Recorder) -> None:
    recorder.server.add("a")
    recorder.collector.take(EngineCoreOutputs(0, [last_chunk("a", 2)], None, 1.0))
    recorder.writer.close("ordered")
    assert [line.ended_by for line in recorder.lines("request")] == ["engine"]


async def test_nothing_is_recorded_after_close(recorder: Recorder) -> None:
    recorder.writer.close("ordered")
    before = recorder.path.read_bytes()
    recorder.server.add("late")
    await recorder.server.step(last_chunk("late"))
    assert len(recorder.queue) == 0
    assert recorder.path.read_bytes() == before
    assert recorder.collector.errors == 0


async def test_lines_dropped_by_full_queue_are_counted(make_recorder: Any) -> None:
    recorder = make_recorder(capacity_bytes=8000)
    for number in range(4):
        recorder.server.add(f"r{number}")
        await recorder.server.step(last_chunk(f"r{number}"))
    recorder.writer.close("ordered")
    closed = recorder.lines()[-1]
    assert closed.requests + closed.steps == 8 - closed.dropped
    assert 1 < closed.dropped < 5


def test_queue_holds_exactly_its_capacity() -> None:
    step = StepSample(0, 0.0, None)
    queue = BoundedQueue(capacity_bytes=2 * step.size_bytes)
    for _ in range(3):
        queue.put(step)
    assert (len(queue), queue.dropped) == (2, 1)
    queue.get()
    queue.put(step)
    assert (len(queue), queue.dropped) == (2, 1)


async def test_queue_size_accounts_for_memory_of_long_prompts() -> None:
    """A disk that does not answer must not take the engine's memory: 65,536 prompts of 8,000 tokens had 20 GiB."""
    queue = BoundedQueue(capacity_bytes=2 * 2**20)
    tracemalloc.start()
    try:
        for number in range(60):
            prompt = [100_000 * number + token for token in range(8000)]
            queue.put(RequestSample(EngineCoreRequest(f"r{number}", prompt, None), 0.0, token_ids=False))
        held_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(queue) + queue.dropped == 60
    assert len(queue) > 20
    assert 0.8 * 2 * 2**20 < held_bytes < 1.2 * 2 * 2**20


async def test_anchors_are_written_at_their_interval(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock is read between two looks at the other one: the anchor lies in their middle."""
    seconds = itertools.count()
    clocks = {"monotonic": lambda: float(next(seconds)), "time": lambda: 1e9 + next(seconds)}
    monkeypatch.setattr(writer, "time", SimpleNamespace(**clocks, perf_counter=time.perf_counter, sleep=time.sleep))
    recorder.writer.turn()
    assert recorder.lines("anchor") == []
    for turn in range(1, 4):
        recorder.now_s[0] = turn * ANCHOR_EVERY_S
        recorder.writer.turn()
        recorder.writer.turn()
        assert len(recorder.lines("anchor")) == turn
    assert all(anchor.wall_s - anchor.monotonic_s == 1e9 for anchor in recorder.lines("anchor"))


def test_live_capture_reports_its_progress_with_each_anchor(tmp_path: Path) -> None:
    queue, now_s = BoundedQueue(capacity_bytes=2**20), [0.0]
    live = LiveLines(Salt(b"key"), False, ending=lambda _: [], so_far=lambda: (3, 1))
    collector = Collector(queue, token_ids=False, steps=True)
    path = tmp_path / "segment.jsonl"
    written = Writer(Segment(path), collector, queue, 16, clock=lambda: now_s[0], live=live)
    for turn in range(1, 4):
        now_s[0] = turn * LIVE_ANCHOR_EVERY_S
        written.turn()
        anchors = [json.loads(line) for line in path.read_bytes().splitlines()]
        assert [(each["admitted"], each["sampled_out"]) for each in anchors] == [(3, 1)] * turn
    written.close("ordered")


async def test_file_is_synced_at_interval_and_at_close(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    recorder.writer.turn()
    assert synced == []
    recorder.now_s[0] = SYNC_EVERY_S
    recorder.writer.turn()
    recorder.writer.turn()
    assert len(synced) == 1
    recorder.writer.close("ordered")
    assert len(synced) == 2


class SmallDisk:
    """Stands before os.write: takes so many bytes, then half a line, then none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int, code: int = errno.ENOSPC) -> None:
        self.room, self._code = room, code
        self._write, self._truncate, self._unlink = os.write, os.ftruncate, Path.unlink
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(Path, "unlink", lambda path, **_: self._free(path))

    def write(self, file: int, data: Any) -> int:
        if not self.room:
            raise OSError(self._code, os.strerror(self._code))
        written = self._write(file, data[: self.room])
        self.room -= written
        return written

    def truncate_and_heal(self, file: int, length: int) -> None:
        self._truncate(file, length)
        self.room = 10_000

    def _free(self, path: Path) -> None:
        self.room += path.stat().st_size
        self._unlink(path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
async def test_full_disk_closes_segment_after_last_complete_line(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    SmallDisk(monkeypatch, 2500, code)
    for number in range(20):
        recorder.server.add(f"r{number}")
        await recorder.server.step(last_chunk(f"r{number}"))
        if number % 3 == 0:
            recorder.writer.turn()
    recorder.server.add("unfinished")
    closed = recorder.lines()[-1]
    assert closed.reason == "disk_full"
    assert closed.requests == len(recorder.lines("request")) > 2
    assert closed.steps == len(recorder.lines("step"))
    assert closed.dropped > 0
    assert recorder.writer.is_closed
    assert not list(recorder.path.parent.glob("*.reserve"))


async def test_full_disk_at_close_is_disk_full(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder.server.add("a")
    recorder.server.add("b")
    await recorder.server.step(last_chunk("a"), running=None)
    SmallDisk(monkeypatch, 500)
    recorder.writer.close("ordered")
    closed = recorder.lines()[-1]
    assert (closed.reason, closed.requests, closed.unfinished, closed.dropped) == ("disk_full", 1, 1, 1)


async def test_io_error_closes_segment_with_write_error(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder.server.add("a")
    await recorder.server.step(last_chunk("a"))
    disk = SmallDisk(monkeypatch, 100, errno.EIO)  # half a line
    monkeypatch.setattr(os, "ftruncate", disk.truncate_and_heal)
    recorder.writer.turn()
    *_, off, closed = recorder.lines()
    assert off.reason.startswith("[Errno 5]")
    assert (closed.reason, closed.dropped) == ("write_error", 2)


async def test_persistent_io_error_leaves_segment_unchanged(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "broken")

    before = recorder.path.read_bytes()
    monkeypatch.setattr(os, "write", fail)
    recorder.server.add("a")
    await recorder.server.step(last_chunk("a"))
    recorder.writer.turn()
    assert recorder.writer.is_closed
    assert recorder.path.read_bytes() == before


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "volume"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={16 * RESERVE_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small tmpfs can be mounted by root alone")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_segment_on_full_tmpfs_keeps_written_lines(small_volume: Path) -> None:
    segment = Segment(small_volume / "segment-1.jsonl")
    line = b"x" * 999 + b"\n"
    written = 0
    try:
        for _ in range(1000):
            segment.append([line] * 3)
            written += 3
    except SegmentWriteError as error:
        written += error.written
    segment.close([b"last\n"])
    assert segment.path.read_bytes() == line * written + b"last\n"
    assert written * 1000 > 14 * RESERVE_BYTES
    assert [path.name for path in small_volume.iterdir()] == ["segment-1.jsonl"]


def test_existing_segment_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "segment-1.jsonl"
    path.write_text("precious\n")
    with pytest.raises(FileExistsError):
        Segment(path)
    assert path.read_text() == "precious\n"


def test_other_users_can_read_a_segment(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        segment = Segment(tmp_path / "segment-1.jsonl")
    finally:
        os.umask(before)
    assert segment.path.stat().st_mode & 0o777 == 0o644
    segment.close([])
