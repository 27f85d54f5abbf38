"""Each oracle sees what it is for, and nobody else does: without it the fault is missed."""

import dataclasses

import pytest

from hunt.oracles import ORACLES, judge, lies
from hunt.records import Call, Life, Record
from hunt.states import Change, State
from hunt.steps import Sequence, Step
from tests.unit.hunt.made_up import (
    GOOD,
    OWNER,
    STRANGER,
    Body,
    body,
    condition,
    life,
    parent,
    pod,
    record,
    summary,
    workload,
)

WRITE = Call("patch", "specdecodedeployments/hunted/status", 200)
READ = Call("get", "configmaps/hunted-plan", 200)
ILLEGAL = State("llama-8b-ngram", (Change(("replicas",), -1, legal=False),))
STALLED = summary("False", "False", "True", "spec.serving.port: 7 is taken")
TRACEBACK = """\
[12:00] a/b: TypeError: no; next try in 1 s
  Traceback (most recent call last):
    File "queue.py", line 73, in _run_worker
      await work(key)
  TypeError: no
[12:01] all is well
"""


def moved(found: Body) -> Body:
    return {**found, "metadata": {**found["metadata"], "resourceVersion": "2"}}


def refused(before: tuple[Body, ...], after: tuple[Body, ...]) -> Life:
    """A life in which a spec is refused after another served."""
    first, second = life(before), life(after)
    return life(after, moments=[*first.moments, *second.moments], fresh=())


def shared() -> Body:
    """A child that somebody else owns, too."""
    found = body("PodDisruptionBudget", "two")
    found["metadata"]["ownerReferences"].append({**OWNER, "uid": "somebody"})
    return found


GROWN = [(100.0, 300.0), (100.0, 110.0, 300.0), (100.0, 300.0, 310.0)]
SERVED = (workload(), pod(), STRANGER)
BAD = (parent(STALLED), *SERVED)
SPOILT: dict[str, list[Record]] = {
    "fresh": [
        record(life(fresh=(*GOOD, body("PodDisruptionBudget", "hunted", spec={"minAvailable": 1})))),
        record(life(fresh=tuple(each for each in GOOD if each["kind"] != "Service"))),
        record(life(fresh=(*GOOD[:3], body("Service", "hunted", spec={"type": "NodePort"}), STRANGER))),
        record(life(fresh=(parent([*GOOD[0]["status"]["conditions"], *summary("True", "x", "x")[1:2]]), *GOOD[1:]))),
    ],
    "kept": [
        record(life(left=(STRANGER, body("Service", "hunted")))),
        record(life(left=(STRANGER, parent()))),
        record(life(later=GOOD[:-1])),
        record(life(later=(*GOOD[:-1], {**STRANGER, "data": {"a": "c"}}))),
        record(life((*GOOD, body("PodDisruptionBudget", "two", owner=None)), fresh=())),
        record(life((*GOOD, body("PodDisruptionBudget", "two", owner={**OWNER, "uid": "gone"})), fresh=())),
        record(life((*GOOD, shared()), fresh=())),
        record(life((*GOOD, body("Deployment", "two", spec={}, status={})), fresh=())),
        record(life((parent(ready=0, suspend=True), *GOOD[3:]), fresh=())),
        record(life(moment={"wrong": frozenset({"squat"})})),
    ],
    "truth": [
        record(life((parent(), workload(1), pod("False"), *GOOD[3:]))),
        record(life((parent(ready=1), workload(0), *GOOD[2:]))),
        record(life((parent(summary("True", "True", "False")), *GOOD[1:]), fresh=())),
        record(life((parent(replicas=2), *GOOD[1:]))),
        record(life((parent(suspend=True), *GOOD[1:]))),
    ],
    "quiet": [
        record(life(later=(moved(GOOD[0]), *GOOD[1:]))),
        record(life(later=(GOOD[0], {**GOOD[1], "spec": {"replicas": 7}}, *GOOD[2:]))),
    ],
    "calls": [
        record(life(calls=[WRITE])),
        record(life(calls=[READ] * 4)),
        dataclasses.replace(record(), calls=[READ] * 13),
        record(life(moment={"calls": (Call("patch", "services/hunted", 403),) * 30})),
        record(life(statuses=[("specdecodecaptures/measured-1", "a")] * 5)),
    ],
    "alive": [record(ended=("exit status 3",)), record(log=TRACEBACK), *(record(memory=each) for each in GROWN)],
    "told": [
        record(life(step=Step("apply", ILLEGAL))),
        record(life((parent(summary("False", "False", "True", "no")), *SERVED), fresh=(), step=Step("wait"))),
    ],
    "whole": [
        record(refused(GOOD, (BAD[0], *GOOD[2:]))),
        record(refused(GOOD, (BAD[0], workload(), body("Service", "hunted", spec={"x": 1}), *GOOD[2:3], STRANGER))),
    ],
}


