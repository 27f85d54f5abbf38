"""Measure the false alarms of SpeculationEffective, and how many windows it takes to report a real problem."""

import math
from collections.abc import Callable, Iterator
from itertools import count, islice
from multiprocessing.pool import Pool
from random import Random
from statistics import quantiles
from typing import Final

from specdecode_operator.deployment.observed.decay import (
    LEARNED_WINDOWS,
    REASONS,
    WINDOWS_BETWEEN_FALSE_ALARMS,
    Decline,
    Usual,
)

WINDOWS: Final = 200_000
RUNS: Final = 30
MOST: Final = 5_000
DRAFTED_TOKENS: Final = 1024
"""Drafted tokens in a window."""

Noise = Callable[[Random], Iterator[float]]


def _random(seed: int) -> Random:
    return Random(seed)  # noqa: S311  no secret


def independent(size: float) -> Noise:
    """Return noise that is independent in each window."""
    return lambda rng: (rng.gauss(0, size) for _ in count())


def wandering(size: float, persistence: float) -> Noise:
    """Return noise that persists for a while, as if prompts of one kind arrived."""

    def noise(rng: Random) -> Iterator[float]:
        at = 0.0
        while True:
            at = persistence * at + rng.gauss(0, size * math.sqrt(1 - persistence**2))
            yield at

    return noise


def accepted(was: float, now: float, noise: Noise, rng: Random) -> Iterator[float]:
    """Return the losses of an acceptance compared with that of the first windows."""
    around = noise(rng)

    def shares(mean: float) -> Iterator[float]:
        for deviation in around:
            chance = min(1.0, max(0.0, mean + deviation))
            spread = math.sqrt(chance * (1 - chance) / DRAFTED_TOKENS)
            yield min(1.0, max(0.0, rng.gauss(chance, spread)))

    usual = Usual.of(list(islice(shares(was), LEARNED_WINDOWS)))
    return (usual.loss_below(share, 1.0) for share in shares(now))


def useless(acceptance: float, least: float, noise: Noise, rng: Random) -> Iterator[float]:
    """Return the losses of an acceptance compared with the lowest one that may pay."""
    return ((1 - min(1.0, max(0.0, acceptance + each))) / (1 - least) for each in noise(rng))


def paced(times: float, noise: Noise, rng: Random) -> Iterator[float]:
    """Return the losses of a time per token that rises by a factor."""
    around = noise(rng)
    usual = Usual.of([math.exp(each) for each in islice(around, LEARNED_WINDOWS)])
    return (usual.loss_above(times * math.exp(each)) for each in around)


def alarms(losses: Iterator[float], windows: int) -> list[int]:
    """Return the number of windows before each alarm, counted from the previous one."""
    known, since, found = Decline(), 0, []
    for loss in islice(losses, windows):
        since += 1
        known = known.after(loss, len(REASONS) * WINDOWS_BETWEEN_FALSE_ALARMS)
        if known.found:
            found.append(since)
            known, since = Decline(), 0
    return found


_WORST: Final[dict[str, Callable[[Random], Iterator[float]]]] = {
    "0 or 2": lambda rng: (rng.choice((0.0, 2.0)) for _ in count()),
    "4 in a quarter of windows": lambda rng: (rng.choice((4.0, 0.0, 0.0, 0.0)) for _ in count()),
    "uniform between 0 and 2": lambda rng: (rng.uniform(0, 2) for _ in count()),
}
_NOISES: Final[dict[str, Noise]] = {
    "2 points": independent(0.02),
    "5 points": independent(0.05),
    "5 points, wandering (0.9)": wandering(0.05, 0.9),
    "10 points, wandering (0.9)": wandering(0.1, 0.9),
}


def _edge(name: str) -> str:
    found = len(alarms(_WORST[name](_random(1)), WINDOWS))
    return f"{name:<28}{found:>6}"


def _silent(name: str) -> str:
    row = [f"{name:<28}"]
    for was in (0.3, 0.6, 0.85):
        found = sum(len(alarms(accepted(was, was, _NOISES[name], _random(seed)), WINDOWS // 20)) for seed in range(20))
        row.append(f"{found:>8}")
    found = sum(len(alarms(paced(1.0, _NOISES[name], _random(seed)), WINDOWS // 20)) for seed in range(20))
    return "".join([*row, f"{found:>8}"])


def _found_after(losses: Callable[[Random], Iterator[float]]) -> str:
    after = [next(iter(alarms(losses(_random(seed)), MOST)), MOST) for seed in range(RUNS)]
    cut = quantiles(after, n=10)
    return f"{_count(cut[4]):>7} /{_count(cut[8]):>6}"


def _count(windows: float) -> str:
    return "-" if windows >= MOST else f"{windows:.0f}"


def _power(drop: float) -> str:
    noise = _NOISES["5 points, wandering (0.9)"]
    row = [_found_after(lambda rng, was=was: accepted(was, was * (1 - drop), noise, rng)) for was in (0.3, 0.6, 0.85)]  # type: ignore[misc]
    return f"{drop:>7.0%}   " + "".join(row)


def _useless(acceptance: float) -> str:
    noise = independent(0.01)
    row = [_found_after(lambda rng, least=least: useless(acceptance, least, noise, rng)) for least in (0.05, 0.1, 0.2)]  # type: ignore[misc]
    return f"{acceptance:>7.1%}   " + "".join(row)


def _slow(times: float) -> str:
    return f"{times:>7.2f}   " + _found_after(lambda rng: paced(times, _NOISES["10 points, wandering (0.9)"], rng))


def main() -> None:
    """Print the tables."""
    with Pool() as pool:
        print(f"false alarms in {WINDOWS:,} windows at the largest tolerated loss (guaranteed mean: {_guarantee()})")
        print("\n".join(pool.imap(_edge, _WORST)))
        print(f"\nalarms in {WINDOWS:,} windows without a decline: acceptance 30, 60, 85 %, time per token")
        print("\n".join(pool.imap(_silent, _NOISES)))
        print(f"\nwindows until 50 % / 90 % of {RUNS} declines are detected: acceptance 30, 60, 85 %")
        print("\n".join(pool.imap(_power, (0.15, 0.2, 0.3, 0.5, 0.9))))
        print(f"\nwindows until 50 % / 90 % of {RUNS} drafts that never pay are detected: break-even 5, 10, 20 %")
        print("\n".join(pool.imap(_useless, (0.0, 0.01, 0.02, 0.04))))
        print("\nthe same for a time per token that rises by a factor")
        print("\n".join(pool.imap(_slow, (1.4, 1.6, 2.0, 3.0))))


def _guarantee() -> str:
    return f"at most {WINDOWS / (len(REASONS) * WINDOWS_BETWEEN_FALSE_ALARMS):.1f} each"


if __name__ == "__main__":
    main()
