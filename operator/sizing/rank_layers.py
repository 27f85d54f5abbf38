"""The layers that one rank holds: pipeline stages, and linear layers split by tensor parallelism.

Rules of vLLM's linear.py and fused_moe apply. Projections into heads or into the feed-forward width are
column-parallel, projections back are row-parallel. Routers, compressions and norms are replicated on every rank.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

from specdecode_operator.enums import FLOAT32_BYTES
from specdecode_operator.sizing.arithmetic import ceil_div
from specdecode_operator.sizing.geometry import (
    DeltaNet,
    DenseMlp,
    Experts,
    LatentAttention,
    Layer,
    ModelGeometry,
    SelectiveScan,
    SelfAttention,
    StateSpace,
    counted,
)
from specdecode_operator.sizing.result_cache import MEMO_SIZE

ROUTER: Final = "mlp.gate"
"""Module that chooses the experts of a token."""


@dataclass(frozen=True)
class Split:
    """Division of layers over ranks."""

    tensor: int  # Ranks that share a layer
    experts: int = 1  # Ranks that whole experts are spread over; 1: experts are split like other layers
    # Copies of the model. Experts that are not spread are split among their ranks too (vLLM, fused_moe/config.py,
    # flatten_tp_across_dp_and_pcp).
    data: int = 1


@dataclass(frozen=True)
class LinearLayer:
    """One rank's part of a linear layer."""

    module: str  # Its name in checkpoints, relative to the decoder layer
    inputs: int
    outputs: int
    bias: int = 0  # Elements
    copies: int = 1  # Experts on this rank
    quantizable: bool = True
    widens: bool = False  # Whether it leads into the feed-forward width of experts: gate and up
    # Outputs of the layers that checkpoints hold apart and the engine merges into it; empty for one alone
    merged: tuple[int, ...] = ()

    @property
    def parts(self) -> tuple[int, ...]:
        """Outputs of each layer that a checkpoint holds apart."""
        return self.merged or (self.outputs,)

    @property
    def routed(self) -> bool:
        """True for the experts that a router chooses."""
        return self.module.removeprefix("mlp.").startswith("experts.")


@dataclass(frozen=True)
class RankLayer:
    """One decoder layer on one rank."""

    linears: tuple[LinearLayer, ...]
    elements: int  # Other parameters in 16 bits: norms, convolutions, sinks
    fixed_bytes: int = 0  # Parameters whose type never changes


@lru_cache(maxsize=MEMO_SIZE)
def rank_layer(layer: Layer, hidden_size: int, split: Split) -> RankLayer:
    """Return one decoder layer as one rank holds it; the split must divide it (see tensor_parallel.py)."""
    inputs, tensor = layer.input_multiple * hidden_size, split.tensor
    parts = []
    for part in (*layer.mixers, layer.feed_forward):
        match part:
            case SelfAttention():
                parts.append(_self_attention(part, inputs, hidden_size, tensor))
            case LatentAttention():
                parts.append(_latent_attention(part, inputs, hidden_size, tensor))
            case DeltaNet():
                parts.append(_delta_net(part, hidden_size, tensor))
            case StateSpace():
                parts.append(_state_space(part, hidden_size, tensor))
            case SelectiveScan():
                parts.append(_selective_scan(part, hidden_size, tensor))
            case DenseMlp():
                parts.append(RankLayer(_mlp("mlp", part, hidden_size, tensor), 0))
            case Experts():
                parts.append(_experts(part, hidden_size, split))
    if width := layer.own_input_size:
        # The gate, the projection back and the norm of an input by layer (vLLM, gemma4.py).
        gate = LinearLayer("per_layer_input_gate", hidden_size, width)
        parts.append(RankLayer((gate, LinearLayer("per_layer_projection", width, hidden_size)), hidden_size))
    return RankLayer(
        tuple(linear for part in parts for linear in part.linears),
        sum(part.elements for part in parts) + layer.norms * hidden_size,
        sum(part.fixed_bytes for part in parts),
    )


