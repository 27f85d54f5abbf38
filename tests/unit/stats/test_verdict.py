"""Whether a candidate pays: intervals on comparisons whose truth is known."""

import json
import math
from pathlib import Path
from random import Random
from statistics import quantiles

import pytest

from specdecode_operator.stats.verdict import (
    DEPENDENCES,
    History,
    LowerBound,
    Verdict,
    between_starts,
    starts_needed,
    student_quantile,
)
from tests.support.paired_blocks import (
    Noise,
    Pair,
    autocorrelated,
    findings,
    growing,
    normal,
    pairs,
    with_outliers,
    wrong,
)

RECORDED: dict[str, list[float]] = json.loads(
    (Path(__file__).parents[2] / "data/block_series/recorded.json").read_text()
)["series"]
RUNS = 200
MOST_WRONG = RUNS // 20
NOISES: dict[str, Noise] = {
    "heavy tails and outliers": with_outliers,
    "growing": growing,
    "autocorrelated": autocorrelated(0.5),
}


@pytest.mark.parametrize("noise", NOISES)
def test_equal_arms_rarely_get_a_verdict_over_repeated_looks(noise: str) -> None:
    random = Random(16)
    runs = [findings(pairs(30, 0.0, 0.05, random, NOISES[noise])) for _ in range(RUNS)]
    assert sum(map(wrong, runs)) <= MOST_WRONG


def test_randomly_ordered_recorded_blocks_rarely_get_a_verdict() -> None:
    random = Random(16)
    mistakes = 0
    for _ in range(RUNS):
        series = random.choice(list(RECORDED.values()))
        start = random.randrange(2)
        in_turn = list(zip(series[start::2], series[start + 1 :: 2], strict=False))
        mistakes += wrong(findings([random.choice([(a, b), (b, a)]) for a, b in in_turn][:30]))
    assert mistakes <= MOST_WRONG


