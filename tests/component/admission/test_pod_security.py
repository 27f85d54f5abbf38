"""Pods of ours against the API server's own admission, in a namespace that enforces the strictest level."""

import json
from typing import Any

import pytest
import yaml

from specdecode_operator.doctor.namespace import RESTRICTED_USER
from tests.support.kubectl import Kubectl
from tests.support.model_caches import cached, decide, fetched, jobs, template
from tests.support.objects import Body
from tests.support.waiting import eventually

USER = yaml.safe_load(RESTRICTED_USER)


@pytest.fixture
def strict(kubectl: Kubectl) -> Kubectl:
    """kubectl in a namespace that enforces restricted."""
    kubectl.must("label", "namespace", str(kubectl.namespace), "pod-security.kubernetes.io/enforce=restricted")
    return kubectl


def pods(**changes: Any) -> dict[str, Body]:
    """The pods of an object with everything that adds to them: the engine's, and that of a download."""
    serving = {"maxModelLen": 8192, "tlsSecret": {"name": "tls"}, "apiKeySecret": {"name": "api", "key": "key"}}
    spec = cached(serving=serving, **changes)
    return {
        "engine": template(decide(spec, fetched(spec))),
        "download": jobs(decide(spec))[0]["spec"]["template"]["spec"],
    }


def admission(kubectl: Kubectl, pod: Body) -> str:
    """What the API server says of a pod; nothing is stored."""
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod}
    answer = kubectl("create", "--dry-run=server", "--filename=-", stdin=json.dumps(body))
    return answer.stderr if answer.returncode else ""


@pytest.mark.parametrize("kind", ["engine", "download"])
def test_what_doctor_says_lets_pods_in(strict: Kubectl, kind: str) -> None:
    eventually(lambda: "runAsNonRoot" in admission(strict, pods()[kind]), "the level is enforced")
    assert admission(strict, pods(podTemplate={"spec": {"securityContext": USER}})[kind]) == ""
