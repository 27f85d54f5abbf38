"""The controllers that are measured: this operator and LeaderWorkerSet."""

import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar, Final

from bench.operator.slowest import OPTION
from bench.operator.stand import NAMESPACES, Stand, scrape
from bench.operator.watching import Name
from devcluster.cluster import lws
from devcluster.cluster.settings import free_ports
from devcluster.host import processes
from devcluster.host.errors import ClusterError
from specdecode_operator.api.base import API_VERSION
from specdecode_operator.api.deployment import KIND
from tests.support.operator_process import USER, OperatorProcess

Body = dict[str, Any]

_TOLERATIONS: Final = [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}]
_MODELS: Final = "/models"
"""Folder of the models on the nodes."""
_LOOK_S: Final = 0.01
_LOG_CHARACTERS: Final = 1000


class Subject(ABC):
    """A controller, its kind, and the children that it creates for an object."""

    title: str
    user: str
    """User name in the API server's audit log."""
    kind: str
    children: ClassVar[Mapping[str, int]]
    """Number of children per object, by resource."""
    selector: str
    """Label selector of the children."""
    workload: str
    """Resource of the child that has the name of the object, and whose spec follows the object's spec."""
    takes_changes_while_down: bool
    """Whether objects can be changed while the controller is down. Its own webhook may prevent it."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self._replicas: dict[Name, int] = {}

    @abstractmethod
    def start(self) -> None:
        """Start the controller, and return when it works."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the controller with SIGTERM, as the kubelet does."""

    @property
    @abstractmethod
    def pids(self) -> tuple[int, ...]:
        """Process IDs of the controller."""

    def check(self) -> None:
        """Raise an error if the controller has exited by itself."""
        if not all(map(processes.alive, self.pids)):
            raise ClusterError(f"{self.title} has exited: {self.log()[-_LOG_CHARACTERS:]}")

    @abstractmethod
    def log(self) -> str:
        """Return the log of the controller."""

    @abstractmethod
    def body(self, name: Name) -> Body:
        """Return the body of an object."""

    def create(self, name: Name) -> None:
        """Create an object."""
        self.stand.api.create(name[0], self.kind, self.body(name))

    def change(self, name: Name) -> None:
        """Add one replica to an object."""
        replicas = self._replicas.get(name, 1) + 1
        self.stand.api.patch(name[0], self.kind, name[1], {"spec": {"replicas": replicas}})
        self._replicas[name] = replicas

    def delete_all(self) -> None:
        """Delete all objects, namespace by namespace."""
        for namespace in NAMESPACES:
            self.stand.api.delete(namespace, self.kind)

    @staticmethod
    def names(objects: int) -> list[Name]:
        """Return the names of a number of objects, spread over the namespaces."""
        return [(NAMESPACES[number % len(NAMESPACES)], f"bench-{number}") for number in range(objects)]


