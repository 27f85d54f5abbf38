"""Models with multi-head latent attention: DeepSeek V2, V3 and V3.2, Kimi K2 and K2.5, GLM-5."""

from dataclasses import replace
from typing import Final

from specdecode_operator.sizing.base.fields import Fields
from specdecode_operator.sizing.families.decoder import Decoder, assemble, model_rope
from specdecode_operator.sizing.model.geometry import ModelGeometry, Tower
from specdecode_operator.sizing.model.layers import DenseMlp, Experts, FeedForward, Indexer, LatentAttention
from specdecode_operator.sizing.model.rope import RopeTable
from specdecode_operator.vocabulary import FLOAT32_BYTES

_BALANCED_ROUTING: Final = "noaux_tc"
"""Routing with a learned bias an expert (vLLM, deepseek_v2.py, e_score_correction_bias)."""

_FIRST_SHARED_INDEX: Final = 2
"""Layer from which indices are shared where files do not say (vLLM, DeepseekV32Attention, index_skip_topk_offset)."""

_SHARES_INDICES: Final = "S"
"""Mark of a layer without an indexer in index_topk_pattern."""


def deepseek(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """DeepSeek V2, V3 and R1, Kimi K2: the first layers are dense, the rest experts."""
    mixer = latent_attention(fields)
    decoder = Decoder(
        lambda _: mixer,
        lambda index: _feed_forward(fields, index),
        (model_rope(fields, mixer.rope_head_dim),),
        tower=tower or Tower(),
    )
    return assemble(fields, architecture, decoder)


def sparse_deepseek(fields: Fields, architecture: str, _tower: Tower | None = None) -> ModelGeometry:
    """DeepSeek V3.2 and GLM-5: an indexer chooses the tokens that a layer reads (vLLM, models/deepseek_v32)."""
    indexer = Indexer(fields.size("index_n_heads"), fields.size("index_head_dim"))
    shared = replace(latent_attention(fields), sparse_tokens=fields.size("index_topk"))
    indexed = replace(shared, indexer=indexer)
    decoder = Decoder(
        lambda index: indexed if has_indexer(fields, index) else shared,
        lambda index: _feed_forward(fields, index),
        _sparse_ropes(fields, shared.rope_head_dim),
    )
    return assemble(fields, architecture, decoder)


def latent_attention(fields: Fields) -> LatentAttention:
    """Return the attention of DeepSeek V2 and V3 as a file describes it."""
    return LatentAttention(
        num_heads=fields.size("num_attention_heads"),
        query_rank=fields.size("q_lora_rank") if fields.is_set("q_lora_rank") else None,
        kv_rank=fields.size("kv_lora_rank"),
        nope_head_dim=fields.size("qk_nope_head_dim"),
        rope_head_dim=fields.size("qk_rope_head_dim"),
        value_head_dim=fields.size("v_head_dim"),
    )


def has_indexer(fields: Fields, index: int) -> bool:
    """Decide whether a layer chooses tokens itself; GLM-5.2 lets three of four take those of a layer before."""
    pattern = fields.text("index_topk_pattern", default="")
    if pattern:
        return index >= len(pattern) or pattern[index] != _SHARES_INDICES
    since = max(index - fields.size("index_skip_topk_offset", default=_FIRST_SHARED_INDEX) + 1, 0)
    return since % fields.size("index_topk_freq", default=1) == 0


def _sparse_ropes(fields: Fields, head_dim: int) -> tuple[RopeTable, ...]:
    """Return the table of the attention, and that of the indexer where its positions are not interleaved."""
    rope = model_rope(fields, head_dim)
    if fields.flag("indexer_rope_interleave"):
        return (rope,)
    return rope, replace(rope, parameters=(*rope.parameters, ("is_neox_style", "true")))


def _feed_forward(fields: Fields, index: int) -> FeedForward:
    dense = DenseMlp(fields.size("intermediate_size"))
    if not fields.is_set("n_routed_experts"):
        return dense
    first = "first_k_dense_replace"
    first_dense = fields.size(first) if fields.values.get(first) not in (0, None) else 0
    if index < first_dense or index % fields.size("moe_layer_freq", default=1):
        return dense
    width = fields.size("moe_intermediate_size")
    shared = fields.size("n_shared_experts") if fields.is_set("n_shared_experts") else 0
    balanced = fields.text("topk_method", default="") == _BALANCED_ROUTING
    return Experts(
        fields.size("n_routed_experts"),
        fields.size("num_experts_per_tok"),
        width,
        score_bias_bytes=FLOAT32_BYTES if balanced else 0,
        shared_intermediate_size=shared * width,
    )
