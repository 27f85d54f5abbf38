"""Dense decoders: Llama, Gemma, Qwen, Phi, Granite, MiMo, OLMo, EXAONE, Cohere, GLM-4 and others.

Gemma has sliding windows in most layers, norms before and after each half of a layer, and tied embeddings.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from specdecode_operator.sizing.config_fields import Fields
from specdecode_operator.sizing.families.decoder import (
    FULL,
    SLIDING,
    Decoder,
    assemble,
    attention,
    first_that_borrows,
    layer_types,
    mlp,
    model_rope,
    number_or_zero,
    with_defaults,
)
from specdecode_operator.sizing.geometry import (
    TOKEN_ID_BYTES,
    DenseMlp,
    Experts,
    FeedForward,
    HeadParts,
    ModelGeometry,
    RopeTable,
    SelfAttention,
    padded_vocabulary,
    rope_table,
)

_FOREIGN_KEYS: Final = {
    "num_local_experts": "expert weights",
    "num_experts": "expert weights",
    "n_routed_experts": "expert weights",
    "kv_lora_rank": "multi-head latent attention",
    "attention_chunk_size": "chunked attention",
    "dual_chunk_attention_config": "dual-chunk attention",
}
"""Keys that no dense model has, so the file contradicts its architecture."""

_PLAIN_POSITIONS: Final = "Qwen3VL"
"""Positions of its images and videos never go beyond the tokens (vLLM, qwen3_vl.py, mrope_positions_factor)."""

_FULL_EVERY: Final = 4
"""Default: every Nth layer has full attention."""

_HALF_ROTATED: Final = {"partial_rotary_factor": 0.5}
"""Default of GLM-4 and Nemotron (vLLM, glm4.py; transformers, NemotronConfig)."""

_COHERE_WINDOW_EXCESS: Final = 1
"""Cohere counts the token itself on top of its window (vLLM, commandr.py)."""


def llama(fields: Fields, architecture: str) -> ModelGeometry:
    """Llama, Mistral, Granite: biases only if the file sets them."""
    _reject_foreign_keys(fields)
    is_mistral = architecture == "MistralForCausalLM" or fields.text("model_type", default="") == "mistral"
    if is_mistral:
        # MistralConfig fills it in if the key is absent; null stays.
        fields = fields.having({"sliding_window": 4096, **fields.values})
    bias = fields.flag("attention_bias") or fields.flag("bias")
    mixer = attention(
        fields,
        # Llama files from before grouped attention omit the key. Defaults of other models differ, so their files must
        # have it.
        default_kv=architecture == "LlamaForCausalLM",
        qkv_bias=fields.flag("qkv_bias", default=bias),
        output_bias=bias,
        window_tokens=_window(fields),
    )
    return _uniform(fields, architecture, mixer, mlp_bias=fields.flag("mlp_bias"))


def phi3(fields: Fields, architecture: str) -> ModelGeometry:
    """Phi-3 and phi-4: Llama's layers, stored merged."""
    _reject_foreign_keys(fields)
    return _uniform(fields, architecture, attention(fields, default_kv=True, window_tokens=_window(fields)))


def qwen2(fields: Fields, architecture: str) -> ModelGeometry:
    """Qwen2 and Qwen2.5: biases on query, key and value."""
    _reject_foreign_keys(fields, windows_of_qwen=True)
    mixer = attention(fields, qkv_bias=fields.flag("qkv_bias", default=True))
    hidden = fields.size("hidden_size")
    if mixer.head_dim * mixer.num_heads != hidden:
        raise fields.error("head_dim", f"Qwen2 needs hidden_size / num_attention_heads, {hidden} / {mixer.num_heads}")
    return _uniform(fields, architecture, mixer)


def mimo(fields: Fields, architecture: str) -> ModelGeometry:
    """MiMo 7B: Qwen2's layers with another head width (vLLM, mimo.py)."""
    _reject_foreign_keys(fields, windows_of_qwen=True)
    return _uniform(fields, architecture, attention(fields, qkv_bias=fields.flag("attention_bias", default=True)))


