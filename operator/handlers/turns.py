"""Whose turn it is to be looked at, though nobody told of a change."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from heapq import nsmallest
from itertools import chain, islice
from operator import itemgetter
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from specdecode_operator.api.key import Key
from specdecode_operator.deployment.attention import Attention

_MOST_LOOKS: Final = 64
"""In one round: a look asks engines, so that the interval grows with the objects, and not the work. So many take 1.5 %
of a core on a slow machine."""

_LEAST_LOOKS: Final = 20
"""Of those in one round for objects without a policy, however many there are with one."""

_ROUNDS_OF_POLICIES: Final = 3
"""In so many rounds each object with a policy is looked at: a look stands for a minute at most (policy/window.py)."""

_ROUNDS_OF_ALL: Final = 20
"""So many rounds after the last look at it, an object that waits for nothing is looked at all the same."""


class Turns(Collector):
    """All objects in three lines, in each the one first that was looked at longest ago.

    In two are those that change by themselves: their engines are asked, or they wait for a time. With a policy they are
    asked often enough for it, as many as there are. Of the others watches tell all there is to know, and a look that is
    due only finds what a watch has missed.
    """

    def __init__(self, round_s: float) -> None:
        self._round_s = round_s
        self._measured: dict[Key, None] = {}
        """Those with a policy."""
        self._close: dict[Key, None] = {}
        self._quiet: dict[Key, None] = {}
        self._due_at_s: dict[Key, float] = {}
        """When an object is due in any case, in Unix time."""

    def looked(self, key: Key, asked: Attention) -> None:
        """Take down that an object was looked at, and what it asks for."""
        self.forget(key)
        line = self._quiet if not asked.is_close else self._measured if asked.has_policy else self._close
        line[key] = None
        if asked.due_at_s is not None:
            self._due_at_s[key] = asked.due_at_s

    def forget(self, key: Key) -> None:
        """Drop an object that is gone."""
        for line in self._lines:
            line.pop(key, None)
        self._due_at_s.pop(key, None)

    def next(self, present: Collection[Key], now_s: float) -> list[Key]:
        """Return what is to be looked at in this round of all that there are.

        These are new objects, objects that are due at ``now_s`` (Unix time), and those whose turn it is.
        """
        there = set(present)
        for gone in {key for line in self._lines for key in line} - there:
            self.forget(gone)
        new = [key for key in present if not any(key in line for line in self._lines)]
        due = [key for key, at_s in self._due_at_s.items() if at_s <= now_s]
        measured, close = self._looks
        quiet = math.ceil(len(self._quiet) / _ROUNDS_OF_ALL)
        turns = (islice(self._measured, measured), self._shared(close), islice(self._quiet, quiet))
        return list(dict.fromkeys(chain(new, due, *turns)))

    def _shared(self, looks: int) -> Iterable[Key]:
        """Return so many objects without a policy, one half by time alone, the other for each namespace in turn.

        By turns of namespaces alone, the objects of a large one would wait for hours where there are many small ones.
        """
        if looks >= len(self._close):
            return self._close
        oldest = [*islice(self._close, looks - looks // 2)]
        taken, before, ranked = set(oldest), Counter[str](), []
        for key in self._close:
            if key not in taken:
                ranked.append((before[key.namespace], key))
            before[key.namespace] += 1
        return chain(oldest, (key for _, key in nsmallest(looks // 2, ranked, key=itemgetter(0))))

    @property
    def _lines(self) -> tuple[dict[Key, None], ...]:
        return self._measured, self._close, self._quiet

    @property
    def _looks(self) -> tuple[int, int]:
        """How many objects with a policy, and of the others that change by themselves, are looked at in one round."""
        if len(self._measured) + len(self._close) <= _MOST_LOOKS:
            return len(self._measured), len(self._close)
        measured = math.ceil(len(self._measured) / _ROUNDS_OF_POLICIES)
        return measured, max(_MOST_LOOKS - measured, _LEAST_LOOKS)

    @property
    def interval_s(self) -> float:
        """How often an object without a policy that changes by itself is looked at, on average of all."""
        _, looks = self._looks
        return self._round_s * max(1, math.ceil(len(self._close) / max(1, looks)))

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the samples of one scrape."""
        yield GaugeMetricFamily(
            "specdecode_look_interval_seconds",
            "How often engines are asked: 15 s, and longer where more objects have engines than the operator may ask."
            " Those with a policy: every 45 s at least.",
            value=self.interval_s,
        )
