"""All that one namespace holds because of our objects, in words that two runs have in common."""

import json
import re
from collections import Counter
from typing import Any

from tests.support.kubectl import Kubectl
from tests.support.objects import Body

OURS = "--selector=app.kubernetes.io/managed-by=specdecode-operator"
CHILD_KINDS = "deployments,services,configmaps,poddisruptionbudgets,jobs,persistentvolumeclaims"
_OF_THE_RUN = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields")
_GENERATION = re.compile(r'(generation\\*": )\d+')
"""Of a deployment, as the Job of its capture says it: how many changes came before."""

_RANDOM = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"  # UIDs
    r"|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z"
    r"|\d{4}-\d\d-\d\d \d\d:\d\d UTC"  # in messages
    r"|\d+\.\d+\.\d+\.\d+"  # addresses of Services
    r"|-[bcdfghjklmnpqrstvwxz2456789]{5}\b"  # names of pods
    r'|(?<="specdecode.io/applied-hash": ")\w+|(?<="sha256": ")\w+'  # of what has UIDs in it
)

EndState = dict[str, Any]


def end_state(kubectl: Kubectl) -> EndState:
    """Return our objects with spec and status, their children, and how many templates and pods there are."""
    found: EndState = {}
    for body in kubectl.objects("sdd,sdc"):
        body.get("status", {}).get("borrow", {}).pop("secondsWithoutServing", None)
        found[_name(body)] = {"spec": body["spec"], "status": _without_order(body.get("status", {}))}
    for body in kubectl.objects(CHILD_KINDS, OURS):
        found[_name(body)] = {name: part for name, part in body.items() if name != "status"}
        found[_name(body)]["metadata"] = {
            name: part for name, part in body["metadata"].items() if name not in _OF_THE_RUN
        }
    found["templates"] = len(kubectl.objects("replicasets", OURS))
    found["pods"] = Counter(str(body["status"].get("phase")) for body in kubectl.objects("pods", OURS) if _stays(body))
    text = _GENERATION.sub(r"\g<1>0", json.dumps(found, sort_keys=True))
    text = _RANDOM.sub("*", text).replace(str(kubectl.namespace), "NAMESPACE")
    state: EndState = json.loads(text)
    return state


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Return where two states differ, one a line."""
    if isinstance(one, dict) and isinstance(other, dict):
        names = sorted({*one, *other})
        return [line for name in names for line in differences(one.get(name), other.get(name), f"{path}/{name}")]
    return [] if one == other else [f"{path}: {one!r:.300} is {other!r:.300}"]


def _name(body: Body) -> str:
    return f"{body['kind']} {body['metadata']['name']}"


def _stays(body: Body) -> bool:
    return "deletionTimestamp" not in body["metadata"]


def _without_order(status: Body) -> Body:
    """Conditions by their types; their generations go by what was written when."""
    conditions = {each["type"]: each for each in status.get("conditions", [])}
    return {**status, "conditions": conditions}
