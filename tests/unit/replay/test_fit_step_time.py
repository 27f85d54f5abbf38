"""Step times that are fitted to captures."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as changed

from specdecode_operator.capture.trace_reader import read_recording
from specdecode_operator.replay.emulated.engine_model import StepShape, StepTime, from_rates, step_time_from_json
from specdecode_operator.replay.fit_step_time import (
    MeasuredSteps,
    fit_step_time,
    persistence,
)
from specdecode_operator.replay.synthetic_load import Lengths
from tests.support.synthetic import Truth

REAL = Path(__file__).parents[2] / "data" / "captures"
KNOWN = StepTime(
    curve=((1, 8.0), (64, 8.0), (2048, 88.0)), request_us=50.0, context_ns=300.0, draft_ms=0.5, draft_request_us=20.0
)


def drawn_steps(
    seed: int = 1,
    k: tuple[int, ...] = (2, 4),
    noise: float = 0.05,
    late: float = 0.03,
    count: int = 3000,
    known: StepTime = KNOWN,
) -> MeasuredSteps:
    """Return steps of the known engine on a machine where some take up to five times as long."""
    random = np.random.default_rng(seed)
    requests = random.integers(1, 33, count).astype(float)
    drafted = random.choice(k, count).astype(float)
    prefill = np.where(random.random(count) < 0.2, random.integers(50, 1000, count), 0).astype(float)
    shapes = {
        "requests": requests,
        "scheduled_tokens": requests * (1 + drafted) + prefill,
        "prefill_tokens": prefill,
        "context_tokens": requests * random.integers(100, 3000, count),
        "prefill_pairs": prefill**2,
        "drafted": drafted,
    }
    true_ms = np.array([known.ms(StepShape(*row)) for row in zip(*shapes.values(), strict=True)])
    ms = true_ms * random.normal(1, noise, count)
    ms *= np.where(random.random(count) < late, random.uniform(2, 5, count), 1.0)
    return MeasuredSteps(**shapes, ms=ms, host_ms=np.full(count, 0.7))


def shapes_of(steps: MeasuredSteps) -> Any:
    return np.column_stack([getattr(steps, each.name) for each in fields(StepShape)])


def fitted(steps: MeasuredSteps, **more: Any) -> StepTime:
    section = fit_step_time(steps, **more)
    assert section is not None
    return step_time_from_json(section)


def ms_of(step_time: StepTime, **shape: int) -> float:
    return step_time.ms(
        StepShape(**{"requests": 8, "scheduled_tokens": 40, "drafted": 4, "context_tokens": 8000} | shape)
    )


@pytest.mark.parametrize("k", [(2, 6), (4,)], ids=["of two lengths", "of one"])
def test_one_pass_draft_time_is_fitted_and_forecast(k: tuple[int, ...]) -> None:
    """PARD, P-EAGLE, DFlash and DSpark: of one length the share of the draft is given, and another is forecast."""
    share = 0.25
    draft = {"draft_ms": share * 8.0, "draft_request_us": share * KNOWN.request_us}
    given = changed(KNOWN, one_pass=True, context_ns=0.0, **draft)
    steps = drawn_steps(k=k, noise=0.01, late=0.0, known=given)
    found = fitted(steps, one_pass=True, draft_share=share)
    assert found.one_pass
    for drafted in (1, 2, 4, 8):
        shape = {"drafted": drafted, "scheduled_tokens": 48, "context_tokens": 0}
        assert ms_of(found, **shape) == pytest.approx(ms_of(given, **shape), rel=0.04), drafted


def test_step_time_terms_are_recovered_despite_late_steps() -> None:
    # All of it is later by the mean of the late steps.
    mean_late = 1 + 0.03 * 2.5
    found = fitted(drawn_steps())
    for shape in (
        {},
        {"requests": 1, "scheduled_tokens": 5, "context_tokens": 500},
        {"requests": 64, "scheduled_tokens": 320, "context_tokens": 100_000},
        {"scheduled_tokens": 1040, "prefill_tokens": 1000},
        {"drafted": 7, "scheduled_tokens": 64},
    ):
        assert ms_of(found, **shape) == pytest.approx(mean_late * ms_of(KNOWN, **shape), rel=0.05)
    assert found.host_ms == pytest.approx(0.7)


def test_fit_of_one_k_takes_draft_time_from_given_share() -> None:
    known = StepTime(curve=((1, 10.0), (2048, 90.0)), draft_ms=1.0)
    steps = drawn_steps(k=(3,), noise=0.01, late=0.0)
    steps = replace(steps, ms=np.array([known.ms(StepShape(*row)) for row in shapes_of(steps)]))
    blind, told = fitted(steps), fitted(steps, draft_share=0.1)
    six: dict[str, int] = {"drafted": 6, "scheduled_tokens": 64}
    assert blind.draft_ms == 0
    assert ms_of(blind, **six) == pytest.approx(ms_of(known, **six) - 3, rel=0.01)
    assert ms_of(told, **six) == pytest.approx(ms_of(known, **six), rel=0.01)
    three: dict[str, int] = {"drafted": 3}
    assert ms_of(blind, **three) == pytest.approx(ms_of(told, **three), rel=3e-3)


def test_draft_pass_costs_its_share_for_one_token_per_request() -> None:
    """It takes its share of what the target takes for so many tokens, not of the constant part alone."""
    share, slope_ms = 0.1, 0.5
    steps = drawn_steps(k=(3,), noise=0.01, late=0.0)
    one_pass_ms = share * (10 + slope_ms * steps.requests)
    steps = replace(steps, ms=10 + slope_ms * steps.scheduled_tokens + 3 * one_pass_ms)
    told = fitted(steps, draft_share=share)
    ms = 10 + slope_ms * 32 * 7 + 6 * share * (10 + slope_ms * 32)
    assert ms_of(told, requests=32, drafted=6, scheduled_tokens=32 * 7, context_tokens=0) == pytest.approx(ms, rel=0.01)


def test_fit_of_many_steps_recovers_step_times() -> None:
    steps = drawn_steps(count=9000, late=0.0)
    found = fitted(steps)
    assert ms_of(found) == pytest.approx(ms_of(KNOWN), rel=0.02)
    assert ms_of(found, requests=64, scheduled_tokens=320) == pytest.approx(
        ms_of(KNOWN, requests=64, scheduled_tokens=320), rel=0.03
    )


def test_fitted_ranges_are_those_of_the_steps() -> None:
    found = fitted(drawn_steps())
    assert found.ranges["requests"] == (1, 32)
    assert found.outside(StepShape(64, 40, drafted=4, context_tokens=8000)) == {"requests": 2.0}


def test_too_few_steps_give_no_fit() -> None:
    assert fit_step_time(drawn_steps(count=49)) is None
    assert fit_step_time(MeasuredSteps.of([])) is None


def test_steps_of_capture_reproduce_known_step_times(tmp_path: Path) -> None:
    known = changed(KNOWN, draft_ms=0, draft_request_us=0)
    lengths = {"prompt_tokens": Lengths(50, 400), "output_tokens": Lengths(80, 80)}
    made = Truth(from_rates((0.7, 0.4)), known).make(tmp_path / "made", "closed:8", 100, **lengths)
    steps = MeasuredSteps.of([made.recording])
    known_ms = [known.ms(StepShape(*row)) for row in shapes_of(steps)]
    # Within what a chunk of a prompt, or the end of an answer, leaves unknown.
    assert np.abs(steps.ms / known_ms - 1).max() < 0.02
    assert np.median(np.abs(steps.ms / known_ms - 1)) < 2e-5


def test_fit_to_real_capture_forecasts_twice_the_load() -> None:
    steps = MeasuredSteps.of([read_recording(REAL / "draft_model")])
    few = steps.requests <= 4
    found = fitted(replace(steps, **{each.name: getattr(steps, each.name)[few] for each in fields(steps)}))
    decode = (steps.requests == 8) & (steps.prefill_tokens == 0)
    forecast_ms = np.median([found.ms(StepShape(*row)) for row in shapes_of(steps)[decode]]) * found.residuals[50]
    assert forecast_ms == pytest.approx(np.median(steps.ms[decode]), rel=0.15)


def test_persistence_of_step_times_is_recovered() -> None:
    random = np.random.default_rng(5)
    mood = [0.0]
    for _ in range(20_000):
        mood.append(0.9 * mood[-1] + float(random.normal(0, 0.19**0.5)))
    assert persistence(np.exp(0.2 * np.array(mood))) == pytest.approx(0.9, abs=0.02)
    assert persistence(random.normal(1, 0.1, 5000)) < 0.05
