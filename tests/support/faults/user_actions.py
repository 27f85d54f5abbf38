"""People who create, change and delete objects in any order, while the operator is killed and its calls go wrong.

What must come of it is what a fresh apply of the same specs comes to in another namespace.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import yaml
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from specdecode_operator.api.base import API_VERSION
from specdecode_operator.cluster.resources import CAPTURE_LABEL
from tests.support.faults.calls import Call
from tests.support.faults.end_state import OURS, EndState, differences, end_state
from tests.support.faults.faults import Fault
from tests.support.faults.forked_operator import ForkedOperator
from tests.support.faults.proxy import FaultProxy
from tests.support.kubectl import Kubectl
from tests.support.objects import Body, tiny_cpu
from tests.support.waiting import eventually

NAMES = st.sampled_from(["a", "b"])
SPECS = st.fixed_dictionaries(
    {"replicas": st.integers(0, 3), "suspend": st.booleans(), "serving": st.sampled_from([{"maxModelLen": 512}, {}])}
)
INVALID: Body = {"engine": {"image": "localhost/engine:1", "extraArgs": ["--swap-space=4"]}}
"""What the API server takes and the operator does not."""

CHILDREN = st.sampled_from(["deployments", "services", "configmaps", "poddisruptionbudgets"])
EDITS: dict[str, Body] = {
    "deployments": {"spec": {"replicas": 7, "paused": True}},
    "services": {"spec": {"publishNotReadyAddresses": True, "selector": {"somebody": "else"}}},
    "configmaps": {"data": {"plan.json": "{}", "other": "text"}},
    "poddisruptionbudgets": {"spec": {"maxUnavailable": None, "minAvailable": 2}},
}
_OF_HISTORY = ("ChildrenInSync",)
"""Conditions that tell what was, and are no part of where all must end."""

_WAITS = "WaitingForDeployment"
"""Reason of a capture whose message counts the pods of the engines that go first, surplus ones of a rollout too."""

_HINDRANCES = {"ApiServerError", "ChildNameConflict", "Forbidden", "RefusedForNow", "WaitingForCleanup"}
"""Reasons of Ready while something keeps the operator from writing children."""

KILLED = "kill the operator"
UNCHECKED = 6
"""So many actions come at least between two looks, and two kills."""

_numbers = itertools.count(1)


@dataclass
class World:
    """What all runs share."""

    kubectl: Kubectl
    proxy: FaultProxy
    operator: ForkedOperator
    faults: Sequence[Fault]
    deadline_s: float


@dataclass
class Wanted:
    """What somebody wants of one object."""

    spec: Body
    good: Body | None
    """What its children are made of: the last spec that was valid."""


@dataclass
class Model:
    """What there should be."""

    objects: dict[str, Wanted] = field(default_factory=dict)
    captures: set[str] = field(default_factory=set)
    strangers: dict[str, Body] = field(default_factory=dict)
    """What somebody else has made by the name of a child, by that of the object."""


class UserActions(RuleBasedStateMachine):
    """One run: a namespace of its own, and what was done in it."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.model = Model()
        self.done: list[str] = []
        self.kubectl = self._namespace()
        self.disturbed = False
        self.edited = False
        """Whether somebody changed children since all was at rest."""
        self.checked = 0
        world.proxy.calls.clear()
        self._restart()

    @initialize(changes=SPECS)
    def begin(self, changes: Body) -> None:
        """Have something to do with."""
        self._apply("a", changes)

    @rule(name=NAMES, changes=SPECS)
    def apply(self, name: str, changes: Body) -> None:
        """Create an object, or change it, also by suspending and scaling."""
        self._apply(name, changes)

    def _apply(self, name: str, changes: Body) -> None:
        self._note("apply", name, changes)
        self._end_capture(name)
        spec = tiny_cpu(**changes)
        apply(self.kubectl, name, spec)
        self.model.objects[name] = Wanted(spec, spec)

    @precondition(lambda self: self.model.objects)
    @rule(data=st.data())
    def make_invalid(self, data: st.DataObject) -> None:
        """Change an object so that no engine would take it; its engines stay as they are, edited ones too."""
        name = self._draw(data)
        self._calm()
        self._note("make invalid", name)
        if self.edited:  # whether that was set back before depends on who is faster
            return
        if name in self.model.strangers:  # it has no children, and gets none when the name is free
            return
        self._end_capture(name)
        wanted = self.model.objects[name]
        wanted.spec = {**wanted.spec, **INVALID}
        apply(self.kubectl, name, wanted.spec)

    @precondition(lambda self: self.model.objects)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        """Delete an object, and wait for nothing: it may be made anew at once."""
        name = self._draw(data)
        self._note("delete", name)
        self._end_capture(name)
        self.kubectl.must("delete", "sdd", name, "--wait=false")
        del self.model.objects[name]

    @precondition(lambda self: self.model.objects and self.all_are_valid())
    @rule(kind=CHILDREN)
    def edit_children(self, kind: str) -> None:
        """Change what the operator owns, by hand."""
        self._calm()
        self._note("edit", kind)
        self.edited = True
        for body in self.kubectl.objects(kind, OURS):
            patch = json.dumps(EDITS[kind])
            self.kubectl("patch", kind, body["metadata"]["name"], "--type=merge", f"--patch={patch}")

    @precondition(lambda self: self.model.objects and self.all_are_valid())
    @rule(kind=CHILDREN)
    def delete_children(self, kind: str) -> None:
        """Delete what the operator owns, by hand."""
        self._calm()
        self._note("delete", kind)
        self.edited = True
        self.kubectl("delete", kind, OURS, "--wait=false")

    @rule(name=NAMES)
    def take_a_name(self, name: str) -> None:
        """Have somebody else make a Service where an object would have one, unless there is one of either."""
        if name in self.model.objects or name in self.model.strangers:
            return
        self._note("take the name", name)
        eventually(lambda: not services(self.kubectl, name), "what there was goes", self.world.deadline_s)
        self.model.strangers[name] = make_stranger(self.kubectl, name)

    @precondition(lambda self: self.model.strangers)
    @rule()
    def free_names(self) -> None:
        """Have what is somebody else's removed."""
        self._note("free the names", *self.model.strangers)
        for name in self.model.strangers:
            self.kubectl.must("delete", "service", name)
        self.model.strangers.clear()

    @precondition(lambda self: self.model.objects)
    @rule(data=st.data())
    def capture(self, data: st.DataObject) -> None:
        """Create a capture, which waits for GPUs; it goes before its deployment changes: it would not follow."""
        name = self._draw(data)
        self._calm()
        self._note("capture", name)
        capture(self.kubectl, name)
        self.model.captures.add(name)

    @precondition(lambda self: self.model.captures)
    @rule()
    def delete_captures(self) -> None:
        """Delete all captures."""
        self._note("delete captures")
        for name in sorted(self.model.captures):
            self._end_capture(name)

    def _end_capture(self, name: str) -> None:
        if name in self.model.captures:
            self.kubectl.must("delete", "sdc", name)
            self.model.captures.remove(name)

    @precondition(lambda self: KILLED not in self.done[-UNCHECKED:])
    @rule()
    def kill_operator(self) -> None:
        """Kill the operator, and start it at once."""
        self._note(KILLED)
        self._restart()

    @rule(data=st.data())
    def begin_faults(self, data: st.DataObject) -> None:
        """Have calls go wrong from now on."""
        fault = data.draw(st.sampled_from(self.world.faults))
        self._note("faults", fault)
        self.disturbed = True
        self.world.proxy.faults = [fault]

    @precondition(lambda self: len(self.done) >= self.checked + UNCHECKED)
    @rule()
    def check(self) -> None:
        """Let all come to rest, without faults, and look."""
        self._note("check")
        self.checked = len(self.done)
        self._calm()
        try:
            self._check()
        except AssertionError as error:
            message = f"after {'; '.join(self.done)}:\n{error}"
            raise AssertionError(message) from error
        self.edited = False

    def teardown(self) -> None:
        """Look once more, and remove all."""
        try:
            self.check()
        finally:
            self.kubectl.remove("sdc,sdd")

    def _check(self) -> None:
        fresh = self._namespace()
        try:
            for name in self.model.strangers:
                make_stranger(fresh, name)
            for name, wanted in self.model.objects.items():
                if wanted.good is not None and wanted.good != wanted.spec:
                    apply(fresh, name, wanted.good)
                    eventually(partial(is_seen, fresh, name), f"{name} is looked at", self.world.deadline_s)
                apply(fresh, name, wanted.spec)
            for name in self.model.captures:
                capture(fresh, name)
            eventually(partial(self._is_like, fresh), "all is as after a fresh apply", self.world.deadline_s)
        finally:
            fresh.remove("sdc,sdd")
        self._conditions_tell_the_truth()
        if not self.disturbed:
            repeated = repeated_status_writes([*self.world.proxy.calls])
            assert not repeated, f"status writes that repeat the one before: {repeated}"

    def _is_like(self, fresh: Kubectl) -> bool:
        for kubectl in (fresh, self.kubectl):
            for name in self.model.objects:
                assert is_seen(kubectl, name), f"{name} was looked at"
        assert not strays(self.kubectl), strays(self.kubectl)
        for name, stranger in self.model.strangers.items():
            assert services(self.kubectl, name) == [stranger], f"Service {name} is as its maker left it"
        found = differences(self._comparable(end_state(self.kubectl)), self._comparable(end_state(fresh)))
        assert not found, "\n".join(found)
        return True

    def _comparable(self, state: EndState) -> EndState:
        """Leave out what depends on the way to a state, or on the engines of other deployments.

        Those that wait for a node go before a capture for ten minutes, those of the other namespace too. The capture
        then waits without a Job, or with one that was withdrawn.
        """
        for capture in filter(self.gives_way, self.model.captures):
            state[f"SpecDecodeCapture {capture}"].pop("status", None)
            for name, body in [*state.items()]:
                if (
                    isinstance(body, dict)
                    and (body.get("metadata", {}).get("labels") or {}).get(CAPTURE_LABEL) == capture
                ):
                    del state[name]
        return without_history(state)

    def gives_way(self, capture: str) -> bool:
        """Whether engines of another deployment may go before a capture: those of its own all have their places."""
        others = (wanted for name, wanted in self.model.objects.items() if name != capture)
        return not wants_engines(self.model.objects[capture].spec) and any(wants_engines(each.spec) for each in others)

    def _conditions_tell_the_truth(self) -> None:
        for name, wanted in self.model.objects.items():
            said = {each["type"]: each for each in self.kubectl.object("sdd", name)["status"]["conditions"]}
            is_invalid = INVALID.items() <= wanted.spec.items()
            assert said["Accepted"]["status"] == ("False" if is_invalid else "True"), said
            deployments = [
                each for each in self.kubectl.objects("deployments", OURS) if each["metadata"]["name"] == name
            ]
            running = sum(each["spec"]["replicas"] for each in deployments)
            launched = wanted.good is not None and name not in self.model.strangers and not wanted.spec["suspend"]
            assert running == (wanted.good["replicas"] if wanted.good and launched else 0)

    def _calm(self) -> None:
        """End all faults, and wait until every object was looked at, and nothing that passes is in its way."""
        self.world.proxy.faults = ()
        for name in self.model.objects:
            eventually(partial(self._is_settled, name), f"{name} is looked at", self.world.deadline_s)

    def _is_settled(self, name: str) -> bool:
        is_free = name in self.model.strangers or not is_held_up(self.kubectl, name)
        return is_seen(self.kubectl, name) and is_free

    def _restart(self) -> None:
        self.world.operator.kill()
        self.world.operator.start()

    def _draw(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.model.objects)))

    def all_are_valid(self) -> bool:
        """Whether the operator sees to all children: those of an invalid spec stay as they are found."""
        return all(each.spec == each.good for each in self.model.objects.values())

    def _note(self, *words: object) -> None:
        self.done.append(" ".join(map(str, words)))

    def _namespace(self) -> Kubectl:
        kubectl = self.world.kubectl.within(f"actions-{next(_numbers)}")
        kubectl.create_namespace()
        return kubectl


