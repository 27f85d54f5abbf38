"""What plans need to know of a node, from GPU-feature-discovery labels."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PRODUCT_LABEL = "nvidia.com/gpu.product"
GPU_RESOURCE = "nvidia.com/gpu"


@dataclass(frozen=True)
class NodeFacts:
    """GPUs of one node.

    Attributes
    ----------
    name
        Name of the node.
    product
        Exact GPU product.
    gpus
        GPUs that pods may take.
    schedulable
        False while the node is cordoned: what runs there stays, nothing new comes.
    """

    name: str
    product: str
    gpus: int
    schedulable: bool = True


def node_facts(body: Mapping[str, Any]) -> NodeFacts | None:
    """Facts of a node with GPUs; None for one without."""
    product = (body["metadata"].get("labels") or {}).get(PRODUCT_LABEL)
    gpus = _count((body.get("status", {}).get("allocatable") or {}).get(GPU_RESOURCE, "0"))
    if not product or gpus < 1:
        return None
    unschedulable = body.get("spec", {}).get("unschedulable", False)
    return NodeFacts(body["metadata"]["name"], product, gpus, schedulable=not unschedulable)


def _count(quantity: str) -> int:
    """Device plugins count in plain numbers; anything else is no count of theirs."""
    return int(quantity) if str(quantity).isdecimal() else 0
