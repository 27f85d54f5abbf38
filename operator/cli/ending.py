"""How the command line ends, whatever happens: no traceback for who cannot do anything with one."""

import io
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from typing import Final, NoReturn

from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip


class Ending(IntEnum):
    """What the shell gets of a command that something stopped, beside its own exit codes."""

    # As sysexits.h has them
    DEFECT = 70
    NOT_WRITTEN = 74
    # As shells say that a signal ended a program
    INTERRUPTED = 130
    PIPE_CLOSED = 141


TRACEBACK: Final = "SPECDECODE_TRACEBACK"

_IN_PODS: Final = ("operator", "capture-job", "read-model")
"""Commands that nobody can run again to see more."""


def run_to_its_end(command: Callable[[], None]) -> NoReturn:
    """Run a command and end the process: with its exit code, or with one line on what stopped it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Whatever the locale, and whatever bytes the name of a file has.
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            command()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except SystemExit:
        raise
    except KeyboardInterrupt:
        _end(Ending.INTERRUPTED)
    except BrokenPipeError:
        # Who reads has enough, as head does: that is no error of anyone.
        _end(Ending.PIPE_CLOSED)
    except OSError as error:
        place = error.filename if isinstance(error.filename, str) else "standard output"
        _end(Ending.NOT_WRITTEN, f"{place}: {error.strerror or error}: write to another place")
    except MemoryError:
        _end(Ending.DEFECT, "there is not enough memory for it: give it less at once")
    except Exception as error:  # noqa: BLE001  the last to hear of it
        _end_with_defect(error)
    sys.exit(0)


def _end_with_defect(error: Exception) -> NoReturn:
    if os.environ.get(TRACEBACK) or sys.argv[1:2] in [[name] for name in _IN_PODS]:
        traceback.print_exception(error)
    what = " ".join(f"{type(error).__name__}: {error}".split())
    hint = f"this is a defect of specdecode: please report what {TRACEBACK}=1 shows"
    _end(Ending.DEFECT, f"{clip(what, 300)}: {hint}")


def _end(code: Ending, message: str | None = None) -> NoReturn:
    with suppress(OSError, AttributeError, ValueError):
        if message is not None:
            sys.stderr.write(f"error: {printable(message)}\n")
        sys.stderr.flush()
    # What could not be written would be tried, and told, once more.
    with suppress(OSError, AttributeError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
