"""Objects come and go for months: of those that are gone nothing is kept."""

import gc

import pytest

from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.resources import (
    CHILDREN,
    DEPLOYMENT,
    POD,
    SPECDECODE_CAPTURE,
    SPECDECODE_DEPLOYMENT,
    TEMPLATE_HASH_ANNOTATION,
)
from tests.support.api_server import ApiServer
from tests.support.captures import capture_spec
from tests.support.embedded_operator import embedded_operator, until
from tests.support.objects import Body, tiny_cpu

NAMESPACE = "churn"
SPECS: tuple[Body, ...] = (
    tiny_cpu(replicas=2),
    tiny_cpu(suspend=True),
    tiny_cpu(serving={"maxModelLen": 0}),
    tiny_cpu(policy={"windowSeconds": 300, "cooldownSeconds": 600}),
)


def keepers() -> list[object]:
    """Return what holds keys of the objects of this test: whoever remembers one does so by its key."""
    gc.collect()
    keys = [each for each in gc.get_objects() if isinstance(each, Key) and each.namespace == NAMESPACE]
    return [each for each in gc.get_referrers(*keys) if isinstance(each, dict | set | tuple)] if keys else []


def collect_garbage(api: ApiServer) -> None:
    """Remove what was made while its owner went, as Kubernetes does."""
    for resource in CHILDREN:
        for name in api.names(resource):
            api.remove(resource, name)


def metadata(name: str) -> Body:
    return {"namespace": NAMESPACE, "name": name}


def start_engine(api: ApiServer, name: str) -> None:
    """Let a Deployment have a pod that serves nobody."""
    workload = api.find(DEPLOYMENT, name)
    if workload is None:
        return
    template = workload["spec"]["template"]["metadata"]
    marks = {TEMPLATE_HASH_ANNOTATION: template["annotations"][TEMPLATE_HASH_ANNOTATION]}
    owner = {"uid": workload["metadata"]["uid"], "kind": "Deployment", "name": name, "apiVersion": "apps/v1"}
    about = {**metadata(f"{name}-pod"), "labels": template["labels"], "annotations": marks, "ownerReferences": [owner]}
    ready = {"podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
    api.create(POD, {"metadata": about, "status": ready})


async def test_of_objects_that_came_and_went_nothing_is_kept(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with embedded_operator(monkeypatch) as operator:
        for round_ in range(3):
            names = [f"llama-{round_}-{number}" for number in range(len(SPECS))]
            for name, spec in zip(names, SPECS, strict=True):
                api.create(SPECDECODE_DEPLOYMENT, {"metadata": metadata(name), "spec": spec})
            capture = {"metadata": metadata(f"capture-{round_}"), "spec": capture_spec(deployment=names[0])}
            api.create(SPECDECODE_CAPTURE, capture)

            def told(names: list[str] = names) -> bool:
                return all("status" in (api.find(SPECDECODE_DEPLOYMENT, name) or {}) for name in names)

            await until(told, lambda: "all are looked at")
            for name in names:
                start_engine(api, name)
            assert keepers()
            api.remove(SPECDECODE_CAPTURE, f"capture-{round_}")
            for name in names:
                api.remove(SPECDECODE_DEPLOYMENT, name)
            await until(lambda: not operator.state.cache.parents(), lambda: "their end is seen")

        def is_forgotten() -> bool:
            collect_garbage(api)
            return not keepers()

        await until(is_forgotten, lambda: f"still known: {[str(each)[:300] for each in keepers()]}")
