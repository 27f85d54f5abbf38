"""Run the load of a capture: the warm-up, then each phase with its arrival pattern; print progress as JSON lines."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from itertools import count, groupby
from operator import itemgetter
from pathlib import Path

import msgspec

from specdecode_operator.api.capture import Pattern, Phase
from specdecode_operator.capture.files.formats import Outcome
from specdecode_operator.capture.files.segments import FOLDER, RecordedRequestCount
from specdecode_operator.capture.load.arrivals import arrival_offsets_s, phase_duration_s, phase_requests
from specdecode_operator.capture.load.datasets import DATASET_MOUNT
from specdecode_operator.capture.load.engine_client import EngineClient, Exchange, allow_many_connections, server_of
from specdecode_operator.capture.load.engine_ready import EngineMonitor, MetricsDelta, NoMetrics, metrics_delta
from specdecode_operator.capture.load.prompts import Prompt, prompt_source
from specdecode_operator.capture.load.run_settings import WARMUP_PHASE, RunSettings, needed
from specdecode_operator.capture.load.sender import ClientLog, PhaseSender, RunParts, Turn
from specdecode_operator.capture.load.shutdown import Stop, beside

# Pause of a closed phase's client after a failed request. An immediate rejection would otherwise cause thousands of
# unintended requests a second.
TICK_S = 1.0


def print_line(line: str) -> None:
    """Print a line to the container's log without buffering."""
    print(line, flush=True)  # noqa: T201 - the container's log


class Progress:
    """Progress of a run.

    The lines have ``phase`` (the current one), ``sent``, ``recorded``, ``completed`` and ``failed`` (since the start
    of the run, warm-up included), ``rate`` (requests ended per second in the current phase) and ``eta_s`` (until the
    end of the last phase; null if unknown). ``recorded`` reads from the volume, in a thread.
    """

    def __init__(self, in_flight: Callable[[], int], recorded: Callable[[], int]) -> None:
        self._in_flight = in_flight
        self._count_recorded = recorded
        self._recorded = 0
        self._tallies: list[Counter[Outcome]] = []
        self._phase: Phase | None = None
        self._later: Sequence[Phase] = ()
        self._started_s = time.monotonic()

    def begin(self, phase: Phase, tally: Counter[Outcome], later: Sequence[Phase]) -> None:
        """Follow a phase; ``later`` are the phases after it."""
        self._tallies.append(tally)
        self._phase, self._later = phase, later
        self._started_s = time.monotonic()

    async def run(self, stop: Stop) -> None:
        """Print a line each second until the run must end."""
        tick_s = time.monotonic()
        while await stop.sleep_until(tick_s):
            # A slow volume must not delay the load.
            self._recorded = await asyncio.to_thread(self._count_recorded)
            if self._phase is not None:
                self._tick(self._phase)
            tick_s += TICK_S

    def _tick(self, phase: Phase) -> None:
        current = self._tallies[-1]
        passed_s = time.monotonic() - self._started_s
        rate = current.total() / passed_s if passed_s > 0 else 0.0
        # A duration of 0 means that the engine's speed decides.
        left_s: float | None = None
        if duration_s := phase_duration_s(phase):
            left_s = max(0.0, duration_s - passed_s)
        elif rate and (planned := phase_requests(phase)) is not None:
            left_s = (planned - current.total()) / rate
        parts_s = [left_s, *(phase_duration_s(each) or None for each in self._later)]
        known_s = [part_s for part_s in parts_s if part_s is not None]
        ended = sum(tally.total() for tally in self._tallies)
        completed = sum(tally["completed"] for tally in self._tallies)
        line = {
            "phase": phase.name,
            "sent": ended + self._in_flight(),
            "recorded": self._recorded,
            "completed": completed,
            "failed": ended - completed,
            "rate": round(rate, 2),
            "eta_s": round(sum(known_s), 1) if len(known_s) == len(parts_s) else None,
        }
        print_line(msgspec.json.encode(line).decode())


FAILURE_PAUSE_S = 1.0
CONNECT_AHEAD_S = 0.5  # time before its planned start at which a request's connection is opened


async def _run_phase(phase: Phase, sender: PhaseSender, seed: int, stop: Stop) -> None:
    """Send the requests of a phase until it ends or the run is stopped, and return when all have ended."""
    if phase.pattern in (Pattern.CLOSED, Pattern.MULTITURN):
        await _ClosedLoop(phase, sender, stop).run()
        return
    # Every request is sent at its time, however many are open. Late ones are sent at once.
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


