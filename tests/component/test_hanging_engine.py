"""An engine that hangs in start-up: the real Deployment controller gives it up, and the operator says so and goes back.

The test plays the kubelet, and lets time pass: its deadline is half an hour.
"""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.component.test_lifecycle import apply, engines, report, serve, wanted_hash
from tests.support.conditions import condition, current, wait_for, wait_for_all
from tests.support.kubectl import Kubectl
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import eventually

RUNNING = {"state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}, "started": False}
SAID = "no engine {0}was ready within the 1505 s given to it"


@pytest.fixture(autouse=True)
def _running(operator: OperatorProcess) -> None:
    pass


def hang(kubectl: Kubectl) -> None:
    """The engine runs, and its start-up probe never succeeds."""
    (pod,) = engines(kubectl, 1)
    report(kubectl, pod, ready=False, state=RUNNING)


def progress(kubectl: Kubectl) -> dict[str, Any]:
    conditions = kubectl.object("deployment", "tiny").get("status", {}).get("conditions", [])
    return next((each for each in conditions if each["type"] == "Progressing"), {})


def let_the_deadline_pass(kubectl: Kubectl) -> None:
    """Have the last progress lie a day back, by which the Deployment controller tells that a rollout is stuck."""
    eventually(lambda: progress(kubectl), "the controller has begun to watch the progress")
    yesterday = (datetime.now(UTC) - timedelta(days=1)).strftime("%Y-%m-%dT%H:%M:%SZ")

    def given_up() -> bool:
        if progress(kubectl)["reason"] == "ProgressDeadlineExceeded":
            return True
        patch = json.dumps({"status": {"conditions": [{"type": "Progressing", "lastUpdateTime": yesterday}]}})
        kubectl.must("patch", "deployment", "tiny", "--subresource=status", "--type=strategic", f"--patch={patch}")
        return False

    eventually(given_up, "the controller gives the rollout up")


def test_the_first_engine_that_hangs_is_told_with_its_time_and_where_to_look(kubectl: Kubectl) -> None:
    apply(kubectl)

    def is_starting() -> bool:
        hang(kubectl)  # again, where the scheduler has spoken since
        return condition(kubectl, "tiny", "Ready")[1] == "Starting"

    eventually(is_starting, "the engine starts")
    let_the_deadline_pass(kubectl)
    body = wait_for_all(kubectl, "tiny", Ready=("False", "EngineReadyTimeout"), Stalled="True", Available="False")
    message = current(body, "Ready")[2]
    assert SAID.format("of this spec ") in message
    assert "the logs of its pods tell how far it got" in message
    serve(kubectl)
    wait_for(kubectl, "tiny", "Ready", "Serving")


def test_engines_that_served_come_back_where_the_next_ones_hang(kubectl: Kubectl) -> None:
    apply(kubectl)
    serve(kubectl)
    wait_for(kubectl, "tiny", "Ready", "Serving")
    good = wanted_hash(kubectl)
    apply(kubectl, serving={"maxModelLen": 512})
    eventually(lambda: wanted_hash(kubectl) != good, "the new spec is tried")
    hang(kubectl)
    let_the_deadline_pass(kubectl)
    eventually(lambda: wanted_hash(kubectl) == good, "the template that served is back")
    serve(kubectl)
    body = wait_for_all(kubectl, "tiny", Ready=("False", "RolledBack"), Stalled="True", Available="True")
    message = current(body, "Ready")[2]
    assert f"EngineReadyTimeout: {SAID.format('')}, and none said why: it may hang" in message
    assert "this spec is not tried again before it changes" in message
