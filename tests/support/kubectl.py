"""kubectl as tests use it."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from devcluster import binaries, kubectl
from devcluster.kubectl import Answer
from tests.support.waiting import DEADLINE_S, eventually

CRDS = Path(__file__).parents[2] / "crds"


class Kubectl(kubectl.Kubectl):
    """kubectl, with what only tests need."""

    def apply(self, manifest: str, *options: str) -> Answer:
        """Apply YAML text."""
        return self("apply", *options, "--filename=-", stdin=manifest)

    def patch_status(self, name: str, status: dict[str, Any]) -> None:
        """Write the status of a SpecDecodeDeployment, as the operator does."""
        patch = json.dumps({"status": status})
        self.must("patch", "sdd", name, "--subresource=status", "--type=merge", f"--patch={patch}")

    def patch_pod_status(self, name: str, status: dict[str, Any]) -> None:
        """Write the status of a pod without a node, as its kubelet would.

        The scheduler speaks of it in the status too, and may do so again whenever something in the cluster changes:
        a test that needs ``PodScheduled`` writes until its effect is seen.
        """

        def scheduler_has_spoken() -> bool:
            conditions = self.object("pod", name)["status"]["conditions"]
            return any(each["type"] == "PodScheduled" for each in conditions)

        eventually(scheduler_has_spoken, f"the scheduler has looked at pod {name}")
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
        self.wait_for_crds()
        eventually(lambda: self("get", "sdd,sdc", "--all-namespaces").returncode == 0, "our kinds are served")

    def wait_for_crds(self, *names: str) -> None:
        """Wait until CRDs are established, all of them by default."""
        options = ("--for=condition=Established", f"--timeout={DEADLINE_S}s")
        self.must("wait", *options, "crd", *(names or ("--all",)), timeout_s=DEADLINE_S + 10)


@cache
def program(name: str) -> str:
    """Return the path of a program such as kubectl or helm: the machine's, or one that devcluster builds."""
    return str(binaries.find(name)[name])
