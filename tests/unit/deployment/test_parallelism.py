"""Pipeline stages, data-parallel copies and spread experts on one node: planned, rendered and told."""

import json
from typing import Any

import pytest

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment_status import PlanStatus
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.deployment.desired_state import Launch
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.status import compose_status
from tests.support.decisions import NOW, desired_state
from tests.support.objects import H100, H200, pair_70b, parent

EIGHT_H100, EIGHT_H200 = NodeFacts("h100-0", H100, 8), NodeFacts("h200-0", H200, 8)


def spec(model: str = "meta-llama/Llama-3.1-70B-Instruct", **parallelism: Any) -> Body:
    """A spec that speculates with n-grams, which needs no memory of its own."""
    speculation = {"method": "ngram", "numSpeculativeTokens": 4}
    return pair_70b(target={"model": model}, speculation=speculation, parallelism=parallelism)


def wide() -> Body:
    """A spec in two stages whose KV cache needs a tensor parallelism of two."""
    return {**spec(pipeline=2), "serving": {"maxModelLen": 8192, "minConcurrency": 8}}


def launched(body: Body, *nodes: NodeFacts) -> tuple[PlanStatus, Body]:
    """The plan in the status, and the Deployment."""
    owner = parse_deployment(parent(body))
    desired = desired_state(owner, nodes)
    assert isinstance(desired.outcome, Launch), desired.conditions
    plan = compose_status(owner, desired, Observation(), NOW).plan
    assert plan is not None
    return plan, next(child for child in desired.children if child["kind"] == "Deployment")


def engine_of(deployment: Body) -> Body:
    container: Body = deployment["spec"]["template"]["spec"]["containers"][0]
    return container


@pytest.mark.parametrize(
    ("parallelism", "gpus", "arguments"),
    [
        ({"tensor": 2, "pipeline": 2}, 4, ["--pipeline-parallel-size", "2"]),
        ({"tensor": 2, "data": 2}, 4, ["--data-parallel-size", "2"]),
        ({"tensor": 2, "pipeline": 2, "data": 2}, 8, ["--pipeline-parallel-size", "2", "--data-parallel-size", "2"]),
    ],
)
def test_gpus_are_tensor_by_pipeline_by_data(parallelism: dict[str, int], gpus: int, arguments: list[str]) -> None:
    plan, deployment = launched(spec(**parallelism), EIGHT_H200)
    assert plan.gpus_per_replica == gpus
    assert (plan.tensor, plan.pipeline, plan.data) == (2, parallelism.get("pipeline", 1), parallelism.get("data", 1))
    engine = engine_of(deployment)
    assert engine["resources"] == {"limits": {"nvidia.com/gpu": str(gpus)}}
    assert " ".join(arguments) in " ".join(engine["command"])
    shm = next(each for each in deployment["spec"]["template"]["spec"]["volumes"] if each["name"] == "shm")
    assert shm["emptyDir"]["sizeLimit"] == f"{gpus}Gi"


def test_the_plan_chooses_the_tensor_that_fits_beside_the_rest() -> None:
    """Eight requests beside 70B in BF16 need four GPUs of 80 GB: two stages of two, not of one."""
    plan, _ = launched(wide(), EIGHT_H100)
    assert (plan.tensor, plan.pipeline, plan.gpus_per_replica) == (2, 2, 4)
    assert "4 x NVIDIA-H100-80GB-HBM3 per replica (TP 2, PP 2)" in plan.explanation


def test_the_draft_is_split_like_the_target_and_the_status_says_so() -> None:
    plan, deployment = launched(pair_70b(parallelism={"tensor": 2, "draftTensor": 1}), EIGHT_H200)
    assert plan.draft_tensor == 2
    line = engine_of(deployment)["command"]
    config = json.loads(line[line.index("--speculative-config") + 1])
    assert config["draft_tensor_parallel_size"] == 1
    assert launched(pair_70b(parallelism={"tensor": 2}), EIGHT_H200)[0].per_gpu == plan.per_gpu
    assert launched(spec(tensor=2), EIGHT_H200)[0].draft_tensor is None
