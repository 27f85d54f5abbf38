"""Dense decoders that differ from Llama in biases, norms, gates or windows: OLMo, EXAONE, Cohere, GLM-4 and others.

Some have no class of their own in vLLM and run through transformers' (``TransformersForCausalLM``). Those work out
rotary positions as they go and load no table.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from specdecode_operator.sizing.base.fields import Fields
from specdecode_operator.sizing.families.decoder import (
    FULL,
    SLIDING,
    Decoder,
    assemble,
    attention,
    heads,
    layer_types,
    model_rope,
    with_defaults,
)
from specdecode_operator.sizing.families.dense import llama, refuse_foreign_keys
from specdecode_operator.sizing.model.geometry import ModelGeometry, Tower
from specdecode_operator.sizing.model.layers import DenseMlp, SelfAttention

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
