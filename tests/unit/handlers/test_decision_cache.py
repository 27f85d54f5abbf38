"""Keep a decision while its inputs stay the same."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.cluster.resources import READS_FOR_LABEL
from specdecode_operator.deployment.desired_state import ClusterState, DesiredState
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.status import compose_status
from specdecode_operator.handlers.decision_cache import DecisionCache
from specdecode_operator.problems import InvalidSpecError
from specdecode_operator.sizing.calibration import Calibration
from tests.support.decisions import desired_state
from tests.support.objects import H100, H200, pair_70b, parent
from tests.unit.sizing.test_calibration import ENTRY

NODES = (NodeFacts("h100-0", H100, 8), NodeFacts("h200-0", H200, 8))
MEASURED = Calibration((ENTRY,))

PLANNED = {
    "plan": compose_status(
        parse_deployment(parent(pair_70b())),
        desired_state(parse_deployment(parent(pair_70b())), NODES),
        Observation(),
        datetime.now(UTC),
    ).model_dump(by_alias=True, mode="json", exclude_none=True)["plan"]
}


def reader(version: str) -> dict[str, Any]:
    """A pod that reads a model."""
    return {"metadata": {"name": "reader", "uid": "1", "resourceVersion": version, "labels": {READS_FOR_LABEL: "x"}}}


def ask(cache: DecisionCache, **changes: Any) -> DesiredState:
    given = {"nodes": NODES, **changes}
    owner = parse_deployment(given.pop("body", parent(pair_70b())), preempted_by=given.pop("preempted_by", None))
    return cache.decide(replace(owner, by_policy=given.pop("by_policy", False)), ClusterState(**given))


def test_equal_inputs_return_the_cached_decision() -> None:
    cache = DecisionCache()
    first, second = ask(cache), ask(cache)
    assert [*first.children] == [*second.children]
    assert [child["kind"] for child in second.children] == ["ConfigMap", "Service", "Deployment"]
    assert second.outcome is first.outcome


QUESTIONS: dict[str, dict[str, Any]] = {
    "spec": {"body": parent(pair_70b(replicas=3), generation=2)},
    "another object of the name": {
        "body": {**parent(pair_70b()), "metadata": {**parent(pair_70b())["metadata"], "uid": "uid-2"}}
    },
    "a capture has its GPUs": {"preempted_by": "demo"},
    "speculation by a policy": {"by_policy": True},
    "nodes": {"nodes": NODES[:1]},
    "facts of models": {"model_facts": {"model": "{}"}},
    "calibration": {"calibration": MEASURED},
    "another plan in force": {"body": parent(pair_70b(), status={"plan": {**PLANNED["plan"], "tensor": 4}})},
    "reader": {"model_pods": (reader("2"),)},
    "downloads": {"downloads": {"model": "abc"}},
    "host paths": {"host_paths": ("/mnt",)},
    "groups": {"has_leader_worker_sets": True},
}


@pytest.mark.parametrize("changes", QUESTIONS.values(), ids=QUESTIONS)
def test_changed_inputs_are_decided_again(changes: dict[str, Any]) -> None:
    cache = DecisionCache()
    before = ask(cache)
    assert ask(cache, **changes).outcome is not before.outcome


def test_changed_choice_of_a_policy_causes_a_new_decision() -> None:
    """The generation and the spec as written stay the same."""
    cache = DecisionCache()
    owner = replace(parse_deployment(parent(pair_70b())), by_policy=True)
    assert not isinstance(owner.spec, InvalidSpecError)
    assert owner.spec.speculation is not None
    fewer = owner.spec.speculation.model_copy(update={"num_speculative_tokens": 1})
    other = replace(owner, spec=owner.spec.model_copy(update={"speculation": fewer}))
    first, second = (cache.decide(each, ClusterState(nodes=NODES)) for each in (owner, other))
    assert first.outcome is not second.outcome
    assert cache.decide(other, ClusterState(nodes=NODES)).outcome is second.outcome


def test_plan_of_the_decision_in_the_status_changes_nothing() -> None:
    cache = DecisionCache()
    before = ask(cache)
    plan = before.outcome.plan_status
    assert plan is not None
    written = {"plan": plan.model_dump(by_alias=True, mode="json", exclude_none=True)}
    assert ask(cache, body=parent(pair_70b(), status=written)).outcome is before.outcome
