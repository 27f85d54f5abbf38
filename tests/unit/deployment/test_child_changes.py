"""Choose what is applied, scaled and deleted: the guarded strategy, and a change of workload kind."""

import copy
from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.api.base import Body
from specdecode_operator.cluster.drift import is_same_wish
from specdecode_operator.deployment.desired_state import DesiredState, Launch
from specdecode_operator.deployment.observed.observation import Observation, rollout_of
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.status import compose_status
from specdecode_operator.handlers.apply_children import objects_to_apply, objects_to_delete, workloads_to_scale
from tests.support.decisions import desired_state
from tests.support.objects import parent, tiny_cpu
from tests.unit.deployment.group_pods import NOW, WIDE, desired_state_of, pods_of, spec_at, workload_of
from tests.unit.deployment.group_pods import live as live_workload

REPLACES = {"maxSurge": 0, "maxUnavailable": 1}
ENDS_NOTHING = {"maxSurge": 1, "maxUnavailable": 0}
RESTART = {"f:spec": {"f:template": {"f:metadata": {"f:annotations": {"f:kubectl.kubernetes.io/restartedAt": {}}}}}}
EDIT = {"f:spec": {"f:template": {"f:spec": {"f:containers": {'k:{"name":"engine"}': {"f:image": {}}}}}}}


def written(live: Body | None, spec: Body | None = None, *, kept: str = "") -> Body:
    """The Deployment that is applied."""
    desired = desired_state(parse_deployment(parent(spec or tiny_cpu())))
    (found,) = (
        child for child in objects_to_apply(desired, [live] if live else [], {kept}) if child["kind"] == "Deployment"
    )
    return found


def strategy(live: Body | None, spec: Body | None = None, *, kept: str = "") -> Any:
    return written(live, spec, kept=kept)["spec"]["strategy"]["rollingUpdate"]


def live(*, guarded: bool, seen: int = 2, fields: Body | None = None, **counts: int) -> Body:
    """The Deployment after it was applied, as its controller counts; ``fields`` are what somebody else wrote."""
    body = copy.deepcopy(
        next(
            child
            for child in desired_state(parse_deployment(parent(tiny_cpu()))).children
            if child["kind"] == "Deployment"
        )
    )
    body["metadata"] |= {"generation": 2, "managedFields": [{"manager": "vim", "fieldsV1": fields}] if fields else []}
    body["spec"]["strategy"]["rollingUpdate"] = ENDS_NOTHING if guarded else REPLACES
    names = {"replicas": "replicas", "updated": "updatedReplicas", "available": "availableReplicas"}
    return {**body, "status": {"observedGeneration": seen, **{names[name]: value for name, value in counts.items()}}}


SERVES = {"replicas": 1, "updated": 1, "available": 1}


def test_new_deployment_has_the_guarded_strategy() -> None:
    assert strategy(None) == ENDS_NOTHING
    assert is_same_wish(written(None), written(live(guarded=True, **SERVES)))


def test_deployment_is_guarded_once_no_old_engine_is_left() -> None:
    assert strategy(live(guarded=False)) == ENDS_NOTHING
    for counts in ({"replicas": 1, "updated": 0}, {"replicas": 2, "updated": 1, "available": 1}):
        assert strategy(live(guarded=False, **counts)) == strategy(live(guarded=True, **counts)) == REPLACES
    for counts in ({"replicas": 1, "updated": 1}, SERVES):
        assert strategy(live(guarded=False, **counts)) == ENDS_NOTHING


def test_unobserved_generation_does_not_add_the_guard() -> None:
    assert strategy(live(guarded=False, seen=1, **SERVES)) == REPLACES


@pytest.mark.parametrize(
    "counts",
    [SERVES, {"replicas": 1, "updated": 1, "available": 0}, {}, {"seen": 1, "replicas": 1}],
    ids=["all serve", "one was lost", "none is wanted", "the controller has not looked yet"],
)
def test_guard_stays_while_no_engine_is_to_be_replaced(counts: dict[str, int]) -> None:
    guarded = written(live(guarded=False, **SERVES))
    assert is_same_wish(written(live(guarded=True, **counts)), guarded)
    assert strategy(live(guarded=True, **counts)) == ENDS_NOTHING