@pytest.mark.parametrize("noise", NOISES)
def test_interval_covers_true_ratio_at_every_look(noise: str) -> None:
    random = Random(17)
    missed = 0
    for _ in range(RUNS // 4):
        found = findings(pairs(30, 0.1, 0.05, random, NOISES[noise]))
        missed += any(not (each.low or 0.0) <= 1.1 <= (each.high or math.inf) for each in found)
    assert missed <= MOST_WRONG // 4


@pytest.mark.parametrize(("effect", "deviation", "blocks"), [(0.1, 0.02, 20), (0.05, 0.02, 30), (-0.1, 0.05, 60)])
def test_effect_is_found_within_few_blocks(effect: float, deviation: float, blocks: int) -> None:
    """At least nine times out of ten."""
    random = Random(18)
    expected = Verdict.PAYS if effect > 0 else Verdict.DOES_NOT_PAY
    runs = [findings(pairs(blocks, effect, deviation, random)) for _ in range(50)]
    assert sum(any(each.verdict is expected for each in found) for found in runs) >= 45


def test_verdict_without_noise_takes_seven_to_nine_blocks() -> None:
    """Seven heads in a row are a chance of 1 in 128; for twice 39 in 40 nobody may decide before six."""
    found = findings([(100.0, 200.0)] * 20)
    first = next(index for index, each in enumerate(found, start=1) if each.verdict is Verdict.PAYS)
    assert 7 <= first <= 9
    stricter = findings([(100.0, 200.0)] * 20, level=0.999)
    assert next(index for index, each in enumerate(stricter, start=1) if each.verdict is Verdict.PAYS) > first + 4


def blocks_of_an_effect() -> list[Pair]:
    return pairs(60, 0.08, 0.04, Random(20), autocorrelated(0.2))


def test_estimate_is_in_interval_and_verdict_follows_from_it() -> None:
    for found in findings(pairs(80, -0.03, 0.1, Random(21), with_outliers)):
        assert found.ratio is not None
        assert (found.low or 0.0) <= found.ratio <= (found.high or math.inf)
        above, below = found.low is not None and found.low > 1, found.high is not None and found.high < 1
        expected = Verdict.PAYS if above else Verdict.DOES_NOT_PAY if below else Verdict.INCONCLUSIVE
        assert found.verdict is expected


def test_swapped_arms_get_the_mirrored_verdict() -> None:
    mirror = {
        Verdict.PAYS: Verdict.DOES_NOT_PAY,
        Verdict.DOES_NOT_PAY: Verdict.PAYS,
        Verdict.INCONCLUSIVE: Verdict.INCONCLUSIVE,
    }
    blocks = blocks_of_an_effect()
    for found, swapped in zip(findings(blocks), findings([(b, a) for a, b in blocks]), strict=True):
        assert swapped.verdict is mirror[found.verdict]
        assert swapped.ratio == pytest.approx(1 / (found.ratio or 1))
        assert swapped.low == (None if found.high is None else pytest.approx(1 / found.high))
        assert swapped.high == (None if found.low is None else pytest.approx(1 / found.low))


def test_outliers_do_not_change_the_verdict() -> None:
    equal = pairs(30, 0.0, 0.05, Random(22))
    assert not wrong(findings([*equal, (1.0, 1e9), (1e-9, 1e9), (0.0, 50.0)]))
    better = pairs(40, 0.1, 0.03, Random(23))
    better[10], better[20], better[30] = (1e9, 1.0), (50.0, 0.0), (1000.0, 3.0)
    last = findings(better)[-1]
    assert last.verdict is Verdict.PAYS
    assert last.ratio == pytest.approx(1.1, abs=0.03)


def test_arm_with_zero_throughput_gets_verdict_without_ratio() -> None:
    last = findings([(0.0, 80.0)] * 12)[-1]
    assert (last.verdict, last.ratio, last.low, last.high) == (Verdict.PAYS, None, None, None)


@pytest.mark.parametrize(
    ("blocks", "ratio"),
    [
        ([(100.0, 110.0), (0.0, 110.0), (100.0, 108.0)], 1.1),
        ([(100.0, 110.0), (100.0, 0.0), (100.0, 108.0), (100.0, 108.0)], 1.08),
        ([(0.0, 80.0)] * 4 + [(100.0, 110.0)] * 6, 1.1),
        # Those at both ends do not make up for each other.
        ([(0.0, 80.0), (80.0, 0.0), (100.0, 110.0), (100.0, 110.0)], 1.1),
        ([(0.0, 80.0), (100.0, 110.0)], None),
        ([(0.0, 80.0), (80.0, 0.0)], None),
    ],
)
def test_blocks_with_one_zero_arm_keep_ratio_of_other_blocks(blocks: list[Pair], ratio: float | None) -> None:
    found = findings(blocks)[-1].ratio
    assert found == (None if ratio is None else pytest.approx(ratio))


def test_blocks_with_both_arms_zero_are_ignored() -> None:
    empty = findings([(0.0, 0.0)] * 3)[-1]
    assert (empty.verdict, empty.ratio) == (Verdict.INCONCLUSIVE, None)
    blocks = blocks_of_an_effect()
    assert findings([*blocks, (0.0, 0.0)])[-1] == findings(blocks)[-1]


@pytest.mark.parametrize("noise", [0.0, 1e-9])
def test_interval_of_nearly_equal_blocks_covers_their_ratio(noise: float) -> None:
    for found in findings([(100.0, 110.0 + noise * (-1) ** block) for block in range(60)])[8:]:
        assert found.low is not None
        assert found.high is not None
        assert found.low < 1.1 < found.high
        assert found.low == pytest.approx(found.high, rel=2e-6)


NEEDED = math.log(40)


def scale(before: list[float]) -> float:
    if len(before) < 2:
        return 0.0
    low, _, high = quantiles(before, n=4, method="inclusive")
    return (high - low) / 1.349 * len(before) / (len(before) - 1)


def evidence(log_ratios: list[float], supposed: float, dependence: float) -> float:
    """Mean over the weights of products of 2 / (1 + exp(-2 w x))."""
    products = dict.fromkeys((0.125, 0.25, 0.5, 1.0, 2.0), 1.0)
    for position, log_ratio in enumerate(log_ratios):
        known = scale(log_ratios[:position])
        deviation = log_ratio - supposed
        if position:
            before = log_ratios[position - 1] - supposed
            deviation -= dependence * (max(-3 * known, min(3 * known, before)) if known else before)
        narrower = known * math.sqrt(1 - dependence**2)
        x = max(-2.0, min(2.0, deviation / narrower)) if known else math.copysign(1, deviation)
        for weight in products:
            products[weight] *= 2 / (1 + math.exp(-2 * weight * x))
    return math.log(sum(products.values()) / len(products))


@pytest.mark.parametrize("dependence", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("noise", [normal, with_outliers, autocorrelated(0.5)])
def test_evidence_crosses_threshold_at_the_bound(noise: Noise, dependence: float) -> None:
    random, compared = Random(25), 0
    for _ in range(3):
        history = History()
        bounds = LowerBound(history, 1, dependence), LowerBound(history, -1, dependence)
        for look, (baseline, candidate) in enumerate(pairs(70, 0.05, 0.05, random, noise), start=1):
            history.add(math.log(candidate) - math.log(baseline))
            # The bound was sought on a grid of this step at most.
            step = history.scale() / math.sqrt(look)
            for side, bound in zip((1, -1), bounds, strict=True):
                value = bound.value(NEEDED)
                if value is not None and look % 7 == 0:
                    mirrored = [side * each for each in history.log_ratios]
                    assert evidence(mirrored, value - step, dependence) >= NEEDED
                    assert evidence(mirrored, value + step, dependence) < NEEDED
                    compared += 1
    assert compared > 20


@pytest.mark.parametrize(("followed", "at_least", "at_most"), [(0.0, 0.0, 0.2), (0.5, 0.4, 0.7), (0.9, 0.8, 0.8)])
def test_autocorrelation_of_blocks_is_estimated(followed: float, at_least: float, at_most: float) -> None:
    history, noise = History(), autocorrelated(followed)(Random(26))
    assert history.dependence() == DEPENDENCES[-1], "of no blocks the worst is supposed"
    for _ in range(500):
        history.add(next(noise))
    assert at_least <= history.dependence() <= at_most


class TestInterval:
    def test_interval_matches_textbook_two_group_interval(self) -> None:
        # Means 2 and 5, a pooled variance of (2 + 2) / 2, and 2 degrees of freedom for 2 + 2 starts.
        low, high = between_starts([[1.0, 3.0], [4.0, 6.0]], 1, 0.95) or (0.0, 0.0)
        half = 4.3027 * math.sqrt(2.0 * (1 / 2 + 1 / 2))
        assert (low, high) == (pytest.approx(3 - half, abs=1e-3), pytest.approx(3 + half, abs=1e-3))

    @pytest.mark.parametrize("arms", [[[1.0], [2.0]], [[1.0, 2.0], []], [[], [1.0, 2.0]]])
    def test_interval_is_none_without_enough_starts(self, arms: list[list[float]]) -> None:
        assert between_starts(arms, 1, 0.95) is None

    @pytest.mark.parametrize("starts", [2, 3, 5])
    def test_interval_error_rate_matches_its_level(self, starts: int) -> None:
        random, wrong, runs = Random(starts), 0, 2000
        for _ in range(runs):
            arms = [[random.gauss(0, 0.02) for _ in range(starts)] for _ in range(2)]
            low, high = between_starts(arms, 1, 0.95) or (0.0, 0.0)
            wrong += not low <= 0 <= high
        assert wrong / runs == pytest.approx(0.05, abs=0.02)


class TestStartsNeeded:
    def test_starts_needed_are_the_fewest_that_exclude_zero(self) -> None:
        arms = [[0.0, 0.02], [0.03, 0.05]]
        variance = 0.0002
        starts = starts_needed(arms, 0.03, 0.95)
        assert starts is not None
        halves = [
            student_quantile(0.975, 2 * (each - 1)) * math.sqrt(2 * variance / each) for each in (starts - 1, starts)
        ]
        assert halves[0] > 0.03 > halves[1]

    def test_starts_needed_are_none_for_single_start_or_beyond_limit(self) -> None:
        assert starts_needed([[1.0], [2.0]], 0.1, 0.95) is None
        assert starts_needed([[0.0, 1.0], [0.0, 1.0]], 0.01, 0.95) is None


@pytest.mark.parametrize(
    ("freedom", "share", "quantile"),
    # Tables of every textbook, such as Abramowitz and Stegun 1964, table 26.10; the last four of
    # https://www.itl.nist.gov/div898/handbook/eda/section3/eda3672.htm
    [
        *[(1, 0.975, 12.706), (2, 0.975, 4.303), (3, 0.995, 5.841), (4, 0.975, 2.776), (30, 0.9, 1.310)],
        *[(120, 0.99, 2.358), (5, 0.995, 4.032), (5, 0.999, 5.893), (15, 0.999, 3.733), (31, 0.975, 2.040)],
    ],
)
def test_student_quantiles_match_published_tables(freedom: int, share: float, quantile: float) -> None:
    assert student_quantile(share, freedom) == pytest.approx(quantile, abs=5e-4)
