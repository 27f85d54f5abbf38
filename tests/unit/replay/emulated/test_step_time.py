"""How long a step takes, by what is in it."""

from random import Random
from statistics import mean, pstdev
from typing import Any

import pytest

from specdecode_operator.replay.emulated.engine_model import Paces, StepShape, StepTime, step_time_from_json

SECTION: dict[str, Any] = {
    "curve": [[1, 8.0], [101, 9.0], [1101, 29.0]],
    "request_us": 20,
    "prefill_token_us": 5,
    "context_ns": 100,
    "prefill_pair_ps": 10,
    "draft_ms": 0.5,
    "draft_request_us": 10,
}


@pytest.mark.parametrize(
    ("tokens", "ms"), [(1, 8.0), (0, 8.0), (51, 8.5), (101, 9.0), (601, 19.0), (1101, 29.0), (2101, 49.0)]
)
def test_scheduled_tokens_follow_the_curve(tokens: int, ms: float) -> None:
    model = StepTime(SECTION["curve"])
    assert model.ms(StepShape(1, tokens)) == pytest.approx(ms)


def test_one_point_is_a_constant() -> None:
    assert StepTime([(1, 8.0)]).ms(StepShape(64, 320)) == 8.0


def test_every_term_has_its_unit() -> None:
    model = step_time_from_json(SECTION)
    step = StepShape(10, 101, prefill_tokens=40, context_tokens=10_000, prefill_pairs=1_000_000, drafted=4)
    assert model.ms(step) == pytest.approx(9.0 + 0.2 + 0.2 + 1.0 + 0.01 + 4 * 0.5 + 4 * 10 * 0.010)


def test_residuals_spread_around_the_model() -> None:
    model = step_time_from_json({"curve": [[1, 10.0]], "residuals": [0.5, 1.0, 1.5]})
    paces = Paces(model, Random(0))
    drawn = sorted(paces.draw_ms(StepShape(1, 1)) for _ in range(4000))
    assert 5.0 <= drawn[0] < 5.1
    assert 14.9 < drawn[-1] <= 15.0
    assert drawn[2000] == pytest.approx(10.0, abs=0.3)
    assert drawn[1000] == pytest.approx(7.5, abs=0.3)


def test_what_was_not_fitted_on_is_told_with_how_far() -> None:
    model = step_time_from_json(SECTION | {"ranges": {"requests": [4, 64], "drafted": [4, 4]}})
    assert model.outside(StepShape(64, 320, drafted=4)) == {}
    assert model.outside(StepShape(128, 640, drafted=2)) == {"requests": 2.0, "drafted": 0.5}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"curve": []}, "step_time.curve"),
        ({"curve": [[2, 8.0], [1, 9.0]]}, "must ascend"),
        ({"curve": [[1, -8.0]]}, "step_time.curve: a number of 0 or more"),
        ({"curve": [[1, 8.0, 9.0]]}, "step_time.curve: pairs"),
        ({"request_us": "20"}, "step_time.request_us"),
        ({"request_us": float("nan")}, "step_time.request_us"),
        ({"base_ms": 8}, "unknown: base_ms"),
        ({"ranges": {"requests": 64}}, "step_time.ranges.requests"),
        ({"ranges": {"tokens": [1, 2]}}, "step_time.ranges"),
    ],
)
def test_a_wrong_section_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        step_time_from_json(SECTION | change)


def test_a_slow_step_tells_of_others() -> None:
    step, spread = StepShape(1, 1), [0.5, 1.0, 1.5]
    means = {}
    for persistence in (0.0, 0.9):
        paces = Paces(StepTime([(1, 10.0)], residuals=spread, persistence=persistence), Random(3))
        hundreds = [mean(paces.draw_ms(step) for _ in range(100)) for _ in range(200)]
        means[persistence] = mean(hundreds), pstdev(hundreds)
    # Of an autoregressive series: by (1 + r) / (1 - r) more variance of long means, about.
    assert means[0.9][1] / means[0.0][1] == pytest.approx((1.9 / 0.1) ** 0.5, rel=0.2)
    assert means[0.9][0] == pytest.approx(10, rel=0.03)


def test_moods_that_never_end_are_refused() -> None:
    with pytest.raises(ValueError, match="a number below 1 is needed, not 1"):
        step_time_from_json({"curve": [[1, 10.0]], "persistence": 1})
