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
from typing import TYPE_CHECKING, Any, Final

import msgspec

from specdecode_operator.api.base import Body
from specdecode_operator.problems import shown
from specdecode_operator.untrusted import UnreadableTextError, mapping, name_of, objects, parse_json, texts

if TYPE_CHECKING:
    # Importing cryptography takes 8 MB, and only signing needs it.
    from specdecode_operator.deployment.attestation.keys import PublicKey, SigningKey

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
MOST_BYTES: Final = 192 * 1024
"""Limit of an envelope: a ConfigMap with four of them stays below the limit of etcd."""


class UnverifiedError(Exception):
    """An attestation that is not valid; the message is one line."""


class _Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sig: str
    keyid: str = ""


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    payload_type: str
    payload: str
    signatures: tuple[_Signature, ...]


def signed_bytes(payload: bytes, payload_type: str = PAYLOAD_TYPE) -> bytes:
    """Return the signed bytes: the pre-authentication encoding (PAE) of DSSE."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def sealed(payload: bytes, key: "SigningKey") -> str:
    """Return the signed envelope of a payload."""
    signature = _Signature(_encoded(key.sign(signed_bytes(payload))), key.public.id)
    return msgspec.json.encode(_Envelope(PAYLOAD_TYPE, _encoded(payload), (signature,))).decode()


def opened(text: str | bytes, *keys: "PublicKey") -> bytes:
    """Return the payload of an envelope that the owner of one of these keys signed.

    Raises
    ------
    UnverifiedError
        If it is not such an envelope; its content must not be trusted then.
    """
    try:
        envelope = msgspec.convert(parse_json(text, MOST_BYTES), _Envelope)
    except (UnreadableTextError, msgspec.ValidationError) as error:
        raise UnverifiedError(f"is not a DSSE envelope: {error}") from error
    if envelope.payload_type != PAYLOAD_TYPE:
        raise UnverifiedError(f"has a payloadType other than {PAYLOAD_TYPE}, so it is not an in-toto statement")
    if len(envelope.signatures) != 1:
        raise UnverifiedError(f"has {len(envelope.signatures)} signatures, but the operator writes one")
    [signature] = envelope.signatures
    # The key ID is an optional hint.
    hinted = [each for each in keys if signature.keyid in ("", each.id)]
    if not hinted:
        given = " or ".join(each.id for each in keys)
        raise UnverifiedError(f"was signed with another key, {shown(signature.keyid)} instead of {given}")
    payload, signed = _decoded("payload", envelope.payload), _decoded("signature", signature.sig)
    if not any(each.verifies(signed, signed_bytes(payload)) for each in hinted):
        raise UnverifiedError("has a signature of another key, or its content was changed")
    return payload


def _encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _decoded(name: str, text: str) -> bytes:
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UnverifiedError(f"has a {name} that is not base64") from error
    if _encoded(content) != text:
        raise UnverifiedError(f"has a {name} that is not canonical base64")
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
"""Defaults that the API server writes into references to fields and resources, and into volumes."""

_OF_NO_CONTENT: Final = ("sizeLimit", "resources", "metadata", "pullPolicy")
"""Fields of volumes that are not compared because they do not affect the content: quantities have several notations,
and claims of ephemeral volumes get metadata."""

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
"""Volume that the API server adds to pods for the token of their account, under a random name. It is not compared,
because no template has it; any other volume at that path is attested (kubernetes,
plugin/pkg/admission/serviceaccount, TokenVolumeSource)."""

_ANNOTATION: Final = re.compile(r"metadata\.annotations\['(specdecode\.io/.+)'\]")
"""Reference to an annotation of the operator, whose value is attested because it configures the engine's logging and
the code that this loads. Other annotations may change later."""

_REFERS: Final = "$("
"""Reference to an earlier variable in the value of a variable; the kubelet expands it."""

_TERMINATION_MESSAGE: Final = "/dev/termination-log"
"""Default of the API server; the kubelet mounts an empty file there."""

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
    """Digest of its variables, in order if the order matters; their values are not disclosed."""

    commands_sha256: str
    """Digest of the commands of hooks and probes."""

    files_sha256: str
    """Digest of its volumes, their mount paths and its working directory."""

    termination_message_path: str
    terminal: tuple[str, ...]
    """Fields that allow interactive input."""

    restart_policy: str
    """Restart policy of the container, which makes an init container a sidecar."""


class Pods(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    """The pods of one template."""

    init_containers: tuple[Container, ...]
    containers: tuple[Container, ...]

    service_links: bool = False
    """Whether the Services of the namespace set variables of every container: a Service named `vllm` would set
    VLLM_PORT, which vLLM reads."""

    @property
    def sha256(self) -> str:
        """Digest that identifies these pods."""
        return digest(self)


def digest(value: Any) -> str:
    """Return the SHA-256 of a value as JSON with sorted names and no spaces."""
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()


def pods_of(template: Mapping[str, Any]) -> Pods:
    """Return the attested content of pods, from a template or a live pod."""
    spec, annotations = mapping(template, "spec"), mapping(mapping(template, "metadata"), "annotations")
    volumes = {name_of(each): _told({**each, "name": None}, annotations) for each in objects(spec, "volumes")}
    # kubectl debug adds an ephemeral container.
    running = [*objects(spec, "containers"), *objects(spec, "ephemeralContainers")]
    initial = objects(spec, "initContainers")
    return Pods(
        tuple(_container(each, volumes, annotations) for each in initial),
        tuple(_container(each, volumes, annotations) for each in running),
        # The API server enables them by default.
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
    """Return the variables, in order if one refers to another or a name is set twice.

    Otherwise they are sorted by name, because admission may reorder a merged list.
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
    """Return the working directory and the mounts with their volumes. The content of a volume counts, not its name."""
    mounts = [*objects(body, "volumeMounts"), *objects(body, "volumeDevices")]
    seen = [[_told({**each, "name": None}, {}), volumes.get(name_of(each))] for each in mounts]
    return [body.get("workingDir") or "", *sorted((each for each in seen if each not in _TOKEN_MOUNTS), key=digest)]


