"""Two records of the same prompts, cut into the same blocks."""

import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import median
from typing import Final

from specdecode_operator.capture.comparison.answers import Answer, NotComparableError, Record

BLOCKS_OF_A_PHASE: Final = 32
_ROUNDS_OF_A_BLOCK: Final = 2
"""So many requests of each client, so that a block is longer than what one request does to the next."""

_OTHER_PROMPTS: Final = 0.02
"""Share of requests that may differ in the length of their prompt: conversations repeat answers."""

Pair = tuple[Answer | None, Answer | None]
Side = Callable[[Pair], Answer | None]


def of_golden(pair: Pair) -> Answer | None:
    """Return the golden record's answer."""
    return pair[0]


def of_found(pair: Pair) -> Answer | None:
    """Return that of the record that is judged."""
    return pair[1]


@dataclass(frozen=True)
class Block:
    """A run of requests of one phase, in both records."""

    phase: str
    pairs: Sequence[Pair]
    follows: Sequence[Pair] = ()
    """The next one of its phase."""

    def seconds(self, side: Side) -> float:
        """Return how long it took, to where the next one begins."""
        own, later = _there(self.pairs, side), _there(self.follows, side)
        if not own:
            return 0.0
        end_ms = min(each.arrival_ms for each in later) if later else max(each.end_ms for each in own)
        return max(0.0, end_ms - min(each.arrival_ms for each in own)) / 1000

    def tokens(self, side: Side) -> int:
        """Return the tokens of its whole answers."""
        return sum(each.output_tokens for each in _there(self.pairs, side) if each.whole)

    def drafts(self, side: Side) -> int:
        """Return its steps that may have had a draft."""
        return sum(each.drafts for each in _there(self.pairs, side))

    def accepted(self, side: Side, position: int) -> int:
        """Return how many of them gave the token at a position of the draft, from 0 on."""
        return sum(each.accepted[position] for each in _there(self.pairs, side) if position < len(each.accepted))

    def accepted_in_all(self, side: Side) -> int:
        """Return the tokens of drafts that were accepted."""
        return sum(sum(each.accepted) for each in _there(self.pairs, side))

    def steps(self, side: Side, running: int) -> tuple[float, int]:
        """Return milliseconds and number of steps with so many requests running, as a power of two."""
        found = [each.steps.get(running, (0.0, 0)) for each in _there(self.pairs, side)]
        return sum(total_ms for total_ms, _ in found), sum(count for _, count in found)


@dataclass(frozen=True)
class PairedBlocks:
    """All blocks of two records, in the order of the workload."""

    blocks: Sequence[Block] = field(repr=False)

    @property
    def pairs(self) -> Iterable[Pair]:
        """All requests."""
        return (pair for block in self.blocks for pair in block.pairs)

    @property
    def phases(self) -> dict[str, list[Block]]:
        """Blocks by phase."""
        found = defaultdict(list)
        for block in self.blocks:
            found[block.phase].append(block)
        return dict(found)


def paired_blocks(golden: Record, found: Record) -> PairedBlocks:
    """Return the blocks of two records: what only one of them came to in its time is left out.

    Raises
    ------
    NotComparableError
        They are not of the same prompts.
    """
    ends = [_ends(record) for record in (golden, found)]
    asked = sorted(
        request
        for request in golden.answers.keys() | found.answers.keys()
        if request[2] <= min(end.get(request[:2], -1) for end in ends)
    )
    pairs = {each: (golden.answers.get(each), found.answers.get(each)) for each in asked}
    _refuse_other_prompts(golden, found, list(pairs.values()))
    blocks: list[Block] = []
    for (_, phase), requests in groupby(asked, key=lambda request: request[:2]):
        cut = _cut([pairs[each] for each in requests])
        blocks += [Block(phase, own, later) for own, later in zip(cut, [*cut[1:], []], strict=True)]
    return PairedBlocks(blocks)


def _ends(record: Record) -> dict[tuple[int, str], int]:
    """Return the number of the last request of each phase of each repetition."""
    ends: dict[tuple[int, str], int] = {}
    for repetition, phase, index, _ in record.answers:
        ends[repetition, phase] = max(index, ends.get((repetition, phase), -1))
    return ends


def _refuse_other_prompts(golden: Record, found: Record, pairs: Sequence[Pair]) -> None:
    both = [(one.prompt_tokens, other.prompt_tokens) for one, other in pairs if one and other]
    if not both:
        raise NotComparableError(
            f"{golden.name} and {found.name}: have no request in common: take the second with the workload of the first"
        )
    other = sum(one != another for one, another in both)
    if other > max(1, _OTHER_PROMPTS * len(both)):
        raise NotComparableError(
            f"{golden.name} and {found.name}: {other} of {len(both)} prompts have another length: take the second with"
            " the workload and the seed of the first"
        )


def _cut(pairs: Sequence[Pair]) -> list[Sequence[Pair]]:
    """Cut a phase by its requests alone, whatever came of them."""
    at_once = median([max(each.concurrency for each in pair if each) for pair in pairs])
    size = max(math.ceil(_ROUNDS_OF_A_BLOCK * at_once), math.ceil(len(pairs) / BLOCKS_OF_A_PHASE))
    cut = [pairs[start : start + size] for start in range(0, len(pairs), size)]
    if len(cut) > 1 and 2 * len(cut[-1]) < size:
        *cut, before, last = cut
        cut.append([*before, *last])
    return cut


def _there(pairs: Iterable[Pair], side: Side) -> list[Answer]:
    return [answer for pair in pairs if (answer := side(pair)) is not None]


def first_difference(one: "array[int]", other: "array[int]") -> int | None:
    """Return where two answers part; None where the shorter one is the beginning of the other and was cut."""
    for place, (token, another) in enumerate(zip(one, other, strict=False)):
        if token != another:
            return place
    return None