def qwen3(fields: Fields, architecture: str) -> ModelGeometry:
    """Qwen3: queries and keys normed a head."""
    _reject_foreign_keys(fields, windows_of_qwen=True)
    if not fields.is_set("head_dim"):
        raise fields.error("head_dim", "is missing; copy it from the model's config.json")
    return _uniform(fields, architecture, attention(fields, qkv_bias=fields.flag("attention_bias"), qk_norm=True))


def _reject_foreign_keys(fields: Fields, *, windows_of_qwen: bool = False) -> None:
    """Reject a file that has keys of a mixture of experts or of another attention."""
    for key, lacking in _FOREIGN_KEYS.items():
        if fields.is_set(key):
            raise fields.error(key, f"contradicts the dense architecture, sizing lacks {lacking}; remove it")
    for layer_type in fields.strings("layer_types"):
        if layer_type != FULL:
            raise fields.unmodelled("layer_types", f"sizing lacks {layer_type} for this architecture")
    # Qwen files contain a window that is off unless they turn it on.
    if windows_of_qwen and fields.is_set("sliding_window") and fields.flag("use_sliding_window"):
        raise fields.unmodelled("use_sliding_window", "sizing lacks the windows of Qwen")


def _uniform(fields: Fields, architecture: str, mixer: SelfAttention, *, mlp_bias: bool = False) -> ModelGeometry:
    feed_forward = mlp(fields, bias=mlp_bias)
    rope = model_rope(fields, mixer.head_dim, follows_tokens=architecture.startswith(_PLAIN_POSITIONS))
    return assemble(fields, architecture, Decoder(lambda _: mixer, lambda _: feed_forward, (rope,)))


def _window(fields: Fields) -> int | None:
    """Return a window that holds for every layer (Mistral 7B v0.1)."""
    return fields.size("sliding_window") if fields.is_set("sliding_window") else None


def olmo2(fields: Fields, architecture: str) -> ModelGeometry:
    """OLMo 2 and 3: queries and keys normed over all heads; windows in most layers of OLMo 3."""
    if architecture == "Olmo3ForCausalLM":
        fields = _with_windows(fields, {"sliding_window": 4096}, lambda index: (index + 1) % _FULL_EVERY)
    bias = fields.flag("attention_bias")
    mixer = attention(fields, qkv_bias=bias, output_bias=bias, norm_over_heads=True, whole_norms=True)
    return _model(fields, architecture, mixer, ropes=())


def smollm3(fields: Fields, architecture: str) -> ModelGeometry:
    """SmolLM3: Llama's layers, some without positions."""
    _reject_foreign_keys(fields)
    bias = fields.flag("attention_bias")
    mixer = attention(fields, qkv_bias=bias, output_bias=bias)
    return _model(fields, architecture, mixer, mlp(fields, bias=fields.flag("mlp_bias")), ropes=(), tied=True)


def cwm(fields: Fields, architecture: str) -> ModelGeometry:
    """Code World Model: Llama's layers with windows in most of them."""
    fields = _with_windows(fields, {"sliding_window": 8192}, lambda index: index % _FULL_EVERY)
    return _model(fields, architecture, attention(fields, default_dim=128), ropes=())


def phi(fields: Fields, architecture: str) -> ModelGeometry:
    """Phi-1 to Phi-2: biases everywhere, no gate, one norm a layer."""
    _reject_foreign_keys(fields)
    mixer = attention(fields, default_kv=True, qkv_bias=True, output_bias=True)
    dense = mlp(fields, bias=True, gated=False)
    return _model(fields, architecture, mixer, dense, ropes=(), norms=2, final_norms=2)


def arcee(fields: Fields, architecture: str) -> ModelGeometry:
    """Arcee (AFM): no gate in the feed-forward layer."""
    _reject_foreign_keys(fields)
    bias = fields.flag("attention_bias")
    mixer = attention(fields, qkv_bias=bias, output_bias=bias)
    return _model(fields, architecture, mixer, mlp(fields, bias=fields.flag("mlp_bias"), gated=False), ropes=())


