"""Tokens of a step by acceptance, held against engines that throw dice."""

import random
from collections import Counter
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.stats.payoff import Acceptance, Curve, PayoffError, StepCosts
from tests.unit.stats.simulation import STEPS, decoded, verified

FREE = StepCosts(Curve(((1, 1.0),)))


@pytest.mark.parametrize(
    "conditional", [(0.8, 0.75, 0.67), (0.5,), (0.2, 0.9, 0.9, 0.9), (1.0, 1.0), (0.0, 0.5), (0.9,) * 15]
)
def test_tokens_of_a_step_and_shares_are_those_of_an_engine_that_throws_dice(conditional: tuple[float, ...]) -> None:
    """Within six standard errors."""
    acceptance, k = Acceptance(conditional), len(conditional)
    counted = decoded(conditional, FREE, batch=1, seed=k)
    assert counted.tokens / counted.drafts == pytest.approx(acceptance.expected_tokens(k), abs=6 * k / STEPS**0.5)
    shares = [accepted / counted.drafts for accepted in counted.accepted_per_position]
    assert shares == pytest.approx(acceptance.reached(k), abs=3 / STEPS**0.5)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_tokens_of_a_step_are_the_mean_of_all_that_can_happen(conditional: list[float]) -> None:
    """Each outcome with its chance: the first n accepted, and then one refused, or all of them accepted."""
    acceptance, k = Acceptance(tuple(conditional)), len(conditional)
    chances = [prod(conditional[:kept]) * (1 - conditional[kept]) for kept in range(k)] + [prod(conditional)]
    assert sum(chances) == pytest.approx(1)
    assert acceptance.expected_tokens(k) == pytest.approx(sum((1 + kept) * each for kept, each in enumerate(chances)))
    again = Acceptance.by_position(acceptance.reached(k))
    assert again.expected_tokens(k) == pytest.approx(acceptance.expected_tokens(k))


def test_what_vllm_counts_gives_the_tokens_that_it_counted() -> None:
    """No statistics: mean acceptance length is 1 + accepted / drafts, whatever the dice."""
    counted = decoded((0.7, 0.6, 0.9), FREE, batch=4)
    acceptance = Acceptance.by_position([each / counted.drafts for each in counted.accepted_per_position])
    assert acceptance.expected_tokens(3) == pytest.approx(counted.tokens / counted.drafts)
    assert acceptance.rate(3) == pytest.approx(sum(counted.accepted_per_position) / (3 * counted.drafts))


def test_sampled_tokens_are_the_targets_and_as_many_as_the_overlap_of_both_says() -> None:
    """Two distributions agree as often as they overlap: K + 1 terms of a geometric series."""
    draft, target, k = [0.6, 0.3, 0.1], [0.4, 0.2, 0.4], 4
    overlap = sum(map(min, draft, target))
    dice = random.Random(1)
    steps = [verified(draft, target, k, dice) for _ in range(STEPS)]
    tokens = Counter(token for step in steps for token in step)
    total = sum(tokens.values())
    assert [tokens[token] / total for token in range(3)] == pytest.approx(target, abs=0.01)
    closed = (1 - overlap ** (k + 1)) / (1 - overlap)
    assert Acceptance((overlap,)).expected_tokens(k) == pytest.approx(closed)
    assert total / STEPS == pytest.approx(closed, abs=0.06)


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.4, 0.86, 1.0])
@pytest.mark.parametrize("k", [1, 3, 32])
def test_a_rate_gives_the_acceptance_with_that_rate(rate: float, k: int) -> None:
    acceptance = Acceptance.of_rate(rate, k)
    assert acceptance.rate(k) == pytest.approx(rate, abs=1e-9)
    assert acceptance.expected_tokens(k) == pytest.approx(1 + rate * k)
    assert len(set(acceptance.conditional)) == 1


def test_positions_that_nobody_gave_are_as_the_last_one() -> None:
    assert Acceptance.by_position((0.8, 0.4)).reached(4) == pytest.approx((0.8, 0.4, 0.2, 0.1))


@pytest.mark.parametrize("shares", [(0.5, 0.6), (1.1,), (-0.1,), (), (float("nan"),), (0.5,) * 33])
def test_what_no_engine_counts_is_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(PayoffError):
        Acceptance.by_position(shares)
