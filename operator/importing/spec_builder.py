"""A server as its source describes it, the spec and the report of its import, and secrets in plain text."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from specdecode_operator.problems import MISSING, Problem
from specdecode_operator.redaction import clip, is_secret_flag, redact
from specdecode_operator.untrusted import mapping, objects
from specdecode_operator.vllm.kv_transfer import ServingRole

_NAME: Final = re.compile(
    r"(?:^|[_-])(?:SECRET|TOKEN|PASSWORD|PASSWD|PASSPHRASE|PASS|CREDENTIALS?|(?:API|ACCESS|PRIVATE|SECRET)_?KEY)$"
    r"|[_-]PWD$|(?:^|[_-])(?:SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)(?:V?\d+)?(?:[_-]|$)",
    re.IGNORECASE,
)
"""Names of variables whose value is a secret."""

_PERHAPS: Final = re.compile(r"(?:^|[_-])(?:TOKEN|KEY)(?:V?\d+)?(?:[_-]|$)", re.IGNORECASE)
"""Names of variables whose value is a secret, unless it is a number or a switch."""

_ABOUT: Final = re.compile(r"[_-](?:FILE|PATH|DIR|NAME)$", re.IGNORECASE)
_SETTING: Final = re.compile(r"[+-]?\d{1,9}(?:\.\d{1,9})?|true|false|on|off|yes|no|none|auto", re.IGNORECASE)

_WITHHELD: Final = "WITHHELD"


def is_secret_variable(name: str, value: str) -> bool:
    """Return whether a variable holds a secret, by its name or by the form of its value."""
    by_name = _NAME.search(name) or (_PERHAPS.search(name) and not _SETTING.fullmatch(value))
    return bool(value) and (bool(by_name and not _ABOUT.search(name)) or without_secrets(value) != value)


def without_secrets(text: str) -> str:
    """Replace everything in a text that has the form of a secret."""
    return redact(text, _WITHHELD)


def withhold_secrets(builder: "SpecBuilder") -> None:
    """Take secrets out of the spec; ask for each."""
    pod = builder.get("podTemplate.spec")
    for key in ("containers", "initContainers"):
        if not isinstance(pod, dict) or not isinstance(pod.get(key), list):
            continue
        # The containers are the source's own: change copies.
        pod[key] = [dict(each) if isinstance(each, dict) else each for each in pod[key]]
        for container in objects(pod, key):
            kept = []
            for each in objects(container, "env"):
                name = str(each.get("name"))
                if is_secret_variable(name, str(each.get("value") or "")):
                    message = "is plain text: put it into a Secret, and refer to that in podTemplate with valueFrom"
                    builder.decide("spec.podTemplate", f"env {name} of {container.get('name')}", message)
                else:
                    kept.append(each)
            if "env" in container:
                container["env"] = kept
    builder.spec = _without(builder.spec, "spec", builder)


def _without(value: Any, path: str, builder: "SpecBuilder", flag: Any = None) -> Any:
    if isinstance(value, dict):
        return {key: _without(part, f"{path}.{key}", builder) for key, part in value.items()}
    if isinstance(value, list):
        flags = [None, *value]
        return [
            _without(part, f"{path}[{index}]", builder, flag)
            for index, (flag, part) in enumerate(zip(flags, value, strict=False))
        ]
    if not isinstance(value, str):
        return value
    cleaned = shown = without_secrets(value)
    # A password follows its flag; a variable, a redirection or another flag is not one.
    if isinstance(flag, str) and is_secret_flag(flag) and re.match(r"(?![\"']?[-$/<>|&;]).", value):
        cleaned, shown = _WITHHELD, f"{flag} {_WITHHELD}"
    elif cleaned == value:
        return value
    builder.decide(path, shown, "holds a secret as plain text: put it into a Secret, or remove it")
    return cleaned


HOLDS_ANYWAY: Final = "is the default"
OWN_PROBES: Final = "the operator sets its own probes, which allow a long start"
OWN_GRACE: Final = "the operator calculates it from the steps of stopping a pod"
ROLLS_OUT: Final = "an old engine stops before a new one starts"
UNDOES: Final = "it could override settings of the operator: list its variables one by one, and import again"


SOURCE_KEYS: Final[Mapping[str, Any]] = json.loads(Path(__file__).with_name("source_keys.json").read_text("utf-8"))
"""Keys and options of each source: those that are read, the operator's own with the reason, and dropped ones."""

