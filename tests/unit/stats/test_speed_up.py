"""Speed-up, break-even and the best K, held against engines that throw dice and against published shapes."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.stats.payoff import (
    LARGEST_BATCH,
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
from tests.unit.stats.simulation import decoded

TARGET = Curve(((1, 20.0), (64, 24.0), (512, 60.0)))
COSTS = StepCosts(
    TARGET, Curve(((1, 1.5), (256, 4.0))), target_ms_per_1000_context=0.02, draft_ms_per_1000_context=0.01
)
NGRAM = StepCosts(TARGET)
HALF = Acceptance((0.7, 0.6, 0.5))


@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize(("batch", "context"), [(1, 0), (16, 4000), (200, 500)])
def test_speed_up_is_that_of_an_engine_that_throws_dice(one_pass: bool, batch: int, context: int) -> None:
    costs = StepCosts(TARGET, COSTS.draft, one_pass, 0.02, 0.01)
    counted = decoded(HALF.conditional, costs, batch, context)
    plain = batch / (TARGET.ms(batch) + 0.02 * batch * context / 1000)
    found = speed_up(HALF, costs, 3, Load.same(batch, context))
    assert found == pytest.approx(counted.tokens / counted.ms / plain, rel=0.02)


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("batch", [1, 32, 300])
def test_at_break_even_speculation_is_as_fast_as_none(batch: int, k: int) -> None:
    rate = break_even_rate(break_even_tokens(COSTS, k, Load.same(batch)), k)
    if rate is None:
        assert speed_up(Acceptance((1.0,)), COSTS, k, Load.same(batch)) < 1
    else:
        assert speed_up(Acceptance.of_rate(rate, k), COSTS, k, Load.same(batch)) == pytest.approx(1)


def test_a_full_cache_asks_for_the_share_that_the_draft_takes() -> None:
    """Where a step takes equally long, 3 requests for 4 are worth it with 4/3 tokens a step."""
    flat = StepCosts(Curve(((1, 20.0),)))
    load = full_cache(300_000, 400_000, 10_000)
    assert (load.batch, load.batch_alone) == (30, 40)
    assert break_even_tokens(flat, 3, load) == pytest.approx(4 / 3)
    assert break_even_rate(4 / 3, 3) == pytest.approx(1 / 9)


@given(
    conditional=st.lists(st.floats(0.01, 1), min_size=1, max_size=8),
    base_ms=st.floats(0.1, 100),
    token_ms=st.floats(0, 1),
    draft_ms=st.floats(0, 20),
    requests=st.integers(1, 200),
    share=st.floats(0.1, 1),
)
def test_speed_up_is_one_exactly_at_break_even(  # noqa: PLR0913, PLR0917  each is drawn
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


def test_the_best_k_is_the_fastest_and_none_is_better_than_a_loss() -> None:
    for batch in (1, 16, 128, 512):
        load = Load.same(batch)
        best = best_k(HALF, COSTS, load)
        assert speed_up(HALF, COSTS, best, load) == max(speed_up(HALF, COSTS, k, load) for k in range(33))
    assert best_k(Acceptance((0.05,)), COSTS, Load.same(1)) == 0


def test_more_requests_make_it_pay_less_until_it_costs() -> None:
    """Published: 2.8 and 1.5 times faster at 1 request/s, 1.4 and 1.8 times slower at saturation; good, then a loss."""
    loads = [speed_up(HALF, NGRAM, 3, Load.same(batch)) for batch in (1, 8, 64, 256, 1024, 4096)]
    assert loads == sorted(loads, reverse=True)
    assert loads[0] > 1.5
    # Where each token of a step costs, K + 1 are paid for the tokens that are kept.
    assert loads[-1] == pytest.approx(HALF.expected_tokens(3) / 4, rel=0.05)
    found = crossover(HALF, NGRAM, 3)
    assert found is not None
    assert speed_up(HALF, NGRAM, 3, Load.same(found)) < 1 <= speed_up(HALF, NGRAM, 3, Load.same(found - 1))


def test_one_acceptance_pays_at_one_load_and_costs_at_another() -> None:
    """Published (vllm-project/vllm#26504): acceptance stays at 0.86 to 0.91, and the right action flips."""
    steady = Acceptance.of_rate(0.88, 5)
    assert speed_up(steady, COSTS, 5, Load.same(1)) > 1.2
    busy = StepCosts(Curve(((1, 20.0), (32, 21.0), (64, 40.0))), Curve(((1, 2.0),)))
    assert speed_up(steady, busy, 5, Load.same(32)) < 1


@pytest.mark.parametrize("one_pass", [True, False])
def test_the_crossover_is_the_load_from_which_on_it_never_pays_again(one_pass: bool) -> None:
    """Counted out for each number of requests: between its points a curve's gain may be lost and won more than once."""
    random = Random(16)
    found = []
    for _ in range(20):
        tokens = sorted(random.sample(range(1, 600), 4))
        target = Curve(tuple(zip(map(float, tokens), sorted(random.uniform(5, 60) for _ in tokens), strict=True)))
        costs = StepCosts(target, Curve(((3, 1.0), (90, random.uniform(1, 2)))), one_pass, 0.0001, 0.00005)
        acceptance, k = Acceptance((random.uniform(0.2, 0.9),)), random.randint(1, 6)
        pays = [
            batch for batch in range(1, LARGEST_BATCH + 1) if speed_up(acceptance, costs, k, Load.same(batch, 500)) >= 1
        ]
        last = max(pays, default=0)
        found.append((len(pays) < last, crossover(acceptance, costs, k, 500)))
        assert found[-1][1] == (None if last == LARGEST_BATCH else last + 1)
    assert any(again for again, _ in found)


def test_what_always_pays_has_no_crossover() -> None:
    assert crossover(HALF, StepCosts(Curve(((1, 20.0),))), 3) is None


def test_break_even_goes_from_nothing_to_all() -> None:
    assert break_even_rate(4.0, 3) == 1
    assert break_even_rate(4.1, 3) is None
    assert break_even_rate(0.9, 3) == 0, "a step that takes less than a plain one pays for itself"


@pytest.mark.parametrize("k", [1, 4, 9])
@pytest.mark.parametrize("ratio", [0.0, 0.02, 0.3])
def test_mbsu_is_the_speed_up_where_time_is_reading_weights(ratio: float, k: int) -> None:
    """The other form in circulation, c tau / (c K + 1), says a draft that costs nothing is worth nothing."""
    conditional = (0.8,) * k
    reading = StepCosts(Curve(((1, 1.0),)), Curve(((1, ratio),)))
    counted = decoded(conditional, reading, batch=1)
    tokens = counted.tokens / counted.drafts
    assert memory_bound_speed_up(tokens, k, ratio) == pytest.approx(counted.tokens / counted.ms)
    assert ratio * tokens / (ratio * k + 1) != pytest.approx(counted.tokens / counted.ms, rel=0.1)


def test_times_between_measured_ones_are_on_a_line_and_never_fall_beyond() -> None:
    assert [TARGET.ms(tokens) for tokens in (0.5, 1, 32.5, 64, 512)] == pytest.approx([20, 20, 22, 24, 60])
    assert TARGET.ms(960) == pytest.approx(96)
    assert Curve(((1, 20.0), (2, 10.0))).ms(100) == 10


@pytest.mark.parametrize(
    "points", [(), ((0, 1.0),), ((1, -1.0),), ((2, 1.0), (1, 2.0)), ((1, 1.0), (1, 2.0)), ((1, float("nan")),)]
)
def test_what_is_no_curve_is_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(PayoffError):
        Curve(points)


@pytest.mark.parametrize(("batch", "alone"), [(2, 1), (0, 1), (float("nan"), 1)])
def test_loads_that_cannot_be_are_refused(batch: float, alone: float) -> None:
    with pytest.raises(PayoffError):
        Load(batch, alone)


@pytest.mark.parametrize("context", [0, 101])
def test_a_cache_that_holds_no_request_is_refused(context: float) -> None:
    with pytest.raises(PayoffError):
        full_cache(100, 200, context)


def test_a_target_whose_steps_take_no_time_is_refused() -> None:
    with pytest.raises(PayoffError):
        StepCosts(Curve(((1, 0.0),)))
