"""What must hold whatever happened, judged by what an API server shows and documents promise.

Nothing here knows how the operator works. An oracle takes a record, and returns what is wrong with it.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from hunt.records import (
    SQUATTER,
    Body,
    Call,
    Life,
    OperatorLife,
    Record,
    children,
    conditions,
    contents,
    foreign,
    identity,
    name_of,
    parents,
    ready,
    versions,
)

_SAME_CALL: Final = 3
"""So often one call that reads may be made while nothing happens; none may that writes."""

_SAME_CALL_CLUSTER: Final = 12
"""The same of calls about no namespace: watches end and begin anew."""

_SAME_REFUSED: Final = 25
"""So often one call may be refused in one beat."""

_SAME_STATUS: Final = 3
"""So often the status of one object may be written as it was, by an operator that was killed and cannot know."""

_MEMORY_MIB: Final = 60
"""So much an operator may take more at the end of a round than after its start."""

_WORKLOADS: Final = ("Deployment", "LeaderWorkerSet")
_OF_HISTORY: Final = ("-last-good",)
"""Children that remember: what is in them depends on what was before."""

_ASSIGNED: Final = {
    "strategy",
    "clusterIP",
    "clusterIPs",
    "controller-uid",
    "batch.kubernetes.io/controller-uid",
    "volumeName",
}
"""Fields that the API server and its controllers fill in, and the strategy, which says what is replaced just now."""


@dataclass(frozen=True)
class Finding:
    """One promise that was broken."""

    oracle: str
    where: str
    """Namespace; empty for the operator itself."""

    what: str

    def __str__(self) -> str:
        return f"[{self.oracle}] {self.where}: {self.what}" if self.where else f"[{self.oracle}] {self.what}"


def judge(record: Record, without: frozenset[str] = frozenset()) -> list[Finding]:
    """Return all that is wrong with a round, by the oracles that are asked."""
    found = []
    for name, oracle in OF_A_LIFE.items():
        if name not in without:
            found += [Finding(name, life.namespace, what) for life in record.lives for what in oracle(life)]
    if "alive" not in without:
        found += [Finding("alive", "", what) for what in alive(record.operator)]
    if "calls" not in without:
        found += [Finding("calls", "", what) for what in _repeated(record.calls, _SAME_CALL_CLUSTER)]
    return found


_EDITS_REPORTED: Final = 5
"""Edits in a sequence from which RepairsUndone is accepted.

The operator reports it after five repairs of one child in half an hour. Edits are counted for all children and times.
"""


def fresh(life: Life) -> Iterator[str]:
    """1: the end is what a fresh apply of the same spec comes to."""
    ends, freshes = parents(life.end), parents(life.fresh)
    if not freshes or not ends:
        return
    end, new = ends[0], freshes[0]
    serves = ready(new) == "True"
    said, expected = _said(end, whole=serves), _said(new, whole=serves)
    edits = sum(step.kind in {"drift", "strip"} for step in life.sequence.steps)
    if edits >= _EDITS_REPORTED and said.get("ChildrenInSync") == ("False", "RepairsUndone"):
        del said["ChildrenInSync"]
    if said != expected:
        yield f"conditions differ from a fresh apply: {_difference(said, expected)}"
    if serves:
        yield from _different_children(life)


def kept(life: Life) -> Iterator[str]:
    """2: nothing is lost, doubled or left behind, and what is others' stays as it is."""
    for parent in parents(life.end) if not life.wrong else ():
        yield from _wrong_owners(parent, life.end)
        if ready(parent) == "True":
            yield from _wrong_counts(parent, life.end)
    for each in children(life.left):
        if each["kind"] != "PersistentVolumeClaim":  # a capture's data outlives it
            yield f"{each['kind']} {name_of(each)} is left after all of ours was deleted"
    for each in _ours(life.left):
        yield f"{each['kind']} {name_of(each)} cannot be deleted"
    yield from _foreign_changes(life)


def truth(life: Life) -> Iterator[str]:
    """3: conditions tell the truth as soon as all has come to rest."""
    for moment in life.moments:
        if "terminate" not in moment.wrong:
            yield from (f"after beat {moment.beat} ({moment.step.kind}): {lie}" for lie in lies(moment.objects))


