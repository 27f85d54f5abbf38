"""How soon clients ask again who wait for their answers: a closed loop is recognised by what is in flight."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby
from statistics import median
from typing import Final

from specdecode_operator.replay.recording.recording import RecordedRequest

_CLOSED_SHARE: Final = 0.6
"""Of arrivals that find all clients but one waiting: where requests come by chance, few do."""
_AT_ONCE: Final = 0.2
"""Of the time between arrivals, that a client takes: where requests come evenly, as many are in flight, too."""
_SAME_MS: Final = 0.05


def turnarounds_ms(requests: Sequence[RecordedRequest]) -> list[float]:
    """Return how long clients took from an answer's last token to their next request, in phases that have clients."""
    found: list[float] = []
    arrived = [request for request in requests if request.arrival_ms is not None]
    ordered = sorted(arrived, key=lambda request: (request.phase or "", request.arrival_ms or 0.0))
    for _, of_phase in groupby(ordered, key=lambda request: request.phase):
        group = list(of_phase)
        arrivals_ms = [request.arrival_ms or 0.0 for request in group]
        ends_ms = sorted(request.end_ms or 0.0 for request in group)
        in_flight = [index - bisect_right(ends_ms, at_ms + _SAME_MS) for index, at_ms in enumerate(arrivals_ms, 1)]
        clients = max(in_flight)
        later = in_flight[clients:]
        if len(later) < clients or sum(each == clients for each in later) < _CLOSED_SHARE * len(later):
            continue
        waits_ms = [max(0.0, at_ms - end_ms) for at_ms, end_ms in zip(arrivals_ms[clients:], ends_ms, strict=False)]
        if median(waits_ms) * len(group) < _AT_ONCE * (arrivals_ms[-1] - arrivals_ms[0]):
            found += waits_ms
    return found
