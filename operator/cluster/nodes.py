"""GPUs of a node from its GPU-feature-discovery labels.

The label forms are from NVIDIA/k8s-device-plugin, docs/gpu-feature-discovery/README.md and
internal/lm/{resource,mig-strategy}.go.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from specdecode_operator.cluster.resources import RESOURCE_CLAIM_ANNOTATION
from specdecode_operator.untrusted import mapping, objects, parse_json, whole_number

PRODUCT_LABEL: Final = "nvidia.com/gpu.product"
GPU_RESOURCE: Final = "nvidia.com/gpu"

_PREFIX: Final = "nvidia.com/"
_REPLICAS_LABEL: Final = "nvidia.com/gpu.replicas"
_SHARING_LABEL: Final = "nvidia.com/gpu.sharing-strategy"
_RENAMED_RESOURCE: Final = "nvidia.com/gpu.shared"
"""Name of slices of time-slicing with renameByDefault."""

_MIG_RESOURCE: Final = re.compile(r"nvidia\.com/mig-\S+")
"""Name of slices with mig.strategy mixed."""

_MIG_PRODUCT: Final = re.compile(r"(?P<product>.+)-MIG-(?P<profile>.+?)(-SHARED)?")
_SHARED_PRODUCT: Final = re.compile(r"(?P<product>.+)-SHARED")


class NodesFrom(Enum):
    """Source of the nodes."""

    CLUSTER = auto()
    FILE = auto()
    """A file, because an operator of named namespaces may not list nodes."""
    NOWHERE = auto()
    """The same without a file."""


@dataclass(frozen=True)
class NodeFacts:
    """GPUs of one node."""

    name: str
    product: str
    """Exact GPU product of its label; empty if the label is missing."""
    gpus: int
    """Allocatable GPUs."""
    schedulable: bool = True
    """False while the node is cordoned."""
    refusal: str | None = None
    """Why its GPUs cannot be planned for, or None."""


def node_facts(body: Mapping[str, Any]) -> NodeFacts | None:
    """Return the facts of a node with GPUs of any form; None for one without."""
    labels = body["metadata"].get("labels") or {}
    allocatable = body.get("status", {}).get("allocatable") or {}
    counts = {name: _count(quantity) for name, quantity in allocatable.items() if name.startswith(_PREFIX)}
    resources = {name: count for name, count in counts.items() if count > 0}
    product = labels.get(PRODUCT_LABEL) or ""
    if not resources and not product:
        return None
    refusal = product_refusal(product) or _sharing_refusal(labels, resources) or _missing_gpus(resources)
    if not product:
        refusal = f"it has GPUs but no label {PRODUCT_LABEL}: install GPU-feature-discovery, or set the label"
    schedulable = not body.get("spec", {}).get("unschedulable", False)
    return NodeFacts(body["metadata"]["name"], product, resources.get(GPU_RESOURCE, 0), schedulable, refusal)


def gpus_of(pod: Mapping[str, Any]) -> int:
    """Return the number of GPUs that a pod requests of the device plugin, or claims for the operator."""
    limits = (mapping(mapping(each, "resources"), "limits") for each in objects(mapping(pod, "spec"), "containers"))
    return sum(_count(each.get(GPU_RESOURCE, "0")) for each in limits) + _claimed(pod)


def _claimed(pod: Mapping[str, Any]) -> int:
    """Return the number of GPUs in the operator's annotation; 0 without a claim, as users can write annotations."""
    if not objects(mapping(pod, "spec"), "resourceClaims"):
        return 0
    text = mapping(mapping(pod, "metadata"), "annotations").get(RESOURCE_CLAIM_ANNOTATION)
    try:
        request = parse_json(text) if isinstance(text, str) else None
    except ValueError:
        return 0
    return _count(request.get("count")) if isinstance(request, dict) else 0


def product_refusal(product: str) -> str | None:
    """Return why a product label does not stand for a whole, unshared GPU, or None."""
    mig = _MIG_PRODUCT.fullmatch(product)
    if mig and mig["profile"] == "INVALID":
        return "its MIG slices differ, which mig.strategy single cannot name: switch MIG off on this node"
    if mig:
        return (
            f"is a MIG slice: only whole GPUs are sized, and no slice has the memory of {mig['product']};"
            " switch MIG off on this node, or use another"
        )
    if _SHARED_PRODUCT.fullmatch(product):
        return _shared("time-slicing or MPS")
    return None


def _sharing_refusal(labels: Mapping[str, str], resources: Mapping[str, int]) -> str | None:
    # With a renamed resource the product has no suffix.
    strategy = labels.get(_SHARING_LABEL, "none")
    if _count(labels.get(_REPLICAS_LABEL, "1")) > 1 or strategy != "none" or _RENAMED_RESOURCE in resources:
        return _shared("sharing" if strategy == "none" else strategy)
    return None


def _missing_gpus(resources: Mapping[str, int]) -> str | None:
    if resources.get(GPU_RESOURCE, 0) > 0:
        return None
    slices = sorted(name for name in resources if _MIG_RESOURCE.fullmatch(name))
    if slices:
        return f"all its GPUs are cut into MIG slices ({', '.join(slices)}), and only whole GPUs are sized"
    return f"it offers no {GPU_RESOURCE}: does the device plugin run there?"


def _shared(how: str) -> str:
    return (
        f"is shared by several pods ({how}), whose use of it is unknown, so no memory can be planned;"
        " use a node whose GPUs are not shared"
    )


def _count(quantity: object) -> int:
    return whole_number(quantity) or 0
