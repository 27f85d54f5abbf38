"""GPUs with known memory, and the engine's memory coefficients on each."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Final

from specdecode_operator.sizing.arithmetic import MIB, Named, gib_to_bytes
from specdecode_operator.sizing.data_files import read_data
from specdecode_operator.sizing.result_cache import MEMO_SIZE


@dataclass(frozen=True)
class Device:
    """A GPU product."""

    product: str  # Exact value of the node label nvidia.com/gpu.product
    total_bytes: int  # As CUDA reports it: vLLM takes its share of it
    source: str  # Of total_bytes
    # GPUs of a node that NVLink joins, by NVIDIA's data sheets: 8 of an SXM board by its switch, 2 of an NVL pair by
    # bridges; 1 if bridges are an option
    nvlink_gpus: int = 1
    capability: str | None = None  # CUDA compute capability, such as 9.0; None if only the memory is known
    calibrated: bool = True  # Whether public start-up logs of vLLM on this GPU confirm the memory terms


@dataclass(frozen=True)
class NonTorch:
    """Memory outside torch and inside the budget, in bytes; data/memory.json holds the source."""

    # Without tensor parallelism: alone, and with pipeline stages
    one_gpu: int
    pipeline_only: int
    # With tensor parallelism of 2, of more and of 8: a constant, and a part for each layer
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

    # Under V1 with all capture sizes: for each layer, more if it has experts, and for each step of quantization
    v1_layer: int
    v1_expert_layer: int
    v1_quantization_step: int
    v1_sizes: int  # Capture sizes that those were measured with
    # Actual memory of V1 with all capture sizes: a constant, and as above
    v1_pool: int
    v1_pool_layer: int
    v1_pool_expert_layer: int
    v1_pool_quantization_step: int
    # Under V2: a constant, for each capture size but one, and those of a draft head
    v2: int
    v2_size: int
    v2_draft_head: int
    v2_pool: int  # Actual maximum of V2


@dataclass(frozen=True)
class MemoryCoefficients:
    """Terms that no formula gives; data/memory.json holds the source of each."""

    # Workspace that torch keeps for cuBLAS; cache that compiled code flushes once
    cublas_workspace_bytes: int
    l2_bytes: int
    # Of the GPU; resident_threads are those of all multiprocessors, the stack is the default local memory of a thread
    multiprocessors: int
    resident_threads: int
    default_stack_bytes: int
    non_torch: NonTorch
    graphs: GraphMemory
    context_bytes: int  # Taken before vLLM's first memory snapshot
    slack_reserve_bytes: int  # Free beside the budget for tables and fragments
    unknown_version_margin_bytes: int  # Additional error of estimates for an unread vLLM version
    uncalibrated_gpu_share: float  # Additional error on a GPU without logs, as a share of the estimated terms
    # The engine's own processes on CPU, one more rank's, and their error
    cpu_overhead_bytes: int
    cpu_rank_overhead_bytes: int
    cpu_margin_bytes: int


MEMORY_FIELD: Final = "accelerator.memoryGiBPerGPU"
PRODUCT_FIELD: Final = "accelerator.products"

_NAMED_BY_MEMORY: Final = re.compile(r"GPU of (\d+(?:\.\d+)?)GiB")
"""Product of a GPU of which only the memory is known. The blanks prevent a clash with a label's value."""

UNNAMED_GPU: Final = "GPU"
"""Stands for the product of devices whose driver names none."""

_MEASURED: Final = re.compile(r"(?P<product>.+?)(-MIG-(?P<profile>.+))?-(?P<mib>[1-9]\d{0,7})MiB")
"""Product of a device whose driver reports its memory: a GPU without figures, or a MIG device."""

_MEMORY: Final = re.compile(r"\s*(\d{1,4}(?:\.\d{1,3})?)\s*(?:GiB|Gi)\s*", re.IGNORECASE)
_LEAST_GIB: Final = 1
_VENDOR: Final = "NVIDIA-"
_ALIKE: Final = 0.8
"""Minimum similarity of a misspelt product label."""
_ALIKE_SHORT: Final = 0.75
"""The same of short names, where one wrong character of four must pass."""
KNOWN_GPUS: Final = 'known GPUs: documentation, "Other GPUs"'
"""Section of docs/reference/supported.md that lists them."""

_FAMILY: Final = re.compile(r"RTX-PRO-\d+|[A-Za-z0-9]+")

