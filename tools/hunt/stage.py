"""Where the hunt takes place: a cluster with simulated nodes, and the operator in front of it, behind a fault proxy."""

import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Final

import yaml

from devcluster.cluster.cluster import Cluster
from devcluster.cluster.control_plane import audit_log
from hunt.records import SEEN, Body, Call, OperatorLife, read_calls
from tests.support.api_client import ApiClient, api_client
from tests.support.faults.calls import Call as ProxyCall
from tests.support.faults.calls import Moment
from tests.support.faults.faults import Delay, EndWatch, Fault
from tests.support.faults.proxy import FaultProxy
from tests.support.kubectl import Kubectl
from tests.support.operator_process import NAMESPACE, SERVICE_ACCOUNT, OperatorProcess, may, service_account_kubeconfig
from tests.support.waiting import eventually

NODES: Final = "kwok=24xH100:8,4xH200:8"
REFUSED_LABEL: Final = "hunt-refused"
"""On namespaces in which admission refuses what the operator writes."""

_ROLE: Final = f"{SERVICE_ACCOUNT}"
_MANIFESTS: Final = Path(__file__).parents[2] / "manifests"
_REACHED_S: Final = 6
_FINDS_OUT_S: Final = 3
"""So long an operator has no rights: it asks for something meanwhile."""


@dataclass
class Stage:
    """A cluster with the operator's rights in it, and a way for the operator to reach it."""

    cluster: Cluster
    folder: Path
    proxy: FaultProxy
    client: ApiClient
    kubectl: Kubectl
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of the operator's process: where its code comes from."""

    def operator(self, name: str) -> "HuntedOperator":
        """Return an operator that was not started yet."""
        return HuntedOperator(self, self.folder / f"{name}.log")

    def look(self) -> dict[str, list[Body]]:
        """Return the objects of all namespaces of the hunt."""
        found: dict[str, list[Body]] = {}
        for body in self.client.objects("", SEEN):
            namespace = body["metadata"]["namespace"]
            if namespace.startswith("hunt"):
                found.setdefault(namespace, []).append(body)
        return found

    def mark(self) -> int:
        """Return where the audit log ends now."""
        log = audit_log(self.cluster.state)
        return log.stat().st_size if log.exists() else 0

    def calls_since(self, mark: int) -> list[tuple[str, Call]]:
        """Return what the operator asked for since then, each with its namespace."""
        return list(read_calls(audit_log(self.cluster.state), mark))

    def statuses(self, namespace: str) -> list[tuple[str, str]]:
        """Return which statuses the operator has written there; one whose answer did not arrive is like no other."""
        return [
            (f"{call.resource.partition('.')[0]}/{call.name}", str(call.number) if call.cut else call.digest)
            for call in [*self.proxy.calls]
            if call.namespace == namespace and call.resource.endswith("/status") and call.status == HTTPStatus.OK
        ]

    def revoke(self) -> None:
        """Take the operator its rights in the cluster."""
        self.kubectl.must("delete", "clusterrolebinding", _ROLE)

    def give_back(self) -> None:
        """Give the operator its rights back."""
        self.kubectl.must("apply", "--server-side", "--force-conflicts", f"--kustomize={_MANIFESTS}")


