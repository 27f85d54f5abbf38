"""What one forward pass over a full step needs at its peak, and what its experts keep.

vLLM compiles a model in pieces that end at each attention (compilation/backends.py,
split_graph). A piece starts with the attention's output and the residual, which its
caller holds, and makes the next layer's queries, keys and values. So at most alive is
either what stands around an attention, or what stands around the feed-forward layer after it.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from specdecode_operator.sizing.base.devices import memory_coefficients
from specdecode_operator.sizing.base.remembered import MOST_REMEMBERED
from specdecode_operator.sizing.base.units import ceil_div
from specdecode_operator.sizing.model.geometry import ModelGeometry
from specdecode_operator.sizing.model.layers import (
    DeltaNet,
    DenseMlp,
    Experts,
    LatentAttention,
    Layer,
    SelectiveScan,
    SelfAttention,
    SingleMixer,
    StateSpace,
)
from specdecode_operator.sizing.pair.pair import EngineLimits, Pair, Parallelism
from specdecode_operator.sizing.weights.rank_layers import groups_per_rank, kv_heads_per_rank
from specdecode_operator.sizing.weights.stages import Stage
from specdecode_operator.vocabulary import Precision

_COPIES_ACTIVATIONS: Final = (Precision.INT8,)
"""Precisions whose inputs are copied to eight bits by an operator of their own (scaled_int8_quant).

