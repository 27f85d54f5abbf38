"""Whether a candidate pays: an interval that holds at every look, on comparisons whose truth is known."""

import json
import math
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from specdecode_operator.stats.verdict import Verdict
from tests.support.paired_blocks import (
    Noise,
    Pair,
    autocorrelated,
    findings,
    growing,
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
def test_equal_arms_are_rarely_told_apart_however_often_one_looks(noise: str) -> None:
    random = Random(16)
    runs = [findings(pairs(30, 0.0, 0.05, random, NOISES[noise])) for _ in range(RUNS)]
    assert sum(map(wrong, runs)) <= MOST_WRONG


def test_recorded_blocks_in_random_order_are_rarely_told_apart() -> None:
    random = Random(16)
    mistakes = 0
    for _ in range(RUNS):
        series = random.choice(list(RECORDED.values()))
        start = random.randrange(2)
        in_turn = list(zip(series[start::2], series[start + 1 :: 2], strict=False))
        mistakes += wrong(findings([random.choice([(a, b), (b, a)]) for a, b in in_turn][:30]))
    assert mistakes <= MOST_WRONG


@pytest.mark.parametrize("noise", NOISES)
def test_the_interval_holds_the_true_ratio_at_every_look(noise: str) -> None:
    random = Random(17)
    missed = 0
    for _ in range(RUNS // 4):
        found = findings(pairs(30, 0.1, 0.05, random, NOISES[noise]))
        missed += any(not (each.low or 0.0) <= 1.1 <= (each.high or math.inf) for each in found)
    assert missed <= MOST_WRONG // 4


@pytest.mark.parametrize(("effect", "deviation", "blocks"), [(0.1, 0.02, 20), (0.05, 0.02, 30), (-0.1, 0.05, 60)])
def test_an_effect_is_found_in_a_few_blocks(effect: float, deviation: float, blocks: int) -> None:
    """At least nine times out of ten."""
    random = Random(18)
    expected = Verdict.PAYS if effect > 0 else Verdict.DOES_NOT_PAY
    runs = [findings(pairs(blocks, effect, deviation, random)) for _ in range(50)]
    assert sum(any(each.verdict is expected for each in found) for found in runs) >= 45


def test_the_estimate_comes_near_and_the_interval_narrows() -> None:
    found = findings(pairs(400, 0.05, 0.05, Random(19)))
    assert found[-1].ratio == pytest.approx(1.05, abs=0.012)
    widths = [each.high - each.low for each in found if each.low is not None and each.high is not None]
    assert widths[-1] < widths[40] / 2 < widths[0] / 4


def test_without_noise_a_verdict_takes_as_many_blocks_as_a_coin_would() -> None:
    """Seven heads in a row are a chance of 1 in 128; for twice 39 in 40 nobody may decide before six."""
    found = findings([(100.0, 200.0)] * 20)
    first = next(index for index, each in enumerate(found, start=1) if each.verdict is Verdict.PAYS)
    assert 7 <= first <= 9
    stricter = findings([(100.0, 200.0)] * 20, level=0.999)
    assert next(index for index, each in enumerate(stricter, start=1) if each.verdict is Verdict.PAYS) > first + 4


def blocks_of_an_effect() -> list[Pair]:
    return pairs(60, 0.08, 0.04, Random(20), autocorrelated(0.2))


def test_nothing_is_said_before_there_is_evidence() -> None:
    first = findings(blocks_of_an_effect())[0]
    assert (first.verdict, first.low, first.high) == (Verdict.INCONCLUSIVE, None, None)
    assert first.ratio


def test_later_blocks_change_no_answer() -> None:
    blocks = blocks_of_an_effect()
    whole = findings(blocks)
    assert any(each.verdict is Verdict.PAYS for each in whole)
    for count in (1, 7, 20, 33):
        assert findings(blocks[:count]) == whole[:count]


def test_the_estimate_lies_in_the_interval_and_the_verdict_says_where_that_lies() -> None:
    for found in findings(pairs(80, -0.03, 0.1, Random(21), with_outliers)):
        assert found.ratio is not None
        assert (found.low or 0.0) <= found.ratio <= (found.high or math.inf)
        above, below = found.low is not None and found.low > 1, found.high is not None and found.high < 1
        expected = Verdict.PAYS if above else Verdict.DOES_NOT_PAY if below else Verdict.INCONCLUSIVE
        assert found.verdict is expected


def test_arms_that_are_swapped_get_the_mirrored_answer() -> None:
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


def test_an_outlier_neither_decides_nor_destroys() -> None:
    equal = pairs(30, 0.0, 0.05, Random(22))
    assert not wrong(findings([*equal, (1.0, 1e9), (1e-9, 1e9), (0.0, 50.0)]))
    better = pairs(40, 0.1, 0.03, Random(23))
    better[10], better[20], better[30] = (1e9, 1.0), (50.0, 0.0), (1000.0, 3.0)
    last = findings(better)[-1]
    assert last.verdict is Verdict.PAYS
    assert last.ratio == pytest.approx(1.1, abs=0.03)


def test_an_arm_that_never_did_anything_has_no_ratio_and_a_verdict() -> None:
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
def test_blocks_in_which_one_arm_did_nothing_leave_the_ratio_of_the_others(
    blocks: list[Pair], ratio: float | None
) -> None:
    found = findings(blocks)[-1].ratio
    assert found == (None if ratio is None else pytest.approx(ratio))


def test_blocks_in_which_neither_arm_did_anything_say_nothing() -> None:
    empty = findings([(0.0, 0.0)] * 3)[-1]
    assert (empty.verdict, empty.ratio) == (Verdict.INCONCLUSIVE, None)
    blocks = blocks_of_an_effect()
    assert findings([*blocks, (0.0, 0.0)])[-1] == findings(blocks)[-1]


def test_arms_that_are_equal_to_the_last_digit_are_equal() -> None:
    for found in findings([(100.0, 100.0)] * 40):
        assert found.verdict is Verdict.INCONCLUSIVE
        assert found.ratio == 1
    last = findings([(100.0, 100.0)] * 40)[-1]
    assert (last.low, last.high) == (pytest.approx(1), pytest.approx(1))


@pytest.mark.parametrize("noise", [0.0, 1e-9])
def test_the_interval_of_blocks_that_are_equal_or_nearly_so_holds_their_ratio(noise: float) -> None:
    for found in findings([(100.0, 110.0 + noise * (-1) ** block) for block in range(60)])[8:]:
        assert found.low is not None
        assert found.high is not None
        assert found.low < 1.1 < found.high
        assert found.low == pytest.approx(found.high, rel=2e-6)


def test_a_higher_level_has_a_wider_interval() -> None:
    blocks = blocks_of_an_effect()
    ends = [findings(blocks, level)[-1] for level in (0.5, 0.9, 0.99, 0.9999)]
    for narrow, wide in pairwise(ends):
        assert narrow.low is not None
        assert narrow.high is not None
        assert (wide.low or 0) < narrow.low
        assert (wide.high or math.inf) > narrow.high
