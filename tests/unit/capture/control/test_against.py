"""A capture may be held against a golden one: when it may start, what its pod is given, and what its status says."""

import json
from typing import Any

import pytest

from specdecode_operator.capture.comparison.regression import AGAINST_MOUNT, AGAINST_VARIABLE
from tests.support.capture_decisions import after, decided, words
from tests.support.captures import capture, capture_pod, capture_spec, ended, golden, job, surroundings
from tests.support.objects import Body

JUDGED = capture_spec(against={"capture": "golden", "maxLossPercent": {"goodput": 3}})
SUMMARY = {"requests": {"sent": 8, "completed": 8}}


def _load(body: Body) -> tuple[Body, list[Body]]:
    pod = body["spec"]["template"]["spec"]
    return pod["containers"][0], pod["volumes"]


def test_the_golden_files_are_read_where_they_are() -> None:
    decision, status = decided(capture(JUDGED), surroundings(golden=golden()))
    assert decision.writes.job is not None
    load, volumes = _load(decision.writes.job)
    told = json.loads(next(each["value"] for each in load["env"] if each["name"] == AGAINST_VARIABLE))
    assert (told["capture"], told["folder"]) == ("golden", "default/golden")
    assert told["limits"] == {"goodput": 3, "acceptance": 10, "step_time": 5, "latency": 20}
    mount = next(each for each in load["volumeMounts"] if each["mountPath"] == AGAINST_MOUNT)
    assert mount["readOnly"] is True
    volume = next(each for each in volumes if each["name"] == mount["name"])
    assert volume["persistentVolumeClaim"] == {"claimName": "golden-capture", "readOnly": True}
    assert words(status)["Holds"] == ("Unknown", "NotJudged")


def test_one_claim_for_both_is_one_volume() -> None:
    spec = {**JUDGED, "storage": {"persistentVolumeClaim": {"claimName": "shared"}}}
    bound = {"metadata": {"name": "shared"}, "spec": {}, "status": {"phase": "Bound"}}
    seen = surroundings(golden=golden(claim="shared"), claim=bound)
    decision, _ = decided(capture(spec), seen)
    assert decision.writes.job is not None
    load, volumes = _load(decision.writes.job)
    claims = [each for each in volumes if "persistentVolumeClaim" in each]
    assert [each["persistentVolumeClaim"]["claimName"] for each in claims].count("shared") == 1
    mounts = {each["mountPath"]: each["name"] for each in load["volumeMounts"]}
    assert mounts[AGAINST_MOUNT] == mounts["/capture"]


def test_a_capture_without_one_has_neither_file_nor_condition() -> None:
    decision, status = decided(capture(), surroundings(golden=golden()))
    assert decision.writes.job is not None
    load, _ = _load(decision.writes.job)
    assert AGAINST_VARIABLE not in {each["name"] for each in load["env"]}
    assert "Holds" not in words(status)


OTHER_LOAD = {"phases": [{"name": "short", "pattern": "Closed", "concurrency": 2, "requests": 9}]}


@pytest.mark.parametrize(
    ("seen", "reason", "is_permanent", "message"),
    [
        (None, "GoldenNotFound", False, "there is no SpecDecodeCapture of this name"),
        (capture(name="golden"), "GoldenNotReady", False, "it has not ended"),
        (golden(succeeded="False"), "GoldenFailed", True, "it failed (EngineExited): take another golden capture"),
        (golden(claim=None), "GoldenFailed", True, "take another golden capture"),
        (golden(of=capture_spec(workload=OTHER_LOAD)), "GoldenDiffers", True, "it has another workload"),
        (golden(of=capture_spec(seed=7)), "GoldenDiffers", True, "its seed is 7, not 0"),
        (golden(of=capture_spec(arms=[{"name": "a"}, {"name": "b"}])), "GoldenDiffers", True, "it has several arms"),
        (golden(of={"deployment": 7}), "GoldenDiffers", True, "this operator cannot read its spec"),
    ],
)
def test_a_golden_capture_that_cannot_be_one_takes_no_gpu(
    seen: Body | None, reason: str, is_permanent: bool, message: str
) -> None:
    decision, status = decided(capture(JUDGED), surroundings(golden=seen))
    assert decision.writes.job is None
    assert words(status)["Accepted"] == ("False" if is_permanent else "Unknown", reason)
    said = next(each.message for each in status.conditions if each.type == "Accepted")
    assert said.startswith("spec.against.capture: golden: ")
    assert message in said


def _finished(regression: Any) -> Body:
    said = {"summary": SUMMARY, "regression": regression}
    pod = capture_pod(phase="Succeeded", containerStatuses=[ended("load", 0, said)])
    return after(capture(JUDGED), surroundings(job=job("Complete"), pods=[pod]))


@pytest.mark.parametrize(
    ("verdict", "status"),
    [("Holds", "True"), ("Regressed", "False"), ("Inconclusive", "Unknown"), ("NotComparable", "Unknown")],
)
def test_the_condition_says_whether_it_holds_and_stays(verdict: str, status: str) -> None:
    done = _finished({"against": "golden", "verdict": verdict, "message": "goodput 90 after 100 tokens/s"})
    # The operator starts anew, and the Job is gone.
    _, found = decided(done, surroundings())
    assert words(found)["Holds"] == (status, verdict)
    assert words(found)["Succeeded"] == ("True", "Captured")
    assert found.regression is not None
    said = next(each.message for each in found.conditions if each.type == "Holds")
    assert said == "against golden: goodput 90 after 100 tokens/s"


@pytest.mark.parametrize("regression", [None, 7, {}, {"against": "g", "verdict": "Great", "message": ""}])
def test_a_pod_that_says_nothing_of_the_kind_has_judged_nothing(regression: Any) -> None:
    _, found = decided(_finished(regression), surroundings())
    assert words(found)["Holds"] == ("Unknown", "NotJudged")
    assert found.regression is None
