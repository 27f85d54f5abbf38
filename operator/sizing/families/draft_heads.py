"""Draft heads: EAGLE, EAGLE-3, Medusa, DFlash (with and without XPress), DSpark, and MTP layers.

DFlash and DSpark propose a block in one pass. Multi-token prediction (MTP) layers are part of the target's
checkpoint.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from specdecode_operator.enums import FLOAT32_BYTES, Method
from specdecode_operator.sizing.arithmetic import round_up
from specdecode_operator.sizing.config_fields import Fields
from specdecode_operator.sizing.errors import PlanError
from specdecode_operator.sizing.families.decoder import (
    SLIDING,
    Decoder,
    assemble,
    attention,
    latent_attention,
    mlp,
    model_rope,
)
from specdecode_operator.sizing.geometry import (
    TOKEN_ID_BYTES,
    VOCABULARY_PADDING,
    DenseMlp,
    DSparkStages,
    Experts,
    HeadParts,
    LatentAttention,
    Layer,
    ModelGeometry,
    Refiner,
    SelfAttention,
    Tower,
    padded_vocabulary,
)
from specdecode_operator.sizing.quantization import read_checkpoint
from specdecode_operator.sizing.registered_classes import Unregistered, is_registered, unregistered
from specdecode_operator.vllm.versions import LAUNCHED_VERSIONS, SIZED_VERSIONS, version_facts

HOLDS_DSPARK: Final = "DeepseekV4"
"""Beginning of architectures whose checkpoints may hold stages of DSpark (vLLM, config/speculative.py)."""

_EAGLE3_AUXILIARY_STATES: Final = 3
"""Default number of the target's hidden states that an EAGLE-3 head joins: an early, a middle and a late layer's."""

XPRESS: Final = ("Qwen3XPressModel", "DFlashQwen3XPressModel")
"""DFlash heads with a refiner, as files name them and as vLLM renames them (config/speculative.py)."""

DRAFT_CLASSES: Final[Mapping[str, str]] = {
    name: kind for version in SIZED_VERSIONS for name, kind in version_facts(version).get("draft_classes", {}).items()
}
"""Class that any version of vLLM maps a draft head to, by the first of its ``architectures``."""

DFLASH2: Final = "DFlash2Qwen3ForCausalLM"
"""Class of DFlash heads with a selector, which only model runner V2 uses (vllm/config/vllm.py, _is_dflash2_draft)."""

ASSISTANTS: Final = ("Gemma4Assistant", "Gemma4UnifiedAssistant")
"""Beginnings of architectures that vLLM takes for Gemma4MTPModel, by their type (config/speculative.py)."""

_METHODS_OF_CLASSES: Final = (
    *((word, Method.MTP) for word in ASSISTANTS),
    ("Medusa", Method.MEDUSA),
    ("DFlash", Method.DFLASH),
    ("XPress", Method.DFLASH),
    ("DSpark", Method.DSPARK),
    ("Eagle3", Method.EAGLE3),
    ("Eagle", Method.EAGLE),
)
"""Method of heads whose class has the word in its name; the first word that fits decides."""

_OUTSIDE_THE_LAYER: Final = (
    *("draft_vocab_size", "target_hidden_size", "norm_before_fc", "fc_norm"),
    "eagle_aux_hidden_state_layer_ids",
)
"""Keys of the speculators library's format outside the section of the layers (vLLM, configs/speculators/algos.py)."""

_FROM_SPECULATORS: Final = ("PEagleDraftModel",)

_NEVER_RENAMED: Final = ("LiLiCorrDraftModel",)

_TAKEN_FOR_MTP: Final = ("deepseek_mtp", "deepseek_v3", "deepseek_v32", "glm_moe_dsa")
"""Types of files that vLLM rewrites to DeepSeek's modules for multi-token prediction, regardless of the class."""

_FROZEN_SINCE: Final = (0, 5)
"""First release of the speculators library whose heads keep a frozen copy of the target's output head: its rows for the
draft's vocabulary, and all rows if that is the target's (model.py, DraftVocabMixin)."""

_PLACE_TOKENS: Final = ("pard_token", "ptd_token_id")
"""Keys of PARD's and P-EAGLE's config.json: the token in the positions of tokens to propose."""

_MEDUSA_HEADS: Final = 5
_MEDUSA_WIDTH: Final = 4096
_MEDUSA_VOCABULARY: Final = 32_001
"""Defaults of Medusa (vLLM, transformers_utils/configs/medusa.py)."""