def starcoder2(fields: Fields, architecture: str) -> ModelGeometry:
    """StarCoder2: biases everywhere, no gate."""
    _reject_foreign_keys(fields)
    bias = fields.flag("use_bias", default=True)
    mixer = attention(fields, qkv_bias=bias, output_bias=bias, window_tokens=_window(fields))
    dense = mlp(fields, bias=bias, gated=False)
    return _model(fields, architecture, mixer, dense, ropes=(), norms=4, final_norms=2, tied=True)


def seed_oss(fields: Fields, architecture: str) -> ModelGeometry:
    """Seed-OSS: biases on query, key and value."""
    _reject_foreign_keys(fields)
    qkv_bias, output_bias = fields.flag("attention_bias", default=True), fields.flag("attention_out_bias")
    mixer = attention(fields, default_dim=128, qkv_bias=qkv_bias, output_bias=output_bias)
    return _model(fields, architecture, mixer, mlp(fields, bias=fields.flag("mlp_bias")), ropes=())


def hunyuan(fields: Fields, architecture: str) -> ModelGeometry:
    """Hunyuan, dense: queries and keys normed a head."""
    bias = fields.flag("attention_bias")
    mixer = attention(fields, qkv_bias=bias, output_bias=bias, qk_norm=True)
    return _model(fields, architecture, mixer, ropes=())


def exaone4(fields: Fields, architecture: str) -> ModelGeometry:
    """EXAONE 4: queries and keys normed a head, windows in most layers of the larger one (vLLM, exaone4.py)."""
    if "sliding_window" not in fields.values or fields.is_set("sliding_window"):
        every = _FULL_EVERY
        if not fields.is_set("layer_types"):
            every = fields.size("sliding_window_pattern", default=_FULL_EVERY)
        fields = _with_windows(fields, {"sliding_window": 4096}, lambda index: (index + 1) % every)
    bias = fields.flag("attention_bias") or fields.flag("bias")
    mixer = attention(fields, qkv_bias=bias, output_bias=bias, qk_norm=True)
    return _model(fields, architecture, mixer, mlp(fields, bias=fields.flag("mlp_bias")))


def cohere(fields: Fields, architecture: str) -> ModelGeometry:
    """Command R and Command A: one norm a layer; windows in most layers of the newer ones (vLLM, commandr.py)."""
    mixer = attention(fields, norm_over_heads=fields.flag("use_qk_norm"))
    if architecture == "Cohere2ForCausalLM":
        window = fields.size("sliding_window", default=4096) + _COHERE_WINDOW_EXCESS
        every = fields.size("sliding_window_pattern", default=_FULL_EVERY)
        fields = fields.having({**fields.values, "sliding_window": window})
        fields = _with_windows(fields, {}, lambda index: (index + 1) % every)
    return _model(fields, architecture, mixer, norms=1, tied=True, norm_on_every_stage=True)


def glm4(fields: Fields, architecture: str) -> ModelGeometry:
    """GLM-4-0414: four norms a layer (vLLM, glm4.py)."""
    _reject_foreign_keys(fields)
    fields = with_defaults(fields, _HALF_ROTATED)
    mixer = attention(fields, default_dim=128, qkv_bias=fields.flag("attention_bias", default=True))
    return _model(fields, architecture, mixer, norms=4)


def glm(fields: Fields, architecture: str) -> ModelGeometry:
    """GLM-4-9B in transformers' format."""
    _reject_foreign_keys(fields)
    mixer = attention(fields, default_dim=128, qkv_bias=fields.flag("attention_bias", default=True))
    return _model(fields, architecture, mixer, ropes=())


def ernie(fields: Fields, architecture: str) -> ModelGeometry:
    """ERNIE 4.5, dense: Llama's layers (vLLM, ernie45.py)."""
    return llama(with_defaults(fields, {"head_dim": 128, "tie_word_embeddings": True}), architecture)


