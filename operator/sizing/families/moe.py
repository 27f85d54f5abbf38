"""Mixture-of-experts decoders, except DeepSeek and related models (decoder.py).

The module covers Mixtral, Qwen-MoE, OLMoE, Granite, Hunyuan, gpt-oss and Llama 4. It also covers ERNIE 4.5,
GLM-4.5, Ling, MiniMax M2 and MiMo V2, whose routers use 32 bits.
"""

from dataclasses import replace
from typing import Final

from specdecode_operator.enums import FLOAT32_BYTES
from specdecode_operator.sizing.config_fields import Fields
from specdecode_operator.sizing.families.decoder import (
    CHUNKED,
    FULL,
    SLIDING,
    Decoder,
    assemble,
    attention,
    deepseek,
    layer_types,
    mlp,
    model_rope,
    number_or_zero,
    with_defaults,
)
from specdecode_operator.sizing.geometry import DenseMlp, Experts, FeedForward, ModelGeometry, SelfAttention

_LLAMA4_DEFAULTS: Final = {"attention_chunk_size": 8192, "interleave_moe_layer_step": 1, "head_dim": 128}
"""Defaults of transformers' Llama4TextConfig."""

_LLAMA4_FULL_EVERY: Final = 4
"""Every Nth layer has full attention (no_rope_layer_interval)."""


def mixtral(fields: Fields, architecture: str) -> ModelGeometry:
    """Mixtral: eight experts in every layer."""
    window = fields.size("sliding_window") if fields.is_set("sliding_window") else None
    model = _equal_layers(fields, architecture, attention(fields, window_tokens=window), _experts(fields))
    return replace(model, tables_on_every_stage=True, norm_on_every_stage=True)


def olmoe(fields: Fields, architecture: str) -> ModelGeometry:
    """OLMoE: queries and keys normed over all heads (vLLM, olmoe.py)."""
    mixer = attention(fields, norm_over_heads=True, whole_norms=True)
    model = _equal_layers(fields, architecture, mixer, _experts(fields, "num_experts"))
    return replace(model, tables_on_every_stage=True, norm_on_every_stage=True)


def granite_moe(fields: Fields, architecture: str) -> ModelGeometry:
    """Granite 3, mixtures: experts in every layer (vLLM, granitemoe.py)."""
    bias = fields.flag("attention_bias")
    shared = fields.size("shared_intermediate_size") if "Shared" in architecture else 0
    experts = _experts(fields, shared_intermediate_size=shared)
    mixer = attention(fields, qkv_bias=bias, output_bias=bias)
    return replace(_equal_layers(fields, architecture, mixer, experts), norm_on_every_stage=True)


def minimax_m2(fields: Fields, architecture: str) -> ModelGeometry:
    """MiniMax M2: norms over all heads, a router in float32 (vLLM, minimax_m2.py; its MTP layers are not served)."""
    mixer = attention(fields, qkv_bias=fields.flag("attention_bias"), norm_over_heads=True)
    bias_bytes = FLOAT32_BYTES if fields.flag("use_routing_bias") else 0
    experts = _experts(fields, score_bias_bytes=bias_bytes, router_in_float32=True)
    partial = fields.size("rotary_dim", default=mixer.head_dim) / mixer.head_dim
    return _equal_layers(with_defaults(fields, {"partial_rotary_factor": partial}), architecture, mixer, experts)


def _equal_layers(fields: Fields, architecture: str, mixer: SelfAttention, experts: Experts) -> ModelGeometry:
    rope = model_rope(fields, mixer.head_dim)
    return assemble(fields, architecture, Decoder(lambda _: mixer, lambda _: experts, (rope,)))


def _experts(
    fields: Fields, count: str = "num_local_experts", width: str = "intermediate_size", **features: bool | int
) -> Experts:
    """Return the experts by the keys of their number and width, with further fields."""
    sizes = (fields.size(count), fields.size("num_experts_per_tok"), fields.size(width))
    return Experts(*sizes, **features)  # type: ignore[arg-type]


def qwen_moe(fields: Fields, architecture: str) -> ModelGeometry:
    """Qwen2-MoE (biases, a shared expert) and Qwen3-MoE (norms a head)."""
    newer = "Qwen3" in architecture
    mixer = attention(fields, qkv_bias=fields.flag("attention_bias", default=not newer), qk_norm=newer)
    # vLLM gives the router of qwen3_moe.py the checkpoint's quantization, that of qwen2_moe.py none.
    experts = replace(qwen_experts(fields), quantizable_router=newer)
    decoder = Decoder(
        lambda _: mixer,
        lambda index: qwen_feed_forward(fields, experts, index),
        (model_rope(fields, mixer.head_dim, follows_tokens=architecture.startswith("Qwen3VL")),),
        tables_on_every_stage=True,
        norm_on_every_stage=True,
    )
    return assemble(fields, architecture, decoder)


