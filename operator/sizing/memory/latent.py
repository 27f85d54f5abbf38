"""What Triton's kernel for latent attention reserves for the parts of a context that it attends to side by side."""

from dataclasses import replace
from typing import Final

from specdecode_operator.sizing.base.devices import generation_of
from specdecode_operator.sizing.base.eras import sizing_facts
from specdecode_operator.sizing.base.formula import named
from specdecode_operator.sizing.base.units import ceil_div
from specdecode_operator.sizing.model.layers import LatentAttention
from specdecode_operator.sizing.pair.pair import Pair

_TRITON: Final = "TRITON_MLA"
_FLOAT32_BYTES: Final = 4
_CONTEXT_OF_A_PART: Final = 512
_TRITON_ALONE: Final = frozenset({"Ampere", "Ada", "Blackwell RTX"})
_MOST_PARTS: Final = 2 * 108
"""Two for each multiprocessor of an A100. RTX PRO 6000 has 188 multiprocessors and L40S 142: the margin of uncalibrated
GPUs stands for the rest."""


def on_product(pair: Pair, product: str) -> Pair:
    """Return the pair with the kernel that the engine takes there for latent attention, where it is Triton's.

    On Ampere, Ada and Blackwell RTX no other reads it (vllm/platforms/cuda.py); a kernel that was asked for stays.
    Sparse attention has kernels of its own.
    """
    chosen = pair.limits.attention_backend is not None or generation_of(product) not in _TRITON_ALONE
    if chosen or pair.target.has_sparse_attention:
        return pair
    if not any(isinstance(mixer, LatentAttention) for mixer in pair.target.attentions):
        return pair
    return replace(pair, limits=replace(pair.limits, attention_backend=_TRITON))


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
        (rows * ceil_div(each.num_heads, tensor) * (each.kv_rank + 1) * _FLOAT32_BYTES for each in latent), default=0
    )


def profiles_latent_parts(pair: Pair) -> bool:
    """Whether the profiling run reserves them (mla_attention.py, forward_impl); else what comes after it."""
    return bool(sizing_facts(pair.limits.engine_version)["profiles_latent_parts"])
