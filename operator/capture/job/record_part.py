"""Record one part of a capture: start an arm's engine, send its load, wait for the recorders.

A part is one arm in one repetition. The seed determines the order of the arms. With several arms, start and stop
commands go to recorder/switcher.py in the engine's container, as files.
"""

import asyncio
import errno
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from specdecode_operator.capture.files.formats import CHECKS, PART_SUFFIX, CaptureError, EngineCounters, Experiment
from specdecode_operator.capture.files.segments import (
    Segment,
    boots,
    current_start,
    list_segments,
    off_reason,
    recorders_closed,
)
from specdecode_operator.capture.job.answer_checks import check_answers
from specdecode_operator.capture.job.finish import Asked, Run
from specdecode_operator.capture.job.pod_files import (
    IMAGE_ID_FILE,
    SWITCH_FOLDER,
    Places,
    engine_image_id,
    volume_errors,
)
from specdecode_operator.capture.load.datasets import BadDatasetError
from specdecode_operator.capture.load.engine_ready import EngineMonitor, EngineNotReadyError, MetricsDelta, NoMetrics
from specdecode_operator.capture.load.prompts import prompt_source
from specdecode_operator.capture.load.run_settings import (
    ArmSettings,
    CheckSettings,
    InvalidSettingsError,
    RunSettings,
    tls_of,
)
from specdecode_operator.capture.load.runner import LoadResult
from specdecode_operator.capture.load.shutdown import Stop, beside, stop_on_signals
from specdecode_operator.capture.recorder.segment_format import DISK_FULL, EXIT, FOLDER_VARIABLE, ORDERED, UNKNOWN_SHAPE
from specdecode_operator.capture.recorder.switcher import ENDED, ORDER_FILE, RUNNING, STATE_FILE, STOPPED
from specdecode_operator.capture.recorder.vllm_internals import TRIED
from specdecode_operator.capture.recorder.writer import RESERVE_BYTES
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip

NO_CHECKS: Final = CheckSettings()


@dataclass(frozen=True)
class Part:
    """One arm, once: an engine under the whole load."""

    settings: RunSettings  # with the engine of the arm
    asked: Asked
    places: Places
    arm: ArmSettings | None = None  # None where the engine's container itself starts the engine

    @property
    def checks(self) -> CheckSettings:
        """How much is asked to compare its answers with those of other arms: once is enough."""
        compares = self.asked.experiment is not None and self.places.repetition == 1
        return self.settings.checks if compares else NO_CHECKS

    def named(self, error: CaptureError) -> CaptureError:
        """Return an error that says whose it is."""
        if self.arm is None:
            return error
        whose = f"arm {self.arm.name}, repetition {self.places.repetition}"
        return CaptureError(error.reason, f"{whose}: {error.message}")


def order_of_arms(arms: Sequence[str], repetitions: int, seed: int) -> list[list[str]]:
    """Return the arms in the order in which they are measured, for each repetition.

    Two repetitions belong together: the first has an order that is drawn, the second the opposite one. What changes
    steadily meanwhile, such as a GPU that gets warmer, then meets all arms alike.
    """
    order: list[list[str]] = []
    while len(order) < repetitions:
        drawn = list(arms)
        Random(f"{seed}/arms/{len(order)}").shuffle(drawn)  # noqa: S311 - not for secrets
        order += [drawn, drawn[::-1]]
    return order[:repetitions]


def parts_of(settings: RunSettings, asked: Asked, attempt: str) -> list[Part]:
    """Return what is to be done, in this order."""
    root, namespace, capture = Path(settings.root), settings.namespace, settings.capture
    if not settings.arms:
        return [Part(settings, asked, Places(root, namespace, capture, attempt))]
    arms = {arm.name: arm for arm in settings.arms}
    order = order_of_arms(list(arms), settings.repetitions, settings.seed)
    experiment = _experiment(settings, order) if len(arms) > 1 else None
    return [
        Part(
            settings.model_copy(update={"engine": arms[name].engine}),
            msgspec.structs.replace(asked, context=arms[name].context, experiment=experiment),
            Places(root, namespace, capture, attempt, name, repetition),
            arms[name],
        )
        for repetition, names in enumerate(order, start=1)
        for name in names
    ]