class HuntedOperator:
    """The operator's process: killed, started anew, and what was seen of it."""

    def __init__(self, stage: Stage, log: Path) -> None:
        log.unlink(missing_ok=True)
        through = stage.folder / "through"
        self._process = OperatorProcess(through, log, environment=stage.environment)
        self._stage, self._proxy, self._log = stage, stage.proxy, log
        self.life = OperatorLife()
        self.kills = 0

    def start(self) -> None:
        """Start it and wait until it works."""
        self._process.start()

    def kill(self) -> None:
        """End it as an out-of-memory killer would, and start it anew."""
        self.kills += 1
        self._process.kill()
        self._process.start()

    @contextmanager
    def killed_at(self, number: int) -> Iterator[None]:
        """Kill it at one of its next calls that write, after the server has done it; start it anew at the end."""
        seen, reached, lock = 0, threading.Event(), threading.Lock()

        def hook(call: ProxyCall, moment: Moment) -> bool:
            nonlocal seen
            if moment != "after" or not call.writes or call.resource.startswith("leases"):
                return False
            with lock:
                seen += 1
                if seen != number:
                    return seen > number
            self._process.kill()
            reached.set()
            return True

        self._proxy.hook = hook
        try:
            yield
            reached.wait(_REACHED_S)
        finally:
            self._proxy.hook = None
        if reached.is_set():
            self.kills += 1
            self._process.start()

    @contextmanager
    def disturbed(self, fault: str, number: int) -> Iterator[None]:
        """Let something go wrong with it while steps are done."""
        match fault:
            case "kill-at-call":
                with self.killed_at(number):
                    yield
            case "drop-watches":
                self._proxy.faults = [Fault(EndWatch(410), "watch *", share=0.3, times=40, seed=number)]
                yield
                self._proxy.faults = []
            case "slow":
                self._proxy.faults = [Fault(Delay(0.7), "[!w]*", share=0.4, seed=number)]
                yield
                self._proxy.faults = []
            case "kill":
                yield
                self.kill()
            case "revoke":
                self._stage.revoke()
                yield
                time.sleep(_FINDS_OUT_S)
                self._stage.give_back()
            case _:
                yield

    @property
    def has_ended(self) -> bool:
        """Whether it ended by itself: nothing it should do is to be waited for."""
        return self._process.ended() is not None

    def note(self) -> None:
        """Write down how it is."""
        if (how := self._process.ended()) is not None:
            self.life.ended.append(how)
            self._process.stop()
            self._process.start()
        self.life.memory_mib.append(resident_mib(self._process.pid))

    def cpu_s(self) -> float:
        """Return the CPU time that its process took so far."""
        return cpu_s(self._process.pid)

    def look(self) -> OperatorLife:
        """Return its life so far."""
        self.note()
        self.life.log = self._log.read_text(errors="replace")
        return self.life

    def end(self) -> OperatorLife:
        """End it, and return its life."""
        self.note()
        self._process.stop()
        self.life.log = self._log.read_text(errors="replace")
        return self.life


@contextmanager
def stage(name: str, folder: Path, environment: Mapping[str, str] | None = None) -> Iterator[Stage]:
    """Bring up a cluster of this name, or take the one that is there; it is taken down where it was not there."""
    cluster = Cluster(name)
    was_up = cluster.kubeconfig.exists()
    cluster.up(NODES)
    folder.mkdir(parents=True, exist_ok=True)
    kubectl = Kubectl(cluster.kubeconfig, NAMESPACE)
    try:
        kubectl.install_crds()
        kubectl.must("apply", "--server-side", "--force-conflicts", f"--kustomize={_MANIFESTS}")
        eventually(lambda: may(kubectl, "watch", "nodes"), "the operator has its rights")
        kubectl.must("apply", "--server-side", "--filename=-", stdin=yaml.safe_dump_all(_refusing_policy()))
        account = service_account_kubeconfig(kubectl, folder / "account")
        with FaultProxy(account) as proxy:
            proxy.write_kubeconfig(account, folder / "through")
            client = api_client(cluster.kubeconfig)
            yield Stage(cluster, folder, proxy, client, kubectl, environment or {})
    finally:
        if not was_up:
            cluster.down()


def _refusing_policy() -> list[Body]:
    """Return a policy that refuses what the operator writes in namespaces with the label."""
    rules = [{"apiGroups": ["*"], "apiVersions": ["*"], "operations": ["CREATE", "UPDATE"], "resources": ["*"]}]
    user = f"system:serviceaccount:{NAMESPACE}:{SERVICE_ACCOUNT}"
    name = {"name": "hunt-refuses"}
    common = {"apiVersion": "admissionregistration.k8s.io/v1"}
    return [
        {
            **common,
            "kind": "ValidatingAdmissionPolicy",
            "metadata": name,
            "spec": {
                "failurePolicy": "Fail",
                "matchConstraints": {
                    "resourceRules": rules,
                    "namespaceSelector": {"matchLabels": {REFUSED_LABEL: "yes"}},
                },
                "validations": [{"expression": f"request.userInfo.username != '{user}'", "message": "not today"}],
            },
        },
        {
            **common,
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": name,
            "spec": {"policyName": "hunt-refuses", "validationActions": ["Deny"]},
        },
    ]


def resident_mib(pid: int) -> float:
    """Return how much memory a process holds."""
    found = re.search(r"^VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0


def cpu_s(pid: int) -> float:
    """Return how much CPU time a process took so far."""
    parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")
