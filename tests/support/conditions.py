"""Reading and awaiting the conditions of our objects."""

from tests.support.kubectl import Kubectl
from tests.support.objects import Body
from tests.support.waiting import DEADLINE_S, eventually


def current(body: Body, type_: str) -> tuple[str, str, str]:
    """Status, reason and message of a condition that speaks of the current spec; empty while there is none."""
    for found in body.get("status", {}).get("conditions", []):
        if found["type"] == type_ and found["observedGeneration"] == body["metadata"]["generation"]:
            return found["status"], found["reason"], found["message"]
    return "", "", ""


def condition(kubectl: Kubectl, name: str, type_: str, kind: str = "sdd") -> tuple[str, str, str]:
    """Return what an object's condition says now of its current spec."""
    return current(kubectl.object(kind, name), type_)


def wait_for(
    kubectl: Kubectl, name: str, type_: str, reason: str, deadline_s: float = DEADLINE_S, *, kind: str = "sdd"
) -> str:
    """Wait for the reason of a condition; return its message."""

    def look() -> str | None:
        found = condition(kubectl, name, type_, kind)
        assert found[1] == reason, found
        return found[2] or " "

    return eventually(look, f"{type_} of {name} is {reason}", deadline_s)


def wait_for_all(kubectl: Kubectl, name: str, deadline_s: float = DEADLINE_S, **wanted: tuple[str, str] | str) -> Body:
    """Wait until one sight of a SpecDecodeDeployment has all conditions, each with its status or status and reason."""

    def look() -> Body:
        body = kubectl.object("sdd", name)
        for type_, status in wanted.items():
            found = current(body, type_)
            assert found[:2] == status if isinstance(status, tuple) else found[0] == status, (type_, found)
        return body

    return eventually(look, f"the conditions of {name} are {wanted}", deadline_s)
