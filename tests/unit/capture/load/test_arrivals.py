"""Arrivals and settings of a load."""

import json
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_operator.api.capture import CaptureWorkload, Pattern, Phase
from specdecode_operator.capture.load.arrivals import (
    arrival_offsets_s,
    phase_duration_s,
    phase_requests,
)
from specdecode_operator.capture.load.run_settings import InvalidSettingsError, read_settings


def _phase(pattern: Pattern, **fields: Any) -> Phase:
    return Phase(name="p", pattern=pattern, **fields)


RATES = st.integers(10, 50_000).map(lambda thousandths: f"{thousandths / 1000:.3f}".rstrip("0").rstrip("."))
SECONDS = st.integers(1, 60)
ENDS = st.one_of(
    st.builds(lambda seconds: {"duration_seconds": seconds}, SECONDS),
    st.builds(lambda count: {"requests": count}, st.integers(1, 400)),
)
EXACT_PHASES = st.one_of(
    st.builds(lambda rate, end: _phase(Pattern.CONSTANT, requests_per_second=rate, **end), RATES, ENDS),
    st.builds(
        lambda size, interval, end: _phase(Pattern.BURST, burst_size=size, burst_interval_seconds=interval, **end),
        st.integers(1, 40),
        SECONDS,
        ENDS,
    ),
    st.builds(
        lambda rate, width, rise, end: _phase(
            Pattern.STAIRCASE,
            requests_per_second=rate,
            step_seconds=width,
            step_requests_per_second=rise,
            **end,
        ),
        RATES,
        SECONDS,
        RATES,
        ENDS,
    ),
)


@given(phase=EXACT_PHASES)
@settings(deadline=None, max_examples=150)
def test_arrivals_match_expected_requests_and_duration(phase: Phase) -> None:
    offsets = list(arrival_offsets_s(phase, seed=1))
    assert len(offsets) == phase_requests(phase)
    assert offsets[0] == 0
    assert all(earlier <= later for earlier, later in pairwise(offsets))
    if phase.duration_seconds is None:
        assert offsets[-1] == phase_duration_s(phase)
    else:
        assert offsets[-1] <= float(phase.duration_seconds)


@given(rate=RATES, count=st.integers(1, 3000))
@settings(deadline=None, max_examples=50)
def test_a_constant_rate_does_not_drift(rate: str, count: int) -> None:
    phase = _phase(Pattern.CONSTANT, requests_per_second=rate, requests=count)
    *_, last = arrival_offsets_s(phase, seed=1)
    # Each time is the nearest number to the true one, however many came before.
    assert last == float((count - 1) / Fraction(rate))


def test_burst_requests_arrive_together_at_even_intervals() -> None:
    phase = _phase(Pattern.BURST, burst_size=3, burst_interval_seconds=10, duration_seconds=25)
    assert list(arrival_offsets_s(phase, seed=1)) == [0, 0, 0, 10, 10, 10, 20, 20, 20]


def test_a_staircase_rises_step_by_step() -> None:
    phase = _phase(
        Pattern.STAIRCASE,
        requests_per_second="1",
        step_seconds=2,
        step_requests_per_second="1",
        duration_seconds=6,
    )
    third = [4 + number / 3 for number in range(6)]
    assert list(arrival_offsets_s(phase, seed=1)) == pytest.approx([0, 1, 2, 2.5, 3, 3.5, *third])


def test_duration_of_a_staircase_with_many_steps() -> None:
    slow = {"requestsPerSecond": "0.001", "stepRequestsPerSecond": "0.001", "stepSeconds": 1, "requests": 10_000_000}
    # The sum of n steps is n * (n + 1) / 2 thousandths: 141,421 steps for the last request.
    assert phase_duration_s(Phase.parse({"name": "stairs", "pattern": "Staircase", **slow})) == pytest.approx(
        141_420.85
    )


def test_staircase_carries_partial_request_over_rate_change() -> None:
    """A request that is half due at the end of a step comes when the next step has made it whole."""
    phase = _phase(
        Pattern.STAIRCASE,
        requests_per_second="0.5",
        step_seconds=1,
        step_requests_per_second="0.5",
        requests=4,
    )
    # 0.5 due after 1 s, 1.5 after 2 s, 3 after 3 s, 5 after 4 s.
    assert list(arrival_offsets_s(phase, seed=1)) == pytest.approx([0, 1.5, 2 + 1 / 3, 3])


