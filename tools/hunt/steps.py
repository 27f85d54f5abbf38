"""What is done to an object, and what goes wrong around it, one step at a time; and sequences of such steps."""

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import yaml

from hunt.states import State, States, capture_body

DISTURBANCES: Final = {
    "quota": "unquota",
    "squat": "unsquat",
    "unready": "podkill",
    "finalize": "unfinalize",
    "finalize-parent": "unfinalize-parent",
    "refuse": "admit",
    "orphan": "unorphan",
}
"""What goes wrong until it is healed, and what heals it."""

FAULTS: Final = ("drift", "strip", "remove", "podkill", "delete", *DISTURBANCES)
"""What goes wrong in one namespace."""

OPERATOR_FAULTS: Final = ("none", "kill", "kill-at-call", "revoke", "drop-watches", "slow")
"""What goes wrong with the operator itself, its rights or its way to the API server."""

_STEPS: Final = 5


@dataclass(frozen=True)
class Step:
    """One thing that is done in a namespace."""

    kind: str
    state: State | None = None
    number: int = 0
    """Which child, or which of several ways."""

    def __str__(self) -> str:
        return f"{self.kind} {self.state or self.number or ''}".rstrip()

    def as_yaml(self) -> str:
        """Return what a person does for it, with kubectl where that is enough."""
        if self.kind in {"apply", "capture"}:
            body = self.state.body() if self.state else capture_body(self.number)
            return f"# kubectl apply -f -\n{yaml.safe_dump(json.loads(json.dumps(body)))}"
        return f"# {HOW[self.kind]}\n"


HOW: Final = {
    "admit": "kubectl delete validatingadmissionpolicy hunt-refuses",
    "delete": "kubectl delete sdd hunted",
    "drift": "kubectl edit a child: its replicas, its data, its ports",
    "finalize": "kubectl patch a child: a finalizer of somebody else; then kubectl delete it",
    "finalize-parent": "kubectl patch sdd hunted: a finalizer of somebody else; then kubectl delete it",
    "orphan": "kubectl patch a child: without metadata.ownerReferences",
    "podkill": "kubectl delete pods --all --force",
    "quota": "kubectl create quota none --hard=pods=0,services=0,configmaps=0,count/deployments.apps=0",
    "refuse": "kubectl apply a ValidatingAdmissionPolicy that refuses what the operator writes",
    "remove": "kubectl delete a child",
    "squat": "kubectl create the object of somebody else under a child's name",
    "strip": "kubectl edit a child: without its data, its selector, its tolerations",
    "terminate": "kubectl delete namespace",
    "uncapture": "kubectl delete sdc measured-1",
    "unfinalize": "kubectl patch the child: without that finalizer",
    "unfinalize-parent": "kubectl patch sdd hunted: without that finalizer",
    "unorphan": "kubectl delete the child that nobody owns",
    "unquota": "kubectl delete quota none",
    "unready": "kubectl patch the status of the pods: not ready",
    "unsquat": "kubectl delete that object",
    "wait": "nothing",
}
"""What each step is, for a person who repeats it."""


@dataclass(frozen=True)
class Sequence:
    """The steps of one namespace, one a beat."""

    steps: tuple[Step, ...]

    @property
    def last(self) -> State | None:
        """The state that the object is left in; None where it is deleted."""
        found = None
        for step in self.steps:
            if step.kind == "apply" and step.state is not None and step.state.legal:
                found = step.state
            elif step.kind in {"delete", "finalize-parent", "terminate"}:
                found = None
        return found


