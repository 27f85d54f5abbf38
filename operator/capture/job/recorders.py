"""The recorders of a capture, as the load generator's container sees them: through their files."""

import asyncio
import os
import time
from pathlib import Path
from typing import Final

from specdecode_operator.capture.files.errors import CaptureError
from specdecode_operator.capture.files.segments import (
    Segment,
    boots,
    current_start,
    list_segments,
    off_reason,
    recorders_closed,
)
from specdecode_operator.capture.job.places import Places
from specdecode_operator.capture.job.prepare import volume_errors
from specdecode_operator.capture.load.stop import Stop
from specdecode_operator.capture.recorder.lines import DISK_FULL, EXIT, ORDERED, UNKNOWN_SHAPE
from specdecode_operator.capture.recorder.segment import RESERVE_BYTES
from specdecode_operator.capture.recorder.shapes import TRIED
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip

_PROBE: Final = "probe"
_POLL_S: Final = 0.2
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
            await asyncio.sleep(_POLL_S)
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
            await asyncio.sleep(_POLL_S)
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
