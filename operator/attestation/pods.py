"""What of a pod an attestation speaks of: all that says what runs in its containers.

It is said in words that are the same of a template and of the pod that the API server has made of it.

Fields with defaults, and those that admission of a cluster adds (tolerations, nodes), are in live objects and not in
rendered ones: no digest of a whole template would hold.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from specdecode_operator.api.base import Body
from specdecode_operator.kube.untyped import mapping, name_of, objects, texts

_OF_GROUPS: Final = "LWS_"
"""Variables that LeaderWorkerSet's webhook adds to each pod of a group."""

_DEFAULTS: Final = (
    ("apiVersion", "v1"),
    ("divisor", "0"),
    ("defaultMode", 0o644),
    ("expirationSeconds", 3600),
    ("volumeMode", "Filesystem"),
)
"""What the API server writes into references to fields and resources, and into volumes."""

_OF_NO_CONTENT: Final = ("sizeLimit", "resources", "metadata", "pullPolicy")
"""Fields of volumes that say nothing of what is in them: quantities are written in more ways than one, and claims of
ephemeral volumes get metadata."""

_TOKEN_VOLUME: Final = {
    "projected": {
        "sources": [
            {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
            {"configMap": {"items": [{"key": "ca.crt", "path": "ca.crt"}], "name": "kube-root-ca.crt"}},
            {"downwardAPI": {"items": [{"fieldRef": {"fieldPath": "metadata.namespace"}, "path": "namespace"}]}},
        ]
    }
}
_TOKEN_MOUNTS: Final = [
    [{"mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": True}, _TOKEN_VOLUME]
]
"""What the API server adds to pods whose account has a token, by another name in each: left out, as no template has it
(kubernetes, plugin/pkg/admission/serviceaccount, TokenVolumeSource). Any other volume at that path is attested."""

_ANNOTATION: Final = re.compile(r"metadata\.annotations\['(specdecode\.io/.+)'\]")
"""A reference to one of ours: engines have their logging from there, and what it runs. Others may be written later."""

_REFERS: Final = "$("
"""In the value of a variable: the kubelet puts in the value that the named one has had by then."""

_TERMINATION_MESSAGE: Final = "/dev/termination-log"
"""What the API server writes where a container does not say it: the kubelet mounts an empty file there."""

_TERMINAL: Final = ("stdin", "stdinOnce", "tty")
_PROBES: Final = ("startupProbe", "readinessProbe", "livenessProbe")
_HOOKS: Final = ("postStart", "preStop")


class Container(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """One container."""

    name: str
    image: str
    command: tuple[str, ...]
    args: tuple[str, ...]
    environment_sha256: str
    """Of its variables, in their order where that makes a difference; no value of one is told."""

    commands_sha256: str
    """Of what the kubelet runs in it beside: commands of hooks and probes."""

    files_sha256: str
    """Of the volumes that it sees, where it sees them, and its working directory."""

    termination_message_path: str
    terminal: tuple[str, ...]
    """By which fields somebody may type into it."""

    restart_policy: str
    """Its own, by which an init container runs on beside those after it."""


class Pods(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    """The pods of one template."""

    init_containers: tuple[Container, ...]
    containers: tuple[Container, ...]

    service_links: bool = False
    """Whether each Service of the namespace becomes variables of every container, which whoever creates Services then
    sets: vLLM reads VLLM_PORT, which a Service named `vllm` makes."""

    @property
    def sha256(self) -> str:
        """What tells these pods from others."""
        return digest(self)


def digest(value: Any) -> str:
    """Return the SHA-256 of a value as JSON with sorted names and no spaces."""
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()


def pods_of(template: Mapping[str, Any]) -> Pods:
    """Return what an attestation says of pods, of a template or of one that is there."""
    spec, annotations = mapping(template, "spec"), mapping(mapping(template, "metadata"), "annotations")
    volumes = {name_of(each): _told({**each, "name": None}, annotations) for each in objects(spec, "volumes")}
    # Somebody's kubectl debug is a container more.
    running = [*objects(spec, "containers"), *objects(spec, "ephemeralContainers")]
    initial = objects(spec, "initContainers")
    return Pods(
        tuple(_container(each, volumes, annotations) for each in initial),
        tuple(_container(each, volumes, annotations) for each in running),
        # The API server enables them unless a pod says otherwise.
        service_links=spec.get("enableServiceLinks") is not False,
    )


def _container(body: Body, volumes: Mapping[str, Any], annotations: Mapping[str, Any]) -> Container:
    return Container(
        name_of(body),
        str(body.get("image")),
        tuple(texts(body, "command")),
        tuple(texts(body, "args")),
        digest([_variables(body, annotations), objects(body, "envFrom")]),
        digest(_commands(body)),
        digest(_files(body, volumes)),
        str(body.get("terminationMessagePath") or _TERMINATION_MESSAGE),
        tuple(field for field in _TERMINAL if body.get(field)),
        str(body.get("restartPolicy") or ""),
    )


def _variables(body: Body, annotations: Mapping[str, Any]) -> dict[str, Any] | list[tuple[str, Any]]:
    """Return the variables; in their order where one refers to another, or of one name the last counts.

    Otherwise without it: who merges a list may put what was there already first.
    """
    own = [each for each in objects(body, "env") if not name_of(each).startswith(_OF_GROUPS)]
    pairs = [(name_of(each), _value(each, annotations)) for each in own]
    by_name = dict(pairs)
    refer = any(_REFERS in str(each.get("value")) for each in own)
    return pairs if refer or len(by_name) < len(pairs) else by_name


def _value(variable: Body, annotations: Mapping[str, Any]) -> Any:
    return _told(mapping(variable, "valueFrom"), annotations) or variable.get("value") or ""


def _commands(body: Body) -> dict[str, Any]:
    handlers = {name: mapping(body, name) for name in _PROBES}
    handlers |= {name: mapping(mapping(body, "lifecycle"), name) for name in _HOOKS}
    return {name: each["exec"] for name, each in handlers.items() if each.get("exec")}


def _files(body: Body, volumes: Mapping[str, Any]) -> list[Any]:
    """Return what is seen where. Names of volumes say nothing: another one under the same name is told."""
    mounts = [*objects(body, "volumeMounts"), *objects(body, "volumeDevices")]
    seen = [[_told({**each, "name": None}, {}), volumes.get(name_of(each))] for each in mounts]
    return [body.get("workingDir") or "", *sorted((each for each in seen if each not in _TOKEN_MOUNTS), key=digest)]


def _told(value: Any, annotations: Mapping[str, Any]) -> Any:
    """Return a value without defaults and what says nothing, and with each annotation of ours that it refers to."""
    if isinstance(value, list):
        return [_told(each, annotations) for each in value]
    if not isinstance(value, dict):
        return value
    kept = {
        name: _told(each, annotations)
        for name, each in value.items()
        if each is not None and each is not False and each != ""
        if (name, each) not in _DEFAULTS and name not in _OF_NO_CONTENT
    }
    if referred := _ANNOTATION.fullmatch(str(value.get("fieldPath"))):
        kept["value"] = annotations.get(referred[1])
    return kept
