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


def told_geometry(
    field: str,
    model: ServedModel | ModelCheckpoint,
    read: Checkpoint | None,
    told: ConfigOverrides | None,
    like: ModelGeometry | None = None,
) -> ModelGeometry:
    """Return the geometry of a target whose config.json the engine is told otherwise."""
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
    """Return what the headers of a model's files say; None if they were not read, or if the files have none."""
    if read is None or not read.weights.tensors:
        return None
    weights = read.weights
    return StoredWeights.of(
        weights.total_bytes, weights.bytes_by_dtype, weights.bytes_by_part, output_head=weights.output_head
    )


def config_of(model: ServedModel | ModelCheckpoint, read: Checkpoint | None) -> Mapping[str, Any] | None:
    """Return what is known of a model's config.json; None where nothing is."""
    if model.config is not None:
        return model.config
    if (entry := find_entry(model.model)) is not None:
        return entry.config
    return None if read is None else read.config


def stored_type(config: Mapping[str, Any]) -> str | None:
    """Return the element type of a config.json, as vLLM looks for it; None where it names none.

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
    """Return a model's geometry, with what the spec assumes of it.

    It follows from the inline config, or else from the catalogue, or else from what was read of the model. ``method``
    says how the config.json of a draft head is read; None for a model of its own. ``like`` is the other model of the
    pair, whose vocabulary a model has of which nothing is read. Raises InvalidSpecError when nothing is known of the
    model, or what is known or assumed makes no sense.
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
            f" (known without that: the {len(known_models())} models of docs/reference/models.md)"
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
    """Whether nothing but the numbers in the spec is known of a model."""
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

    # What both say tells more than a key that one leaves out.
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
    """Return the other checkpoints of a model; those that nothing asks for only where they are known anyway.

    ``told`` is what the engine is told of their config.json, as of that of the model itself. Raises
    InvalidSpecError when one is of another model, or of another precision than it says, or of the same as another.
    """
    found, problems = [], []
    model = model_locations.served_models(spec)[field]
    for index, checkpoint in enumerate(model.checkpoints):
        place = f"{field}.checkpoints[{index}]"
        if any(each.quantization is checkpoint.quantization for each in model.checkpoints[:index]):
            message = "is there already: one checkpoint for each precision; remove one"
            problems.append(Problem(f"{place}.quantization", checkpoint.quantization.value, message))
            continue
        try:
            geometry = told_geometry(place, checkpoint, known.get(model_locations.model_source(spec, checkpoint)), told)
        except InvalidSpecError:
            if model_locations.may_be_served(model, checkpoint):
                raise
            continue
        found.append(geometry)
        said, held = checkpoint.quantization.value, served_precision(geometry, None)
        pairs = zip(_shape(geometry).items(), _shape(own).values(), strict=True)
        different = [f"{key} {value} instead of {wanted}" for (key, value), wanted in pairs if value != wanted]
        if held != said:
            message = f"{geometry.name} is {held}: write {held}, or name another"
            problems.append(Problem(f"{place}.quantization", said, message))
        elif held == served_precision(own, None):
            message = f"{own.name} itself is {held}: remove this checkpoint, or name it as model"
            problems.append(Problem(f"{place}.quantization", said, message))
        elif different:
            message = f"is no checkpoint of {own.name}: {', '.join(different)}; name one of the same model"
            problems.append(Problem(f"{place}.model", checkpoint.model, message))
    if problems:
        raise InvalidSpecError(problems)
    return tuple(found)


def wanted_precision(
    field: str, wanted: Quantization, own: ModelGeometry, named: tuple[ModelGeometry, ...]
) -> Precision:
    """Return the precision that a model is asked for; for Auto its own."""
    held = own.checkpoint_precision
    if wanted in (Quantization.AS_CHECKPOINT, Quantization.AUTO):
        return held or Precision.BF16
    precision = Precision(wanted.value)
    if precision in {served_precision(geometry, None) for geometry in named}:
        return precision
    name_one = "name a checkpoint of that precision as model or in checkpoints"
    if held is not None and precision is not held:
        message = f"the checkpoint is {held}: use AsCheckpoint, or {name_one}"
    elif held is None and precision is not Precision.BF16 and precision not in ONLINE_PRECISIONS:
        message = f"vLLM quantizes to {precision} only beforehand: {name_one}, or use FP8, which is made while loading"
    else:
        return precision
    raise InvalidSpecError([Problem(f"{field}.quantization", wanted.value, message)])


def choices(wanted: Quantization, own: ModelGeometry, named: tuple[ModelGeometry, ...]) -> frozenset[Precision]:
    """Return the precisions that a plan may choose from; none where the spec leaves no choice."""
    if wanted is not Quantization.AUTO:
        return frozenset()
    online = ONLINE_PRECISIONS if own.checkpoint is None else frozenset()
    return frozenset(served_precision(geometry, None) for geometry in (own, *named)) | online


def spec_at(spec: SpecDecodeDeploymentSpec, target: Precision, draft: Precision | None) -> SpecDecodeDeploymentSpec:
    """Return the spec that names what is served at these precisions; clients go on to use the model's old name."""
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
