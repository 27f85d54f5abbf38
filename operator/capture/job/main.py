"""A capture from inside its pod: what the containers `prepare` and `load` of its Job do.

`prepare` runs before the engine, `run` beside it: wait for the engine and its recorders, send the workload, have the
recorders finish, merge, validate, publish. Either says how it went in the container's termination message: the
summary, or ``{"error": {"reason", "message"}}``.
"""

import asyncio
import errno
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from specdecode_operator.capture.files.errors import CaptureError
from specdecode_operator.capture.files.manifest import EngineCounters, PartialManifest
from specdecode_operator.capture.files.publish import label_partial
from specdecode_operator.capture.job.finish import Asked, Published, Run, finish, published_before
from specdecode_operator.capture.job.image import IMAGE_ID_FILE, engine_image_id
from specdecode_operator.capture.job.places import Places
from specdecode_operator.capture.job.prepare import prepare, volume_errors
from specdecode_operator.capture.job.recorders import Recorders
from specdecode_operator.capture.load.engine_ready import EngineMonitor, EngineNotReadyError, MetricsDelta, NoMetrics
from specdecode_operator.capture.load.progress import print_line
from specdecode_operator.capture.load.prompts.datasets import DATASET_MOUNT, BadDatasetError
from specdecode_operator.capture.load.prompts.sources import prompt_source
from specdecode_operator.capture.load.runner import LoadResult, run_load
from specdecode_operator.capture.load.stop import Stop, stop_on_signals
from specdecode_operator.capture.load.workload import (
    ATTEMPT_VARIABLE,
    NODE_VARIABLE,
    SETTINGS_VARIABLE,
    InvalidSettingsError,
    RunSettings,
    read_settings,
)
from specdecode_operator.capture.validation.summary import MESSAGE_BYTES, summary_text

_MESSAGE_CHARACTERS: Final = 2000


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


Load = Callable[[RunSettings, Path, Stop], Awaitable[LoadResult]]


