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
    heads,
    layer_types,
    mlp,
    model_rope,
    with_defaults,
)
from specdecode_operator.sizing.geometry import (
    DenseMlp,
    Experts,
    FeedForward,
    Layer,
    ModelGeometry,
    SelfAttention,
    Tower,
)

_LLAMA4_DEFAULTS: Final = {"attention_chunk_size": 8192, "interleave_moe_layer_step": 1, "head_dim": 128}
"""What Llama4TextConfig of transformers fills in."""

_LLAMA4_FULL_EVERY: Final = 4
"""One layer in so many sees everything (no_rope_layer_interval)."""


def mixtral(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """Mixtral: eight experts in every layer."""
    sizes = heads(fields)
    window = fields.size("sliding_window") if fields.is_set("sliding_window") else None
    mixer = attention(sizes, window_tokens=window)
    experts = Experts(
        fields.size("num_local_experts"), fields.size("num_experts_per_tok"), fields.size("intermediate_size")
    )
    rope = model_rope(fields, sizes.dim)
    decoder = Decoder(
        lambda _: mixer,
        lambda _: experts,
        (rope,),
        tower=tower or Tower(),
        tables_on_every_stage=True,
        norm_on_every_stage=True,
    )
    return assemble(fields, architecture, decoder)


def qwen_moe(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """Qwen2-MoE (biases, a shared expert) and Qwen3-MoE (norms a head)."""
    newer = "Qwen3" in architecture
    sizes = heads(fields)
    mixer = attention(sizes, qkv_bias=fields.flag("attention_bias", default=not newer), qk_norm=newer)
    rope = model_rope(fields, sizes.dim, follows_tokens=tower is not None)
    # vLLM gives the router of qwen3_moe.py the checkpoint's quantization, that of qwen2_moe.py none.
    experts = replace(qwen_experts(fields), quantizable_router=newer)
    decoder = Decoder(
        lambda _: mixer,
        lambda index: qwen_feed_forward(fields, experts, index),
        (rope,),
        tower=tower or Tower(),
        tables_on_every_stage=True,
        norm_on_every_stage=True,
    )
    return assemble(fields, architecture, decoder)


def qwen_experts(fields: Fields) -> Experts:
    """Return the experts of a Qwen model."""
    shared = fields.size("shared_expert_intermediate_size", default=0) if _positive(fields) else 0
    return Experts(
        fields.size("num_experts"),
        fields.size("num_experts_per_tok"),
        fields.size("moe_intermediate_size"),
        shared_intermediate_size=shared,
        shared_gate=shared > 0,
    )


def _positive(fields: Fields) -> bool:
    # Qwen3-MoE files may hold a zero for a shared expert that they do not have.
    return fields.values.get("shared_expert_intermediate_size") not in (None, 0)


def qwen_feed_forward(fields: Fields, experts: Experts, index: int) -> FeedForward:
    """Return experts, or the dense layer that the file puts in between (vLLM, qwen3_moe.py)."""
    dense_only = fields.values.get("mlp_only_layers") or ()
    step = fields.size("decoder_sparse_step", default=1)
    if (isinstance(dense_only, list | tuple) and index in dense_only) or (index + 1) % step:
        return mlp(fields)
    return experts


def olmoe(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """OLMoE: queries and keys normed over all heads (vLLM, olmoe.py)."""
    sizes = heads(fields)
    mixer = attention(sizes, norm_over_heads=True, whole_norms=True)
    experts = Experts(fields.size("num_experts"), fields.size("num_experts_per_tok"), fields.size("intermediate_size"))
    rope = model_rope(fields, sizes.dim)
    return assemble(
        fields,
        architecture,
        Decoder(
            lambda _: mixer,
            lambda _: experts,
            (rope,),
            tower=tower or Tower(),
            tables_on_every_stage=True,
            norm_on_every_stage=True,
        ),
    )


def hunyuan_moe(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """Hunyuan A13B, through transformers' class: queries and keys normed a head, a shared feed-forward layer."""
    sizes = heads(fields)
    bias = fields.flag("attention_bias")
    mixer = attention(sizes, qkv_bias=bias, output_bias=bias, qk_norm=True)
    width_key = "moe_intermediate_size" if fields.is_set("moe_intermediate_size") else "intermediate_size"
    experts = Experts(
        _one_for_all(fields, "num_experts"),
        _one_for_all(fields, "moe_topk"),
        _one_for_all(fields, width_key),
        shared_intermediate_size=fields.size("intermediate_size"),
    )
    return assemble(fields, architecture, Decoder(lambda _: mixer, lambda _: experts, (), tower=tower or Tower()))


def _one_for_all(fields: Fields, key: str) -> int:
    """Return a size that files write once, or once a layer."""
    value = fields.values.get(key)
    if not isinstance(value, list | tuple):
        return fields.size(key)
    if not value or any(size != value[0] for size in value):
        raise fields.unmodelled(key, "sizing lacks layers of unequal experts")
    return fields.having({key: value[0]}).size(key)


def granite_moe(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """Granite 3, mixtures: experts in every layer (vLLM, granitemoe.py)."""
    sizes = heads(fields)
    bias = fields.flag("attention_bias")
    mixer = attention(sizes, qkv_bias=bias, output_bias=bias)
    experts = Experts(
        fields.size("num_local_experts"),
        fields.size("num_experts_per_tok"),
        fields.size("intermediate_size"),
        shared_intermediate_size=fields.size("shared_intermediate_size") if "Shared" in architecture else 0,
    )
    rope = model_rope(fields, sizes.dim)
    decoder = Decoder(lambda _: mixer, lambda _: experts, (rope,), tower=tower or Tower(), norm_on_every_stage=True)
    return assemble(fields, architecture, decoder)


def gpt_oss(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """gpt-oss: biases everywhere, sinks, every other layer sees a window."""
    sizes = heads(fields)
    mixer = attention(sizes, qkv_bias=True, output_bias=True, sinks=True)
    windowed = replace(mixer, window_tokens=fields.size("sliding_window"))
    kinds = layer_types(fields, lambda index: FULL if index % 2 else SLIDING)
    experts = Experts(
        fields.size("num_local_experts"),
        fields.size("num_experts_per_tok"),
        fields.size("intermediate_size"),
        bias=True,
    )
    # The class asks for its table in float32 (vLLM, gpt_oss.py).
    rope = replace(model_rope(fields, sizes.dim), element_bytes=4)
    decoder = Decoder(
        lambda index: windowed if kinds[index] == SLIDING else mixer,
        lambda _: experts,
        (rope,),
        tower=tower or Tower(),
        tables_on_every_stage=True,
        norm_on_every_stage=True,
    )
    return assemble(fields, architecture, decoder)


def llama4(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """Llama 4: chunked attention but in every fourth layer, one shared expert."""
    fields = with_defaults(fields, _LLAMA4_DEFAULTS)
    sizes = heads(fields)
    mixer = attention(sizes)
    chunked = replace(mixer, chunk_tokens=fields.size("attention_chunk_size"))
    kinds = layer_types(fields, lambda index: CHUNKED if (index + 1) % _LLAMA4_FULL_EVERY else FULL)
    width = fields.size("intermediate_size")
    experts = Experts(
        fields.size("num_local_experts"), fields.size("num_experts_per_tok"), width, shared_intermediate_size=width
    )
    step = fields.size("interleave_moe_layer_step")
    dense = DenseMlp(fields.size("intermediate_size_mlp", default=width))
    decoder = Decoder(
        lambda index: chunked if kinds[index] == CHUNKED else mixer,
        lambda index: dense if (index + 1) % step else experts,
        (model_rope(fields, sizes.dim),),
        tower=tower or Tower(),
    )
    return assemble(fields, architecture, decoder)


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