def gemma(fields: Fields, architecture: str) -> ModelGeometry:
    """Gemma, the first: wide heads, tied embeddings (vLLM, gemma.py)."""
    _reject_foreign_keys(fields)
    return _model(fields, architecture, attention(fields, default_dim=256), tied=True, norm_on_every_stage=True)


def exaone(fields: Fields, architecture: str) -> ModelGeometry:
    """EXAONE 3 and 3.5: Llama's layers, with another key for their number (vLLM, exaone.py)."""
    return llama(with_defaults(fields, {"num_hidden_layers": fields.values.get("num_layers")}), architecture)


def stablelm(fields: Fields, architecture: str) -> ModelGeometry:
    """StableLM: norms with biases, a quarter of each head rotated; every stage makes all tables (vLLM, stablelm.py)."""
    _reject_foreign_keys(fields)
    if fields.flag("qk_layernorm"):
        raise fields.unmodelled("qk_layernorm", "sizing lacks the norms a head of StableLM 2 12B")
    fields = with_defaults(fields, {"partial_rotary_factor": 0.25})
    mixer = attention(fields, qkv_bias=fields.flag("use_qkv_bias"))
    model = _model(fields, architecture, mixer, norms=4, final_norms=2)
    return replace(model, tables_on_every_stage=True, norm_on_every_stage=True)


def internlm2(fields: Fields, architecture: str) -> ModelGeometry:
    """InternLM 2: Llama's layers; every pipeline stage makes all tables (vLLM, internlm2.py)."""
    return replace(llama(fields, architecture), tables_on_every_stage=True, norm_on_every_stage=True)


def nemotron(fields: Fields, architecture: str) -> ModelGeometry:
    """Nemotron-4 and Minitron: no gate, norms with biases (vLLM, nemotron.py)."""
    _reject_foreign_keys(fields)
    fields = with_defaults(fields, _HALF_ROTATED)
    bias = fields.flag("attention_bias") or fields.flag("bias")
    mixer = attention(fields, qkv_bias=bias, output_bias=bias)
    dense = mlp(fields, bias=fields.flag("mlp_bias"), gated=False)
    return _model(fields, architecture, mixer, dense, norms=4, final_norms=2)


def _with_windows(fields: Fields, defaults: Mapping[str, object], is_windowed: Callable[[int], object]) -> Fields:
    """Return the fields of a file with the windows that its class in transformers fills in."""
    kinds = [SLIDING if is_windowed(index) else FULL for index in range(fields.size("num_hidden_layers"))]
    return with_defaults(fields, {**defaults, "layer_types": kinds})


def _model(
    fields: Fields, architecture: str, mixer: SelfAttention, feed_forward: DenseMlp | None = None, **arrangement: Any
) -> ModelGeometry:
    """Return a model of equal layers, except for the windows that its file gives to some of them.

    ``arrangement`` has fields of `Decoder`; a norm with a bias counts as two norms.
    """
    kinds = layer_types(fields, lambda _: FULL)
    windowed = replace(mixer, window_tokens=fields.size("sliding_window")) if SLIDING in kinds else mixer
    dense = feed_forward or mlp(fields)
    if "ropes" not in arrangement:
        arrangement["ropes"] = (model_rope(fields, mixer.head_dim),)
    decoder = Decoder(lambda index: windowed if kinds[index] == SLIDING else mixer, lambda _: dense, **arrangement)
    return assemble(fields, architecture, decoder)


_GEMMA2_DEFAULTS: Final = {"tie_word_embeddings": True, "head_dim": 256, "sliding_window": 4096}
"""Defaults of transformers' Gemma2Config."""

_GEMMA3_DEFAULTS: Final = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
"""Defaults of transformers' Gemma3TextConfig; Google's files leave much of it out."""

_GEMMA4_DEFAULTS: Final = {
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "num_kv_shared_layers": 0,
}
"""Defaults of transformers' Gemma4TextConfig."""

_BACKBONE_WIDTH: Final = 1536
_CENTROIDS: Final = 2048
_CHOSEN_CENTROIDS: Final = 32
"""Defaults of transformers' Gemma4AssistantConfig."""

