"""Carries out the steps of the hunt, each in one namespace."""

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from devcluster.host.errors import ClusterError
from hunt.records import FOREIGN, SEEN, SQUATTER, Body, children, contents, identity, name_of
from hunt.stage import REFUSED_LABEL, Stage
from hunt.states import NAME, capture_body, capture_name
from hunt.steps import Step
from tests.support.api_client import RefusedError

_CHILDREN: Final = "deployments,services,configmaps,poddisruptionbudgets"
_FINALIZER: Final = "hunt.example/blocks"
_LABELS: Final = {"app.kubernetes.io/managed-by": "specdecode-operator", "specdecode.io/deployment": NAME}
_TAKEN: Final = f"{NAME}-plan"
_NONE: Final = ("pods", "services", "configmaps", "count/deployments.apps", "count/poddisruptionbudgets.policy")


class Namespace:
    """One namespace, and what is done in it."""

    def __init__(self, stage: Stage, name: str) -> None:
        self.name = name
        self._stage, self._client = stage, stage.client
        self._held: list[tuple[str, str]] = []
        """Kinds and names of objects with a finalizer of ours."""

    def open(self) -> dict[tuple[str, str], str]:
        """Create it with objects of others in it; return their versions."""
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.name}}
        self._client.create("", "namespaces", body)
        made = []
        for each in _foreign_objects():
            self._client.create(self.name, each["kind"].lower(), each)
            made.append(self._client.object(self.name, each["kind"].lower(), name_of(each)))
        return contents(made)

    def force(self) -> None:
        """Take off all finalizers, and delete the namespace."""
        for each in self._client.objects(self.name, f"{SEEN}"):
            if each["metadata"].get("finalizers") and each["kind"] not in {"PersistentVolumeClaim", "Pod"}:
                with suppress(ClusterError):
                    self._client.patch(
                        self.name, each["kind"].lower(), name_of(each), {"metadata": {"finalizers": None}}
                    )
        self._client.delete("", "namespaces", self.name)

    def close(self) -> None:
        """Delete what is ours in it, and wait for nothing."""
        for kind in ("sdc", "sdd"):
            self._client.delete(self.name, kind)

    def do(self, step: Step) -> str:
        """Carry out a step; return what the API server said where it refused it."""
        try:
            _ACTIONS[step.kind](self, step)
        except RefusedError as error:
            return str(error)
        return ""

    def apply(self, step: Step) -> None:
        """Write the object as a state has it."""
        if step.state is not None:
            self._client.apply(self.name, step.state.body())

    def capture(self, step: Step) -> None:
        """Ask for a capture."""
        self._client.apply(self.name, capture_body(step.number))

    def uncapture(self, step: Step) -> None:
        """Delete the capture."""
        self._client.delete(self.name, "sdc", capture_name(step.number))

    def discard(self, step: Step) -> None:
        """Delete the capture, and the claim with its data."""
        self.uncapture(step)
        self._client.delete(self.name, "pvc", f"{capture_name(step.number)}-capture")

    def delete(self, _: Step) -> None:
        """Delete the object."""
        self._client.delete(self.name, "sdd", NAME)

    def drift(self, step: Step) -> None:
        """Write into a child what the operator did not."""
        child = self._child(step.number)
        patch: Body = {"metadata": {"labels": {"specdecode.io/deployment": "somebody-elses"}}}
        match child and child["kind"]:
            case "Deployment":
                patch = {"spec": {"replicas": 7, "template": {"spec": {"hostNetwork": True}}}}
            case "ConfigMap":
                patch = {"data": {"plan.json": "{}", "more": "of it"}}
            case "Service":
                patch = {"spec": {"selector": {"app": "somebody-elses"}}}
            case "PodDisruptionBudget":
                patch = {"spec": {"minAvailable": 0}}
        if child:
            self._client.patch(self.name, child["kind"].lower(), name_of(child), patch)

    def strip(self, step: Step) -> None:
        """Take out of a child what the operator wrote into it: nobody is to be seen as its writer then."""
        child = self._child(step.number)
        patch: Body = {"metadata": {"labels": {"specdecode.io/deployment": None}}}
        match child and child["kind"]:
            case "Deployment":
                patch = {"spec": {"template": {"spec": {"tolerations": None, "securityContext": None}}}}
            case "ConfigMap":
                patch = {"data": None}
            case "Service":
                patch = {"spec": {"selector": None}}
        if child:
            self._client.patch(self.name, child["kind"].lower(), name_of(child), patch)

    def remove(self, step: Step) -> None:
        """Delete a child."""
        if child := self._child(step.number):
            self._client.delete(self.name, child["kind"].lower(), name_of(child))

    def orphan(self, step: Step) -> None:
        """Take a child its owner."""
        if child := self._child(step.number):
            patch: Body = {"metadata": {"ownerReferences": None}}
            self._client.patch(self.name, child["kind"].lower(), name_of(child), patch)

    def unorphan(self, _: Step) -> None:
        """Delete children without an owner: they are taken for strangers."""
        for child in children(self._client.objects(self.name, _CHILDREN)):
            if not child["metadata"].get("ownerReferences"):
                self._client.delete(self.name, child["kind"].lower(), name_of(child))

    def finalize(self, step: Step) -> None:
        """Give a child a finalizer, and delete it: it stays as long as that."""
        if child := self._child(step.number):
            self._hold(child["kind"].lower(), name_of(child))

    def unfinalize(self, _: Step) -> None:
        """Take off the finalizers that hold objects."""
        for kind, name in self._held:
            with suppress(ClusterError):  # it may be gone with its finalizer taken by somebody else
                self._client.patch(self.name, kind, name, {"metadata": {"finalizers": None}})
        self._held.clear()

    def finalize_parent(self, _: Step) -> None:
        """Give the object a finalizer, and delete it."""
        self._hold("sdd", NAME)

    def podkill(self, _: Step) -> None:
        """End all pods at once."""
        for pod in self._client.objects(self.name, "pods"):
            self._client.delete(self.name, "pods", name_of(pod), grace_period_s=0)

    def unready(self, _: Step) -> None:
        """Have all pods say that they do not serve."""
        status = {"conditions": [{"type": "Ready", "status": "False", "reason": "Hunted"}]}
        for pod in self._client.objects(self.name, "pods"):
            self._client.patch(self.name, "pods", f"{name_of(pod)}/status", {"status": status}, by_key=True)

    def quota(self, _: Step) -> None:
        """Allow nothing more."""
        spec = {"hard": dict.fromkeys(_NONE, "0")}
        body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": spec}
        self._client.create(self.name, "resourcequotas", body)

    def unquota(self, _: Step) -> None:
        """Allow everything again."""
        self._client.delete(self.name, "resourcequotas", "none")

    def squat(self, _: Step) -> None:
        """Take the name of the ConfigMap that the object would have."""
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": _TAKEN, "labels": _LABELS},
            "data": SQUATTER,
        }
        self._client.create(self.name, "configmap", body)

    def unsquat(self, _: Step) -> None:
        """Give that name free."""
        for each in self._client.objects(self.name, "configmaps"):
            if name_of(each) == _TAKEN and each.get("data") == SQUATTER:
                self._client.delete(self.name, "configmap", _TAKEN)

    def refuse(self, _: Step) -> None:
        """Have admission refuse what the operator writes."""
        self._client.patch("", "namespaces", self.name, {"metadata": {"labels": {REFUSED_LABEL: "yes"}}})

    def admit(self, _: Step) -> None:
        """Have admission take it again."""
        self._client.patch("", "namespaces", self.name, {"metadata": {"labels": {REFUSED_LABEL: None}}})

    def terminate(self, _: Step) -> None:
        """Delete the namespace."""
        self._client.delete("", "namespaces", self.name)

    def wait(self, _: Step) -> None:
        """Do nothing."""

    def _hold(self, kind: str, name: str) -> None:
        self._client.patch(self.name, kind, name, {"metadata": {"finalizers": [_FINALIZER]}})
        self._held.append((kind, name))
        self._client.delete(self.name, kind, name)

    def _child(self, number: int) -> Body | None:
        """Return one of the object's children; the same one for the same number and the same children."""
        found = sorted(children(self._client.objects(self.name, _CHILDREN)), key=identity)
        chance = random.Random(number)  # noqa: S311  a seed that repeats a run is no secret
        return chance.choice(found) if found else None


