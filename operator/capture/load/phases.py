"""Runs one phase: sends when its pattern says so, and waits for the answers."""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from itertools import count, groupby
from operator import itemgetter

from specdecode_operator.api.capture_workload import Pattern, Phase
from specdecode_operator.capture.load.arrivals import arrival_offsets_s
from specdecode_operator.capture.load.exchange import Exchange
from specdecode_operator.capture.load.prompts.prompt import Prompt
from specdecode_operator.capture.load.sender import PhaseSender, Turn
from specdecode_operator.capture.load.stop import Stop
from specdecode_operator.capture.load.workload import needed

FAILURE_PAUSE_S = 1.0
"""How long a client of a closed phase waits after a request that failed: a refusal comes at once, and would be met with
thousands of requests a second that nobody asked for."""

CONNECT_AHEAD_S = 0.5
"""How long before its planned time a request gets its connection."""


async def run_phase(phase: Phase, sender: PhaseSender, seed: int, stop: Stop) -> None:
    """Send the requests of a phase, and return when all have ended.

    When the run is stopped nothing more is sent; ending what is in flight is
    for the one who stops it.
    """
    match phase.pattern:
        case Pattern.CLOSED:
            await _Clients(phase, sender, stop).run()
        case Pattern.MULTITURN:
            await _Conversations(phase, sender, stop).run()
        case _:
            await _run_open(phase, sender, seed, stop)


async def _run_open(phase: Phase, sender: PhaseSender, seed: int, stop: Stop) -> None:
    """Send every request at its time, however many are in flight: a late one is sent at once, and none is left out."""
    started_s = time.monotonic() + CONNECT_AHEAD_S
    planned = enumerate(arrival_offsets_s(phase, seed, sender.prompts.recorded_s(phase.name)))
    async with asyncio.TaskGroup() as sending:
        for offset_s, group in groupby(planned, key=itemgetter(1)):
            scheduled_s = started_s + offset_s
            ready = [sender.prepare(index) for index, _ in group]
            if not await stop.sleep_until(scheduled_s - CONNECT_AHEAD_S):
                break
            for prepared in ready:
                sending.create_task(sender.send(prepared, scheduled_s))


class _ClosedLoop(ABC):
    """Clients that send one request after another, until the phase's time is over or its requests are used up."""

    def __init__(self, phase: Phase, sender: PhaseSender, stop: Stop) -> None:
        self._sender = sender
        self._stop = stop
        self._clients = needed(phase.concurrency)
        self._indexes = count() if phase.requests is None else iter(range(phase.requests))
        duration_s = phase.duration_seconds
        self._until_s = math.inf if duration_s is None else time.monotonic() + duration_s

    async def run(self) -> None:
        """Return when all clients are done."""
        async with asyncio.TaskGroup() as clients:
            for _ in range(self._clients):
                clients.create_task(self._client())

    @abstractmethod
    async def _client(self) -> None:
        """Send until there is no next request."""

    def _next_index(self) -> int | None:
        """Return the next request's number; None when the phase is over."""
        if self._stop.is_set or time.monotonic() >= self._until_s:
            return None
        return next(self._indexes, None)

    async def _send(self, index: int, prompt: Prompt | None = None, turn: Turn | None = None) -> Exchange:
        # A closed loop plans no times: a request is due when its client is free to send it.
        scheduled_s = time.monotonic()
        exchange = await self._sender.send(self._sender.prepare(index, prompt, turn), scheduled_s)
        if exchange.outcome != "completed":
            await self._stop.sleep_until(time.monotonic() + FAILURE_PAUSE_S)
        return exchange


class _Clients(_ClosedLoop):
    """Clients whose requests have nothing to do with each other."""

    async def _client(self) -> None:
        while (index := self._next_index()) is not None:
            await self._send(index)


class _Conversations(_ClosedLoop):
    """Clients that hold one conversation after another."""

    def __init__(self, phase: Phase, sender: PhaseSender, stop: Stop) -> None:
        super().__init__(phase, sender, stop)
        self._phase = phase.name
        self._turns = needed(phase.turns)
        self._think_s = phase.think_seconds or 0
        self._sessions = count()

    async def _client(self) -> None:
        while (index := self._next_index()) is not None:
            await self._converse(next(self._sessions), index)

    async def _converse(self, session: int, first_index: int) -> None:
        """Hold one conversation; a turn that fails ends it, for there is no answer to go on from."""
        # What is said goes by session and turn, so that it does not depend on which client was free first.
        number = session * self._turns
        index: int | None = first_index
        prompt = self._sender.prompts.first(self._phase, number)
        for turn in range(self._turns):
            if index is None:
                return
            exchange = await self._send(index, prompt, Turn(session, turn))
            if exchange.outcome != "completed" or turn + 1 == self._turns:
                return
            answer = exchange.stream.answer(as_text=isinstance(prompt.content, str))
            prompt = prompt.followed_by(answer, self._sender.prompts.message(self._phase, number + turn + 1))
            await self._think()
            index = self._next_index()

    async def _think(self) -> None:
        await self._stop.sleep_until(min(time.monotonic() + self._think_s, self._until_s))
