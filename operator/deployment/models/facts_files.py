"""Model facts files, exported from config.json and safetensors headers for sites without hub access."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from specdecode_operator.deployment.models.checkpoint_reader import Checkpoint
from specdecode_operator.deployment.models.checkpoints import stored_weights
from specdecode_operator.deployment.models.model_facts import checkpoint_of
from specdecode_operator.enums import Knowledge
from specdecode_operator.problems import printable, shown
from specdecode_operator.sizing.arithmetic import format_gib
from specdecode_operator.sizing.errors import SizingError
from specdecode_operator.sizing.families.architectures import geometry_from_config
from specdecode_operator.sizing.families.draft_heads import method_of_head
from specdecode_operator.sizing.families.estimated import MORE_IN_FILES
from specdecode_operator.sizing.weights import expected_file_bytes
from specdecode_operator.untrusted import UnreadableTextError
from specdecode_operator.untrusted_yaml import parse_yaml_or_json

_KIND: Final = "ModelFacts"
_MOST_BYTES: Final = 2**50  # Upper bound of a model's files: 1,000 times the largest published model
# Largest factor between the sizes by files and by config.json, for models that sizing estimates or knows exactly.
# An estimated precision may be wrong by a factor of 4: 4 bits instead of 16. Smaller factors above the tolerances of
# `deployment/warnings.py` are warnings in a plan.
_MOST_TIMES: Final = 8
_MOST_TIMES_EXACT: Final = 2


class FactsFileError(Exception):
    """Facts are not usable; the message has place, field, problem and fix in one line."""


def facts_data(model: str, checkpoint: Checkpoint, source: str) -> dict[str, Any]:
    """Return the content of a facts file."""
    return {"kind": _KIND, "model": model, "source": source, **asdict(checkpoint)}


def check_facts(model: str, checkpoint: Checkpoint) -> None:
    """Raise FactsFileError if config.json and headers contradict each other, or describe an impossible model."""
    if problem := _contradiction(model, checkpoint):
        raise FactsFileError(f"{model}: {printable(problem)}")


def facts_in(text: str, place: str, *, is_json: bool) -> dict[str, Checkpoint]:
    """Return the facts in the text of a file, by model ID; error messages call the file ``place``.

    Raises FactsFileError if the text is not valid JSON or YAML, has other documents than facts, has a model twice, or
    contradicts itself.
    """
    found: dict[str, Checkpoint] = {}
    number = 0
    try:
        for number, body in enumerate(parse_yaml_or_json(text, is_json=is_json), start=1):
            if isinstance(body, dict):
                model, checkpoint = _facts_of(body, f"{place}, document {number}")
                if model in found:
                    raise held_twice(f"{place}, document {number}", model)
                found[model] = checkpoint
    except UnreadableTextError as error:
        raise FactsFileError(f"{place}, document {number + 1}: {error}") from error
    return found


def held_twice(place: str, model: str) -> FactsFileError:
    """Return the error about duplicate facts of a model."""
    return FactsFileError(f"{place}: model: {shown(model)}: has facts already; remove the duplicate")


def _facts_of(body: Mapping[str, Any], place: str) -> tuple[str, Checkpoint]:
    model = body.get("model")
    if body.get("kind") != _KIND or not isinstance(model, str) or not model.strip("/"):
        raise FactsFileError(f"{place}: is not a facts file; create one with specdecode models add")
    try:
        checkpoint = checkpoint_of(body)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = "config or weights are invalid; write the file again with specdecode models add"
        raise FactsFileError(f"{place}: {message}") from error
    if checkpoint.weights.total_bytes > _MOST_BYTES:
        total = f"{checkpoint.weights.total_bytes:,}"
        message = f"exceeds {_MOST_BYTES:,}; write the file again with specdecode models add"
        raise FactsFileError(f"{place}: weights.total_bytes: {total}: {message}")
    if problem := _contradiction(model, checkpoint):
        raise FactsFileError(f"{place}: {printable(problem)}")
    return model, checkpoint


def _contradiction(model: str, checkpoint: Checkpoint) -> str | None:
    stored, weights = stored_weights(checkpoint), checkpoint.weights
    for key, sizes in (("bytes_by_dtype", weights.bytes_by_dtype), ("bytes_by_part", weights.bytes_by_part)):
        total, in_parts = weights.total_bytes, sum(sizes.values())
        if in_parts != total and (sizes or key == "bytes_by_dtype"):
            contradicts = f"contradicts the {in_parts:,} bytes in {key}"
            return f"weights.total_bytes: {total:,}: {contradicts}; write the file again with specdecode models add"
    try:
        geometry = geometry_from_config(model, checkpoint.config, stored)
    except SizingError as error:
        return f"config.{error.field}: {error.message}"
    if stored is None or method_of_head(geometry) is not None:
        # There are no headers, or the model is a head: the plan compares it, because parsing its config needs a method.
        return None
    exact = geometry.knowledge is Knowledge.EXACT or geometry.estimated_because == MORE_IN_FILES
    in_files, by_shape = geometry.layer_scale
    if exact:
        by_shape, _ = expected_file_bytes(geometry, output_head=weights.output_head)
        in_files = weights.total_bytes
    most = _MOST_TIMES_EXACT if exact else _MOST_TIMES
    if in_files > by_shape * most or by_shape > in_files * most:
        return (
            f"weights: {format_gib(in_files)} GiB in the headers contradict config, which describes about"
            f" {format_gib(by_shape)} GiB; use config.json and weights of the same model"
        )
    return None
