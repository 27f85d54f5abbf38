"""Compare the engines of two pools that serve the same traffic at the same time: a canary and the stable pool.

The requests of both pools differ, so the pairs are blocks of time. `PoolComparison` draws as many stable engines for
each block as the canary has, and compares the sums of their counters. If the pools do not differ, the log ratio of
such a block is as likely to be x as -x for any traffic, so the intervals of `PairedSeries` hold. With the sum over all
stable engines, they would not: on average, the logarithm of a mean is lower for a few long-tailed values than for many,
which favors the smaller pool. A block ends when all drawn engines together have enough requests in each pool, which is
symmetric, too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from random import Random
from typing import Final

from specdecode_operator.stats.verdict import DEFAULT_LEVEL, Finding, PairedSeries
from specdecode_operator.vllm.engine_metrics import Reading, answering_engines

BLOCK_S: Final = 60.0
"""Shortest block: traffic that changes by the minute is equal for both pools within a block."""

FEWEST_REQUESTS: Final = 30
"""Fewest requests of a pool in a block, for each engine that was drawn."""

FEWEST_BLOCKS: Final = 7
"""Fewest blocks before a figure can be decided (`verdict.PairedSeries`)."""

MOST_LOAD_RATIO: Final = 1.25
"""Largest ratio of requests per engine between the pools. A busier engine is slower with any settings."""


@dataclass(frozen=True)
class Served:
    """Counters of an engine, or their growth."""

    requests: int = 0  # that got their first token, or an HTTP status of 500 or more
    first_token_seconds: float = 0.0  # summed over requests
    prompt_tokens: int = 0
    tokens: int = 0  # after the first token of each request
    seconds: float = 0.0  # for these tokens, summed over requests
    steps: int = 0  # for these tokens, summed over requests
    finished: int = 0  # or rejected with an HTTP status of 500 or more
    answered: int = 0  # finished by a stop or by the length limit

    def since(self, begun: "Served") -> "Served | None":
        """Return the growth; None if a counter was reset, as by an engine that restarted."""
        grown = [now - before for now, before in zip(_counters(self), _counters(begun), strict=True)]
        return None if min(grown) < 0 else Served(*grown)

    def __add__(self, other: "Served") -> "Served":
        return Served(*(mine + theirs for mine, theirs in zip(_counters(self), _counters(other), strict=True)))

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that a request gets from one step; None without a step."""
        return self.tokens / self.steps if self.steps else None


_counters: Final = attrgetter(
    "requests", "first_token_seconds", "prompt_tokens", "tokens", "seconds", "steps", "finished", "answered"
)


def served(readings: Mapping[str, Reading]) -> dict[str, Served]:
    """Return the counters of the engines that report all of them, by pod."""
    found = {}
    for name, engine in answering_engines(readings).items():
        first, first_s, prompts = engine.first_tokens, engine.first_token_seconds, engine.prompt_tokens
        steps, seconds = engine.decode_steps, engine.decode_seconds
        finished, answered = engine.finished_requests, engine.answered_requests
        if None in {first, first_s, prompts, steps, seconds, finished, answered}:
            continue
        tokens = max(0, engine.generation_tokens - (first or 0))
        of_decode = tokens, seconds or 0.0, steps or 0
        # The engine does not count these requests. Without them, a canary that fails all requests would end no block.
        failed = engine.server_errors or 0
        requests, ended = (first or 0) + failed, (finished or 0) + failed
        found[name] = Served(requests, first_s or 0.0, prompts or 0, *of_decode, ended, answered or 0)
    return found


class PoolFigure(StrEnum):
    """A figure that both pools are compared by. A larger value is worse for each of them."""

    TPOT = "tpot"
    TTFT = "ttft"
    ERRORS = "errors"


def _share(over: float, under: float) -> float:
    return over / under if under else 0.0


_FIGURES: Final[Mapping[PoolFigure, Callable[[Served], float]]] = {
    PoolFigure.TPOT: lambda grown: _share(grown.seconds, grown.tokens),
    # By prompt token, which halves the noise of long-tailed prompt lengths.
    PoolFigure.TTFT: lambda grown: _share(grown.first_token_seconds, grown.prompt_tokens),
    # Requests for each answered one, and one more of both: it has a logarithm even if no request failed, or all did.
    PoolFigure.ERRORS: lambda grown: _share(grown.finished + 1, grown.answered + 1),
}