def qwen_experts(fields: Fields) -> Experts:
    """Return the experts of a Qwen model."""
    # Qwen3-MoE files may hold a zero for a shared expert that they do not have.
    shared = number_or_zero(fields, "shared_expert_intermediate_size")
    features = {"shared_intermediate_size": shared, "shared_gate": shared > 0}
    return _experts(fields, "num_experts", "moe_intermediate_size", **features)


def qwen_feed_forward(fields: Fields, experts: Experts, index: int) -> FeedForward:
    """Return experts, or the dense layer that the file puts in between (vLLM, qwen3_moe.py)."""
    dense_only = fields.values.get("mlp_only_layers") or ()
    step = fields.size("decoder_sparse_step", default=1)
    if (isinstance(dense_only, list | tuple) and index in dense_only) or (index + 1) % step:
        return mlp(fields)
    return experts


def hunyuan_moe(fields: Fields, architecture: str) -> ModelGeometry:
    """Hunyuan A13B, through transformers' class: queries and keys normed a head, a shared feed-forward layer."""
    bias = fields.flag("attention_bias")
    mixer = attention(fields, qkv_bias=bias, output_bias=bias, qk_norm=True)
    sizes = []
    width = "moe_intermediate_size" if fields.is_set("moe_intermediate_size") else "intermediate_size"
    for key in ("num_experts", "moe_topk", width):
        value = fields.values.get(key)
        if isinstance(value, list | tuple):
            # Files write a size once, or once for each layer.
            if not value or any(size != value[0] for size in value):
                raise fields.unmodelled(key, "sizing lacks layers of unequal experts")
            value = value[0]
        sizes.append(fields.having({key: value}).size(key))
    count, top_k, expert_width = sizes
    experts = Experts(count, top_k, expert_width, shared_intermediate_size=fields.size("intermediate_size"))
    return assemble(fields, architecture, Decoder(lambda _: mixer, lambda _: experts, ()))


def gpt_oss(fields: Fields, architecture: str) -> ModelGeometry:
    """gpt-oss: biases everywhere, sinks, every other layer sees a window."""
    mixer = attention(fields, qkv_bias=True, output_bias=True, sinks=True)
    windowed = replace(mixer, window_tokens=fields.size("sliding_window"))
    kinds = layer_types(fields, lambda index: FULL if index % 2 else SLIDING)
    experts = _experts(fields, bias=True)
    decoder = Decoder(
        lambda index: windowed if kinds[index] == SLIDING else mixer,
        lambda _: experts,
        # The class asks for its table in float32 (vLLM, gpt_oss.py).
        (replace(model_rope(fields, mixer.head_dim), element_bytes=FLOAT32_BYTES),),
        tables_on_every_stage=True,
        norm_on_every_stage=True,
    )
    return assemble(fields, architecture, decoder)


def llama4(fields: Fields, architecture: str) -> ModelGeometry:
    """Llama 4: chunked attention but in every fourth layer, one shared expert."""
    fields = with_defaults(fields, _LLAMA4_DEFAULTS)
    mixer = attention(fields)
    chunked = replace(mixer, chunk_tokens=fields.size("attention_chunk_size"))
    kinds = layer_types(fields, lambda index: CHUNKED if (index + 1) % _LLAMA4_FULL_EVERY else FULL)
    width = fields.size("intermediate_size")
    experts = _experts(fields, shared_intermediate_size=width)
    step = fields.size("interleave_moe_layer_step")
    dense = DenseMlp(fields.size("intermediate_size_mlp", default=width))
    decoder = Decoder(
        lambda index: chunked if kinds[index] == CHUNKED else mixer,
        lambda index: dense if (index + 1) % step else experts,
        (model_rope(fields, mixer.head_dim),),
    )
    return assemble(fields, architecture, decoder)


def glm4_moe(fields: Fields, architecture: str) -> ModelGeometry:
    """GLM-4.5 and later: the first layers dense, a router in float32 with a balancing bias (vLLM, glm4_moe.py)."""
    fields = with_defaults(fields, {"partial_rotary_factor": 0.5})
    mixer = attention(fields, qkv_bias=fields.flag("attention_bias"), qk_norm=fields.flag("use_qk_norm"))
    experts = _experts(
        fields,
        "n_routed_experts",
        "moe_intermediate_size",
        score_bias_bytes=FLOAT32_BYTES,
        shared_intermediate_size=fields.size("moe_intermediate_size") * number_or_zero(fields, "n_shared_experts"),
        router_in_float32=True,
    )
    return assemble(fields, architecture, _dense_first(fields, mixer, experts))


def glm4_moe_lite(fields: Fields, architecture: str) -> ModelGeometry:
    """GLM-4.7-Flash: DeepSeek's layers with GLM's router (vLLM, glm4_moe_lite.py)."""
    model = deepseek(fields, architecture)
    layers = []
    for layer in model.layers:
        experts = layer.feed_forward
        if isinstance(experts, Experts):
            experts = replace(experts, router_in_float32=True, score_bias_bytes=FLOAT32_BYTES)
        layers.append(replace(layer, feed_forward=experts))
    return replace(model, layers=tuple(layers))


