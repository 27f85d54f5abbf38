"""Models that are fitted to captures."""

import gzip
import json
import shutil
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

import msgspec
import numpy as np
import pytest

from specdecode_operator.capture.files.formats import TraceMeta
from specdecode_operator.capture.trace_reader import RecordedRequest, Recording, read_recording
from specdecode_operator.replay.emulated.engine_model import (
    Acceptance,
    Difficulty,
    Drafting,
    StepShape,
    acceptance_from_json,
    from_rates,
    step_time_from_json,
)
from specdecode_operator.replay.fit import fit, fit_acceptance, turnarounds_ms
from specdecode_operator.replay.fit_step_time import MeasuredSteps
from specdecode_operator.replay.synthetic_load import Lengths
from tests.support.synthetic import Truth, forecast, rates

REAL = Path(__file__).parents[2] / "data" / "captures"
OUTCOMES = [(2, 0), (2, 1), (2, 2)]
HARD, EASY = (0.7, 0.2, 0.1), (0.1, 0.1, 0.8)


def drawn(acceptance: Acceptance, requests: int, output_tokens: int, temperature: float | None = 0.0) -> Recording:
    """Return requests whose drafts fared as the acceptance says, each cut where its answer ends."""
    random = Random(7)
    made = []
    for _ in range(requests):
        difficulty = acceptance.draw_class(temperature, random)
        drafting, chunks = Drafting(acceptance, difficulty, random), [1]
        while sum(chunks) < output_tokens:
            _, accepted = drafting.next(acceptance.num_speculative_tokens)
            chunks.append(min(accepted + 1, output_tokens - sum(chunks)))
        made.append(
            RecordedRequest(
                arrival_ms=0.0,
                prompt_tokens=10,
                cached_tokens=0,
                ttft_ms=1.0,
                chunk_tokens=array("I", chunks),
                gaps_ms=array("d", [1.0] * (len(chunks) - 1)),
                temperature=temperature,
            )
        )
    return recording(made)


def recording(requests: Sequence[RecordedRequest], k: int = 2) -> Recording:
    meta = TraceMeta(speculative={"method": "eagle3", "num_speculative_tokens": k})
    return Recording(trace=Path("trace.jsonl"), steps=None, meta=meta, requests=requests)


def section(*recordings: Recording) -> dict[str, Any]:
    found = fit_acceptance(recordings)
    assert found is not None
    return found


def tokens_per_step(requests: Sequence[RecordedRequest]) -> "list[float]":
    return [(each.output_tokens - 1) / len(each.gaps_ms) for each in requests]


def mean_burst(recording: Recording) -> float:
    bursts = sum(len(each.gaps_ms) for each in recording.requests)
    return sum(each.output_tokens - 1 for each in recording.requests) / bursts


def test_easy_and_hard_requests_get_separate_classes() -> None:
    known = Acceptance(2, OUTCOMES, [Difficulty(0.7, HARD), Difficulty(0.3, EASY)])
    real = drawn(known, 300, 200)
    found = section(real)
    assert sorted(each["share"] for each in found["classes"]) == pytest.approx([0.3, 0.7], abs=0.06)
    by_share = sorted(found["classes"], key=lambda each: each["share"])
    assert by_share[0]["outcomes"] == pytest.approx(EASY, abs=0.02)
    assert by_share[1]["outcomes"] == pytest.approx(HARD, abs=0.02)
    again = drawn(acceptance_from_json(found), 300, 200)
    deciles = range(10, 100, 10)
    assert np.percentile(tokens_per_step(again.requests), deciles) == pytest.approx(
        np.percentile(tokens_per_step(real.requests), deciles), rel=0.06
    )


def test_similar_requests_form_one_class() -> None:
    found = section(drawn(from_rates((0.7, 0.5)), 200, 200))
    assert len(found["classes"]) == 1
    assert "after" not in found["classes"][0]
    # No bias of answers that end in the middle of a draft.
    assert rates(acceptance_from_json(found)) == pytest.approx((0.7, 0.5), abs=0.01)


def test_short_answers_do_not_bias_acceptance_rates() -> None:
    found = section(drawn(from_rates((0.7, 0.5)), 3000, 12))
    assert rates(acceptance_from_json(found)) == pytest.approx((0.7, 0.5), abs=0.015)


def test_small_capture_is_fitted_with_one_class() -> None:
    known = Acceptance(2, OUTCOMES, [Difficulty(0.5, (0.45, 0.3, 0.25)), Difficulty(0.5, (0.35, 0.3, 0.35))])
    assert len(section(drawn(known, 6, 60))["classes"]) == 1