def _experiment(settings: RunSettings, order: list[list[str]]) -> Experiment:
    return Experiment(
        arms=[arm.name for arm in settings.arms],
        baseline=settings.arms[0].name,
        repetitions=settings.repetitions,
        order=order,
        slo=settings.slo,
        lossy={arm.name: arm.lossy for arm in settings.arms if arm.lossy is not None},
    )


ANSWER_S: Final = 180.0
"""How long the switcher may take to follow an order: it is there when its container has started, and an engine that
does not end when it is told is killed after a minute and a half."""

_POLL_S: Final = 0.1
_LARGEST_STATE_BYTES: Final = 4096


class State(Struct, frozen=True):
    """What became of the last order."""

    number: Annotated[int, Meta(ge=0)]
    state: Literal["running", "stopped", "ended"]
    exit_code: int | None = None  # of an engine that ended; null where nobody knows


class EngineSwitch:
    """Has engines started and stopped, through files that two containers share."""

    def __init__(self, folder: Path, answer_s: float = ANSWER_S) -> None:
        self._folder = folder
        self._answer_s = answer_s
        state = self._state()
        self._number = state.number if state is not None else 0

    async def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start an engine, as soon as nothing is left of the one before.

        Raises
        ------
        CaptureError
            When it cannot be started.
        """
        await self._order(list(command), dict(env), RUNNING)

    async def stop(self) -> None:
        """Have the engine end, and return when nothing is left of it.

        Raises
        ------
        CaptureError
            When nobody followed the order.
        """
        await self._order(None, {}, STOPPED)

    async def wait_until_ended(self) -> str:
        """Return how the engine ended, when it did without being told."""
        while True:
            # In a thread: the schedule of the load must not wait for a file.
            state = await asyncio.to_thread(self._state)
            if state is not None and state.state == ENDED:
                return _how(state)
            await asyncio.sleep(_POLL_S)

    async def _order(self, command: list[str] | None, env: dict[str, str], expected: str) -> None:
        self._number += 1
        part = self._folder / f"{ORDER_FILE}.part"
        part.write_bytes(msgspec.json.encode({"number": self._number, "command": command, "env": env}))
        part.chmod(0o644)  # the engine's container may have another user
        part.replace(self._folder / ORDER_FILE)
        until_s = time.monotonic() + self._answer_s
        while (state := self._state()) is None or state.number < self._number:
            if state is not None and state.state == ENDED:
                raise _exited(state)
            if time.monotonic() >= until_s:
                raise CaptureError(
                    "EngineNotReady",
                    f"the engine's container did not follow an order within {self._answer_s:g} s: see its log; its"
                    " image must have python3",
                )
            await asyncio.sleep(_POLL_S)
        if state.state != expected:
            raise _exited(state)

    def _state(self) -> State | None:
        try:
            opened = os.open(self._folder / STATE_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:  # a link, which is not followed
            raise CaptureError("InternalError", f"{STATE_FILE} of the engine's container: {error.strerror}") from error
        try:
            with os.fdopen(opened, "rb") as stream:
                return msgspec.json.decode(stream.read(_LARGEST_STATE_BYTES), type=State)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CaptureError("InternalError", f"{STATE_FILE} of the engine's container: {error}") from error


def _exited(state: State) -> CaptureError:
    return CaptureError("EngineExited", f"{_how(state)}: see its log")


def _how(state: State) -> str:
    code = "" if state.exit_code is None else f" with exit code {state.exit_code}"
    return f"the engine ended{code}, and nobody had told it to"


_PROBE: Final = "probe"
_RECORDER_POLL_S: Final = 0.2
_WATCH_EVERY_S: Final = 1.0


class Recorders:
    """Waits for the recorders, watches them while the load runs, and has them finish."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._boots: frozenset[str] = frozenset()
        self.failure: CaptureError | None = None

    async def wait_until_recording(self, within_s: float) -> None:
        """Wait until every API server of the engine records.

        Raises
        ------
        CaptureError
            When they do not in time, or have switched themselves off.
        """
        until_s = time.monotonic() + within_s
        while not _complete(current := current_start(self._places.segments)):
            if time.monotonic() >= until_s:
                with volume_errors(self._places.root):
                    _try_to_write(self._places.segments)
                raise CaptureError(
                    "RecorderMissing",
                    f"{len(current)} API servers record {within_s:g} s after the engine was ready: see its log;"
                    " it must load plugins (VLLM_PLUGINS), have the recorder on its PYTHONPATH, and answer from Python"
                    " (no VLLM_USE_RUST_FRONTEND, its image's included)",
                )
            await asyncio.sleep(_RECORDER_POLL_S)
        self._boots = boots(current)
        if (failure := self._failure(current)) is not None:
            raise failure

    async def watch(self, stop: Stop) -> None:
        """Stop the load when a recorder ends, or another start of the engine begins; never returns."""
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            # In a thread: the schedule of the load must not wait for a slow volume.
            failure = await asyncio.to_thread(self._check)
            if failure is not None and self.failure is None:
                self.failure = failure
                stop.set(failure.message)

    async def close(self, within_s: float) -> None:
        """Order the recorders to finish, and wait for their last lines.

        Raises
        ------
        CaptureError
            When they do not in time, or ended for another reason.
        """
        self._places.close_file.touch()
        until_s = time.monotonic() + within_s
        while not recorders_closed(self._places.segments):
            if time.monotonic() >= until_s:
                raise self.failure or CaptureError(
                    "RecorderNotClosed",
                    f"the recorders did not finish within {within_s:g} s: the engine hangs or is gone; see its log",
                )
            await asyncio.sleep(_RECORDER_POLL_S)
        if self.failure is None:
            self.failure = self._failure(current_start(self._places.segments))
        if self.failure is not None:
            raise self.failure

    def segments(self) -> list[Segment]:
        """Return the segments of the start that was recorded."""
        return [each for each in list_segments(self._places.segments) if each.header.boot in self._boots]

    def _check(self) -> CaptureError | None:
        try:
            return self._failure(current_start(self._places.segments))
        except CaptureError as unreadable:
            return unreadable

    def _failure(self, current: list[Segment]) -> CaptureError | None:
        if boots(current) != self._boots:
            return CaptureError(
                "EngineRestarted", "the engine was started anew while it was recorded: see the log of its last start"
            )
        for segment in current:
            if segment.closed is not None and segment.closed.reason != ORDERED:
                return _ended(segment, segment.closed.reason)
        return None


def _try_to_write(folder: Path) -> None:
    """Write what a recorder writes first: on a full volume it cannot even say that it is full."""
    probe = folder / _PROBE
    try:
        probe.write_bytes(os.urandom(2 * RESERVE_BYTES))
    finally:
        probe.unlink(missing_ok=True)


def _complete(current: list[Segment]) -> bool:
    return bool(current) and len(current) >= current[0].header.client_count


def _ended(segment: Segment, reason: str) -> CaptureError:
    if reason == DISK_FULL:
        return CaptureError("DiskFull", "the recorder stopped: the volume is full; use a larger one")
    if reason == EXIT:
        return CaptureError("EngineExited", "the engine ended while it was recorded: see its log")
    why = off_reason(segment.path) or reason
    fix = f": capture one that it was tried with, vLLM {TRIED} (spec.engine of the deployment)"
    engine = f"the engine, vLLM {clip(printable(segment.header.vllm), 64)}, went on"
    message = f"the recorder switched itself off, {engine}: {why}{fix if reason == UNKNOWN_SHAPE else ''}"
    return CaptureError("RecorderOff", message)


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