def method_of_head(model: ModelGeometry) -> Method | None:
    """Return the method of a draft head; None for a separate model.

    EAGLE heads are often published as the single layer of the model that they were cut from. Then the name decides, as
    in vLLM.
    """
    if model.head is not None:
        kind = draft_class(model)
        return next((method for word, method in _METHODS_OF_CLASSES if word in kind), Method.EAGLE3)
    name = model.name.lower()
    if model.num_layers > 1 or "eagle" not in name:
        return None
    return Method.EAGLE3 if "eagle3" in name else Method.EAGLE


def eagle(fields: Fields, architecture: str) -> ModelGeometry:
    """EAGLE: one or more Llama layers behind a projection of token and hidden state (vLLM, llama_eagle.py)."""
    model = _llama_like(fields, architecture)
    size = model.hidden_size
    first, *rest = model.layers
    # The first layer's input norm is left out: the projection takes its place.
    return replace(
        model,
        layers=(replace(first, norms=1), *rest),
        tie_word_embeddings=True,
        final_norms=0,
        head=HeadParts(
            output_rows=0, shares_embedding=True, shares_output=True, whole_elements=2 * size * size, reads_width=size
        ),
    )


def draft_class(model: ModelGeometry) -> str:
    """Return the class that vLLM makes of a draft head, or its architecture if that is not in the registry."""
    return DRAFT_CLASSES.get(model.architecture, model.architecture)


def registered_name(architecture: str, method: str) -> str:
    """Return the name that vLLM looks up for a head (transformers_utils/configs/eagle.py, EAGLEConfig.__init__)."""
    match method:
        case Method.EAGLE:
            kept, prefix = architecture.startswith("Eagle"), "Eagle"
        case Method.EAGLE3:
            kept, prefix = architecture.startswith("Eagle3") or architecture.endswith("Eagle3"), "Eagle3"
        case Method.DFLASH:
            kept, prefix = architecture.startswith("DFlash") or architecture in _NEVER_RENAMED, "DFlash"
        case _:
            return architecture
    return architecture if kept else f"{prefix}{architecture}"


def missing_class(architecture: str, method: str, version: str) -> str | None:
    """Return the remedy for a head whose class a version of vLLM lacks; None if its registry has the class.

    Heads in the speculators library's format, or of no registry at all, are renamed by other rules.
    """
    known = version_facts(version).get("draft_classes", {})
    kind, name = DRAFT_CLASSES.get(architecture), registered_name(architecture, method)
    if kind is None or kind == "Medusa" or architecture in _FROM_SPECULATORS or name in known or not known:
        return None
    reason = f"vLLM {version} looks for the class {name}, which it does not have"
    later = next((each for each in LAUNCHED_VERSIONS if name in version_facts(each)["draft_classes"]), None)
    if later is not None:
        return f'{reason}: use engine.version: "{later}" or later'
    alias = next((each for each in known if known[each] == kind and registered_name(each, method) == each), None)
    return f"{reason}: " + (f"write {alias} into architectures of its config.json" if alias else "name another head")


def unregistered_model(model: ModelGeometry, version: str) -> Unregistered | None:
    """Return the reason why a version of vLLM lacks the class of a model; None if it has it.

    Also None for heads, see ``missing_class``, and for names that vLLM replaces before the lookup.
    """
    name = model.architecture
    replaced = not is_registered(name) and model.estimated_because != "architectures"
    return None if name in DRAFT_CLASSES or replaced else unregistered(name, version)


def eagle3(fields: Fields, architecture: str) -> ModelGeometry:
    """EAGLE-3: reads three hidden states of the target, proposes from its own vocabulary (llama_eagle3.py)."""
    return _eagle3(_llama_like(fields, architecture), fields, _auxiliary_states(fields))


def eagle3_qwen3(fields: Fields, architecture: str) -> ModelGeometry:
    """EAGLE-3 on Qwen3: queries and keys are normed, layers may have windows (vLLM, qwen3_eagle3.py)."""
    feed_forward, bias = mlp(fields), fields.flag("attention_bias")
    plain = attention(fields, qkv_bias=bias, output_bias=bias, qk_norm=True)
    rope = model_rope(fields, plain.head_dim)
    model = assemble(fields, architecture, Decoder(_with_windows(fields, plain), lambda _: feed_forward, (rope,)))
    named = fields.values.get("eagle_aux_hidden_state_layer_ids")
    states = len(named) if isinstance(named, list | tuple) and named else _auxiliary_states(fields)
    default = fields.size("num_aux_hidden_states", default=states)
    return _eagle3(model, fields, fields.size("num_aux_layers", default=default))


