"""How soon clients ask again, where a capture's load was a closed loop."""

from pathlib import Path
from statistics import median

import pytest

from specdecode_operator.capture.trace_reader import read_recording
from specdecode_operator.replay.fit import turnarounds_ms
from tests.support.synthetic import Truth

CAPTURE = Path(__file__).parents[3] / "data/captures/draft_model"


def test_clients_of_a_real_capture_ask_again_within_milliseconds() -> None:
    found = turnarounds_ms(read_recording(CAPTURE).requests)
    assert 20 < len(found) < 39
    assert 0.5 < median(found) < 20


@pytest.mark.parametrize(("arrivals", "known"), [("closed:5", True), ("poisson:8", False), ("constant:8", False)])
def test_only_a_closed_loop_has_clients_that_wait(tmp_path: Path, arrivals: str, known: bool) -> None:
    made = Truth().make(tmp_path / "made", arrivals, 60)
    found = turnarounds_ms(made.requests)
    assert bool(found) is known
    assert max(found, default=0.0) < 0.01


def test_nothing_is_known_of_no_arrivals() -> None:
    assert turnarounds_ms([]) == []
