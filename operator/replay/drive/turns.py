"""Which recorded requests are later turns of a conversation, and of which request each goes on from."""

from collections.abc import Sequence
from typing import Final

from specdecode_operator.replay.recording.recording import RecordedRequest

_ROUNDING_MS: Final = 0.1
"""Of the many gaps that make an end."""


def earlier_turns(requests: Sequence[RecordedRequest]) -> list[int | None]:
    """Return the place of the request that each one goes on from; None for those that begin something.

    A later turn has all full blocks of the earlier one and more, and came when that had ended. Blocks that others had
    gone on from before are no conversation's but a prefix that many share. Requests are in order of arrival.
    """
    taken_up_ms = _first_taken_up(requests)
    heads = dict[int, list[tuple[float, int]]]()
    found = list[int | None]()
    for place, request in enumerate(requests):
        found.append(_deepest(request, heads))
        if request.block_hashes and (end_ms := request.end_ms) is not None:
            last = request.block_hashes[-1]
            if taken_up_ms.get(last, end_ms) >= end_ms - _ROUNDING_MS:
                heads.setdefault(last, []).append((end_ms, place))
    return found


def _first_taken_up(requests: Sequence[RecordedRequest]) -> dict[int, float]:
    """Return when a longer prompt first came, for each last block of a prompt."""
    lasts = {request.block_hashes[-1] for request in requests if request.block_hashes}
    first = dict[int, float]()
    for request in requests:
        if request.arrival_ms is not None and request.block_hashes:
            for block in lasts.intersection(request.block_hashes[:-1]):
                first.setdefault(block, request.arrival_ms)
    return first


def _deepest(request: RecordedRequest, heads: dict[int, list[tuple[float, int]]]) -> int | None:
    if request.arrival_ms is None or not request.block_hashes:
        return None
    # A block's hash is that of the whole prompt up to its end. Of equal prompts, the one that ended last; all had
    # ended before this one came, or their blocks would have been taken up too early.
    return next((max(heads[block])[1] for block in reversed(request.block_hashes[:-1]) if block in heads), None)
