"""Finding a place where the real vLLM can be imported."""

import os
from pathlib import Path

import pytest

from devcluster.errors import ClusterError
from devcluster.images.engine_environment import install_engine_environment
from tests.engine.engine_process import Engine

ENGINE_VARIABLE = "SPECDECODE_ENGINE"


@pytest.fixture(scope="session")
def engine() -> Engine:
    """Return where vLLM can be imported: where the variable says, or the development cluster's environment.

    Skips, visibly, where it cannot: without root there is no such environment,
    and it is made for the Python of the engine image.
    """
    try:
        place = Path(os.environ.get(ENGINE_VARIABLE) or install_engine_environment())
    except ClusterError as error:
        pytest.skip(f"no vLLM here ({error}); set {ENGINE_VARIABLE} to the python, or the package folder, that has it")
    engine = Engine.at(place)
    if not engine.has_vllm():
        pytest.skip(f"{engine.python} cannot use the vLLM in {place}; set {ENGINE_VARIABLE} to a python that has it")
    return engine
