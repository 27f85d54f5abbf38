"""The commands that move traffic from a server to the object that takes its place."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from specdecode_operator.kube.labels import selector_labels
from specdecode_operator.kube.untyped import mapping, objects
from specdecode_operator.migration.sources.workload import Workload, in_namespace

_FILE: Final = "OBJECT.yaml"
_CONTENT: Final = "when you are content; until then, the Service's old selector and a scale up take you back"
_READY_TIMEOUT: Final = "45m"


@dataclass(frozen=True)
class Step:
    """One step: what it is for, and its command."""

    purpose: str
    command: str


def selecting(services: Iterable[Mapping[str, Any]], labels: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the Services that select pods with these labels."""
    found = []
    for service in services:
        selector = mapping(mapping(service, "spec"), "selector")
        if selector and all(labels.get(key) == value for key, value in selector.items()):
            found.append(service)
    return found


def migration_steps(workload: Workload, new: str, services: Sequence[Mapping[str, Any]], gpus: int) -> list[Step]:
    """Return the steps, first to last, that replace a server without downtime."""
    within = in_namespace(workload.namespace)
    need = f"{gpus} more GPUs" if gpus else "room for as many pods again"
    if workload.outside:
        return [
            Step("see where it will run, and what to change if it does not fit", f"specdecode plan -f {_FILE}"),
            Step("start it", f"kubectl apply{within} -f {_FILE}"),
            Step(
                "wait until it serves",
                f"kubectl wait --for=condition=Ready sdd/{new}{within} --timeout={_READY_TIMEOUT}",
            ),
            Step("send requests to it, then end the old server", workload.end or f"kubectl get service {new}{within}"),
        ]
    moves = [_move(service, new, within) for service in services] or [
        Step(
            "send new requests to them (SERVICE is yours; none was found that selects the old pods)",
            f"kubectl patch service SERVICE{within} --type=json -p '{_patch(new, [])}'",
        )
    ]
    return [
        Step("see where it will run, and what to change if it does not fit", f"specdecode plan -f {_FILE}"),
        Step(f"start it beside the old one; it needs {need} for a while", f"kubectl apply{within} -f {_FILE}"),
        Step(
            "wait until it serves",
            f"kubectl wait --for=condition=Ready sdd/{new}{within} --timeout={_READY_TIMEOUT}",
        ),
        *moves,
        Step("end the old pods, once vllm:num_requests_running at their /metrics is 0", workload.end),
        *([Step(_CONTENT, workload.remove)] if workload.remove else []),
    ]


def _move(service: Mapping[str, Any], new: str, within: str) -> Step:
    name = str(mapping(service, "metadata").get("name"))
    # Behind a slash a dash begins no option.
    which = f"service/{shlex.quote(name)}" if name.startswith("-") else f"service {shlex.quote(name)}"
    selector = json.dumps(mapping(mapping(service, "spec"), "selector"), separators=(",", ":"))
    ports = objects(mapping(service, "spec"), "ports")
    return Step(
        f"send new requests to them (the selector was {selector})",
        f"kubectl patch {which}{within} --type=json -p '{_patch(new, ports)}'",
    )


def _patch(new: str, ports: Sequence[Mapping[str, Any]]) -> str:
    """A JSON patch: a merge would leave the old labels in the selector."""
    changes: list[dict[str, Any]] = [{"op": "replace", "path": "/spec/selector", "value": selector_labels(new)}]
    if len(ports) == 1:
        changes.append({"op": "replace", "path": "/spec/ports/0/targetPort", "value": "http"})
    return json.dumps(changes, separators=(",", ":"))
