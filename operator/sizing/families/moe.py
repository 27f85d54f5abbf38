"""Mixtures of experts: Mixtral, Qwen-MoE, OLMoE, Granite, Hunyuan, gpt-oss, Llama 4."""

from dataclasses import replace
from typing import Final

from specdecode_operator.sizing.base.fields import Fields
from specdecode_operator.sizing.families.decoder import (
    CHUNKED,
    FULL,
    SLIDING,
    Decoder,
    assemble,
    attention,
    heads,
    layer_types,
    mlp,
    model_rope,
    with_defaults,
)
from specdecode_operator.sizing.model.geometry import ModelGeometry, Tower
from specdecode_operator.sizing.model.layers import DenseMlp, Experts, FeedForward

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