Object = Mapping[str, Any]


class MigrationError(Exception):
    """The server cannot be imported; ``problem`` names the field, its value and the fix."""

    def __init__(self, field: str, value: str, message: str) -> None:
        self.problem = Problem(field, _short(value), message)
        super().__init__(str(self.problem))


class Outcome(StrEnum):
    """Result for one setting of the old server."""

    FIELD = "taken into fields"
    EXTRA = "passed on in spec.engine.extraArgs"
    POD = "taken into spec.podTemplate"
    OPERATOR = "set by the operator"
    DROPPED = "not kept"
    DEFAULT = "defaults that change"


@dataclass(frozen=True)
class Setting:
    """One setting of the old server and its result."""

    outcome: Outcome
    name: str
    """As the source has it; never the value of a secret."""
    result: str


_WRITERS: Final = ("deployment.kubernetes.io/", "kubectl.kubernetes.io/", "field.cattle.io/")


@dataclass
class Remarks:
    """Report on the settings of a server, with secrets withheld."""

    settings: list[Setting] = field(default_factory=list)
    decisions: list[Problem] = field(default_factory=list)
    """Problems that a person must solve before the object is applied."""

    def note(self, outcome: Outcome, name: str, result: str) -> None:
        """Report the result for a setting."""
        self.settings.append(Setting(outcome, without_secrets(name), without_secrets(result)))

    def own(self, name: str, why: str) -> None:
        """Report a setting that the operator decides itself."""
        self.note(Outcome.OPERATOR, name, why)

    def drop(self, name: str, why: str) -> None:
        """Report a setting that is not kept, and why the new server is the same without it; if not: `decide`."""
        self.note(Outcome.DROPPED, name, why)

    def decide(self, field: str, value: str, message: str) -> None:
        """Ask for a decision, once."""
        problem = Problem(field, _short(value), message)
        if problem not in self.decisions:
            self.decisions.append(problem)

    def drop_metadata(self, body: Object, read: Sequence[str] = ()) -> None:
        """Report labels and annotations of the source itself, which its pods do not have."""
        for kind in ("labels", "annotations"):
            for key in mapping(mapping(body, "metadata"), kind):
                if key.startswith(_WRITERS):
                    why = "Kubernetes wrote it for the old object"
                else:
                    why = "belongs to the old object: add it to metadata of the new one if a tool or a policy reads it"
                if key not in read:
                    self.drop(f"metadata.{kind} {key}", why)

    def own_keys(self, body: Object, reasons: Mapping[str, str], prefix: str = "") -> None:
        """Report the keys of a source that the operator decides itself, with the reason of each."""
        for key in body:
            if key in reasons:
                self.own(f"{prefix}{key}", reasons[key])

    def ask_for_rest(self, body: Object, known: Sequence[str], where: str) -> None:
        """Ask for each key that is set but not known; its value may be a secret."""
        message = "is not read by import: set its equivalent in podTemplate or extraArgs, or remove it"
        for key, value in body.items():
            if key not in known and value not in (None, "", {}, [], False):
                self.decide(f"{where}.{key}", "is set", message)


@dataclass
class SpecBuilder(Remarks):
    """The spec so far, and the report on it."""

    spec: dict[str, Any] = field(default_factory=dict)
    unsaid: set[str] = field(default_factory=set)
    """Flags whose values only the running container has."""
    origins: dict[str, str] = field(default_factory=dict)
    """Setting of the source behind each field, such as ``--max-model-len 8192``."""

    def set(self, path: str, value: Any) -> None:
        """Set a field of the spec, such as ``serving.maxModelLen``."""
        *parents, last = path.split(".")
        place = self.spec
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value

    def get(self, path: str) -> Any:
        """Return a field of the spec; None if it is not set."""
        place: Any = self.spec
        for part in path.split("."):
            place = place.get(part) if isinstance(place, dict) else None
        return place

    def take(self, name: str, path: str, value: Any, remark: str = "") -> None:
        """Set a field and report it."""
        self.set(path, value)
        self.origins[path] = without_secrets(name)
        self.note(Outcome.FIELD, name, f"spec.{path}: {plain(value)}" + (f" ({remark})" if remark else ""))


