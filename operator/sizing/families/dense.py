"""Dense decoders: Llama, Gemma, Qwen, Phi, Granite, MiMo, OLMo, EXAONE, Cohere, GLM-4 and others.

Gemma has sliding windows in most layers, norms before and after each half of a layer, and tied embeddings.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from specdecode_operator.sizing.config_fields import Fields
from specdecode_operator.sizing.families.decoder import (
    FULL,
    SLIDING,
    Decoder,
    Heads,
    assemble,
    attention,
    first_that_borrows,
    heads,
    layer_types,
    mlp,
    model_rope,
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
    Tower,
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


_FULL_EVERY: Final = 4
"""One layer in so many sees everything where files do not say."""

_HALF_ROTATED: Final = {"partial_rotary_factor": 0.5}
"""What GLM-4 and Nemotron rotate where the file does not say (vLLM, glm4.py; transformers, NemotronConfig)."""

_COHERE_WINDOW_EXCESS: Final = 1
"""Cohere counts the token itself on top of its window (vLLM, commandr.py)."""


@dataclass(frozen=True)
class _Traits:
    """What a model has beside its attention."""

    # Whether its feed-forward layers have a gate, and biases
    gated: bool = True
    mlp_bias: bool = False
    # Norms over the hidden size in one layer, and whether they have biases
    norms: int = 2
    norm_bias: bool = False
    tied: bool = False  # Whether files that say nothing tie output head and embedding
    has_table: bool = True  # Whether it loads a rotary table
    norm_on_every_stage: bool = False  # Whether the engine's class makes the final norm on every pipeline stage


_LLAMA: Final = _Traits()


def olmo2(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """OLMo 2 and 3: queries and keys normed over all heads; windows in most layers of OLMo 3."""
    if architecture == "Olmo3ForCausalLM":
        fields = _with_windows(fields, {"sliding_window": 4096}, lambda index: (index + 1) % _FULL_EVERY)
    bias = fields.flag("attention_bias")
    mixer = attention(heads(fields), qkv_bias=bias, output_bias=bias, norm_over_heads=True, whole_norms=True)
    return _model(fields, architecture, tower, mixer, _Traits(has_table=False))


def smollm3(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """SmolLM3: Llama's layers, some without positions."""
    refuse_foreign_keys(fields)
    bias = fields.flag("attention_bias")
    mixer = attention(heads(fields), qkv_bias=bias, output_bias=bias)
    traits = _Traits(mlp_bias=fields.flag("mlp_bias"), has_table=False, tied=True)
    return _model(fields, architecture, tower, mixer, traits)


