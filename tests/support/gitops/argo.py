"""Argo CD's own sync and its three ways of comparing, as a tool of the drill."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from specdecode_operator.api.capture import KIND as CAPTURE
from specdecode_operator.api.deployment import KIND as DEPLOYMENT
from tests.support.gitops.health import LUA
from tests.support.gitops.sync import FOLDER
from tests.support.kubectl import Kubectl, program
from tests.support.objects import Body


@dataclass(frozen=True)
class ArgoCD:
    """An application with one namespace."""

    kubectl: Kubectl
    server_side_apply: bool = True
    replace: bool = False
    deadline_s: int = 120
    """For all waves."""

    def sync(self, checkout: Path) -> str:
        """Sync, with `prune: true`; return what was refused."""
        return self.sync_objects(objects(checkout))

    def differences(self, checkout: Path) -> str:
        """Return what is OutOfSync, by the way of comparing."""
        return self.out_of_sync(objects(checkout))

    def sync_objects(self, wanted: list[Body]) -> str:
        """Bring objects into the namespace; return what was refused."""
        said = self._ask(wanted, sync=True)
        if said["phase"] == "Succeeded":
            return ""
        return "\n".join([f"{said['phase']}: {said['message']}", *(each["message"] for each in said["synced"] or [])])

    def out_of_sync(self, wanted: list[Body]) -> str:
        """Return what of them is OutOfSync, by the way of comparing."""
        found = {way: each for way, each in self._ask(wanted, sync=False)["outOfSync"].items() if each}
        return json.dumps(found) if found else ""

    def health(self, wanted: list[Body]) -> dict[str, str]:
        """Return the health of each, by its kind and name."""
        return {name: each["status"] for name, each in self._ask(wanted, sync=False)["health"].items() if each}

    def _ask(self, wanted: list[Body], *, sync: bool) -> dict[str, Any]:
        application = {
            "name": "pairs",
            "kubeconfig": str(self.kubectl.kubeconfig),
            "namespace": self.kubectl.namespace,
            "objects": wanted,
            "lua": dict.fromkeys((DEPLOYMENT, CAPTURE), LUA.read_text()),
            "sync": sync,
            "serverSideApply": self.server_side_apply,
            "replace": self.replace,
            "prune": True,
            "deadlineSeconds": self.deadline_s,
        }
        answer = subprocess.run(
            [program("argo")], input=json.dumps(application), capture_output=True, text=True, check=False
        )
        assert answer.returncode == 0, answer.stderr
        found: dict[str, Any] = json.loads(answer.stdout)
        return found


def objects(checkout: Path) -> list[Body]:
    """Return the objects of a checkout that are applied."""
    files = sorted((checkout / FOLDER).glob("*.yaml"))
    return [body for file in files for body in yaml.safe_load_all(file.read_text())]
