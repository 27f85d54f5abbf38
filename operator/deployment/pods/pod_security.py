"""What to change where the namespace's Pod Security refuses a pod: the API server names fields of the pod, not ours."""

import re
from collections.abc import Iterator
from typing import Final

_REFUSAL: Final = "violates PodSecurity"

_CONTAINERS: Final = re.compile(r'containers? ((?:"[^"]+"(?:, )?)+)')
_CONTEXT: Final = "spec.podTemplate.spec.securityContext"

_USER: Final = ("runAsNonRoot", "runAsUser=0")


def with_field(refusal: str) -> str:
    """Return what the API server says of a pod, with the fields of our object that help.

    Its words are ``pods "x" is forbidden: violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false
    (container "a" must set …), restricted volume types (volume "models" uses restricted volume type "hostPath")``
    (k8s.io/pod-security-admission, policy).
    """
    if _REFUSAL not in refusal:
        return refusal
    fields = list(dict.fromkeys(_fields(refusal.partition(_REFUSAL)[2])))
    level = "or give the namespace another level (pod-security.kubernetes.io/enforce)"
    return f"{refusal}: look at {', '.join(fields) or 'spec.podTemplate'}, {level}"


def _fields(said: str) -> Iterator[str]:
    if any(words in said for words in _USER):
        yield _CONTEXT
    for listed in _CONTAINERS.findall(said):
        for name in re.findall(r'"([^"]+)"', listed):
            yield f"securityContext of {name} in spec.podTemplate.spec.containers"
    if "hostPath" in said:
        yield "spec.models.volume.hostPath (use a persistentVolumeClaim)"
    if "volume" in said:
        yield "spec.podTemplate.spec.volumes"
    if "host namespaces" in said:
        yield "hostNetwork, hostPID and hostIPC of spec.podTemplate.spec"