_ACTIONS: Final[dict[str, Callable[[Namespace, Step], None]]] = {
    "admit": Namespace.admit,
    "apply": Namespace.apply,
    "capture": Namespace.capture,
    "delete": Namespace.delete,
    "discard": Namespace.discard,
    "drift": Namespace.drift,
    "finalize": Namespace.finalize,
    "finalize-parent": Namespace.finalize_parent,
    "orphan": Namespace.orphan,
    "podkill": Namespace.podkill,
    "quota": Namespace.quota,
    "refuse": Namespace.refuse,
    "remove": Namespace.remove,
    "squat": Namespace.squat,
    "strip": Namespace.strip,
    "terminate": Namespace.terminate,
    "uncapture": Namespace.uncapture,
    "unfinalize": Namespace.unfinalize,
    "unfinalize-parent": Namespace.unfinalize,
    "unorphan": Namespace.unorphan,
    "unquota": Namespace.unquota,
    "unready": Namespace.unready,
    "unsquat": Namespace.unsquat,
    "wait": Namespace.wait,
}


def _foreign_objects() -> list[Body]:
    """Return objects of others, some of which look like the operator's."""
    labelled = {"name": f"{FOREIGN}-labelled", "labels": _LABELS}
    container = {"name": "engine", "image": "localhost/none"}
    template = {"metadata": {"labels": {"app": FOREIGN}}, "spec": {"containers": [container]}}
    spec = {"replicas": 0, "selector": {"matchLabels": {"app": FOREIGN}}, "template": template}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": FOREIGN}, "data": {"a": "b"}},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": labelled, "data": {"a": "b"}},
        {"apiVersion": "v1", "kind": "Service", "metadata": labelled, "spec": {"ports": [{"port": 80}]}},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": labelled,
         "spec": {"suspend": True, "template": {"spec": {"restartPolicy": "Never", "containers": [container]}}}},
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": labelled, "spec": spec},
    ]  # fmt: skip
