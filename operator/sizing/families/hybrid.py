"""Hybrids of attention and recurrent layers: Mamba (Nemotron-H, Jamba, Granite 4) and Qwen3-Next.

The module also covers Falcon-H1, Qwen3.5, and pure Mamba 2 models.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from specdecode_operator.enums import FLOAT32_BYTES
from specdecode_operator.sizing.arithmetic import ceil_div
from specdecode_operator.sizing.config_fields import MAX_TOKENS, Fields
from specdecode_operator.sizing.families.decoder import (
    FULL,
    LINEAR,
    Decoder,
    assemble,
    attention,
    layer_types,
    mlp,
    model_rope,
    with_defaults,
)
from specdecode_operator.sizing.families.moe import qwen_experts, qwen_feed_forward
from specdecode_operator.sizing.geometry import (
    DeltaNet,
    DenseMlp,
    Experts,
    FeedForward,
    Layer,
    Mixer,
    ModelGeometry,
    ParallelMixers,
    SelectiveScan,
    StateSpace,
)
from specdecode_operator.sizing.quantization import read_checkpoint

_FULL_EVERY: Final = 4
"""Default of full_attention_interval: every Nth layer has full attention."""

_STATE_TYPES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


def qwen_hybrid(fields: Fields, architecture: str) -> ModelGeometry:
    """Three layers of gated delta rule, then one of gated attention."""
    newer = architecture.startswith("Qwen3_5")
    mixer = attention(fields, qkv_bias=fields.flag("attention_bias"), qk_norm=True, gated=True)
    linear = DeltaNet(
        num_key_heads=fields.size("linear_num_key_heads"),
        num_value_heads=fields.size("linear_num_value_heads"),
        key_head_dim=fields.size("linear_key_head_dim"),
        value_head_dim=fields.size("linear_value_head_dim"),
        conv_kernel=fields.size("linear_conv_kernel_dim"),
        # vLLM, models/config.py, Qwen3_5ForConditionalGenerationConfig.
        state_element_bytes=_state_type(fields, "mamba_ssm_dtype"),
    )
    every = fields.size("full_attention_interval", default=_FULL_EVERY)
    kinds = layer_types(fields, lambda index: LINEAR if (index + 1) % every else FULL)
    experts = qwen_experts(fields) if fields.is_set("num_experts") else None
    decoder = Decoder(
        lambda index: linear if kinds[index] == LINEAR else mixer,
        lambda index: mlp(fields) if experts is None else qwen_feed_forward(fields, experts, index),
        (model_rope(fields, mixer.head_dim, follows_tokens=True),),
        tables_on_every_stage=not newer,
        embedding_on_every_stage=newer,
    )
    return assemble(fields, architecture, decoder)


def _state_type(fields: Fields, key: str, default: str = "") -> int | None:
    """Return the bytes of a number in the state; None if the file does not set the type."""
    name = fields.text(key, default=default)
    if name and name not in _STATE_TYPES:
        raise fields.error(key, f"must be one of {', '.join(_STATE_TYPES)}")
    return _STATE_TYPES.get(name)


_EXPERTS: Final = "moe"
_DENSE: Final = "mlp"

_NEMOTRON_LETTERS: Final = {"M": LINEAR, "*": FULL, "E": _EXPERTS, "-": _DENSE}
"""Letters of hybrid_override_pattern (transformers, NemotronHConfig, _pattern_to_list)."""

_OLD_NAMES: Final = {"mamba": LINEAR, "attention": FULL}
"""Names of these layers in files of before transformers 5."""

_NEMOTRON_DEFAULTS: Final = {"head_dim": 128, "mamba_ssm_cache_dtype": "float32", "n_shared_experts": 1}
"""Defaults of transformers' NemotronHConfig and of vLLM's NemotronHForCausalLMConfig."""

_JAMBA_DEFAULTS: Final = {
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "expert_layer_period": 2,
    "attn_layer_period": 8,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "max_position_embeddings": 262_144,
}
"""Defaults of transformers' JambaConfig."""

_JAMBA_STEP_SHARE: Final = 16
"""mamba_dt_rank "auto" is the hidden size over it."""


