"""When one kind of engine, on one node or on several, gives way to the other."""

from dataclasses import replace

import pytest

from specdecode_operator.api.base import Body
from specdecode_operator.deployment.child_changes import objects_to_apply, objects_to_delete, workloads_to_scale
from specdecode_operator.deployment.desired_state import DesiredState, Launch
from specdecode_operator.deployment.observed.observation import Observation, rollout_of
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.status import compose_status
from tests.support.objects import parent
from tests.unit.deployment.pods.groups import NOW, WIDE, desired_state_of, live, pods_of, spec_at, workload_of

EARLIER = spec_at({"tensor": 4})


def ends_earlier(desired: DesiredState, successor: Body | None, pods: list[Body]) -> bool:
    """Whether the Deployment of an earlier spec is deleted."""
    earlier = live(workload_of(desired_state_of(EARLIER)))
    return earlier in objects_to_delete(desired, [earlier], successor, pods)


def test_where_gpus_are_scarce_the_old_kind_goes_before_the_new_one_serves() -> None:
    desired = desired_state_of(spec_at(WIDE))
    assert ends_earlier(desired, live(workload_of(desired), ready=0), [])


def test_with_surge_the_old_kind_stays_until_the_new_one_serves() -> None:
    desired = desired_state_of(spec_at(WIDE, rollout={"strategy": "Surge"}))
    workload = workload_of(desired)
    assert not ends_earlier(desired, None, [])
    assert not ends_earlier(desired, live(workload, ready=0), pods_of(workload, ready=False))
    assert ends_earlier(desired, live(workload), pods_of(workload))


def test_while_paused_nothing_of_the_new_kind_starts_and_nothing_of_the_old_one_ends() -> None:
    desired = desired_state_of(spec_at(WIDE, rollout={"paused": True}))
    earlier = live(workload_of(desired_state_of(EARLIER)))
    assert not ends_earlier(desired, None, [])
    kinds = [child["kind"] for child in objects_to_apply(desired, [earlier])]
    assert "LeaderWorkerSet" not in kinds
    assert "Service" in kinds
    assert "LeaderWorkerSet" in [child["kind"] for child in objects_to_apply(desired, [])], (
        "a first start is no rollout"
    )


def test_engines_that_a_pause_keeps_are_counted_and_follow_their_number() -> None:
    spec = spec_at(WIDE, replicas=2, rollout={"paused": True})
    desired, earlier = desired_state_of(spec), live(workload_of(desired_state_of(EARLIER)))
    owner = parse_deployment(parent(spec))
    assert workloads_to_scale(owner, desired, [earlier]) == [(earlier, 2)]
    both = [earlier, live(workload_of(desired))]
    assert workloads_to_scale(owner, desired, both) == [], "its successor started before the pause"
    status = compose_status(owner, desired, Observation(replaced_workload=earlier), NOW)
    ready = next(condition for condition in status.conditions if condition.type == "Ready")
    assert ready.reason == "RolloutPaused"
    assert "0 of 2 engines run this spec, 1 of 2 engines ready" in ready.message
    assert (status.replicas, status.ready_replicas) == (1, 1)


def test_a_change_of_kind_is_complete_when_nothing_of_the_old_one_is_left() -> None:
    desired = desired_state_of(spec_at(WIDE, rollout={"strategy": "Surge"}))
    workload, earlier = workload_of(desired), live(workload_of(desired_state_of(EARLIER)))
    assert isinstance(desired.outcome, Launch)
    seen = Observation(live(workload), pods_of(workload))
    assert rollout_of(desired.outcome, seen).complete
    assert not rollout_of(desired.outcome, replace(seen, replaced_workload=earlier)).complete


@pytest.mark.parametrize("idle", [{"suspend": True}, {"replicas": 0}])
def test_where_no_engine_is_wanted_none_of_the_old_kind_stays_for_a_surge(idle: Body) -> None:
    """A LeaderWorkerSet without groups has no counters at all."""
    desired = desired_state_of(spec_at(WIDE, rollout={"strategy": "Surge"}, **idle))
    assert ends_earlier(desired, {**live(workload_of(desired)), "status": {}}, [])
