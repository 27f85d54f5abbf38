"""Counting the requests that were recorded so far, while the segments grow."""

from pathlib import Path

import msgspec
import pytest

from specdecode_operator.capture.files import segments
from specdecode_operator.capture.files.segments import RecordedRequestCount
from specdecode_operator.capture.recorder.segment_format import Request, encode
from tests.support.recordings import Recording, Scenario

REQUEST = encode(
    Request(
        id="cmpl-a-0-1",
        external_id="cmpl-a-0",
        engine=0,
        arrival_monotonic_s=1.0,
        arrival_wall_s=2.0,
        prompt_tokens=3,
        concurrency=1,
        temperature=0.0,
        queued_s=None,
        scheduled_s=None,
        preemptions=0,
        cached_tokens=0,
        chunk_s=[1.5],
        chunk_tokens=[2],
        num_running=[1],
        prefill_tokens=[3],
        block_hashes=[],
        finish_reason="length",
        stop_reason=None,
        ended_by="engine",
    )
)


def test_before_the_engine_there_are_none(tmp_path: Path) -> None:
    assert RecordedRequestCount(tmp_path / "segments").count() == 0


def test_requests_of_all_segments_are_counted_once(tmp_path: Path) -> None:
    Recording(Scenario(requests=12, warmup=2, servers=2)).write_segments(tmp_path)
    counted = RecordedRequestCount(tmp_path)
    assert counted.count() == 14
    assert counted.count() == 14


def test_the_recorder_writes_lines_as_they_are_counted() -> None:
    assert REQUEST.startswith(segments._REQUEST)


@pytest.mark.parametrize("piece_bytes", [7, 2**20])
def test_a_line_counts_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    monkeypatch.setattr(segments, "_PIECE_BYTES", piece_bytes)
    step = msgspec.json.encode({"k": "step", "engine": 0, "t": 1.0, "scheduler": {"x": '{"k":"request",'}}) + b"\n"
    path = tmp_path / "segment-a-1.jsonl"
    counted = RecordedRequestCount(tmp_path)
    path.write_bytes(step + REQUEST + REQUEST[:9])
    assert counted.count() == 1
    with path.open("ab") as stream:
        stream.write(REQUEST[9:-1])
    assert counted.count() == 1
    with path.open("ab") as stream:
        stream.write(b"\n" + step)
    assert counted.count() == 2
