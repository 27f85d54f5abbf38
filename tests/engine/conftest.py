"""Finding a place where the real vLLM can be imported."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.engine_process import Engine

ENGINE_VARIABLE = "SPECDECODE_ENGINE"


def _places() -> Iterator[Path]:
    """Interpreters and package folders that may hold vLLM, best first."""
    if given := os.environ.get(ENGINE_VARIABLE):
        yield Path(given)
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    yield cache / "specdecode" / "engine-cpu" / "current"
    yield Path(sys.executable)


@pytest.fixture(scope="session")
def engine() -> Engine:
    """Return where vLLM can be imported; skip, visibly, where it cannot."""
    for place in _places():
        found = Engine.at(place)
        if found.has_vllm():
            return found
    pytest.skip(f"vLLM is not installed here; set {ENGINE_VARIABLE} to the python, or the package folder, that has it")
