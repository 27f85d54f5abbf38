"""Finding a place where the real vLLM can be imported."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from devcluster.errors import ClusterError
from devcluster.images.engine_environment import install_engine_environment
from specdecode_operator.engine.profiles import find_profile
from tests.engine.contract_cases import write_models
from tests.engine.contract_checks import Vllm
from tests.engine.engine_process import Engine
from tests.engine.engine_versions import NEWEST, OLDER, find_packages
from tests.engine.oracle_process import Oracle

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


@pytest.fixture(scope="session", params=[*(pytest.param(version, marks=pytest.mark.long) for version in OLDER), NEWEST])
def vllm(request: pytest.FixtureRequest, engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """Yield one version after the other; the older ones are long."""
    version = request.param
    older = None if version == NEWEST else find_packages(version)
    if version != NEWEST and older is None:
        pytest.skip(f"vLLM {version} is not installed here: ./just engine-versions")
    models = tmp_path_factory.mktemp("models")
    write_models(models)
    with ExitStack() as stack:
        h100 = stack.enter_context(Oracle(engine, older=older, h100=True))
        cpu = stack.enter_context(Oracle(engine, older=older))
        yield Vllm(find_profile(version), h100, cpu, models)