def _poisson(name: str = "p") -> Phase:
    return Phase(pattern=Pattern.POISSON, name=name, requests_per_second="20", duration_seconds=500)


def test_poisson_arrivals_depend_on_seed_and_phase_name() -> None:
    offsets = list(arrival_offsets_s(_poisson(), seed=1))
    assert offsets == list(arrival_offsets_s(_poisson(), seed=1))
    assert offsets != list(arrival_offsets_s(_poisson(), seed=2))
    assert offsets != list(arrival_offsets_s(_poisson("q"), seed=1))


def test_poisson_gaps_have_expected_mean_and_spread() -> None:
    offsets = list(arrival_offsets_s(_poisson(), seed=1))
    gaps = [later - earlier for earlier, later in pairwise(offsets)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    # 10,000 gaps: mean and spread are known to about one percent.
    assert mean == pytest.approx(1 / 20, rel=0.05)
    assert spread == pytest.approx(mean, rel=0.05)
    assert phase_requests(_poisson()) == 10_000
    assert max(offsets) < 500


# The settings of a run: what is read, and what is refused with field, value and fix.

CLOSED = {"name": "a", "pattern": "Closed", "concurrency": 2, "requests": 5}
SETTINGS = {
    "namespace": "demo",
    "capture": "first",
    "seed": 7,
    "engine": {"url": "http://127.0.0.1:8000", "model": "demo", "max_model_len": 4096, "vocab_size": 32000},
    "workload": {"phases": [CLOSED]},
    "record": {"tokenIds": True, "stepStats": False},
    "deadline_seconds": 3600,
    "context": {"image": "engine:1"},
}


def test_all_settings_are_read() -> None:
    settings = read_settings(json.dumps(SETTINGS))
    assert (settings.namespace, settings.capture, settings.seed) == ("demo", "first", 7)
    assert (settings.root, settings.deadline_seconds) == ("/capture", 3600)
    assert settings.engine.vocab_size == 32000
    assert settings.engine.api_key_variable is None
    assert settings.workload.phases == [Phase(name="a", pattern=Pattern.CLOSED, concurrency=2, requests=5)]


def test_missing_workload_settings_have_api_defaults() -> None:
    written = CaptureWorkload().model_dump(mode="json", by_alias=True, exclude_none=True)
    for workload in ({}, written):
        assert read_settings(json.dumps({**SETTINGS, "workload": workload})).workload == CaptureWorkload()


def _engine(**fields: Any) -> dict[str, Any]:
    return {"engine": {**SETTINGS["engine"], **fields}}


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"seed": "x"}, "SPECDECODE_CAPTURE.seed: x: Input should be a valid integer"),
        ({"seed": "7"}, "SPECDECODE_CAPTURE.seed: 7: Input should be a valid integer"),
        (_engine(url="ftp://a:1"), "SPECDECODE_CAPTURE.engine.url: ftp://a:1: String should match pattern"),
        (_engine(vocab_size=1), "SPECDECODE_CAPTURE.engine.vocab_size: 1: Input should be greater"),
        (
            {"workload": {"phases": [{**CLOSED, "concurrency": 0}]}},
            "SPECDECODE_CAPTURE.workload.phases.0.concurrency: 0: Input should be greater",
        ),
        ({"workload": {"phasen": []}}, "SPECDECODE_CAPTURE.workload.phasen: []: Extra inputs are not permitted"),
    ],
)
def test_bad_settings_are_refused(changed: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidSettingsError) as refused:
        read_settings(json.dumps({**SETTINGS, **changed}))
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    ("text", "complaint"), [("{", "Invalid JSON"), ("[]", "should be an object"), ("", "Invalid JSON")]
)
def test_invalid_settings_document_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(InvalidSettingsError, match="SPECDECODE_CAPTURE: ") as refused:
        read_settings(text)
    assert complaint in str(refused.value)
