"""Draft heads: EAGLE, EAGLE-3 and Medusa."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from specdecode_operator.sizing.base.fields import Fields
from specdecode_operator.sizing.base.registry import Unregistered, is_registered, unregistered
from specdecode_operator.sizing.families.decoder import (
    SLIDING,
    Decoder,
    assemble,
    attention,
    heads,
    mlp,
    model_rope,
)
from specdecode_operator.sizing.families.latent import latent_attention
from specdecode_operator.sizing.model.geometry import HeadParts, ModelGeometry, Tower
from specdecode_operator.sizing.model.layers import SelfAttention
from specdecode_operator.versions.table import LAUNCHED_VERSIONS, SIZED_VERSIONS, version_facts
from specdecode_operator.vocabulary import Method

_EAGLE3_AUXILIARY_STATES: Final = 3
"""Hidden states of the target that an EAGLE-3 head joins: an early, a middle and a late layer's."""

XPRESS: Final = ("Qwen3XPressModel", "DFlashQwen3XPressModel")
"""DFlash heads with a refiner, as files name them and as vLLM renames them (config/speculative.py)."""

DRAFT_CLASSES: Final[Mapping[str, str]] = {
    name: kind for version in SIZED_VERSIONS for name, kind in version_facts(version).get("draft_classes", {}).items()
}
"""Class that any version of vLLM maps a draft head to, by the first of its ``architectures``."""

DFLASH2: Final = "DFlash2Qwen3ForCausalLM"
"""Class of DFlash heads with a selector, which model runner V2 alone asks (vllm/config/vllm.py, _is_dflash2_draft)."""

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
"""How heads propose whose class has the word in its name; the first word that fits decides."""

TOKEN_ID_BYTES: Final = 8
"""The table from draft to target vocabulary holds int64 (vLLM, llama_eagle3.py, draft_id_to_target_id)."""

_OUTSIDE_THE_LAYER: Final = ("draft_vocab_size", "target_hidden_size", "norm_before_fc", "fc_norm")
"""Keys of the speculators library's format beside the section of the layers (vLLM, configs/speculators/algos.py)."""

_FROM_SPECULATORS: Final = ("PEagleDraftModel",)

_NEVER_RENAMED: Final = ("LiLiCorrDraftModel",)

_TAKEN_FOR_MTP: Final = ("deepseek_mtp", "deepseek_v3", "deepseek_v32", "glm_moe_dsa")
"""Types of files that vLLM rewrites to DeepSeek's modules for multi-token prediction, whatever class they name."""

_SPECULATORS_PEAGLE: Final = "peagle"

_PLACE_TOKENS: Final = ("pard_token", "ptd_token_id")
"""Keys of PARD's and P-EAGLE's config.json: the token that stands in the places of tokens to propose."""

_MEDUSA_HEADS: Final = 5
_MEDUSA_WIDTH: Final = 4096
_MEDUSA_VOCABULARY: Final = 32_001
"""What files of Medusa mean that do not say (vLLM, transformers_utils/configs/medusa.py)."""


def method_of_head(model: ModelGeometry) -> Method | None:
    """Return how a model proposes if it is a draft head, and None if it is a model of its own.

    EAGLE's are often published as the single layer of the model that they were cut from: then the name tells, as it
    does to vLLM.
    """
    if model.head is not None:
        kind = draft_class(model)
        return next((method for word, method in _METHODS_OF_CLASSES if word in kind), Method.EAGLE3)
    name = model.name.lower()
    if model.num_layers > 1 or "eagle" not in name:
        return None
    return Method.EAGLE3 if "eagle3" in name else Method.EAGLE


def eagle(fields: Fields, architecture: str, _tower: Tower | None = None) -> ModelGeometry:
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
    """Return what to do about a head that a version of vLLM does not find in its registry; None if it finds it.

    Heads in the format of the speculators library are renamed otherwise, and so are those of no registry at all.
    """
    known = version_facts(version).get("draft_classes", {})
    kind, name = DRAFT_CLASSES.get(architecture), registered_name(architecture, method)
    if kind is None or kind == "Medusa" or architecture in _FROM_SPECULATORS or name in known or not known:
        return None
    reason = f"vLLM {version} looks for the class {name}, which it does not have"
    later = next((each for each in LAUNCHED_VERSIONS if name in version_facts(each)["draft_classes"]), None)
    if later is not None:
        return f"{reason}: use engine.version {later} or later"
    alias = next((each for each in known if known[each] == kind and registered_name(each, method) == each), None)
    return f"{reason}: " + (f"write {alias} into architectures of its config.json" if alias else "name another head")


def unregistered_model(model: ModelGeometry, version: str) -> Unregistered | None:
    """Return why a version of vLLM does not have the class of a model; None if it does.

    None, too, for heads, which ``missing_class`` answers for, and for names that vLLM replaces before it looks them up.
    """
    name = model.architecture
    replaced = not is_registered(name) and model.estimated_because != "architectures"
    return None if name in DRAFT_CLASSES or replaced else unregistered(name, version)


def eagle3(fields: Fields, architecture: str, _tower: Tower | None = None) -> ModelGeometry:
    """EAGLE-3: reads three hidden states of the target, proposes from a vocabulary of its own (llama_eagle3.py)."""
    return _eagle3(_llama_like(fields, architecture), fields, _auxiliary_states(fields))