def _told(value: Any, annotations: Mapping[str, Any]) -> Any:
    """Return a value without defaults and empty fields, and with the operator's annotations that it refers to."""
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
    """Subject of the statement, with its digest."""

    name: str
    digest: dict[str, str]


class AttestedObject(_Told, frozen=True):
    """The SpecDecodeDeployment."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec_sha256: str
    trained_draft_sha256: str | None = None
    """Of the trained head that replaces the draft of the spec."""


class Memory(_Told, frozen=True):
    """Predicted and reported KV cache."""

    predicted_tokens: int
    reported_tokens: int | None = None
    residual_bytes: int | None = None
    """Predicted less reported bytes on one GPU."""


class Image(_Told, frozen=True):
    """An image as the kubelet runs it."""

    container: str
    digest: str
    """sha256:…"""


class Verdict(_Told, frozen=True):
    """Result of the deployment's newest comparison of arms."""

    capture: str
    uid: str
    status: str
    """Status of the condition Pays."""

    reason: str
    message: str


class Served(_Told, frozen=True):
    """Report of the engines, once all engines of the template serve."""

    engines: int
    engine_version: str | None
    kv_cache: Memory
    images: tuple[Image, ...]
    verdict: Verdict | None = None


class Rollout(_Told, frozen=True):
    """Predicate of the statement."""

    made_at: str
    """Time in RFC 3339."""

    operator_version: str
    object: AttestedObject
    plan: dict[str, Any]
    """status.plan of that generation."""

    pods: tuple[Pods, ...]
    """Pods of each template of the workload; if there are two, the leader's come first."""

    served: Served | None = None
    """None until all engines serve; only the plan is attested then."""

    @property
    def age(self) -> tuple[int, str]:
        """Sort key of the rollouts of one object; the newest comes last."""
        return self.object.generation, self.made_at


class Statement(_Told, frozen=True):
    """An in-toto statement."""

    type: str = msgspec.field(name="_type")
    subject: tuple[Subject, ...]
    predicate_type: str
    predicate: Rollout


def statement_of(rollout: Rollout) -> Statement:
    """Return the statement of a rollout; its subjects are pod templates and images."""
    place = f"{rollout.object.namespace}/{rollout.object.name}"
    pods = [Subject(f"{place}/pods/{number}", {"sha256": each.sha256}) for number, each in enumerate(rollout.pods)]
    images = {each.digest: each for each in (rollout.served.images if rollout.served else ())}
    named = [Subject(f"{place}/images/{each.container}", _digest(each)) for each in images.values()]
    return Statement(STATEMENT_TYPE, (*pods, *named), PREDICATE_TYPE, rollout)


def statement_text(statement: Statement) -> bytes:
    """Return the text that is signed."""
    return msgspec.json.encode(statement, order="sorted")


def read_statement(payload: bytes) -> Statement:
    """Return the statement of a verified payload.

    Raises
    ------
    UnverifiedError
        If it is another kind of statement, or its subjects contradict its predicate.
    """
    try:
        statement = msgspec.json.decode(payload, type=Statement)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UnverifiedError(f"is not a statement of a rollout that this version can read: {error}") from error
    if (statement.type, statement.predicate_type) != (STATEMENT_TYPE, PREDICATE_TYPE):
        raise UnverifiedError(f"is another kind of statement; expected {PREDICATE_TYPE}")
    if statement != statement_of(statement.predicate):
        raise UnverifiedError("has subjects that contradict its predicate")
    return statement


def _digest(image: Image) -> dict[str, str]:
    algorithm, _, value = image.digest.partition(":")
    return {algorithm: value}