def _short(value: str) -> str:
    return clip(without_secrets(value), 96)


def plain(value: Any) -> str:
    """Return a value of the spec in one short line."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {plain(part)}" for key, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(plain, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def required(body: Object, where: str) -> dict[str, Any]:
    """Return the object at a path such as ``spec.template.spec``; raise MigrationError if it is missing."""
    place: Any = body
    keys = where.split(".")
    for depth, key in enumerate(keys, start=1):
        place = place.get(key)
        if not isinstance(place, dict):
            shown = MISSING if place is None else str(place)
            raise MigrationError(".".join(keys[:depth]), shown, "must be an object, as in any Deployment")
    found: dict[str, Any] = place
    return found


@dataclass(frozen=True)
class Workload:
    """A server: its containers, volumes and resources as a pod has them, its replicas, and how to end it."""

    kind: str
    name: str
    pod: Object
    where: str
    metadata: Object = field(default_factory=dict)
    namespace: str | None = None
    match_labels: Object = field(default_factory=dict)
    spec: Object = field(default_factory=dict)
    """Replicas and rollout, by the names of a Deployment."""
    nodes: int = 1
    says_gpus: bool = True
    """Whether the source states the number of GPUs; otherwise the server's parallelism does."""
    outside: bool = False
    """Whether it runs outside Kubernetes, so that folders of its machine are on no node."""
    end: str = ""
    remove: str = ""
    """Command that removes what ``end`` keeps as a way back; empty if it keeps no objects."""
    remarks: Remarks = field(default_factory=Remarks)
    containers: Sequence[str] = ()
    """Fields of the containers, in order, if they are not the entries of the list ``where``."""
    flag_fields: Mapping[str, str] = field(default_factory=dict)
    """Fields of the source behind flags that are not in a container's arguments; empty is the model by position."""
    role: ServingRole | None = None
    role_field: str = ""
    """Field that names the role."""
    error: MigrationError | None = None
    """Why this server cannot be read, although others of its object can."""

    def container_field(self, index: int) -> str:
        """Return the field of a container."""
        if self.outside:
            return self.where
        return self.containers[index] if index < len(self.containers) else f"{self.where}[{index}]"


def broken(kind: str, name: str, where: str, error: MigrationError, namespace: str | None) -> Workload:
    """Return a server of an object that cannot be read."""
    return Workload(kind=kind, name=name, pod={}, where=where, namespace=namespace, error=error)


def name_in(body: Object) -> str:
    """Return an object's name."""
    return str(mapping(body, "metadata").get("name") or "vllm")


def namespace_of(body: Object) -> str | None:
    """Return an object's namespace."""
    found = mapping(body, "metadata").get("namespace")
    return str(found) if found else None


def in_namespace(namespace: str | None) -> str:
    """Return the option of kubectl that names a namespace."""
    return f" -n {shlex.quote(namespace)}" if namespace else ""


def kubectl(verb: str, body: Object, options: str = "") -> str:
    """Return a kubectl command for an object, with its name quoted: the command is copied into a shell."""
    kind = str(body.get("kind")).lower()
    return f"kubectl {verb} {kind}/{shlex.quote(name_in(body))}{options}{in_namespace(namespace_of(body))}"


def operand(name: str) -> str:
    """Return a name as the last words of a docker command: a leading dash does not make it an option."""
    return f"-- {shlex.quote(name)}" if name.startswith("-") else shlex.quote(name)


def plain_text(value: Any) -> str:
    """Return a YAML value as a command line has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