def test_dependence_on_previous_outcome_is_fitted() -> None:
    after = ((0.8, 0.1, 0.1), (0.5, 0.25, 0.25), (0.1, 0.1, 0.8))
    known = Acceptance(2, OUTCOMES, [Difficulty(1.0, (0.4, 0.2, 0.4), after)])
    found = section(drawn(known, 200, 200))
    assert len(found["classes"]) == 1
    assert np.array(found["classes"][0]["after"]) == pytest.approx(np.array(after), abs=0.03)


def test_temperatures_have_their_own_classes() -> None:
    cold, hot = from_rates((0.9, 0.8)), from_rates((0.3, 0.1))
    found = section(drawn(cold, 50, 100, 0.0), drawn(hot, 50, 100, 1.0))
    assert [(each["temperature"], each["share"]) for each in found["classes"]] == [(0.0, 0.5), (1.0, 0.5)]
    made = acceptance_from_json(found)
    assert tokens_per_step(drawn(made, 1, 3000, 0.9).requests) == pytest.approx([1.4], abs=0.1)
    # Too few of one temperature are taken together with the others.
    assert [
        each.get("temperature") for each in section(drawn(cold, 50, 100, 0.0), drawn(hot, 1, 9, 1.0))["classes"]
    ] == [None]


def test_share_of_steps_with_drafts_is_fitted(tmp_path: Path) -> None:
    made = Truth(from_rates((0.6, 0.4, 0.3), drafting=0.4)).make(tmp_path / "made", "closed:8", 200)
    found = section(made.recording)
    drafting = sum(
        chance
        for each in found["classes"]
        for (drafted, _), chance in zip(found["outcomes"], each["outcomes"], strict=True)
        if drafted
    )
    assert drafting / len(found["classes"]) == pytest.approx(0.4, abs=0.02)
    assert rates(acceptance_from_json(found)) == pytest.approx((0.6, 0.4, 0.3), abs=0.03)


def test_capture_without_speculation_has_no_acceptance_section() -> None:
    request = drawn(from_rates((0.0, 0.0)), 5, 100).requests[0]
    assert fit_acceptance([recording([request], k=0)]) is None
    assert fit_acceptance([]) is None
    assert fit_acceptance([recording([])]) is None


def test_capture_with_k_of_65_has_no_acceptance_section() -> None:
    assert fit_acceptance([recording(drawn(from_rates((0.7, 0.5)), 20, 100).requests, k=65)]) is None


def test_large_captures_are_fitted_on_a_sample_of_requests() -> None:
    found = section(drawn(from_rates((0.7, 0.5)), 5000, 30))
    assert rates(acceptance_from_json(found)) == pytest.approx((0.7, 0.5), abs=0.02)
    assert found["ranges"]["requests"] <= 2000


@pytest.mark.parametrize("name", ["draft_model", "ngram"])
def test_fit_to_real_capture_reproduces_tokens_per_step(name: str) -> None:
    real = read_recording(REAL / name)
    found = acceptance_from_json(section(real))
    again = drawn(found, 200, 200, 0.0)
    assert mean_burst(again) == pytest.approx(mean_burst(real), rel=0.04)


def of_passages(k: int, requests: int = 200, output_tokens: int = 300) -> Recording:
    """Return requests whose tokens are easy or hard to guess in passages: what a longer draft gets more of at once."""
    random = Random(9)
    made = []
    for _ in range(requests):
        chunks, easy = [1], True
        while sum(chunks) < output_tokens:
            accepted, guessed = 0, True
            while guessed and accepted < k:
                easy = easy if random.random() < 0.9 else not easy
                guessed = random.random() < (0.95 if easy else 0.3)
                accepted += guessed
            chunks.append(min(accepted + 1, output_tokens - sum(chunks)))
        made.append(replace(drawn(from_rates((0.0,)), 1, 2).requests[0], chunk_tokens=array("I", chunks)))
    return recording([replace(each, gaps_ms=array("d", [1.0] * (len(each.chunk_tokens) - 1))) for each in made], k)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_acceptance_is_forecast_for_another_k(width: int) -> None:
    found = acceptance_from_json(section(of_passages(3)))
    drafting = Drafting(found, found.classes[0], Random(1))
    tokens = sum(drafting.next(width)[1] + 1 for _ in range(20_000))
    assert len(found.classes) == 1
    assert tokens / 20_000 == pytest.approx(mean_burst(of_passages(width, 20, 3000)), rel=0.03)


