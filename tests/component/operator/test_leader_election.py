"""Two operators with the rights that they are installed with: one works, and the other takes over."""

from pathlib import Path

import yaml

from tests.support.kubectl import Kubectl
from tests.support.objects import tiny_cpu
from tests.support.operator_process import NAMESPACE, SERVICE_ACCOUNT, OperatorProcess
from tests.support.waiting import eventually


def apply(kubectl: Kubectl, name: str) -> None:
    body = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment"}
    answer = kubectl.apply(yaml.safe_dump({**body, "metadata": {"name": name}, "spec": tiny_cpu(suspend=True)}))
    assert answer.returncode == 0, answer.stderr
    eventually(lambda: "plan" in kubectl.object("sdd", name).get("status", {}), f"{name} is planned")


def test_the_second_waits_and_takes_over_from_the_first(
    operator: OperatorProcess, kubectl: Kubectl, tmp_path: Path
) -> None:
    lease = kubectl.within(NAMESPACE)

    def holder() -> object:
        return lease.object("lease", SERVICE_ACCOUNT)["spec"]["holderIdentity"]

    second = OperatorProcess(operator.kubeconfig, tmp_path / "log", "pod-2")
    second.start()
    try:
        assert "waits for its Lease" in second.health()
        apply(kubectl, "before")
        assert holder() == "pod-1"
        assert operator.stop() == 0
        apply(kubectl, "after")
        assert holder() == "pod-2"
        operator.start()
        assert "waits for its Lease" in operator.health()
        assert operator.stop() == 0, "one that waits ends as well as one that works"
    finally:
        assert second.stop() == 0
    assert holder() == ""
