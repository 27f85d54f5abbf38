"""Figures of the report, as they are before anybody writes them: what is in sight."""

from pathlib import Path

from specdecode_operator.pictures.figures.drawing import Picture, series_of
from specdecode_operator.pictures.figures.latency import by_load
from specdecode_operator.pictures.seen.capture import read_capture
from tests.support.drawn_captures import META
from tests.support.traces import record, write_trace


def test_quantiles_that_lie_close_together_have_room_above(tmp_path: Path) -> None:
    records = [
        record(output_tokens=3, itl_tokens=[1, 1], itl_ms=[10 + place / 10] * 2, ttft_ms=50.0, phase="only")
        for place in range(9)
    ]
    write_trace(tmp_path / "trace.jsonl", records, META)
    picture = by_load(series_of([read_capture(tmp_path)]))
    assert isinstance(picture, Picture)
    for axes in picture.figure.axes:
        highest = max(float(value) for line in axes.lines for value in line.get_ydata())
        assert axes.get_ylim() == (0, 1.05 * highest)
