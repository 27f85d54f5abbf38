"""Over how many nodes a replica lies, and how its GPUs are shared out among them."""

from collections.abc import Iterable
from dataclasses import dataclass

from specdecode_operator.sizing.base.devices import Device, find_device
from specdecode_operator.sizing.base.errors import PlanError
from specdecode_operator.sizing.pair.pair import TENSOR_FIELD, TENSOR_ONLY, Parallelism


@dataclass(frozen=True)
class GpuPool:
    """Nodes of one kind."""

    product: str  # Exact value of their label nvidia.com/gpu.product
    gpus_per_node: int  # GPUs of each
    nodes: int = 1  # How many of them one replica may lie on
    memory_gib: int | None = None  # Memory of each GPU, as the user gives it for products without figures

    @property
    def device(self) -> Device | None:
        """Return the GPU of these nodes; None if its memory is not known."""
        return find_device(self.product, self.memory_gib)


def nodes_needed(pool: GpuPool, tensor: int, spread: Parallelism) -> int | None:
    """Return over how many nodes of a pool a replica lies, as few as can be; None where there is no room for it.

    Each node takes the same share, as vLLM numbers its ranks
    (vllm/engine/arg_utils.py create_engine_config, ``--nnodes``): whole groups
    that share layers, or, where one such group is larger than a node, an even
    part of it. Copies stay whole: those of dense models meet at the first
    node of each, which only the leader's is known to be
    (vllm/config/parallel.py reconfigure_for_independent_dp_rank).
    """
    gpus = tensor * spread.groups
    if gpus <= pool.gpus_per_node:
        return 1
    for nodes in range(2, pool.nodes + 1):
        share, rest = divmod(gpus, nodes)
        if rest == 0 and share <= pool.gpus_per_node and _is_even(share, tensor, spread, pool.gpus_per_node):
            return nodes
    return None


def place_phrase(gpus: int, nodes: int, product: str) -> str:
    """Return where a replica lies: ``4 x NVIDIA-H200``, or ``2 nodes x 8 x NVIDIA-H200``."""
    return f"{gpus} x {product}" if nodes == 1 else f"{nodes} nodes x {gpus // nodes} x {product}"


def _is_even(share: int, tensor: int, spread: Parallelism, gpus_per_node: int) -> bool:
    """Whether a node's share of a replica cuts nothing that has to stay together."""
    if spread.data > 1:
        return share % (tensor * spread.pipeline) == 0
    if tensor <= gpus_per_node:
        return share % tensor == 0
    return tensor % share == 0


def refuse_too_many(pools: Iterable[GpuPool], tensor: int | None, spread: Parallelism) -> None:
    """Raise PlanError when a replica takes more GPUs than any pool has room for.

    Raises
    ------
    PlanError
        With the field to lower.
    """
    pools = tuple(pools)
    if any(nodes_needed(pool, tensor or 1, spread) for pool in pools):
        return
    widest = max(pool.gpus_per_node for pool in pools)
    several = any(pool.nodes > 1 for pool in pools)
    if tensor is not None and spread == TENSOR_ONLY:
        room = "nodes that may be used do not share so many" if several else "no node has so many"
        # Layers are split over powers of two.
        message = f"{room} GPUs, the largest has {widest}; write {1 << (widest.bit_length() - 1)} or less"
        raise PlanError(TENSOR_FIELD, tensor, message)
    gpus = (tensor or 1) * spread.groups
    message = f"GPUs a replica (tensor x pipeline x data), the largest node has {widest}; lower one of them"
    raise PlanError("parallelism", gpus, message)