class Operator(Subject):
    """The operator with its service account and leader election, as installed by the chart.

    If there are several, each has its own process and Lease, and serves its share of the namespaces.
    """

    title = "operator"
    user = USER
    kind = "specdecodedeployments"
    children: ClassVar[Mapping[str, int]] = {"deployments": 1, "services": 1, "configmaps": 1}
    selector = "app.kubernetes.io/managed-by=specdecode-operator,specdecode.io/deployment"
    workload = "deployments"
    takes_changes_while_down = True

    def __init__(self, stand: Stand, operators: int = 1) -> None:
        super().__init__(stand)
        self._ports, self._log = free_ports(operators), stand.folder / "operator.log"
        homes = stand.homes(operators)
        nodes = stand.nodes_file() if operators > 1 else None
        self._processes = []
        for number, (port, home) in enumerate(zip(self._ports, homes, strict=True)):
            arguments = [f"--metrics-port={port}", f"--allow-host-path={_MODELS}", OPTION]
            if nodes is not None:
                arguments += [f"--namespace={each}" for each in NAMESPACES[number::operators]]
                arguments.append(f"--nodes={nodes}")
            environment = {"POD_NAMESPACE": home}
            # All append to one log, so that the lines added during a phase come from all operators.
            process = OperatorProcess(stand.operator_kubeconfig, self._log, "bench-1", arguments, environment)
            self._processes.append(process)

    def start(self) -> None:
        """Start the operators, and return when they are healthy."""
        for each in self._processes:
            each.start()

    def stop(self) -> None:
        """Stop the operators with SIGTERM, as the kubelet does."""
        for each in self._processes:
            each.stop()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process IDs of the operators."""
        return tuple(each.pid for each in self._processes)

    def log(self) -> str:
        """Return the log of the operators."""
        return self._log.read_text()

    def metrics(self) -> str:
        """Return the metrics pages of the operators, one after the other."""
        return "".join(map(scrape, self._ports))

    def body(self, name: Name) -> Body:
        """Return Llama-3.1-8B with n-grams, on simulated nodes that have the model."""
        spec = {
            "target": {"model": "meta-llama/Llama-3.1-8B-Instruct"},
            "speculation": {
                "method": "ngram",
                "numSpeculativeTokens": 4,
                "ngram": {"promptLookupMin": 2, "promptLookupMax": 4},
            },
            "serving": {"maxModelLen": 16384},
            # The peer's pods have no init containers either. KWOK writes the pod for each state of an init container.
            "models": {"volume": {"hostPath": {"path": _MODELS}}},
            "podTemplate": {"spec": {"tolerations": _TOLERATIONS}},
        }
        return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name[1]}, "spec": spec}

    def update(self, name: Name) -> None:
        """Change an argument of the engines that is not on their metrics page."""
        patch = {"spec": {"serving": {"maxNumSeqs": 128}}}
        self.stand.api.patch(name[0], self.kind, name[1], patch)


class LeaderWorkerSets(Subject):
    """The controller of LeaderWorkerSets with its webhooks. Each object is its smallest group, of two pods."""

    title = "LeaderWorkerSet"
    user = "lws"
    kind = "leaderworkersets"
    children: ClassVar[Mapping[str, int]] = {"statefulsets": 2, "services": 1}
    selector = "leaderworkerset.sigs.k8s.io/name"
    workload = "statefulsets"
    takes_changes_while_down = False

    def __init__(self, stand: Stand) -> None:
        super().__init__(stand)
        self._pid: int | None = None

    def start(self) -> None:
        """Start the controller, and return when its webhooks answer."""
        self.stand.cluster.add_lws()
        self._pid = self.stand.cluster.component_pid(lws.COMPONENT)
        self.check()

    def stop(self) -> None:
        """Stop the controller with SIGTERM, as the kubelet does."""
        if self._pid is not None:
            with suppress(ProcessLookupError):  # it has already exited
                os.kill(self._pid, signal.SIGTERM)
            while processes.alive(self._pid):
                time.sleep(_LOOK_S)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ID of the controller."""
        if self._pid is None:
            raise ClusterError(f"{self.title} is not running: {self.log()[-_LOG_CHARACTERS:]}")
        return (self._pid,)

    def log(self) -> str:
        """Return the log of the controller."""
        return self.stand.cluster.logs(lws.COMPONENT)

    def body(self, name: Name) -> Body:
        """Return a LeaderWorkerSet of one group of two pods."""
        container = {"name": "main", "image": "localhost/none", "ports": [{"containerPort": 8000}]}
        template = {"spec": {"containers": [container], "tolerations": _TOLERATIONS}}
        spec = {"replicas": 1, "leaderWorkerTemplate": {"size": 2, "workerTemplate": template}}
        api_version = "leaderworkerset.x-k8s.io/v1"
        return {"apiVersion": api_version, "kind": "LeaderWorkerSet", "metadata": {"name": name[1]}, "spec": spec}