def tour(seed: int) -> list[Sequence]:
    """Return sequences in which each way of going wrong comes once."""
    states = States(seed)
    a = states.good
    first, two = a(), State("llama-8b-ngram", ())
    more = _replicas(two, 2)
    plans: list[list[Step]] = [
        [_apply(first), Step("drift"), _apply(states.near(first)), Step("drift", number=1), _apply(first)],
        [_apply(a()), _apply(states.illegal(first)), Step("remove"), Step("remove", number=2), _apply(two)],
        [Step("squat"), _apply(two), Step("unsquat"), Step("wait"), Step("drift", number=2)],
        [_apply(more), Step("delete"), _apply(two), Step("drift", number=3), Step("remove", number=1)],
        [_apply(more), Step("unready"), Step("podkill"), _apply(two), Step("wait")],
        [Step("quota"), _apply(two), Step("unquota"), _apply(_replicas(two, 0)), _apply(more)],
        [_apply(more), Step("finalize", number=2), _apply(two), Step("unfinalize", number=2), Step("wait")],
        [_apply(two), Step("finalize-parent"), Step("wait"), Step("unfinalize-parent"), _apply(two)],
        [_apply(two), Step("orphan"), Step("wait"), Step("unorphan"), Step("orphan", number=1)],
        [_apply(two), Step("capture", number=1), Step("wait"), Step("uncapture", number=1), Step("capture", number=2)],
        [_apply(two), _apply(_refused(two)), Step("podkill"), Step("wait"), Step("wait")],
        [_apply(two), Step("strip", number=1), Step("strip", number=5), Step("strip", number=2), Step("strip")],
        [_apply(_refused(two)), Step("wait"), Step("refuse"), _apply(two), Step("admit")],
        [_apply(two), Step("capture", number=1), Step("wait"), Step("terminate"), Step("wait")],
    ]
    return [Sequence(tuple(plan)) for plan in plans]


def short_tour() -> list[Sequence]:
    """Return sequences that come by each kind of promise in three beats, for seeded faults."""
    two = State("llama-8b-ngram")
    more = _replicas(two, 2)
    plans: list[list[Step]] = [
        [_apply(more), Step("unready"), _apply(two)],
        [Step("squat"), _apply(two), Step("wait")],
        [_apply(two), _apply(_refused(two)), _apply(_replicas(two, 0))],
        [_apply(two), Step("capture", number=1), Step("wait")],
        [_apply(more), Step("delete"), _apply(two)],
        [_apply(two), Step("drift", number=1), Step("remove")],
        [_apply(two), Step("strip", number=1), Step("strip", number=5)],
    ]
    return [Sequence(tuple(plan)) for plan in plans]


SHORT_TOUR_FAULTS: Final = ("none", "revoke", "none")
"""The same in each beat of a short tour."""

TOUR_FAULTS: Final = ("kill", "revoke", "kill-at-call", "drop-watches", "none")
"""What goes wrong with the operator in each beat of a tour."""


def wander(seed: int, count: int) -> tuple[list[Sequence], tuple[str, ...]]:
    """Return random sequences, and what goes wrong with the operator in each beat."""
    chance = random.Random(seed)  # noqa: S311  a seed that repeats a run is no secret
    states = States(seed)
    faults = tuple(chance.choice(OPERATOR_FAULTS) for _ in range(_STEPS))
    return [_walk(chance, states) for _ in range(count)], faults


def _walk(chance: random.Random, states: States) -> Sequence:
    state = states.good()
    steps = [_apply(state)]
    heals: list[str] = []
    while len(steps) < _STEPS - 1:
        if heals and chance.random() < 0.5:  # noqa: PLR2004  soon, but not at once
            steps.append(Step(heals.pop(), number=steps[-1].number))
        elif chance.random() < 0.6:  # noqa: PLR2004  most steps are people's
            state = states.near(state)
            steps.append(_apply(state))
        else:
            fault = Step(chance.choice(FAULTS), number=chance.randrange(4))
            steps.append(fault)
            heals += [DISTURBANCES[fault.kind]] if fault.kind in DISTURBANCES else []
    return Sequence((*steps, _apply(states.good() if chance.random() < 0.5 else state)))  # noqa: PLR2004  either


def healing(steps: Iterable[Step]) -> list[Step]:
    """Return what undoes all that steps left wrong."""
    left: dict[str, Step] = {}
    for step in steps:
        left.pop(step.kind, None)
        if step.kind in DISTURBANCES:
            left[DISTURBANCES[step.kind]] = Step(DISTURBANCES[step.kind], number=step.number)
    return list(left.values())


def wrongs(steps: Iterable[Step]) -> frozenset[str]:
    """Return what is wrong on purpose after some steps."""
    done = list(steps)
    heals = {step.kind for step in healing(done)}
    never = {step.kind for step in done if step.kind == "terminate"}
    return frozenset({wrong for wrong, heal in DISTURBANCES.items() if heal in heals} | never)


def _apply(state: State) -> Step:
    return Step("apply", state)


def _replicas(state: State, count: int) -> State:
    return state.with_field(("replicas",), count)


def _refused(state: State) -> State:
    """Return a state that the schema takes and the operator cannot: no GPUs serve so long a context."""
    return state.with_field(("serving", "maxModelLen"), 16_777_216)
