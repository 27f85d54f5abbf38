"""Whether watches still bring what the API server has."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from specdecode_operator.api.base import Body

STALLED_S: Final = 120.0
"""kopf opens a watch anew that was silent for 70 s."""


@dataclass
class _Watch:
    """One watch: the newest version that it has brought, the newest that is known, and since when it is behind."""

    brought: int
    known: int
    behind_since_s: float = 0.0


class WatchProgress:
    """What the watch of each kind has brought, beside what lists and answers to writes have shown of it.

    A watch has stalled where a version that is known does not come for long, and nothing else of it either: one that
    brings much, slowly, is at work. Of a watch that has never brought anything nothing is said: what it would bring is
    listed.
    """

    def __init__(self, *, by_namespace: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._by_namespace, self._clock = by_namespace, clock
        self._watches: dict[tuple[str, str], _Watch] = {}

    def brings(self, kind: str, body: Body) -> None:
        """Note an object that a watch has brought."""
        version = int(body["metadata"]["resourceVersion"])
        watch = self._watches.setdefault(self._place(kind, body), _Watch(version, version))
        watch.brought = max(watch.brought, version)
        watch.behind_since_s = self._clock()

    def knows(self, kind: str, body: Body) -> None:
        """Note an object that was seen, wherever."""
        watch, version = self._watches.get(self._place(kind, body)), int(body["metadata"]["resourceVersion"])
        if watch is not None and version > watch.known:
            if watch.known <= watch.brought:
                watch.behind_since_s = self._clock()
            watch.known = version

    def stalled(self) -> str | None:
        """Return which watch has stalled, if any has; any thread may ask."""
        for (kind, namespace), watch in [*self._watches.items()]:
            if watch.known > watch.brought and self._clock() - watch.behind_since_s > STALLED_S:
                where = f" in {namespace}" if namespace else ""
                return f"the watch of {kind}{where} has brought nothing for {STALLED_S:.0f} s, though there is news"
        return None

    def _place(self, kind: str, body: Body) -> tuple[str, str]:
        """Return which watch an object comes by: in named namespaces each has its own."""
        return kind, body["metadata"].get("namespace", "") if self._by_namespace else ""