GENERATIONS: Final[Mapping[str, str]] = {
    "8.0": "Ampere",
    "8.6": "Ampere",
    "8.9": "Ada",
    "9.0": "Hopper",
    "10.0": "Blackwell",
    "10.3": "Blackwell",
    "12.0": "Blackwell RTX",
}
"""Generation of GPUs by CUDA compute capability; one generation runs the same kernels in vLLM."""


@cache
def _devices() -> dict[str, Device]:
    return {
        entry["product"]: Device(
            entry["product"],
            gib_to_bytes(entry["total_gib"]),
            entry["source"],
            entry["nvlink_gpus"],
            entry["capability"],
            entry["calibrated"],
        )
        for entry in read_data("devices.json")["devices"]
    }


def find_device(product: str, memory_gib: int | None = None) -> Device | None:
    """Return the device with exactly this product label, or with the memory of `product_of_memory`.

    ``memory_gib`` is the memory that a user gives for products without figures; known products keep their own figure.
    """
    named = _NAMED_BY_MEMORY.fullmatch(product)
    if named:
        return Device(product, gib_to_bytes(float(named[1])), "as given", calibrated=False)
    known = _devices().get(product)
    if known is None and (measured := measured_product(product)) is not None:
        whole = _devices().get(measured.product)
        capability = None if whole is None else whole.capability
        source = "the device's ResourceSlice"
        return Device(product, measured.memory_mib * MIB, source, capability=capability, calibrated=False)
    if known is None and memory_gib is not None:
        return Device(product, gib_to_bytes(memory_gib), MEMORY_FIELD, calibrated=False)
    return known


@dataclass(frozen=True)
class MeasuredProduct:
    """A device with the memory that its driver reports."""

    product: str  # Product label of the whole GPU
    memory_mib: int
    profile: str | None = None  # MIG profile as in labels, such as 3g.40gb; None for a whole GPU

    def __str__(self) -> str:
        """Return the name under which `find_device` knows it: ``NVIDIA-H100-80GB-HBM3-MIG-3g.40gb-40448MiB``."""
        profile = "" if self.profile is None else f"-MIG-{self.profile}"
        return f"{self.product}{profile}-{self.memory_mib}MiB"


@lru_cache(maxsize=MEMO_SIZE)
def measured_product(text: str) -> MeasuredProduct | None:
    """Parse the name of a measured product; None for other names."""
    found = _MEASURED.fullmatch(text)
    return None if found is None else MeasuredProduct(found["product"], int(found["mib"]), found["profile"])


def mig_profile(product: str) -> str | None:
    """Return the MIG profile of a measured product; None for a whole GPU."""
    found = measured_product(product)
    return None if found is None else found.profile


def product_of_memory(text: str) -> str | None:
    """Return the product of a GPU with a memory such as ``48GiB``; None if the text is not a memory."""
    found = _MEMORY.fullmatch(text)
    if found is None or float(found[1]) < _LEAST_GIB:
        return None
    return f"GPU of {float(found[1]):g}GiB"


def family_of(product: str) -> str:
    """Return the short name of a product, such as H100 or H100 MIG 3g.40gb; labels of other vendors are unchanged."""
    found = _FAMILY.match(product.removeprefix(_VENDOR)) if product.startswith(_VENDOR) else None
    if found is None:
        return product
    profile = mig_profile(product)
    return found[0] if profile is None else f"{found[0]} MIG {profile}"


def known_products() -> tuple[str, ...]:
    """Return the product labels that can be sized, sorted."""
    return tuple(sorted(_devices()))


def similar_products(text: str) -> tuple[str, ...]:
    """Return the known products that a name abbreviates, such as ``H100``, or else up to three that it resembles."""
    parts = set(text.upper().split("-"))
    whole = tuple(label for label in known_products() if parts <= set(label.upper().split("-")))
    return whole or tuple(difflib.get_close_matches(text.upper(), known_products(), n=3, cutoff=_ALIKE))


def similar_name(text: str) -> str | None:
    """Return the known product or short name that a misspelt name resembles most, such as H100 for ``H10O``.

    The first character must be right: V100 is another GPU, not a misspelt H100.
    """
    names = [*dict.fromkeys(map(family_of, known_products())), *known_products()]
    near = [each for each in names if each.startswith(text[:1].upper())]
    return next(iter(difflib.get_close_matches(text.upper(), near, n=1, cutoff=_ALIKE_SHORT)), None)


