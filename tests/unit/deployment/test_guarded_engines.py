"""An edit by hand ends no engine that serves: the strategy of a Deployment that has nothing to replace."""

import copy
from typing import Any

import pytest

from specdecode_operator.cluster.drift import is_same_wish
from specdecode_operator.deployment.child_changes import objects_to_apply
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from tests.support.decisions import desired_state
from tests.support.objects import Body, parent, tiny_cpu

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


def test_a_deployment_is_made_with_the_guard() -> None:
    assert strategy(None) == ENDS_NOTHING
    assert is_same_wish(written(None), written(live(guarded=True, **SERVES)))


def test_a_deployment_is_guarded_when_its_last_engine_of_before_has_gone() -> None:
    assert strategy(live(guarded=False)) == ENDS_NOTHING
    for counts in ({"replicas": 1, "updated": 0}, {"replicas": 2, "updated": 1, "available": 1}):
        assert strategy(live(guarded=False, **counts)) == strategy(live(guarded=True, **counts)) == REPLACES
    for counts in ({"replicas": 1, "updated": 1}, SERVES):
        assert strategy(live(guarded=False, **counts)) == ENDS_NOTHING


def test_what_its_controller_has_not_seen_yet_changes_no_guard() -> None:
    assert strategy(live(guarded=False, seen=1, **SERVES)) == REPLACES


@pytest.mark.parametrize(
    "counts",
    [SERVES, {"replicas": 1, "updated": 1, "available": 0}, {}, {"seen": 1, "replicas": 1}],
    ids=["all serve", "one was lost", "none is wanted", "the controller has not looked yet"],
)
def test_the_guard_stays_and_nothing_is_written_while_there_is_nothing_to_replace(counts: dict[str, int]) -> None:
    guarded = written(live(guarded=False, **SERVES))
    assert is_same_wish(written(live(guarded=True, **counts)), guarded)
    assert strategy(live(guarded=True, **counts)) == ENDS_NOTHING


def test_a_new_template_is_rolled_out_by_the_strategy_of_the_spec() -> None:
    other = tiny_cpu(serving={"maxModelLen": 512})
    assert strategy(live(guarded=True, **SERVES), other) == REPLACES
    assert strategy(live(guarded=True, **SERVES), {**other, "rollout": {"strategy": "Surge"}}) == ENDS_NOTHING


def test_a_restart_takes_no_further_gpu_and_an_edit_ends_no_engine() -> None:
    rolling = {"replicas": 2, "updated": 1, "available": 1}
    assert strategy(live(guarded=True, fields=RESTART, **rolling)) == REPLACES
    assert strategy(live(guarded=True, fields=EDIT, **rolling)) == ENDS_NOTHING
    assert strategy(live(guarded=True, fields=EDIT, **rolling), kept="vim") == REPLACES