def bailing_moe(fields: Fields, architecture: str) -> ModelGeometry:
    """Ling and Ring 2.0: the first layers dense, a router in float32 (vLLM, bailing_moe.py)."""
    bias = fields.flag("use_bias")
    qkv_bias, norm = bias or fields.flag("use_qkv_bias"), fields.flag("use_qk_norm")
    mixer = attention(fields, qkv_bias=qkv_bias, output_bias=bias, qk_norm=norm)
    experts = _experts(
        fields,
        "num_experts",
        "moe_intermediate_size",
        score_bias_bytes=FLOAT32_BYTES if fields.flag("moe_router_enable_expert_bias") else 0,
        shared_intermediate_size=fields.size("moe_intermediate_size") * number_or_zero(fields, "num_shared_experts"),
        router_in_float32=fields.text("router_dtype", default="") == "fp32",
    )
    return assemble(fields, architecture, _dense_first(fields, mixer, experts))


def _dense_first(fields: Fields, mixer: SelfAttention, experts: Experts) -> Decoder:
    first_experts = number_or_zero(fields, "first_k_dense_replace")
    dense, ropes = mlp(fields), (model_rope(fields, mixer.head_dim),)
    return Decoder(lambda _: mixer, lambda index: dense if index < first_experts else experts, ropes)


def ernie_moe(fields: Fields, architecture: str) -> ModelGeometry:
    """ERNIE 4.5: experts from one layer to another, a router in float32 (vLLM, ernie45_moe.py)."""
    bias = fields.flag("use_bias")
    mixer = attention(fields, qkv_bias=bias)
    width = fields.size("moe_intermediate_size")
    experts = Experts(
        fields.size("moe_num_experts"),
        fields.size("moe_k", default=2),
        width,
        score_bias_bytes=FLOAT32_BYTES,
        shared_intermediate_size=width * number_or_zero(fields, "moe_num_shared_experts"),
        router_in_float32=True,
    )
    first = number_or_zero(fields, "moe_layer_start_index")
    last = fields.size("moe_layer_end_index", default=fields.size("num_hidden_layers") - 1)
    interval = fields.size("moe_layer_interval", default=1)
    dense = mlp(fields, bias=bias)
    decoder = Decoder(
        lambda _: mixer,
        lambda index: experts if first <= index <= last and (index + 1) % interval == 0 else dense,
        (model_rope(fields, mixer.head_dim),),
        tied=True,
    )
    return assemble(fields, architecture, decoder)


def mimo_v2(fields: Fields, architecture: str) -> ModelGeometry:
    """MiMo V2: windows with sinks in most layers, values narrower than keys, a router in float32 (vLLM, mimo_v2.py)."""
    value_dim = fields.size("v_head_dim", default=fields.size("head_dim"))
    full = attention(fields, qkv_bias=fields.flag("attention_bias"), value_head_dim=value_dim)
    windowed = replace(
        full,
        num_heads=fields.size("swa_num_attention_heads"),
        num_kv_heads=fields.size("swa_num_key_value_heads"),
        head_dim=fields.size("swa_head_dim"),
        value_head_dim=fields.size("swa_v_head_dim", default=fields.size("swa_head_dim")),
        window_tokens=fields.size("sliding_window_size"),
        sinks=fields.flag("add_swa_attention_sink_bias"),
    )
    in_windows, has_experts = (_marks(fields, key) for key in ("hybrid_layer_pattern", "moe_layer_freq"))
    router = fields.text("moe_router_dtype", default="float32") == "float32"
    features = {"score_bias_bytes": FLOAT32_BYTES, "router_in_float32": router}
    experts = _experts(fields, "n_routed_experts", "moe_intermediate_size", **features)
    dense = mlp(fields)
    local = fields.having({**fields.values, "rope_theta": fields.values.get("swa_rope_theta")})
    decoder = Decoder(
        lambda index: windowed if in_windows[index] else full,
        lambda index: experts if has_experts[index] else dense,
        (model_rope(fields, full.head_dim), model_rope(with_defaults(local, fields.values), windowed.head_dim)),
    )
    # Its files name no layers for multi-token prediction; the engine reads one (mimo_v2_mtp.py).
    return replace(assemble(fields, architecture, decoder), mtp_layers=1)


def _marks(fields: Fields, key: str) -> tuple[bool, ...]:
    """Return a list of zeros and ones, one a layer."""
    value, count = fields.values.get(key), fields.size("num_hidden_layers")
    if not isinstance(value, list | tuple) or len(value) != count or any(mark not in (0, 1) for mark in value):
        raise fields.error(key, f"must be a list of {count} zeros and ones, one a layer")
    return tuple(mark == 1 for mark in value)
