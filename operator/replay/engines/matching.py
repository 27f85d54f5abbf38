"""Which record a request gets: each is used once, whichever way they are matched."""

import re
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import cycle
from typing import Final

from specdecode_operator.replay.engines.engine import Incoming
from specdecode_operator.replay.recording.recording import RecordedRequest

_NUMBER: Final = re.compile(r"-(\d{1,9})$")

Match = Callable[[Incoming], int | None]
"""Takes the record of a request: its place in the order of arrival, None where none is left for it."""


class Matching(StrEnum):
    """How requests find their records."""

    ARRIVAL = "arrival"
    REQUEST_ID = "request-id"
    PREFIX = "prefix"


class Unmatched(StrEnum):
    """What comes of requests that no record is left for."""

    REPEAT = "repeat"
    REFUSE = "refuse"
    MODELLED = "modelled"


def matcher(matching: Matching, requests: Sequence[RecordedRequest]) -> Match:
    """Return a matcher of that kind, with all records unused."""
    if matching is Matching.REQUEST_ID:
        return _ById(requests).take
    if matching is Matching.PREFIX:
        return _ByPrefix(requests).take
    places = iter(range(len(requests)))
    return lambda _request: next(places, None)


def repeating(match: Match, requests: Sequence[RecordedRequest]) -> Match:
    """Return a matcher that goes through the records by arrival, again and again, for what the other has none for."""
    places = cycle(range(len(requests)))

    def take(request: Incoming) -> int:
        place = match(request)
        return next(places) if place is None else place

    return take


class _ById:
    """By the id that the record has; else by the number at its end, which is the place in the order of arrival."""

    def __init__(self, requests: Sequence[RecordedRequest]) -> None:
        self._unused = [True] * len(requests)
        self._by_id: dict[str, deque[int]] = {}
        for place, request in enumerate(requests):
            if request.request_id is not None:
                self._by_id.setdefault(request.request_id, deque()).append(place)

    def take(self, request: Incoming) -> int | None:
        # Several answers to one request have records of one id.
        named = self._by_id.get(request.request_id)
        if named is not None:
            return _first_unused(named, self._unused)
        number = _NUMBER.search(request.request_id)
        place = int(number[1]) if number else len(self._unused)
        return _first_unused(deque([place]), self._unused) if place < len(self._unused) else None


class _ByPrefix:
    """By the deepest block that prompt and record have in common; of several records by arrival."""

    def __init__(self, requests: Sequence[RecordedRequest]) -> None:
        self._unused = [True] * len(requests)
        self._by_block: dict[int, deque[int]] = {}
        for place, request in enumerate(requests):
            for block in request.block_hashes or ():
                self._by_block.setdefault(block, deque()).append(place)

    def take(self, request: Incoming) -> int | None:
        # A block's hash is that of the whole prompt up to its end.
        for block in reversed(request.block_hashes):
            place = _first_unused(self._by_block.get(block, deque()), self._unused)
            if place is not None:
                return place
        return None


def _first_unused(places: deque[int], unused: list[bool]) -> int | None:
    """Use the first of some records that is left; what was used is forgotten."""
    while places:
        place = places.popleft()
        if unused[place]:
            unused[place] = False
            return place
    return None
