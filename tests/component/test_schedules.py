"""Captures by the clock, against a real API server and a real operator."""

from typing import Any

import pytest
import yaml

from tests.support.conditions import wait_for
from tests.support.kubectl import Kubectl
from tests.support.objects import tiny_cpu
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import eventually

OF_SCHEDULE = "--selector=specdecode.io/schedule=often"
DUE_DEADLINE_S = 120
"""A minute at most, a resync, and a busy machine."""

COLLECTION_DEADLINE_S = 90
WORKLOAD = {"phases": [{"name": "short", "pattern": "Closed", "concurrency": 2, "requests": 8}]}


@pytest.fixture(autouse=True)
def _running(operator: OperatorProcess) -> None:
    pass


def deploy(kubectl: Kubectl, **schedule: Any) -> None:
    template = {"workload": WORKLOAD, "storage": {"size": "1Gi"}}
    captures = [{"name": "often", "schedule": "* * * * *", "template": template, **schedule}]
    body = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "metadata": {"name": "tiny"}}
    answer = kubectl.apply(yaml.safe_dump({**body, "spec": tiny_cpu(captures=captures)}))
    assert answer.returncode == 0, answer.stderr


def test_a_capture_starts_every_minute_and_its_data_outlives_the_deployment(kubectl: Kubectl) -> None:
    deploy(kubectl)
    (first,) = eventually(lambda: kubectl.objects("sdc", OF_SCHEDULE), "a capture is due", DUE_DEADLINE_S)
    at = first["metadata"]["annotations"]["specdecode.io/scheduled-at"]
    assert first["spec"]["deployment"] == "tiny"
    assert first["spec"]["workload"]["phases"][0]["requests"] == 8
    assert first["metadata"]["ownerReferences"][0]["kind"] == "SpecDecodeDeployment"
    (status,) = eventually(
        lambda: kubectl.object("sdd", "tiny")["status"].get("captures"), "the status speaks of the schedule"
    )
    assert status["name"] == "often"
    assert status["lastScheduleTime"] >= at
    assert status["nextScheduleTime"] > status["lastScheduleTime"]
    eventually(lambda: kubectl.objects("pvc", OF_SCHEDULE), "the capture has a claim", DUE_DEADLINE_S)
    kubectl.must("delete", "sdd", "tiny")
    eventually(lambda: not kubectl.objects("sdc", OF_SCHEDULE), "captures go", COLLECTION_DEADLINE_S)
    assert kubectl.objects("pvc", OF_SCHEDULE), "their claims stay"


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({"schedule": "61 * * * *"}, "spec.captures[0].schedule: 61 * * * *"),
        ({"timeZone": "Europe/Atlantis"}, "spec.captures[0].timeZone: Europe/Atlantis"),
    ],
)
def test_a_time_that_never_comes_is_refused_by_name(kubectl: Kubectl, schedule: dict[str, Any], words: str) -> None:
    deploy(kubectl, **schedule)
    assert words in wait_for(kubectl, "tiny", "Accepted", "Invalid", 30)
