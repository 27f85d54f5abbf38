"""GPUs with known memory, and the engine's memory coefficients on each."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Final

from specdecode_operator.sizing.arithmetic import MIB, Named, gib_to_bytes
from specdecode_operator.sizing.data_files import read_data
from specdecode_operator.sizing.result_cache import MEMO_SIZE


@dataclass(frozen=True)
class Device:
    """A GPU product."""

    product: str  # Exact value of the node label nvidia.com/gpu.product
    total_bytes: int  # Memory as CUDA reports it: what vLLM takes its share of
    source: str  # Where the number comes from
    # How many GPUs of a node NVLink joins, by NVIDIA's data sheets: all 8 of an SXM board by its switch, the 2 of an
    # NVL pair by bridges; 1 where bridges are an option
    nvlink_gpus: int = 1
    capability: str | None = None  # CUDA compute capability, such as 9.0; None if only the memory is known
    calibrated: bool = True  # Whether public start-up logs of vLLM on this GPU confirm the memory terms


@dataclass(frozen=True)
class NonTorch:
    """Memory outside torch and inside the budget, in bytes; data/memory.json holds the source."""

    # Without tensor parallelism: alone, and with pipeline stages
    one_gpu: int
    pipeline_only: int
    # With tensor parallelism of two, of more and of eight: a constant, and a part for each layer
    two_gpus: int
    two_gpus_per_layer: int
    more_gpus: int
    more_gpus_per_layer: int
    eight_gpus: int
    eight_gpus_per_layer: int
    # Under model runner V2
    v2_one_gpu: int
    v2_several_gpus: int


@dataclass(frozen=True)
class GraphMemory:
    """Memory of CUDA graphs in bytes; data/memory.json holds the source."""

    # Under V1 with all capture sizes: for each layer, more where it has experts, and for each step of quantization
    v1_layer: int
    v1_expert_layer: int
    v1_quantization_step: int
    v1_sizes: int  # Capture sizes that those were measured with
    # What V1 then really takes with all capture sizes: a constant, and as above
    v1_pool: int
    v1_pool_layer: int
    v1_pool_expert_layer: int
    v1_pool_quantization_step: int
    # Under V2: a constant, for each capture size but one, and those of a draft head
    v2: int
    v2_size: int
    v2_draft_head: int
    v2_pool: int  # What V2 may really take


@dataclass(frozen=True)
class MemoryCoefficients:
    """Terms that no formula gives; data/memory.json holds the source of each."""

    # Workspace that torch keeps for cuBLAS; cache that compiled code flushes once
    cublas_workspace_bytes: int
    l2_bytes: int
    # Of the GPU: how many, the threads on all of them, local memory a thread has without being asked
    multiprocessors: int
    resident_threads: int
    default_stack_bytes: int
    # Memory outside torch and of CUDA graphs
    non_torch: NonTorch
    graphs: GraphMemory
    context_bytes: int  # What is taken before vLLM's first look at the memory
    slack_reserve_bytes: int  # What stays free beside the budget for tables and fragments
    unknown_version_margin_bytes: int  # By how much more the estimates may err for a vLLM that nobody looked into
    uncalibrated_gpu_share: float  # By which share of the estimated terms they may err more on a GPU without logs
    # The engine's own processes on CPU, one more rank's, and by how much that may err
    cpu_overhead_bytes: int
    cpu_rank_overhead_bytes: int
    cpu_margin_bytes: int


MEMORY_FIELD: Final = "accelerator.memoryGiBPerGPU"
"""Where users say how much memory the GPUs of a product without figures have."""

_BY_MEMORY: Final = "GPU of {gib:g}GiB"
"""What a GPU is called of which only the memory is known. The blanks keep it from ever being a label's value."""

_NAMED_BY_MEMORY: Final = re.compile(r"GPU of (\d+(?:\.\d+)?)GiB")
_MEMORY: Final = re.compile(r"\s*(\d{1,4}(?:\.\d{1,3})?)\s*(?:GiB|Gi)\s*", re.IGNORECASE)
_LEAST_GIB: Final = 1


def find_device(product: str, memory_gib: int | None = None) -> Device | None:
    """Return the device with exactly this product label, or that a memory has named.

    ``memory_gib`` is the memory in GiB that a user gives for products without figures; without it they have no device,
    and known products keep their own figure.
    """
    named = _NAMED_BY_MEMORY.fullmatch(product)
    if named:
        return Device(product, gib_to_bytes(float(named[1])), "as given", calibrated=False)
    known = _devices().get(product)
    if known is None and memory_gib is not None:
        given_bytes = gib_to_bytes(memory_gib)
        return Device(product, given_bytes, MEMORY_FIELD, calibrated=False)
    return known


def product_of_memory(text: str) -> str | None:
    """Return what a GPU with so much memory, such as ``48GiB``, is called; None where the text is no memory."""
    found = _MEMORY.fullmatch(text)
    if found is None or float(found[1]) < _LEAST_GIB:
        return None
    return _BY_MEMORY.format(gib=float(found[1]))


_VENDOR: Final = "NVIDIA-"
_FAMILY: Final = re.compile(r"RTX-PRO-\d+|[A-Za-z0-9]+")


def family_of(product: str) -> str:
    """Return what people call a product: H100 for NVIDIA-H100-80GB-HBM3; other labels as they are."""
    found = _FAMILY.match(product.removeprefix(_VENDOR)) if product.startswith(_VENDOR) else None
    return product if found is None else found[0]


def known_products() -> tuple[str, ...]:
    """Return the product labels that can be sized, sorted."""
    return tuple(sorted(_devices()))