_GEMMA3_PATTERN: Final = 6
"""Every Nth layer has full attention."""

_NORMS: Final = 4
_NORMS_WITH_EXPERTS: Final = 7
"""Norms of a layer: before and after each half, and before and after parallel parts."""


def gemma2(fields: Fields, architecture: str) -> ModelGeometry:
    """Gemma 2: every other layer sees a window, four norms a layer."""
    fields = with_defaults(fields, _GEMMA2_DEFAULTS)
    bias = fields.flag("attention_bias")
    mixer = attention(fields, qkv_bias=bias, output_bias=bias)
    kinds = layer_types(fields, lambda index: FULL if index % 2 else SLIDING)
    return _gemma(fields, architecture, mixer, kinds, (model_rope(fields, mixer.head_dim),))


def gemma3(fields: Fields, architecture: str) -> ModelGeometry:
    """Gemma 3: every sixth layer has full attention, with its own rotary positions."""
    fields = with_defaults(fields, _GEMMA3_DEFAULTS)
    bias = fields.flag("attention_bias")
    mixer = attention(fields, qkv_bias=bias, output_bias=bias, qk_norm=True)
    pattern = fields.size("sliding_window_pattern", default=_GEMMA3_PATTERN)
    kinds = layer_types(fields, lambda index: SLIDING if (index + 1) % pattern else FULL)
    longest = fields.size("max_position_embeddings")
    nested = fields.section("rope_parameters")
    if nested is not None and nested.section(FULL) is not None:
        tables = [_rope_of(nested, FULL), _rope_of(nested, SLIDING)]
    else:
        local = {"rope_theta": fields.values.get("rope_local_base_freq")}
        tables = [fields, fields.having(local, {"rope_theta": fields.path("rope_local_base_freq")})]
    ropes = tuple(rope_table(table, mixer.head_dim, longest) for table in tables)
    return _gemma(fields, architecture, mixer, kinds, ropes)


def _gemma(
    fields: Fields, architecture: str, mixer: SelfAttention, kinds: tuple[str, ...], ropes: tuple[RopeTable, ...]
) -> ModelGeometry:
    windowed = replace(mixer, window_tokens=fields.size("sliding_window"))
    feed_forward = mlp(fields)
    decoder = Decoder(
        lambda index: windowed if kinds[index] == SLIDING else mixer,
        lambda _: feed_forward,
        ropes,
        norms=_NORMS,
        tied=True,
        norm_on_every_stage=True,
    )
    return assemble(fields, architecture, decoder)


def gemma4(fields: Fields, architecture: str) -> ModelGeometry:
    """Gemma 4: layers with full attention have wider heads; experts, if any, run in parallel to the MLP.

    In the small models (E2B, E4B) every layer has its own input, and the last layers share keys and values of earlier
    ones.
    """
    fields = with_defaults(fields, _GEMMA4_DEFAULTS)
    windowed, wide, kinds, ropes = _gemma4_attention(fields)
    first_borrower = first_that_borrows(fields, kinds, number_or_zero(fields, "num_kv_shared_layers"))
    own, borrowers = _gemma4_feed_forwards(fields)
    own_input = number_or_zero(fields, "hidden_size_per_layer_input")
    decoder = Decoder(
        lambda index: replace(windowed if kinds[index] == SLIDING else wide, borrows_cache=index >= first_borrower),
        lambda index: own if index < first_borrower else borrowers,
        ropes,
        norms=_NORMS_WITH_EXPERTS if isinstance(own, Experts) else _NORMS,
        tied=True,
        embedding_on_every_stage=True,
        norm_on_every_stage=True,
        own_input_size=own_input,
    )
    model = assemble(fields, architecture, decoder)
    inputs = own_input * len(kinds)
    rows = padded_vocabulary(fields.size("vocab_size_per_layer_input"))
    # The table of the layers' inputs, the projection of the embedding to them, and their norm.
    return replace(model, split_elements=inputs * (rows + model.hidden_size), whole_elements=own_input)


