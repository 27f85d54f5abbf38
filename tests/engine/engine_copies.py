"""Copies of a process that has imported vLLM, each of which runs one script; runs in the engine's Python."""

import atexit
import importlib
import os
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

WITH_PARENT_ONLY: list[int] = []
"""File descriptors that copies close."""


def begin(
    script: str,
    arguments: Sequence[str],
    files: Mapping[str, str],
    environment: Mapping[str, str],
    packages: Sequence[str],
) -> int:
    """Start a script, or the main function of a module, in a copy of this process; return the copy's number.

    Parameters
    ----------
    files
        What it reads from standard input, ``given``, and what it writes to standard output and error, ``log``.
    packages
        Folders that go before all others where modules are looked for.
    """
    copy = os.fork()
    if copy:
        return copy
    code = 1
    try:
        for descriptor in WITH_PARENT_ONLY:
            os.close(descriptor)
        _redirect(files["given"], files["log"])
        os.environ.update(environment)
        sys.path[:0] = packages
        sys.argv = [script, *arguments]
        atexit._clear()
        code = _run(script)
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 (the log says what it was)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect(given: str, log: str) -> None:
    for path, flags, descriptor in (
        (given, os.O_RDONLY, 0),
        (log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 1),
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.dup2(1, 2)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")


def _run(script: str) -> int:
    try:
        if script.endswith(".py"):
            sys.path.insert(0, str(Path(script).parent))
            runpy.run_path(script, run_name="__main__")
        else:
            importlib.import_module(script).main()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def ended(copy: int) -> int:
    """Return the exit status of a copy, once it has ended."""
    _, status = os.waitpid(copy, 0)
    return os.waitstatus_to_exitcode(status)