def apply(kubectl: Kubectl, name: str, spec: Body) -> None:
    """Apply a SpecDecodeDeployment."""
    body = {"apiVersion": API_VERSION, "kind": "SpecDecodeDeployment", "metadata": {"name": name}, "spec": spec}
    answer = kubectl.write(yaml.safe_dump(body))
    assert answer.returncode == 0, answer.stderr


def capture(kubectl: Kubectl, name: str) -> None:
    """Apply a SpecDecodeCapture of a deployment."""
    body = {"apiVersion": API_VERSION, "kind": "SpecDecodeCapture", "metadata": {"name": name}}
    answer = kubectl.write(yaml.safe_dump({**body, "spec": {"deployment": name}}))
    assert answer.returncode == 0, answer.stderr


def wants_engines(spec: Body) -> bool:
    """Whether a deployment is to have engines; none finds a node here."""
    return bool(spec["replicas"]) and not spec["suspend"]


def services(kubectl: Kubectl, name: str) -> list[Body]:
    """Return the Service of a name, if there is one."""
    return [each for each in kubectl.objects("services") if each["metadata"]["name"] == name]


def make_stranger(kubectl: Kubectl, name: str) -> Body:
    """Create a Service that is nobody's child; return it."""
    kubectl.must("create", "service", "clusterip", name, "--tcp=80")
    return kubectl.object("service", name)


