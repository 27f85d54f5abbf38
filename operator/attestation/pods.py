"""What of a pod an attestation speaks of: what runs in its containers, in words that the API server leaves alone.

Fields with defaults, and those that admission of a cluster adds (tolerations, tokens, volumes), are in live objects and
not in rendered ones: no digest of a whole template would hold.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from specdecode_operator.api.base import Body
from specdecode_operator.kube.untyped import mapping, objects, texts

_OF_GROUPS: Final = "LWS_"
"""Variables that LeaderWorkerSet's webhook adds to each pod of a group."""


_DEFAULTS: Final = (("apiVersion", "v1"), ("divisor", "0"))
"""What the API server writes into references to fields of the pod and to resources of the container."""


class Container(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """One container."""

    name: str
    image: str
    command: tuple[str, ...]
    args: tuple[str, ...]
    environment_sha256: str
    """Of its variables, without their order; no value of one is told."""


class Pods(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The pods of one template."""

    init_containers: tuple[Container, ...]
    containers: tuple[Container, ...]

    @property
    def sha256(self) -> str:
        """What tells these pods from others."""
        return digest(self)


def digest(value: Any) -> str:
    """Return the SHA-256 of a value as JSON with sorted names and no spaces."""
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()


def pods_of(spec: Mapping[str, Any]) -> Pods:
    """Return what an attestation says of a pod's spec, a template's or a live one's."""
    # Somebody's kubectl debug is a container more.
    running = [*objects(spec, "containers"), *objects(spec, "ephemeralContainers")]
    return Pods(tuple(map(_container, objects(spec, "initContainers"))), tuple(map(_container, running)))


def _container(body: Body) -> Container:
    variables = {str(each.get("name")): _value(each) for each in objects(body, "env")}
    told = {name: value for name, value in variables.items() if not name.startswith(_OF_GROUPS)}
    sources = objects(body, "envFrom")
    return Container(
        str(body.get("name")),
        str(body.get("image")),
        tuple(texts(body, "command")),
        tuple(texts(body, "args")),
        digest([told, sources] if sources else told),
    )


def _value(variable: Body) -> Any:
    source = mapping(variable, "valueFrom")
    if not source:
        return variable.get("value") or ""
    told = {}
    for kind, reference in source.items():
        fields = reference if isinstance(reference, dict) else {"": reference}
        told[kind] = {name: value for name, value in fields.items() if (name, value) not in _DEFAULTS}
    return told
