"""An engine that hangs in start-up: the real Deployment controller gives it up, and the operator says so and goes back.

The test plays the kubelet, and lets time pass: its deadline is half an hour.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import pytest

from tests.component.operator.test_lifecycle import apply, engines, report, serve, wanted_hash
from tests.support.conditions import current, wait_for, wait_for_all
from tests.support.kubectl import Kubectl
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import eventually

T = TypeVar("T")

RUNNING = {"state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}, "started": False}
SAID = "no engine {0}became ready within 1505 s"


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


def hang_for_long(kubectl: Kubectl, reached: Callable[[], T | None], what: str) -> T:
    """Let the engine hang, with its last progress a day back, until the controllers have drawn their conclusions.

    Its last progress is written back until then: whatever changes about the pod, the controller counts as progress.
    """
    yesterday = (datetime.now(UTC) - timedelta(days=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    patch = json.dumps({"status": {"conditions": [{"type": "Progressing", "lastUpdateTime": yesterday}]}})

    hang(kubectl)

    def look() -> T | None:
        if (found := reached()) or not progress(kubectl):
            return found
        if progress(kubectl)["reason"] != "ProgressDeadlineExceeded":
            kubectl.must("patch", "deployment", "tiny", "--subresource=status", "--type=strategic", f"--patch={patch}")
        return None

    return eventually(look, what)


def test_hanging_first_engine_is_reported_with_its_time_and_a_log_hint(kubectl: Kubectl) -> None:
    apply(kubectl)

    def given_up() -> str | None:
        body = kubectl.object("sdd", "tiny")
        told = {type_: current(body, type_) for type_ in ("Ready", "Stalled", "Available")}
        seen = (told["Ready"][:2], told["Stalled"][0], told["Available"][0])
        return told["Ready"][2] if seen == (("False", "EngineReadyTimeout"), "True", "False") else None

    message = hang_for_long(kubectl, given_up, "the engine is given up")
    assert SAID.format("of this spec ") in message
    assert "see the logs of its pods" in message
    serve(kubectl)
    wait_for(kubectl, "tiny", "Ready", "Serving")


def test_hanging_engines_of_a_new_spec_are_rolled_back(kubectl: Kubectl) -> None:
    apply(kubectl)
    serve(kubectl)
    wait_for(kubectl, "tiny", "Ready", "Serving")
    good = wanted_hash(kubectl)
    apply(kubectl, serving={"maxModelLen": 512})
    eventually(lambda: wanted_hash(kubectl) != good, "the new spec is tried")
    hang_for_long(kubectl, lambda: wanted_hash(kubectl) == good, "the template that served is back")
    serve(kubectl)
    body = wait_for_all(kubectl, "tiny", Ready=("False", "RolledBack"), Stalled="True", Available="True")
    message = current(body, "Ready")[2]
    assert f"EngineReadyTimeout: {SAID.format('')} and no error was reported; the engine may hang" in message
    assert "change the spec to try again" in message