@lru_cache(maxsize=MEMO_SIZE)
def generation_of(product: str) -> str | None:
    """Return the generation of a product; None if its compute capability is not known."""
    device = find_device(product)
    return None if device is None or device.capability is None else GENERATIONS[device.capability]


def uncalibrated_note(device: Device) -> str | None:
    """Return a caveat about the figures for a GPU without public start-up logs; None for one that has them."""
    if device.calibrated:
        return None
    subject = f"{device.product} is uncalibrated"
    generation = generation_of(device.product)
    if generation is None:
        return f"{subject}: only its memory is known; other figures are taken from an H100 without NVLink"
    note = f"{subject}: no public start-up log of vLLM confirms its memory terms, which are taken from an H100"
    unmodelled = _UNMODELLED.get(generation)
    return note if unmodelled is None else f"{note}; {unmodelled}"


_UNMODELLED: Final = {
    "Blackwell": (
        "vLLM runs other kernels on compute capability 10: FlashInfer with TensorRT-LLM kernels for attention, separate"
        " workspaces for NVFP4 experts; the memory of these and of their CUDA graphs is not modelled"
    ),
    "Blackwell RTX": (
        "vLLM runs other kernels on compute capability 12: FlashAttention 2, Triton for latent attention, CUTLASS for"
        " NVFP4; the memory of their workspaces and CUDA graphs is not modelled"
    ),
}
"""Differences from Hopper that are not counted: vLLM 0.33, platforms/cuda.py, _get_backend_priorities;
v1/attention/backends/fa_utils.py, get_flash_attn_version; model_executor/layers/fused_moe/oracle/nvfp4.py."""


_NON_TORCH_WORDS: Final = {
    "one_gpu": "under V1 on one GPU",
    "pipeline_only": "under V1 on one GPU of a stage",
    "v2_one_gpu": "under V2 on one GPU of a stage",
    "v2_several_gpus": "under V2 on several GPUs, NCCL among them",
}


@cache
def memory_coefficients() -> MemoryCoefficients:
    """Return the coefficients of data/memory.json."""
    data = read_data("memory.json")
    gpu, graphs = data["gpu"], data["cuda_graphs"]
    non_torch = {key: gib_to_bytes(gib) for key, gib in data["non_torch_gib"].items() if key != "source"}
    non_torch |= {key: Named(non_torch[key], words) for key, words in _NON_TORCH_WORDS.items()}
    graph_bytes = {
        key.removesuffix("_mib"): round(float(mib) * MIB) for key, mib in graphs.items() if key.endswith("_mib")
    }
    return MemoryCoefficients(
        cublas_workspace_bytes=Named(gpu["cublas_workspace_mib"] * MIB, "of cuBLAS"),
        l2_bytes=Named(gpu["l2_mib"] * MIB, "of the L2 cache"),
        multiprocessors=gpu["multiprocessors"],
        resident_threads=gpu["multiprocessors"] * gpu["threads_per_multiprocessor"],
        default_stack_bytes=gpu["default_stack_bytes"],
        non_torch=NonTorch(**non_torch),
        graphs=GraphMemory(
            **graph_bytes,
            v1_sizes=graphs["v1_sizes"],
            v2=gib_to_bytes(graphs["v2_gib"]),
            v2_draft_head=gib_to_bytes(graphs["v2_draft_head_gib"]),
            v2_pool=Named(gib_to_bytes(graphs["v2_pool_gib"]), "that graphs really take"),
        ),
        context_bytes=Named(gib_to_bytes(data["context_gib"]["value"]), "of CUDA's context"),
        slack_reserve_bytes=Named(gib_to_bytes(data["slack_reserve_gib"]["value"]), "for tables"),
        unknown_version_margin_bytes=gib_to_bytes(data["unknown_version_margin_gib"]["value"]),
        uncalibrated_gpu_share=data["uncalibrated_gpu_share"]["value"],
        cpu_overhead_bytes=gib_to_bytes(data["cpu_overhead_gib"]["value"]),
        cpu_rank_overhead_bytes=gib_to_bytes(data["cpu_rank_overhead_gib"]["value"]),
        cpu_margin_bytes=gib_to_bytes(data["cpu_margin_gib"]["value"]),
    )