def is_seen(kubectl: Kubectl, name: str) -> bool:
    """Whether the status speaks of the spec as it is."""
    body = kubectl.object("sdd", name)
    return bool(body["status"].get("observedGeneration") == body["metadata"]["generation"])


def is_held_up(kubectl: Kubectl, name: str) -> bool:
    """Whether its children could not be written: an object that becomes invalid then has none, and gets none."""
    conditions = kubectl.object("sdd", name)["status"].get("conditions", [])
    return any(each["type"] == "Ready" and each["reason"] in _HINDRANCES for each in conditions)


def strays(kubectl: Kubectl) -> list[str]:
    """What is owned by an object that is not there any more."""
    present = {each["metadata"]["uid"] for each in kubectl.objects("sdd,sdc")}
    kinds = "deployments,services,configmaps,poddisruptionbudgets,jobs"
    return [
        f"{each['kind']} {each['metadata']['name']}"
        for each in kubectl.objects(kinds, OURS)
        if not {owner["uid"] for owner in each["metadata"].get("ownerReferences", [])} <= present
    ]


def is_child_of(capture: str, body: Any) -> bool:
    """Whether a part of an end state is a child of a capture."""
    metadata = body.get("metadata", {}) if isinstance(body, dict) else {}
    return (metadata.get("labels") or {}).get(CAPTURE_LABEL) == capture


