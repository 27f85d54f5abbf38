"""Hybrids of linear and full attention: Qwen3-Next, Qwen3.5."""

from typing import Final

from specdecode_operator.sizing.base.fields import Fields
from specdecode_operator.sizing.families.decoder import (
    FULL,
    LINEAR,
    Decoder,
    assemble,
    attention,
    heads,
    layer_types,
    mlp,
    model_rope,
)
from specdecode_operator.sizing.families.experts import qwen_experts, qwen_feed_forward
from specdecode_operator.sizing.model.geometry import ModelGeometry, Tower
from specdecode_operator.sizing.model.layers import DeltaNet

_FULL_EVERY: Final = 4
"""One layer in so many has full attention where the file says nothing (full_attention_interval)."""


_STATE_TYPES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


def qwen_hybrid(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """Three layers of gated delta rule, then one of gated attention."""
    newer = architecture.startswith("Qwen3_5")
    sizes = heads(fields)
    mixer = attention(sizes, qkv_bias=fields.flag("attention_bias"), qk_norm=True, gated=True)
    linear = DeltaNet(
        num_key_heads=fields.size("linear_num_key_heads"),
        num_value_heads=fields.size("linear_num_value_heads"),
        key_head_dim=fields.size("linear_key_head_dim"),
        value_head_dim=fields.size("linear_value_head_dim"),
        conv_kernel=fields.size("linear_conv_kernel_dim"),
        state_element_bytes=_state_element_bytes(fields),
    )
    every = fields.size("full_attention_interval", default=_FULL_EVERY)
    kinds = layer_types(fields, lambda index: LINEAR if (index + 1) % every else FULL)
    experts = qwen_experts(fields) if fields.is_set("num_experts") else None
    decoder = Decoder(
        lambda index: linear if kinds[index] == LINEAR else mixer,
        lambda index: mlp(fields) if experts is None else qwen_feed_forward(fields, experts, index),
        (model_rope(fields, sizes.dim, follows_tokens=True),),
        tower=tower or Tower(),
        tables_on_every_stage=not newer,
        embedding_on_every_stage=newer,
    )
    return assemble(fields, architecture, decoder)


def _state_element_bytes(fields: Fields) -> int | None:
    """Return the bytes of a number in the state (vLLM, models/config.py, Qwen3_5ForConditionalGenerationConfig)."""
    name = fields.text("mamba_ssm_dtype", default="")
    if name and name not in _STATE_TYPES:
        raise fields.error("mamba_ssm_dtype", f"must be one of {', '.join(_STATE_TYPES)}")
    return _STATE_TYPES.get(name)