def nemotron_h(fields: Fields, architecture: str) -> ModelGeometry:
    """Nemotron-H and Nemotron 3: each layer is Mamba 2, attention, a feed-forward layer or experts, and one norm.

    vLLM, nemotron_h.py: no gates, no rotary positions, its own output head even if the file ties it.
    """
    kinds = _kinds(fields, "layers_block_type", "hybrid_override_pattern")
    if not kinds:
        raise fields.error("hybrid_override_pattern", "is missing, as is layers_block_type; copy one from config.json")
    found = {"num_hidden_layers": len(kinds), "tie_word_embeddings": False}
    fields = with_defaults(fields.having({**fields.values, **found}), _NEMOTRON_DEFAULTS)
    window = fields.size("sliding_window") if fields.is_set("sliding_window") else None
    attends = attention(fields, window_tokens=window)
    states = StateSpace(
        num_heads=fields.size("mamba_num_heads"),
        head_dim=fields.size("mamba_head_dim"),
        num_groups=fields.size("n_groups"),
        state_size=fields.size("ssm_state_size"),
        conv_kernel=fields.size("conv_kernel", default=4),
        conv_bias=fields.flag("use_conv_bias", default=True),
        projection_bias=fields.flag("use_bias"),
        state_element_bytes=_state_type(fields, "mamba_ssm_cache_dtype", default="float32"),
    )
    mixers: dict[str, Mixer] = {LINEAR: states, FULL: attends}
    others: dict[str, FeedForward] = {}
    if _DENSE in kinds:
        others[_DENSE] = DenseMlp(fields.size("intermediate_size"), fields.flag("mlp_bias"), gated=False)
    if _EXPERTS in kinds:
        others[_EXPERTS] = _nemotron_experts(fields)
    decoder = Decoder(
        lambda index: mixers.get(kinds[index]),
        lambda index: others.get(kinds[index]),
        (),
        norms=1,
        tables_on_every_stage=True,
        norm_on_every_stage=True,
    )
    model = assemble(fields, architecture, decoder)
    if not fields.values.get("num_nextn_predict_layers"):
        return model
    predicts = _kinds(fields, "mtp_layers_block_type", "mtp_hybrid_override_pattern") or (FULL, _EXPERTS)
    if not set(predicts) <= {FULL, _EXPERTS}:
        raise fields.error("mtp_layers_block_type", f"sizing knows {FULL} and {_EXPERTS} here, and so does the engine")
    stored = read_checkpoint(fields)
    block = []
    for index, kind in enumerate(predicts):
        unquantized = stored.unquantized_prediction_modules(model.num_layers, index)
        block.append(Layer(mixers.get(kind), others.get(kind), norms=1, unquantized=unquantized))
    return replace(model, mtp_block=tuple(block))


def _kinds(fields: Fields, list_key: str, pattern_key: str) -> tuple[str, ...]:
    """Return the kinds of layers from a list or a pattern; empty if the file lacks both."""
    listed = fields.strings(list_key)
    if listed:
        return _known(list_key, listed, fields, (LINEAR, FULL, _EXPERTS, _DENSE))
    pattern = fields.text(pattern_key, default="")
    if not set(pattern) <= set(_NEMOTRON_LETTERS):
        raise fields.error(pattern_key, f"may only hold {' '.join(_NEMOTRON_LETTERS)}")
    return tuple(_NEMOTRON_LETTERS[letter] for letter in pattern)


def _known(key: str, given: Sequence[str], fields: Fields, kinds: Sequence[str]) -> tuple[str, ...]:
    """Return the kinds of layers that a file names, by their newer names."""
    named = tuple(_OLD_NAMES.get(kind, kind) for kind in given)
    strange = next((kind for kind in named if kind not in kinds), None)
    if strange is not None:
        raise fields.unmodelled(key, f"sizing lacks {strange}; known are {', '.join((*kinds, *_OLD_NAMES))}")
    return named


def _nemotron_experts(fields: Fields) -> Experts:
    # Zero shared experts are a value that a size may not have.
    shared = 0
    if fields.values.get("n_shared_experts") != 0:
        shared = fields.size("moe_shared_expert_intermediate_size") * fields.size("n_shared_experts")
    return Experts(
        fields.size("n_routed_experts"),
        fields.size("num_experts_per_tok"),
        fields.size("moe_intermediate_size"),
        score_bias_bytes=FLOAT32_BYTES,
        shared_intermediate_size=shared,
        gated=False,
        latent_size=fields.size("moe_latent_size") if fields.is_set("moe_latent_size") else None,
        latent_bias=fields.flag("mlp_bias"),
    )


def granite_hybrid(fields: Fields, architecture: str) -> ModelGeometry:
    """Granite 4.0: Mamba 2 or attention, then experts in parallel with a feed-forward layer that every token visits."""
    count = fields.size("num_hidden_layers")
    given = fields.strings("layer_types") or fields.strings("layers_block_type") or (LINEAR,) * count
    kinds = _known("layer_types", given, fields, (LINEAR, FULL))
    if len(kinds) != count:
        raise fields.error("layer_types", f"must name one type a layer, {count} in all")
    bias = fields.flag("attention_bias")
    attends = attention(fields, default_kv=True, qkv_bias=bias, output_bias=bias)
    states = _mamba2(fields, fields.size("mamba_expand", default=2) * fields.size("hidden_size"))
    feed_forward = _granite_feed_forward(fields)
    rotates = fields.text("position_embedding_type", default="") == "rope"
    decoder = Decoder(
        lambda index: states if kinds[index] == LINEAR else attends,
        lambda _: feed_forward,
        (model_rope(fields, attends.head_dim),) if rotates and FULL in kinds else (),
        tables_on_every_stage=True,
        norm_on_every_stage=True,
    )
    return assemble(fields, architecture, decoder)


