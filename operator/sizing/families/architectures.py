"""Read a config.json as a geometry: choose the reader for its architecture."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final

from specdecode_operator.enums import METHODS_WITH_HIDDEN_STATES
from specdecode_operator.sizing.config_fields import Fields
from specdecode_operator.sizing.errors import GeometryError, UnmodelledError
from specdecode_operator.sizing.families import decoder, dense, draft_heads, hybrid, moe
from specdecode_operator.sizing.families.decoder import with_defaults
from specdecode_operator.sizing.families.draft_heads import with_prediction
from specdecode_operator.sizing.families.estimated import (
    as_in_files,
    estimated_geometry,
    estimated_head,
    with_estimated_encoders,
)
from specdecode_operator.sizing.families.vision_encoders import TOWERS
from specdecode_operator.sizing.geometry import ModelGeometry, StoredWeights, Tower
from specdecode_operator.sizing.registered_classes import may_be_served
from specdecode_operator.sizing.result_cache import ContentMemo

Reader = Callable[[Fields, str], ModelGeometry]

_HEADS: Final[Mapping[str, Reader]] = {
    "EagleLlamaForCausalLM": draft_heads.eagle,
    "Eagle3LlamaForCausalLM": draft_heads.eagle3,
    "Eagle3Qwen3ForCausalLM": draft_heads.eagle3_qwen3,
    "Eagle3DeepseekV2ForCausalLM": draft_heads.eagle3_latent,
    "Medusa": draft_heads.medusa,
    "DFlashQwen3ForCausalLM": draft_heads.dflash,
    "DFlash2Qwen3ForCausalLM": draft_heads.dflash2,
    "Qwen3XPressForCausalLM": draft_heads.xpress,
    "Qwen3DSparkForCausalLM": draft_heads.dspark,
}
"""Readers of a draft head's config.json, by the class that vLLM's registry maps it to."""

READERS: Final[Mapping[str, Reader]] = {
    "LlamaForCausalLM": dense.llama,
    "MistralForCausalLM": dense.llama,
    "GraniteForCausalLM": dense.llama,
    "Qwen2ForCausalLM": dense.qwen2,
    "Qwen3ForCausalLM": dense.qwen3,
    "Phi3ForCausalLM": dense.phi3,
    "Gemma2ForCausalLM": dense.gemma2,
    "Gemma3ForCausalLM": dense.gemma3,
    "MixtralForCausalLM": moe.mixtral,
    "Qwen2MoeForCausalLM": moe.qwen_moe,
    "Qwen3MoeForCausalLM": moe.qwen_moe,
    "GptOssForCausalLM": moe.gpt_oss,
    "Llama4ForCausalLM": moe.llama4,
    "DeepseekV2ForCausalLM": decoder.deepseek,
    "DeepseekV3ForCausalLM": decoder.deepseek,
    "DeepseekV32ForCausalLM": decoder.sparse_deepseek,
    "GlmMoeDsaForCausalLM": decoder.sparse_deepseek,
    "Qwen3NextForCausalLM": hybrid.qwen_hybrid,
    "Qwen3_5ForCausalLM": hybrid.qwen_hybrid,
    "Qwen3_5MoeForCausalLM": hybrid.qwen_hybrid,
    "MiMoForCausalLM": dense.mimo,
    "Olmo2ForCausalLM": dense.olmo2,
    "Olmo3ForCausalLM": dense.olmo2,
    "SmolLM3ForCausalLM": dense.smollm3,
    "ArceeForCausalLM": dense.arcee,
    "CwmForCausalLM": dense.cwm,
    "PhiForCausalLM": dense.phi,
    "ExaoneForCausalLM": dense.exaone,
    "StableLmForCausalLM": dense.stablelm,
    "SolarForCausalLM": dense.llama,
    "Ministral3ForCausalLM": dense.llama,
    "Starcoder2ForCausalLM": dense.starcoder2,
    "SeedOssForCausalLM": dense.seed_oss,
    "HunYuanDenseV1ForCausalLM": dense.hunyuan,
    "Exaone4ForCausalLM": dense.exaone4,
    "CohereForCausalLM": dense.cohere,
    "Cohere2ForCausalLM": dense.cohere,
    "Glm4ForCausalLM": dense.glm4,
    "GlmForCausalLM": dense.glm,
    "GemmaForCausalLM": dense.gemma,
    "NemotronForCausalLM": dense.nemotron,
    "Ernie4_5ForCausalLM": dense.ernie,
    "InternLM2ForCausalLM": dense.internlm2,
    "InternLM3ForCausalLM": dense.llama,
    "Glm4MoeForCausalLM": moe.glm4_moe,
    "Ernie4_5_MoeForCausalLM": moe.ernie_moe,
    "OlmoeForCausalLM": moe.olmoe,
    "HunYuanMoEV1ForCausalLM": moe.hunyuan_moe,
    "GraniteMoeForCausalLM": moe.granite_moe,
    "GraniteMoeSharedForCausalLM": moe.granite_moe,
    "BailingMoeV2ForCausalLM": moe.bailing_moe,
    "Glm4MoeLiteForCausalLM": moe.glm4_moe_lite,
    "MiniMaxM2ForCausalLM": moe.minimax_m2,
    "MiMoV2FlashForCausalLM": moe.mimo_v2,
    "MiMoV2ForCausalLM": moe.mimo_v2,
    "NemotronHForCausalLM": hybrid.nemotron_h,
    "GraniteMoeHybridForCausalLM": hybrid.granite_hybrid,
    "FalconH1ForCausalLM": hybrid.falcon_h1,
    "JambaForCausalLM": hybrid.jamba,
    "Mamba2ForCausalLM": hybrid.mamba2,
    "Gemma3ForConditionalGeneration": dense.gemma3,
    "Gemma4ForCausalLM": dense.gemma4,
    "Gemma4ForConditionalGeneration": dense.gemma4,
    "Mistral3ForConditionalGeneration": dense.llama,
    "Llama4ForConditionalGeneration": moe.llama4,
    "KimiVLForConditionalGeneration": decoder.deepseek,
    "KimiK25ForConditionalGeneration": decoder.deepseek,
    "LlavaNextForConditionalGeneration": dense.llama,
    "Qwen2VLForConditionalGeneration": dense.qwen2,
    "Qwen2_5_VLForConditionalGeneration": dense.qwen2,
    "Qwen3VLForConditionalGeneration": dense.qwen3,
    "Qwen3VLMoeForConditionalGeneration": moe.qwen_moe,
    "Qwen3_5ForConditionalGeneration": hybrid.qwen_hybrid,
    "Qwen3_5MoeForConditionalGeneration": hybrid.qwen_hybrid,
    **{name: _HEADS[kind] for name, kind in draft_heads.DRAFT_CLASSES.items() if kind in _HEADS},
    "LlamaForCausalLMEagle": draft_heads.eagle,
    "Eagle3Speculator": draft_heads.speculators_eagle3,
    "Eagle3DraftModel": draft_heads.speculators_eagle3,
    "PEagleDraftModel": draft_heads.peagle,
    # By their type, gemma4_assistant, both become Gemma4MTPModel (vLLM, config/speculative.py, hf_config_override).
    "Gemma4AssistantForCausalLM": dense.gemma4_assistant,
    "Gemma4UnifiedAssistantForCausalLM": dense.gemma4_assistant,
    # With a file of type qwen3 it is Qwen3DSparkModel (vLLM, config/speculative.py, __post_init__).
    "DSparkDraftModel": draft_heads.dspark,
}
"""Readers of config.json, by architecture."""

_ANY_LANGUAGE_MODEL: Final[Mapping[str, Mapping[str, object]]] = {
    "InternVLForConditionalGeneration": {"tie_word_embeddings": True},
}
"""Wrappers around a language model of any family, with the defaults of their class in transformers."""

ARCHITECTURES: Final = (*READERS, *_ANY_LANGUAGE_MODEL)
"""Every supported architecture, as named in files."""

_BY_MODEL_TYPE: Final[Mapping[str, str]] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "granite": "GraniteForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "jamba": "JambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
}
"""Architecture of files without ``architectures``, by model type."""

_ENCODERS_UNKNOWN: Final = frozenset({"MiMoV2ForCausalLM"})
"""Classes of which sizing implements only the language model (vLLM, mimo_v2_omni.py)."""

_UNKNOWN_TO_ENGINE: Final[Mapping[str, str]] = {
    "DominoDraftModel": "vLLM does not know this draft head and would not start; use an eagle3 or dflash head",
}
"""Published classes that vLLM cannot serve, with the reason."""

_MADE: Final = ContentMemo[ModelGeometry]()
"""Equal files share one geometry object, because other caches are keyed by it."""


def geometry_from_config(name: str, config: Mapping[str, object], stored: StoredWeights | None = None) -> ModelGeometry:
    """Return the geometry that a Hugging Face config.json describes; the same object for the same name and content.

    A model that sizing does not implement is estimated, with the bytes in the headers of its files (``stored``) if
    they were read.

    Raises
    ------
    GeometryError
        When a value is missing, of the wrong type, out of range, or contradicts another. ``unregistered``
        (sizing/registered_classes.py) decides whether a version of vLLM has the class.
    """
    return _MADE.get(config, (name, stored), lambda: _exact_or_estimated(Fields(name, config), None, stored))


def _exact_or_estimated(fields: Fields, method: str | None, stored: StoredWeights | None) -> ModelGeometry:
    """Return the geometry as its class describes it, or an estimate of one that sizing does not implement."""
    fields = draft_heads.as_engine_reads(fields)
    try:
        if method is not None:
            return _head(fields, method)
        model = _geometry(fields, stored)
        return model if stored is None or model.head is not None else as_in_files(model, stored)
    except UnmodelledError as because:
        architecture = _named_architecture(fields)
        try:
            if method in METHODS_WITH_HIDDEN_STATES:
                return estimated_head(fields, architecture, method, because, stored)
            tower = None
            with suppress(GeometryError):
                tower = TOWERS[architecture](_flattened(fields)) if architecture in TOWERS else None
            return estimated_geometry(fields, architecture, because, stored, tower)
        except GeometryError:
            if may_be_served(architecture):
                raise
            # Which key an unknown class lacks helps less than that the class is unknown.
            raise fields.error(
                "architectures", "is unknown to vLLM, which would not start: use another model"
            ) from None


def _geometry(fields: Fields, stored: StoredWeights | None) -> ModelGeometry:
    architecture = _named_architecture(fields)
    if architecture in _UNKNOWN_TO_ENGINE:
        raise fields.error("architectures", _UNKNOWN_TO_ENGINE[architecture])
    if architecture not in ARCHITECTURES:
        raise fields.unmodelled("architectures", "sizing does not implement this class")
    flat = _flattened(fields)
    tower = TOWERS[architecture](flat) if architecture in TOWERS else None
    if architecture in _ANY_LANGUAGE_MODEL:
        flat = with_defaults(flat, _ANY_LANGUAGE_MODEL[architecture])
        inner = _BY_MODEL_TYPE.get(flat.text("model_type", default=""))
        if inner is None:
            raise flat.unmodelled("model_type", "sizing does not implement this language model")
        return _with_tower(replace(READERS[inner](flat, inner), architecture=architecture), tower)
    model = _with_tower(READERS[architecture](flat, architecture), tower)
    model = draft_heads.in_parallel(with_prediction(model, flat), flat)
    if architecture in _ENCODERS_UNKNOWN:
        model = with_estimated_encoders(model, fields, stored)
    return draft_heads.with_verifier(model, flat)


def _with_tower(model: ModelGeometry, tower: Tower | None) -> ModelGeometry:
    return model if tower is None else replace(model, tower=tower, ropes=model.ropes + tower.ropes)


def head_from_config(
    name: str, config: Mapping[str, object], method: str, stored: StoredWeights | None = None
) -> ModelGeometry:
    """Return the geometry of a draft for a method.

    EAGLE heads are often published with the architecture of the model they were cut from; the method identifies them,
    as in vLLM.

    Raises
    ------
    GeometryError
        As geometry_from_config.
    """
    return _MADE.get(config, (name, method, stored), lambda: _exact_or_estimated(Fields(name, config), method, stored))


def _head(fields: Fields, method: str) -> ModelGeometry:
    plain = fields.strings("architectures")[:1] == ("LlamaForCausalLM",)
    if method == "eagle" and plain:
        return draft_heads.eagle(fields, "LlamaForCausalLMEagle")
    if method == "eagle3" and plain:
        return draft_heads.in_parallel(draft_heads.eagle3(fields, "LlamaForCausalLMEagle3"), fields)
    if method == "medusa" and not fields.is_set("architectures"):
        return draft_heads.medusa(fields, "MedusaModel")
    return _geometry(fields, None)


def _named_architecture(fields: Fields) -> str:
    """Return the architecture that the engine looks up: the first of ``architectures``, or by model_type."""
    architectures = fields.strings("architectures")
    if not architectures:
        by_type = _BY_MODEL_TYPE.get(fields.text("model_type", default=""))
        if by_type is not None:
            return by_type
        raise fields.error("architectures", "is missing; copy it from the model's config.json")
    return architectures[0]


def _flattened(fields: Fields) -> Fields:
    """Return the fields overlaid with the fields of the language model, which wrappers nest in a section."""
    section = fields.section("text_config")
    if section is None:
        return fields
    outer = {key: value for key, value in fields.values.items() if key not in ("text_config", "architectures")}
    inner = {key: value for key, value in section.values.items() if value is not None or key not in outer}
    # The wrapper decides whether tables are tied (vLLM, config/vllm.py, with_hf_config).
    tied = {key: value for key, value in outer.items() if key == "tie_word_embeddings" and value is not None}
    names = {key: section.path(key) for key in inner if key not in tied}
    return fields.having({**outer, **inner, **tied}, names)


__all__ = ["ARCHITECTURES", "READERS", "GeometryError", "geometry_from_config"]
