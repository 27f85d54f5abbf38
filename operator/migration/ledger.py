"""What an import finds out: the spec that it builds, where each setting went, and what people must decide."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from specdecode_operator.problems import Problem


class AdoptionError(Exception):
    """Nothing can be imported; the message names field, value and fix."""

    def __init__(self, where: str, value: str, message: str) -> None:
        super().__init__(str(Problem(where, value, message)))


class Fate(StrEnum):
    """What becomes of a setting of the Deployment."""

    FIELD = "taken into fields"
    EXTRA = "passed on in spec.engine.extraArgs"
    POD = "taken into spec.podTemplate"
    OPERATOR = "the operator's own business"
    LOST = "not kept"
    DEFAULT = "defaults that change"


@dataclass(frozen=True)
class Note:
    """One line of the difference.

    Attributes
    ----------
    fate
        What becomes of the setting.
    what
        The setting as the Deployment has it; never the value of a secret.
    result
        The field and value that it becomes, or why it does not.
    """

    fate: Fate
    what: str
    result: str


@dataclass
class Ledger:
    """Collects the spec and what is to be said of it.

    Attributes
    ----------
    spec
        The spec so far, as YAML has it.
    notes
        Where each setting went, in the order of reading.
    decisions
        What people must decide: field, value and fix.
    """

    spec: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    decisions: list[Problem] = field(default_factory=list)

    def put(self, path: str, value: Any) -> None:
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

    def take(self, what: str, path: str, value: Any, remark: str = "") -> None:
        """Set a field and say what became it."""
        self.put(path, value)
        shown = f"spec.{path}: {plain(value)}" + (f" ({remark})" if remark else "")
        self.notes.append(Note(Fate.FIELD, what, shown))

    def note(self, fate: Fate, what: str, result: str) -> None:
        """Say what becomes of a setting."""
        self.notes.append(Note(fate, what, result))

    def lose(self, what: str, why: str) -> None:
        """Say that a setting is not kept."""
        self.note(Fate.LOST, what, why)

    def decide(self, where: str, value: str, message: str) -> None:
        """Say what people must decide, once."""
        problem = Problem(where, value, message)
        if problem not in self.decisions:
            self.decisions.append(problem)


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
    AdoptionError
        When there is none.
    """
    place: Any = body
    walked: list[str] = []
    for key in where.split("."):
        walked.append(key)
        place = place.get(key)
        if not isinstance(place, dict):
            shown = "nothing" if place is None else str(place)[:64]
            raise AdoptionError(".".join(walked), shown, "must be an object, as in any Deployment")
    found: dict[str, Any] = place
    return found