def quiet(life: Life) -> Iterator[str]:
    """4: while nothing happens nothing is written."""
    if _waits_for_others(life):
        return
    # Controllers write the status of children: of these only what people write counts.
    before, after = (
        contents(each for each in objects if each["kind"] != "Pod") | versions(_ours(objects))
        for objects in (life.end, life.later)
    )
    for who in sorted(before | after):
        if before.get(who) != after.get(who):
            yield f"{who[0]} {who[1]} did not stand still"


def calls(life: Life) -> Iterator[str]:
    """5: no call is repeated for ever."""
    if not _waits_for_others(life):
        yield from _repeated(life.calls, _SAME_CALL)
    for target in sorted({target for target, _ in life.statuses}):
        written = [digest for each, digest in life.statuses if each == target]
        if (same := sum(one == two for one, two in itertools.pairwise(written))) > _SAME_STATUS:
            yield f"{same} times the status of {target} was written as it was"
    for moment in life.moments:
        for call, count in Counter(moment.calls).items():
            if count > _SAME_REFUSED and call.code >= HTTPStatus.BAD_REQUEST:
                yield f"{count} times in beat {moment.beat}, refused: {call.verb} {call.target} ({call.code})"


def _waits_for_others(life: Life) -> bool:
    """Whether a capture is not over: it waits for engines of other namespaces, and goes on when these serve."""
    return any(
        conditions(each).get("Succeeded", {}).get("status") not in {"True", "False"}
        for each in parents(life.end, "SpecDecodeCapture")
    )


def _ours(objects: tuple[Body, ...]) -> list[Body]:
    return parents(objects) + parents(objects, "SpecDecodeCapture")


def _repeated(found: list[Call], most: int) -> Iterator[str]:
    for call, count in Counter(found).items():
        if count > most or call.writes:
            yield f"{count} times while nothing happened: {call.verb} {call.target} (answered {call.code})"


def alive(operator: OperatorLife) -> Iterator[str]:
    """6: the operator lives, fails at nothing unforeseen, and does not grow."""
    yield from (f"the operator ended by itself: {how}" for how in operator.ended)
    for error in sorted({each for each in _tracebacks(operator.log) if not _FORESEEN.search(each)}):
        yield f"its log has a traceback: {error}"
    memory = operator.memory_mib
    if memory and memory[-1] - memory[0] > _MEMORY_MIB:
        yield f"it grew from {memory[0]:.0f} to {memory[-1]:.0f} MiB"


def _tracebacks(log: str) -> Iterator[str]:
    """Yield what each traceback in a log ends with."""
    lines = iter(log.splitlines())
    for line in lines:
        if line.strip() == "Traceback (most recent call last):":
            margin = len(line) - len(line.lstrip())
            yield next((each.strip()[:200] for each in lines if each[margin : margin + 1].strip()), "")


_FORESEEN: Final = re.compile(
    r"cluster\.errors\.|cluster\.client\._PassingError|aiohttp|Timeout|Connection|ClientError|APIError|kopf"
)
"""What an API server's refusal or absence looks like in a log, that of the last try beside what came of all."""


def told(life: Life) -> Iterator[str]:
    """7: a bad spec is refused by the API server, or told with the field that is wrong."""
    for moment in life.moments:
        state = moment.step.state
        if state is not None and not state.legal and not moment.refused:
            yield f"beat {moment.beat}: the API server took what its schema refuses: {state}"
        for parent in parents(moment.objects):
            said = conditions(parent)
            if said.get("Stalled", {}).get("status") != "True" or moment.wrong:
                continue
            message = said.get("Ready", {}).get("message", "")
            if not _names_a_field(message, parent["spec"]):
                yield f"beat {moment.beat}: Stalled, and no field is named: {message!r}"


