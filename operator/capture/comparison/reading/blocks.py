"""Phases cut into blocks of the same requests for two arms: their goodput, block by block."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from specdecode_operator.api.capture_workload import Pattern, Phase
from specdecode_operator.capture.comparison.reading.client_side import Sent

_BLOCKS: Final = 16
"""Of a phase in one repetition, about: with two repetitions thrice as many as a verdict takes at least."""

_FEWEST_OPEN: Final = 8
"""Requests of a block in phases that send at a rate."""


@dataclass(frozen=True)
class Block:
    """Some successive requests of one arm."""

    good_tokens: int
    seconds: float

    @property
    def goodput(self) -> float:
        """Tokens of requests within the SLO, a second."""
        return self.good_tokens / self.seconds


def sends_at_a_rate(phase: Phase) -> bool:
    """Whether it sends the same to all arms, however fast they are."""
    return phase.pattern not in (Pattern.CLOSED, Pattern.MULTITURN)


def block_requests(phase: Phase, requests: int) -> int:
    """Return how many requests a block has: known from the workload, before anything is measured.

    Twice as many as run at once, so that most of a block lies beside no other one.
    """
    fewest = _FEWEST_OPEN if phase.concurrency is None else 2 * phase.concurrency
    return max(fewest, math.ceil(requests / _BLOCKS))


def paired_blocks(phase: Phase, baseline: Sent, candidate: Sent) -> list[tuple[Block, Block]]:
    """Return the blocks of one repetition; requests that one of the two did not come to are left out."""
    requests = min(len(baseline), len(candidate))
    length = block_requests(phase, requests)
    starts = list(range(0, requests - length + 1, length)) or [0][: min(1, requests)]
    pairs = zip(_blocks(baseline, starts, requests), _blocks(candidate, starts, requests), strict=True)
    return [(one, other) for one, other in pairs if one is not None and other is not None]


def _blocks(sent: Sent, starts: list[int], requests: int) -> Iterator[Block | None]:
    """Yield a block for each start; None where nothing was sent. What is left over belongs to the last one."""
    firsts = [
        min((each for each in sent.sent_ms[start:end] if not math.isnan(each)), default=None)
        for start, end in zip(starts, [*starts[1:], requests], strict=True)
    ]
    for place, (start, end) in enumerate(zip(starts, [*starts[1:], requests], strict=True)):
        first = firsts[place]
        until = next((each for each in firsts[place + 1 :] if each is not None), None)
        if until is None:
            until = max((each for each in sent.ended_ms[start:end] if not math.isnan(each)), default=None)
        seconds = 0.0 if first is None or until is None else (until - first) / 1000
        yield Block(sum(sent.good_tokens[start:end]), seconds) if seconds > 0 else None


def differs_at(baseline: Sent, candidate: Sent) -> int | None:
    """Return the first request that the two arms were not asked alike; None where they were."""
    for index, (one, other) in enumerate(zip(baseline.asked, candidate.asked, strict=False)):
        if one and other and one != other:
            return index
    return None