def test_new_template_uses_the_rollout_strategy_of_the_spec() -> None:
    other = tiny_cpu(serving={"maxModelLen": 512})
    assert strategy(live(guarded=True, **SERVES), other) == REPLACES
    assert strategy(live(guarded=True, **SERVES), {**other, "rollout": {"strategy": "Surge"}}) == ENDS_NOTHING


def test_restart_lifts_the_guard_and_a_manual_edit_keeps_it() -> None:
    rolling = {"replicas": 2, "updated": 1, "available": 1}
    assert strategy(live(guarded=True, fields=RESTART, **rolling)) == REPLACES
    assert strategy(live(guarded=True, fields=EDIT, **rolling)) == ENDS_NOTHING
    assert strategy(live(guarded=True, fields=EDIT, **rolling), kept="vim") == REPLACES


EARLIER = spec_at({"tensor": 4})


def ends_earlier(desired: DesiredState, successor: Body | None, pods: list[Body]) -> bool:
    """Whether the Deployment of an earlier spec is deleted."""
    earlier = live_workload(workload_of(desired_state_of(EARLIER)))
    return earlier in objects_to_delete(desired, [earlier], successor, pods)


def test_replace_deletes_the_old_workload_before_the_new_serves() -> None:
    desired = desired_state_of(spec_at(WIDE))
    assert ends_earlier(desired, live_workload(workload_of(desired), ready=0), [])


def test_surge_keeps_the_old_workload_until_the_new_serves() -> None:
    desired = desired_state_of(spec_at(WIDE, rollout={"strategy": "Surge"}))
    workload = workload_of(desired)
    assert not ends_earlier(desired, None, [])
    assert not ends_earlier(desired, live_workload(workload, ready=0), pods_of(workload, ready=False))
    assert ends_earlier(desired, live_workload(workload), pods_of(workload))


def test_pause_keeps_the_old_workload_and_starts_no_new_one() -> None:
    desired = desired_state_of(spec_at(WIDE, rollout={"paused": True}))
    earlier = live_workload(workload_of(desired_state_of(EARLIER)))
    assert not ends_earlier(desired, None, [])
    kinds = [child["kind"] for child in objects_to_apply(desired, [earlier])]
    assert "LeaderWorkerSet" not in kinds
    assert "Service" in kinds
    assert "LeaderWorkerSet" in [child["kind"] for child in objects_to_apply(desired, [])], (
        "a first start is no rollout"
    )


def test_old_workload_kept_by_a_pause_is_counted_and_scaled() -> None:
    spec = spec_at(WIDE, replicas=2, rollout={"paused": True})
    desired, earlier = desired_state_of(spec), live_workload(workload_of(desired_state_of(EARLIER)))
    owner = parse_deployment(parent(spec))
    assert workloads_to_scale(owner, desired, [earlier]) == [(earlier, 2)]
    both = [earlier, live_workload(workload_of(desired))]
    assert workloads_to_scale(owner, desired, both) == [], "its successor started before the pause"
    status = compose_status(owner, desired, Observation(replaced_workload=earlier), NOW)
    ready = next(condition for condition in status.conditions if condition.type == "Ready")
    assert ready.reason == "RolloutPaused"
    assert "0 of 2 engines run this spec, 1 of 2 engines ready" in ready.message
    assert (status.replicas, status.ready_replicas) == (1, 1)


def test_workload_kind_change_completes_once_the_old_one_is_gone() -> None:
    desired = desired_state_of(spec_at(WIDE, rollout={"strategy": "Surge"}))
    workload, earlier = workload_of(desired), live_workload(workload_of(desired_state_of(EARLIER)))
    assert isinstance(desired.outcome, Launch)
    seen = Observation(live_workload(workload), pods_of(workload))
    assert rollout_of(desired.outcome, seen).complete
    assert not rollout_of(desired.outcome, replace(seen, replaced_workload=earlier)).complete


@pytest.mark.parametrize("idle", [{"suspend": True}, {"replicas": 0}])
def test_surge_keeps_no_old_workload_at_zero_replicas(idle: Body) -> None:
    """A LeaderWorkerSet without groups has no counters at all."""
    desired = desired_state_of(spec_at(WIDE, rollout={"strategy": "Surge"}, **idle))
    assert ends_earlier(desired, {**live_workload(workload_of(desired)), "status": {}}, [])
