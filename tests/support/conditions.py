"""Reading and awaiting the conditions of our objects."""

from tests.support.kubectl import Kubectl
from tests.support.waiting import eventually


def condition(kubectl: Kubectl, name: str, type_: str, kind: str = "sdd") -> tuple[str, str, str]:
    """Status, reason and message of a condition that speaks of the current spec; empty while there is none."""
    body = kubectl.object(kind, name)
    for found in body.get("status", {}).get("conditions", []):
        if found["type"] == type_ and found["observedGeneration"] == body["metadata"]["generation"]:
            return found["status"], found["reason"], found["message"]
    return "", "", ""


def wait_for(  # noqa: PLR0913  what is waited for
    kubectl: Kubectl, name: str, type_: str, reason: str, deadline_s: float = 30, *, kind: str = "sdd"
) -> str:
    """Wait for the reason of a condition; return its message."""

    def look() -> str | None:
        found = condition(kubectl, name, type_, kind)
        assert found[1] == reason, found
        return found[2] or " "

    return eventually(look, f"{type_} of {name} is {reason}", deadline_s)
