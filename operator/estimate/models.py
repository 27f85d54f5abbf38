"""The models of a case: by name, by their config.json, and by what the engine is told of that."""

from typing import Final

from specdecode_operator.engine.rules.config_overrides import overridden
from specdecode_operator.estimate.fields import CaseError, CaseFields
from specdecode_operator.sizing.base.errors import SizingError
from specdecode_operator.sizing.families.catalogue import find_entry, find_geometry, known_models
from specdecode_operator.sizing.families.config import geometry_from_config, head_from_config
from specdecode_operator.sizing.model.geometry import ModelGeometry
from specdecode_operator.vocabulary import METHODS_TAKING_DRAFT, Method, Precision


def model_geometry(fields: CaseFields, method: str = Method.NONE) -> ModelGeometry:
    """Return the model that a case, or its speculative section, names or describes."""
    name, config = fields.text("model"), fields.section("model_config")
    if config is not None:
        try:
            if method in METHODS_TAKING_DRAFT:
                return head_from_config(name or "model_config", config.values, method)
            return geometry_from_config(name or "model_config", config.values)
        except SizingError as error:
            raise CaseError(f"{config.prefix}{error.field}", error.value, error.message) from error
    if name is None:
        raise fields.error("model", "is missing: name a model, or give model_config, the content of its config.json")
    geometry = find_geometry(name, method if method in METHODS_TAKING_DRAFT else None)
    if geometry is None:
        count = len(known_models())
        raise fields.error(
            "model",
            f"no facts about this model: give model_config (docs/reference/models.md lists the {count} known ones)",
        )
    return geometry


def target_geometry(fields: CaseFields) -> ModelGeometry:
    """Return the target as its config.json and what the engine is told of that make it."""
    overrides = fields.section("hf_overrides")
    if overrides is None or not overrides.values:
        return model_geometry(fields)
    config, name = fields.section("model_config"), fields.text("model")
    entry = find_entry(name) if name is not None and config is None else None
    known = config.values if config is not None else entry.config if entry is not None else None
    if known is None:
        return model_geometry(fields)
    try:
        return geometry_from_config(name or "model_config", overridden(known, overrides.values))
    except SizingError as error:
        raise CaseError(f"{overrides.prefix}{error.field}", error.value, error.message) from error


_OF_CHECKPOINTS: Final = (
    *("awq", "awq_marlin", "auto_awq", "gptq", "gptq_marlin", "auto_gptq", "compressed-tensors", "modelopt", "quark"),
    *("modelopt_fp4", "modelopt_mixed", "moe_wna16", "fbgemm_fp8", "gpt_oss_mxfp4"),
)
"""Schemes that a checkpoint has or has not, by vLLM's names: to name one asks for nothing."""


def wanted_precision(fields: CaseFields, geometry: ModelGeometry) -> Precision:
    """Precision that is asked for, or else that of the checkpoint."""
    text, held = fields.text("quantization"), geometry.checkpoint_precision
    if text is None:
        return held or Precision.BF16
    if text in _OF_CHECKPOINTS:
        if held is None:
            message = f"{geometry.name} is not quantized: name the checkpoint that is, or give its model_config"
            raise fields.error("quantization", message)
        return held
    try:
        precision = Precision(text.upper())
    except ValueError:
        known = ", ".join(precision.value.lower() for precision in Precision)
        raise fields.error("quantization", f"is not known: use one of {known}, or null for the checkpoint's") from None
    if held is not None and precision is not held:
        raise fields.error("quantization", f"the config says {held.value.lower()}: use that or null")
    return precision
