"""A canary and the engines beside it: blocks, verdicts, and pools that must not be compared."""

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from specdecode_operator.stats.pool_comparison import (
    BLOCK_S,
    FEWEST_BLOCKS,
    FEWEST_REQUESTS,
    FigureVerdict,
    PoolComparison,
    PoolFigure,
    PoolVerdict,
    Served,
    figure_verdict,
    pool_verdict,
    served,
)
from specdecode_operator.stats.verdict import Finding, Verdict
from specdecode_operator.vllm.engine_metrics import EngineReading, Unreachable
from tests.support.engine_work import Working
from tests.support.pool_traffic import Engine, Traffic, looks

LIMITS = {PoolFigure.TPOT: 10, PoolFigure.TTFT: 20, PoolFigure.ERRORS: 1}
BLOCK = Served(
    requests=40, first_token_seconds=8.0, prompt_tokens=40_000, tokens=8_000, seconds=80.0, steps=3_000, finished=40,
    answered=40,
)  # fmt: skip


def judged(seed: int, minutes: int = 40, **run: Any) -> tuple[PoolComparison, PoolVerdict]:
    """Return the comparison of a run up to its first verdict."""
    found, verdict = PoolComparison(str(seed)), PoolVerdict.UNDECIDED
    for at_s, stable, canary in looks(seed, minutes=minutes, **run):
        if found.observe(stable, canary, at_s) and (verdict := pool_verdict(found, LIMITS)) != PoolVerdict.UNDECIDED:
            break
    return found, verdict


def steady(
    blocks: int, stable: Served = BLOCK, canary: Served = BLOCK, engines: int = 1, found: PoolComparison | None = None
) -> PoolComparison:
    """Return a comparison of engines that all do the same in each block."""
    found = found or PoolComparison()
    counters = [Served(), Served()]
    for block in range(blocks + 1):
        pools = [{f"{pool}-{each}": counters[pool] for each in range(engines)} for pool in (0, 1)]
        found.observe(pools[0], pools[1], BLOCK_S * block)
        counters = [counters[0] + stable, counters[1] + canary]
    return found


@pytest.mark.parametrize("stable", [1, 3], ids=["1 of 2 engines", "1 of 4 engines"])
def test_equal_pools_under_bursty_traffic_rarely_get_a_verdict(stable: int) -> None:
    runs = [judged(seed, minutes=20, stable=stable)[0] for seed in range(12)]
    told = [any(each.verdict is not Verdict.INCONCLUSIVE for each in found.findings.values()) for found in runs]
    assert sum(told) <= 1
    assert all(found.blocks >= 5 for found in runs)


@pytest.mark.parametrize(
    ("engine", "verdict", "figure"),
    [
        (Engine(step_time=1.2), PoolVerdict.WORSE, PoolFigure.TPOT),
        (Engine(tokens_per_step=0.8), PoolVerdict.WORSE, PoolFigure.TPOT),
        (Engine(prefill_time=1.6), PoolVerdict.WORSE, PoolFigure.TTFT),
        (Engine(errors=0.05), PoolVerdict.WORSE, PoolFigure.ERRORS),
        (Engine(step_time=1 / 1.2, prefill_time=1 / 1.2), PoolVerdict.NOT_WORSE, PoolFigure.TPOT),
    ],
    ids=["slower steps", "fewer accepted tokens", "slower prompts", "errors", "faster"],
)
def test_difference_between_pools_is_found_in_its_figure(
    engine: Engine, verdict: PoolVerdict, figure: PoolFigure
) -> None:
    found, said = judged(3, engine=engine, traffic=Traffic(burst=0.4))
    assert said is verdict
    expected = FigureVerdict.WORSE if verdict is PoolVerdict.WORSE else FigureVerdict.HOLDS
    assert figure_verdict(found.findings[figure], LIMITS[figure]) is expected


def test_a_small_pool_is_not_favored_by_long_tails() -> None:
    """The logarithm of a mean of few values is lower than that of many: the pools' sums would differ by some 9 %."""
    random, found = Random(5), PoolComparison("5")
    counters = {f"engine-{number}": Served() for number in range(8)}
    for block in range(500):
        pools = [
            {name: each for name, each in counters.items() if (name == "engine-0") is new} for new in (False, True)
        ]
        found.observe(pools[0], pools[1], BLOCK_S * block)
        for name, each in counters.items():
            seconds = sum(random.lognormvariate(0, 1.5) for _ in range(FEWEST_REQUESTS))
            counters[name] = each + replace(BLOCK, seconds=seconds)
    ratio = found.findings[PoolFigure.TPOT].ratio
    assert ratio is not None
    assert abs(math.log(ratio)) < 0.04


def test_verdict_without_noise_needs_a_minimum_of_blocks() -> None:
    assert pool_verdict(steady(FEWEST_BLOCKS - 1), LIMITS) is PoolVerdict.UNDECIDED
    assert pool_verdict(steady(9), LIMITS) is PoolVerdict.NOT_WORSE
    assert pool_verdict(steady(9, canary=replace(BLOCK, seconds=88.1)), LIMITS) is PoolVerdict.WORSE


def test_an_engine_that_fails_all_requests_is_worse() -> None:
    found = steady(9, canary=Served(requests=40, finished=40))
    assert pool_verdict(found, LIMITS) is PoolVerdict.WORSE
    assert figure_verdict(found.findings[PoolFigure.ERRORS], LIMITS[PoolFigure.ERRORS]) is FigureVerdict.WORSE