class PoolComparison:
    """Blocks of one comparison.

    Parameters
    ----------
    seed
        Seed for the draw of stable engines.
    level
        Probability that the interval of a figure holds its true ratio after every block.
    """

    def __init__(self, seed: str = "", level: float = DEFAULT_LEVEL) -> None:
        self._random = Random(seed)  # noqa: S311  a draw, not a secret
        self._series = {figure: PairedSeries(level) for figure in PoolFigure}
        self._begun_s = 0.0
        self._begun: tuple[dict[str, Served], dict[str, Served]] | None = None
        self.findings: dict[PoolFigure, Finding] = {}  # ratio of canary to stable
        self.blocks = 0
        self.stable, self.canary = Served(), Served()  # growth of the compared engines, over all blocks

    def observe(self, stable: Mapping[str, Served], canary: Mapping[str, Served], now_s: float) -> bool:
        """Add a scrape of both pools; return whether it ended a block.

        A block with an engine that restarted or left is dropped. Engines that miss a scrape prolong it.
        """
        if self._begun is None:
            self._begin(stable, canary, now_s)
            return False
        of_stable, of_canary = self._begun
        is_there = of_stable.keys() <= stable.keys() and of_canary.keys() <= canary.keys()
        if now_s - self._begun_s < BLOCK_S:
            return False
        if not is_there:
            if now_s - self._begun_s >= 2 * BLOCK_S:
                self._begin(stable, canary, now_s)
            return False
        grown = _growth(of_stable, stable), _growth(of_canary, canary)
        if grown[0] is None or grown[1] is None:
            self._begin(stable, canary, now_s)
            return False
        if min(each.requests for each in grown if each) < FEWEST_REQUESTS * len(of_canary):
            return False
        self._add(grown[0], grown[1])
        self._begin(stable, canary, now_s)
        return True

    def _begin(self, stable: Mapping[str, Served], canary: Mapping[str, Served], now_s: float) -> None:
        engines = min(len(stable), len(canary))
        drawn = [{name: pool[name] for name in self._random.sample(sorted(pool), engines)} for pool in (stable, canary)]
        self._begun, self._begun_s = (drawn[0], drawn[1]) if engines else None, now_s

    def _add(self, stable: Served, canary: Served) -> None:
        self.blocks += 1
        self.stable, self.canary = self.stable + stable, self.canary + canary
        for figure, value in _FIGURES.items():
            before, now = value(stable), value(canary)
            if before and now:  # requests of one token have no TPOT
                self.findings[figure] = self._series[figure].add(before, now)

    @property
    def load_ratio(self) -> float | None:
        """Requests of a canary engine for each request of a stable one; None before the first block."""
        return self.canary.requests / self.stable.requests if self.stable.requests else None

    @property
    def comparable(self) -> bool:
        """Whether engines of both pools got about the same number of requests."""
        ratio = self.load_ratio
        return ratio is not None and 1 / MOST_LOAD_RATIO <= ratio <= MOST_LOAD_RATIO


def _growth(begun: Mapping[str, Served], now: Mapping[str, Served]) -> Served | None:
    total = Served()
    for name, before in begun.items():
        grown = now[name].since(before)
        if grown is None:
            return None
        total += grown
    return total


class FigureVerdict(StrEnum):
    """Verdict on one figure with its limit."""

    HOLDS = "Holds"
    WORSE = "Worse"
    UNDECIDED = "Undecided"


def figure_verdict(finding: Finding | None, most_percent: int) -> FigureVerdict:
    """Return whether a figure is within its limit.

    It is worse if the interval excludes an equal canary and the ratio exceeds half of the limit, as at the upgrade
    gate. It holds if the whole interval is within the limit.
    """
    if finding is None or finding.ratio is None:
        return FigureVerdict.UNDECIDED
    most = most_percent / 100
    if finding.low is not None and finding.low > 1 and finding.ratio > 1 + most / 2:
        return FigureVerdict.WORSE
    if finding.high is not None and finding.high < 1 + most:
        return FigureVerdict.HOLDS
    return FigureVerdict.UNDECIDED


class PoolVerdict(StrEnum):
    """Verdict on a canary."""

    NOT_WORSE = "NotWorse"
    WORSE = "Worse"
    UNDECIDED = "Undecided"


def pool_verdict(comparison: PoolComparison, most_percent: Mapping[PoolFigure, int]) -> PoolVerdict:
    """Return the verdict with the limit of each figure: one worse figure is enough, and all must hold to pass."""
    if not comparison.comparable or comparison.blocks < FEWEST_BLOCKS:
        return PoolVerdict.UNDECIDED
    found = {figure_verdict(comparison.findings.get(figure), most) for figure, most in most_percent.items()}
    if FigureVerdict.WORSE in found:
        return PoolVerdict.WORSE
    return PoolVerdict.NOT_WORSE if found == {FigureVerdict.HOLDS} else PoolVerdict.UNDECIDED
