"""A node whose kubelet is played by the tests: pods bound to it are run by what a test writes into their status.

The scheduler speaks of a pod that is bound to no node again and again, whenever something in the cluster changes.
Whoever binds it has the last word. There is no Node object: the scheduler would take its absence of room for reasons.
"""

import threading
from contextlib import suppress
from typing import Any, Self

from devcluster.cluster.kubectl import Kubectl
from devcluster.host.errors import ClusterError
from tests.support.api_client import api_client

NAME = "played"
_WATCHES_S = 1
"""So long it may take to leave the node."""
_PAUSE_S = 0.2
"""Before an API server is asked again that is slow, or whose watch has ended."""
_SCHEDULED = {"status": {"conditions": [{"type": "PodScheduled", "status": "True"}]}}


class PlayedNode:
    """Does for the pods of the node what any kubelet does by itself, until it is left."""

    def __init__(self, kubectl: Kubectl) -> None:
        assert kubectl.kubeconfig
        self._client = api_client(kubectl.kubeconfig)
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._play, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join()

    def _play(self) -> None:
        while not self._left.wait(_PAUSE_S):
            with suppress(ClusterError):
                for pod in self._client.watch("pods", f"spec.nodeName={NAME}", _WATCHES_S):
                    with suppress(ClusterError):  # it went meanwhile
                        self._tend(pod)

    def _tend(self, pod: dict[str, Any]) -> None:
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        conditions = {each["type"]: each["status"] for each in pod["status"].get("conditions", [])}
        if "deletionTimestamp" in pod["metadata"]:
            self._client.delete(namespace, "pods", name, grace_period_s=0)
        elif conditions.get("PodScheduled") == "False":  # the scheduler was about to say it when the pod was bound
            self._client.patch(namespace, "pods", f"{name}/status", _SCHEDULED, by_key=True)


def bind(kubectl: Kubectl, pod: str, node: str = NAME) -> None:
    """Put a pod on a node, the played one by default, as a scheduler does."""
    assert kubectl.kubeconfig
    target = {"apiVersion": "v1", "kind": "Node", "name": node}
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
    api_client(kubectl.kubeconfig).create(kubectl.namespace, "pods", binding, f"/{pod}/binding")
