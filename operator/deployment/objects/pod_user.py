"""As whom engines and downloads run: not as root, unless podTemplate says so."""

from collections.abc import Mapping
from typing import Any, Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.kube.untyped import mapping, name_of, objects

ENGINE_USER_ID: Final = 2000
"""User vllm of vLLM's own images (docker/Dockerfile), which leave the choice to whoever starts them. Others have no
such user and need none, for HOME and USER are set."""


def container_user(spec: SpecDecodeDeploymentSpec, container: str, user_id: int = ENGINE_USER_ID) -> Body:
    """Return what the security context of a container says of its user.

    It is said of the container, for a pod's further ones are their author's. So it must leave out what podTemplate says
    of the whole pod: a container's own word would hold instead.
    """
    given = _given(spec)
    context = dict(mapping(given, "securityContext"))
    for each in (*objects(given, "containers"), *objects(given, "initContainers")):
        if name_of(each) == container:
            context |= mapping(each, "securityContext")
    user = context.get("runAsUser")
    if user == 0 or context.get("runAsNonRoot") is False:
        return {}
    return {"runAsNonRoot": True} if user is not None else {"runAsNonRoot": True, "runAsUser": user_id}


def volume_group(spec: SpecDecodeDeploymentSpec) -> Body:
    """Return what the security context of a pod says of the group that a cache of models belongs to."""
    if spec.models.cache is None or "fsGroup" in mapping(_given(spec), "securityContext"):
        return {}
    return {"fsGroup": ENGINE_USER_ID, "fsGroupChangePolicy": "OnRootMismatch"}


def _given(spec: SpecDecodeDeploymentSpec) -> Mapping[str, Any]:
    return (spec.pod_template.spec if spec.pod_template else None) or {}
