"""What a round of the hunt leaves behind, for oracles to judge: objects, calls, and the operator's own life."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hunt.steps import Sequence, Step

Body = dict[str, Any]
Identity = tuple[str, str]

SEEN: Final = "sdd,sdc,deployments,services,configmaps,poddisruptionbudgets,jobs,persistentvolumeclaims,pods"
"""Kinds that are looked at."""

FOREIGN: Final = "foreign"
"""Names of objects that are nobody's business begin so."""

SQUATTER: Final = {"somebody": "else's"}
"""Data of a ConfigMap of somebody else that has the name of a child."""

_SHARED: Final = ("kube-root-ca.crt", "specdecode-model-facts", "specdecode-recorder")
"""ConfigMaps of a namespace as a whole."""


@dataclass(frozen=True)
class Moment:
    """One namespace after one beat."""

    beat: int
    step: Step
    objects: tuple[Body, ...]
    refused: str = ""
    """What the API server said to the step."""

    wrong: frozenset[str] = frozenset()
    """What is wrong on purpose."""

    calls: tuple["Call", ...] = ()
    """The operator's requests in the beat."""


@dataclass(frozen=True)
class Call:
    """One request of the operator, as the API server wrote it down."""

    verb: str
    target: str
    code: int

    @property
    def writes(self) -> bool:
        """Whether it changes something, if it is let through."""
        return self.verb not in {"get", "list", "watch"}


@dataclass
class Life:
    """All that was seen of one namespace."""

    namespace: str
    sequence: Sequence
    moments: list[Moment] = field(default_factory=list)
    end: tuple[Body, ...] = ()
    """After all was healed and had come to rest."""

    later: tuple[Body, ...] = ()
    """After a time in which nobody did anything."""

    calls: list[Call] = field(default_factory=list)
    """The operator's requests in that time."""

    statuses: list[tuple[str, str]] = field(default_factory=list)
    """Each status that the operator wrote in the round: of what, and a digest that two have which say the same."""

    fresh: tuple[Body, ...] = ()
    """What a namespace without a past has for the same spec."""

    left: tuple[Body, ...] = ()
    """After the objects of ours were deleted."""

    foreign: dict[Identity, str] = field(default_factory=dict)
    """What the objects of others are, from the start."""

    @property
    def wrong(self) -> bool:
        """Whether something went wrong that nobody heals: the namespace goes."""
        return any("terminate" in moment.wrong for moment in self.moments)


@dataclass
class OperatorLife:
    """What was seen of the operator's process."""

    log: str = ""
    ended: list[str] = field(default_factory=list)
    """How it ended where nobody ended it."""

    memory_mib: list[float] = field(default_factory=list)


@dataclass
class Record:
    """One round."""

    lives: list[Life]
    operator: OperatorLife
    faults: tuple[str, ...] = ()
    calls: list[Call] = field(default_factory=list)
    """The operator's requests about no namespace while nothing happened."""


def name_of(body: Body) -> str:
    """Return the name of an object."""
    return str(body["metadata"]["name"])


def identity(body: Body) -> Identity:
    """Return kind and name."""
    return body["kind"], name_of(body)


def versions(objects: Iterable[Body]) -> dict[Identity, str]:
    """Return who is there in which version; a new object of an old name is another."""
    return {identity(each): f"{each['metadata']['uid']} {each['metadata']['resourceVersion']}" for each in objects}


def contents(objects: Iterable[Body]) -> dict[Identity, str]:
    """Return who is there, and what people wrote into it: controllers write more."""
    found = {}
    for each in objects:
        metadata = {key: each["metadata"].get(key) for key in ("uid", "labels", "ownerReferences", "deletionTimestamp")}
        parts = {key: value for key, value in each.items() if key not in {"metadata", "status"}}
        found[identity(each)] = json.dumps([metadata, parts], sort_keys=True)
    return found


def parents(objects: Iterable[Body], kind: str = "SpecDecodeDeployment") -> list[Body]:
    """Return the objects of a kind of ours."""
    return [each for each in objects if each["kind"] == kind]


def foreign(objects: Iterable[Body]) -> list[Body]:
    """Return the objects of others."""
    return [each for each in objects if name_of(each).startswith(FOREIGN)]


def children(objects: Iterable[Body]) -> list[Body]:
    """Return what the operator made, without pods, which controllers make."""
    ours = {"SpecDecodeDeployment", "SpecDecodeCapture", "Pod"}
    return [
        each
        for each in objects
        if each["kind"] not in ours and not name_of(each).startswith(FOREIGN) and name_of(each) not in _SHARED
    ]


def conditions(body: Body) -> dict[str, Body]:
    """Return the conditions of an object by type."""
    return {each["type"]: each for each in body.get("status", {}).get("conditions", [])}


def ready(body: Body) -> str:
    """Return the status of the condition Ready; empty where there is none."""
    return str(conditions(body).get("Ready", {}).get("status", ""))


def read_calls(log: Path, offset: int) -> Iterator[tuple[str, Call]]:
    """Yield the requests in an audit log from a place on, each with its namespace."""
    with log.open("rb") as file:
        file.seek(offset)
        lines = file.read().splitlines()
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:  # the last line is being written
            continue
        about = event.get("objectRef") or {}
        parts = (about.get("resource"), about.get("name"), about.get("subresource"))
        code = event.get("responseStatus", {}).get("code", 0)
        yield about.get("namespace", ""), Call(event["verb"], "/".join(filter(None, parts)), code)