def whole(life: Life) -> Iterator[str]:
    """8: a bad spec changes nothing: what served goes on, and nothing is half-created."""
    before: tuple[Body, ...] = ()
    wrong: frozenset[str] = frozenset()
    for moment in life.moments:
        after, wrong = moment.objects, wrong | moment.wrong  # what is healed changes children, too
        stalled = [each for each in parents(after) if conditions(each).get("Stalled", {}).get("status") == "True"]
        refused = moment.refused or stalled
        if moment.step.kind == "apply" and refused and wrong <= {"squat"}:
            was, now = (
                {identity(each): _content(each) for each in children(objects) if not _tells(each)}
                for objects in (before, after)
            )
            if (lost := sorted(set(was) - set(now))) or (made := sorted(set(now) - set(was))):
                yield (
                    f"beat {moment.beat}: a refused spec removed {lost}"
                    if lost
                    else (f"beat {moment.beat}: a refused spec made {made}")
                )
            yield from (
                f"beat {moment.beat}: a refused spec changed {who}"
                for who in was
                if who in now and was[who] != now[who]
            )
        before, wrong = after, moment.wrong


OF_A_LIFE: Final[dict[str, Callable[[Life], Iterator[str]]]] = {
    "fresh": fresh,
    "kept": kept,
    "truth": truth,
    "quiet": quiet,
    "calls": calls,
    "told": told,
    "whole": whole,
}
"""Oracles of one namespace by name; `alive` is the operator's own."""

ORACLES: Final = (*OF_A_LIFE, "alive")


def lies(objects: tuple[Body, ...]) -> Iterator[str]:
    """Yield what the status of an object says that is not so."""
    for parent in parents(objects):
        if "deletionTimestamp" not in parent["metadata"]:
            yield from _lies_of(parent, objects)
    for each in parents(objects, "SpecDecodeCapture"):
        if any(said["reason"] == "InternalError" for said in conditions(each).values()):
            yield f"the operator fails on the capture {name_of(each)}"


def _lies_of(parent: Body, objects: tuple[Body, ...]) -> Iterator[str]:
    if failed := [name for name, each in conditions(parent).items() if each["reason"] == "InternalError"]:
        yield f"the operator fails on it, says its condition {failed[0]}"
    status, said, generation = parent.get("status", {}), conditions(parent), parent["metadata"]["generation"]
    if status.get("observedGeneration") != generation:
        yield f"the status is of generation {status.get('observedGeneration')}, the object of {generation}"
        return
    if old := [name for name, each in said.items() if each.get("observedGeneration", generation) != generation]:
        yield f"conditions of an earlier generation: {', '.join(old)}"
    true = [name for name in ("Ready", "Reconciling", "Stalled") if said.get(name, {}).get("status") == "True"]
    if len(true) != 1:
        yield f"exactly one of Ready, Reconciling and Stalled should be True: {true}"
    workloads = [each for each in objects if each["kind"] in _WORKLOADS and _owned_by(each, parent)]
    counted = sum(each.get("status", {}).get("readyReplicas", 0) for each in workloads)
    if status.get("readyReplicas", 0) != counted:
        yield f"status.readyReplicas is {status.get('readyReplicas')}, the workload has {counted}"
    wanted = 0 if parent["spec"].get("suspend") else parent["spec"].get("replicas", 1)
    serving = len(_serving_pods(objects))
    captured = parents(objects, "SpecDecodeCapture")
    if ready(parent) == "True" and serving != wanted and not (captured and serving):
        yield f"Ready is True with {serving} ready pods, {wanted} are asked for"
    if serving == 0 and said.get("Available", {}).get("status") == "True":
        yield "Available is True, and no pod is ready"


def _serving_pods(objects: tuple[Body, ...]) -> list[Body]:
    """Return pods of workloads that are ready and stay."""
    found = []
    for pod in objects:
        owners = [owner["kind"] for owner in pod["metadata"].get("ownerReferences", [])]
        if pod["kind"] == "Pod" and "deletionTimestamp" not in pod["metadata"] and "Job" not in owners:
            found += [pod] if conditions(pod).get("Ready", {}).get("status") == "True" else []
    return found


def _foreign_changes(life: Life) -> Iterator[str]:
    for moment in life.moments:
        if "squat" in moment.wrong and not any(map(_is_squatter, moment.objects)):
            yield f"beat {moment.beat}: the ConfigMap of somebody else was changed or deleted"
    if life.wrong:
        return
    now = contents(foreign(life.later)) if life.later else life.foreign  # with its namespace all of it may go
    for who, version in life.foreign.items():
        if now.get(who) != version:
            yield f"{who[0]} {who[1]}, which is somebody else's, was {'changed' if who in now else 'deleted'}"


