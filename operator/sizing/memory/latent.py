"""Which kernels a GPU product decides, and what Triton's for latent attention reserves for parts of a context."""

from dataclasses import replace
from functools import lru_cache
from typing import Final

from specdecode_operator.sizing.base.devices import generation_of
from specdecode_operator.sizing.base.eras import sizing_facts
from specdecode_operator.sizing.base.formula import named
from specdecode_operator.sizing.base.remembered import MOST_REMEMBERED
from specdecode_operator.sizing.base.units import ceil_div
from specdecode_operator.sizing.model.geometry import ModelGeometry
from specdecode_operator.sizing.model.layers import LatentAttention
from specdecode_operator.sizing.model.precision import ExpertKernel
from specdecode_operator.sizing.pair.pair import Pair
from specdecode_operator.vocabulary import FLOAT32_BYTES, Precision

_TRITON: Final = "TRITON_MLA"
_SCALED_TOGETHER: Final = 128
_CONTEXT_OF_A_PART: Final = 512
_TRITON_ALONE: Final = frozenset({"Ampere", "Ada", "Blackwell RTX"})
_MOST_PARTS: Final = 2 * 108
"""Two for each multiprocessor of an A100. RTX PRO 6000 has 188 multiprocessors and L40S 142: the margin of uncalibrated
GPUs stands for the rest."""


def on_product(pair: Pair, product: str) -> Pair:
    """Return the pair with the kernels that the engine takes on a product, if they are not those of any product.

    Of latent attention Ampere, Ada and Blackwell RTX have Triton's alone (vllm/platforms/cuda.py); a kernel that was
    asked for stays. Sparse attention has kernels of its own: on Blackwell FlashInfer's reads a plain FP8 cache
    (v1/attention/backends/mla/flashinfer_mla_sparse.py). On Hopper Triton's kernel runs the experts of gpt-oss, which
    pads their scales and not their weights.
    """
    generation = generation_of(product)
    if generation in _WITHOUT_NVLINK and pair.limits.has_nvlink:
        pair = replace(pair, limits=replace(pair.limits, has_nvlink=False))
    if generation == _TRITON_GENERATION and _runs_in_triton(pair.target):
        keeps = sizing_facts(pair.limits.engine_version)["keeps_stored_expert_scales"]
        kernel = ExpertKernel.TRITON_BESIDE_SCALES if keeps else ExpertKernel.TRITON
        pair = replace(pair, target=_with_kernel(pair.target, kernel))
    if pair.target.has_sparse_attention:
        return replace(pair, target=_with_plain_cache(pair.target)) if generation == _PLAIN_CACHE_GENERATION else pair
    chosen = pair.limits.attention_backend is not None or generation not in _TRITON_ALONE
    if chosen or not any(isinstance(mixer, LatentAttention) for mixer in pair.target.attentions):
        return pair
    return replace(pair, limits=replace(pair.limits, attention_backend=_TRITON))


_WITHOUT_NVLINK: Final = frozenset({"Ada", "Blackwell RTX"})
"""Generations whose cards have no connector for it (NVIDIA's data sheets)."""

_TRITON_GENERATION: Final = "Hopper"
"""Where vLLM prefers Triton to Marlin for gpt-oss (fused_moe/oracle/mxfp4.py, _get_priority_backends_for_gpt_oss), and
Triton supports the device (experts/gpt_oss_triton_kernels_moe.py)."""


def _runs_in_triton(model: ModelGeometry) -> bool:
    stored = model.checkpoint
    return stored is not None and stored.precision is Precision.MXFP4 and model.architecture.startswith("GptOss")


_PLAIN_CACHE_GENERATION: Final = "Blackwell"
"""Where FlashInfer's kernel is preferred for an FP8 cache (platforms/cuda.py, _get_backend_priorities); FlashMLA's, of
Hopper, makes it fp8_ds_mla (mla_attention.py, _canonicalize_sparse_mla_kv_cache_dtype)."""


@lru_cache(maxsize=MOST_REMEMBERED)
def _with_plain_cache(model: ModelGeometry) -> ModelGeometry:
    layers = tuple(
        replace(layer, mixer=replace(layer.mixer, packs_cache=False))
        if isinstance(layer.mixer, LatentAttention)
        else layer
        for layer in model.layers
    )
    return replace(model, layers=layers)


@lru_cache(maxsize=MOST_REMEMBERED)
def _with_kernel(model: ModelGeometry, kernel: ExpertKernel) -> ModelGeometry:
    stored = model.checkpoint
    return model if stored is None else replace(model, checkpoint=replace(stored, expert_kernel=kernel))


def latent_parts_bytes(pair: Pair, tensor: int) -> int:
    """Return what Triton's kernel reserves on each GPU; 0 with other kernels.

    vLLM, v1/attention/backends/mla/triton_mla.py, _compute_num_kv_splits and _reserve_attn_logits_workspace.
    """
    if pair.limits.attention_backend != _TRITON:
        return 0
    latent = [mixer for mixer in pair.target.attentions if isinstance(mixer, LatentAttention)]
    parts = 1 << (max(1, pair.limits.max_model_len // _CONTEXT_OF_A_PART) - 1).bit_length()
    parts = named(min(parts, _MOST_PARTS), "parts", like=pair.limits.max_num_seqs)
    rows = pair.limits.max_num_seqs * (1 + pair.num_speculative_tokens) * parts
    return max(
        (rows * ceil_div(each.num_heads, tensor) * (each.kv_rank + 1) * FLOAT32_BYTES for each in latent), default=0
    )


_INDEXED_LENGTHS: Final = 40
_LONG_INDEXED_LENGTHS: Final = 16
_LONG_FROM: Final = 256 * 1024
"""How many of the longest requests the indexer gathers keys of, and how many beyond this length from 0.33 on: eight
times the workspace factor of FlashMLA (v1/attention/backends/mla/indexer.py, get_max_prefill_buffer_size)."""

_TOP_K_BYTES: Final = 1 << 20
"""Workspace of the kernel that chooses (sparse_attn_indexer.py, RADIX_TOPK_WORKSPACE_SIZE)."""

INDEX_LOGITS_BYTES: Final = 512 << 20
"""Tensor that stands for an indexer's logits in the profiling run (VLLM_SPARSE_INDEXER_MAX_LOGITS_MB)."""


def index_workspace_bytes(pair: Pair) -> int:
    """Return what indexers of sparse attention reserve for gathered keys in the profiling run; 0 without them.

    vLLM, model_executor/layers/sparse_attn_indexer.py, sparse_attn_indexer: FP8 keys with their scales.
    """
    mixers = [mixer for mixer in pair.target.attentions if isinstance(mixer, LatentAttention)]
    widths = [mixer.indexer.head_dim for mixer in mixers if mixer.indexer is not None]
    if not widths:
        return 0
    length, lengths = pair.limits.max_model_len, _INDEXED_LENGTHS
    if length > _LONG_FROM and sizing_facts(pair.limits.engine_version)["gathers_less_of_long_requests"]:
        lengths = _LONG_INDEXED_LENGTHS
    key_bytes = max(widths) + max(widths) // _SCALED_TOGETHER * FLOAT32_BYTES
    return named(lengths, "requests", like=length) * length * key_bytes + _TOP_K_BYTES


def profiles_latent_parts(pair: Pair) -> bool:
    """Whether the profiling run reserves them (mla_attention.py, forward_impl); else what comes after it."""
    return bool(sizing_facts(pair.limits.engine_version)["profiles_latent_parts"])
