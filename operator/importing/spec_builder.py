"""Builds the spec of an import, with what became of each setting and what a person must decide."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from specdecode_operator.migration.secrets import without_secrets
from specdecode_operator.problems import MISSING, Problem
from specdecode_operator.redaction import clip

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
