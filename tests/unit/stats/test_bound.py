"""The bound of a ratio, held against its definition, written out plainly."""

import math
from random import Random
from statistics import quantiles

import pytest

from specdecode_operator.stats.verdict import DEPENDENCES, History, LowerBound
from tests.support.paired_blocks import Noise, autocorrelated, normal, pairs, with_outliers

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
def test_the_evidence_stands_at_what_is_needed_where_the_bound_is(noise: Noise, dependence: float) -> None:
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
def test_how_blocks_follow_each_other_is_seen(followed: float, at_least: float, at_most: float) -> None:
    history, noise = History(), autocorrelated(followed)(Random(26))
    assert history.dependence() == DEPENDENCES[-1], "of no blocks the worst is supposed"
    for _ in range(500):
        history.add(next(noise))
    assert at_least <= history.dependence() <= at_most


def test_one_outlier_does_not_hide_how_blocks_follow_each_other() -> None:
    history, noise = History(), autocorrelated(0.6)(Random(27))
    for look in range(300):
        history.add(next(noise) + (1e4 if look == 150 else 0))
    assert history.dependence() >= 0.5
