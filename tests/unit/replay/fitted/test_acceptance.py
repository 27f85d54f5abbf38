"""What becomes of drafts is found again from recordings of known engines, and from those of a real one."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from specdecode_operator.capture.files.formats import TraceMeta
from specdecode_operator.capture.trace_reader import RecordedRequest, Recording, read_recording
from specdecode_operator.replay.emulated.engine_model import (
    Acceptance,
    Difficulty,
    Drafting,
    StepTime,
    acceptance_from_json,
    from_rates,
)
from specdecode_operator.replay.fit import fit_acceptance
from specdecode_operator.replay.model_file import Limits
from specdecode_operator.replay.synthetic_load import Lengths, Prompts, parse_arrivals
from specdecode_operator.replay.virtual_run import GivenBehaviour, VirtualRun

REAL = Path(__file__).parents[3] / "data" / "captures"
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


def test_easy_and_hard_requests_are_told_apart() -> None:
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


def test_requests_that_are_alike_are_one_class() -> None:
    found = section(drawn(from_rates((0.7, 0.5)), 200, 200))
    assert len(found["classes"]) == 1
    assert "after" not in found["classes"][0]
    # No bias of answers that end in the middle of a draft.
    assert acceptance_from_json(found).rates(2) == pytest.approx((0.7, 0.5), abs=0.01)


def test_short_answers_do_not_hide_long_drafts() -> None:
    found = section(drawn(from_rates((0.7, 0.5)), 3000, 12))
    assert acceptance_from_json(found).rates(2) == pytest.approx((0.7, 0.5), abs=0.015)


def test_a_small_capture_is_not_read_for_more_than_it_says() -> None:
    known = Acceptance(2, OUTCOMES, [Difficulty(0.5, (0.45, 0.3, 0.25)), Difficulty(0.5, (0.35, 0.3, 0.35))])
    assert len(section(drawn(known, 6, 60))["classes"]) == 1


def test_easy_passages_follow_each_other() -> None:
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


def test_a_drafter_that_finds_nothing_at_times(tmp_path: Path) -> None:
    prompts = Prompts(
        prompt_tokens=Lengths(50, 50), output_tokens=Lengths(150, 150), shared_prefix_tokens=0, block_size=16, seed=3
    )
    run = VirtualRun(
        behaviour=GivenBehaviour(StepTime(curve=((1, 8.0),)), from_rates((0.6, 0.4, 0.3), 0.4), 1),
        limits=Limits(max_num_seqs=64, block_size=16),
        meta=TraceMeta(schema=1, block_size=16, speculative={"method": "ngram", "num_speculative_tokens": 3}),
    )
    run.phases(tmp_path, prompts, [parse_arrivals("closed:8", 100, None)], "test")
    found = section(read_recording(tmp_path))
    drafting = sum(
        chance
        for each in found["classes"]
        for (drafted, _), chance in zip(found["outcomes"], each["outcomes"], strict=True)
        if drafted
    )
    assert drafting / len(found["classes"]) == pytest.approx(0.4, abs=0.02)
    assert acceptance_from_json(found).rates(3) == pytest.approx((0.6, 0.4, 0.3), abs=0.03)


def test_what_did_not_speculate_has_no_section() -> None:
    request = drawn(from_rates((0.0, 0.0)), 5, 100).requests[0]
    assert fit_acceptance([recording([request], k=0)]) is None
    assert fit_acceptance([]) is None
    assert fit_acceptance([recording([])]) is None


def test_what_no_engine_drafts_has_no_section() -> None:
    assert fit_acceptance([recording(drawn(from_rates((0.7, 0.5)), 20, 100).requests, k=65)]) is None


def test_of_many_requests_some_are_enough() -> None:
    found = section(drawn(from_rates((0.7, 0.5)), 5000, 30))
    assert acceptance_from_json(found).rates(2) == pytest.approx((0.7, 0.5), abs=0.02)
    assert found["ranges"]["requests"] <= 2000


@pytest.mark.parametrize("name", ["draft_model", "ngram"])
def test_a_real_engine_is_told_by_its_own_counters(name: str) -> None:
    real = read_recording(REAL / name)
    found = acceptance_from_json(section(real))
    again = drawn(found, 200, 200, 0.0)
    steps, tokens = (sum(map(len, (each.gaps_ms for each in real.requests))), 0)
    tokens = sum(each.output_tokens - 1 for each in real.requests)
    of_again = sum(each.output_tokens - 1 for each in again.requests) / sum(
        len(each.gaps_ms) for each in again.requests
    )
    assert of_again == pytest.approx(tokens / steps, rel=0.04)


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
def test_another_k_is_forecast_from_passages(width: int) -> None:
    found = acceptance_from_json(section(of_passages(3)))
    drafting = Drafting(found, found.classes[0], Random(1))
    tokens = sum(drafting.next(width)[1] + 1 for _ in range(20_000))
    assert len(found.classes) == 1
    real = of_passages(width, 20, 3000).requests
    seen = sum(each.output_tokens - 1 for each in real) / sum(len(each.gaps_ms) for each in real)
    assert tokens / 20_000 == pytest.approx(seen, rel=0.03)
