"""Node labels as GPU-feature-discovery writes them, and what the Planned message says of them.

Forms: NVIDIA/k8s-device-plugin docs/gpu-feature-discovery/README.md, internal/lm/{resource,mig-strategy}.go.
"""

from typing import Any

import pytest

from specdecode_operator.cluster.nodes import NodeFacts, node_facts
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from tests.support.decisions import desired_state
from tests.support.objects import H100, H200, pair_70b, parent, tiny_cpu

PLAIN = {"nvidia.com/gpu.replicas": "1", "nvidia.com/gpu.sharing-strategy": "none", "nvidia.com/mig.capable": "true"}
MIG = f"{H100}-MIG-3g.40gb"


def node(product: str | None, name: str = "n", gpus: int = 8, resource: str = "gpu", **labels: str) -> dict[str, Any]:
    named = {f"nvidia.com/{key.replace('_', '.').replace('..', '-')}": value for key, value in labels.items()}
    product_label = {} if product is None else {"nvidia.com/gpu.product": product}
    metadata = {"name": name, "labels": {**PLAIN, **product_label, **named}}
    return {"metadata": metadata, "status": {"allocatable": {"cpu": "64", f"nvidia.com/{resource}": str(gpus)}}}


def facts(body: dict[str, Any]) -> NodeFacts:
    found = node_facts(body)
    assert found is not None
    return found


def planned(*nodes: dict[str, Any], **spec: Any) -> str:
    intent = desired_state(parse_deployment(parent(pair_70b(**spec))), tuple(facts(body) for body in nodes))
    return next(condition.message for condition in intent.conditions if condition.type == "Planned")


def test_whole_gpus_keep_their_exact_product_name() -> None:
    for labels in ({}, {"mig_strategy": "single"}, {"mig_strategy": "mixed"}, {"gpu_replicas": "0"}):
        assert facts(node(H200, **labels)) == NodeFacts("n", H200, 8)


def test_node_without_gpu_labels_is_ignored() -> None:
    assert node_facts({"metadata": {"name": "n", "labels": {}}, "status": {"allocatable": {"cpu": "4"}}}) is None


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (node(MIG), "is a MIG slice"),
        (node(f"{MIG}-SHARED"), "is a MIG slice"),
        (node(f"{H100}-MIG-INVALID", gpus=0), "its MIG slices differ"),
        (node(H100, resource="mig-3g.40gb"), r"cut into MIG slices (nvidia.com/mig-3g.40gb)"),
        (node(f"{H100}-SHARED", gpu_replicas="4"), "is shared by several pods"),
        (node(H100, gpu_replicas="4"), "is shared by several pods"),
        (node(H100, gpu_sharing__strategy="mps"), "is shared by several pods (mps)"),
        (node(H100, resource="gpu.shared"), "is shared by several pods"),
        (node(H100, gpus=0), "it offers no nvidia.com/gpu"),
        (node(None), "no label nvidia.com/gpu.product"),
    ],
    ids=["mig", "shared mig", "invalid mig", "mixed", "shared", "replicas", "mps", "renamed", "no gpus", "no label"],
)
def test_partial_or_shared_gpus_are_refused_with_a_reason(body: dict[str, Any], reason: str) -> None:
    found = facts(body)
    assert found.refusal is not None
    assert reason in found.refusal
    assert found.product == body["metadata"]["labels"].get("nvidia.com/gpu.product", ""), "exactly as the label says"
    waits = planned(body)
    assert reason in waits, "the reason is visible where nothing can be planned"
    assert "node n: " in waits


def test_refused_nodes_are_named_beside_the_plan() -> None:
    message = planned(node(H200, "whole"), node(f"{H200}-SHARED", "shared"), node(MIG, "slices"))
    assert f"node slices: {MIG}: is a MIG slice" in message
    assert f"node shared: {H200}-SHARED: is shared" in message
    assert "node whole" not in message


def test_unknown_suffix_and_unknown_product_have_different_messages() -> None:
    message = planned(node(f"{H200}-OEM", "odd"), node("Tesla-T4", "old"))
    assert f"node odd: {H200}-OEM: suffix -OEM marks a variant of {H200}" in message
    assert "node old: Tesla-T4: no memory figures are known" in message


def test_nodes_excluded_by_the_spec_are_not_mentioned() -> None:
    nodes = (node(H200, "whole"), node(MIG, "slices"), node("Tesla-T4", "old"))
    message = planned(*nodes, accelerator={"products": [H200]})
    assert "slices" not in message
    assert "old" not in message
    intent = desired_state(parse_deployment(parent(tiny_cpu())), (facts(node(MIG, "slices")),))
    assert all("slices" not in condition.message for condition in intent.conditions)


@pytest.mark.parametrize("count", ["9" * 5000, "\u0668", "8.5", "", None, [8]])
def test_invalid_gpu_count_counts_as_zero(count: Any) -> None:
    body = node(H200)
    body["status"]["allocatable"]["nvidia.com/gpu"] = count
    assert facts(body).gpus == 0
    assert facts(body).refusal is not None


def test_message_about_many_nodes_is_short() -> None:
    message = planned(*(node(MIG, f"n{number}") for number in range(1000)))
    assert "nodes n0, n1, n10 and 997 more" in message
    many = planned(*(node(f"Odd-{number}", f"n{number}") for number in range(100)))
    assert "and 96 more kinds of nodes" in many
