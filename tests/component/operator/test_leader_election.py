"""Of several operators one works, with the rights that they are installed with, and the next one takes over."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from specdecode_operator.handlers.leadership import EXIT_STATUS
from tests.support.conditions import condition
from tests.support.faults.calls import Call, Moment
from tests.support.faults.faults import Delay, Fault
from tests.support.faults.proxy import FaultProxy
from tests.support.kubectl import Kubectl
from tests.support.objects import tiny_cpu
from tests.support.operator_process import NAMESPACE, SERVICE_ACCOUNT, OperatorProcess
from tests.support.waiting import eventually


def write(kubectl: Kubectl, name: str, replicas: int = 1) -> None:
    body = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "metadata": {"name": name}}
    answer = kubectl.write(yaml.safe_dump(body | {"spec": tiny_cpu(replicas=replicas)}))
    assert answer.returncode == 0, answer.stderr


def wanted(kubectl: Kubectl, name: str) -> object:
    """How many engines the operator asks for."""
    return kubectl.object("deployment", name)["spec"]["replicas"]


def is_carried_out(kubectl: Kubectl, name: str, replicas: int = 1) -> None:
    eventually(lambda: wanted(kubectl, name) == replicas, f"somebody has seen to {name}")


def is_waiting(operator: OperatorProcess) -> None:
    eventually(lambda: "standby" in operator.health(), "it stands by")


def holder(kubectl: Kubectl) -> object:
    return kubectl.within(NAMESPACE).object("lease", SERVICE_ACCOUNT)["spec"]["holderIdentity"]


def test_standby_operator_takes_over_when_the_leader_ends(
    operator: OperatorProcess, kubectl: Kubectl, tmp_path: Path
) -> None:
    second = OperatorProcess(operator.kubeconfig, tmp_path / "log", "pod-2")
    second.start()
    try:
        is_waiting(second)
        write(kubectl, "before")
        is_carried_out(kubectl, "before")
        assert holder(kubectl) == "pod-1"
        assert operator.stop() == 0
        kubectl.within(NAMESPACE).must("get", "configmap", f"{SERVICE_ACCOUNT}-snapshot")
        write(kubectl, "after")
        is_carried_out(kubectl, "after")
        assert holder(kubectl) == "pod-2"
        operator.start()
        is_waiting(operator)
        second.kill()
        write(kubectl, "after", replicas=2)
        is_carried_out(kubectl, "after", replicas=2)
        assert holder(kubectl) == "pod-1"
    finally:
        assert second.stop() == 0


@contextmanager
def behind_a_proxy(kubeconfig: Path, folder: Path, name: str) -> Iterator[tuple[OperatorProcess, FaultProxy]]:
    """An operator whose calls are seen, started and ended."""
    with FaultProxy(kubeconfig) as proxy:
        through = proxy.write_kubeconfig(kubeconfig, folder / name)
        process = OperatorProcess(through, folder / f"{name}.log", name)
        try:
            process.start()
            yield process, proxy
        finally:
            process.kill()


class HeldCall:
    """The first call of a kind, held back on its way to the server until it may go on."""

    def __init__(self, permission: str, name: str) -> None:
        self._what = (permission, name)
        self.call: Call | None = None
        self._may_go = threading.Event()

    def __call__(self, call: Call, moment: Moment) -> bool:
        if self.call is None and moment == "before" and (call.permission, call.name) == self._what:
            self.call = call
            self._may_go.wait()
        return False

    def let_go(self) -> None:
        self._may_go.set()


def test_woken_former_leader_writes_nothing_and_its_late_write_is_repaired(
    operator: OperatorProcess, kubectl: Kubectl, tmp_path: Path
) -> None:
    assert operator.stop() == 0
    with (
        behind_a_proxy(operator.kubeconfig, tmp_path, "frozen") as (first, its_calls),
        behind_a_proxy(operator.kubeconfig, tmp_path, "other") as (second, _),
    ):
        for name in ("early", "held"):
            write(kubectl, name)
            is_carried_out(kubectl, name)
        assert holder(kubectl) == "frozen"
        # It has looked at the Lease, has sent a write, and is frozen before that arrives.
        its_calls.hook = held = HeldCall("patch deployments.apps", "held")
        write(kubectl, "held", replicas=2)
        eventually(lambda: held.call, "it writes")
        first.freeze()
        write(kubectl, "held", replicas=3)
        is_carried_out(kubectl, "held", replicas=3)
        assert holder(kubectl) == "other"
        for name in ("early", "late"):
            write(kubectl, name, replicas=4)
            is_carried_out(kubectl, name, replicas=4)
        held.let_go()
        eventually(lambda: held.call and held.call.status, "the late write has arrived")
        is_carried_out(kubectl, "held", replicas=3)

        # It has much to do when it wakes, and is not told soon that it lost the Lease.
        its_calls.faults = [Fault(Delay(1), "* leases*")]
        its_calls.calls.clear()
        first.wake()
        assert first.wait() == EXIT_STATUS
        asked = [call.permission for call in its_calls.calls]
        assert any(permission.startswith("get leases") for permission in asked), asked
        assert [str(call) for call in its_calls.calls if call.writes and "leases" not in call.resource] == []
        assert wanted(kubectl, "held") == 3
        eventually(lambda: condition(kubectl, "held", "Planned")[0] == "True", "its status tells of the last change")
        eventually(lambda: second.health() == "ok", "the other one goes on")
