"""When to requeue an object without an event."""

from datetime import UTC, datetime
from typing import Any

import pytest

from specdecode_operator.api.deployment import ScheduleStatus
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.requeue import Requeue, requeue_for
from specdecode_operator.deployment.rollout.readiness import working
from specdecode_operator.vllm.engine_metrics import Unreachable
from tests.support.decisions import desired_state
from tests.support.objects import Body, parent, tiny_cpu
from tests.unit.deployment.models.test_model_facts import undescribed
from tests.unit.deployment.rollout.test_blocked_pods import rejected


def asked(spec: Body, *schedules: ScheduleStatus, **seen: Any) -> Requeue:
    owner = parse_deployment(parent(spec))
    return requeue_for(owner, desired_state(owner), Observation(**seen), schedules)


def is_close(spec: Body, **seen: Any) -> bool:
    return asked(spec, **seen).is_close


@pytest.mark.parametrize(
    ("spec", "pods"),
    [(tiny_cpu(), []), (tiny_cpu(suspend=True), []), (tiny_cpu(serving={"maxModelLen": 0}), [])],
    ids=["no pods yet", "suspended", "not accepted"],
)
def test_objects_that_only_events_can_change_are_not_requeued_soon(spec: Body, pods: list[Body]) -> None:
    assert not is_close(spec, pods=pods)


@pytest.mark.parametrize(
    "seen",
    [
        {"readings": {"llama-1": Unreachable("busy")}},
        {"blocked": working("Forbidden", "no right")},
        {"blocked_beside": {"HTTPRoute": working("Forbidden", "no right")}},
        {"contested": ("Service llama: spec.ports",)},
        {"pods": [rejected(0)]},
    ],
    ids=["engines to ask", "blocked", "a route that is blocked", "contested", "nodes reject pods"],
)
def test_objects_with_engines_or_blocked_pods_are_requeued_soon(seen: dict[str, Any]) -> None:
    assert is_close(tiny_cpu(), **seen)


@pytest.mark.parametrize(
    "spec",
    [
        tiny_cpu(policy={"windowSeconds": 300, "cooldownSeconds": 600}),
        tiny_cpu(rollout={"gate": {"capture": "golden"}}),
        undescribed(),
    ],
    ids=["a policy", "a gate", "models that are read"],
)
def test_specs_with_policy_gate_or_reader_jobs_are_requeued_soon(spec: Body) -> None:
    assert is_close(spec)


def test_policy_requeue_needs_a_policy_and_an_engine() -> None:
    policy = tiny_cpu(policy={"windowSeconds": 300, "cooldownSeconds": 600})
    serving = {"readings": {"llama-1": Unreachable("busy")}}
    assert asked(policy, **serving).has_policy
    assert not asked(tiny_cpu(), **serving).has_policy
    assert not asked(policy).has_policy, "no engine, nothing to measure"


def test_requeue_time_is_the_earliest_schedule() -> None:
    times = ("2026-11-24T12:00:30Z", None, "2026-11-24T12:00:00Z")
    known = [
        ScheduleStatus(name="s", schedule="* * * * * UTC", since="2026-11-24T00:00:00Z", next_schedule_time=time)
        for time in times
    ]
    assert asked(tiny_cpu(), *known).due_at_s == datetime(2026, 11, 24, 12, tzinfo=UTC).timestamp()
    assert asked(tiny_cpu()).due_at_s is None