def eagle3_latent(fields: Fields, architecture: str) -> ModelGeometry:
    """EAGLE-3 with latent attention, for DeepSeek and Kimi K2: only dense layers (vLLM, deepseek_eagle3.py)."""
    kind = fields.text("model_type", default="")
    if kind in _TAKEN_FOR_MTP:
        # config/speculative.py, hf_config_override: it looks for Eagle3DeepSeekMTPModel.
        raise fields.error(
            "model_type", "vLLM takes a file of this type for layers of multi-token prediction: write kimi_k2"
        )
    mixer = latent_attention(fields)
    feed_forward = mlp(fields)
    rope = model_rope(fields, mixer.rope_head_dim)
    model = assemble(fields, architecture, Decoder(lambda _: mixer, lambda _: feed_forward, (rope,)))
    return _eagle3(model, fields, _auxiliary_states(fields))


def _eagle3(model: ModelGeometry, fields: Fields, states: int) -> ModelGeometry:
    """Return a model with the parts of an EAGLE-3 head, which joins this number of hidden states of the target."""
    target_size = fields.size("target_hidden_size", default=model.hidden_size)
    rows = fields.size("draft_vocab_size", default=model.vocab_size)
    first, *rest = model.layers
    # EAGLE-3.1 norms each state before they are joined, older versions norm the joined states.
    norms = states * target_size * (fields.flag("fc_norm") + fields.flag("norm_before_fc"))
    return replace(
        model,
        layers=(replace(first, norms=3, input_multiple=2), *(replace(layer, norms=3) for layer in rest)),
        head=HeadParts(
            output_rows=rows,
            shares_embedding=target_size == model.hidden_size,
            shares_output=False,
            whole_elements=states * target_size * model.hidden_size + norms,
            whole_bytes=rows * TOKEN_ID_BYTES,
            token_map_bytes=rows * TOKEN_ID_BYTES,
            auxiliary_states=states,
            reads_width=target_size,
        ),
    )


def _auxiliary_states(fields: Fields) -> int:
    """Return the number of the target's hidden states that it joins (llama_eagle3.py, num_aux_hidden_states)."""
    eagle_config = fields.section("eagle_config") or Fields(fields.model, {})
    layers = eagle_config.values.get("eagle_aux_hidden_state_layer_ids")
    named = len(layers) if isinstance(layers, list | tuple) and layers else _EAGLE3_AUXILIARY_STATES
    return fields.size("num_aux_hidden_states", default=named)


def speculators_eagle3(fields: Fields, architecture: str) -> ModelGeometry:
    """The same head in the format of vLLM's speculators library, which describes its layer in a separate section."""
    section = fields.section("transformer_layer_config")
    if section is None:
        raise fields.error("transformer_layer_config", "is missing; copy it from the head's config.json")
    outer = {key: fields.values[key] for key in _OUTSIDE_THE_LAYER if fields.is_set(key)}
    layers = {"num_hidden_layers": section.size("num_hidden_layers", default=1)}
    flat = section.having({**section.values, **outer, **layers}, {key: key for key in outer})
    # vLLM, transformers_utils/configs/speculators/algos.py, update_eagle3 and update_peagle.
    is_qwen3 = section.text("model_type", default="llama") == "qwen3"
    model = eagle3_qwen3(flat, architecture) if is_qwen3 else eagle3(flat, architecture)
    head, version = model.head, re.match(r"(\d+)\.(\d+)", fields.text("speculators_version", default=""))
    frozen = version is not None and (int(version[1]), int(version[2])) >= _FROZEN_SINCE
    if head is None or not (frozen and head.output_rows == model.vocab_size and head.shares_embedding):
        return model
    # It stores the target's own output head, which vLLM finds equal and shares (v1/spec_decode/llm_base_proposer.py,
    # _maybe_share_lm_head: torch.equal).
    return replace(model, head=replace(head, shares_output=True))


def peagle(fields: Fields, architecture: str) -> ModelGeometry:
    """P-EAGLE: an EAGLE-3 head that proposes all tokens in one pass, in the format of vLLM's speculators library."""
    if fields.text("speculators_model_type", default="") != "peagle":
        raise fields.error(
            "architectures",
            "vLLM does not start with an unconverted P-EAGLE head: convert it to the format of vLLM's speculators "
            "library, or to LlamaForCausalLMEagle3 with ptd_token_id",
        )
    if not fields.is_set("mask_token_id"):
        raise fields.error("mask_token_id", "is missing; vLLM fills the places of tokens to propose with it")
    return speculators_eagle3(fields, architecture)


def with_verifier(model: ModelGeometry, fields: Fields) -> ModelGeometry:
    """Return a head with the name of the target that its file was trained for, in the speculators library's format."""
    section = fields.section("speculators_config")
    verifier = section.section("verifier") if section else None
    named = verifier.values.get("name_or_path") if verifier else None
    if model.head is None or not isinstance(named, str) or not named:
        return model
    return replace(model, head=replace(model.head, verifier=named))


