"""Names the field by which a pod asks for a Secret, or a key of one, that is not there."""

from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.engine.environment import API_KEY_VARIABLE

_FIELDS: Final = {
    API_KEY_VARIABLE: "spec.serving.apiKeySecret",
    "SPECDECODE_TLS_CERTIFICATE": "spec.serving.tlsSecret",
    "HF_TOKEN": "spec.models.hubTokenSecret",
}
"""Fields by the variable that the operator makes of them (templates/engine-pod.yaml.j2 and the Jobs)."""

_OF_USERS: Final = "spec.podTemplate"


def told_with_field(pod: Body, message: str) -> str:
    """Return what the kubelet says of a Secret, with the field that asks for it and what to do.

    It says ``secret "clients" not found``, or ``couldn't find key token in Secret team/clients``
    (pkg/kubelet/kubelet_pods.go, makeEnvironmentVariables).
    """
    lacks_key = "find key" in message
    asked_by = [variable for variable, name, key in _asked(pod) if _is_of(message, name, key)]
    where = " and ".join(sorted({_FIELDS.get(variable, _OF_USERS) for variable in asked_by})) or _OF_USERS
    fix = "add the key, or name one that it has" if lacks_key else "create it, or name another"
    return f"{message} ({where}): {fix}; goes on by itself when it is there"


def _asked(pod: Body) -> list[tuple[str, str, str]]:
    """Variables of a pod with the name of the Secret and the key that they are to hold."""
    spec = pod.get("spec", {})
    containers = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    asked = [
        (variable["name"], (variable.get("valueFrom") or {}).get("secretKeyRef") or {})
        for container in containers
        for variable in container.get("env") or []
    ]
    return [(variable, secret.get("name", ""), secret.get("key", "")) for variable, secret in asked if secret]


def _is_of(message: str, name: str, key: str) -> bool:
    """Whether the kubelet speaks of this Secret, and of this key where it speaks of one."""
    return f'"{name}"' in message or (f"key {key} in" in message and message.endswith(f"/{name}"))
