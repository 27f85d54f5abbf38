"""Geometry and precision of the checkpoints that a spec names or lets the plan choose."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, TypeVar

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.speculation import Draft, ModelCheckpoint, ServedModel, Target
from specdecode_operator.deployment.models import model_locations
from specdecode_operator.deployment.models.checkpoint_reader import Checkpoint
from specdecode_operator.enums import Method, Precision, Quantization
from specdecode_operator.problems import InvalidSpecError, Problem, shown, shown_or_missing
from specdecode_operator.sizing.catalogue import find_entry, find_geometry, known_models
from specdecode_operator.sizing.config_fields import overridden
from specdecode_operator.sizing.errors import GeometryError
from specdecode_operator.sizing.families.architectures import geometry_from_config, head_from_config
from specdecode_operator.sizing.families.assumed import Assumption, assumed_geometry, usual_config
from specdecode_operator.sizing.geometry import ModelGeometry, StoredWeights
from specdecode_operator.sizing.kernel_support import ONLINE_PRECISIONS, served_precision
from specdecode_operator.vllm.hf_overrides import ConfigOverrides

MODEL_UNKNOWN: Final = "ModelUnknown"
_Model = TypeVar("_Model", Target, Draft)


def overridden_geometry(
    field: str,
    model: ServedModel | ModelCheckpoint,
    read: Checkpoint | None,
    told: ConfigOverrides | None,
    like: ModelGeometry | None = None,
) -> ModelGeometry:
    """Return the geometry of a target with the overrides of its config.json, as the engine applies them."""
    geometry = geometry_of(field, model, read, like=like)
    config = config_of(model, read)
    if told is None or config is None:
        return geometry
    keys = told.keys(config)
    try:
        changed = _overridden(model.model, json.dumps(overridden(config, keys)), json.dumps(keys), stored_weights(read))
        return _as_assumed(field, changed, model_locations.assumption_of(model))
    except GeometryError as error:
        raise InvalidSpecError([Problem(told.field, told.shown, str(error))]) from error


@lru_cache
def _overridden(name: str, config: str, told: str, stored: StoredWeights | None) -> ModelGeometry:
    return replace(geometry_from_config(name, json.loads(config), stored), told_config=told)


def _geometry(
    name: str, config: Mapping[str, Any], method: Method | None, stored: StoredWeights | None
) -> ModelGeometry:
    if method is None:
        return geometry_from_config(name, config, stored)
    return head_from_config(name, config, method.value, stored)


def stored_weights(read: Checkpoint | None) -> StoredWeights | None:
    """Return sizes from the safetensors headers; None if they were not read, or the files have no headers."""
    if read is None or not read.weights.tensors:
        return None
    weights = read.weights
    return StoredWeights.of(
        weights.total_bytes, weights.bytes_by_dtype, weights.bytes_by_part, output_head=weights.output_head
    )


def config_of(model: ServedModel | ModelCheckpoint, read: Checkpoint | None) -> Mapping[str, Any] | None:
    """Return the config.json of a model: from the spec, the catalogue or its files; None if unknown."""
    if model.config is not None:
        return model.config
    if (entry := find_entry(model.model)) is not None:
        return entry.config
    return None if read is None else read.config


def stored_type(config: Mapping[str, Any]) -> str | None:
    """Return the element type that vLLM finds in a config.json, or None.

    vllm/transformers_utils/model_arch_config_convertor.py, get_torch_dtype.
    """
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        for key in ("dtype", "torch_dtype"):
            if isinstance(named := part.get(key), str):
                return named.removeprefix("torch.")
    return None


def geometry_of(
    field: str,
    model: ServedModel | ModelCheckpoint,
    read: Checkpoint | None,
    method: Method | None = None,
    like: ModelGeometry | None = None,
) -> ModelGeometry:
    """Return a model's geometry, with the numbers that the spec assumes.

    The source is the inline config, or otherwise the catalogue, or otherwise the files of the model. Raises
    InvalidSpecError if there is no source, or if the source or the assumed numbers are invalid.

    Parameters
    ----------
    method
        Method of a draft head, which decides how its config.json is parsed; None for a separate model.
    like
        The other model of the pair. A model known only from assumptions gets its vocabulary.
    """
    given, name, stored = model_locations.assumption_of(model), model.model, stored_weights(read)
    if is_made_up(model, read):
        config = usual_config(given, like, is_head=method is not None, is_draft=field != model_locations.TARGET)
        return _as_assumed(field, _geometry(name, config, method, None), given)
    if model.config is not None:
        return _as_assumed(field, _described(field, name, model.config, read, method), given)
    where = ""
    try:
        geometry = find_geometry(name, None if method is None else method.value)
        if geometry is None and read is not None:
            where = "in its config.json: "
            geometry = _geometry(name, read.config, method, stored)
    except GeometryError as error:
        raise InvalidSpecError([Problem(f"{field}.model", name, f"{where}{error}")]) from error
    if geometry is None:
        message = (
            f"no facts about this model: put the content of its config.json into {field}.config"
            f" ({len(known_models())} models need no config; specdecode models list shows them)"
        )
        raise InvalidSpecError([Problem(f"{field}.model", name, message)], reason=MODEL_UNKNOWN)
    return _as_assumed(field, geometry, given)


def _described(
    field: str, name: str, config: Mapping[str, Any], read: Checkpoint | None, method: Method | None
) -> ModelGeometry:
    try:
        described = _geometry(name, config, method, stored_weights(read))
    except GeometryError as error:
        problem = Problem(f"{field}.config.{error.field}", shown_or_missing(error.value), error.message)
        raise InvalidSpecError([problem]) from error
    if read is not None and (other := _contradiction(field, config, described, read, method)):
        raise InvalidSpecError([other])
    return described


def is_made_up(model: ServedModel | ModelCheckpoint, read: Checkpoint | None) -> bool:
    """Whether a model is known only from numbers assumed in the spec."""
    described = model.config is not None or read is not None or find_entry(model.model) is not None
    return model_locations.assumption_of(model).is_complete and not described


def _as_assumed(field: str, model: ModelGeometry, given: Assumption) -> ModelGeometry:
    if given == model_locations.NOTHING_ASSUMED:
        return model
    try:
        return assumed_geometry(model, given)
    except GeometryError as error:
        problem = Problem(f"{field}.assume.{error.field}", shown_or_missing(error.value), error.message)
        raise InvalidSpecError([problem]) from error


def _contradiction(
    field: str, config: Mapping[str, Any], geometry: ModelGeometry, read: Checkpoint, method: Method | None
) -> Problem | None:
    try:
        in_files = _geometry(geometry.name, read.config, method, stored_weights(read))
    except GeometryError:
        return None
    own = _memory_shape(geometry)
    if own == _memory_shape(in_files):
        return None

    def decides(key: str) -> bool:
        rest = {name: value for name, value in config.items() if name != key}
        try:
            other = rest | ({key: read.config[key]} if key in read.config else {})
            return _memory_shape(_geometry(geometry.name, other, method, stored_weights(read))) != own
        except GeometryError:
            return True

    # Keys that both have come first: they are more informative than missing ones.
    differing = sorted(
        (key for key in {**read.config, **config} if read.config.get(key) != config.get(key)),
        key=lambda key: (key not in read.config) + (key not in config),
    )
    key = next(filter(decides, differing), differing[0])
    given, found = (shown(each[key]) if key in each else "left out" for each in (config, read.config))
    fix = "remove this config, or give the facts of this model"
    return Problem(f"{field}.config.{key}", given, f"contradicts the model's facts, where it is {found}: {fix}")


def named_checkpoints(
    field: str,
    own: ModelGeometry,
    spec: SpecDecodeDeploymentSpec,
    known: model_locations.KnownModels,
    told: ConfigOverrides | None = None,
) -> tuple[ModelGeometry, ...]:
    """Return the further checkpoints of a model. Those that cannot be served are skipped if unknown.

    ``told`` are the overrides of config.json, which also apply to these. Raises InvalidSpecError if a checkpoint is of
    another model, does not have the given precision, or has the precision of another checkpoint.
    """
    found, problems = [], []
    model = model_locations.served_models(spec)[field]
    for index, checkpoint in enumerate(model.checkpoints):
        place = f"{field}.checkpoints[{index}]"
        if any(each.quantization is checkpoint.quantization for each in model.checkpoints[:index]):
            message = "is listed twice; keep one checkpoint per precision"
            problems.append(Problem(f"{place}.quantization", checkpoint.quantization.value, message))
            continue
        try:
            read = known.get(model_locations.model_source(spec, checkpoint))
            geometry = overridden_geometry(place, checkpoint, read, told)
        except InvalidSpecError:
            if model_locations.may_be_served(model, checkpoint):
                raise
            continue
        found.append(geometry)
        said, held = checkpoint.quantization.value, served_precision(geometry, None)
        pairs = zip(_shape(geometry).items(), _shape(own).values(), strict=True)
        different = [f"{key} {value} instead of {wanted}" for (key, value), wanted in pairs if value != wanted]
        if held != said:
            message = f"checkpoint {geometry.name} has precision {held}; write {held}, or use another checkpoint"
            problems.append(Problem(f"{place}.quantization", said, message))
        elif held == served_precision(own, None):
            message = f"{own.name} already has precision {held}; remove this checkpoint, or use it as the model"
            problems.append(Problem(f"{place}.quantization", said, message))
        elif different:
            message = f"is not a checkpoint of {own.name}: {', '.join(different)}; use one of the same model"
            problems.append(Problem(f"{place}.model", checkpoint.model, message))
    if problems:
        raise InvalidSpecError(problems)
    return tuple(found)


def wanted_precision(
    field: str, wanted: Quantization, own: ModelGeometry, named: tuple[ModelGeometry, ...]
) -> Precision:
    """Return the requested precision of a model; for AsCheckpoint and Auto, the precision of its checkpoint."""
    held = own.checkpoint_precision
    if wanted in (Quantization.AS_CHECKPOINT, Quantization.AUTO):
        return held or Precision.BF16
    precision = Precision(wanted.value)
    if precision in {served_precision(geometry, None) for geometry in named}:
        return precision
    name_one = "set model, or add to checkpoints, a checkpoint of that precision"
    if held is not None and precision is not held:
        message = f"the checkpoint is {held}: use AsCheckpoint, or {name_one}"
    elif held is None and precision is not Precision.BF16 and precision not in ONLINE_PRECISIONS:
        message = f"vLLM cannot quantize to {precision} while loading: {name_one}, or use FP8"
    else:
        return precision
    raise InvalidSpecError([Problem(f"{field}.quantization", wanted.value, message)])


def choices(wanted: Quantization, own: ModelGeometry, named: tuple[ModelGeometry, ...]) -> frozenset[Precision]:
    """Return the precisions that a plan may choose from; empty unless the spec has Auto."""
    if wanted is not Quantization.AUTO:
        return frozenset()
    online = ONLINE_PRECISIONS if own.checkpoint is None else frozenset()
    return frozenset(served_precision(geometry, None) for geometry in (own, *named)) | online


def spec_at(spec: SpecDecodeDeploymentSpec, target: Precision, draft: Precision | None) -> SpecDecodeDeploymentSpec:
    """Return the spec with the checkpoints of these precisions; the served name does not change."""
    speculation, serving = spec.speculation, spec.serving
    if speculation is not None and speculation.draft is not None and draft is not None:
        speculation = speculation.model_copy(update={"draft": _model_at(speculation.draft, draft)})
    served = _model_at(spec.target, target)
    if served.model != spec.target.model and not serving.served_model_names:
        serving = serving.model_copy(update={"served_model_names": [short_name(spec.target.model)]})
    return spec.model_copy(update={"target": served, "speculation": speculation, "serving": serving})


def short_name(model: str) -> str:
    """Return the last part of a model's id or path: its short name, and the default served name."""
    return model.rstrip("/").rpartition("/")[2]


def _model_at(model: _Model, precision: Precision) -> _Model:
    named = next((each for each in model.checkpoints if each.quantization.value == precision.value), None)
    changes: dict[str, Any] = {"checkpoints": []}
    if named is not None and model.quantization.value in (Quantization.AUTO.value, precision.value):
        changes |= {"model": named.model, "revision": named.revision, "config": named.config, "assume": None}
        changes["quantization"] = Quantization.AS_CHECKPOINT
    elif model.quantization is Quantization.AUTO:
        online = precision in ONLINE_PRECISIONS
        changes["quantization"] = Quantization(precision.value) if online else Quantization.AS_CHECKPOINT
    return model.model_copy(update=changes)


def _memory_shape(geometry: ModelGeometry) -> tuple[object, ...]:
    return _shape(geometry), geometry.layers, geometry.tower, geometry.checkpoint


def _shape(geometry: ModelGeometry) -> dict[str, int]:
    return {
        "width": geometry.hidden_size,
        "layers": geometry.num_layers,
        "vocabulary": geometry.vocab_size,
        "longest sequence": geometry.max_position_embeddings,
        "KV heads": sum(getattr(attention, "num_kv_heads", 1) for attention in geometry.attentions),
    }