def kv_heads_per_rank(num_kv_heads: int, tensor: int) -> int:
    """Return the key/value heads on one rank: replicated if there are fewer than ranks."""
    return max(1, num_kv_heads // tensor)


def groups_per_rank(num_groups: int, tensor: int) -> int:
    """Return the groups of a Mamba 2 layer on one rank: a single one is copied to each (vLLM, mamba_mixer2.py)."""
    return max(1, num_groups // tensor)


def _self_attention(mixer: SelfAttention, inputs: int, hidden_size: int, tensor: int) -> RankLayer:
    query = mixer.num_heads // tensor * mixer.head_dim
    kv_heads = 0 if mixer.borrows_cache else kv_heads_per_rank(mixer.num_kv_heads, tensor)
    keys = kv_heads * mixer.head_dim
    parts = (query * (1 + mixer.gated), keys, kv_heads * mixer.value_dim)
    projected = sum(parts)
    normed = (mixer.num_heads + mixer.num_kv_heads) * mixer.head_dim if mixer.whole_norms else query + keys
    norms = (1 if mixer.borrows_cache else 2) * mixer.head_dim * mixer.qk_norm + normed * mixer.norm_over_heads
    sinks = mixer.num_heads // tensor * mixer.sinks
    attended = mixer.num_heads // tensor * mixer.value_dim
    return RankLayer(
        (
            LinearLayer("self_attn.q_proj", inputs, projected, projected * mixer.qkv_bias, merged=parts),
            # Its bias is added once, but every rank holds it.
            LinearLayer("self_attn.o_proj", attended, hidden_size, hidden_size * mixer.output_bias),
        ),
        norms + sinks,
    )


def _latent_attention(mixer: LatentAttention, inputs: int, hidden_size: int, tensor: int) -> RankLayer:
    heads = mixer.num_heads // tensor
    query_width = heads * (mixer.nope_head_dim + mixer.rope_head_dim)
    compressed = mixer.kv_rank + mixer.rope_head_dim
    expand = LinearLayer("self_attn.q_proj", mixer.kv_rank, heads * (mixer.nope_head_dim + mixer.value_head_dim))
    output = LinearLayer("self_attn.o_proj", heads * mixer.value_head_dim, hidden_size)
    if mixer.query_rank is None:
        queries = (
            LinearLayer("self_attn.q_proj", inputs, query_width),
            LinearLayer("self_attn.q_proj", inputs, compressed),
        )
        return RankLayer((*queries, expand, output), mixer.kv_rank)
    queries = (
        LinearLayer("self_attn.q_proj", inputs, mixer.query_rank + compressed, merged=(mixer.query_rank, compressed)),
        LinearLayer("self_attn.q_proj", mixer.query_rank, query_width),
    )
    norms = mixer.kv_rank + mixer.query_rank
    if mixer.indexer is None:
        return RankLayer((*queries, expand, output), norms)
    # Its projections are whole on every rank (vLLM, models/deepseek_v32/attention.py, DeepseekV32Indexer).
    count, width = mixer.indexer.num_heads, mixer.indexer.head_dim
    indexer = (
        LinearLayer("self_attn.indexer.wq_b", mixer.query_rank, count * width),
        LinearLayer("self_attn.indexer.wk", hidden_size, width + count, quantizable=False),
    )
    # The norm of its keys and that norm's bias are float32.
    return RankLayer((*queries, expand, output, *indexer), norms, 2 * width * FLOAT32_BYTES)


def _delta_net(mixer: DeltaNet, hidden_size: int, tensor: int) -> RankLayer:
    keys = mixer.num_key_heads * mixer.key_head_dim // tensor
    values = mixer.num_value_heads * mixer.value_head_dim // tensor
    value_heads = mixer.num_value_heads // tensor
    convolution = (2 * keys + values) * mixer.conv_kernel
    return RankLayer(
        (
            LinearLayer("linear_attn.in_proj_qkvz", hidden_size, 2 * keys + 2 * values),
            LinearLayer("linear_attn.in_proj_ba", hidden_size, 2 * value_heads, quantizable=False),
            LinearLayer("linear_attn.out_proj", values, hidden_size),
        ),
        # The convolution, the bias of the time step, the norm of the output.
        convolution + value_heads + mixer.value_head_dim,
        # Decay rates are float32.
        fixed_bytes=value_heads * FLOAT32_BYTES,
    )


def _state_space(mixer: StateSpace, hidden_size: int, tensor: int) -> RankLayer:
    width, heads = mixer.width // tensor, mixer.num_heads // tensor
    grouped = groups_per_rank(mixer.num_groups, tensor) * mixer.state_size
    convolved = width + 2 * grouped
    # The gate, the inputs of the convolution, and a time step for each head; one layer if groups are copied.
    parts = (width, width, grouped, grouped, heads)
    merged = parts if mixer.num_groups % tensor == 0 else ()
    projected = sum(parts)
    return RankLayer(
        (
            LinearLayer("mamba.in_proj", hidden_size, projected, projected * mixer.projection_bias, merged=merged),
            LinearLayer("mamba.out_proj", width, hidden_size, hidden_size * mixer.projection_bias),
        ),
        # The convolution, the bias and the skip of each head's time step, the norm of the output.
        convolved * (mixer.conv_kernel + mixer.conv_bias) + 2 * heads + width * mixer.output_norm,
        # Decay rates are float32.
        fixed_bytes=heads * FLOAT32_BYTES,
    )


def _selective_scan(mixer: SelectiveScan, hidden_size: int, tensor: int) -> RankLayer:
    """Return Mamba 1; the engine gives its layers no quantization (vLLM, mamba_mixer.py)."""
    width, step, state = mixer.width // tensor, mixer.step_rank, mixer.state_size
    bias = mixer.projection_bias
    linears = (
        LinearLayer("mamba.in_proj", hidden_size, 2 * width, 2 * width * bias, quantizable=False),
        LinearLayer("mamba.x_proj", width, step + 2 * state, quantizable=False),
        LinearLayer("mamba.dt_proj", step, width, width, quantizable=False),
        LinearLayer("mamba.out_proj", width, hidden_size, hidden_size * bias, quantizable=False),
    )
    # The convolution, the skip, the norms of time step and of input and output of the state.
    elements = width * (mixer.conv_kernel + mixer.conv_bias) + width + step + 2 * state
    return RankLayer(linears, elements, fixed_bytes=width * state * FLOAT32_BYTES)


def _mlp(module: str, mlp: DenseMlp, hidden_size: int, tensor: int) -> tuple[LinearLayer, ...]:
    part = mlp.intermediate_size // tensor
    widened = (part,) * (1 + mlp.gated)
    return (
        LinearLayer(f"{module}.gate_proj", hidden_size, sum(widened), sum(widened) * mlp.bias, merged=widened),
        LinearLayer(f"{module}.down_proj", part, hidden_size, hidden_size * mlp.bias),
    )


def _experts(experts: Experts, hidden_size: int, split: Split) -> RankLayer:
    count = ceil_div(experts.num_experts, split.experts)
    part = experts.intermediate_size // (1 if split.experts > 1 else split.tensor * split.data)
    module = "experts.0.gate_proj" if experts.beside_mlp else "mlp.experts.0.gate_proj"
    merged = (part,) * (1 + experts.gated)
    widened = sum(merged)
    inside = experts.latent_size or hidden_size
    linears = [
        LinearLayer(module, inside, widened, widened * experts.bias, copies=count, widens=True, merged=merged),
        LinearLayer(module, part, inside, inside * experts.bias, copies=count),
    ]
    if experts.latent_size is not None:
        # Into the width of the routed experts and back, whole on every rank (vLLM, nemotron_h.py).
        linears += [
            LinearLayer("mlp.fc1_latent_proj", hidden_size, inside, inside * experts.latent_bias),
            LinearLayer("mlp.fc2_latent_proj", inside, hidden_size, hidden_size * experts.latent_bias),
        ]
    elements = hidden_size * experts.shared_gate
    fixed_bytes = experts.num_experts * experts.score_bias_bytes
    if experts.router_in_float32:
        fixed_bytes += hidden_size * experts.num_experts * FLOAT32_BYTES
    else:
        bias = experts.num_experts * experts.bias
        linears.append(
            LinearLayer(ROUTER, hidden_size, experts.num_experts, bias, quantizable=experts.quantizable_router)
        )
    if experts.beside_mlp:
        elements += hidden_size + experts.num_experts
    if experts.shared_intermediate_size:
        shared = "mlp" if experts.beside_mlp else "mlp.shared_experts"
        mlp = DenseMlp(experts.shared_intermediate_size, gated=experts.gated)
        linears += _mlp(shared, mlp, hidden_size, split.tensor)
    return RankLayer(tuple(linears), elements, fixed_bytes)


@dataclass(frozen=True, eq=False)
class Stage:
    """The part of a model that one pipeline rank holds."""

    layers: tuple[Layer, ...]
    is_first: bool  # Whether it holds the embedding
    is_last: bool  # Whether it holds the output head

    @cached_property
    def distinct_layers(self) -> tuple[tuple[Layer, int], ...]:
        """Layers that differ, each with how often it occurs."""
        return counted(self.layers)


def whole_model(geometry: ModelGeometry) -> Stage:
    """Return the one stage of a model without pipeline parallelism."""
    return stages(geometry, 1)[0]


@lru_cache(maxsize=MEMO_SIZE)
def stages(geometry: ModelGeometry, pipeline: int) -> tuple[Stage, ...]:
    """Return the stages that a model is cut into.

    Layers that do not divide go one each to the stages before the last one, from the back (vLLM, distributed/utils.py,
    get_pp_indices).
    """
    share, rest = divmod(geometry.num_layers, pipeline)
    cut, result = 0, []
    for index in range(pipeline):
        count = share + (pipeline - 1 - rest <= index < pipeline - 1)
        layers = geometry.layers[cut : cut + count]
        result.append(Stage(layers, is_first=index == 0, is_last=index == pipeline - 1))
        cut += count
    return tuple(result)