def _granite_feed_forward(fields: Fields) -> FeedForward | None:
    # Both may be zero: models without experts, and models without what stands beside them.
    shared = 0
    if fields.values.get("shared_intermediate_size") != 0:
        shared = fields.size("shared_intermediate_size")
    if fields.values.get("num_local_experts") == 0:
        return DenseMlp(shared) if shared else None
    return Experts(
        fields.size("num_local_experts"),
        fields.size("num_experts_per_tok"),
        fields.size("intermediate_size"),
        shared_intermediate_size=shared,
    )


def falcon_h1(fields: Fields, architecture: str) -> ModelGeometry:
    """Falcon-H1: attention and Mamba 2 side by side in every layer."""
    attends = attention(fields, default_kv=True)
    # Null means that the width follows from mamba_expand (vLLM, falcon_h1.py).
    expanded = fields.size("mamba_expand", default=2) * fields.size("hidden_size")
    width = fields.size("mamba_d_ssm", default=expanded)
    states = _mamba2(fields, width, output_norm=fields.flag("mamba_rms_norm"))
    mixer = ParallelMixers(attends, states)
    rope = model_rope(fields, attends.head_dim)
    return assemble(fields, architecture, Decoder(lambda _: mixer, lambda _: mlp(fields), (rope,)))


def _mamba2(fields: Fields, width: int, *, output_norm: bool = True) -> StateSpace:
    """Return Mamba 2 as Granite's and Falcon's files describe it."""
    count = fields.size("mamba_n_heads", default=128)
    dim = width // count if fields.values.get("mamba_d_head") in (None, "auto") else fields.size("mamba_d_head")
    if count * dim != width:
        raise fields.error("mamba_n_heads", f"times mamba_d_head must be the width of the layer, which is {width}")
    return StateSpace(
        num_heads=count,
        head_dim=dim,
        num_groups=fields.size("mamba_n_groups", default=1),
        state_size=fields.size("mamba_d_state", default=256),
        conv_kernel=fields.size("mamba_d_conv", default=4),
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        projection_bias=fields.flag("mamba_proj_bias"),
        output_norm=output_norm,
    )


def mamba2(fields: Fields, architecture: str) -> ModelGeometry:
    """Mamba 2: no attention, no feed-forward layers, one norm per layer."""
    # Files have no longest sequence, since the architecture has no limit.
    fields = with_defaults(fields, {"max_position_embeddings": MAX_TOKENS})
    states = StateSpace(
        num_heads=fields.size("num_heads"),
        head_dim=fields.size("head_dim"),
        num_groups=fields.size("n_groups", default=8),
        state_size=fields.size("state_size"),
        conv_kernel=fields.size("conv_kernel", default=4),
        conv_bias=fields.flag("use_conv_bias", default=True),
        projection_bias=fields.flag("use_bias"),
    )
    decoder = Decoder(
        lambda _: states,
        lambda _: None,
        (),
        norms=1,
        tables_on_every_stage=True,
        norm_on_every_stage=True,
    )
    return assemble(fields, architecture, decoder)


def jamba(fields: Fields, architecture: str) -> ModelGeometry:
    """Jamba: Mamba 1 with attention in every eighth layer, experts in every other; no rotary positions."""
    # The engine's class has its own output head even if the file ties it (vLLM, jamba.py).
    fields = with_defaults(fields.having({**fields.values, "tie_word_embeddings": False}), _JAMBA_DEFAULTS)
    hidden = fields.size("hidden_size")
    automatic = fields.values.get("mamba_dt_rank") in (None, "auto")
    scan = SelectiveScan(
        width=fields.size("mamba_expand") * hidden,
        state_size=fields.size("mamba_d_state"),
        step_rank=ceil_div(hidden, _JAMBA_STEP_SHARE) if automatic else fields.size("mamba_dt_rank"),
        conv_kernel=fields.size("mamba_d_conv"),
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        projection_bias=fields.flag("mamba_proj_bias"),
    )
    attends = attention(fields, default_kv=True)
    width, count = fields.size("intermediate_size"), fields.size("num_experts")
    experts = Experts(count, fields.size("num_experts_per_tok"), width) if count > 1 else DenseMlp(width)
    has_experts, has_attention = _every(fields, "expert_layer", first=1), _every(fields, "attn_layer", first=4)
    decoder = Decoder(
        lambda index: attends if has_attention(index) else scan,
        lambda index: experts if has_experts(index) else DenseMlp(width),
        (),
        tables_on_every_stage=True,
        norm_on_every_stage=True,
    )
    return assemble(fields, architecture, decoder)


def _every(fields: Fields, key: str, first: int) -> Callable[[int], bool]:
    """Return whether a layer is one of every N, counted from an offset that may be zero."""
    period = fields.size(f"{key}_period")
    given = fields.values.get(f"{key}_offset", first)
    offset = 0 if given == 0 else fields.size(f"{key}_offset", default=first)
    if offset >= period:
        raise fields.error(f"{key}_offset", f"must be less than {key}_period, which is {period}")
    return lambda index: index % period == offset
