"""A node whose kubelet is played by the tests: pods bound to it are run by what a test writes into their status.

The scheduler speaks of a pod that is bound to no node again and again, whenever something in the cluster changes.
Whoever binds it has the last word. There is no Node object: the scheduler would take its absence of room for reasons.
"""

import json
import subprocess
import threading
from contextlib import suppress
from typing import Any, Self

from devcluster.cluster.kubectl import Kubectl
from devcluster.host.errors import ClusterError
from tests.support.api_reader import api_reader

NAME = "played"
_LOOKS_EVERY_S = 0.2
_NOT_NOW = (ClusterError, subprocess.TimeoutExpired)
"""A pod that went meanwhile, or an API server that is slow: the next look tells."""
_SCHEDULED = json.dumps({"status": {"conditions": [{"type": "PodScheduled", "status": "True"}]}})


class PlayedNode:
    """Does for the pods of the node what any kubelet does by itself, until it is left."""

    def __init__(self, kubectl: Kubectl) -> None:
        assert kubectl.kubeconfig
        self._kubectl = kubectl
        self._reader = api_reader(kubectl.kubeconfig)
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._play, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join()

    def _play(self) -> None:
        while not self._left.wait(_LOOKS_EVERY_S):
            with suppress(*_NOT_NOW):
                pods = self._reader.objects("", "pods", field_selector=f"spec.nodeName={NAME}")
                for pod in pods:
                    with suppress(*_NOT_NOW):
                        self._tend(pod)

    def _tend(self, pod: dict[str, Any]) -> None:
        name, kubectl = pod["metadata"]["name"], self._kubectl.within(pod["metadata"]["namespace"])
        conditions = {each["type"]: each["status"] for each in pod["status"].get("conditions", [])}
        if "deletionTimestamp" in pod["metadata"]:
            kubectl.must("delete", "pod", name, "--force", "--grace-period=0", "--ignore-not-found", "--wait=false")
        elif conditions.get("PodScheduled") == "False":  # the scheduler was about to say it when the pod was bound
            kubectl.must("patch", "pod", name, "--subresource=status", f"--patch={_SCHEDULED}")


def bind(kubectl: Kubectl, pod: str) -> None:
    """Put a pod on the node, as a scheduler does."""
    target = {"apiVersion": "v1", "kind": "Node", "name": NAME}
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
    path = f"/api/v1/namespaces/{kubectl.namespace}/pods/{pod}/binding"
    kubectl.must("create", f"--raw={path}", "--filename=-", stdin=json.dumps(binding))
