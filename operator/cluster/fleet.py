"""What plans need to know of a node, from GPU-feature-discovery labels."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PRODUCT_LABEL = "nvidia.com/gpu.product"
GPU_RESOURCE = "nvidia.com/gpu"


@dataclass(frozen=True)
class NodeFacts:
    """GPUs of one node."""

    name: str
    product: str
    gpus: int


def node_facts(body: Mapping[str, Any]) -> NodeFacts | None:
    """Facts of a node with GPUs; None for one without, or that takes no pods."""
    product = (body["metadata"].get("labels") or {}).get(PRODUCT_LABEL)
    gpus = int((body.get("status", {}).get("allocatable") or {}).get(GPU_RESOURCE, 0))
    unschedulable = body.get("spec", {}).get("unschedulable", False)
    if not product or gpus < 1 or unschedulable:
        return None
    return NodeFacts(body["metadata"]["name"], product, gpus)
