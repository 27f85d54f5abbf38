"""Fixtures that need the real vLLM."""

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from devcluster.host.errors import ClusterError
from specdecode_operator.sizing.version_rules import NEWEST_VERSION
from specdecode_operator.vllm.profiles import find_profile
from tests.engine.adapted_server import serving_adapters
from tests.engine.contract_cases import write_models
from tests.engine.contract_checks import Vllm
from tests.engine.emulated_server import Emulated, emulating_both
from tests.engine.engine_process import HERE, Engine, engine_here
from tests.engine.engine_versions import NEWEST, SERVED, VERSIONS, find_packages, install
from tests.engine.kv_draws import CASES, as_question, case
from tests.engine.oracle_batches import Truth
from tests.engine.oracle_process import Copy, Oracle
from tests.engine.recorder_server import Server, make_models, starting
from tests.engine.suffix_package import with_suffix

OLDER = [pytest.param(version, marks=pytest.mark.long) for version in VERSIONS[:-1]]


@pytest.fixture(scope="session")
def engine() -> Engine:
    """Return where vLLM can be imported."""
    return engine_here()


@pytest.fixture(scope="session")
def newest(engine: Engine) -> Engine:
    """Return where the newest vLLM can be asked, though perhaps not serve."""
    try:
        return engine if NEWEST == SERVED else engine.beside(install(NEWEST))
    except ClusterError as error:
        pytest.skip(f"no vLLM {NEWEST} here ({error})")


@pytest.fixture(scope="session")
def h100(newest: Engine) -> Iterator[Oracle]:
    """The newest vLLM, which believes that it runs on H100s, with all that copies of it are asked for."""
    with Oracle(with_suffix(newest), h100=True, modules=("sizing_oracle", "kv_oracle")) as oracle:
        yield oracle


@pytest.fixture(scope="session")
def cpu(newest: Engine) -> Iterator[Oracle]:
    """The newest vLLM, as a CPU build."""
    with Oracle(with_suffix(newest)) as oracle:
        yield oracle


@pytest.fixture(scope="session", params=[*OLDER, NEWEST])
def vllm(request: pytest.FixtureRequest, engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """Yield one version after the other; the older ones are long."""
    version = request.param
    models = tmp_path_factory.mktemp("contract")
    write_models(models)
    if version == NEWEST:
        yield Vllm(find_profile(version), request.getfixturevalue("h100"), request.getfixturevalue("cpu"), models)
        return
    packages = None if version == SERVED else find_packages(version)
    if packages is None and version != SERVED:
        pytest.skip(f"vLLM {version} is not installed here: ./just engine-versions")
    older = with_suffix(engine.beside(packages) if packages else engine)
    with Oracle(older, h100=True) as h100, Oracle(older) as cpu:
        yield Vllm(find_profile(version), h100, cpu, models)


@pytest.fixture(scope="session")
def newest_truth(h100: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """Return the newest vLLM's answers to the cases of sizing."""
    return Truth(h100, tmp_path_factory.mktemp("truth"))


@pytest.fixture(scope="session")
def truth(vllm: Vllm, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """Return a version's answers."""
    if vllm.profile.version == NEWEST:
        answers: Truth = request.getfixturevalue("newest_truth")
        return answers
    version = f"{vllm.profile.version}.0"
    return Truth(vllm.h100, tmp_path_factory.mktemp(f"truth-{version}"), version)


def begin_dividing(h100: Oracle, folder: Path, version: str) -> tuple[Copy, Path]:
    """Return what divides the KV caches of all draws, and where the answers will be."""
    answers = folder / "answers.json"
    questions = [as_question(case(seed, version)) for seed in range(CASES)]
    return h100.begin("kv_oracle", folder, answers, given=json.dumps(questions)), answers


@pytest.fixture(scope="session")
def kv_begun(h100: Oracle, tmp_path_factory: pytest.TempPathFactory) -> tuple[Copy, Path]:
    """Return the same of the newest vLLM, which every run asks."""
    return begin_dividing(h100, tmp_path_factory.mktemp("kv"), NEWEST_VERSION)


@pytest.fixture(scope="session")
def kv_answers(
    vllm: Vllm, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[dict[str, Any]]]:
    """Return how a version of vLLM divides the KV caches of all draws."""
    version = f"{vllm.profile.version}.0"
    if version == NEWEST_VERSION:
        copy, answers = request.getfixturevalue("kv_begun")
    else:
        copy, answers = begin_dividing(vllm.h100, tmp_path_factory.mktemp(f"kv-{version}"), version)
    copy.wait()
    return version, json.loads(answers.read_text())


@pytest.fixture(scope="session")
def models(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny target and its draft."""
    return make_models(engine, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def heads(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny target that walks through its vocabulary, and the heads that foresee it."""
    folder = tmp_path_factory.mktemp("heads")
    engine.run(str(HERE / "tiny_heads.py"), str(folder))
    return folder


@pytest.fixture(scope="session")
def small_cache(engine: Engine, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An engine that has begun to start: one request of the greatest length fits, eight of the usual one do not."""
    # 39 blocks of 32 tokens.
    options = ("--block-size=32", "--num-gpu-blocks-override=40")
    folder = tmp_path_factory.mktemp("small-cache")
    # The only engine of a quick run that is exactly vLLM: see light_engine.py.
    with starting(engine, models, folder, *options, SPECDECODE_PLAIN_ENGINE="1") as server:
        yield server


@pytest.fixture(scope="session")
def adapted(engine: Engine, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An engine with adapters and a draft model. The target's generation_config.json must not change greedy answers."""
    folder = tmp_path_factory.mktemp("adapted")
    shutil.copytree(models / "target", folder / "target")
    defaults = {"repetition_penalty": 1.9, "temperature": 1.5}
    (folder / "target" / "generation_config.json").write_text(json.dumps(defaults))
    speculation = {"method": "draft_model", "model": str(models / "draft"), "num_speculative_tokens": 3}
    with serving_adapters(engine, folder, folder, speculation) as server:
        yield server


@pytest.fixture(scope="session")
def emulated_begun(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Emulated, Emulated]]:
    """Two engines without model and GPU that have begun to start."""
    with emulating_both(engine, tmp_path_factory.mktemp("emulated")) as both:
        yield both


BEGUN_AHEAD = ("h100", "cpu", "models", "small_cache", "emulated_begun", "kv_begun")
"""What takes long and is waited for late, in the order in which it is begun."""


@pytest.fixture(scope="session", autouse=True)
def begun_ahead(request: pytest.FixtureRequest) -> None:
    """Begin at once what the chosen tests will ask for, beside each other and beside these tests."""
    chosen = [item for item in request.session.items if HERE in item.path.parents]
    wanted = {name for item in chosen if isinstance(item, pytest.Function) for name in item.fixturenames}
    # Where no vLLM is, those skip that ask for it, and no others.
    with suppress(pytest.skip.Exception):
        for name in BEGUN_AHEAD:
            if name in wanted:
                request.getfixturevalue(name)
        if wanted & {"truth", "newest_truth"}:
            request.getfixturevalue("newest_truth").ask(quick=True)