FP8 is written by the kernel that makes the input, in place of 16 bits (config/vllm.py, enable_act_fusion).
"""

_CONTEXT_TOKENS_MOST: Final = 64 * 1024
_CONTEXT_REQUESTS: Final = 8
_CONTEXT_BLOCKS_PER_REQUEST: Final = 4
"""Eight full requests or four blocks each, 64 Ki tokens at most."""


def forward_bytes(pair: Pair, model: ModelGeometry, stage: Stage, precision: Precision, split: Parallelism) -> int:
    """Return the peak of a full step in one pipeline stage of the pair's target or draft.

    A kernel that is tuned at its first launch flushes the L2 cache with a
    buffer of its size; engines that do not compile tune none.
    """
    step = _step(model, stage, precision, split)
    limits, tokens = pair.limits, pair.limits.max_num_batched_tokens
    around_attention = tokens * step.attention_bytes
    if step.context_width:
        around_attention += _context_tokens(limits) * step.context_width * model.dtype_bytes
    if not pair.era.peaks_in_pieces:
        return max(around_attention, tokens * step.row_bytes)
    tuning = 0 if limits.enforce_eager else memory_coefficients().l2_bytes
    return max(around_attention, tokens * step.feed_forward_bytes) + tuning


def expert_workspace_bytes(
    model: ModelGeometry, stage: Stage, precision: Precision, tokens: int, split: Parallelism
) -> int:
    """Return the two workspaces of the fused-expert kernels (vLLM, fused_moe/modular_kernel.py, _allocate_buffers).

    Each row is a token at one of its experts: the hidden state or what comes
    out of the activation, and the hidden state or gate and up together. Triton,
    Marlin and CUTLASS (FP8) ask for the same sum (workspace_shapes); FlashInfer's
    CUTLASS kernels take it themselves (cutlass_fused_moe_kernels.cuh,
    getWorkspaceDeviceBufferSizes). Data-parallel ranks compute all ranks' tokens.
    """
    return tokens * split.data * _step(model, stage, precision, split).expert_bytes


@dataclass(frozen=True)
class _Step:
    """What one token takes on one rank of a stage."""

    attention_bytes: int  # Around the widest attention: the residual, what it reads and what it returns
    feed_forward_bytes: int  # Around the widest feed-forward layer
    row_bytes: int  # Its rows and the residual alone
    expert_bytes: int  # In the workspaces of the experts
    # Keys and values of all heads that latent attention sets up for each token of context; 0 without it
    context_width: int


@lru_cache(maxsize=MOST_REMEMBERED)
def _step(model: ModelGeometry, stage: Stage, precision: Precision, split: Parallelism) -> _Step:
    layers = [layer for layer, _ in stage.distinct_layers]
    widths = [sum(_alive_inside(mixer, split.tensor) for mixer in layer.mixers) for layer in layers]
    experts = [layer.feed_forward for layer in layers if isinstance(layer.feed_forward, Experts)]
    return _Step(
        attention_bytes=(model.hidden_size + max(widths, default=0)) * model.dtype_bytes,
        feed_forward_bytes=max(
            (_row_bytes(model, layer, split) + _beside_rows_bytes(model, layer, precision, split) for layer in layers),
            default=0,
        ),
        row_bytes=max((_row_bytes(model, layer, split) for layer in layers), default=0),
        expert_bytes=max((_workspace_row(model, each, split) for each in experts), default=0) * model.dtype_bytes,
        context_width=max((_context_width(layer, split.tensor) for layer in layers), default=0),
    )


def _context_tokens(limits: EngineLimits) -> int:
    """Return the tokens of one context chunk, which latent attention sets up whole for the profile.

    vLLM, model_executor/layers/attention/mla_attention.py, forward_impl and determine_chunked_prefill_workspace_size.
    """
    by_requests = _CONTEXT_BLOCKS_PER_REQUEST * limits.max_num_seqs * limits.block_size
    return min(max(_CONTEXT_REQUESTS * limits.max_model_len, by_requests), _CONTEXT_TOKENS_MOST)


def _context_width(layer: Layer, tensor: int) -> int:
    latent = [mixer for mixer in layer.mixers if isinstance(mixer, LatentAttention)]
    return sum(ceil_div(mixer.num_heads, tensor) * (mixer.nope_head_dim + mixer.value_head_dim) for mixer in latent)


def _alive_inside(mixer: SingleMixer, tensor: int) -> int:
    """Return the width of what a mixer reads and what it returns; Mamba 2 copies what it convolves twice.

    vLLM, model_executor/layers/mamba/mamba_mixer2.py, conv_ssm_forward, where the profiling run turns back.
    """
    alive = _inputs(mixer, tensor)
    if isinstance(mixer, StateSpace):
        convolved = mixer.width + 2 * mixer.num_groups * mixer.state_size
        return alive + ceil_div(mixer.width, tensor) + 2 * ceil_div(convolved, tensor)
    return alive + _outputs(mixer, tensor)


def _inputs(mixer: SingleMixer, tensor: int) -> int:
    """Return the width of what the projections into a mixer make on one rank."""
    match mixer:
        case SelfAttention():
            queries = ceil_div(mixer.num_heads, tensor) * mixer.head_dim * (2 if mixer.gated else 1)
            return queries + kv_heads_per_rank(mixer.num_kv_heads, tensor) * (mixer.head_dim + mixer.value_dim)
        case LatentAttention():
            heads = ceil_div(mixer.num_heads, tensor)
            return heads * (mixer.nope_head_dim + mixer.rope_head_dim) + mixer.kv_rank + mixer.rope_head_dim
        case DeltaNet():
            return ceil_div(mixer.conv_width + mixer.num_value_heads * mixer.value_head_dim, tensor)
        case StateSpace():
            groups = groups_per_rank(mixer.num_groups, tensor)
            return ceil_div(2 * mixer.width + mixer.num_heads, tensor) + 2 * groups * mixer.state_size
        case SelectiveScan():
            return ceil_div(2 * mixer.width, tensor)


def _outputs(mixer: SingleMixer, tensor: int) -> int:
    """Return the width of what a mixer hands to the piece after it; linear ones also hand on the gate of their norm."""
    match mixer:
        case SelfAttention():
            return ceil_div(mixer.num_heads, tensor) * mixer.value_dim
        case LatentAttention():
            return ceil_div(mixer.num_heads, tensor) * mixer.value_head_dim
        case DeltaNet():
            return ceil_div(2 * mixer.num_value_heads * mixer.value_head_dim, tensor)
        case StateSpace() | SelectiveScan():
            return ceil_div(2 * mixer.width, tensor)


def _row_bytes(model: ModelGeometry, layer: Layer, split: Parallelism) -> int:
    """Return the residual before and after, and the rows of the feed-forward layer."""
    states, inner = 2, 0
    match layer.feed_forward:
        case DenseMlp() as mlp:
            inner = (3 if mlp.gated else 2) * mlp.intermediate_size // split.tensor
        case Experts() as experts:
            # The sum over the experts is a hidden state of its own.
            states = 3
            inner = (3 if experts.gated else 2) * experts.shared_intermediate_size // split.tensor
        case None:
            pass
    return (states * model.hidden_size + inner) * model.dtype_bytes


def _beside_rows_bytes(model: ModelGeometry, layer: Layer, precision: Precision, split: Parallelism) -> int:
    """Return what is alive with the rows: what the mixers returned, and copies of their inputs in eight bits."""
    returned = sum(_outputs(mixer, split.tensor) for mixer in layer.mixers) * model.dtype_bytes
    if precision not in _COPIES_ACTIVATIONS or layer.feed_forward is None:
        return returned
    match layer.feed_forward:
        case DenseMlp() as mlp:
            width = mlp.intermediate_size // split.tensor
        case Experts() as experts:
            routed = experts.top_k * _expert_width(experts, split)
            width = max(routed, experts.shared_intermediate_size // split.tensor)
    return returned + model.hidden_size + width


def _workspace_row(model: ModelGeometry, experts: Experts, split: Parallelism) -> int:
    hidden = experts.latent_size or model.hidden_size
    width = _expert_width(experts, split)
    wide = (2 if experts.gated else 1) * width
    return experts.top_k * (max(width, hidden) + max(wide, hidden))


def _expert_width(experts: Experts, split: Parallelism) -> int:
    """Return the width of an expert on one rank; all data-parallel ranks share it (fused_moe/config.py, make)."""
    return experts.intermediate_size if split.expert else experts.intermediate_size // (split.tensor * split.data)