GENERATIONS: Final[Mapping[str, str]] = {
    "8.0": "Ampere",
    "8.6": "Ampere",
    "8.9": "Ada",
    "9.0": "Hopper",
    "10.0": "Blackwell",
    "10.3": "Blackwell",
    "12.0": "Blackwell RTX",
}
"""Generation of GPUs by their CUDA compute capability: those of one generation run the same kernels in vLLM."""


@lru_cache(maxsize=MEMO_SIZE)
def generation_of(product: str) -> str | None:
    """Return the generation of a product; None for one whose compute capability is not known."""
    device = find_device(product)
    return None if device is None or device.capability is None else GENERATIONS[device.capability]


def uncalibrated_note(device: Device) -> str | None:
    """Return what to know of the figures for a GPU without public start-up logs; None for one that has them."""
    if device.calibrated:
        return None
    subject = f"{device.product} is uncalibrated"
    generation = generation_of(device.product)
    if generation is None:
        return f"{subject}: only its memory is known, and all else is taken for that of an H100 without NVLink"
    note = f"{subject}: no public start-up log of vLLM on it confirms the memory terms, which are those of an H100"
    unmodelled = _UNMODELLED.get(generation)
    return note if unmodelled is None else f"{note}; {unmodelled}"


_UNMODELLED: Final = {
    "Blackwell": (
        "vLLM runs other kernels on compute capability 10: FlashInfer with TensorRT-LLM's for attention, their own"
        " workspaces for NVFP4 experts; what these and their CUDA graphs take is not modelled"
    ),
    "Blackwell RTX": (
        "vLLM runs other kernels on compute capability 12: FlashAttention 2, Triton for latent attention, CUTLASS for"
        " NVFP4; what their workspaces and CUDA graphs take is not modelled"
    ),
}
"""What differs from Hopper and is not counted: vLLM 0.33, platforms/cuda.py, _get_backend_priorities;
v1/attention/backends/fa_utils.py, get_flash_attn_version; model_executor/layers/fused_moe/oracle/nvfp4.py."""


@cache
def memory_coefficients() -> MemoryCoefficients:
    """Return the coefficients of data/memory.json."""
    data = read_data("memory.json")
    gpu, non_torch = data["gpu"], data["non_torch_gib"]
    return MemoryCoefficients(
        cublas_workspace_bytes=Named(gpu["cublas_workspace_mib"] * MIB, "of cuBLAS"),
        l2_bytes=Named(gpu["l2_mib"] * MIB, "of the L2 cache"),
        multiprocessors=gpu["multiprocessors"],
        resident_threads=gpu["multiprocessors"] * gpu["threads_per_multiprocessor"],
        default_stack_bytes=gpu["default_stack_bytes"],
        non_torch=NonTorch(**{key: _of_non_torch(key, size) for key, size in non_torch.items() if key != "source"}),
        graphs=_graph_memory(data["cuda_graphs"]),
        context_bytes=Named(gib_to_bytes(data["context_gib"]["value"]), "of CUDA's context"),
        slack_reserve_bytes=Named(gib_to_bytes(data["slack_reserve_gib"]["value"]), "for tables"),
        unknown_version_margin_bytes=gib_to_bytes(data["unknown_version_margin_gib"]["value"]),
        uncalibrated_gpu_share=data["uncalibrated_gpu_share"]["value"],
        cpu_overhead_bytes=gib_to_bytes(data["cpu_overhead_gib"]["value"]),
        cpu_rank_overhead_bytes=gib_to_bytes(data["cpu_rank_overhead_gib"]["value"]),
        cpu_margin_bytes=gib_to_bytes(data["cpu_margin_gib"]["value"]),
    )


_NON_TORCH_WORDS: Final = {
    "one_gpu": "under V1 on one GPU",
    "pipeline_only": "under V1 on one GPU of a stage",
    "v2_one_gpu": "under V2 on one GPU of a stage",
    "v2_several_gpus": "under V2 on several GPUs, NCCL among them",
}


def _of_non_torch(key: str, gib: float) -> int:
    size_bytes, words = gib_to_bytes(gib), _NON_TORCH_WORDS.get(key)
    return Named(size_bytes, words) if words else size_bytes


def _graph_memory(graphs: dict[str, Any]) -> GraphMemory:
    def mib(key: str) -> int:
        return round(float(graphs[key]) * MIB)

    return GraphMemory(
        v1_layer=mib("v1_layer_mib"),
        v1_expert_layer=mib("v1_expert_layer_mib"),
        v1_quantization_step=mib("v1_quantization_step_mib"),
        v1_sizes=graphs["v1_sizes"],
        v1_pool=mib("v1_pool_mib"),
        v1_pool_layer=mib("v1_pool_layer_mib"),
        v1_pool_expert_layer=mib("v1_pool_expert_layer_mib"),
        v1_pool_quantization_step=mib("v1_pool_quantization_step_mib"),
        v2=gib_to_bytes(graphs["v2_gib"]),
        v2_size=mib("v2_size_mib"),
        v2_draft_head=gib_to_bytes(graphs["v2_draft_head_gib"]),
        v2_pool=Named(gib_to_bytes(graphs["v2_pool_gib"]), "that graphs really take"),
    )


@cache
def _devices() -> dict[str, Device]:
    entries = read_data("devices.json")["devices"]
    devices = [
        Device(
            entry["product"],
            gib_to_bytes(entry["total_gib"]),
            entry["source"],
            entry["nvlink_gpus"],
            entry["capability"],
            entry["calibrated"],
        )
        for entry in entries
    ]
    return {device.product: device for device in devices}


PRODUCT_FIELD: Final = "accelerator.product"
"""Where users say which GPUs may be used."""
