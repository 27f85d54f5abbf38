"""Runs a capture's load: warm-up, then the phases one after the other."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from specdecode_operator.api.capture_workload import Pattern, Phase
from specdecode_operator.capture.files.formats import Outcome
from specdecode_operator.capture.files.recorded import RecordedRequests
from specdecode_operator.capture.files.segments import FOLDER
from specdecode_operator.capture.load.arrivals import phase_requests
from specdecode_operator.capture.load.client import EngineClient, allow_many_connections, server_of
from specdecode_operator.capture.load.client_log import ClientLog
from specdecode_operator.capture.load.engine_ready import EngineMonitor, MetricsDelta, NoMetrics, metrics_delta
from specdecode_operator.capture.load.phases import run_phase
from specdecode_operator.capture.load.progress import PhaseResult, Progress
from specdecode_operator.capture.load.prompts.datasets import DATASET_MOUNT
from specdecode_operator.capture.load.prompts.sources import DatasetSource, prompt_source
from specdecode_operator.capture.load.sender import PhaseSender, RunParts
from specdecode_operator.capture.load.stop import Stop, beside
from specdecode_operator.capture.load.workload import WARMUP_PHASE, RunSettings

_WARMUP_CLIENTS = 4
"""How many warm-up requests are in flight: enough to reach every API server, too few to queue."""


AroundPhase = Callable[[Phase], AbstractAsyncContextManager[None]]
"""What a phase runs within: it begins when this is entered, and its answers have come when it is left."""


@dataclass(frozen=True)
class LoadResult:
    """What a run sent and what became of it."""

    # The run's zero by both clocks, read together: CLOCK_MONOTONIC, and seconds since 1970.
    zero_monotonic_s: float
    zero_wall_s: float
    ended_monotonic_s: float
    client_file: Path  # every request, in order of sending
    phases: Sequence[PhaseResult]  # warm-up first, if there was one; phases that were not reached are missing
    dataset_prompts: int | None  # how many different prompts the dataset has; None for synthetic ones
    stop_reason: str | None  # None if the run ended with its workload
    metrics: MetricsDelta | NoMetrics  # what the engine's own counters say of the measured requests

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
    """Send a workload to an engine that is ready, write client.jsonl.part, and return what happened.

    When ``stop`` is set, requests in flight end as ``cancelled``, nothing more
    is sent, and the file is complete nevertheless.

    Raises
    ------
    BadDatasetError
        The dataset has no prompts; nothing was sent.
    InvalidSettingsError
        The engine's key or certificates are not there; nothing was sent.
    OSError
        client.jsonl.part cannot be written.
    """
    prompts = await asyncio.to_thread(prompt_source, settings, dataset_mount)
    server = server_of(settings.engine)
    client = EngineClient(server, settings.workload.timeout_seconds)
    allow_many_connections()
    log = ClientLog(attempt_folder, stop.set_from_thread)
    progress = Progress(lambda: client.in_flight, RecordedRequests(attempt_folder / FOLDER).count)
    parts = RunParts(client=client, log=log, zero_s=time.monotonic(), settings=settings, prompts=prompts)
    run = _Run(parts, time.time(), stop, progress, around_phase)
    try:
        async with (
            beside(run.follow_stop(), run.progress.run(stop)),
            EngineMonitor(settings.engine.url, server.tls) as monitor,
        ):
            return await run.everything(monitor)
    finally:
        await log.close()


class _Run:
    """One run from its zero on."""

    def __init__(
        self, parts: RunParts, zero_wall_s: float, stop: Stop, progress: Progress, around_phase: AroundPhase
    ) -> None:
        self.progress = progress
        self._around_phase = around_phase
        self._parts = parts
        self._zero_wall_s = zero_wall_s
        self._stop = stop
        self._results: list[PhaseResult] = []

    async def follow_stop(self) -> None:
        """Cancel what is in flight as soon as the run must end."""
        await self._stop.wait()
        self._parts.client.cancel_all(self._stop.reason or "stopped")

    async def everything(self, monitor: EngineMonitor) -> LoadResult:
        """Warm up, run all phases, and read the engine's counters around them."""
        workload, prompts = self._parts.settings.workload, self._parts.prompts
        if workload.warmup_requests:
            clients = min(workload.warmup_requests, _WARMUP_CLIENTS)
            requests = workload.warmup_requests
            warmup = Phase(name=WARMUP_PHASE, pattern=Pattern.CLOSED, concurrency=clients, requests=requests)
            async with self._around_phase(warmup):
                await self._run_phase(warmup, workload.phases)
        before = await monitor.read_when_idle()
        for number, phase in enumerate(workload.phases, start=1):
            if not self._stop.is_set:
                async with self._around_phase(phase):
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
        sender = PhaseSender(phase, self._parts)
        self.progress.begin(phase, sender.tally, later)
        started_s = time.monotonic()
        await run_phase(phase, sender, self._parts.settings.seed, self._stop)
        self._results.append(
            PhaseResult(
                name=phase.name,
                started_ms=self._parts.since_zero_ms(started_s),
                ended_ms=self._parts.since_zero_ms(time.monotonic()),
                planned=phase_requests(phase),
                outcomes=dict(sender.tally.outcomes),
            )
        )
