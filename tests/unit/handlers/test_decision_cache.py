"""A decision is kept while nothing that it depends on changes, and no longer."""

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
from specdecode_operator.sizing.calibration import Calibration, CalibrationEntry
from tests.support.decisions import desired_state
from tests.support.objects import H100, H200, pair_70b, parent

NODES = (NodeFacts("h100-0", H100, 8), NodeFacts("h200-0", H200, 8))
MEASURED = Calibration(
    (
        CalibrationEntry(
            product=H200,
            engine_version="0.32",
            runner="V2",
            tensor=2,
            enforce_eager=False,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            method="draft_model",
            num_speculative_tokens=5,
            target_precision="BF16",
            draft_precision="BF16",
            model="llama",
            residual_bytes=2**30,
        ),
    )
)

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


def test_the_same_question_gets_the_same_answer_and_is_not_decided_anew() -> None:
    cache = DecisionCache()
    first, second = ask(cache), ask(cache)
    assert [*first.children] == [*second.children]
    assert [child["kind"] for child in second.children] == ["ConfigMap", "Service", "Deployment"]
    assert second.outcome is first.outcome


@pytest.mark.parametrize(
    "changes",
    [
        {"body": parent(pair_70b(replicas=3), generation=2)},
        {"body": {**parent(pair_70b()), "metadata": {**parent(pair_70b())["metadata"], "uid": "uid-2"}}},
        {"preempted_by": "demo"},
        {"by_policy": True},
        {"nodes": NODES[:1]},
        {"model_facts": {"model": "{}"}},
        {"calibration": MEASURED},
        {"body": parent(pair_70b(), status=PLANNED)},
        {"model_pods": (reader("2"),)},
        {"downloads": {"model": "abc"}},
        {"host_paths": ("/mnt",)},
        {"has_leader_worker_sets": True},
    ],
    ids=[
        "spec",
        "another object of the name",
        "a capture has its GPUs",
        "speculation by a policy",
        "nodes",
        "facts of models",
        "calibration",
        "plan in force",
        "reader",
        "downloads",
        "host paths",
        "groups",
    ],
)
def test_another_question_is_decided_anew(changes: dict[str, Any]) -> None:
    cache = DecisionCache()
    before = ask(cache)
    assert ask(cache, **changes).outcome is not before.outcome
