"""A deployment is without its engines exactly as long as a capture has their GPUs."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from specdecode_operator.capture.gpu_sharing import holds_gpus, preempting_capture
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.requeue import requeue_for
from specdecode_operator.deployment.rollout.readiness import Lending
from specdecode_operator.deployment.status import compose_status
from tests.support.captures import capture, capture_spec
from tests.support.decisions import desired_state
from tests.support.objects import Body, deployment, pair_70b, parent, tiny_cpu
from tests.unit.deployment.test_groups import FOUR_H100

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def condition(type_: str, status: str, reason: str = "R") -> Body:
    return {
        "type": type_,
        "status": status,
        "reason": reason,
        "message": "",
        "observedGeneration": 1,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }


BORROWED: Body = {"since": "2026-01-01T00:00:00Z"}


def borrowing(*conditions: tuple[str, ...], borrow: Body | None = None, name: str = "demo", **spec: Any) -> Body:
    said = {
        "conditions": [condition(*each) for each in conditions or (("Accepted", "True"), ("Succeeded", "Unknown"))],
        "borrow": BORROWED if borrow is None else borrow,
    }
    return capture(capture_spec(deploymentDuringCapture="Suspend", **spec), status=said, name=name)


def test_a_capture_that_borrowed_the_gpus_and_is_not_over_has_them() -> None:
    assert preempting_capture([borrowing()]) == "demo"


NOT_BORROWING: dict[str, Body] = {
    "Keep": capture(status={"conditions": [condition("Accepted", "True")], "borrow": BORROWED}),
    "new": capture(capture_spec(deploymentDuringCapture="Suspend")),
    "accepted": borrowing(borrow={}),
    "gave them back": borrowing(borrow={**BORROWED, "returnedAt": "2026-01-01T00:02:00Z"}),
    "succeeded": borrowing(("Accepted", "True"), ("Succeeded", "True")),
    "failed": borrowing(("Accepted", "True"), ("Succeeded", "False")),
    "suspended": borrowing(suspend=True),
    "being deleted": {
        **borrowing(),
        "metadata": {**capture()["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"},
    },
}


@pytest.mark.parametrize("name", NOT_BORROWING)
def test_the_deployment_has_them_back_in_every_other_case(name: str) -> None:
    assert preempting_capture([NOT_BORROWING[name]]) is None


def test_of_several_the_first_to_borrow_is_named() -> None:
    later = borrowing(borrow={"since": "2026-01-01T00:00:01Z"}, name="a")
    assert preempting_capture([NOT_BORROWING["Keep"], later, borrowing()]) == "demo"
    assert preempting_capture([borrowing(name="b"), borrowing(name="a")]) == "a", "at one moment the first by name"


PODS: dict[str, tuple[Body, bool]] = {
    "running": ({"metadata": {}, "status": {"phase": "Running"}}, True),
    "not seen by its node yet": ({"metadata": {}}, True),
    "ending": ({"metadata": {"deletionTimestamp": "2026-01-01T00:00:30Z"}, "status": {"phase": "Running"}}, True),
    "late by just less than five minutes": (
        {"metadata": {"deletionTimestamp": "2025-12-31T23:55:01Z"}, "status": {"phase": "Running"}},
        True,
    ),
    "late by five minutes": (
        {"metadata": {"deletionTimestamp": "2025-12-31T23:55:00Z"}, "status": {"phase": "Running"}},
        False,
    ),
    "evicted, which nobody removes": ({"metadata": {}, "status": {"phase": "Failed"}}, False),
    "over": ({"metadata": {}, "status": {"phase": "Succeeded"}}, False),
    "on a node that is lost": (
        {"metadata": {"deletionTimestamp": "2025-12-31T23:54:59Z"}, "status": {"phase": "Running"}},
        False,
    ),
}


@pytest.mark.parametrize("name", PODS)
def test_a_capture_waits_for_pods_that_hold_gpus_and_for_no_others(name: str) -> None:
    pod, holds = PODS[name]
    assert holds_gpus(pod, NOW) is holds


def test_what_is_wrong_with_a_spec_is_told_while_a_capture_has_its_gpus_too() -> None:
    owner = parse_deployment(parent(tiny_cpu(engine={"version": "0.1"})), preempted_by="demo")
    status = compose_status(owner, desired_state(owner, ()), Observation(), NOW)
    (found,) = (each for each in status.conditions if each.type == "Ready")
    assert (found.status, found.reason) == ("False", "Invalid")


def summary_of(spec: Body, suspended_for: str | None, nodes: tuple[Any, ...] = (), **seen: Any) -> dict[str, Any]:
    """The conditions of an object without engines, by type: status, reason and message."""
    owner = parse_deployment(parent(spec), preempted_by=suspended_for)
    observation = Observation(deployment(replicas=0, updated=0, available=0), **seen)
    status = compose_status(owner, desired_state(owner, nodes), observation, NOW)
    return {each.type: (each.status.value, each.reason, each.message) for each in status.conditions}


def test_a_deployment_without_its_gpus_is_not_ready_and_is_coming_back() -> None:
    said = summary_of(tiny_cpu(), "demo")
    assert said["Ready"][:2] == ("False", "SuspendedForCapture")
    assert (said["Reconciling"][0], said["Stalled"][0]) == ("True", "False")
    assert said["Available"] == said["Ready"]
    owner = parse_deployment(parent(tiny_cpu()), preempted_by="demo")
    assert desired_state(owner, ()).children[-1]["spec"]["replicas"] == 0


def test_a_capture_that_keeps_them_too_long_is_overdue() -> None:
    lending = Lending("demo", NOW - timedelta(hours=1), overdue_from=NOW)
    assert summary_of(tiny_cpu(), "demo", lending=lending)["Ready"][:2] == ("False", "SuspendedForCapture")
    assert summary_of(tiny_cpu(), "demo", lending=lending)["Available"][:2] == ("False", "CaptureOverdue")
    in_time = replace(lending, overdue_from=NOW + timedelta(seconds=1))
    assert summary_of(tiny_cpu(), "demo", lending=in_time)["Available"][:2] == ("False", "SuspendedForCapture")


def test_it_is_looked_at_again_when_the_capture_is_overdue() -> None:
    owner = parse_deployment(parent(tiny_cpu()), preempted_by="demo")
    lending = Lending("demo", overdue_from=NOW + timedelta(minutes=7))
    asked = requeue_for(owner, desired_state(owner, ()), Observation(lending=lending), ())
    assert asked.due_at_s == (NOW + timedelta(minutes=7)).timestamp()


@pytest.mark.parametrize(("spec", "what"), [(tiny_cpu(), "place"), (None, "GPUs")])
def test_a_deployment_on_cpu_does_not_speak_of_gpus(spec: Body | None, what: str) -> None:
    said = summary_of(spec or pair_70b(parallelism={"tensor": 4}), "demo", () if spec else FOUR_H100)
    assert f"capture demo has their {what} until it ends" in said["Ready"][2]


WANT_ZERO = {"Suspended": tiny_cpu(suspend=True), "ScaledToZero": tiny_cpu(replicas=0)}


@pytest.mark.parametrize("reason", WANT_ZERO)
@pytest.mark.parametrize("suspended_for", [None, "demo"])
def test_if_the_user_asked_for_zero_it_lends_nothing_and_is_ready(reason: str, suspended_for: str | None) -> None:
    said = summary_of(WANT_ZERO[reason], suspended_for)
    assert (said["Ready"][:2], said["Available"][:2]) == (("True", reason), ("False", reason))
    assert (said["Reconciling"][0], said["Stalled"][0]) == ("False", "False")


@pytest.mark.parametrize(
    ("spec", "suspended_for", "reason"),
    [
        (tiny_cpu(engine={"version": "0.1"}), "demo", "SuspendedForCapture"),
        (tiny_cpu(engine={"version": "0.1"}, suspend=True), None, "Suspended"),
        (tiny_cpu(engine={"version": "0.1"}, replicas=0), None, "ScaledToZero"),
        (tiny_cpu(engine={"version": "0.1"}), None, "Invalid"),
    ],
)
def test_available_says_why_no_engine_runs_even_if_the_spec_is_wrong(
    spec: Body, suspended_for: str | None, reason: str
) -> None:
    """An alert tells a user's own suspend from an outage by this reason."""
    said = summary_of(spec, suspended_for)
    assert (said["Ready"][:2], said["Available"][:2]) == (("False", "Invalid"), ("False", reason))


def test_engines_that_still_serve_are_available_even_if_a_capture_should_have_their_gpus() -> None:
    owner = parse_deployment(parent(tiny_cpu(engine={"version": "0.1"})), preempted_by="demo")
    serving = Observation(deployment(replicas=1, updated=1, available=1))
    status = compose_status(owner, desired_state(owner, ()), serving, NOW)
    (said,) = (each for each in status.conditions if each.type == "Available")
    assert (said.status, said.reason) == ("True", "EarlierEnginesServe")


def test_lending_changes_neither_plan_nor_pods() -> None:
    own = desired_state(parse_deployment(parent(tiny_cpu())), ())
    lent = desired_state(parse_deployment(parent(tiny_cpu()), preempted_by="demo"), ())
    assert own.outcome.plan_status == lent.outcome.plan_status
    templates = [desired.children[-1]["spec"]["template"] for desired in (own, lent)]
    assert templates[0] == templates[1]