def in_parallel(model: ModelGeometry, fields: Fields) -> ModelGeometry:
    """Return a draft as one that proposes all tokens in one pass, if its config.json has the token for their positions.

    vLLM reads these keys (v1/spec_decode/llm_base_proposer.py, _init_parallel_drafting_params), but also needs
    parallel_drafting. EAGLE-3 also has a hidden state for these positions (llama_eagle3.py, mask_hidden).
    """
    if method_of_head(model) is None:
        return replace(model, drafts_in_parallel=any(fields.is_set(key) for key in _PLACE_TOKENS))
    states = model.head.auxiliary_states if model.head and not model.head.copies_keys_and_values else 0
    if model.head is None or not states or not any(fields.is_set(key) for key in (*_PLACE_TOKENS, "mask_token_id")):
        return model
    states_of_places = states * (model.head.reads_width or model.hidden_size)
    head = replace(model.head, whole_elements=model.head.whole_elements + states_of_places)
    return replace(model, head=head, drafts_in_parallel=True)


def _llama_like(fields: Fields, architecture: str) -> ModelGeometry:
    bias = fields.flag("attention_bias")
    plain = attention(fields, qkv_bias=bias, output_bias=bias)
    feed_forward = mlp(fields, bias=fields.flag("mlp_bias"))
    rope = model_rope(fields, plain.head_dim)
    return assemble(fields, architecture, Decoder(_with_windows(fields, plain), lambda _: feed_forward, (rope,)))


def _with_windows(fields: Fields, plain: SelfAttention) -> Callable[[int], SelfAttention]:
    """Return the attention of each layer of an EAGLE-3 head: with a window if ``layer_types`` marks it.

    Without ``layer_types``, vLLM ignores ``sliding_window`` (llama.py, LlamaAttention, which counts from the head's
    first layer; qwen3_eagle3.py, Qwen3Eagle3DecoderLayer). The speculators library marks all layers by default.
    """
    kinds = fields.strings("layer_types")
    if SLIDING not in kinds or not fields.is_set("sliding_window"):
        return lambda _: plain
    windowed = replace(plain, window_tokens=fields.size("sliding_window"))
    return lambda index: windowed if index < len(kinds) and kinds[index] == SLIDING else plain


def medusa(fields: Fields, architecture: str) -> ModelGeometry:
    """Medusa: residual blocks and an output head for each token ahead, no attention (vLLM, medusa.py).

    The vocabulary is always the target's (config/speculative.py), so a file need not name it.
    """
    size = fields.size("hidden_size", default=_MEDUSA_WIDTH)
    # Old files name them otherwise.
    count = fields.size("num_heads" if fields.is_set("num_heads") else "medusa_num_heads", default=_MEDUSA_HEADS)
    depth_key = "num_hidden_layers" if fields.is_set("num_hidden_layers") else "medusa_num_layers"
    depth = fields.size(depth_key, default=1)
    vocabulary = fields.size("vocab_size", default=_MEDUSA_VOCABULARY)
    one_output = fields.flag("original_lm_head")
    return ModelGeometry(
        name=fields.model,
        architecture=architecture,
        hidden_size=size,
        vocab_size=vocabulary,
        layers=(),
        tie_word_embeddings=True,
        max_position_embeddings=fields.size("max_position_embeddings", default=2048),
        ropes=(),
        dtype_bytes=2,
        checkpoint=None,
        final_norms=0,
        head=HeadParts(
            output_rows=fields.size("truncated_vocab_size", default=vocabulary) if one_output else vocabulary,
            output_heads=1 if one_output else count,
            embeds=False,
            shares_embedding=False,
            shares_output=False,
            whole_elements=count * depth * (size * size + size * fields.flag("medusa_fc_bias")),
            most_tokens=count,
            medusa_heads=count,
            reads_width=size,
        ),
    )


_SIDES: Final = 2
"""A convolution of DFlash 2 works on the input and on the output of half a layer."""

_SELECTOR_RANK: Final = 256
"""Width of the selector of the published DFlash 2 heads, for shortened files; vLLM requires the key."""

_RANK: Final = 256
_MLP_WIDTH: Final = 512
_CANDIDATES: Final = 512
_STEPS: Final = 15
"""Defaults of XPress heads (vLLM, qwen3_xpress.py, Qwen3XPressModel)."""

_SPECULATORS: Final[Mapping[str, str]] = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "Qwen3DSparkModel",
}
"""Class of the block heads in the format of vLLM's speculators library, by their ``speculators_model_type``."""

