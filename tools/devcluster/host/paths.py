"""Where the development cluster keeps its files."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
TOOLS = Path(__file__).resolve().parents[1] / "tools"


def cache_dir() -> Path:
    """Return the per-user directory for what is slow to make: binaries, environments, images."""
    if chosen := os.environ.get("SPECDECODE_CACHE"):
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).absolute() / "specdecode"


def state_root() -> Path:
    """Return the directory that holds one sub-directory for each running cluster."""
    if chosen := os.environ.get("SPECDECODE_STATE"):
        return Path(chosen).absolute()
    if os.geteuid() == 0:
        return Path("/var/lib/specdecode-dev")
    return cache_dir() / "state"


def engine_environment() -> Path:
    """Return the node's Python environment for the CPU engine image (a directory or a link to one).

    Every container sees it at `/opt/vllm-cpu`: the CPU engine image carries libraries only,
    because an image with the 6 GB environment inside takes minutes to import.
    """
    return cache_dir() / "engine-cpu" / "current"
