"""Captures side by side that send one phase at a time: what else slows the machine for a while slows all of them."""

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

from specdecode_operator.api.capture import Phase

_LONGEST_WAIT_S: Final = 1200

Turn = tuple[str, str]
"""Names of a capture and of one of its phases."""


class Turns:
    """The order in which captures, each a process, send their phases."""

    def __init__(self, order: Sequence[Turn]) -> None:
        """Begin with the first."""
        self._order = list(order)
        self._ended = multiprocessing.Value("i", 0)
        self._changed = multiprocessing.Condition(self._ended.get_lock())

    def around(self, capture: str, phase: Phase) -> AbstractAsyncContextManager[None]:
        """Return what a phase of a capture runs within: all before it have ended, and nobody else sends."""
        return self._turn((capture, phase.name))

    @asynccontextmanager
    async def _turn(self, turn: Turn) -> AsyncIterator[None]:
        place = self._order.index(turn)
        await asyncio.to_thread(self._wait_until_ended, place)
        try:
            yield
        finally:
            with self._changed:
                self._ended.value = place + 1
                self._changed.notify_all()
        if all(capture != turn[0] for capture, _ in self._order[place + 1 :]):
            # Merging and judging its files would slow the others.
            await asyncio.to_thread(self._wait_until_ended, len(self._order))

    def _wait_until_ended(self, count: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended.value >= count, _LONGEST_WAIT_S):
                raise TimeoutError(f"{count} phases have not ended within {_LONGEST_WAIT_S} s")
