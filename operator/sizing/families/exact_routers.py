"""Mixtures of experts whose router keeps 32 bits: GLM-4.5, ERNIE 4.5, Ling, MiniMax M2, MiMo V2."""

from dataclasses import replace

from specdecode_operator.sizing.base.fields import Fields
from specdecode_operator.sizing.families.decoder import (
    Decoder,
    assemble,
    attention,
    heads,
    mlp,
    model_rope,
    with_defaults,
)
from specdecode_operator.sizing.families.latent import deepseek
from specdecode_operator.sizing.model.geometry import ModelGeometry, Tower
from specdecode_operator.sizing.model.layers import Experts, Layer, SelfAttention
from specdecode_operator.vocabulary import FLOAT32_BYTES


def glm4_moe(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """GLM-4.5 and later: the first layers dense, a router in float32 with a balancing bias (vLLM, glm4_moe.py)."""
    fields = with_defaults(fields, {"partial_rotary_factor": 0.5})
    mixer = attention(heads(fields), qkv_bias=fields.flag("attention_bias"), qk_norm=fields.flag("use_qk_norm"))
    width = fields.size("moe_intermediate_size")
    experts = Experts(
        fields.size("n_routed_experts"),
        fields.size("num_experts_per_tok"),
        width,
        score_bias_bytes=FLOAT32_BYTES,
        shared_intermediate_size=width * _count(fields, "n_shared_experts"),
        router_in_float32=True,
    )
    return assemble(fields, architecture, _dense_first(fields, mixer, experts, tower))


def _dense_first(fields: Fields, mixer: SelfAttention, experts: Experts, tower: Tower | None) -> Decoder:
    """Return layers of which the first are dense and all others mixtures of experts."""
    first_dense = _count(fields, "first_k_dense_replace")
    dense = mlp(fields)
    return Decoder(
        lambda _: mixer,
        lambda index: dense if index < first_dense else experts,
        (model_rope(fields, mixer.head_dim),),
        tower=tower or Tower(),
    )


def glm4_moe_lite(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """GLM-4.7-Flash: DeepSeek's layers with GLM's router (vLLM, glm4_moe_lite.py)."""
    model = deepseek(fields, architecture, tower)
    return replace(model, layers=tuple(_with_exact_router(layer) for layer in model.layers))


def _with_exact_router(layer: Layer) -> Layer:
    """Return the layer with a router in float32 that has a balancing bias."""
    if not isinstance(layer.feed_forward, Experts):
        return layer
    experts = replace(layer.feed_forward, router_in_float32=True, score_bias_bytes=FLOAT32_BYTES)
    return replace(layer, feed_forward=experts)


def bailing_moe(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """Ling and Ring 2.0: the first layers dense, a router in float32 (vLLM, bailing_moe.py)."""
    bias = fields.flag("use_bias")
    mixer = attention(
        heads(fields),
        qkv_bias=bias or fields.flag("use_qkv_bias"),
        output_bias=bias,
        qk_norm=fields.flag("use_qk_norm"),
    )
    width = fields.size("moe_intermediate_size")
    experts = Experts(
        fields.size("num_experts"),
        fields.size("num_experts_per_tok"),
        width,
        score_bias_bytes=FLOAT32_BYTES if fields.flag("moe_router_enable_expert_bias") else 0,
        shared_intermediate_size=width * _count(fields, "num_shared_experts"),
        router_in_float32=fields.text("router_dtype", default="") == "fp32",
    )
    return assemble(fields, architecture, _dense_first(fields, mixer, experts, tower))


def ernie_moe(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """ERNIE 4.5: experts from one layer to another, a router in float32 (vLLM, ernie45_moe.py)."""
    sizes = heads(fields)
    bias = fields.flag("use_bias")
    mixer = attention(sizes, qkv_bias=bias)
    width = fields.size("moe_intermediate_size")
    experts = Experts(
        fields.size("moe_num_experts"),
        fields.size("moe_k", default=2),
        width,
        score_bias_bytes=FLOAT32_BYTES,
        shared_intermediate_size=width * _count(fields, "moe_num_shared_experts"),
        router_in_float32=True,
    )
    first = _count(fields, "moe_layer_start_index")
    last = fields.size("moe_layer_end_index", default=fields.size("num_hidden_layers") - 1)
    interval = fields.size("moe_layer_interval", default=1)
    dense = mlp(fields, bias=bias)
    decoder = Decoder(
        lambda _: mixer,
        lambda index: experts if first <= index <= last and (index + 1) % interval == 0 else dense,
        (model_rope(fields, sizes.dim),),
        tied=True,
        tower=tower or Tower(),
    )
    return assemble(fields, architecture, decoder)


def minimax_m2(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """MiniMax M2: norms over all heads, a router in float32 (vLLM, minimax_m2.py; its MTP layers are not served)."""
    sizes = heads(fields)
    mixer = attention(sizes, qkv_bias=fields.flag("attention_bias"), norm_over_heads=True)
    experts = Experts(
        fields.size("num_local_experts"),
        fields.size("num_experts_per_tok"),
        fields.size("intermediate_size"),
        score_bias_bytes=FLOAT32_BYTES if fields.flag("use_routing_bias") else 0,
        router_in_float32=True,
    )
    partial = fields.size("rotary_dim", default=sizes.dim) / sizes.dim
    rope = model_rope(with_defaults(fields, {"partial_rotary_factor": partial}), sizes.dim)
    return assemble(fields, architecture, Decoder(lambda _: mixer, lambda _: experts, (rope,), tower=tower or Tower()))


def mimo_v2(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """MiMo V2: windows with sinks in most layers, values narrower than keys, a router in float32 (vLLM, mimo_v2.py)."""
    full = attention(
        heads(fields),
        qkv_bias=fields.flag("attention_bias"),
        value_head_dim=fields.size("v_head_dim", default=fields.size("head_dim")),
    )
    windowed = replace(
        full,
        num_heads=fields.size("swa_num_attention_heads"),
        num_kv_heads=fields.size("swa_num_key_value_heads"),
        head_dim=fields.size("swa_head_dim"),
        value_head_dim=fields.size("swa_v_head_dim", default=fields.size("swa_head_dim")),
        window_tokens=fields.size("sliding_window_size"),
        sinks=fields.flag("add_swa_attention_sink_bias"),
    )
    in_windows = _marks(fields, "hybrid_layer_pattern")
    has_experts = _marks(fields, "moe_layer_freq")
    experts = Experts(
        fields.size("n_routed_experts"),
        fields.size("num_experts_per_tok"),
        fields.size("moe_intermediate_size"),
        score_bias_bytes=FLOAT32_BYTES,
        router_in_float32=fields.text("moe_router_dtype", default="float32") == "float32",
    )
    dense = mlp(fields)
    local = with_defaults(
        fields.having({**fields.values, "rope_theta": fields.values.get("swa_rope_theta")}), fields.values
    )
    decoder = Decoder(
        lambda index: windowed if in_windows[index] else full,
        lambda index: experts if has_experts[index] else dense,
        (model_rope(fields, full.head_dim), model_rope(local, windowed.head_dim)),
        tower=tower or Tower(),
    )
    # Its files name no layers for multi-token prediction; the engine reads one (mimo_v2_mtp.py).
    return replace(assemble(fields, architecture, decoder), mtp_layers=1)


def _count(fields: Fields, key: str) -> int:
    """Return a number that may be zero, which it also is where the file has none."""
    return fields.size(key) if fields.values.get(key) else 0


def _marks(fields: Fields, key: str) -> tuple[bool, ...]:
    """Return a list of zeros and ones, one a layer."""
    value, count = fields.values.get(key), fields.size("num_hidden_layers")
    if not isinstance(value, list | tuple) or len(value) != count or any(mark not in (0, 1) for mark in value):
        raise fields.error(key, f"must be a list of {count} zeros and ones, one a layer")
    return tuple(mark == 1 for mark in value)
