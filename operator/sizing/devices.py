"""GPUs whose memory is known, and what the engine takes of it for itself."""

from dataclasses import dataclass
from functools import cache

from specdecode_operator.sizing.datafiles import read_data
from specdecode_operator.sizing.units import gib_to_bytes


@dataclass(frozen=True)
class Device:
    """A GPU product.

    Attributes
    ----------
    product
        Exact value of the node label nvidia.com/gpu.product.
    total_bytes
        Memory as CUDA reports it: what vLLM takes its share of.
    source
        Where the number comes from.
    """

    product: str
    total_bytes: int
    source: str


@dataclass(frozen=True)
class MemoryCoefficients:
    """Terms that no formula gives; data/memory.json holds the source of each.

    Attributes
    ----------
    non_torch_one_gpu_bytes, non_torch_several_gpus_bytes
        NCCL, workspaces and modules inside the budget, alone and with tensor parallelism.
    cuda_graphs_bytes
        What vLLM charges for graphs.
    context_bytes
        What is taken before vLLM's first look at the memory.
    margin_bytes
        What the verdict keeps back on GPUs because the terms above err.
    cpu_overhead_bytes, cpu_margin_bytes
        The engine's own processes on CPU, and by how much that may err.
    """

    non_torch_one_gpu_bytes: int
    non_torch_several_gpus_bytes: int
    cuda_graphs_bytes: int
    context_bytes: int
    margin_bytes: int
    cpu_overhead_bytes: int
    cpu_margin_bytes: int

    def non_torch_bytes(self, tensor: int) -> int:
        """Return the memory outside torch for a tensor parallelism."""
        return self.non_torch_one_gpu_bytes if tensor == 1 else self.non_torch_several_gpus_bytes


def find_device(product: str) -> Device | None:
    """Return the device with exactly this product label, or None."""
    return _devices().get(product)


def known_products() -> tuple[str, ...]:
    """Return the product labels that can be sized, sorted."""
    return tuple(sorted(_devices()))


@cache
def memory_coefficients() -> MemoryCoefficients:
    """Return the coefficients of data/memory.json."""
    data = read_data("memory.json")
    non_torch = data["non_torch_gib"]
    return MemoryCoefficients(
        non_torch_one_gpu_bytes=gib_to_bytes(non_torch["one_gpu"]),
        non_torch_several_gpus_bytes=gib_to_bytes(non_torch["several_gpus"]),
        cuda_graphs_bytes=gib_to_bytes(data["cuda_graphs_gib"]["value"]),
        context_bytes=gib_to_bytes(data["context_gib"]["value"]),
        margin_bytes=gib_to_bytes(data["margin_gib"]["value"]),
        cpu_overhead_bytes=gib_to_bytes(data["cpu_overhead_gib"]["value"]),
        cpu_margin_bytes=gib_to_bytes(data["cpu_margin_gib"]["value"]),
    )


@cache
def _devices() -> dict[str, Device]:
    entries = read_data("devices.json")["devices"]
    devices = [Device(entry["product"], gib_to_bytes(entry["total_gib"]), entry["source"]) for entry in entries]
    return {device.product: device for device in devices}
