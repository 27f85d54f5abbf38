"""A replay server as a user starts it: a process of its own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SPECDECODE = Path(sys.executable).with_name("specdecode")
_STOP_S = 60


@contextmanager
def replaying(*arguments: str | Path) -> Iterator[str]:
    """Serve a trace; yields the URL."""
    command = [SPECDECODE, "replay", "serve", *arguments, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert " on http://" in line, f"it said {line!r} and ended with {process.poll()}"
            yield line.rpartition(" on ")[2].strip()
        finally:
            process.terminate()
            process.wait(_STOP_S)
