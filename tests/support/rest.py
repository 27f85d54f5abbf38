"""Objects at rest: nobody has anything left to do about them, and an operator that writes all the same is caught.

Versions of objects tell little: others write them too, sooner or later. What is compared is who wrote what when,
which the API server keeps with each object. An apply that changes nothing leaves no trace there.
"""

import itertools
from datetime import UTC, datetime

import yaml

from specdecode_operator.api.base import API_VERSION
from specdecode_operator.api.deployment import KIND
from specdecode_operator.cluster.client import FIELD_MANAGER
from tests.support.conditions import condition
from tests.support.kubectl import Kubectl
from tests.support.objects import Body, tiny_cpu
from tests.support.waiting import eventually

_WRITTEN = "sdc,sdd,deployments,services,configmaps,poddisruptionbudgets,jobs,persistentvolumeclaims,events"
_CONTROLLED = "deployments,replicasets,poddisruptionbudgets,jobs,pods"
_MARKER = "marker"
_SETTLED_TWICE = 2
"""Events of different kinds come by different watches: one of them may be late."""

_numbers = itertools.count()

Trace = tuple[str, ...]
"""What the operator's hand has left on an object: its UID, and when each part of it was written last."""


class Rest:
    """The rest of all that the operator writes in one namespace of a control plane without nodes."""

    def __init__(self, kubectl: Kubectl) -> None:
        self._kubectl = kubectl
        self._markers = kubectl.within("markers")
        self._known: dict[str, Trace] = {}

    def reach(self) -> None:
        """Wait until controllers and operator have done all that they had to do; `changes` counts from here."""

        def is_reached() -> bool:
            before = self._traces()
            self.settle()
            busy = [_name(body) for body in self._kubectl.objects(_CONTROLLED) if not _is_done(body)]
            assert not busy, busy
            self._known = self._traces()
            changes = _differences(before, self._known)
            assert not changes, changes
            # Times are in whole seconds: from now on every write has another.
            return _newest(self._known) < datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

        eventually(is_reached, f"all in {self._kubectl.namespace} is at rest")

    def settle(self) -> None:
        """Wait until the operator has worked off what came before: it takes objects in their order.

        What it is asked to do for this is elsewhere, in a namespace of its own.
        """
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self._markers.namespace}}
        for _ in range(_SETTLED_TWICE):
            spec = tiny_cpu(suspend=True, replicas=next(_numbers) % 16)
            marker = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": _MARKER}, "spec": spec}
            answer = self._markers.write(yaml.safe_dump_all([namespace, marker]))
            assert answer.returncode == 0, answer.stderr
            eventually(lambda: condition(self._markers, _MARKER, "Ready")[1] == "Suspended", "the marker was looked at")

    def changes(self) -> list[str]:
        """Return what the operator has made, changed or removed in the namespace since it was at rest."""
        return _differences(self._known, self._traces())

    def _traces(self) -> dict[str, Trace]:
        found = self._kubectl.objects(_WRITTEN, "--show-managed-fields=true")
        return {_name(body): trace for body in found if (trace := _trace(body))}


def _name(body: Body) -> str:
    return f"{body['kind']} {body['metadata']['name']}"


def _trace(body: Body) -> Trace | None:
    """The operator's part in an object; None where it has none."""
    entries = [each for each in body["metadata"].get("managedFields", []) if each["manager"] == FIELD_MANAGER]
    parts = sorted(f"{each['time']} {each['operation']} {each.get('subresource', '')}" for each in entries)
    if body["kind"] == "Event" and body.get("source", {}).get("component") == FIELD_MANAGER:
        parts = [f"{body['lastTimestamp']} {body['message']}"]
    return (*parts, body["metadata"]["uid"]) if parts else None


def _newest(traces: dict[str, Trace]) -> str:
    """When the operator wrote last."""
    return max((part.partition(" ")[0] for *parts, _uid in traces.values() for part in parts), default="")


def _differences(before: dict[str, Trace], after: dict[str, Trace]) -> list[str]:
    names = sorted(name for name in before | after if before.get(name) != after.get(name))
    return [f"{name}: {before.get(name)} -> {after.get(name)}" for name in names]


def _is_done(body: Body) -> bool:
    """Whether the controller of an object has said all that it has to say where no kubelet is."""
    status, conditions = body["status"], {each["type"] for each in body["status"].get("conditions", [])}
    if body["kind"] == "Pod":
        return "PodScheduled" in conditions
    if body["kind"] == "Job":
        return bool(status.get("active")) or bool(conditions & {"Suspended", "Complete", "Failed"})
    seen = status.get("observedGeneration") == body["metadata"]["generation"]
    if body["kind"] == "PodDisruptionBudget":
        return seen
    return seen and status.get("replicas", 0) == body["spec"]["replicas"]
