"""The in-toto statement of a rollout: attested pod content, predicate and DSSE envelope.

Pods are described in a form that is the same for a template and for the live pod made from it. Fields with
defaults, and fields that admission adds (tolerations, nodes), differ between the two, so a digest of the whole
template would not match.
https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md
https://github.com/secure-systems-lab/dsse/blob/master/envelope.md
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from specdecode_operator.api.base import Body
from specdecode_operator.attestation.keys import PublicKey, SigningKey
from specdecode_operator.problems import shown
from specdecode_operator.untrusted import UnreadableTextError, mapping, name_of, objects, parse_json, texts

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
MOST_BYTES: Final = 192 * 1024
"""Of an envelope: a ConfigMap with four of them takes no more than etcd does."""


class UnverifiedError(Exception):
    """An attestation that does not hold, in one line."""


class _Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sig: str
    keyid: str = ""


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    payload_type: str
    payload: str
    signatures: tuple[_Signature, ...]


def signed_bytes(payload: bytes, payload_type: str = PAYLOAD_TYPE) -> bytes:
    """Return what a signature is over: the protocol's PAE."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def sealed(payload: bytes, key: SigningKey) -> str:
    """Return the envelope of a payload, signed."""
    signature = _Signature(_encoded(key.sign(signed_bytes(payload))), key.public.id)
    return msgspec.json.encode(_Envelope(PAYLOAD_TYPE, _encoded(payload), (signature,))).decode()


def opened(text: str | bytes, *keys: PublicKey) -> bytes:
    """Return the payload of an envelope that the owner of one of these keys signed.

    Raises
    ------
    UnverifiedError
        When it is no such envelope: nothing that it says may be believed then.
    """
    try:
        envelope = msgspec.convert(parse_json(text, MOST_BYTES), _Envelope)
    except (UnreadableTextError, msgspec.ValidationError) as error:
        raise UnverifiedError(f"is no DSSE envelope: {error}") from error
    if envelope.payload_type != PAYLOAD_TYPE:
        raise UnverifiedError(f"payloadType is not {PAYLOAD_TYPE}: it is no in-toto statement")
    if len(envelope.signatures) != 1:
        raise UnverifiedError(f"has {len(envelope.signatures)} signatures: the operator writes one")
    [signature] = envelope.signatures
    # A hint, which an envelope need not have.
    hinted = [each for each in keys if signature.keyid in ("", each.id)]
    if not hinted:
        given = " or ".join(each.id for each in keys)
        raise UnverifiedError(f"was signed with another key: {given} is given, {shown(signature.keyid)} signed")
    payload, signed = _decoded("payload", envelope.payload), _decoded("signature", signature.sig)
    if not any(each.verifies(signed, signed_bytes(payload)) for each in hinted):
        raise UnverifiedError("the signature is not of this key, or what is signed was changed")
    return payload


def _encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _decoded(name: str, text: str) -> bytes:
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UnverifiedError(f"{name} is no base64") from error
    if _encoded(content) != text:
        raise UnverifiedError(f"{name} is base64 that can be written in another way")
    return content


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


STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "https://specdecode.io/attestations/rollout/v1alpha1"


class _Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    """A part of the statement."""


class Subject(_Told, frozen=True):
    """What the statement is about, by its digest."""

    name: str
    digest: dict[str, str]


class AttestedObject(_Told, frozen=True):
    """The SpecDecodeDeployment."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec_sha256: str


class Memory(_Told, frozen=True):
    """What the engines report of their KV cache."""

    predicted_tokens: int
    reported_tokens: int | None = None
    residual_bytes: int | None = None
    """On one GPU, predicted less reported."""


class Image(_Told, frozen=True):
    """An image as the kubelet runs it."""

    container: str
    digest: str
    """sha256:…"""


class Verdict(_Told, frozen=True):
    """What the newest comparison of the deployment came to."""

    capture: str
    uid: str
    status: str
    """Of the condition Pays."""

    reason: str
    message: str


class Served(_Told, frozen=True):
    """What there is to say once every engine of the template serves."""

    engines: int
    engine_version: str | None
    kv_cache: Memory
    images: tuple[Image, ...]
    verdict: Verdict | None = None


class Rollout(_Told, frozen=True):
    """The predicate."""

    made_at: str
    """RFC 3339."""

    operator_version: str
    object: AttestedObject
    plan: dict[str, Any]
    """As status.plan of that generation has it."""

    pods: tuple[Pods, ...]
    """Of each template of the workload: the leader's first where there are two."""

    served: Served | None = None
    """Absent until all engines serve: then only the plan is attested."""

    @property
    def age(self) -> tuple[int, str]:
        """By which rollouts of one object are sorted, the newest last."""
        return self.object.generation, self.made_at


class Statement(_Told, frozen=True):
    """An in-toto statement."""

    type: str = msgspec.field(name="_type")
    subject: tuple[Subject, ...]
    predicate_type: str
    predicate: Rollout


def statement_of(rollout: Rollout) -> Statement:
    """Return the statement that is made of a rollout: its subjects are templates of pods, and images."""
    place = f"{rollout.object.namespace}/{rollout.object.name}"
    pods = [Subject(f"{place}/pods/{number}", {"sha256": each.sha256}) for number, each in enumerate(rollout.pods)]
    images = {each.digest: each for each in (rollout.served.images if rollout.served else ())}
    named = [Subject(f"{place}/images/{each.container}", _digest(each)) for each in images.values()]
    return Statement(STATEMENT_TYPE, (*pods, *named), PREDICATE_TYPE, rollout)


def statement_text(statement: Statement) -> bytes:
    """Return the text that is signed."""
    return msgspec.json.encode(statement, order="sorted")


def read_statement(payload: bytes) -> Statement:
    """Return the statement of a payload whose signature holds.

    Raises
    ------
    UnverifiedError
        When it speaks of something else, or says of one thing two.
    """
    try:
        statement = msgspec.json.decode(payload, type=Statement)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UnverifiedError(f"is no statement of a rollout that this version reads: {error}") from error
    if (statement.type, statement.predicate_type) != (STATEMENT_TYPE, PREDICATE_TYPE):
        raise UnverifiedError(f"is a statement of another kind: {PREDICATE_TYPE} is meant")
    if statement != statement_of(statement.predicate):
        raise UnverifiedError("its subjects are not those of its predicate")
    return statement


def _digest(image: Image) -> dict[str, str]:
    algorithm, _, value = image.digest.partition(":")
    return {algorithm: value}
