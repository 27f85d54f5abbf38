"""`specdecode capture-job`: what the containers of a capture's Job run; not for people."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import typer

from specdecode_operator.cli.application import application
from specdecode_operator.cli.terminal import say_line

_RECORDER_HELP: Final = "Folder that the engine has on its PYTHONPATH."
_TERMINATION_LOG_HELP: Final = "Where Kubernetes reads how it went."

capture_job_app = application("Run in the pod of a capture's Job.", hidden=True)

_Termination = Annotated[Path, typer.Option(help=_TERMINATION_LOG_HELP)]
_TERMINATION_LOG: Final = Path("/dev/termination-log")


@capture_job_app.command("prepare")
def prepare_command(
    *,
    recorder: Annotated[Path, typer.Option(help=_RECORDER_HELP)] = Path("/specdecode/recorder"),
    termination_log: _Termination = _TERMINATION_LOG,
) -> None:
    """Check the volume, make the attempt's folders, and copy the recorder."""
    from specdecode_operator.capture.job.main import prepare_job  # noqa: PLC0415

    _end(termination_log, lambda: prepare_job(recorder))


@capture_job_app.command("run")
def run_command(*, termination_log: _Termination = _TERMINATION_LOG) -> None:
    """Send the workload beside the engine, then merge, validate and publish what was recorded."""
    from specdecode_operator.capture.job.main import run_job  # noqa: PLC0415

    _end(termination_log, run_job)


def _end(termination_log: Path, work: Callable[[], bytes]) -> None:
    from specdecode_operator.capture.files.errors import CaptureError  # noqa: PLC0415
    from specdecode_operator.capture.job.messages import error_message  # noqa: PLC0415

    try:
        message, code = work(), 0
    except CaptureError as error:
        say_line(f"{error.reason}: {error.message}", err=True)
        message, code = error_message(error), 1
    # Outside a pod there is no such file, and the exit code says enough.
    with suppress(OSError):
        termination_log.write_bytes(message)
    raise typer.Exit(code)