_OUTSIDE_THE_LAYERS: Final = (
    *("draft_vocab_size", "target_hidden_size", "speculators_config"),
    *("markov_rank", "block_size", "enable_confidence_head", "confidence_head_with_markov"),
)
_OPTIONS: Final = ("sample_from_anchor", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""Keys of that format outside the section of the layers, and keys that vLLM moves to dflash_config."""


def as_engine_reads(fields: Fields) -> Fields:
    """Return the config.json of a block head in the speculators library's format as vLLM rewrites it; others unchanged.

    vLLM, transformers_utils/configs/speculators/algos.py, update_dflash, update_dflash2 and update_dspark.
    """
    kind = _SPECULATORS.get(fields.text("speculators_model_type", default=""))
    section = fields.section("transformer_layer_config")
    if kind is None or section is None:
        return fields
    layers = fields.values.get("aux_hidden_state_layer_ids")
    if not isinstance(layers, list | tuple) or not layers:
        raise fields.error("aux_hidden_state_layer_ids", "must list layers of the target; copy the head's config.json")
    outer = {key: fields.values[key] for key in _OUTSIDE_THE_LAYERS if fields.is_set(key)}
    if kind != _SPECULATORS["dspark"]:
        # Only DSpark is bound to the blocks that it was trained with.
        outer.pop("block_size", None)
    options = {key: fields.values[key] for key in _OPTIONS if fields.is_set(key)}
    values = {
        **section.values,
        **outer,
        "architectures": [kind],
        "dflash_config": options,
        "eagle_aux_hidden_state_layer_ids": layers,
    }
    paths = {key: section.path(key) for key in section.values if key not in outer}
    return fields.having(values, {**paths, **{key: key for key in outer}})


def dflash(fields: Fields, architecture: str) -> ModelGeometry:
    """DFlash: Qwen3 layers that read the target's hidden states as their context (vLLM, qwen3_dflash.py).

    All its layers keep keys and values of the context. One place of a block
    is the token that verification gave, so it proposes one fewer.
    """
    if fields.text("model_type", default="qwen3") == "dflash":
        raise fields.error(
            "model_type", "vLLM does not support this type and would not start; its DFlash heads have type qwen3"
        )
    options = fields.section("dflash_config") or Fields(fields.model, {})
    block = fields.size("block_size") if fields.is_set("block_size") else None
    most_tokens = None if block is None else block - (not options.flag("sample_from_anchor"))
    return _block_head(fields, options, architecture, _parts(fields, options, most_tokens=most_tokens))


def dflash2(fields: Fields, architecture: str) -> ModelGeometry:
    """DFlash 2: DFlash with convolutions around both halves of each layer, and a selector (vLLM, qwen3_dflash2.py).

    A convolution (DFlashGroupedConv) has two sides: for each its taps a channel, and a projection of the hidden state
    to as many taps a group of channels. The selector (CandidateSelector) has two tables of ``selector_rank`` columns
    and a projection into that width. All of it is whole on every rank, and counted in 16 bits.
    """
    options = fields.section("dflash_config") or Fields(fields.model, {})
    size, taps = fields.size("hidden_size"), options.size("conv_kernel_size")
    group = options.size("conv_group_size")
    if size % group:
        raise options.error("conv_group_size", f"must divide the hidden size of {size}, or vLLM rejects it")
    convolution = _SIDES * taps * (size + size // group * size)
    selector = options.size("selector_rank", _SELECTOR_RANK) * (2 * fields.size("vocab_size") + size)
    home = fields if fields.is_set("block_size") else options
    most_tokens = home.size("block_size") - 1 if home.is_set("block_size") else None
    parts = _parts(fields, options, most_tokens=most_tokens)
    convolutions = 2 * fields.size("num_hidden_layers") * convolution
    parts = replace(parts, whole_elements=parts.whole_elements + convolutions + selector)
    return _block_head(fields, options, architecture, parts)


def xpress(fields: Fields, architecture: str) -> ModelGeometry:
    """XPress: DFlash whose blocks are refined before they are verified (vLLM, qwen3_xpress.py, XPressRefinerHead).

    The refiner is two tables of ``xpress_rank`` columns, projections into
    that width, what mixes the places of a block, and an MLP. All but the first
    table and the projections of hidden states is kept a second time, turned
    (build_fused_buffers).
    """
    options = fields.section("dflash_config") or Fields(fields.model, {})
    if fields.flag("sample_from_anchor") or options.flag("sample_from_anchor"):
        raise fields.error("sample_from_anchor", "vLLM does not start with an XPress head that was trained with it")
    vocabulary, size = fields.size("vocab_size"), fields.size("hidden_size")
    if _draft_vocabulary(fields) != vocabulary:
        raise fields.error(
            "draft_vocab_size", "vLLM only starts with XPress heads that have the target's whole vocabulary"
        )
    rank, width = fields.size("xpress_rank", _RANK), fields.size("xpress_mlp_hidden", _MLP_WIDTH)
    places = fields.size("xpress_block_size", fields.size("num_speculative_steps", _STEPS) + 1)
    copied = rank * (3 * rank + places * places + 3 * width + vocabulary)
    # Tokens that it chooses from; 0 for all (config/speculative.py, xpress_topc).
    of_all = fields.values.get("xpress_topc") == 0
    candidates = 0 if of_all else fields.size("xpress_topc", min(_CANDIDATES, vocabulary))
    if candidates > vocabulary:
        raise fields.error("xpress_topc", f"must be at most the vocabulary of {vocabulary}, or vLLM rejects it")
    parts = _parts(fields, options, most_tokens=places - 1)
    parts = replace(
        parts,
        whole_elements=parts.whole_elements + copied + rank * (vocabulary + 2 * size),
        refiner=Refiner(rank, places, candidates, copied),
    )
    return _block_head(fields, options, architecture, parts)


def dspark(fields: Fields, architecture: str) -> ModelGeometry:
    """DSpark on Qwen3: DFlash with heads for transitions and confidence, whole on every rank (vLLM, qwen3_dspark.py).

    The transitions are two tables of ``markov_rank`` columns; vLLM pads only the second.
    """
    if fields.text("model_type", default="qwen3") != "qwen3":
        raise fields.unmodelled("model_type", "only DSpark heads of type qwen3 can be sized")
    options = fields.section("dflash_config") or Fields(fields.model, {})
    if not fields.is_set("markov_rank"):
        raise fields.error(
            "markov_rank",
            "is missing; vLLM reads it, as enable_confidence_head and confidence_head_with_markov, only from the "
            "top level of config.json: copy them there from dflash_config",
        )
    rank, size = fields.size("markov_rank"), fields.size("hidden_size")
    tables = (fields.size("vocab_size") + round_up(_draft_vocabulary(fields), VOCABULARY_PADDING)) * rank
    confidence = 0
    if fields.flag("enable_confidence_head"):
        # One row and its bias, in 32 bits.
        confidence = (size + rank * fields.flag("confidence_head_with_markov") + 1) * FLOAT32_BYTES
    block = fields.size("block_size") if fields.is_set("block_size") else None
    parts = _parts(fields, options, most_tokens=block)
    parts = replace(parts, whole_elements=parts.whole_elements + tables, whole_bytes=parts.whole_bytes + confidence)
    return _block_head(fields, options, architecture, parts)


def _block_head(fields: Fields, options: Fields, architecture: str, parts: HeadParts) -> ModelGeometry:
    bias, feed_forward = fields.flag("attention_bias"), mlp(fields)
    sinks = options.flag("attention_sink_bias", default=fields.flag("add_swa_attention_sink_bias"))
    plain = attention(fields, qkv_bias=bias, output_bias=bias, qk_norm=True, sinks=sinks)
    kinds = fields.strings("layer_types")

    def mixer(index: int) -> SelfAttention:
        # use_swa gives all layers a window if the file marks none (qwen3_dflash.py).
        marked = SLIDING in kinds and index < len(kinds)
        if not (kinds[index] == SLIDING if marked else options.flag("use_swa")):
            return plain
        own = options.is_set("swa_window_size")
        return replace(plain, window_tokens=options.size("swa_window_size") if own else fields.size("sliding_window"))

    decoder = Decoder(mixer, lambda _: feed_forward, (model_rope(fields, plain.head_dim),))
    return replace(assemble(fields, architecture, decoder), head=parts)


def _parts(fields: Fields, options: Fields, *, most_tokens: int | None) -> HeadParts:
    size = fields.size("hidden_size")
    # One state for each layer named, or as many as it has layers (eagle3_utils.py, get_eagle3_aux_layers_from_config).
    named = (
        fields.values.get("eagle_aux_hidden_state_layer_ids"),
        options.values.get("target_layer_ids"),
        fields.values.get("dspark_target_layer_ids"),
        fields.values.get("target_layer_ids"),
    )
    layers = next((ids for ids in named if isinstance(ids, list | tuple) and ids), None)
    states = fields.size("num_hidden_layers") if layers is None else len(layers)
    reads_width = fields.size("target_hidden_size", default=size)
    rows = _draft_vocabulary(fields)
    token_map_bytes = 0 if rows == fields.size("vocab_size") else rows * TOKEN_ID_BYTES
    return HeadParts(
        output_rows=rows,
        shares_embedding=True,
        shares_output=True,
        # The projection of the target's states, their norm, and the embedding of a place to fill.
        whole_elements=reads_width * states * size + 2 * size,
        whole_bytes=token_map_bytes,
        token_map_bytes=token_map_bytes,
        most_tokens=most_tokens,
        auxiliary_states=states,
        copies_keys_and_values=True,
        reads_width=reads_width,
    )


def _draft_vocabulary(fields: Fields) -> int:
    return fields.size("draft_vocab_size", default=fields.size("vocab_size"))


_COUNT_KEYS: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers")

_ERNIE: Final = "Ernie4_5_Moe"

_FAMILIES: Final = ("DeepseekV3", "GlmMoeDsa", "Glm4Moe", "Qwen3Next", "Qwen3_5", "MiMo", "NemotronH", _ERNIE)
"""Targets for which vLLM 0.32 has such a draft (config/speculative.py, hf_config_override), by architecture."""

_ALWAYS_ONE: Final = "Qwen3Next"
"""Family whose files do not state the number of modules: one (vLLM, qwen3_next_mtp.py)."""

_MIMO_V2: Final = "MiMoV2"

_SPLIT_PROJECTION: Final = ("Qwen3Next", "Qwen3_5", "NemotronH")
"""Families with one projection for all modules, split over the ranks, and the norms once."""

_EMBEDDING_IMAGES: Final = "Qwen3_5"
"""The family whose class takes images (SupportsMultiModal); other drafts here only see the placeholders."""


def with_prediction(model: ModelGeometry, fields: Fields) -> ModelGeometry:
    """Return the model with the modules for multi-token prediction that its checkpoint holds."""
    if not model.architecture.startswith(_FAMILIES):
        return model
    key = next((key for key in _COUNT_KEYS if fields.values.get(key)), None)
    stated = int(model.architecture.startswith(_ALWAYS_ONE)) if key is None else fields.size(key)
    count = model.mtp_layers or stated
    if not count:
        return model
    return replace(model, mtp_layers=count, mtp_block=model.mtp_block or (_module(model, fields),))


def _module(model: ModelGeometry, fields: Fields) -> Layer:
    """Return the layer of one module.

    Like the model's last one with attention, but with its own indexer if attention is sparse. MiMo V2's has a
    window and a dense feed-forward, its output projection in 16 bits (mimo_v2_mtp.py); ERNIE's is a Llama layer of the
    model's sizes (ernie_mtp.py). A quantized checkpoint names it after the last layer.
    """
    dense = next((each for each in model.layers if isinstance(each.feed_forward, DenseMlp)), None)
    if model.architecture.startswith(_MIMO_V2):
        mixed = (each for each in model.layers if isinstance(each.mixer, SelfAttention) and each.mixer.window_tokens)
        windowed = next(mixed, None)
        if windowed is None or dense is None:
            key, what = ("hybrid_layer_pattern", "a window") if windowed is None else ("moe_layer_freq", "no experts")
            raise fields.error(
                key, f"no layer has {what}, as its module for multi-token prediction has: copy it from the config.json"
            )
        return replace(windowed, feed_forward=dense.feed_forward, unquantized=frozenset({"self_attn.o_proj"}))
    unquantized = read_checkpoint(fields).unquantized_prediction_modules(model.num_layers)
    if model.architecture.startswith(_ERNIE):
        if dense is None:
            raise fields.error(
                "moe_layer_start_index",
                "no layer is dense, as its module for multi-token prediction is: copy it from the config.json",
            )
        return replace(dense, unquantized=unquantized)
    attending = (layer for layer in reversed(model.layers) if isinstance(layer.mixer, SelfAttention | LatentAttention))
    layer = next(attending, None)
    if layer is None:
        raise fields.error(
            "num_hidden_layers",
            "no layer has attention, which its module for multi-token prediction copies: copy this key, and those that"
            " select the layers with attention, from the model's config.json",
        )
    mixer = layer.mixer
    if isinstance(mixer, LatentAttention) and mixer.sparse_tokens:
        attentions = (one for one in model.attentions if isinstance(one, LatentAttention))
        mixer = replace(mixer, indexer=next(one.indexer for one in attentions if one.indexer is not None))
    return replace(layer, mixer=mixer, unquantized=unquantized)


def mtp_head(target: ModelGeometry) -> ModelGeometry:
    """Return the draft of a target's modules for multi-token prediction.

    Each is a layer after a projection of token and hidden state (vLLM, deepseek_mtp.py, mimo_mtp.py,
    qwen3_next_mtp.py, nemotron_h_mtp.py, ernie_mtp.py). Embedding and output head are built and
    then replaced by the target's.

    Raises
    ------
    PlanError
        When the checkpoint has no module, or the engine cannot use them.
    """
    if not target.mtp_block:
        instead = "eagle3 or draft_model with a draft, or ngram"
        if target.dspark is not None:
            instead = "dspark, because the checkpoint contains DSpark stages"
        message = (
            f"the checkpoint of {target.name} has no layers for multi-token prediction that vLLM can draft with; use "
            f"{instead}"
        )
        raise PlanError("speculation.method", "mtp", message)
    size, count = target.hidden_size, target.mtp_layers
    # Norms of both inputs, and the one before the output head, which ERNIE's class does without.
    projection, norms = 2 * size * size, (2 if target.architecture.startswith(_ERNIE) else 3) * size
    once = target.architecture.startswith(_SPLIT_PROJECTION)
    head = HeadParts(
        output_rows=target.vocab_size,
        output_heads=1 if once else count,
        shares_embedding=True,
        shares_output=True,
        shares_on_last_stage=False,
        whole_elements=norms if once else count * (projection + norms),
        split_elements=projection if once else 0,
        embeds_images=target.architecture.startswith(_EMBEDDING_IMAGES) and bool(target.tower.item_tokens),
    )
    return replace(
        target,
        name=f"MTP layers of {target.name}",
        layers=target.mtp_block * count,
        layer_scale=target.layer_scale if target.mtp_scale == (1, 1) else target.mtp_scale,
        ropes=(),
        tower=Tower(),
        mtp_layers=0,
        mtp_block=(),
        tie_word_embeddings=True,
        final_norms=0,
        head=head,
    )


_STAGES_OF_DSPARK: Final = 3
"""Number of stages if the file names none (vLLM, models/deepseek_v4/nvidia/dspark.py)."""

_NUMBERS_ITS_STAGES: Final = "DeepseekV41"
"""Family whose number of stages is its num_nextn_predict_layers; other files have 1 there."""


def dspark_stages(model: ModelGeometry, fields: Fields) -> DSparkStages | None:
    """Return the stages of DSpark that a checkpoint of DeepSeek V4 holds; None if its config.json names none.

    Each is a layer like the model's last, in V4.1 with fewer experts. The first joins states of several layers of the
    target, and the last has two tables of transitions and a row for the confidence. Embedding and output head are the
    target's (vLLM, models/deepseek_v4/nvidia/dspark.py and models/deepseek_v41/nvidia/dspark.py). The joining layer,
    which may be quantized, is counted in 16 bits, and their sliding window is ignored.
    """
    joined = fields.values.get("dspark_target_layer_ids")
    if not model.architecture.startswith(HOLDS_DSPARK) or not isinstance(joined, list) or not joined:
        return None
    key = next((key for key in ("n_mtp_layers", "num_nextn_predict_layers") if fields.values.get(key)), None)
    if key == "num_nextn_predict_layers" and not model.architecture.startswith(_NUMBERS_ITS_STAGES):
        key = None
    count = _STAGES_OF_DSPARK if key is None else fields.size(key)
    layer, size = model.layers[-1], model.hidden_size
    if isinstance(layer.feed_forward, Experts):
        experts, top_k = layer.feed_forward.num_experts, layer.feed_forward.top_k
        experts = fields.size("dspark_n_routed_experts", default=experts)
        top_k = fields.size("dspark_num_experts_per_tok", default=top_k)
        layer = replace(layer, feed_forward=replace(layer.feed_forward, num_experts=experts, top_k=top_k))
    rank = fields.size("dspark_markov_rank") if fields.is_set("dspark_markov_rank") else 0
    tables = (model.vocab_size + padded_vocabulary(model.vocab_size)) * rank
    parts = HeadParts(
        output_rows=model.vocab_size,
        shares_embedding=True,
        shares_output=True,
        shares_on_last_stage=False,
        # With the norms of the joined states and before the output head.
        whole_elements=len(joined) * size * size + 2 * size + tables,
        whole_bytes=(size + rank) * FLOAT32_BYTES,
        auxiliary_states=len(joined),
    )
    return DSparkStages((layer,) * count, parts)


def dspark_head(target: ModelGeometry) -> ModelGeometry | None:
    """Return the draft that a target's own stages of DSpark make; None if it has none."""
    if target.dspark is None:
        return None
    return replace(
        target,
        name=f"DSpark stages of {target.name}",
        layers=target.dspark.layers,
        layer_scale=target.layer_scale if target.mtp_scale == (1, 1) else target.mtp_scale,
        ropes=(),
        tower=Tower(),
        dspark=None,
        tie_word_embeddings=True,
        final_norms=0,
        head=target.dspark.parts,
    )
