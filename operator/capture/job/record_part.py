"""One part of a capture: an engine that starts, its load, and recorders that have closed."""

import asyncio
import errno
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from specdecode_operator.capture.files.errors import CaptureError
from specdecode_operator.capture.files.formats import CHECKS, PART_SUFFIX
from specdecode_operator.capture.files.manifest import EngineCounters
from specdecode_operator.capture.job.checks import check_answers
from specdecode_operator.capture.job.engine_switch import EngineSwitch
from specdecode_operator.capture.job.finish import Run
from specdecode_operator.capture.job.image import IMAGE_ID_FILE, engine_image_id
from specdecode_operator.capture.job.parts import NO_CHECKS, Part
from specdecode_operator.capture.job.prepare import volume_errors
from specdecode_operator.capture.job.recorder_bundle import SWITCH_FOLDER
from specdecode_operator.capture.job.recorders import Recorders
from specdecode_operator.capture.load.engine_ready import EngineMonitor, EngineNotReadyError, MetricsDelta, NoMetrics
from specdecode_operator.capture.load.prompts.datasets import BadDatasetError
from specdecode_operator.capture.load.prompts.sources import prompt_source
from specdecode_operator.capture.load.runner import LoadResult
from specdecode_operator.capture.load.stop import Stop, beside, stop_on_signals
from specdecode_operator.capture.load.trust import tls_of
from specdecode_operator.capture.load.workload import InvalidSettingsError, RunSettings
from specdecode_operator.capture.recorder.settings import FOLDER_VARIABLE


@dataclass(frozen=True)
class Timeouts:
    """How long a job waits, in seconds."""

    ready_s: float = 3600.0  # for the engine, where the capture has no deadline
    recording_s: float = 30.0  # for the recorders of an engine that is ready
    closed_s: float = 120.0  # for the recorders' last lines; they have megabytes to write at most
    closed_anyway_s: float = 10.0  # for the same where the capture has failed already
    # For the operator to say which image the engine runs, from when the load begins: normally it has by then, or
    # before the load ends.
    image_id_s: float = 60.0


PATIENT: Final = Timeouts()


@dataclass(frozen=True)
class Pod:
    """What a part finds in its pod."""

    node: str | None = None
    image_id_file: Path = IMAGE_ID_FILE
    switch_folder: Path = Path(SWITCH_FOLDER)


Load = Callable[[RunSettings, Path, Stop], Awaitable[LoadResult]]