class Job:
    """One attempt of a capture."""

    def __init__(
        self,
        environment: Mapping[str, str],
        timeouts: Timeouts = Timeouts(),
        image_id_file: Path = IMAGE_ID_FILE,
    ) -> None:
        text = environment.get(SETTINGS_VARIABLE)
        attempt = environment.get(ATTEMPT_VARIABLE)
        if not text or not attempt:
            missing = ATTEMPT_VARIABLE if text else SETTINGS_VARIABLE
            raise CaptureError("InvalidSettings", f"{missing} is not set: this runs in the pod of a capture's Job only")
        try:
            self.settings = read_settings(text)
        except InvalidSettingsError as error:
            raise CaptureError("InvalidSettings", str(error)) from error
        self.asked = msgspec.json.decode(text, type=Asked)
        self.places = Places(Path(self.settings.root), self.settings.namespace, self.settings.capture, attempt)
        self._timeouts = timeouts
        self._node = environment.get(NODE_VARIABLE)
        self._image_id_file = image_id_file

    def prepare(self, recorder: Path, datasets: Path = DATASET_MOUNT) -> None:
        """Do what comes before the engine; nothing where an earlier attempt has published already.

        Raises
        ------
        CaptureError
            When this volume cannot take the capture, or the dataset has no prompts.
        """
        if published_before(self.places, self.asked) is None:
            prepare(self.places, recorder)
            self._check_dataset(datasets)

    def _check_dataset(self, mount: Path) -> None:
        """Read the dataset once before the engine starts: no GPU loads a model for prompts that cannot be read."""
        try:
            prompt_source(self.settings, mount)
        except BadDatasetError as error:
            failure = CaptureError("InvalidDataset", str(error))
            self._label(failure)
            raise failure from error

    def run(self, load: Load = run_load) -> Published:
        """Do what comes beside the engine; a failure leaves the files labelled as partial.

        Where an earlier attempt of this capture has published already, that is the outcome.

        Raises
        ------
        CaptureError
            When the capture was not published.
        """
        published = published_before(self.places, self.asked)
        return published if published is not None else self._run(load)

    def _run(self, load: Load) -> Published:
        try:
            return finish(self.places, self.asked, asyncio.run(self._record(load)))
        except CaptureError as error:
            self._label(error)
            raise
        except Exception as error:
            failure = CaptureError("InternalError", f"{type(error).__name__}: {error}: see the log of this container")
            self._label(failure)
            raise failure from error

    async def _record(self, load: Load) -> Run:
        stop = Stop()
        stop_on_signals(stop)
        recorders = Recorders(self.places)
        await self._wait_for_engine(stop)
        await recorders.wait_until_recording(self._timeouts.recording_s)
        watches = [asyncio.create_task(recorders.watch(stop)), asyncio.create_task(self._watch_engine(stop, recorders))]
        deadline = self._stop_at_the_deadline(stop, recorders)
        image_id_until_s = time.monotonic() + self._timeouts.image_id_s
        try:
            result = await self._load(load, stop)
        except CaptureError:
            await self._close_anyway(recorders)
            raise
        finally:
            for watch in watches:
                watch.cancel()
            deadline.cancel()
        if stop.is_set:
            await self._close_anyway(recorders)
            raise recorders.failure or CaptureError("Cancelled", f"stopped before its end: {stop.reason}")
        with volume_errors(self.places.root):
            await recorders.close(self._timeouts.closed_s)
        return Run(
            zero_monotonic_s=result.zero_monotonic_s,
            zero_wall_s=result.zero_wall_s,
            segments=recorders.segments(),
            counters=_counters(result.metrics),
            no_counters=result.metrics.reason if isinstance(result.metrics, NoMetrics) else None,
            node=self._node,
            image_id=await engine_image_id(self._image_id_file, self.places.attempt, image_id_until_s),
        )

    def _stop_at_the_deadline(self, stop: Stop, recorders: Recorders) -> asyncio.TimerHandle:
        deadline_s = self.settings.deadline_seconds or self._timeouts.ready_s

        def end() -> None:
            message = f"the load did not end within spec.deadlineSeconds ({deadline_s:g}): raise it, or send less"
            recorders.failure = recorders.failure or CaptureError("DeadlineExceeded", message)
            stop.set(message)

        return asyncio.get_running_loop().call_later(deadline_s, end)

    async def _watch_engine(self, stop: Stop, recorders: Recorders) -> None:
        """Stop the load when the engine is gone: one that was killed says nothing, and its next start takes minutes."""
        async with EngineMonitor(self.settings.engine.url) as monitor:
            await monitor.wait_until_gone()
        message = "the engine ended while it was recorded: nothing listens at its port any more; see its log"
        recorders.failure = recorders.failure or CaptureError("EngineExited", message)
        stop.set(message)

    async def _wait_for_engine(self, stop: Stop) -> None:
        async with EngineMonitor(self.settings.engine.url) as monitor:
            try:
                await monitor.wait_until_ready(self.settings.deadline_seconds or self._timeouts.ready_s, stop)
            except EngineNotReadyError as error:
                reason = "Cancelled" if stop.is_set else "EngineNotReady"
                raise CaptureError(reason, f"the engine: {error}") from error

    async def _load(self, load: Load, stop: Stop) -> LoadResult:
        try:
            return await load(self.settings, self.places.folder, stop)
        except BadDatasetError as error:
            raise CaptureError("InvalidDataset", str(error)) from error
        except InvalidSettingsError as error:
            raise CaptureError("InvalidSettings", str(error)) from error
        except OSError as error:
            raise self._volume_failed(error, stop) from error

    async def _close_anyway(self, recorders: Recorders) -> None:
        """Have what was recorded whole on the volume; why the capture failed is known already."""
        with suppress(CaptureError, OSError):
            await recorders.close(self._timeouts.closed_anyway_s)

    def _volume_failed(self, error: OSError, stop: Stop) -> CaptureError:
        """The log of the client says only in words why it failed."""
        full = os.strerror(errno.ENOSPC)
        if error.errno == errno.ENOSPC or full in (stop.reason or "") or "took only part" in (stop.reason or ""):
            return CaptureError("DiskFull", f"the volume at {self.places.root} is full: use a larger one")
        return CaptureError("VolumeFailed", f"{error}{f' ({stop.reason})' if stop.reason else ''}")

    def _label(self, error: CaptureError) -> None:
        manifest = PartialManifest(
            namespace=self.places.namespace,
            capture=self.places.capture,
            attempt=self.places.attempt,
            reason=error.reason,
            message=error.message,
        )
        # Where not even this can be written, the label of the start still says that it is unfinished.
        with suppress(OSError):
            label_partial(self.places.folder, manifest)


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


def prepare_job(recorder: Path) -> bytes:
    """Do what comes before the engine; return the termination message.

    Raises
    ------
    CaptureError
        When this volume cannot take the capture.
    """
    job = Job(os.environ)
    job.prepare(recorder)
    return msgspec.json.encode({"prepared": str(job.places.folder)})


def run_job() -> bytes:
    """Do what comes beside the engine, and print the summary; return the termination message.

    Raises
    ------
    CaptureError
        When the capture was not published.
    """
    published = Job(os.environ).run()
    print_line(report(published))
    return success_message(published)


def error_message(error: CaptureError) -> bytes:
    """Return the termination message of a failure."""
    message = error.message[:_MESSAGE_CHARACTERS]
    while len(text := msgspec.json.encode({"error": {"reason": error.reason, "message": message}})) > MESSAGE_BYTES:
        message = message[: len(message) * 3 // 4]
    return text


def success_message(published: Published) -> bytes:
    """Return the termination message of a success: ``status.summary``, small enough for Kubernetes."""
    status: dict[str, Any] = dict(published.status)
    for dropped in ("files", "perPositionPercent", "lateMs", "latencyMs"):
        text = msgspec.json.encode(status)
        if len(text) <= MESSAGE_BYTES:
            return text
        status.pop(dropped, None)
    return msgspec.json.encode(status)


def report(published: Published) -> str:
    """Return what the container's log ends with."""
    return f"{summary_text(published.summary)}\n{published.manifest.accounting.equation}\n{published.status['path']}"
