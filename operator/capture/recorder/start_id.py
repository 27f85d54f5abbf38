"""Which start of the engine a process belongs to: the same for all of its API servers, another for the next start."""

import os
from pathlib import Path

_PROCESSES = Path("/proc")
_STARTED = 19
"""Field 22 of /proc/PID/stat, counted from the third: the name before may hold spaces (proc(5))."""


def start_id(api_servers: int, processes: Path = _PROCESSES) -> str | None:
    """Return the process that began it and when, in ticks of this host; None where that cannot be told.

    Several API servers are children of one process (vllm/v1/utils.py APIServerProcessManager); a single one is that
    process itself. In a container that was started anew it has the same number as before, and another time.
    """
    process = os.getppid() if api_servers > 1 else os.getpid()
    try:
        fields = (processes / str(process) / "stat").read_text().rpartition(")")[2].split()
        return f"{process}-{fields[_STARTED]}"
    except (OSError, IndexError, UnicodeDecodeError):
        return None