class Recording:
    """A part of a capture under way."""

    def __init__(self, part: Part, timeouts: Timeouts, pod: Pod) -> None:
        self._part = part
        self._settings = part.settings
        self._places = part.places
        self._timeouts = timeouts
        self._pod = pod
        self._recorders = Recorders(part.places)

    async def run(self, load: Load) -> Run:
        """Return what was found out that is not in the files.

        Raises
        ------
        CaptureError
            When it was not recorded to its end.
        """
        stop = Stop()
        stop_on_signals(stop)
        if self._part.arm is None:
            return await self._record(load, stop)
        switch = EngineSwitch(self._pod.switch_folder)
        folder = {FOLDER_VARIABLE: str(self._places.segments)}
        await switch.start(self._part.arm.command, self._part.arm.env | folder)
        async with beside(self._watch_switch(switch, stop)):
            run = await self._record(load, stop)
            if self._part.checks != NO_CHECKS:
                await self._check(stop)
        await switch.stop()
        return run

    async def _check(self, stop: Stop) -> None:
        """Ask what all arms are asked, now that nothing is measured any more."""
        source = await asyncio.to_thread(prompt_source, self._settings)
        checking = asyncio.create_task(check_answers(self._settings, self._part.checks, source))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({checking, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if stop.is_set:
            checking.cancel()
            raise self._stopped(stop)
        with volume_errors(self._places.root):
            part = self._places.folder / f"{CHECKS}{PART_SUFFIX}"
            part.write_bytes(msgspec.json.encode(await checking) + b"\n")

    def _stopped(self, stop: Stop) -> CaptureError:
        return self._recorders.failure or CaptureError("Cancelled", f"stopped before its end: {stop.reason}")

    async def _record(self, load: Load, stop: Stop) -> Run:
        recorders = self._recorders
        await self._wait_for_engine(stop)
        await recorders.wait_until_recording(self._timeouts.recording_s)
        watches = [asyncio.create_task(recorders.watch(stop)), asyncio.create_task(self._watch_engine(stop))]
        deadline = self._stop_at_the_deadline(stop)
        image_id_until_s = time.monotonic() + self._timeouts.image_id_s
        try:
            result = await self._load(load, stop)
        except CaptureError:
            await self._close_anyway()
            raise
        finally:
            for watch in watches:
                watch.cancel()
            deadline.cancel()
        if stop.is_set:
            await self._close_anyway()
            raise self._stopped(stop)
        with volume_errors(self._places.root):
            await recorders.close(self._timeouts.closed_s)
        return Run(
            zero_monotonic_s=result.zero_monotonic_s,
            zero_wall_s=result.zero_wall_s,
            segments=recorders.segments(),
            counters=_counters(result.metrics),
            no_counters=result.metrics.reason if isinstance(result.metrics, NoMetrics) else None,
            node=self._pod.node,
            image_id=await engine_image_id(self._pod.image_id_file, self._places.attempt, image_id_until_s),
        )

    def _stop_at_the_deadline(self, stop: Stop) -> asyncio.TimerHandle:
        deadline_s = self._settings.deadline_seconds or self._timeouts.ready_s
        message = f"the load did not end within spec.deadlineSeconds ({deadline_s:g}): raise it, or send less"
        failure = CaptureError("DeadlineExceeded", message)
        return asyncio.get_running_loop().call_later(deadline_s, self._fail, failure, stop)

    async def _watch_engine(self, stop: Stop) -> None:
        """Stop the load when the engine is gone: one that was killed says nothing, and its next start takes minutes."""
        async with self._monitor() as monitor:
            await monitor.wait_until_gone()
        message = "the engine ended while it was recorded: nothing listens at its port any more; see its log"
        self._fail(CaptureError("EngineExited", message), stop)

    async def _watch_switch(self, switch: EngineSwitch, stop: Stop) -> None:
        """The same from when it was told to start: until it listens there is nothing to miss at its port."""
        self._fail(CaptureError("EngineExited", f"{await switch.wait_until_ended()}: see its log"), stop)

    def _fail(self, failure: CaptureError, stop: Stop) -> None:
        """End the run for a reason, unless it ends for another one already."""
        self._recorders.failure = self._recorders.failure or failure
        stop.set(failure.message)

    async def _wait_for_engine(self, stop: Stop) -> None:
        arm = self._part.arm
        within_s = arm.start_seconds if arm else self._settings.deadline_seconds or self._timeouts.ready_s
        async with self._monitor() as monitor:
            try:
                await monitor.wait_until_ready(within_s, stop)
            except EngineNotReadyError as error:
                reason = "Cancelled" if stop.is_set else "EngineNotReady"
                raise self._recorders.failure or CaptureError(reason, f"the engine: {error}") from error

    def _monitor(self) -> EngineMonitor:
        engine = self._settings.engine
        try:
            return EngineMonitor(engine.url, tls_of(engine))
        except InvalidSettingsError as error:
            raise CaptureError("InvalidSettings", str(error)) from error

    async def _load(self, load: Load, stop: Stop) -> LoadResult:
        try:
            return await load(self._settings, self._places.folder, stop)
        except BadDatasetError as error:
            raise CaptureError("InvalidDataset", str(error)) from error
        except InvalidSettingsError as error:
            raise CaptureError("InvalidSettings", str(error)) from error
        except OSError as error:
            raise self._volume_failed(error, stop) from error

    async def _close_anyway(self) -> None:
        """Have what was recorded whole on the volume; why the capture failed is known already."""
        with suppress(CaptureError, OSError):
            await self._recorders.close(self._timeouts.closed_anyway_s)

    def _volume_failed(self, error: OSError, stop: Stop) -> CaptureError:
        """The log of the client says only in words why it failed."""
        full = os.strerror(errno.ENOSPC)
        if error.errno == errno.ENOSPC or full in (stop.reason or "") or "took only part" in (stop.reason or ""):
            return CaptureError("DiskFull", f"the volume at {self._places.root} is full: use a larger one")
        return CaptureError("VolumeFailed", f"{error}{f' ({stop.reason})' if stop.reason else ''}")


def _counters(metrics: MetricsDelta | NoMetrics) -> EngineCounters | None:
    if isinstance(metrics, NoMetrics):
        return None
    speculation = metrics.speculation
    return EngineCounters(
        generation_tokens=metrics.generation_tokens,
        drafts=speculation.drafts if speculation else None,
        draft_tokens=speculation.draft_tokens if speculation else None,
        accepted_tokens=speculation.accepted_tokens if speculation else None,
        num_gpu_blocks=metrics.num_gpu_blocks,
        kv_cache_tokens=metrics.kv_cache_tokens,
    )
