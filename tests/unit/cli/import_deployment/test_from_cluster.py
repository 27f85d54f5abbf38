"""`specdecode import KIND/NAME` reads each kind from the cluster, with what it refers to there."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode_operator.cli.importing import _RESOURCES, _RUNTIMES, Source, SourceError, read_source
from specdecode_operator.cluster.resources import SERVICE
from specdecode_operator.importing.convert import migrate_workload
from tests.support.api_server import ApiServer

DATA = Path(__file__).parents[2] / "importing/sources/data"
KINDS = {each.kind: each for found in (*_RESOURCES.values(), _RUNTIMES) for each in found} | {"Service": SERVICE}


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    server = ApiServer()
    server.served |= {each.qualified_plural: each for each in KINDS.values()}
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    async with server.serving(tmp_path / "kubeconfig"):
        yield server


def put(api: ApiServer, file: str) -> None:
    for body in yaml.safe_load_all((DATA / file).read_text()):
        body["metadata"].setdefault("namespace", "team")
        # A server does not say a kind again with each object of a list.
        api.create(KINDS[body["kind"]], {key: value for key, value in body.items() if key != "kind"})


async def read(which: str, namespace: str | None = None) -> Source:
    return await asyncio.to_thread(read_source, [which], None, namespace, None)


FOUND = {
    "statefulset/llama": ("stateful-set.yaml", "chat", "meta-llama/Llama-3.1-8B-Instruct"),
    "sts/llama": ("stateful-set.yaml", "chat", "meta-llama/Llama-3.1-8B-Instruct"),
    "pod/try-qwen": ("pod.yaml", "lab", "Qwen/Qwen3-32B"),
    "lws/wide": ("leader-worker-set.yaml", "chat", "meta-llama/Llama-3.1-70B-Instruct"),
    "isvc/llama": ("inference-service-runtime.yaml", "llm", "llama-3.1-8b"),
    "llmisvc/qwen3-32b": ("llm-inference-service.yaml", "llm", "Qwen/Qwen3-32B"),
}


@pytest.mark.parametrize("which", FOUND)
async def test_each_kind_is_read_from_the_cluster(api: ApiServer, which: str) -> None:
    file, namespace, model = FOUND[which]
    put(api, file)
    source = await read(which, namespace)
    migration = migrate_workload(source.workload, source.services)
    assert migration.body["spec"]["target"]["model"] == model
    assert not migration.decisions
    assert not {each.partition(" ")[0] for each in api.requests} - {"get", "list"}, "it only reads"


async def test_services_of_the_namespace_become_steps(api: ApiServer) -> None:
    put(api, "pod.yaml")
    source = await read("pod/try-qwen", "lab")
    steps = migrate_workload(source.workload, source.services).steps
    assert any("kubectl patch service try-qwen -n lab" in each.command for each in steps)


async def test_a_runtime_that_is_not_there_is_a_decision(api: ApiServer) -> None:
    put(api, "inference-service-huggingface.yaml")
    body: dict[str, Any] = {"metadata": {"name": "other", "namespace": "team"}}
    model = {"modelFormat": {"name": "vLLM"}, "runtime": "gone", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    api.create(KINDS["InferenceService"], body | {"spec": {"predictor": {"model": model}}})
    decisions = migrate_workload((await read("isvc/other")).workload).decisions
    assert any(each.field == "spec.predictor.model.runtime" for each in decisions)


@pytest.mark.parametrize("which", ["statefulset/nobody", "isvc/nobody"])
async def test_what_is_not_there_is_said(api: ApiServer, which: str) -> None:
    with pytest.raises(SourceError, match="/nobody: is not in namespace team: name another"):
        await read(which)
