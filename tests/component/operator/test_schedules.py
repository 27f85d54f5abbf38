"""Captures by the clock, against a real API server and a real operator."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml

from specdecode_operator.api.deployment import CaptureSchedule, Key, ScheduleStatus
from specdecode_operator.capture.schedules import ObservedSchedules, decide_schedules
from specdecode_operator.cluster.resources import MANAGED_BY_LABEL, MANAGER
from tests.component.operator.test_captures import assert_stays, make_claim
from tests.support.conditions import wait_for
from tests.support.kubectl import Kubectl
from tests.support.objects import tiny_cpu
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import eventually

OF_SCHEDULE = "--selector=specdecode.io/schedule=often"
NOT_TODAY = "0 0 29 2 *"
WORKLOAD = {"phases": [{"name": "short", "pattern": "Closed", "concurrency": 2, "requests": 8}]}


@pytest.fixture(autouse=True)
def _running(operator: OperatorProcess) -> None:
    pass


def often(**fields: Any) -> dict[str, Any]:
    # No engine finds a node here, and a capture that kept engines would wait for theirs.
    borrows = {"deploymentDuringCapture": "Suspend", "borrowTimeoutSeconds": 1800}
    template = {"workload": WORKLOAD, "storage": {"size": "1Gi"}, **borrows}
    return {"name": "often", "schedule": "* * * * *", "template": template, **fields}


def deploy(kubectl: Kubectl, **schedule: Any) -> None:
    make_claim(kubectl, "tiny-models")
    body = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "metadata": {"name": "tiny"}}
    answer = kubectl.write(yaml.safe_dump({**body, "spec": tiny_cpu(captures=[often(**schedule)])}))
    assert answer.returncode == 0, answer.stderr


def test_scheduled_capture_starts_each_minute_and_its_claim_outlives_the_deployment(kubectl: Kubectl) -> None:
    deploy(kubectl, queue={"name": "gpus", "priorityClass": "measurements"})
    first, *_ = eventually(lambda: kubectl.objects("sdc", OF_SCHEDULE), "a capture is due")
    (job, *_) = eventually(lambda: kubectl.objects("jobs"), "Kueue has a Job to start")
    queue = {"kueue.x-k8s.io/queue-name": "gpus", "kueue.x-k8s.io/priority-class": "measurements"}
    assert queue.items() <= job["metadata"]["labels"].items()
    assert job["spec"]["suspend"], "nobody else starts it"
    at = first["metadata"]["annotations"]["specdecode.io/scheduled-at"]
    assert first["spec"]["deployment"] == "tiny"
    assert first["spec"]["workload"]["phases"][0]["requests"] == 8
    assert first["metadata"]["ownerReferences"][0]["kind"] == "SpecDecodeDeployment"

    def told() -> dict[str, str] | None:
        (status,) = kubectl.object("sdd", "tiny")["status"]["captures"]
        assert status["nextScheduleTime"] > status["lastScheduleTime"] >= at, status
        return status

    status = eventually(told, "the status speaks of the capture")
    assert status["name"] == "often"
    eventually(lambda: kubectl.objects("pvc", OF_SCHEDULE), "the capture has a claim")
    kubectl.must("delete", "sdd", "tiny")
    eventually(lambda: not kubectl.objects("sdc", OF_SCHEDULE), "captures go")
    claims = kubectl.objects("pvc", OF_SCHEDULE)
    assert claims, "their claims stay"
    for claim in claims:
        assert_stays(kubectl, claim["metadata"]["name"])


@pytest.mark.long
def test_capture_of_other_owner_with_a_due_name_is_not_changed(kubectl: Kubectl) -> None:
    """It is of the same deployment and has our labels, so neither the API server nor the guard would protect it."""
    deploy(kubectl, suspend=True)
    uid = kubectl.object("sdd", "tiny")["metadata"]["uid"]
    now = datetime.now(UTC)
    for minutes in (1, 2, 3):
        body = next_capture(kubectl.namespace, uid, now + timedelta(minutes=minutes))
        theirs = {name: value for name, value in body["metadata"].items() if name != "ownerReferences"}
        kubectl.must("create", "--filename=-", stdin=json.dumps({**body, "metadata": theirs}))
    before = {each["metadata"]["name"]: each["metadata"]["uid"] for each in kubectl.objects("sdc")}
    deploy(kubectl)

    def missed() -> str:
        events = kubectl.objects("events", "--field-selector=reason=MissedSchedule")
        return next((each["message"] for each in events), "")

    assert "exists and does not belong to this object" in eventually(missed, "the time is told as missed")
    after = kubectl.objects("sdc")
    assert {each["metadata"]["name"]: each["metadata"]["uid"] for each in after} == before
    assert not any("ownerReferences" in each["metadata"] for each in after)


def next_capture(namespace: str, uid: str, now: datetime) -> dict[str, Any]:
    """The capture that the schedule makes at the minute before a time."""
    schedule = CaptureSchedule.model_validate(often())
    clock = f"{schedule.schedule} {schedule.time_zone}"
    seen = ScheduleStatus(name=schedule.name, schedule=clock, since="2026-01-01T00:00:00Z")
    (due,) = decide_schedules(Key(namespace, "tiny"), uid, [schedule], ObservedSchedules((), (), [seen]), now).create
    return due.body


def leave_claim(kubectl: Kubectl, capture: str, **labels: str) -> None:
    """A claim as a capture of the schedule leaves it that is gone."""
    of = {"capture": capture, "captured-deployment": "tiny", "schedule": "often", **labels}
    body = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {
            "name": f"{capture}-capture",
            "labels": {MANAGED_BY_LABEL: MANAGER} | {f"specdecode.io/{name}": value for name, value in of.items()},
        },
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    kubectl.must("create", "--filename=-", stdin=yaml.safe_dump(body))


def test_failed_captures_do_not_evict_published_claims_from_retention(kubectl: Kubectl) -> None:
    deploy(kubectl, schedule=NOT_TODAY, retention={"count": 2, "failedCount": 1})
    for number in (1, 2, 3):
        leave_claim(kubectl, f"good-{number}", published="true")
    for number in (4, 5, 6):
        leave_claim(kubectl, f"failed-{number}")

    def kept() -> set[str]:
        # Nothing takes the protection of a claim away where no pod was ever bound to it.
        claims = kubectl.objects("pvc", "--selector=specdecode.io/capture")
        return {each["metadata"]["name"] for each in claims if "deletionTimestamp" not in each["metadata"]}

    stay = {"good-2-capture", "good-3-capture", "failed-6-capture"}
    eventually(lambda: kept() == stay, "the oldest go, of each kind by itself")


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({"schedule": "61 * * * *"}, "spec.captures[0].schedule: 61 * * * *"),
        ({"timeZone": "Europe/Atlantis"}, "spec.captures[0].timeZone: Europe/Atlantis"),
    ],
)
def test_invalid_schedule_or_time_zone_is_refused_with_its_field(
    kubectl: Kubectl, schedule: dict[str, Any], words: str
) -> None:
    deploy(kubectl, **schedule)
    assert words in wait_for(kubectl, "tiny", "Ready", "Invalid")