def eagle3_qwen3(fields: Fields, architecture: str, _tower: Tower | None = None) -> ModelGeometry:
    """EAGLE-3 on Qwen3: queries and keys are normed, layers may have windows (vLLM, qwen3_eagle3.py)."""
    sizes, feed_forward = heads(fields), mlp(fields)
    bias = fields.flag("attention_bias")
    plain = attention(sizes, qkv_bias=bias, output_bias=bias, qk_norm=True)
    kinds = fields.strings("layer_types")

    def mixer(index: int) -> SelfAttention:
        windowed = index < len(kinds) and kinds[index] == SLIDING and fields.is_set("sliding_window")
        return replace(plain, window_tokens=fields.size("sliding_window")) if windowed else plain

    rope = model_rope(fields, sizes.dim)
    model = assemble(fields, architecture, Decoder(mixer, lambda _: feed_forward, (rope,)))
    named = fields.values.get("eagle_aux_hidden_state_layer_ids")
    states = len(named) if isinstance(named, list | tuple) and named else _auxiliary_states(fields)
    default = fields.size("num_aux_hidden_states", default=states)
    return _eagle3(model, fields, fields.size("num_aux_layers", default=default))


def eagle3_latent(fields: Fields, architecture: str, _tower: Tower | None = None) -> ModelGeometry:
    """EAGLE-3 with latent attention, for DeepSeek and Kimi K2: dense layers alone (vLLM, deepseek_eagle3.py)."""
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
    """Return a model with the parts of an EAGLE-3 head, which joins so many hidden states of the target."""
    target_size = fields.size("target_hidden_size", default=model.hidden_size)
    rows = fields.size("draft_vocab_size", default=model.vocab_size)
    first, *rest = model.layers
    # EAGLE-3.1 norms each of the states before they are joined, others all at once.
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
    """Return how many hidden states of the target it joins (llama_eagle3.py, num_aux_hidden_states)."""
    eagle_config = fields.section("eagle_config") or Fields(fields.model, {})
    layers = eagle_config.values.get("eagle_aux_hidden_state_layer_ids")
    named = len(layers) if isinstance(layers, list | tuple) and layers else _EAGLE3_AUXILIARY_STATES
    return fields.size("num_aux_hidden_states", default=named)


def speculators_eagle3(fields: Fields, architecture: str, _tower: Tower | None = None) -> ModelGeometry:
    """The same head in the format of vLLM's speculators library: its layer is described in a section of its own."""
    section = fields.section("transformer_layer_config")
    if section is None:
        raise fields.error("transformer_layer_config", "is missing; copy it from the head's config.json")
    outer = {key: fields.values[key] for key in _OUTSIDE_THE_LAYER if fields.is_set(key)}
    layers = {"num_hidden_layers": section.size("num_hidden_layers", default=1)}
    model = eagle3(section.having({**section.values, **outer, **layers}, {key: key for key in outer}), architecture)
    if model.head is None or not _keeps_output_head(fields, model, model.head):
        return model
    return replace(model, head=replace(model.head, shares_output=True))


_FROZEN_SINCE: Final = (0, 5)
"""Release of the speculators library from which on its heads are trained with the target's output head."""


def _keeps_output_head(fields: Fields, model: ModelGeometry, head: HeadParts) -> bool:
    """Whether a head stores the target's own output head, which vLLM finds equal and shares.

    Speculators, model.py, DraftVocabMixin: it is a frozen copy of the target's rows for the draft's vocabulary, and of
    all rows if that is the target's. vLLM, v1/spec_decode/llm_base_proposer.py, _maybe_share_lm_head: torch.equal.
    """
    version = re.match(r"(\d+)\.(\d+)", fields.text("speculators_version", default=""))
    frozen = version is not None and (int(version[1]), int(version[2])) >= _FROZEN_SINCE
    return frozen and head.output_rows == model.vocab_size and head.shares_embedding


def peagle(fields: Fields, architecture: str, _tower: Tower | None = None) -> ModelGeometry:
    """P-EAGLE: an EAGLE-3 head that proposes all tokens in one pass, in the format of vLLM's speculators library."""
    if fields.text("speculators_model_type", default="") != _SPECULATORS_PEAGLE:
        raise fields.error(
            "architectures",
            "vLLM does not start with a P-EAGLE head as it was trained: convert it to the format of vLLM's speculators "
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
    """Return a draft as one that proposes all tokens in one pass, if its config.json names the token for their places.

    vLLM looks for these keys (v1/spec_decode/llm_base_proposer.py, _init_parallel_drafting_params), but has to be told
    parallel_drafting all the same. EAGLE-3 has a hidden state for such places, too (llama_eagle3.py, mask_hidden).
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
    sizes = heads(fields)
    bias = fields.flag("attention_bias")
    mixer = attention(sizes, qkv_bias=bias, output_bias=bias)
    feed_forward = mlp(fields, bias=fields.flag("mlp_bias"))
    rope = model_rope(fields, sizes.dim)
    return assemble(fields, architecture, Decoder(lambda _: mixer, lambda _: feed_forward, (rope,)))


def medusa(fields: Fields, architecture: str, _tower: Tower | None = None) -> ModelGeometry:
    """Medusa: residual blocks and an output head for each token ahead, no attention (vLLM, medusa.py).

    The vocabulary is the target's, whatever the file says (config/speculative.py), so a file need not name it.
    """
    size = fields.size("hidden_size", default=_MEDUSA_WIDTH)
    count = _first_size(fields, ("num_heads", "medusa_num_heads"), default=_MEDUSA_HEADS)
    depth = _first_size(fields, ("num_hidden_layers", "medusa_num_layers"), default=1)
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


def _first_size(fields: Fields, keys: tuple[str, ...], default: int) -> int:
    """Return the size under the first of the keys that is set: old files of Medusa name them otherwise."""
    return fields.size(next((key for key in keys if fields.is_set(key)), keys[0]), default=default)
