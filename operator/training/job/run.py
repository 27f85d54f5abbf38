"""Run one step of a training in the trainer's image: `python3 -I training.zip hidden-states|train`."""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from .hidden_states import write_hidden_states
from .processes import Interrupted, raise_on_signals
from .settings import STEPS, Settings, StepError, read_settings, volume_errors
from .training import train

TERMINATION_LOG = "/dev/termination-log"
_STEPS: dict[str, Callable[[Settings], dict[str, Any]]] = dict(zip(STEPS, (write_hidden_states, train), strict=True))


def run() -> None:
    """Run the step that the command line names, and write its result or failure to the termination message."""
    step, *rest = sys.argv[1:]
    message = Path(rest[0] if rest else TERMINATION_LOG)
    raise_on_signals()
    try:
        settings = read_settings(os.environ)
        with volume_errors(settings.root):
            result = {step: _STEPS[step](settings)}
    except StepError as error:
        _fail(message, error.reason, error.message)
    except Interrupted as error:
        _fail(message, "Cancelled", f"the pod was stopped ({error}); a retry continues from the newest checkpoint")
    except Exception as error:  # noqa: BLE001  its text may quote a row
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        place = f" at {Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno}" if frame else ""
        _fail(message, "InternalError", f"{type(error).__name__}{place}")
    else:
        _write(message, result)


def _fail(path: Path, reason: str, message: str) -> None:
    print(f"{reason}: {message}", file=sys.stderr)  # noqa: T201
    _write(path, {"error": {"reason": reason, "message": message}})
    sys.exit(1)


def _write(path: Path, value: dict[str, Any]) -> None:
    # Outside a pod the file does not exist, and the exit code is enough.
    with suppress(OSError):
        path.write_text(json.dumps(value), encoding="utf-8")
