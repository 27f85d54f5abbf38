"""Segments that recorders write."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from specdecode_operator.capture.files import segments
from specdecode_operator.capture.files.formats import CaptureError
from specdecode_operator.capture.files.segments import (
    RecordedRequestCount,
    Torn,
    boots,
    current_start,
    first_header,
    list_segments,
    off_reason,
    read_segment,
    recorders_closed,
)
from specdecode_operator.capture.recorder.segment_format import Closed, Header, Request, Step, encode
from tests.support.recordings import Recording, Scenario, closed, header, write_lines


def write(folder: Path, boot: str, *lines: dict[str, Any]) -> Path:
    path = folder / f"segment-{boot}-1.jsonl"
    write_lines(path, list(lines))
    return path


class TestReading:
    def test_lines_are_decoded_by_kind(self, tmp_path: Path) -> None:
        Recording(Scenario(requests=3, warmup=0)).write_segments(tmp_path)
        (segment,) = list_segments(tmp_path)
        lines = list(read_segment(segment.path))
        assert isinstance(lines[0], Header)
        assert isinstance(lines[-1], Closed)
        assert sum(isinstance(line, Request) for line in lines) == 3
        assert any(isinstance(line, Step) for line in lines)

    @pytest.mark.parametrize("tail", [b'{"k":"request","id', b'{"k":"step"}\n', b"\x00\x00\x00"])
    def test_torn_last_line_is_skipped_and_reported(self, tmp_path: Path, tail: bytes) -> None:
        path = write(tmp_path, "a", header(), {"k": "anchor", "monotonic_s": 1.0, "wall_s": 2.0})
        path.write_bytes(path.read_bytes() + tail)
        torn: list[Torn] = []
        assert len(list(read_segment(path, torn.append))) == 2
        assert [(each.path, each.line, each.size_bytes) for each in torn] == [(path, 3, len(tail.strip()))]

    def test_complete_last_line_without_line_feed_is_kept(self, tmp_path: Path) -> None:
        path = write(tmp_path, "a", header(), closed(0, 0))
        path.write_bytes(path.read_bytes().rstrip(b"\n"))
        torn: list[Torn] = []
        assert isinstance(list(read_segment(path, torn.append))[-1], Closed)
        assert torn == []

    def test_invalid_line_before_end_is_an_error(self, tmp_path: Path) -> None:
        path = write(tmp_path, "a", header(), {"k": "step"}, closed(0, 0))
        with pytest.raises(CaptureError, match=r"segment-a-1\.jsonl, line 2") as failure:
            list(read_segment(path))
        assert failure.value.reason == "SegmentUnreadable"

    def test_unknown_fields_of_newer_recorder_are_ignored(self, tmp_path: Path) -> None:
        path = write(tmp_path, "a", header(later=1), closed(0, 0, later=2))
        assert len(list(read_segment(path))) == 2

    def test_header_accepts_null_settings(self, tmp_path: Path) -> None:
        config = dict.fromkeys(header()["config"])
        path = write(tmp_path, "a", header(config=config, model=None, gpu=None))
        assert first_header(path) is not None

    @pytest.mark.parametrize("field", ["schema", "recorder"])
    def test_header_requires_schema_and_recorder(self, tmp_path: Path, field: str) -> None:
        path = write(tmp_path, "a", {name: value for name, value in header().items() if name != field})
        with pytest.raises(CaptureError, match=rf"line 1: Object missing required field `{field}`"):
            first_header(path)

    def test_off_reason_is_read_from_segment(self, tmp_path: Path) -> None:
        path = write(tmp_path, "a", header(), {"k": "off", "reason": "new shape"}, closed(0, 0, reason="unknown_shape"))
        assert off_reason(path) == "new shape"
        assert off_reason(write(tmp_path, "b", header(), closed(0, 0))) is None


class TestStarts:
    def test_start_is_closed_once_all_api_servers_are(self, tmp_path: Path) -> None:
        write(tmp_path, "a", header(0, 2, boot="a"), closed(0, 0))
        assert not recorders_closed(tmp_path)
        write(tmp_path, "b", header(1, 2, boot="b"))
        assert not recorders_closed(tmp_path)
        write(tmp_path, "b", header(1, 2, boot="b"), closed(0, 0))
        assert recorders_closed(tmp_path)
        assert boots(current_start(tmp_path)) == {"a", "b"}

    def test_folder_without_segments_is_not_closed(self, tmp_path: Path) -> None:
        assert not recorders_closed(tmp_path)

    def test_newest_start_is_the_current_one(self, tmp_path: Path) -> None:
        write(tmp_path, "a", header(0, 2, boot="a", monotonic_s=1.0))
        write(tmp_path, "b", header(1, 2, boot="b", monotonic_s=1.1), closed(0, 0))
        # The servers of one start need not begin in the order of their indexes.
        write(tmp_path, "d", header(1, 2, boot="d", monotonic_s=50.0), closed(0, 0))
        write(tmp_path, "c", header(0, 2, boot="c", monotonic_s=50.1), closed(0, 0))
        assert boots(current_start(tmp_path)) == {"c", "d"}
        assert recorders_closed(tmp_path)

    @pytest.mark.parametrize("old_server", [0, 1])
    def test_incomplete_older_start_is_not_current(self, tmp_path: Path, old_server: int) -> None:
        """Its index is not there a second time when the next start begins."""
        write(tmp_path, "a", header(old_server, 2, boot="a", start="7-100", monotonic_s=1.0))
        write(tmp_path, "b", header(1, 2, boot="b", start="7-900", monotonic_s=50.0), closed(0, 0))
        assert not recorders_closed(tmp_path)
        write(tmp_path, "c", header(0, 2, boot="c", start="7-900", monotonic_s=50.1), closed(0, 0))
        assert boots(current_start(tmp_path)) == {"b", "c"}
        assert recorders_closed(tmp_path)

    def test_older_closed_start_is_ignored(self, tmp_path: Path) -> None:
        write(tmp_path, "a", header(boot="a", monotonic_s=1.0), closed(0, 0))
        assert recorders_closed(tmp_path)
        write(tmp_path, "b", header(boot="b", monotonic_s=2.0))
        assert not recorders_closed(tmp_path)


# Counting the requests that were recorded so far, while the segments grow.

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


def test_requests_of_all_segments_are_counted_once(tmp_path: Path) -> None:
    Recording(Scenario(requests=12, warmup=2, servers=2)).write_segments(tmp_path)
    counted = RecordedRequestCount(tmp_path)
    assert counted.count() == 14
    assert counted.count() == 14


def test_encoded_request_has_the_counted_prefix() -> None:
    assert REQUEST.startswith(segments._REQUEST)


@pytest.mark.parametrize("piece_bytes", [7, 2**20])
def test_request_line_is_counted_once_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
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