def without_history(state: EndState) -> EndState:
    """Leave out of an end state what tells of the way to it."""
    state.pop("templates")
    state.pop("pods")
    for name in [*state]:
        if name.startswith("PersistentVolumeClaim "):
            del state[name]  # what was captured outlives the capture, and is there before the next of its name
    for body in state.values():
        (body.get("metadata", {}).get("annotations") or {}).pop("deployment.kubernetes.io/revision", None)
        body.get("spec", {}).pop("strategy", None)  # a Deployment's: it says what is replaced just now
        conditions = body.get("status", {}).get("conditions", {})
        for type_ in _OF_HISTORY:
            conditions.pop(type_, None)
        for said in conditions.values():
            if said["reason"] == _WAITS:
                del said["message"]
        for said in (body.get("status", {}), *conditions.values()):
            said.pop("observedGeneration", None)
    return state


def repeated_status_writes(calls: Sequence[Call]) -> list[str]:
    """Return the status writes that say what the write before them said, of the same object."""
    last: defaultdict[tuple[str, str, str], str] = defaultdict(str)
    found = []
    for call in [*calls]:
        if call.resource.endswith("/status") and call.status == 200 and not call.cut:
            key = (call.resource, call.namespace, call.name)
            if last[key] == call.digest:
                found.append(str(call))
            last[key] = call.digest
    return found
