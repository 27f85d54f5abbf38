"""Dense decoders: Llama and those who followed it, Qwen, Phi-3, Granite, MiMo."""

from typing import Final

from specdecode_operator.sizing.base.fields import Fields
from specdecode_operator.sizing.families.decoder import (
    FULL,
    Decoder,
    assemble,
    attention,
    heads,
    mlp,
    model_rope,
)
from specdecode_operator.sizing.model.geometry import ModelGeometry, Tower
from specdecode_operator.sizing.model.layers import SelfAttention

_FOREIGN_KEYS: Final = {
    "num_local_experts": "expert weights",
    "num_experts": "expert weights",
    "n_routed_experts": "expert weights",
    "kv_lora_rank": "multi-head latent attention",
    "attention_chunk_size": "chunked attention",
    "dual_chunk_attention_config": "dual-chunk attention",
}
"""Keys that no dense model has: the architecture says one thing, the file another."""

_PLAIN_POSITIONS: Final = "Qwen3VL"
"""Positions of its images and videos never go beyond the tokens (vLLM, qwen3_vl.py, mrope_positions_factor)."""


def llama(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """Llama, Mistral, Granite: biases only where the file asks for them."""
    refuse_foreign_keys(fields)
    # Llama files of before grouped attention leave the key out; other models' defaults differ, so they must say it.
    sizes = heads(fields, default_kv=architecture == "LlamaForCausalLM")
    bias = fields.flag("attention_bias") or fields.flag("bias")
    mixer = attention(
        sizes,
        qkv_bias=fields.flag("qkv_bias", default=bias),
        output_bias=bias,
        window_tokens=_uniform_window(_with_window(fields, architecture)),
    )
    return _uniform(fields, architecture, mixer, tower or Tower(), mlp_bias=fields.flag("mlp_bias"))


def phi3(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """Phi-3 and phi-4: Llama's layers, stored merged."""
    refuse_foreign_keys(fields)
    mixer = attention(heads(fields, default_kv=True), window_tokens=_uniform_window(fields))
    return _uniform(fields, architecture, mixer, tower or Tower())


def qwen2(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """Qwen2 and Qwen2.5: biases on query, key and value."""
    refuse_foreign_keys(fields)
    _refuse_qwen_window(fields)
    sizes = heads(fields)
    hidden = fields.size("hidden_size")
    if sizes.dim * sizes.count != hidden:
        raise fields.error("head_dim", f"Qwen2 needs hidden_size / num_attention_heads, {hidden} / {sizes.count}")
    mixer = attention(sizes, qkv_bias=fields.flag("qkv_bias", default=True))
    return _uniform(fields, architecture, mixer, tower or Tower())


def mimo(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """MiMo 7B: Qwen2's layers with heads of their own width (vLLM, mimo.py)."""
    refuse_foreign_keys(fields)
    _refuse_qwen_window(fields)
    mixer = attention(heads(fields), qkv_bias=fields.flag("attention_bias", default=True))
    return _uniform(fields, architecture, mixer, tower or Tower())


def qwen3(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """Qwen3: queries and keys normed a head."""
    refuse_foreign_keys(fields)
    _refuse_qwen_window(fields)
    if not fields.is_set("head_dim"):
        raise fields.error("head_dim", "is missing; copy it from the model's config.json")
    mixer = attention(heads(fields), qkv_bias=fields.flag("attention_bias"), qk_norm=True)
    return _uniform(fields, architecture, mixer, tower or Tower())


def refuse_foreign_keys(fields: Fields) -> None:
    """Refuse a file that has keys of a mixture of experts or of another attention."""
    for key, lacking in _FOREIGN_KEYS.items():
        if fields.is_set(key):
            raise fields.error(key, f"contradicts the dense architecture, sizing lacks {lacking}; remove it")
    for layer_type in fields.strings("layer_types"):
        if layer_type != FULL:
            raise fields.unmodelled("layer_types", f"sizing lacks {layer_type} for this architecture")


def _uniform(
    fields: Fields,
    architecture: str,
    mixer: SelfAttention,
    tower: Tower,
    *,
    mlp_bias: bool = False,
) -> ModelGeometry:
    feed_forward = mlp(fields, bias=mlp_bias)
    rope = model_rope(fields, mixer.head_dim, follows_tokens=architecture.startswith(_PLAIN_POSITIONS))
    return assemble(fields, architecture, Decoder(lambda _: mixer, lambda _: feed_forward, (rope,), tower=tower))


def _with_window(fields: Fields, architecture: str) -> Fields:
    """Return the fields of a Mistral file with the window that MistralConfig fills in where the key is absent."""
    is_mistral = architecture == "MistralForCausalLM" or fields.text("model_type", default="") == "mistral"
    if not is_mistral or "sliding_window" in fields.values:
        return fields
    return fields.having({**fields.values, "sliding_window": 4096})


def _uniform_window(fields: Fields) -> int | None:
    """A window that the file sets holds for every layer (Mistral 7B v0.1)."""
    return fields.size("sliding_window") if fields.is_set("sliding_window") else None


def _refuse_qwen_window(fields: Fields) -> None:
    # Qwen files carry a window that is switched off unless they say otherwise.
    if fields.is_set("sliding_window") and fields.flag("use_sliding_window"):
        raise fields.unmodelled("use_sliding_window", "sizing lacks the windows of Qwen")
