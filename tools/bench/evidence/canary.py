"""How often a canary is judged wrongly, and how long a verdict takes: bursty traffic on engines in virtual time."""

import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from multiprocessing.pool import Pool
from typing import Final

from specdecode_operator.api.deployment import CanaryLimits
from specdecode_operator.deployment.rollout.canary import limits_of
from specdecode_operator.stats.pool_comparison import PoolComparison, PoolFigure, PoolVerdict, pool_verdict
from specdecode_operator.stats.verdict import Verdict
from tests.support.pool_traffic import Engine, Traffic, looks

RUNS: Final = 1000
POWER_RUNS: Final = 200
MOST_WRONG: Final = 0.05
MINUTES: Final = 60

EQUAL: Final = {
    "1 of 4 engines": partial(looks),
    "1 of 2 engines": partial(looks, stable=1),
    "2 of 6 engines": partial(looks, stable=4, canary=2),
    "1 of 4, a fifth of the traffic": partial(looks, traffic=Traffic(sessions_per_s=0.08)),
    "1 of 4, twice the bursts": partial(looks, traffic=Traffic(burst=1.4)),
    "1 of 4, some get more sessions": partial(looks, traffic=Traffic(skew=0.3)),
}
CHANGED: Final = {
    "10 % faster": Engine(step_time=1 / 1.1, prefill_time=1 / 1.1),
    "5 % slower": Engine(step_time=1.05, prefill_time=1.05),
    "10 % slower": Engine(step_time=1.1, prefill_time=1.1),
    "20 % slower": Engine(step_time=1.2, prefill_time=1.2),
    "drafts accepted 10 % less": Engine(tokens_per_step=0.9),
    "2 % of requests fail": Engine(errors=0.02),
}

Judged = tuple[frozenset[PoolFigure], PoolVerdict, float]
"""The figures whose interval ever excluded equality, the first verdict, and its time in minutes."""


def _judged(name: str, seed: int) -> Judged:
    found, limits = PoolComparison(str(seed)), limits_of(CanaryLimits())
    run = EQUAL[name] if name in EQUAL else partial(looks, engine=CHANGED[name])
    verdict, minutes, told = PoolVerdict.UNDECIDED, float(MINUTES), set[PoolFigure]()
    for at_s, stable, canary in run(seed):
        if not found.observe(stable, canary, at_s) or not found.comparable:
            continue
        told |= {figure for figure, each in found.findings.items() if each.verdict is not Verdict.INCONCLUSIVE}
        if verdict is PoolVerdict.UNDECIDED:
            verdict, minutes = pool_verdict(found, limits), at_s / 60
    return frozenset(told), verdict, minutes


def _row(name: str, judged: list[Judged]) -> str:
    told, verdicts = Counter(figure for figures, _, _ in judged for figure in figures), Counter(v for _, v, _ in judged)
    wrong = [told[figure] for figure in PoolFigure] + [sum(bool(figures) for figures, _, _ in judged)]
    ends = sorted(minutes for _, verdict, minutes in judged if verdict is not PoolVerdict.UNDECIDED)
    shares = "".join(f"{100 * each / len(judged):8.1f}" for each in (*wrong, *(verdicts[each] for each in PoolVerdict)))
    return f"{name:32}{shares}{ends[len(ends) // 2] if ends else MINUTES:9.0f}"


def report() -> Iterator[str]:
    """Yield the tables, line by line."""
    heads = [*(each.value for each in PoolFigure), "any", "promoted", "back", "neither"]
    yield f"runs of {MINUTES} minutes, in %: an interval that ever excluded equality, by figure; then the verdict"
    with Pool() as pool:
        for title, names, runs in (("equal pools", EQUAL, RUNS), ("changed canary, 1 of 4", CHANGED, POWER_RUNS)):
            yield f"\n{f'{title} ({runs:,} runs)':32}" + "".join(f"{each:>8}"[-8:] for each in heads) + "  minutes"
            for name in names:
                yield _row(name, pool.starmap(_judged, ((name, seed) for seed in range(runs)), chunksize=5))


if __name__ == "__main__":
    for line in report():
        print(line)
        sys.stdout.flush()
