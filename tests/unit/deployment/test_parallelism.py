"""Pipeline stages, data-parallel copies and spread experts on one node: planned, rendered and told."""

import json
from typing import Any

import pytest

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment_status import PlanStatus
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.deployment.desired_state import Launch, NotLaunched
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.status import compose_status
from tests.support.decisions import NOW, desired_state
from tests.support.objects import H100, H200, pair_70b, parent

EIGHT_H100, EIGHT_H200 = NodeFacts("h100-0", H100, 8), NodeFacts("h200-0", H200, 8)
MOE = "Qwen/Qwen3-235B-A22B"


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


def test_stages_share_the_weights_out() -> None:
    whole, _ = launched(spec(tensor=2), EIGHT_H200)
    staged, _ = launched(spec(tensor=2, pipeline=2), EIGHT_H200)
    assert staged.per_gpu.target_weights_bytes < 0.55 * whole.per_gpu.target_weights_bytes
    assert staged.kv_cache_tokens > 2 * whole.kv_cache_tokens


def test_copies_of_a_dense_model_share_nothing() -> None:
    one, _ = launched(spec(tensor=2), EIGHT_H200)
    two, _ = launched(spec(tensor=2, data=2), EIGHT_H200)
    assert two.per_gpu.target_weights_bytes == one.per_gpu.target_weights_bytes
    assert abs(two.kv_cache_tokens - one.kv_cache_tokens) < 0.05 * one.kv_cache_tokens


def test_experts_are_shared_out_over_copies_whether_sliced_or_whole() -> None:
    sliced, _ = launched(spec(MOE, tensor=4, data=2), EIGHT_H200)
    whole, deployment = launched(spec(MOE, tensor=4, data=2, expert=True), EIGHT_H200)
    assert whole.expert
    assert "--enable-expert-parallel" in engine_of(deployment)["command"]
    difference = abs(whole.per_gpu.target_weights_bytes - sliced.per_gpu.target_weights_bytes)
    assert difference < 0.02 * sliced.per_gpu.target_weights_bytes


def test_more_gpus_than_a_node_has_wait() -> None:
    desired = desired_state(parse_deployment(parent(spec(tensor=8, pipeline=2))), (EIGHT_H200,))
    assert isinstance(desired.outcome, NotLaunched)
    planned = next(finding for finding in desired.conditions if finding.type == "Planned")
    assert planned.reason == "NodesTooFew"
    assert "spec.parallelism: 16 GPUs a replica (TP 8, PP 2)" in planned.message


def test_the_draft_is_split_like_the_target_and_the_status_says_so() -> None:
    plan, deployment = launched(pair_70b(parallelism={"tensor": 2, "draftTensor": 1}), EIGHT_H200)
    assert plan.draft_tensor == 2
    line = engine_of(deployment)["command"]
    config = json.loads(line[line.index("--speculative-config") + 1])
    assert config["draft_tensor_parallel_size"] == 1
    assert launched(pair_70b(parallelism={"tensor": 2}), EIGHT_H200)[0].per_gpu == plan.per_gpu
    assert launched(spec(tensor=2), EIGHT_H200)[0].draft_tensor is None


def test_a_plan_in_force_is_kept_with_its_spread() -> None:
    body = wide()
    plan, _ = launched(body, EIGHT_H100)
    status = {"plan": plan.model_dump(by_alias=True, mode="json", exclude_none=True)}
    more = (EIGHT_H100, EIGHT_H200)
    desired = desired_state(parse_deployment(parent(body, status=status)), more)
    assert isinstance(desired.outcome, Launch)
    assert (desired.outcome.plan.chosen.product, desired.outcome.plan.chosen.gpus) == (H100, 4)
