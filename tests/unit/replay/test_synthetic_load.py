"""Synthetic traces."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import pytest

from specdecode_operator.api.capture import Phase
from specdecode_operator.capture.trace_reader import read_steps
from specdecode_operator.replay.emulated.engine_model import from_rates
from specdecode_operator.replay.synthetic_load import (
    InvalidLoadError,
    Lengths,
    parse_arrivals,
    parse_lengths,
)
from tests.support.synthetic import RATES, Truth

TRUTH = Truth()


def test_synthetic_files_depend_on_seed(tmp_path: Path) -> None:
    texts = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        folder = TRUTH.make(tmp_path / name, "poisson:8", 30, seed=seed).folder
        texts.append([(folder / file).read_bytes() for file in ("trace.jsonl", "step-stats.jsonl")])
    assert texts[0] == texts[1] != texts[2]


def test_bursts_follow_given_acceptance_rates(tmp_path: Path) -> None:
    made = TRUTH.make(tmp_path / "made", "closed:8", 200)
    inner = Counter(tokens for each in made.requests for tokens in each.chunk_tokens[1:-1])
    shares = {size: 100 * count / inner.total() for size, count in inner.items()}
    falls = {1: 20, 2: 20, 3: 18, 4: 12, 5: 30}
    assert {size: pytest.approx(share, abs=2) for size, share in falls.items()} == shares
    stats = [step.scheduler.spec_decoding_stats for step in read_steps(made.folder / "step-stats.jsonl")]
    drafted = sum(each.num_draft_tokens for each in stats if each)
    assert sum(each.num_accepted_tokens for each in stats if each) / drafted == pytest.approx(sum(RATES) / 4, abs=0.01)


def test_gaps_follow_given_step_time_and_load(tmp_path: Path) -> None:
    alone = TRUTH.make(tmp_path / "alone", "closed:1", 30)
    together = TRUTH.make(tmp_path / "together", "closed:20", 200)
    assert median(gap for each in alone.requests for gap in each.gaps_ms) == pytest.approx(10.5, rel=0.02)
    quiet = [
        gap
        for each in together.requests
        for gap, running, prefill in zip(each.gaps_ms, each.num_running or (), each.prefill_tokens or (), strict=True)
        if running == 20 and prefill == 0
    ]
    assert median(quiet) == pytest.approx(20, rel=0.02)


def test_drafting_share_limits_steps_with_drafts(tmp_path: Path) -> None:
    made = Truth(from_rates(RATES, 0.5)).make(tmp_path / "made", "closed:4", 60)
    stats = list(read_steps(made.folder / "step-stats.jsonl"))
    drafts = sum(step.scheduler.spec_decoding_stats.num_drafts for step in stats if step.scheduler.spec_decoding_stats)
    gaps = sum(len(each.gaps_ms) for each in made.requests)
    assert drafts / gaps == pytest.approx(0.5, abs=0.03)


def test_arrivals_follow_given_pattern(tmp_path: Path) -> None:
    even = TRUTH.make(tmp_path / "even", "constant:5", 20).arrivals_ms
    assert [after - before for before, after in pairwise(even)] == pytest.approx([200] * 19)
    random = TRUTH.make(tmp_path / "random", "poisson:5", 300).arrivals_ms
    gaps_ms = [after - before for before, after in pairwise(random)]
    assert mean(gaps_ms) == pytest.approx(200, rel=0.15)
    assert sum(gap < 200 for gap in gaps_ms) / len(gaps_ms) == pytest.approx(0.632, abs=0.06)
    burst = TRUTH.make(tmp_path / "burst", "burst:5x10", 10).arrivals_ms
    assert burst == [0.0] * 5 + [10_000.0] * 5


def test_turns_contain_the_conversation_and_wait_for_the_answer(tmp_path: Path) -> None:
    prompts = {"shared_prefix_tokens": 160, "prompt_tokens": Lengths(64, 64), "output_tokens": Lengths(33, 33)}
    made = TRUTH.make(tmp_path / "made", "multiturn:1x3x2", 6, **prompts)
    first, second, third, other = made.requests[:4]
    assert [each.prompt_tokens for each in made.requests] == [224, 321, 418] * 2
    assert second.arrival_ms == pytest.approx((first.end_ms or 0) + 2000, abs=0.01)
    hashes = [list(each.block_hashes or ()) for each in (first, second, third, other)]
    assert hashes[1][: len(hashes[0])] == hashes[0]
    assert hashes[2][: len(hashes[1])] == hashes[1]
    assert hashes[3][:10] == hashes[0][:10]
    assert hashes[3][10] != hashes[0][10]
    # All that was said but the last block of it, and for another conversation the prefix.
    assert [each.cached_tokens for each in made.requests[:4]] == [0, 256, 352, 160]


@pytest.mark.parametrize(
    "text",
    ["", "512x", "0", "9-3", "1-99999999", "lognormal:512", "lognormal:512:-1", "lognormal:a:1", "lognormal:5:nan"],
)
def test_invalid_lengths_are_refused_with_allowed_forms(text: str) -> None:
    with pytest.raises(InvalidLoadError, match="100-900"):
        parse_lengths(text)


def test_lengths_follow_given_distribution(tmp_path: Path) -> None:
    prompts = {"prompt_tokens": parse_lengths("lognormal:300:0.5"), "output_tokens": parse_lengths("5-20")}
    requests = TRUTH.make(tmp_path / "made", "closed:50", 400, **prompts).requests
    assert median(each.prompt_tokens for each in requests) == pytest.approx(300, rel=0.1)
    assert (min(each.output_tokens for each in requests), max(each.output_tokens for each in requests)) == (5, 20)


@pytest.mark.parametrize(
    "text", ["", "poisson", "poisson:", "poisson:0", "poisson:-1", "burst:8", "closed:0", "closed:99999"]
)
def test_invalid_arrivals_are_refused_with_allowed_forms(text: str) -> None:
    with pytest.raises(InvalidLoadError, match="constant:4"):
        parse_arrivals(text, 10, None)


def test_parsed_arrivals_are_a_capture_phase() -> None:
    assert isinstance(parse_arrivals("staircase:1+0.5x30", None, 90), Phase)
