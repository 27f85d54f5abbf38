"""kubectl as tests use it."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from devcluster.builds import binaries
from devcluster.cluster import kubectl
from devcluster.cluster.kubectl import Answer
from tests.support.api_client import ApiClient, RefusedError, api_client
from tests.support.played_node import bind
from tests.support.waiting import eventually

CRDS = Path(__file__).parents[2] / "crds"


class Kubectl(kubectl.Kubectl):
    """kubectl, with what only tests need; what is looked at or written again and again does without starting it."""

    def object(self, kind: str, name: str) -> dict[str, Any]:
        """Return an object that must exist."""
        return self._client.object(self.namespace, kind, name)

    def objects(self, kind: str, *options: str) -> list[dict[str, Any]]:
        """Return all objects of one or more kinds in the namespace, with kubectl's options for selectors."""
        given = dict(option.split("=", 1) for option in options)
        selectors = given.pop("--selector", ""), given.pop("--field-selector", "")
        managed_fields = given.pop("--show-managed-fields", "") == "true"
        assert not given, f"not known here: {given}"
        return self._client.objects(self.namespace, kind, *selectors, managed_fields=managed_fields)

    @property
    def _client(self) -> ApiClient:
        assert self.kubeconfig
        return api_client(self.kubeconfig)

    def apply(self, manifest: str, *options: str) -> Answer:
        """Apply YAML text."""
        return self("apply", *options, "--filename=-", stdin=manifest)

    def write(self, manifest: str) -> Answer:
        """Apply YAML text as `kubectl apply --server-side --force-conflicts` does."""
        try:
            for body in yaml.safe_load_all(manifest):
                self._client.apply(body["metadata"].get("namespace", self.namespace), body)
        except RefusedError as error:
            return Answer("write", 1, "", str(error))
        return Answer("write", 0, "", "")

    def create(self, manifest: str) -> Answer:
        """Create the object of YAML text as `kubectl create` does; a bad one is told more fully than by `write`."""
        body = yaml.safe_load(manifest)
        try:
            self._client.create(self.namespace, body["kind"].lower(), body)
        except RefusedError as error:
            return Answer("create", 1, "", str(error))
        return Answer("create", 0, "", "")

    def create_namespace(self) -> None:
        """Create the namespace that this is bound to."""
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}}
        self._client.create("", "namespaces", body)

    def remove(self, kinds: str) -> None:
        """Delete all objects of some kinds in the namespace, and wait for nothing."""
        for kind in kinds.split(","):
            self._client.delete(self.namespace, kind)

    def ours(self) -> set[tuple[str, str, str]]:
        """Return kind, namespace and name of each object of ours in the whole cluster."""
        metadata = (
            (kind, each["metadata"]) for kind in ("sdtr", "sdc", "sdd") for each in self._client.objects("", kind)
        )
        return {(kind, each["namespace"], each["name"]) for kind, each in metadata}

    def remove_one(self, kind: str, namespace: str, name: str) -> None:
        """Delete an object of any namespace, and wait for nothing; one that is gone is fine."""
        self._client.delete(namespace, kind, name)

    def patch_status(self, name: str, status: dict[str, Any], kind: str = "sdd") -> None:
        """Write the status of a SpecDecodeDeployment, or of a capture, as the operator does."""
        self._client.patch(self.namespace, kind, f"{name}/status", {"status": status})

    def patch_pod_status(self, name: str, status: dict[str, Any]) -> None:
        """Write the status of a pod as its kubelet would; one without a node is bound to the played one."""
        if not self.object("pod", name)["spec"].get("nodeName"):
            bind(self, name)
        self._client.patch(self.namespace, "pods", f"{name}/status", {"status": status})

    def add_node(self, name: str, product: str, gpus: int = 8) -> None:
        """Add a Node object as a kubelet on a GPU machine would."""
        labels = {"nvidia.com/gpu.product": product}
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        self._client.create("", "nodes", body)
        room = {"nvidia.com/gpu": str(gpus)}
        self._client.patch("", "nodes", f"{name}/status", {"status": {"capacity": room, "allocatable": room}})

    def install_crds(self) -> None:
        """Install our CRDs, and wait until the API server serves their kinds: it does so after it says so."""
        self.must("apply", "--server-side", "--force-conflicts", f"--kustomize={CRDS}")
        eventually(lambda: self("get", "sdd,sdc,sdtr", "--all-namespaces").returncode == 0, "our kinds are served")


@cache
def program(name: str) -> str:
    """Return the path of a program such as kubectl or helm: the machine's, or one that devcluster builds."""
    return str(binaries.find(name)[name])
