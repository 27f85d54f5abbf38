"""kubectl as tests use it."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from devcluster.builds import binaries
from devcluster.cluster import kubectl
from devcluster.cluster.kubectl import Answer
from tests.support.api_reader import ApiReader, api_reader
from tests.support.played_node import bind
from tests.support.waiting import eventually

CRDS = Path(__file__).parents[2] / "crds"


class Kubectl(kubectl.Kubectl):
    """kubectl, with what only tests need; what is looked at again and again is read without starting it."""

    def object(self, kind: str, name: str) -> dict[str, Any]:
        """Return an object that must exist."""
        return self._reader.object(self.namespace, kind, name)

    def objects(self, kind: str, *options: str) -> list[dict[str, Any]]:
        """Return all objects of one or more kinds in the namespace, with kubectl's options for selectors."""
        given = dict(option.split("=", 1) for option in options)
        selectors = given.pop("--selector", ""), given.pop("--field-selector", "")
        managed_fields = given.pop("--show-managed-fields", "") == "true"
        assert not given, f"not known here: {given}"
        return self._reader.objects(self.namespace, kind, *selectors, managed_fields=managed_fields)

    @property
    def _reader(self) -> ApiReader:
        assert self.kubeconfig
        return api_reader(self.kubeconfig)

    def apply(self, manifest: str, *options: str) -> Answer:
        """Apply YAML text."""
        return self("apply", *options, "--filename=-", stdin=manifest)

    def patch_status(self, name: str, status: dict[str, Any]) -> None:
        """Write the status of a SpecDecodeDeployment, as the operator does."""
        patch = json.dumps({"status": status})
        self.must("patch", "sdd", name, "--subresource=status", "--type=merge", f"--patch={patch}")

    def patch_pod_status(self, name: str, status: dict[str, Any]) -> None:
        """Write the status of a pod as its kubelet would; one without a node is bound to the played one."""
        if not self.object("pod", name)["spec"].get("nodeName"):
            bind(self, name)
        patch = json.dumps({"status": status})
        self.must("patch", "pod", name, "--subresource=status", "--type=merge", f"--patch={patch}")

    def add_node(self, name: str, product: str, gpus: int = 8) -> None:
        """Add a Node object as a kubelet on a GPU machine would."""
        labels = {"nvidia.com/gpu.product": product}
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        self.must("create", "--filename=-", stdin=json.dumps(body))
        room = {"nvidia.com/gpu": str(gpus)}
        status = json.dumps({"status": {"capacity": room, "allocatable": room}})
        self.must("patch", "node", name, "--subresource=status", "--type=merge", f"--patch={status}")

    def install_crds(self) -> None:
        """Install our CRDs, and wait until the API server serves their kinds: it does so after it says so."""
        self.must("apply", "--server-side", "--force-conflicts", f"--kustomize={CRDS}")
        eventually(lambda: self("get", "sdd,sdc", "--all-namespaces").returncode == 0, "our kinds are served")


@cache
def program(name: str) -> str:
    """Return the path of a program such as kubectl or helm: the machine's, or one that devcluster builds."""
    return str(binaries.find(name)[name])