class _ClosedLoop:
    """Clients that send single requests, or conversations, one after another until the phase ends."""

    def __init__(self, phase: Phase, sender: PhaseSender, stop: Stop) -> None:
        self._phase = phase
        self._sender = sender
        self._stop = stop
        self._indexes = count() if phase.requests is None else iter(range(phase.requests))
        self._sessions = count()
        duration_s = phase.duration_seconds
        self._until_s = math.inf if duration_s is None else time.monotonic() + duration_s

    async def run(self) -> None:
        async with asyncio.TaskGroup() as clients:
            for _ in range(needed(self._phase.concurrency)):
                clients.create_task(self._client())

    async def _client(self) -> None:
        while (index := self._next_index()) is not None:
            if self._phase.pattern == Pattern.MULTITURN:
                await self._converse(next(self._sessions), index)
            else:
                await self._send(index)

    def _next_index(self) -> int | None:
        """Return the next request's number; None when the phase is over."""
        if self._stop.is_set or time.monotonic() >= self._until_s:
            return None
        return next(self._indexes, None)

    async def _send(self, index: int, prompt: Prompt | None = None, turn: Turn | None = None) -> Exchange:
        # A closed loop has no planned times: a request is due when its client is free.
        scheduled_s = time.monotonic()
        exchange = await self._sender.send(self._sender.prepare(index, prompt, turn), scheduled_s)
        if exchange.outcome != "completed":
            await self._stop.sleep_until(time.monotonic() + FAILURE_PAUSE_S)
        return exchange

    async def _converse(self, session: int, first_index: int) -> None:
        """Hold one conversation. A failed turn ends it, since the next one would need its answer."""
        # Prompts depend on session and turn, and not on which client was free first.
        name, turns, prompts = self._phase.name, needed(self._phase.turns), self._sender.prompts
        number, index = session * turns, first_index
        prompt = prompts.first(name, number)
        for turn in range(turns):
            exchange = await self._send(index, prompt, Turn(session, turn))
            if exchange.outcome != "completed" or turn + 1 == turns:
                return
            answer = exchange.stream.answer(as_text=isinstance(prompt.content, str))
            prompt = prompt.followed_by(answer, prompts.message(name, number + turn + 1))
            think_s = self._phase.think_seconds or 0
            await self._stop.sleep_until(min(time.monotonic() + think_s, self._until_s))
            if (following := self._next_index()) is None:
                return
            index = following


_WARMUP_CLIENTS = 4  # concurrent warm-up requests: enough to reach every API server, too few to queue


AroundPhase = Callable[[Phase], AbstractAsyncContextManager[None]]
"""Context of a phase: it is entered before the first request, and left after the last answer."""


@dataclass(frozen=True)
class LoadResult:
    """Result of a run."""

    # The run's zero on both clocks, read together: CLOCK_MONOTONIC, and seconds since 1970.
    zero_monotonic_s: float
    zero_wall_s: float
    client_file: Path  # every request, in order of sending
    outcomes: Mapping[Outcome, int]  # of the measured requests, without warm-up
    stop_reason: str | None  # None if the run ended with its workload
    metrics: MetricsDelta | NoMetrics  # the engine's counters of the measured requests


async def run_load(
    settings: RunSettings,
    attempt_folder: Path,
    stop: Stop,
    *,
    dataset_mount: Path = DATASET_MOUNT,
    around_phase: AroundPhase = lambda _: nullcontext(),
) -> LoadResult:
    """Send a workload to an engine that is ready, and write client.jsonl.part.

    When ``stop`` is set, open requests end as ``cancelled``, sending stops, and the file is still complete.

    Raises
    ------
    BadDatasetError
        The dataset has no prompts; no request was sent.
    InvalidSettingsError
        The engine's key or certificates are missing; no request was sent.
    OSError
        client.jsonl.part cannot be written.
    """
    prompts = await asyncio.to_thread(prompt_source, settings, dataset_mount)
    server, workload = server_of(settings.engine), settings.workload
    client = EngineClient(server, workload.timeout_seconds)
    allow_many_connections()
    log = ClientLog(attempt_folder, stop.set_from_thread)
    progress = Progress(lambda: client.in_flight, RecordedRequestCount(attempt_folder / FOLDER).count)
    zero_s, zero_wall_s = time.monotonic(), time.time()
    parts = RunParts(client=client, log=log, zero_s=zero_s, settings=settings, prompts=prompts)
    outcomes: Counter[Outcome] = Counter()

    async def follow_stop() -> None:
        await stop.wait()
        client.cancel_all(stop.reason or "stopped")

    async def run(phase: Phase, later: Sequence[Phase]) -> None:
        async with around_phase(phase):
            sender = PhaseSender(phase, parts)
            progress.begin(phase, sender.tally, later)
            await _run_phase(phase, sender, settings.seed, stop)
        if phase.name != WARMUP_PHASE:
            outcomes.update(sender.tally)

    try:
        async with beside(follow_stop(), progress.run(stop)), EngineMonitor(settings.engine.url, server.tls) as monitor:
            if requests := workload.warmup_requests:
                clients = min(requests, _WARMUP_CLIENTS)
                warmup = Phase(name=WARMUP_PHASE, pattern=Pattern.CLOSED, concurrency=clients, requests=requests)
                await run(warmup, workload.phases)
            before = await monitor.read_when_idle()
            for number, phase in enumerate(workload.phases, start=1):
                if not stop.is_set:
                    await run(phase, workload.phases[number:])
            after = NoMetrics("the run was stopped") if stop.is_set else await monitor.read_when_idle()
            metrics = metrics_delta(before, after)
            return LoadResult(zero_s, zero_wall_s, log.path, outcomes, stop.reason, metrics)
    finally:
        await log.close()
