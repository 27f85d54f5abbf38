"""GPUs of a node from its GPU-feature-discovery labels.

The label forms are those of NVIDIA/k8s-device-plugin, docs/gpu-feature-discovery/README.md and
internal/lm/{resource,mig-strategy}.go.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from specdecode_operator.untrusted import mapping, objects, whole_number

PRODUCT_LABEL: Final = "nvidia.com/gpu.product"
GPU_RESOURCE: Final = "nvidia.com/gpu"

_PREFIX: Final = "nvidia.com/"
_REPLICAS_LABEL: Final = "nvidia.com/gpu.replicas"
_SHARING_LABEL: Final = "nvidia.com/gpu.sharing-strategy"
_RENAMED_RESOURCE: Final = "nvidia.com/gpu.shared"
"""What time-slicing calls its slices when it is told to rename them."""

_MIG_RESOURCE: Final = re.compile(r"nvidia\.com/mig-\S+")
"""What the device plugin calls slices under mig.strategy mixed."""

_MIG_PRODUCT: Final = re.compile(r"(?P<product>.+)-MIG-(?P<profile>.+?)(-SHARED)?")
_SHARED_PRODUCT: Final = re.compile(r"(?P<product>.+)-SHARED")


class NodesFrom(Enum):
    """Where the operator knows nodes from."""

    CLUSTER = auto()
    FILE = auto()
    """Its configuration: one that serves named namespaces may not look at nodes."""

    NOWHERE = auto()
    """The same without a file."""


@dataclass(frozen=True)
class NodeFacts:
    """GPUs of one node."""

    name: str
    product: str
    """Exact GPU product as its label has it; empty when the label is missing."""
    gpus: int
    """That pods may take."""
    schedulable: bool = True
    """False while the node is cordoned: what runs there stays, nothing new comes."""
    refusal: str | None = None
    """Why its GPUs cannot be planned for, whatever their product; None when they can."""


def node_facts(body: Mapping[str, Any]) -> NodeFacts | None:
    """Return the facts of a node with GPUs of any form; None for one without."""
    labels = body["metadata"].get("labels") or {}
    resources = _nvidia_resources(body)
    product = labels.get(PRODUCT_LABEL) or ""
    if not resources and not product:
        return None
    gpus = resources.get(GPU_RESOURCE, 0)
    return NodeFacts(
        body["metadata"]["name"],
        product,
        gpus,
        schedulable=not body.get("spec", {}).get("unschedulable", False),
        refusal=_refusal(product, labels, resources),
    )


def gpus_of(pod: Mapping[str, Any]) -> int:
    """Return how many GPUs the containers of a pod ask for."""
    limits = (mapping(mapping(each, "resources"), "limits") for each in objects(mapping(pod, "spec"), "containers"))
    return sum(_count(each.get(GPU_RESOURCE, "0")) for each in limits)


def product_refusal(product: str) -> str | None:
    """Return why a product label names no whole GPU of one owner; None when it may."""
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


def _refusal(product: str, labels: Mapping[str, str], resources: Mapping[str, int]) -> str | None:
    if not product:
        return f"it has GPUs but no label {PRODUCT_LABEL}: install GPU-feature-discovery, or set the label"
    return product_refusal(product) or _sharing_refusal(labels, resources) or _missing_gpus(resources)


def _sharing_refusal(labels: Mapping[str, str], resources: Mapping[str, int]) -> str | None:
    """Sharing leaves the product as it is when its resource is renamed, so other labels tell of it too."""
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
        f"is shared by several pods ({how}): what the others take is not known, so nothing can be promised;"
        " use a node whose GPUs are not shared"
    )


def _nvidia_resources(body: Mapping[str, Any]) -> dict[str, int]:
    """Resources of the device plugin that the node offers, those of count 0 left out."""
    allocatable = body.get("status", {}).get("allocatable") or {}
    counts = {name: _count(quantity) for name, quantity in allocatable.items() if name.startswith(_PREFIX)}
    return {name: count for name, count in counts.items() if count > 0}


def _count(quantity: object) -> int:
    """Return a count of a device plugin; 0 for anything but a plain number."""
    return whole_number(quantity) or 0
