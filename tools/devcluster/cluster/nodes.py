"""What `--nodes` means, and what a simulated GPU node looks like."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from devcluster.host.errors import ClusterError

FORMAT = (
    "real, none, or kwok=<nodes>x<product>:<GPUs each>[,…] such as kwok=2xH100:8,1xH200:8; "
    "real and kwok may be combined: real,kwok=2xH100:8"
)
FAKE_ANNOTATION = "kwok.x-k8s.io/node"
FAKE_SELECTOR = "type=kwok"


@dataclass(frozen=True)
class Product:
    """A GPU model as GPU feature discovery labels it."""

    name: str
    memory_mib: int
    family: str


PRODUCTS = {
    "H100": Product("NVIDIA-H100-80GB-HBM3", 81559, "hopper"),
    "H200": Product("NVIDIA-H200", 143771, "hopper"),
}
"""The label values that NVIDIA's GPU feature discovery sets on SXM machines (memory in MiB)."""

_CPUS_PER_GPU = 24
_MEMORY_GIB_PER_GPU = 256
"""An eight-GPU DGX-class machine has 192 or more cores and 2 TiB."""


@dataclass(frozen=True)
class FakeNodes:
    """So many simulated nodes of one product with so many GPUs each."""

    count: int
    product: str
    gpus: int


@dataclass(frozen=True)
class NodePlan:
    """The nodes that a cluster has: a real kubelet or not, and simulated ones."""

    real: bool
    fake: tuple[FakeNodes, ...] = ()

    @property
    def needs_root(self) -> bool:
        """Decide whether the cluster needs a network namespace, and so root."""
        return self.real or bool(self.fake)


def parse(text: str) -> NodePlan:
    """Return what a `--nodes` value asks for; refuse anything else with the format."""
    head, kwok, groups = text.partition("kwok=")
    match head, bool(kwok):
        case "none", False:
            return NodePlan(real=False)
        case "real", False:
            return NodePlan(real=True)
        case (("" | "real,"), True):
            return NodePlan(real=bool(head), fake=parse_fake(groups, whole=text))
        case _:
            raise _bad(text)


def parse_fake(text: str, whole: str | None = None) -> tuple[FakeNodes, ...]:
    """Return the groups of a list such as `2xH100:8,1xH200:8`; errors quote the `whole` value."""
    groups = []
    for item in text.split(","):
        match = re.fullmatch(r"([1-9][0-9]{0,3})x([A-Za-z0-9]+):([1-9][0-9]?)", item)
        if not match or match[2] not in PRODUCTS:
            raise _bad(whole or text, item)
        groups.append(FakeNodes(int(match[1]), match[2], int(match[3])))
    return tuple(groups)


def _bad(text: str, part: str | None = None) -> ClusterError:
    culprit = f"{text!r}" if part is None else f"{text!r} ({part!r})"
    return ClusterError(f"nodes {culprit} not understood. Use {FORMAT}. Products: {', '.join(PRODUCTS)}")


def manifests(groups: Iterable[FakeNodes], taken: Iterable[str] = ()) -> dict[str, dict[str, object]]:
    """Return Node objects for the groups by name, with names that are not `taken`: h100-0, h100-1, …."""
    used = set(taken)
    nodes: dict[str, dict[str, object]] = {}
    for group in groups:
        free = (f"{group.product.lower()}-{i}" for i in range(len(used) + group.count))
        names = [name for name in free if name not in used][: group.count]
        used.update(names)
        nodes |= {name: _manifest(name, group) for name in names}
    return nodes


def _manifest(name: str, group: FakeNodes) -> dict[str, object]:
    product = PRODUCTS[group.product]
    capacity = {
        "cpu": str(_CPUS_PER_GPU * group.gpus),
        "memory": f"{_MEMORY_GIB_PER_GPU * group.gpus}Gi",
        "ephemeral-storage": "1Ti",
        "pods": "110",
        "nvidia.com/gpu": str(group.gpus),
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {FAKE_ANNOTATION: "fake"},
            "labels": {
                "type": "kwok",
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": "amd64",
                "nvidia.com/gpu.product": product.name,
                "nvidia.com/gpu.count": str(group.gpus),
                "nvidia.com/gpu.memory": str(product.memory_mib),
                "nvidia.com/gpu.family": product.family,
                "nvidia.com/gpu.present": "true",
            },
        },
        # Keeps pods that did not ask for a simulated node away from it.
        "spec": {"taints": [{"key": FAKE_ANNOTATION, "value": "fake", "effect": "NoSchedule"}]},
        "status": {"capacity": capacity, "allocatable": capacity},
    }
