"""Run vLLM and the programs of speculators as child processes whose output never reaches the container's log."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from .settings import StepError, open_private

_GRACE_S = 90.0  # From SIGTERM to SIGKILL: longer than vLLM waits for requests, or a trainer writes a checkpoint
_POLL_S = 0.1
_TAIL_BYTES = 256 * 1024


class Interrupted(BaseException):
    """The pod is being stopped."""


def raise_on_signals() -> None:
    """Raise Interrupted on the signals that stop a pod, so that child processes are stopped."""

    def interrupt(number: int, _: FrameType | None) -> None:
        # A second signal must not interrupt the cleanup.
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(signal.Signals(number).name)

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, interrupt)


@contextmanager
def started(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a program in its own process group, and stop the whole group afterwards."""
    with open_private(log, "wb") as output:
        try:
            process = subprocess.Popen(  # noqa: S603  the operator renders the command
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except OSError as error:
            raise StepError("TrainerFailed", f"cannot run {command[0]}: {error.strerror}") from error
    try:
        yield process
    finally:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        # Signal only the parent, which stops its own workers; torchrun forwards the signal.
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> int:
    """Run a program to its end; return its exit code, negative for a signal."""
    with started(command, log, environment) as process:
        return process.wait()


def tail(path: Path) -> str:
    """Return the end of a program's output."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return stream.read().decode("utf-8", "replace")
    except OSError:
        return ""


def wait(process: "subprocess.Popen[bytes]") -> bool:
    """Wait 0.1 s, and return whether the process still runs."""
    time.sleep(_POLL_S)
    return process.poll() is None
