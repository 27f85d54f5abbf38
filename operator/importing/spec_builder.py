"""Build the spec of an import: record what became of each setting, and withhold plain-text secrets."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from specdecode_operator.problems import MISSING, Problem
from specdecode_operator.redaction import clip, is_secret_flag, redact
from specdecode_operator.untrusted import objects

_NAME: Final = re.compile(
    r"(?:^|[_-])(?:SECRET|TOKEN|PASSWORD|PASSWD|PASSPHRASE|PASS|CREDENTIALS?|(?:API|ACCESS|PRIVATE|SECRET)_?KEY)$"
    r"|[_-]PWD$|(?:^|[_-])(?:SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)(?:V?\d+)?(?:[_-]|$)",
    re.IGNORECASE,
)
"""How variables are called whose value is a secret."""

_PERHAPS: Final = re.compile(r"(?:^|[_-])(?:TOKEN|KEY)(?:V?\d+)?(?:[_-]|$)", re.IGNORECASE)
"""How variables are called whose value is a secret, unless it is a number or a switch."""

_ABOUT: Final = re.compile(r"[_-](?:FILE|PATH|DIR|NAME)$", re.IGNORECASE)
_SETTING: Final = re.compile(r"[+-]?\d{1,9}(?:\.\d{1,9})?|true|false|on|off|yes|no|none|auto", re.IGNORECASE)

_NO_VALUE: Final = r"(?![\"']?[-$/<>|&;])"
_WITHHELD: Final = "WITHHELD"
_MESSAGE: Final = "stands there as plain text: put it into a Secret, and name that in podTemplate, by valueFrom"


def is_secret_variable(name: str, value: str) -> bool:
    """Return whether a variable holds a secret, by its name or by what it looks like."""
    by_name = _NAME.search(name) or (_PERHAPS.search(name) and not _SETTING.fullmatch(value))
    return bool(value) and (bool(by_name and not _ABOUT.search(name)) or without_secrets(value) != value)


def without_secrets(text: str) -> str:
    """Return a text with everything that has the form of a secret replaced."""
    return redact(text, _WITHHELD)


def withhold_secrets(builder: "SpecBuilder") -> None:
    """Take secrets out of the spec; ask for each."""
    for container in _containers(builder):
        kept = []
        for each in objects(container, "env"):
            name = str(each.get("name"))
            if is_secret_variable(name, str(each.get("value") or "")):
                builder.decide("spec.podTemplate", f"env {name} of {container.get('name')}", _MESSAGE)
            else:
                kept.append(each)
        if "env" in container:
            container["env"] = kept
    builder.spec = _without(builder.spec, "spec", builder)


def _containers(builder: "SpecBuilder") -> Iterator[dict[str, Any]]:
    """Return copies of the containers of the podTemplate, put into their place: they are the source's own."""
    pod = builder.get("podTemplate.spec")
    for key in ("containers", "initContainers"):
        if isinstance(pod, dict) and isinstance(pod.get(key), list):
            pod[key] = [dict(each) if isinstance(each, dict) else each for each in pod[key]]
            yield from objects(pod, key)


def _without(value: Any, path: str, builder: "SpecBuilder") -> Any:
    if isinstance(value, dict):
        return {key: _without(part, f"{path}.{key}", builder) for key, part in value.items()}
    if isinstance(value, list):
        before = ["", *value]
        return [
            _withheld(f"{path}[{index}]", f"{flag} {_WITHHELD}", _WITHHELD, builder)
            if _is_behind_flag(flag, part)
            else _without(part, f"{path}[{index}]", builder)
            for index, (flag, part) in enumerate(zip(before, value, strict=False))
        ]
    if isinstance(value, str):
        cleaned = without_secrets(value)
        return value if cleaned == value else _withheld(path, cleaned, cleaned, builder)
    return value


def _is_behind_flag(flag: Any, value: Any) -> bool:
    """Return whether a word is the value of a flag for a password."""
    both = isinstance(flag, str) and isinstance(value, str)
    return both and is_secret_flag(flag) and re.match(rf"{_NO_VALUE}.", value) is not None


def _withheld(path: str, shown: str, cleaned: str, builder: "SpecBuilder") -> str:
    builder.decide(path, shown, "holds a secret as plain text: put it into a Secret, or remove it")
    return cleaned


_SHOWN_CHARACTERS: Final = 96
HOLDS_ANYWAY: Final = "is what holds without it"


class MigrationError(Exception):
    """Nothing can be imported; ``problem`` says which field is why, and what to do."""

    def __init__(self, field: str, value: str, message: str) -> None:
        self.problem = Problem(field, _short(value), message)
        super().__init__(str(self.problem))


class Outcome(StrEnum):
    """What becomes of a setting of the Deployment."""

    FIELD = "taken into fields"
    EXTRA = "passed on in spec.engine.extraArgs"
    POD = "taken into spec.podTemplate"
    OPERATOR = "the operator's own business"
    DROPPED = "not kept"
    DEFAULT = "defaults that change"


@dataclass(frozen=True)
class Setting:
    """One setting of the Deployment and what became of it."""

    outcome: Outcome
    name: str
    """As the Deployment has it; never the value of a secret."""

    result: str
    """The field and value that it became, or why it did not become one."""


@dataclass
class SpecBuilder:
    """The spec so far, and the report on it."""

    spec: dict[str, Any] = field(default_factory=dict)
    settings: list[Setting] = field(default_factory=list)
    decisions: list[Problem] = field(default_factory=list)
    """What a person must decide before the object is applied."""

    unsaid: set[str] = field(default_factory=set)
    """Flags that are given, with values that only the running container knows."""

    def set(self, path: str, value: Any) -> None:
        """Set a field of the spec, such as ``serving.maxModelLen``."""
        *parents, last = path.split(".")
        place = self.spec
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value

    def get(self, path: str) -> Any:
        """Return a field of the spec; None where it is not set."""
        place: Any = self.spec
        for part in path.split("."):
            place = place.get(part) if isinstance(place, dict) else None
        return place

    def take(self, name: str, path: str, value: Any, remark: str = "") -> None:
        """Set a field and say what became it."""
        self.set(path, value)
        shown = f"spec.{path}: {plain(value)}" + (f" ({remark})" if remark else "")
        self.note(Outcome.FIELD, name, shown)

    def note(self, outcome: Outcome, name: str, result: str) -> None:
        """Say what becomes of a setting."""
        self.settings.append(Setting(outcome, without_secrets(name), without_secrets(result)))

    def drop(self, name: str, why: str) -> None:
        """Say that a setting is not kept, and why the new server is the same without it; where it is not: `decide`."""
        self.note(Outcome.DROPPED, name, why)

    def decide(self, field: str, value: str, message: str) -> None:
        """Say what people must decide, once."""
        problem = Problem(field, _short(value), message)
        if problem not in self.decisions:
            self.decisions.append(problem)


def _short(value: str) -> str:
    """Return a value of the old server as a report shows it."""
    return clip(without_secrets(value), _SHOWN_CHARACTERS)


def plain(value: Any) -> str:
    """Return a value of the spec in one short line."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {plain(part)}" for key, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(plain, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def required(body: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the object at a path such as ``spec.template.spec``.

    Raises
    ------
    MigrationError
        When there is none.
    """
    place: Any = body
    walked: list[str] = []
    for key in where.split("."):
        walked.append(key)
        place = place.get(key)
        if not isinstance(place, dict):
            shown = MISSING if place is None else str(place)
            raise MigrationError(".".join(walked), shown, "must be an object, as in any Deployment")
    found: dict[str, Any] = place
    return found
