"""What a person does with objects from their first day to their last; all comes to the same whatever goes wrong.

Each is gone through once undisturbed, for what must come of it.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

from tests.component.operator.test_captures import SUMMARY, captures_pod, finish, write_pod_status
from tests.component.operator.test_captures import capture as create_capture
from tests.component.operator.test_lifecycle import NEXT, apply, be_guarded, refuse, serve, wanted_hash
from tests.support.conditions import wait_for
from tests.support.faults.calls import Call
from tests.support.faults.crash_points import CrashPoint, killed_at, words
from tests.support.faults.end_state import CHILD_KINDS, OURS, EndState, differences, end_state
from tests.support.faults.faults import Fault
from tests.support.faults.forked_operator import ForkedOperator
from tests.support.faults.proxy import FaultProxy
from tests.support.kubectl import Kubectl
from tests.support.rest import Rest
from tests.support.waiting import eventually

LOOKS = 10
_OF_ENGINES = ("SpeculationActive", "BudgetAccurate", "SettingsInForce")
"""Conditions of what engines say: played ones say nothing, and after half a minute that is told."""

_OBJECTS = "SpecDecodeDeployment "

Life = Callable[[Kubectl], Iterator[None]]
"""What a person does and a kubelet answers, step by step; wherever it stops, all comes to rest."""


def launch(kubectl: Kubectl) -> None:
    """Create a deployment whose engines serve."""
    apply(kubectl)
    be_served(kubectl)


def be_served(kubectl: Kubectl) -> None:
    """Let its engines serve, and wait until the operator has drawn its conclusions."""
    serve(kubectl)
    wait_for(kubectl, "tiny", "Ready", "Serving")
    be_guarded(kubectl)


def life_of_a_deployment(kubectl: Kubectl) -> Iterator[None]:
    """Create, change and scale one whose engines serve, and delete it."""
    launch(kubectl)
    yield
    good = wanted_hash(kubectl)
    apply(kubectl, **NEXT)
    eventually(lambda: wanted_hash(kubectl) not in {good, ""}, "the new spec is tried")
    be_served(kubectl)
    yield
    apply(kubectl, **NEXT, replicas=2)
    serve(kubectl, 2)
    wait_for(kubectl, "tiny", "Ready", "Serving")
    yield
    kubectl.remove("sdd")
    eventually(lambda: not kubectl.objects(CHILD_KINDS, OURS), "nothing is left behind")
    yield


def life_of_a_capture(kubectl: Kubectl) -> Iterator[None]:
    """Run one that borrows the GPUs of engines that serve, and delete both."""
    launch(kubectl)
    # No node takes its pod until the test plays one: on a slow machine that must not give the GPUs back.
    create_capture(kubectl, deploymentDuringCapture="Suspend", borrowTimeoutSeconds=1800)
    captures_pod(kubectl)
    yield
    write_pod_status(kubectl, "Running", {"running": {}})
    wait_for(kubectl, "demo", "Ready", "Loading", kind="sdc")
    yield
    finish(kubectl, 0, SUMMARY)
    wait_for(kubectl, "demo", "Ready", "Captured", kind="sdc")
    serve(kubectl)
    wait_for(kubectl, "tiny", "Ready", "Serving")
    yield
    kubectl.remove("sdc,sdd")
    left = "deployments,services,configmaps,jobs,pods"
    eventually(lambda: not kubectl.objects(left, OURS), "only the claim with what was captured is left behind")
    yield


def life_of_a_capture_that_does_not_start(kubectl: Kubectl) -> Iterator[None]:
    """Let one borrow the GPUs of engines that serve, and find no node; then the engines have them back."""
    launch(kubectl)
    create_capture(kubectl, deploymentDuringCapture="Suspend", borrowTimeoutSeconds=10)

    def gave_up() -> bool:
        return bool(kubectl.object("sdc", "demo").get("status", {}).get("borrow", {}).get("returnedAt"))

    eventually(gave_up, "it gives the GPUs back")
    kubectl.must("patch", "sdc", "demo", "--type=merge", '--patch={"spec":{"suspend":true}}')
    wait_for(kubectl, "demo", "Ready", "Suspended", kind="sdc")
    serve(kubectl)
    wait_for(kubectl, "tiny", "Ready", "Serving")
    be_guarded(kubectl)
    yield


def life_of_a_rollback(kubectl: Kubectl) -> Iterator[None]:
    """Change one so that its engines refuse to start: those that served are put back."""
    launch(kubectl)
    yield
    good = wanted_hash(kubectl)
    apply(kubectl, **NEXT)
    eventually(lambda: wanted_hash(kubectl) not in {good, ""}, "the new spec is tried")
    eventually(lambda: put_back(kubectl, good), "the template that served is back")
    serve(kubectl)
    wait_for(kubectl, "tiny", "Ready", "RolledBack")
    be_guarded(kubectl)
    yield


def put_back(kubectl: Kubectl, good: str) -> bool:
    """Whether the template that served is back; engines of any other refuse to start."""
    if wanted_hash(kubectl) == good:
        return True
    refuse(kubectl)
    return False


LIVES = {
    "deployment": life_of_a_deployment,
    "capture": life_of_a_capture,
    "unstarted": life_of_a_capture_that_does_not_start,
    "rollback": life_of_a_rollback,
}


@dataclass
class Lived:
    """What came of a life that nothing disturbed."""

    states: list[EndState]
    """After each step."""

    made: list[Counter[str]]
    """What had been created by then."""

    calls: list[Call]
    """About its own namespace, or the whole cluster."""


class Lives:
    """Undisturbed lives, gone through once, and others that must come to the same."""

    def __init__(self, kubectl: Kubectl, proxy: FaultProxy, operator: ForkedOperator) -> None:
        self._kubectl, self._proxy, self._operator = kubectl, proxy, operator
        self._undisturbed: dict[str, Lived] = {}
        self._numbers = itertools.count(1)

    def undisturbed(self, name: str) -> Lived:
        """What comes of a life that nothing disturbs."""
        if name not in self._undisturbed:
            with self._begun(name) as kubectl:
                steps = [(at_rest(kubectl), self._made(kubectl)) for _ in LIVES[name](kubectl)]
                calls = [each for each in [*self._proxy.calls] if each.namespace in {"", kubectl.namespace}]
                self._undisturbed[name] = Lived(*map(list, zip(*steps, strict=True)), calls)
        return self._undisturbed[name]

    def disturbed(
        self,
        name: str,
        points: Sequence[CrashPoint] = (),
        faults: Sequence[Fault] = (),
        before_step: Callable[[int], None] = lambda _: None,
    ) -> list[str]:
        """Go through a life with crashes and faults, which must come to the same; return the points that never came."""
        wanted = self.undisturbed(name)
        with self._begun(name, faults) as kubectl:
            with killed_at(points, self._proxy, self._operator, str(kubectl.namespace)) as left:
                steps = LIVES[name](kubectl)
                for number, (state, made) in enumerate(zip(wanted.states, wanted.made, strict=True), 1):
                    before_step(number)
                    next(steps)
                    eventually(partial(is_like, kubectl, state), f"step {number} ends as undisturbed")
                    # Who has not heard that an object is gone makes its children anew, which go as the others went.
                    if any(name.startswith(_OBJECTS) for name in state):
                        again = self._made(kubectl) - made
                        assert not again, f"made twice: {sorted(again.elements())}"
            assert self._operator.runs, "the operator ended by itself"
        return sorted(map(str, left))

    def _made(self, kubectl: Kubectl) -> Counter[str]:
        """How often each object of a namespace was created, as far as anybody heard of it before it was killed.

        Of Events one more harms nobody, and a note of what served that no status vouches for is written anew.
        """
        created = [each for each in [*self._proxy.calls] if each.status == HTTPStatus.CREATED and each.name]
        ours = [each for each in created if each.namespace == kubectl.namespace]
        return Counter(words(each) for each in ours if not each.name.endswith("-last-good"))

    @contextmanager
    def _begun(self, name: str, faults: Sequence[Fault] = ()) -> Iterator[Kubectl]:
        """A namespace of a life, and an operator that starts in it, behind a proxy with faults."""
        kubectl = self._kubectl.within(f"life-{name}-{next(self._numbers)}")
        kubectl.create_namespace()
        self._proxy.calls.clear()
        self._proxy.faults = faults
        self._operator.start()
        try:
            yield kubectl
        finally:
            self._operator.kill()
            self._proxy.faults = ()
            kubectl.remove("sdc,sdd")


def at_rest(kubectl: Kubectl) -> EndState:
    """The state that stays once nobody has anything left to do."""
    Rest(kubectl).reach()
    seen: list[EndState] = []

    def look() -> bool:
        seen.append(seen_state(kubectl))
        return len(seen) > LOOKS and all(each == seen[-1] for each in seen[-LOOKS:])

    eventually(look, "all is at rest")
    return seen[-1]


def is_like(kubectl: Kubectl, wanted: EndState) -> bool:
    found = differences(seen_state(kubectl), wanted)
    assert not found, "\n".join(found)
    return True


def seen_state(kubectl: Kubectl) -> EndState:
    """The end state, but for what nobody knows of engines that are played."""
    state = end_state(kubectl)
    for name in filter(lambda name: name.startswith(_OBJECTS), state):
        status = state[name]["status"]
        status.pop("speculation", None)
        for type_ in _OF_ENGINES:
            status.get("conditions", {}).pop(type_, None)
    return state
