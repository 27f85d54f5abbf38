"""From a spec to plans and children, or to a message that names the fix."""

from typing import Any

import pytest

from specdecode_operator.cluster.nodes import NodeFacts, NodesFrom
from specdecode_operator.deployment.desired_state import Launch
from tests.support.decisions import H100_NODE, H200_NODE, decide, summary
from tests.support.objects import H100, H200, pair_70b, parent, tiny_cpu


def test_pair_is_planned_on_the_gpu_product_that_fits() -> None:
    desired, status, conditions = decide(parent(pair_70b()))
    assert status.plan is not None
    assert (status.plan.verdict, status.plan.product, status.plan.tensor) == ("Fits", H200, 2)
    assert conditions["Planned"].status == "True"
    engine = desired.children[-1]
    assert engine["spec"]["template"]["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": H200}
    container = engine["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "2"}}


def test_unknown_product_is_planned_by_memory_as_uncalibrated() -> None:
    accelerator = {"products": ["NVIDIA-T1000"], "memoryGiBPerGPU": 140}
    node = NodeFacts("other-0", "NVIDIA-T1000", 8)
    desired, status, conditions = decide(parent(pair_70b(accelerator=accelerator)), nodes=(node, H200_NODE))
    assert status.plan is not None
    assert (status.plan.product, status.plan.per_gpu.total_bytes) == ("NVIDIA-T1000", 140 * 2**30)
    assert "uncalibrated" in str(status.plan.uncalibrated)
    assert "uncalibrated" in conditions["Planned"].message
    pod = desired.children[-1]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-T1000"}
    known, _, told = decide(parent(pair_70b()), nodes=(node, H200_NODE))
    assert known.children[-1]["spec"]["template"]["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": H200}
    assert "set spec.accelerator.memoryGiBPerGPU" in told["Planned"].message


@pytest.mark.parametrize(("product", "label"), [(H200, False), ("NVIDIA-B200", True), ("NVIDIA-H100-NVL", True)])
def test_status_marks_products_without_public_logs_as_uncalibrated(product: str, label: bool) -> None:
    _, status, conditions = decide(parent(pair_70b()), nodes=(NodeFacts("a", product, 8),))
    assert status.plan is not None
    assert (status.plan.product, status.plan.uncalibrated is not None) == (product, label)
    assert ("uncalibrated" in conditions["Planned"].message) is label


def test_plan_that_does_not_fit_creates_no_pods_and_names_a_fix() -> None:
    desired, status, conditions = decide(parent(pair_70b()), nodes=(H100_NODE,))
    assert [child["kind"] for child in desired.children] == ["ConfigMap"]
    assert summary(conditions) == ("False", "DoesNotFit", "False", "True")
    assert conditions["Planned"].status == "False"
    assert "weights" in conditions["Ready"].message
    assert "target.quantization: FP8" in conditions["Ready"].message
    assert status.plan is not None
    assert status.plan.verdict == "DoesNotFit"


def test_ignore_plan_launches_a_pair_that_does_not_fit() -> None:
    body = parent(pair_70b(override={"ignorePlan": True, "reason": "the estimate is wrong here"}))
    desired, _, conditions = decide(body, nodes=(H100_NODE,))
    assert "Deployment" in [child["kind"] for child in desired.children]
    assert (conditions["Planned"].status, conditions["Planned"].reason) == ("True", "Overridden")
    assert "the estimate is wrong here" in conditions["Planned"].message


def test_deployment_waits_without_a_matching_node() -> None:
    desired, _, conditions = decide(parent(pair_70b()), nodes=())
    assert desired.children == []
    assert summary(conditions) == ("Unknown", "NoMatchingNodes", "True", "False")
    assert "nvidia.com/gpu.product" in conditions["Ready"].message


def test_no_matching_nodes_names_the_source_of_nodes() -> None:
    for nodes_from, nodes, told in (
        (NodesFrom.NOWHERE, (), "may not list nodes: set spec.accelerator.products and perNode, or ask its"),
        (NodesFrom.FILE, (NodeFacts("a", "NVIDIA-A10", 4),), "(fleet.nodes of the chart, --nodes) has a known GPU"),
    ):
        desired, _, conditions = decide(parent(pair_70b()), nodes=nodes, nodes_from=nodes_from)
        assert desired.children == []
        assert summary(conditions) == ("Unknown", "NoMatchingNodes", "True", "False")
        assert told in conditions["Ready"].message
        assert told in conditions["Ready"].message


def test_product_and_per_node_allow_a_plan_without_nodes() -> None:
    accelerator = {"products": [H200], "perNode": 4}
    _, status, _ = decide(parent(pair_70b(accelerator=accelerator)), nodes=())
    assert status.plan is not None
    assert status.plan.product == H200


def test_more_gpus_than_one_node_has_waits_for_more_nodes() -> None:
    desired, _, conditions = decide(parent(pair_70b(parallelism={"tensor": 16})))
    assert desired.children == []
    assert summary(conditions) == ("Unknown", "NodesTooFew", "True", "False")
    assert "spec.parallelism: 16 GPUs per replica (TP 16)" in conditions["Ready"].message
    assert "needs 2 nodes x 8 x" in conditions["Ready"].message


FP8_70B = pair_70b(target={"model": "meta-llama/Llama-3.1-70B-Instruct", "quantization": "FP8"}, parallelism={})


@pytest.mark.parametrize(
    ("spec", "generation", "nodes"),
    [
        (FP8_70B, 1, (H100_NODE, H200_NODE)),
        ({**FP8_70B, "replicas": 3}, 2, (H100_NODE, H200_NODE)),
        (FP8_70B, 1, (NodeFacts("h100-0", H100, 8, schedulable=False), H200_NODE)),
        (FP8_70B, 1, (NodeFacts("h100-0", H100, 8, schedulable=False),)),
    ],
    ids=["a better node appears", "it is scaled", "its node is cordoned", "all nodes are cordoned"],
)
def test_current_plan_is_kept_if_it_is_still_valid(
    spec: dict[str, Any], generation: int, nodes: tuple[NodeFacts, ...]
) -> None:
    _, before, _ = decide(parent(FP8_70B), nodes=(H100_NODE,))
    assert before.plan is not None
    assert (before.plan.product, before.plan.tensor) == (H100, 2)
    status = before.model_dump(by_alias=True, mode="json", exclude_none=True)
    _, kept, _ = decide(parent(spec, generation=generation, status=status), nodes=nodes)
    assert kept.plan is not None
    assert (kept.plan.product, kept.plan.tensor) == (H100, 2)


@pytest.mark.parametrize(
    ("changes", "nodes"),
    [
        ({"parallelism": {"tensor": 4}}, (H100_NODE, H200_NODE)),
        ({"accelerator": {"products": [H200]}}, (H100_NODE, H200_NODE)),
        ({}, (H200_NODE,)),
        ({"serving": {"maxModelLen": 131_072, "minConcurrency": 8}}, (H100_NODE, H200_NODE)),
    ],
    ids=["other parallelism", "other product", "its nodes are gone", "it fits no more"],
)
def test_plan_changes_if_it_no_longer_matches_spec_or_nodes(
    changes: dict[str, Any], nodes: tuple[NodeFacts, ...]
) -> None:
    _, before, _ = decide(parent(FP8_70B), nodes=(H100_NODE,))
    status = before.model_dump(by_alias=True, mode="json", exclude_none=True)
    _, after, conditions = decide(parent({**FP8_70B, **changes}, generation=2, status=status), nodes=nodes)
    assert after.plan is not None
    assert (after.plan.product, after.plan.tensor) != (H100, 2)
    assert conditions["Planned"].status == "True"


BAD_SPECS = {
    "three ways do not divide 64 heads": (pair_70b(parallelism={"tensor": 3}), "spec.parallelism.tensor", "64"),
    "contradicts a field": (
        pair_70b(engine={"extraArgs": ["--tensor-parallel-size=4"]}),
        "spec.engine.extraArgs[0]",
        "spec.parallelism.tensor",
    ),
    "CPU without an image": (tiny_cpu(engine={}), "spec.engine.image", "set it"),
}


@pytest.mark.parametrize(("spec", "field", "fix"), BAD_SPECS.values(), ids=BAD_SPECS)
def test_invalid_spec_stalls_and_names_field_and_fix(spec: dict[str, Any], field: str, fix: str) -> None:
    desired, _, conditions = decide(parent(spec))
    assert desired.children == []
    assert not isinstance(desired.outcome, Launch)
    assert conditions["Accepted"].status == "False"
    assert field in conditions["Ready"].message
    assert fix in conditions["Ready"].message
    assert summary(conditions)[0] == "False"
    assert summary(conditions)[2:] == ("False", "True")


def test_impossible_model_dimensions_are_refused() -> None:
    spec = tiny_cpu()
    huge = {**spec["target"]["config"], "hidden_size": 2**20, "num_hidden_layers": 2000, "intermediate_size": 2**24}
    spec["target"] = {"model": "pair/target", "config": huge}
    _, _, conditions = decide(parent(spec))
    assert conditions["Accepted"].status == "False"
    assert "spec.target.config" in conditions["Ready"].message
