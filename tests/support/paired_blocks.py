"""Paired blocks of comparisons whose truth is known, for `specdecode verdict`, what is under it, and its bench."""

import math
from collections.abc import Callable, Iterator
from random import Random

from specdecode_operator.stats.verdict import Finding, PairedSeries, Verdict

Pair = tuple[float, float]
Noise = Callable[[Random], Iterator[float]]


def normal(random: Random) -> Iterator[float]:
    while True:
        yield random.gauss(0, 1)


def with_outliers(random: Random) -> Iterator[float]:
    """Heavy tails (Student's t with two degrees of freedom), and one block in twenty a disaster of one arm."""
    while True:
        tail = random.gauss(0, 1) / math.sqrt(random.expovariate(1))
        yield tail * (30 if random.random() < 0.05 else 1)


def autocorrelated(share: float) -> Noise:
    """Each block follows the last one."""

    def noise(random: Random) -> Iterator[float]:
        value = random.gauss(0, 1)
        while True:
            yield value
            value = share * value + math.sqrt(1 - share**2) * random.gauss(0, 1)

    return noise


def growing(random: Random) -> Iterator[float]:
    """Ever noisier, from a fifth to three times."""
    deviation = 0.2
    while True:
        yield deviation * random.gauss(0, 1)
        deviation = min(deviation * 1.05, 3)


def pairs(blocks: int, effect: float, deviation: float, random: Random, noise: Noise = normal) -> list[Pair]:
    """Goodput of two arms of which the candidate's is better by an effect, on a level that drifts for both."""
    found, level, deviations = [], 1000.0, noise(random)
    for _ in range(blocks):
        level *= math.exp(random.gauss(0, 0.02))
        ratio = (1 + effect) * math.exp(math.sqrt(2) * deviation * next(deviations))
        found.append((level / math.sqrt(ratio), level * math.sqrt(ratio)))
    return found


def findings(blocks: list[Pair], level: float = 0.95) -> list[Finding]:
    """What is said after each block."""
    series = PairedSeries(level)
    return [series.add(*block) for block in blocks]


def wrong(found: list[Finding]) -> bool:
    """Whether a look of a comparison of two equal arms decided."""
    return any(each.verdict is not Verdict.INCONCLUSIVE for each in found)