@pytest.mark.parametrize(("requests", "ratio"), [(60, 1.5), (30, 0.75)])
def test_pools_with_different_loads_are_not_judged(requests: int, ratio: float) -> None:
    slow = replace(BLOCK, requests=requests, seconds=160.0)
    found = steady(20, canary=slow)
    assert found.load_ratio == ratio
    assert not found.comparable
    assert pool_verdict(found, LIMITS) is PoolVerdict.UNDECIDED


@pytest.mark.parametrize(
    ("limit", "finding", "verdict"),
    [
        (10, Finding(Verdict.PAYS, 1.06, 1.01, 1.2), FigureVerdict.WORSE),
        (10, Finding(Verdict.PAYS, 1.04, 1.01, 1.2), FigureVerdict.UNDECIDED),
        (10, Finding(Verdict.PAYS, 1.04, 1.01, 1.09), FigureVerdict.HOLDS),
        (10, Finding(Verdict.INCONCLUSIVE, 1.0, 0.95, 1.09), FigureVerdict.HOLDS),
        (5, Finding(Verdict.INCONCLUSIVE, 1.0, 0.95, 1.09), FigureVerdict.UNDECIDED),
        (10, Finding(Verdict.DOES_NOT_PAY, 0.8, 0.7, 0.9), FigureVerdict.HOLDS),
        (10, Finding(Verdict.INCONCLUSIVE, 1.0, None, None), FigureVerdict.UNDECIDED),
        (10, None, FigureVerdict.UNDECIDED),
    ],
)
def test_figure_is_worse_beyond_half_its_limit_and_holds_within_limit(
    limit: int, finding: Finding | None, verdict: FigureVerdict
) -> None:
    assert figure_verdict(finding, limit) is verdict


def test_block_needs_minimum_requests_in_both_pools() -> None:
    few = replace(BLOCK, requests=FEWEST_REQUESTS // 2)
    assert steady(8, canary=few).blocks == steady(8, stable=few).blocks == 4
    assert steady(8, canary=replace(BLOCK, requests=0)).blocks == 0
    enough_for_one = replace(BLOCK, requests=FEWEST_REQUESTS // 2)
    assert steady(8, enough_for_one, enough_for_one, engines=2).blocks == 4


@pytest.mark.parametrize("sizes", [(3, 2), (2, 3)])
def test_equal_numbers_of_engines_are_compared(sizes: tuple[int, int]) -> None:
    found = PoolComparison()
    counters = [Served(), Served()]
    for block in range(8):
        pools = [{f"{pool}-{each}": counters[pool] for each in range(sizes[pool])} for pool in (0, 1)]
        found.observe(pools[0], pools[1], BLOCK_S * block)
        counters = [each + BLOCK for each in counters]
    assert found.stable.requests == found.canary.requests == 7 * 2 * BLOCK.requests


def test_block_with_restarted_or_lost_engine_is_dropped() -> None:
    found = PoolComparison()
    looked = [
        (0.0, Served(), Served()),
        (60.0, BLOCK, Served()),  # the canary's counters are reset
        (120.0, BLOCK + BLOCK, BLOCK),
        (180.0, BLOCK + BLOCK + BLOCK, BLOCK + BLOCK),
    ]
    started = BLOCK + BLOCK
    done = [
        found.observe({"stable": stable + started}, {"canary": canary if at_s else started}, at_s)
        for at_s, stable, canary in looked
    ]
    assert done == [False, False, True, True]
    assert not found.observe({}, {"canary": BLOCK}, 240.0)
    assert not found.observe({"other": BLOCK}, {"canary": BLOCK}, 300.0)
    assert found.observe({"other": BLOCK + BLOCK}, {"canary": BLOCK + BLOCK}, 360.0)


def test_one_lower_counter_is_a_restart() -> None:
    assert replace(BLOCK, requests=39, tokens=9_000).since(BLOCK) is None


def test_engine_that_misses_a_scrape_prolongs_the_block() -> None:
    found = PoolComparison()
    looked = [({"a": Served()}, 0.0), ({}, BLOCK_S), ({"a": BLOCK}, BLOCK_S + 15)]
    done = [found.observe(stable, {"b": BLOCK if at_s else Served()}, at_s) for stable, at_s in looked]
    assert done == [False, False, True]


def test_requests_of_one_token_have_no_tpot() -> None:
    alone = replace(BLOCK, tokens=0, seconds=0.0, steps=0)
    found = steady(9, alone, alone)
    assert PoolFigure.TPOT not in found.findings
    assert pool_verdict(found, LIMITS) is PoolVerdict.UNDECIDED


def test_only_engines_that_report_all_counters_are_compared() -> None:
    reading = replace(
        Working().works(0.5),
        first_tokens=10, first_token_seconds=1.0, prompt_tokens=100, finished_requests=9, answered_requests=8,
    )  # fmt: skip
    silent: dict[str, EngineReading | Unreachable] = {"b": replace(reading, prompt_tokens=None), "c": Unreachable("x")}
    ((name, found),) = served({"a": reading, **silent}).items()
    assert name == "a"
    assert (found.requests, found.finished, found.answered, found.tokens) == (10, 9, 8, reading.generation_tokens - 10)
    failing = served({"a": replace(reading, server_errors=5)})["a"]
    assert (failing.requests, failing.finished, failing.answered) == (15, 14, 8)
