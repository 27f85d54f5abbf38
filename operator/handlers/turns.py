"""Whose turn it is to be looked at, though nobody told of a change."""

import math
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from specdecode_operator.api.key import Key

_MOST_LOOKS: Final = 80
"""In one round: a look asks engines, so that the interval grows with the objects, and not the work. So many take
less than 2 % of a core."""

_ROUNDS_OF_ALL: Final = 20
"""So many rounds after the last look at it, an object that waits for nothing is looked at all the same."""


class Turns(Collector):
    """All objects in two lines, in each the one first that was looked at longest ago.

    In one are those that change by themselves: their engines are asked, or they wait for a time. Of the others watches
    tell all there is to know, and a look that is due only finds what a watch has missed.
    """

    def __init__(self, round_s: float) -> None:
        self._round_s = round_s
        self._close: dict[Key, None] = {}
        self._quiet: dict[Key, None] = {}

    def looked(self, key: Key, *, is_close: bool) -> None:
        """Take down that an object was looked at, and whether it changes by itself."""
        self.forget(key)
        (self._close if is_close else self._quiet)[key] = None

    def forget(self, key: Key) -> None:
        """Drop an object that is gone."""
        self._close.pop(key, None)
        self._quiet.pop(key, None)

    def next(self, present: Collection[Key]) -> list[Key]:
        """Return what is to be looked at in this round of all that there are: what is new, and whose turn it is."""
        there = set(present)
        for gone in [*(self._close.keys() - there), *(self._quiet.keys() - there)]:
            self.forget(gone)
        new = [key for key in present if key not in self._close and key not in self._quiet]
        quiet = islice(self._quiet, math.ceil(len(self._quiet) / _ROUNDS_OF_ALL))
        return [*new, *islice(self._close, _MOST_LOOKS), *quiet]

    @property
    def interval_s(self) -> float:
        """How often an object that changes by itself is looked at."""
        return self._round_s * max(1, math.ceil(len(self._close) / _MOST_LOOKS))

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the samples of one scrape."""
        yield GaugeMetricFamily(
            "specdecode_look_interval_seconds",
            "How often engines are asked: 15 s, and longer where more objects have engines than the operator may ask.",
            value=self.interval_s,
        )