def _owned_by(body: Body, parent: Body) -> bool:
    return any(each["uid"] == parent["metadata"]["uid"] for each in body["metadata"].get("ownerReferences", []))


def _wrong_owners(parent: Body, objects: tuple[Body, ...]) -> Iterator[str]:
    living = {each["metadata"]["uid"] for each in _ours(objects)}
    for each in children(objects):
        owners = [owner["uid"] for owner in each["metadata"].get("ownerReferences", [])]
        if each["kind"] != "PersistentVolumeClaim" and (len(owners) != 1 or owners[0] not in living):
            yield f"{each['kind']} {name_of(each)} is not owned by {name_of(parent)} alone"


def _wrong_counts(parent: Body, objects: tuple[Body, ...]) -> Iterator[str]:
    workloads = [name_of(each) for each in objects if each["kind"] in _WORKLOADS and _owned_by(each, parent)]
    if len(workloads) != 1:
        yield f"{name_of(parent)} is Ready with workloads {workloads}"


def _different_children(life: Life) -> Iterator[str]:
    end = {identity(each): _content(each) for each in children(life.end) if not _remembers(each)}
    new = {identity(each): _content(each) for each in children(life.fresh) if not _remembers(each)}
    if lacking := sorted(set(new) - set(end)):
        yield f"{lacking} is lacking, which a fresh apply makes"
    if left_over := sorted(set(end) - set(new)):
        yield f"{left_over} is left over, which a fresh apply does not make"
    for who in sorted(set(end) & set(new)):
        if end[who] != new[who]:
            yield f"{who[0]} {who[1]} differs from a fresh apply: {_difference(end[who], new[who])}"


def _tells(body: Body) -> bool:
    """Whether a child is made for a spec that is refused, too: what is planned, and Jobs that read models."""
    return body["kind"] == "Job" or name_of(body).endswith("-plan")


def _is_squatter(body: Body) -> bool:
    return body["kind"] == "ConfigMap" and bool(body.get("data") == SQUATTER)


def _remembers(body: Body) -> bool:
    """Whether a child depends on what was before, or on what others do now, as those of captures do."""
    return name_of(body).endswith(_OF_HISTORY) or body["kind"] in {"PersistentVolumeClaim", "Job"}


def _said(parent: Body, *, whole: bool) -> Body:
    """Return conditions; only the summary where earlier engines may go on serving."""
    said = {name: (each["status"], each["reason"]) for name, each in conditions(parent).items()}
    return said if whole else {name: said.get(name) for name in ("Ready", "Stalled", "Reconciling", "Accepted")}


def _content(body: Body) -> Any:
    """Return what somebody wished for an object: without who, when and where."""
    metadata = body["metadata"]
    kept = {name: part for name, part in body.items() if name not in {"status", "metadata"}}
    owners = [(each["kind"], each["name"]) for each in metadata.get("ownerReferences", [])]
    annotations = {name: "" for name in metadata.get("annotations", {}) if "specdecode.io" in name}
    text = json.dumps({**kept, "labels": metadata.get("labels"), "annotations": annotations, "owners": owners})
    for uid in {each["uid"] for each in metadata.get("ownerReferences", [])}:
        text = text.replace(uid, "UID")
    return _without(json.loads(text.replace(metadata["namespace"], "NAMESPACE")))


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without(part) for name, part in value.items() if name not in _ASSIGNED and "hash" not in name}
    return [_without(each) for each in value] if isinstance(value, list) else value


def _difference(one: Any, other: Any, path: str = "") -> str:
    """Say where two values differ first."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted({*one, *other}):
            if one.get(name) != other.get(name):
                return _difference(one.get(name), other.get(name), f"{path}.{name}")
    return f"{path} is {str(one)[:160]}, afresh {str(other)[:160]}"


def _names_a_field(message: str, spec: Body) -> bool:
    """Whether a message speaks of a part of the spec."""
    return "spec." in message or any(name in message for name in _names(spec))


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield name
            yield from _names(part)