def test_healthy_lifecycle_has_no_findings() -> None:
    assert judge(record()) == []
    served, refused_later = life(), life(moment={"refused": "replicas: must be 0 or more"}, step=Step("apply", ILLEGAL))
    assert judge(record(life(moments=[*served.moments, *refused_later.moments]))) == []


def test_every_oracle_has_a_case() -> None:
    assert set(SPOILT) == set(ORACLES)


@pytest.mark.parametrize(("oracle", "spoilt"), [(name, each) for name, found in SPOILT.items() for each in found])
def test_oracle_finds_its_faults(oracle: str, spoilt: Record) -> None:
    found = judge(spoilt)
    assert oracle in {finding.oracle for finding in found}, found


@pytest.mark.parametrize("oracle", ORACLES)
def test_each_oracle_finds_a_fault_that_no_other_finds(oracle: str) -> None:
    missed = [each for each in SPOILT[oracle] if not judge(each, frozenset({oracle}))]
    assert missed, "no fault is this oracle's alone"


@pytest.mark.parametrize("error", ["errors.ClusterError: HTTP 503", "client._PassingError: patch jobs.batch: HTTP 429"])
def test_traceback_of_an_api_server_error_is_no_finding(error: str) -> None:
    log = TRACEBACK.replace("TypeError: no", f"specdecode_operator.cluster.{error}")
    assert judge(record(log=log)) == []


def test_children_may_change_when_healed_under_a_refused_spec() -> None:
    gone = (parent(STALLED, ready=0), STRANGER)
    held, healed = refused(GOOD, gone).moments
    assert {finding.oracle for finding in judge(record(life(gone, moments=[held, healed], fresh=())))} == {"whole"}
    held = dataclasses.replace(held, wrong=frozenset({"finalize-parent"}))
    assert judge(record(life(gone, moments=[held, healed], fresh=()))) == []


def test_waiting_capture_may_be_updated() -> None:
    capture = body("SpecDecodeCapture", "measured-1", owner=None, spec={}, status={"conditions": []})
    assert judge(record(life((*GOOD, capture), later=(*GOOD, moved(capture)), calls=[WRITE, WRITE]))) == []


def leaving(found: Body) -> Body:
    return {**found, "metadata": {**found["metadata"], "deletionTimestamp": "now"}}


OLD = [{**each, "observedGeneration": 0} for each in summary("True", "False", "False")]
BORROWER = body("SpecDecodeCapture", "measured-1", owner=None, spec={}, status={"conditions": []})
AVAILABLE = [*summary("False", "True", "False"), condition("Available", "True")]


@pytest.mark.parametrize(
    ("objects", "said"),
    [
        ((parent(OLD), *GOOD[1:]), "conditions of an earlier generation: Ready, Reconciling, Stalled"),
        ((*GOOD[:2], leaving(pod())), "Ready is True with 0 ready pods, 1 are asked for"),
        ((parent(AVAILABLE, ready=0), workload(0), pod("False")), "Available is True, and no pod is ready"),
        ((parent(AVAILABLE, ready=0), workload(0), BORROWER), "Available is True, and no pod is ready"),
        ((parent(ready=0), workload(0), BORROWER), "Ready is True with 0 ready pods, 1 are asked for"),
    ],
    ids=["old conditions", "a pod that goes", "available without a pod", "available while lent", "ready while lent"],
)
def test_false_status_gives_exactly_one_finding(objects: tuple[Body, ...], said: str) -> None:
    assert list(lies(objects)) == [said]


@pytest.mark.parametrize(("edits", "oracles"), [(5, set()), (4, {"fresh"})])
def test_report_of_another_writer_is_accepted_after_five_edits(edits: int, oracles: set[str]) -> None:
    reported = parent([*GOOD[0]["status"]["conditions"], condition("ChildrenInSync", "False", "RepairsUndone")])
    edited = life((reported, *GOOD[1:]))
    edited.sequence = Sequence((*edited.sequence.steps, *[Step("drift", number=n) for n in range(edits)]))
    assert {finding.oracle for finding in judge(record(edited))} == oracles