def cwm(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """Code World Model: Llama's layers with windows in most of them."""
    fields = _with_windows(fields, {"sliding_window": 8192}, lambda index: index % _FULL_EVERY)
    return _model(fields, architecture, tower, attention(heads(fields, default_dim=128)), _Traits(has_table=False))


def phi(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """Phi-1 to Phi-2: biases everywhere, no gate, one norm a layer."""
    refuse_foreign_keys(fields)
    mixer = attention(heads(fields, default_kv=True), qkv_bias=True, output_bias=True)
    traits = _Traits(gated=False, mlp_bias=True, norms=1, norm_bias=True, has_table=False)
    return _model(fields, architecture, tower, mixer, traits)


def arcee(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """Arcee (AFM): no gate in the feed-forward layer."""
    refuse_foreign_keys(fields)
    bias = fields.flag("attention_bias")
    mixer = attention(heads(fields), qkv_bias=bias, output_bias=bias)
    traits = _Traits(gated=False, mlp_bias=fields.flag("mlp_bias"), has_table=False)
    return _model(fields, architecture, tower, mixer, traits)


def starcoder2(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """StarCoder2: biases everywhere, no gate."""
    refuse_foreign_keys(fields)
    bias = fields.flag("use_bias", default=True)
    window = fields.size("sliding_window") if fields.is_set("sliding_window") else None
    mixer = attention(heads(fields), qkv_bias=bias, output_bias=bias, window_tokens=window)
    traits = _Traits(gated=False, mlp_bias=bias, norm_bias=True, has_table=False, tied=True)
    return _model(fields, architecture, tower, mixer, traits)


def seed_oss(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """Seed-OSS: biases on query, key and value."""
    refuse_foreign_keys(fields)
    mixer = attention(
        heads(fields, default_dim=128),
        qkv_bias=fields.flag("attention_bias", default=True),
        output_bias=fields.flag("attention_out_bias"),
    )
    return _model(fields, architecture, tower, mixer, _Traits(mlp_bias=fields.flag("mlp_bias"), has_table=False))


def hunyuan(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """Hunyuan, dense: queries and keys normed a head."""
    bias = fields.flag("attention_bias")
    mixer = attention(heads(fields), qkv_bias=bias, output_bias=bias, qk_norm=True)
    return _model(fields, architecture, tower, mixer, _Traits(has_table=False))


def exaone4(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """EXAONE 4: queries and keys normed a head, windows in most layers of the larger one (vLLM, exaone4.py)."""
    if "sliding_window" not in fields.values or fields.is_set("sliding_window"):
        every = (
            _FULL_EVERY if fields.is_set("layer_types") else fields.size("sliding_window_pattern", default=_FULL_EVERY)
        )
        fields = _with_windows(fields, {"sliding_window": 4096}, lambda index: (index + 1) % every)
    bias = fields.flag("attention_bias") or fields.flag("bias")
    mixer = attention(heads(fields), qkv_bias=bias, output_bias=bias, qk_norm=True)
    return _model(fields, architecture, tower, mixer, _Traits(mlp_bias=fields.flag("mlp_bias")))


def cohere(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """Command R and Command A: one norm a layer; windows in most layers of the newer ones (vLLM, commandr.py)."""
    mixer = attention(heads(fields), norm_over_heads=fields.flag("use_qk_norm"))
    if architecture == "Cohere2ForCausalLM":
        window = fields.size("sliding_window", default=4096) + _COHERE_WINDOW_EXCESS
        every = fields.size("sliding_window_pattern", default=_FULL_EVERY)
        fields = fields.having({**fields.values, "sliding_window": window})
        fields = _with_windows(fields, {}, lambda index: (index + 1) % every)
    return _model(fields, architecture, tower, mixer, _Traits(norms=1, tied=True, norm_on_every_stage=True))


def glm4(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """GLM-4-0414: four norms a layer (vLLM, glm4.py)."""
    refuse_foreign_keys(fields)
    fields = with_defaults(fields, _HALF_ROTATED)
    mixer = attention(heads(fields, default_dim=128), qkv_bias=fields.flag("attention_bias", default=True))
    return _model(fields, architecture, tower, mixer, _Traits(norms=4))


def glm(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """GLM-4-9B in transformers' format."""
    refuse_foreign_keys(fields)
    mixer = attention(heads(fields, default_dim=128), qkv_bias=fields.flag("attention_bias", default=True))
    return _model(fields, architecture, tower, mixer, _Traits(has_table=False))


def ernie(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """ERNIE 4.5, dense: Llama's layers (vLLM, ernie45.py)."""
    return llama(with_defaults(fields, {"head_dim": 128, "tie_word_embeddings": True}), architecture, tower)


def gemma(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """Gemma, the first: wide heads, tied embeddings (vLLM, gemma.py)."""
    refuse_foreign_keys(fields)
    mixer = attention(heads(fields, default_dim=256))
    return _model(fields, architecture, tower, mixer, _Traits(tied=True, norm_on_every_stage=True))


def exaone(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """EXAONE 3 and 3.5: Llama's layers, their number under a name of its own (vLLM, exaone.py)."""
    return llama(with_defaults(fields, {"num_hidden_layers": fields.values.get("num_layers")}), architecture, tower)


def stablelm(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """StableLM: norms with biases, a quarter of each head rotated (vLLM, stablelm.py)."""
    refuse_foreign_keys(fields)
    if fields.flag("qk_layernorm"):
        raise fields.unmodelled("qk_layernorm", "sizing lacks the norms a head of StableLM 2 12B")
    fields = with_defaults(fields, {"partial_rotary_factor": 0.25})
    mixer = attention(heads(fields), qkv_bias=fields.flag("use_qkv_bias"))
    return _whole_on_every_stage(_model(fields, architecture, tower, mixer, _Traits(norm_bias=True)))


def _whole_on_every_stage(model: ModelGeometry) -> ModelGeometry:
    return replace(model, tables_on_every_stage=True, norm_on_every_stage=True)


def internlm2(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """InternLM 2: Llama's layers; every pipeline stage makes all tables (vLLM, internlm2.py)."""
    return _whole_on_every_stage(llama(fields, architecture, tower))


def nemotron(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """Nemotron-4 and Minitron: no gate, norms with biases (vLLM, nemotron.py)."""
    refuse_foreign_keys(fields)
    fields = with_defaults(fields, _HALF_ROTATED)
    bias = fields.flag("attention_bias") or fields.flag("bias")
    mixer = attention(heads(fields), qkv_bias=bias, output_bias=bias)
    traits = _Traits(gated=False, mlp_bias=fields.flag("mlp_bias"), norm_bias=True)
    return _model(fields, architecture, tower, mixer, traits)


def _with_windows(fields: Fields, defaults: dict[str, object], is_windowed: Callable[[int], object]) -> Fields:
    """Return the fields of a file with what its class in transformers fills in about windows."""
    kinds = [SLIDING if is_windowed(index) else FULL for index in range(fields.size("num_hidden_layers"))]
    return with_defaults(fields, {**defaults, "layer_types": kinds})


def _model(
    fields: Fields, architecture: str, tower: Tower | None, mixer: SelfAttention, traits: _Traits = _LLAMA
) -> ModelGeometry:
    """Return a model of equal layers but for the windows that its file gives to some of them."""
    kinds = layer_types(fields, lambda _: FULL)
    windowed = replace(mixer, window_tokens=fields.size("sliding_window")) if SLIDING in kinds else mixer
    feed_forward = DenseMlp(fields.size("intermediate_size"), traits.mlp_bias, traits.gated)
    # A norm that has a bias counts as two.
    norm_parts = 1 + traits.norm_bias
    decoder = Decoder(
        lambda index: windowed if kinds[index] == SLIDING else mixer,
        lambda _: feed_forward,
        (model_rope(fields, mixer.head_dim),) if traits.has_table else (),
        norms=traits.norms * norm_parts,
        final_norms=norm_parts,
        tied=traits.tied,
        tower=tower or Tower(),
        norm_on_every_stage=traits.norm_on_every_stage,
    )
    return assemble(fields, architecture, decoder)


_GEMMA2_DEFAULTS: Final = {"tie_word_embeddings": True, "head_dim": 256, "sliding_window": 4096}
"""What Gemma2Config of transformers fills in."""

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
"""What Gemma3TextConfig of transformers fills in; Google's files leave much of it out."""

_GEMMA4_DEFAULTS: Final = {
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "num_kv_shared_layers": 0,
}
"""What Gemma4TextConfig of transformers fills in."""

_BACKBONE_WIDTH: Final = 1536
_CENTROIDS: Final = 2048
_CHOSEN_CENTROIDS: Final = 32
"""What Gemma4AssistantConfig of transformers fills in."""

_GEMMA3_PATTERN: Final = 6
"""One layer in so many sees everything."""

_NORMS: Final = 4
_NORMS_WITH_EXPERTS: Final = 7
"""Norms of a layer: before and after each half, and before and after what stands beside each other."""


def gemma2(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """Gemma 2: every other layer sees a window, four norms a layer."""
    fields = with_defaults(fields, _GEMMA2_DEFAULTS)
    sizes = heads(fields)
    bias = fields.flag("attention_bias")
    mixer = attention(sizes, qkv_bias=bias, output_bias=bias)
    kinds = layer_types(fields, lambda index: FULL if index % 2 else SLIDING)
    ropes = (model_rope(fields, sizes.dim),)
    return assemble(fields, architecture, _gemma_decoder(fields, mixer, kinds, ropes, tower))


def gemma3(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """Gemma 3: one layer in six sees everything and has rotary positions of its own."""
    fields = with_defaults(fields, _GEMMA3_DEFAULTS)
    sizes = heads(fields)
    bias = fields.flag("attention_bias")
    mixer = attention(sizes, qkv_bias=bias, output_bias=bias, qk_norm=True)
    pattern = fields.size("sliding_window_pattern", default=_GEMMA3_PATTERN)
    kinds = layer_types(fields, lambda index: SLIDING if (index + 1) % pattern else FULL)
    ropes = gemma3_ropes(fields, sizes)
    return assemble(fields, architecture, _gemma_decoder(fields, mixer, kinds, ropes, tower))


def gemma4(fields: Fields, architecture: str, tower: Tower | None = None) -> ModelGeometry:
    """Gemma 4: layers that see everything have wider heads; experts, where there are any, stand beside the MLP.

    In the small models (E2B, E4B) every layer has an input of its own, and the last layers borrow keys and values.
    """
    fields = with_defaults(fields, _GEMMA4_DEFAULTS)
    windowed, wide = _gemma4_attention(fields)
    kinds = layer_types(fields, lambda index: SLIDING if (index + 1) % _GEMMA3_PATTERN else FULL)
    first_borrower = first_that_borrows(fields, kinds, _whole_number(fields, "num_kv_shared_layers"))
    own, borrowers = gemma4_feed_forwards(fields)
    own_input = _whole_number(fields, "hidden_size_per_layer_input")
    decoder = Decoder(
        mixer=lambda index: replace(
            windowed if kinds[index] == SLIDING else wide, borrows_cache=index >= first_borrower
        ),
        feed_forward=lambda index: own if index < first_borrower else borrowers,
        ropes=gemma4_ropes(fields, wide.head_dim, windowed.head_dim),
        norms=_NORMS_WITH_EXPERTS if isinstance(own, Experts) else _NORMS,
        tied=True,
        tower=tower or Tower(),
        embedding_on_every_stage=True,
        norm_on_every_stage=True,
        own_input_size=own_input,
    )
    model = assemble(fields, architecture, decoder)
    inputs = own_input * len(kinds)
    rows = padded_vocabulary(fields.size("vocab_size_per_layer_input"))
    # The table of the layers' inputs, the projection of the embedding to them, and their norm.
    return replace(model, split_elements=inputs * (rows + model.hidden_size), whole_elements=own_input)


def gemma4_assistant(fields: Fields, architecture: str, _tower: Tower | None = None) -> ModelGeometry:
    """Gemma 4 assistant: drafts from the target's hidden states, keys and values (vLLM, gemma4_mtp.py).

    Its layers have queries alone. It embeds tokens by the target's table, and keeps its own as output head, whatever
    its file ties (v1/worker/gpu/spec_decode/gemma4/speculator.py, _share_embeddings). Both projections between its
    width and the target's are divided over the ranks. With ``use_ordered_embeddings`` it scores only the tokens of
    some centroids, whose rows it copies (Gemma4MTPMaskedEmbedder).
    """
    fields = with_defaults(fields, _GEMMA4_DEFAULTS)
    windowed, wide = (replace(mixer, borrows_cache=True) for mixer in _gemma4_attention(fields))
    kinds = layer_types(fields, lambda index: SLIDING if (index + 1) % _GEMMA3_PATTERN else FULL)
    feed_forward = mlp(fields)
    decoder = Decoder(
        mixer=lambda index: windowed if kinds[index] == SLIDING else wide,
        feed_forward=lambda _: feed_forward,
        ropes=gemma4_ropes(fields, wide.head_dim, windowed.head_dim),
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


def _gemma4_attention(fields: Fields) -> tuple[SelfAttention, SelfAttention]:
    """Return the attention of layers that see a window, and of those that see everything."""
    bias = fields.flag("attention_bias")
    windowed = attention(
        heads(fields), qkv_bias=bias, output_bias=bias, qk_norm=True, window_tokens=fields.size("sliding_window")
    )
    wide = replace(
        windowed,
        num_kv_heads=fields.size("num_global_key_value_heads", default=windowed.num_kv_heads),
        head_dim=fields.size("global_head_dim"),
        window_tokens=None,
    )
    return windowed, wide


def gemma4_feed_forwards(fields: Fields) -> tuple[FeedForward, FeedForward]:
    """Return the second half of a layer, and of one that borrows keys and values (vLLM, Gemma4DecoderLayer)."""
    dense = mlp(fields)
    borrower = replace(dense, intermediate_size=2 * dense.intermediate_size)
    if not fields.is_set("num_experts"):
        return dense, borrower if fields.flag("use_double_wide_mlp") else dense
    experts = Experts(
        fields.size("num_experts"),
        fields.size("top_k_experts"),
        fields.size("moe_intermediate_size"),
        shared_intermediate_size=dense.intermediate_size,
        beside_mlp=True,
    )
    return experts, experts


def _whole_number(fields: Fields, key: str) -> int:
    """Return a size that may be zero."""
    return 0 if fields.values[key] == 0 else fields.size(key)


def gemma4_ropes(fields: Fields, wide_dim: int, dim: int) -> tuple[RopeTable, ...]:
    """Return the tables of layers that see everything and of those that see a window."""
    nested = fields.section("rope_parameters") or fields
    longest = fields.size("max_position_embeddings")
    return tuple(
        rope_table(_rope_of(nested, kind), head_dim, longest) for kind, head_dim in ((FULL, wide_dim), (SLIDING, dim))
    )


def gemma3_ropes(fields: Fields, sizes: Heads) -> tuple[RopeTable, ...]:
    """Return the tables of layers that see everything and of those that see a window."""
    longest = fields.size("max_position_embeddings")
    nested = fields.section("rope_parameters")
    if nested is not None and nested.section(FULL) is not None:
        tables = [_rope_of(nested, kind) for kind in (FULL, SLIDING)]
    else:
        local = {"rope_theta": fields.values.get("rope_local_base_freq")}
        tables = [fields, fields.having(local, {"rope_theta": fields.path("rope_local_base_freq")})]
    return tuple(rope_table(table, sizes.dim, longest) for table in tables)


def _rope_of(nested: Fields, kind: str) -> Fields:
    """Return the rope parameters of one kind of layer, where files otherwise have those of all."""
    return nested.having({"rope_parameters": nested.values.get(kind)}, {"rope_parameters": nested.path(kind)})


def _gemma_decoder(
    fields: Fields, mixer: SelfAttention, kinds: tuple[str, ...], ropes: tuple[RopeTable, ...], tower: Tower | None
) -> Decoder:
    """Return Gemma's arrangement: windows in some layers, four norms a layer, tied embeddings."""
    windowed = replace(mixer, window_tokens=fields.size("sliding_window"))
    feed_forward = mlp(fields)
    return Decoder(
        mixer=lambda index: windowed if kinds[index] == SLIDING else mixer,
        feed_forward=lambda _: feed_forward,
        ropes=ropes,
        norms=_NORMS,
        tied=True,
        tower=tower or Tower(),
        norm_on_every_stage=True,
    )
