"""Run the load of a capture: the warm-up, then each phase in turn with its arrival pattern."""

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

from specdecode_operator.api.capture import Pattern, Phase
from specdecode_operator.capture.files.formats import Outcome
from specdecode_operator.capture.files.segments import FOLDER, RecordedRequestCount
from specdecode_operator.capture.load.arrivals import arrival_offsets_s, phase_requests
from specdecode_operator.capture.load.datasets import DATASET_MOUNT
from specdecode_operator.capture.load.engine_client import EngineClient, Exchange, allow_many_connections, server_of
from specdecode_operator.capture.load.engine_ready import EngineMonitor, MetricsDelta, NoMetrics, metrics_delta
from specdecode_operator.capture.load.progress import PhaseResult, Progress
from specdecode_operator.capture.load.prompts import DatasetSource, Prompt, prompt_source
from specdecode_operator.capture.load.run_settings import WARMUP_PHASE, RunSettings, needed
from specdecode_operator.capture.load.sender import ClientLog, PhaseSender, RunParts, Turn
from specdecode_operator.capture.load.shutdown import Stop, beside

# Pause of a closed phase's client after a failed request. An immediate rejection would otherwise cause thousands of
# unintended requests a second.
FAILURE_PAUSE_S = 1.0
CONNECT_AHEAD_S = 0.5  # time before its planned start at which a request's connection is opened


async def run_phase(phase: Phase, sender: PhaseSender, seed: int, stop: Stop) -> None:
    """Send the requests of a phase, and return when all have ended.

    When the run is stopped, nothing more is sent; whoever stops it must also end the open requests.
    """
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
    ended_monotonic_s: float
    client_file: Path  # every request, in order of sending
    phases: Sequence[PhaseResult]  # warm-up first, if there was one; without phases that were not reached
    dataset_prompts: int | None  # number of different prompts in the dataset; None for synthetic ones
    stop_reason: str | None  # None if the run ended with its workload
    metrics: MetricsDelta | NoMetrics  # the engine's counters of the measured requests

    @property
    def outcomes(self) -> Mapping[Outcome, int]:
        """Measured requests by outcome, without warm-up."""
        measured = (phase for phase in self.phases if phase.name != WARMUP_PHASE)
        return sum((Counter(phase.outcomes) for phase in measured), Counter())


async def run_load(
    settings: RunSettings,
    attempt_folder: Path,
    stop: Stop,
    *,
    dataset_mount: Path = DATASET_MOUNT,
    around_phase: AroundPhase = lambda _: nullcontext(),
) -> LoadResult:
    """Send a workload to an engine that is ready, and write client.jsonl.part.

    When ``stop`` is set, open requests end as ``cancelled``, nothing more is sent, and the file is still complete.

    Raises
    ------
    BadDatasetError
        The dataset has no prompts; nothing was sent.
    InvalidSettingsError
        The engine's key or certificates are missing; nothing was sent.
    OSError
        client.jsonl.part cannot be written.
    """
    prompts = await asyncio.to_thread(prompt_source, settings, dataset_mount)
    server = server_of(settings.engine)
    client = EngineClient(server, settings.workload.timeout_seconds)
    allow_many_connections()
    log = ClientLog(attempt_folder, stop.set_from_thread)
    progress = Progress(lambda: client.in_flight, RecordedRequestCount(attempt_folder / FOLDER).count)
    parts = RunParts(client=client, log=log, zero_s=time.monotonic(), settings=settings, prompts=prompts)
    run = _Run(parts, time.time(), stop, progress, around_phase)
    try:
        async with (
            beside(run.follow_stop(), progress.run(stop)),
            EngineMonitor(settings.engine.url, server.tls) as monitor,
        ):
            return await run.everything(monitor)
    finally:
        await log.close()


class _Run:
    def __init__(
        self, parts: RunParts, zero_wall_s: float, stop: Stop, progress: Progress, around_phase: AroundPhase
    ) -> None:
        self._progress = progress
        self._around_phase = around_phase
        self._parts = parts
        self._zero_wall_s = zero_wall_s
        self._stop = stop
        self._results: list[PhaseResult] = []

    async def follow_stop(self) -> None:
        await self._stop.wait()
        self._parts.client.cancel_all(self._stop.reason or "stopped")

    async def everything(self, monitor: EngineMonitor) -> LoadResult:
        """Warm up, run all phases, and read the engine's counters around them."""
        workload, prompts = self._parts.settings.workload, self._parts.prompts
        if requests := workload.warmup_requests:
            clients = min(requests, _WARMUP_CLIENTS)
            warmup = Phase(name=WARMUP_PHASE, pattern=Pattern.CLOSED, concurrency=clients, requests=requests)
            await self._run_phase(warmup, workload.phases)
        before = await monitor.read_when_idle()
        for number, phase in enumerate(workload.phases, start=1):
            if not self._stop.is_set:
                await self._run_phase(phase, workload.phases[number:])
        ended_s = time.monotonic()
        after = NoMetrics("the run was stopped") if self._stop.is_set else await monitor.read_when_idle()
        return LoadResult(
            zero_monotonic_s=self._parts.zero_s,
            zero_wall_s=self._zero_wall_s,
            ended_monotonic_s=ended_s,
            client_file=self._parts.log.path,
            phases=tuple(self._results),
            dataset_prompts=len(prompts) if isinstance(prompts, DatasetSource) else None,
            stop_reason=self._stop.reason,
            metrics=metrics_delta(before, after),
        )

    async def _run_phase(self, phase: Phase, later: Sequence[Phase]) -> None:
        async with self._around_phase(phase):
            sender = PhaseSender(phase, self._parts)
            self._progress.begin(phase, sender.tally, later)
            started_s = time.monotonic()
            await run_phase(phase, sender, self._parts.settings.seed, self._stop)
            self._results.append(
                PhaseResult(
                    name=phase.name,
                    started_ms=self._parts.since_zero_ms(started_s),
                    ended_ms=self._parts.since_zero_ms(time.monotonic()),
                    planned=phase_requests(phase),
                    outcomes=dict(sender.tally),
                )
            )