def test_turnaround_of_real_closed_loop_is_a_few_milliseconds() -> None:
    found = turnarounds_ms(read_recording(REAL / "draft_model").requests)
    assert 20 < len(found) < 39
    assert 0.5 < median(found) < 20


@pytest.mark.parametrize(("arrivals", "known"), [("closed:5", True), ("poisson:8", False), ("constant:8", False)])
def test_only_closed_loops_have_turnaround_times(tmp_path: Path, arrivals: str, known: bool) -> None:
    made = Truth().make(tmp_path / "made", arrivals, 60)
    found = turnarounds_ms(made.requests)
    assert bool(found) is known
    assert max(found, default=0.0) < 0.01


def test_no_requests_have_no_turnaround_times() -> None:
    assert turnarounds_ms([]) == []


def bursts(requests: list[RecordedRequest]) -> dict[int, float]:
    counts = Counter(tokens for each in requests for tokens in each.chunk_tokens[1:-1])
    return {size: 100 * count / counts.total() for size, count in counts.items()}


def test_model_of_draft_model_capture_reproduces_gaps_and_bursts(tmp_path: Path) -> None:
    recording = read_recording(REAL / "draft_model")
    model = fit([recording])
    assert model.origin.limits.max_num_batched_tokens == 2048
    assert model.donors is not None
    assert model.donors.drafts.singles == 1.0
    assert model.origin.limits.draft_slots == 1
    for phase, clients in (("closed-4", 4), ("closed-8", 8)):
        real = [each for each in recording.requests if each.phase == phase]
        lengths = {"prompt_tokens": Lengths(96, 96), "output_tokens": Lengths(200, 200)}
        told = forecast(tmp_path / phase, model, f"closed:{clients}", 300, **lengths).requests
        gaps = [[gap for each in requests for gap in each.gaps_ms] for requests in (real, told)]
        assert median(gaps[1]) == pytest.approx(median(gaps[0]), rel=0.05)
        tpot = [mean(sum(each.gaps_ms) / (each.output_tokens - 1) for each in requests) for requests in (real, told)]
        assert tpot[1] == pytest.approx(tpot[0], rel=0.06)
    played, was = bursts(told), bursts(list(recording.requests))
    assert played == pytest.approx(was, abs=2.5)


def test_model_of_ngram_capture_has_draft_frequency_and_k() -> None:
    model = fit([read_recording(REAL / "ngram")])
    assert model.donors is not None
    assert 0 < model.donors.drafts.singles < 0.5
    assert model.origin.limits.draft_slots == 0
    assert model.donors.num_speculative_tokens == 4


@pytest.mark.parametrize(
    "said",
    [
        {"method": ["ngram"], "num_speculative_tokens": 4},
        {"method": {}, "num_speculative_tokens": 4},
        {"method": "ngram", "num_speculative_tokens": True},
        {"method": "xyzzy", "num_speculative_tokens": 4},
    ],
    ids=str,
)
def test_unknown_speculation_in_trace_gives_no_draft_slots(said: dict[str, Any]) -> None:
    recording = read_recording(REAL / "ngram")
    odd = replace(recording, meta=msgspec.structs.replace(recording.meta, speculative=said))
    assert fit([odd]).origin.limits.draft_slots is None


def without_details(source: Path, folder: Path) -> Path:
    """Copy a capture as if its engine had not reported the content of its steps."""
    shutil.copytree(source, folder)
    steps = folder / "step-stats.jsonl.gz"
    lines = [json.loads(line) for line in gzip.decompress(steps.read_bytes()).splitlines()]
    for line in lines:
        line.get("scheduler", {}).pop("iteration_details", None)
    steps.write_bytes(gzip.compress("".join(f"{json.dumps(line)}\n" for line in lines).encode()))
    return folder


def test_step_times_without_iteration_details_are_derived_from_the_requests(tmp_path: Path) -> None:
    counted = fit([read_recording(REAL / "draft_model")]).step_time
    derived = fit([read_recording(without_details(REAL / "draft_model", tmp_path / "draft_model"))]).step_time
    assert counted is not None
    assert derived is not None
    steps = MeasuredSteps.of([read_recording(REAL / "draft_model")])
    shapes = [StepShape(*row) for row in np.column_stack([getattr(steps, each.name) for each in fields(StepShape)])]
    found, known = (
        np.array([model.ms(shape) for shape in shapes]) * model.residuals[50]
        for model in (step_time_from_json(derived), step_time_from_json(counted))
    )
    for of_kind in (steps.prefill_tokens == 0, steps.prefill_tokens > 0):
        assert np.median((found / known)[of_kind]) == pytest.approx(1, abs=0.05)
