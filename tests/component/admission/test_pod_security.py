"""Pods of ours against the API server's own admission, in a namespace that enforces the strictest level."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.golden import rendered_pods
from tests.support.kubectl import Kubectl
from tests.support.model_caches import cached, decide, fetched, jobs, template
from tests.support.objects import Body
from tests.support.waiting import eventually
from tests.unit.deployment.models.test_model_facts import jobs as readers
from tests.unit.deployment.models.test_model_facts import undescribed

ROOT_USER = {"securityContext": {"runAsUser": 0}}


@pytest.fixture
def strict(kubectl: Kubectl) -> Kubectl:
    """kubectl in a namespace that enforces restricted."""
    kubectl.must("label", "namespace", str(kubectl.namespace), "pod-security.kubernetes.io/enforce=restricted")
    as_root = pods(podTemplate={"spec": ROOT_USER})
    eventually(lambda: "runAsNonRoot" in admission(kubectl, as_root["engine"]), "the level is enforced")
    return kubectl


def pods(**changes: Any) -> dict[str, Body]:
    """The pods of an object with everything that adds to them: the engine's, and that of a download."""
    serving = {"maxModelLen": 8192, "tlsSecret": {"name": "tls"}, "apiKeySecret": {"name": "api", "key": "key"}}
    spec = cached(serving=serving, **changes)
    return {
        "engine": template(decide(spec, fetched(spec))),
        "download": jobs(decide(spec))[0]["spec"]["template"]["spec"],
    }


def examples() -> Iterator[Body]:
    """All pods that the operator makes of the examples: engines, groups of them, downloads, captures."""
    yield from (each["spec"] for each in rendered_pods())


def admission(kubectl: Kubectl, *pods: Body) -> str:
    """What the API server says of pods; nothing is stored."""
    bodies = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"p{number}"}, "spec": {**pod}}
        for number, pod in enumerate(pods)
    ]
    listed = {"apiVersion": "v1", "kind": "List", "items": bodies}
    answer = kubectl("create", "--dry-run=server", "--filename=-", stdin=json.dumps(listed))
    return answer.stderr if answer.returncode else ""


def test_restricted_namespace_admits_all_operator_pods(strict: Kubectl) -> None:
    shown = list(examples())
    assert len(shown) >= 15
    read = [each["spec"]["template"]["spec"] for each in readers(undescribed())]
    assert admission(strict, *shown, *read, *pods().values()) == ""


@pytest.mark.parametrize("kind", ["engine", "download"])
def test_restricted_namespace_admits_other_user_id_but_not_root(strict: Kubectl, kind: str) -> None:
    assert admission(strict, pods(podTemplate={"spec": {"securityContext": {"runAsUser": 1000}}})[kind]) == ""
    assert "runAsNonRoot" in admission(strict, pods(podTemplate={"spec": ROOT_USER})[kind])


def test_api_server_rejects_priority_without_a_class(kubectl: Kubectl) -> None:
    pod = pods()["engine"]
    assert admission(kubectl, pod) == ""
    for field, value in (("priority", 2_000_001_000), ("preemptionPolicy", "Never")):
        told = admission(kubectl, {**pod, field: value})
        assert "must not be provided in pod spec" in told, (field, told)
