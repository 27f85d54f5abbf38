"""Tokens per step, speed-up, break-even and the best K, compared with a simulation."""

import random
from dataclasses import dataclass, field, replace
from math import prod
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.stats.payoff import (
    Acceptance,
    Curve,
    Load,
    PayoffError,
    StepCosts,
    best_k,
    break_even_rate,
    break_even_tokens,
    crossover,
    full_cache,
    memory_bound_speed_up,
    speed_up,
)

STEPS = 20_000


@dataclass
class Counted:
    """Counters as vLLM has them, and the time that has passed."""

    drafts: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    tokens: int = 0
    ms: float = 0.0


def decoded(
    conditional: tuple[float, ...], costs: StepCosts, batch: int, context: float = 0.0, seed: int = 0
) -> Counted:
    """Let a batch decode: in each step every request proposes K tokens one by one, and keeps those before a refusal."""
    dice, k = random.Random(seed), len(conditional)
    counted = Counted(accepted_per_position=[0] * k)
    reads = batch * context / 1000
    for _ in range(STEPS // batch):
        passes = [batch * k] if costs.one_pass else [batch] * k
        for proposed in passes:
            counted.ms += costs.draft.ms(proposed) + costs.draft_ms_per_1000_context * reads
        counted.ms += costs.target.ms(batch * (k + 1)) + costs.target_ms_per_1000_context * reads
        for _ in range(batch):
            counted.drafts += 1
            counted.tokens += 1
            for position, share in enumerate(conditional):
                if dice.random() >= share:
                    break
                counted.accepted_per_position[position] += 1
                counted.tokens += 1
    return counted


TARGET = Curve(((1, 20.0), (64, 24.0), (512, 60.0)))
COSTS = StepCosts(
    TARGET, Curve(((1, 1.5), (256, 4.0))), target_ms_per_1000_context=0.02, draft_ms_per_1000_context=0.01
)
HALF = Acceptance((0.7, 0.6, 0.5))


@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize(("batch", "context"), [(1, 0), (16, 4000), (200, 500)])
def test_speed_up_matches_simulated_engine(one_pass: bool, batch: int, context: int) -> None:
    costs = StepCosts(TARGET, COSTS.draft, one_pass, 0.02, 0.01)
    counted = decoded(HALF.conditional, costs, batch, context)
    plain = batch / (TARGET.ms(batch) + 0.02 * batch * context / 1000)
    found = speed_up(HALF, costs, 3, Load.same(batch, context))
    assert found == pytest.approx(counted.tokens / counted.ms / plain, rel=0.02)


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("batch", [1, 32, 300])
def test_speed_up_is_one_at_break_even_rate(batch: int, k: int) -> None:
    rate = break_even_rate(break_even_tokens(COSTS, k, Load.same(batch)), k)
    if rate is None:
        assert speed_up(Acceptance((1.0,)), COSTS, k, Load.same(batch)) < 1
    else:
        assert speed_up(Acceptance.of_rate(rate, k), COSTS, k, Load.same(batch)) == pytest.approx(1)


@given(
    conditional=st.lists(st.floats(0.01, 1), min_size=1, max_size=8),
    base_ms=st.floats(0.1, 100),
    token_ms=st.floats(0, 1),
    draft_ms=st.floats(0, 20),
    requests=st.integers(1, 200),
    share=st.floats(0.1, 1),
)
def test_speed_up_is_at_least_one_exactly_from_break_even_tokens(
    conditional: list[float], base_ms: float, token_ms: float, draft_ms: float, requests: int, share: float
) -> None:
    """Whatever the times, the load and the share of the KV cache: tokens a second are counted out."""
    acceptance, k = Acceptance(tuple(conditional)), len(conditional)
    costs = StepCosts(Curve(((1, base_ms), (1001, base_ms + 1000 * token_ms))), Curve(((1, draft_ms),)))
    load = Load(requests * share, requests)
    with_it = load.batch * acceptance.expected_tokens(k) / costs.step_ms(load.batch, k)
    without = load.batch_alone / costs.step_ms(load.batch_alone, 0)
    assert speed_up(acceptance, costs, k, load) == pytest.approx(with_it / without)
    needed = break_even_tokens(costs, k, load)
    assert (speed_up(acceptance, costs, k, load) >= 1) == (acceptance.expected_tokens(k) >= needed)
    best = best_k(acceptance, costs, load)
    assert speed_up(acceptance, costs, best, load) >= max(1, speed_up(acceptance, costs, k, load))


@pytest.mark.parametrize("one_pass", [True, False])
def test_crossover_follows_last_measured_load_at_which_speculation_pays(one_pass: bool) -> None:
    """Compares with every measured number of requests: the gain may be lost and won more than once between points."""
    random = Random(16)
    found = []
    for _ in range(40):
        tokens = sorted(random.sample(range(1, 3000), 6))
        target = Curve(tuple(zip(map(float, tokens), sorted(random.uniform(5, 60) for _ in tokens), strict=True)))
        costs = StepCosts(target, Curve(((3, 1.0), (2500, random.uniform(1, 9)))), one_pass, 0.0001, 0.00005)
        acceptance, k = Acceptance((random.uniform(0.2, 0.9),)), random.randint(1, 6)
        measured = [
            batch
            for batch in range(1, 3000)
            if tokens[0] <= batch and batch * (k + 1) <= tokens[-1] and 3 <= batch * (k if one_pass else 1) <= 2500
        ]
        assert list(costs.measured_batches(k)) == measured
        pays = [batch for batch in measured if speed_up(acceptance, costs, k, Load.same(batch, 500)) >= 1]
        crossing = crossover(acceptance, costs, k, 500)
        if not measured or pays[-1:] == measured[-1:]:
            assert crossing is None
        else:
            assert crossing == (pays[-1] + 1 if pays else measured[0])
            found.append(bool(pays) and pays != list(range(measured[0], pays[-1] + 1)))
    assert any(found), "the gain is lost, won and lost again"
    assert not all(found)


def test_recorded_k_needs_no_extrapolated_target_time() -> None:
    target, draft = Curve(((1, 20.0), (40, 24.0))), Curve(((4, 1.0), (40, 2.0)))
    recorded = StepCosts(target, draft, recorded_k=4, as_recorded=True)
    assert not recorded.extrapolated(Load.same(40), 4)
    assert recorded.extrapolated(Load.same(3), 4) == [draft]
    assert recorded.extrapolated(Load.same(41), 4) == [target, draft]
    assert (recorded.measured_batches(4)[0], recorded.measured_batches(4)[-1]) == (4, 40)
    # The draft's time at 9 requests was derived from the target's extrapolated time for 45 tokens.
    assert recorded.extrapolated(Load.same(9), 1) == [target]
    assert not recorded.extrapolated(Load.same(8), 1)
    assert replace(recorded, as_recorded=False).extrapolated(Load.same(9), 4) == [target]
    # A pass for 4 requests with K 8 has the 32 tokens of 8 requests with K 4, which the target verified with 40.
    at_once = replace(recorded, draft=Curve(((4, 1.0), (160, 2.0))), one_pass=True)
    assert not at_once.extrapolated(Load.same(4), 8)
    shorter = Curve(((1, 20.0), (39, 24.0)))
    assert replace(at_once, target=shorter).extrapolated(Load.same(4), 8) == [shorter]


@pytest.mark.parametrize("tokens", [1, 7, 5000])
def test_constant_curve_is_known_for_any_token_count(tokens: int) -> None:
    assert Curve.constant(3.0).knows(tokens)
    assert Curve.constant(3.0).ms(tokens) == 3
    assert Curve(((7, 3.0),)).knows(tokens) == (tokens == 7)


@pytest.mark.parametrize("k", [1, 4, 9])
@pytest.mark.parametrize("ratio", [0.0, 0.02, 0.3])
def test_memory_bound_speed_up_matches_simulation(ratio: float, k: int) -> None:
    """The other form in circulation, c tau / (c K + 1), says a draft that costs nothing is worth nothing."""
    conditional = (0.8,) * k
    reading = StepCosts(Curve(((1, 1.0),)), Curve(((1, ratio),)))
    counted = decoded(conditional, reading, batch=1)
    tokens = counted.tokens / counted.drafts
    assert memory_bound_speed_up(tokens, k, ratio) == pytest.approx(counted.tokens / counted.ms)
    assert ratio * tokens / (ratio * k + 1) != pytest.approx(counted.tokens / counted.ms, rel=0.1)


def test_curve_is_interpolated_linearly_and_never_falls_beyond_its_end() -> None:
    assert [TARGET.ms(tokens) for tokens in (0.5, 1, 32.5, 64, 512)] == pytest.approx([20, 20, 22, 24, 60])
    assert TARGET.ms(960) == pytest.approx(96)
    assert Curve(((1, 20.0), (2, 10.0))).ms(100) == 10


@pytest.mark.parametrize(
    "points", [(), ((0, 1.0),), ((1, -1.0),), ((2, 1.0), (1, 2.0)), ((1, 1.0), (1, 2.0)), ((1, float("nan")),)]
)
def test_invalid_curve_is_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(PayoffError):
        Curve(points)


@pytest.mark.parametrize(("batch", "alone"), [(2, 1), (0, 1), (float("nan"), 1)])
def test_invalid_load_is_refused(batch: float, alone: float) -> None:
    with pytest.raises(PayoffError):
        Load(batch, alone)


@pytest.mark.parametrize("context", [0, 101])
def test_kv_cache_that_fits_no_request_is_refused(context: float) -> None:
    with pytest.raises(PayoffError):
        full_cache(100, 200, context)


FREE = StepCosts(Curve(((1, 1.0),)))


@pytest.mark.parametrize(
    "conditional", [(0.8, 0.75, 0.67), (0.5,), (0.2, 0.9, 0.9, 0.9), (1.0, 1.0), (0.0, 0.5), (0.9,) * 15]
)
def test_expected_tokens_and_shares_match_simulated_engine(conditional: tuple[float, ...]) -> None:
    """Within six standard errors."""
    acceptance, k = Acceptance(conditional), len(conditional)
    counted = decoded(conditional, FREE, batch=1, seed=k)
    assert counted.tokens / counted.drafts == pytest.approx(acceptance.expected_tokens(k), abs=6 * k / STEPS**0.5)
    shares = [accepted / counted.drafts for accepted in counted.accepted_per_position]
    assert shares == pytest.approx(acceptance.reached(k), abs=3 / STEPS**0.5)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_expected_tokens_are_the_mean_over_all_outcomes(conditional: list[float]) -> None:
    """Each outcome with its chance: the first n accepted, and then one refused, or all of them accepted."""
    acceptance, k = Acceptance(tuple(conditional)), len(conditional)
    chances = [prod(conditional[:kept]) * (1 - conditional[kept]) for kept in range(k)] + [prod(conditional)]
    assert sum(chances) == pytest.approx(1)
    assert acceptance.expected_tokens(k) == pytest.approx(sum((1 + kept) * each for kept, each in enumerate(chances)))
    again = Acceptance.by_position(acceptance.reached(k))
    assert again.expected_tokens(k) == pytest.approx(acceptance.expected_tokens(k))


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.4, 0.86, 1.0])
@pytest.mark.parametrize("k", [1, 3, 32])
def test_acceptance_of_rate_has_that_rate(rate: float, k: int) -> None:
    acceptance = Acceptance.of_rate(rate, k)
    assert acceptance.rate(k) == pytest.approx(rate, abs=1e-9)
    assert acceptance.expected_tokens(k) == pytest.approx(1 + rate * k)
    assert len(set(acceptance.conditional)) == 1


@pytest.mark.parametrize("shares", [(0.5, 0.6), (1.1,), (-0.1,), (), (float("nan"),), (0.5,) * 33])
def test_invalid_shares_by_position_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(PayoffError):
        Acceptance.by_position(shares)