def gemma4_assistant(fields: Fields, architecture: str) -> ModelGeometry:
    """Gemma 4 assistant: drafts from the target's hidden states, keys and values (vLLM, gemma4_mtp.py).

    Its layers have only queries. It embeds tokens with the target's table, and keeps its own table as output head, even
    if its file ties them (v1/worker/gpu/spec_decode/gemma4/speculator.py, _share_embeddings). Both projections between
    its width and the target's are divided over the ranks. With ``use_ordered_embeddings`` it scores only the tokens of
    some centroids, whose rows it copies (Gemma4MTPMaskedEmbedder).
    """
    fields = with_defaults(fields, _GEMMA4_DEFAULTS)
    windowed, wide, kinds, ropes = _gemma4_attention(fields)
    windowed, wide = replace(windowed, borrows_cache=True), replace(wide, borrows_cache=True)
    feed_forward = mlp(fields)
    decoder = Decoder(
        lambda index: windowed if kinds[index] == SLIDING else wide,
        lambda _: feed_forward,
        ropes,
        norms=_NORMS,
        tied=True,
    )
    model = assemble(fields, architecture, decoder)
    size, rows = model.hidden_size, model.vocab_size
    backbone = fields.size("backbone_hidden_size", default=_BACKBONE_WIDTH)
    centroids = fields.size("num_centroids", default=_CENTROIDS) if fields.flag("use_ordered_embeddings") else 0
    chosen = fields.size("centroid_intermediate_top_k", default=_CHOSEN_CENTROIDS)
    head = HeadParts(
        output_rows=rows,
        embeds=False,
        shares_embedding=False,
        shares_output=False,
        whole_elements=centroids * size,
        whole_bytes=rows * TOKEN_ID_BYTES if centroids else 0,
        split_elements=3 * backbone * size,
        reads_width=backbone,
        returns_width=backbone,
        copied_rows=chosen * (rows // centroids) if centroids else 0,
    )
    return replace(model, head=head)


def _gemma4_attention(
    fields: Fields,
) -> tuple[SelfAttention, SelfAttention, tuple[str, ...], tuple[RopeTable, ...]]:
    """Return windowed and full attention, the kind of each layer, and the rotary tables of full and windowed ones."""
    bias, window = fields.flag("attention_bias"), fields.size("sliding_window")
    windowed = attention(fields, qkv_bias=bias, output_bias=bias, qk_norm=True, window_tokens=window)
    wide = replace(
        windowed,
        num_kv_heads=fields.size("num_global_key_value_heads", default=windowed.num_kv_heads),
        head_dim=fields.size("global_head_dim"),
        window_tokens=None,
    )
    kinds = layer_types(fields, lambda index: SLIDING if (index + 1) % _GEMMA3_PATTERN else FULL)
    nested = fields.section("rope_parameters") or fields
    longest = fields.size("max_position_embeddings")
    dims = ((FULL, wide.head_dim), (SLIDING, windowed.head_dim))
    return windowed, wide, kinds, tuple(rope_table(_rope_of(nested, kind), dim, longest) for kind, dim in dims)


def _gemma4_feed_forwards(fields: Fields) -> tuple[FeedForward, FeedForward]:
    """Return the second half of a layer, and of one that borrows keys and values (vLLM, Gemma4DecoderLayer)."""
    dense = mlp(fields)
    if not fields.is_set("num_experts"):
        double = replace(dense, intermediate_size=2 * dense.intermediate_size)
        return dense, double if fields.flag("use_double_wide_mlp") else dense
    experts = Experts(
        fields.size("num_experts"),
        fields.size("top_k_experts"),
        fields.size("moe_intermediate_size"),
        shared_intermediate_size=dense.intermediate_size,
        beside_mlp=True,
    )
    return experts, experts


def _rope_of(nested: Fields, kind: str) -> Fields:
    """Return the rope parameters of one kind of layer; other files have one set for all layers."""
    return nested.having({"rope_parameters": nested.values.get(kind)}, {"rope_parameters": nested.path(kind)})
