"""Files of facts: what config.json and the headers of a model's files say, to be shared with sites without a hub."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from specdecode_operator.cli.input_files import objects_in, read_models
from specdecode_operator.cli.text_files import DocumentError, read_text
from specdecode_operator.deployment.spec.checkpoints import stored_weights
from specdecode_operator.problems import printable, shown
from specdecode_operator.resolver.answer import checkpoint_of
from specdecode_operator.resolver.read_model_facts import (
    Checkpoint,
    FolderOfHeaders,
    read_checkpoint,
)
from specdecode_operator.sizing.base.errors import SizingError
from specdecode_operator.sizing.base.units import format_gib
from specdecode_operator.sizing.estimated.geometry import MORE_IN_FILES
from specdecode_operator.sizing.families.config import geometry_from_config
from specdecode_operator.sizing.families.heads import method_of_head
from specdecode_operator.sizing.weights.checkpoint_bytes import expected_file_bytes
from specdecode_operator.vocabulary import Knowledge

_KIND: Final = "ModelFacts"
_MOST_BYTES: Final = 2**50
"""Of a model's files: a thousand times the largest that is published."""

_MOST_TIMES: Final = 8
_MOST_TIMES_EXACT: Final = 2
"""By how much the files may differ from what config.json describes, if sizing estimates the model or knows it exactly.

Precisions that it estimates may be 4 bits in the place of 16. A plan warns of what differs by less.
"""


def read_model(model: str, revision: str | None) -> tuple[Checkpoint, str]:
    """Return the facts of a model in a folder or on the hub, and where they were read.

    Raises
    ------
    CheckpointError
        When they cannot be had.
    """
    if Path(model).is_dir():
        return read_checkpoint(FolderOfHeaders(model)), "a folder"
    from specdecode_operator.cli.hub.models import HubModels  # noqa: PLC0415  only the hub needs HTTP

    found = HubModels().find(model, revision)
    return found, f"the hub at commit {found.commit}"


def facts_data(model: str, checkpoint: Checkpoint, source: str) -> dict[str, Any]:
    """Return the content of a facts file."""
    return {"kind": _KIND, "model": model, "source": source, **asdict(checkpoint)}


def check_facts(model: str, checkpoint: Checkpoint) -> None:
    """Raise DocumentError if config.json and headers are not of one model, or name one that vLLM refuses."""
    if problem := _contradiction(model, checkpoint):
        raise DocumentError(f"{model}: {printable(problem)}")


def read_given(
    model_configs: Iterable[str], facts: Iterable[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, Checkpoint]]:
    """Return the config.json of each ``ID=PATH``, and the facts of models in folders and files, by the models' ids.

    Raises
    ------
    DocumentError
        As read_models and read_facts, and if both give one model other weights.
    """
    configs, folders = read_models(model_configs)
    known = read_facts(facts)
    for model, checkpoint in folders.items():
        in_file = known.get(model, checkpoint)
        if in_file.weights != checkpoint.weights:
            total, other = in_file.weights.total_bytes, checkpoint.weights.total_bytes
            said = f"weights of {total:,} bytes contradict {other:,} bytes"
        elif in_file.config != checkpoint.config:
            said = "its config contradicts that"
        else:
            continue
        raise DocumentError(f"--facts: {printable(model)}: {said} in the folder of --model-config: give one of the two")
    return configs, {**known, **folders}


def read_facts(files: Iterable[str]) -> dict[str, Checkpoint]:
    """Return the facts in some files, by the models' ids.

    Raises
    ------
    DocumentError
        When a file holds other than facts, two hold those of one model, or facts contradict themselves.
    """
    found: dict[str, Checkpoint] = {}
    for file in files:
        for document in objects_in(read_text(file), file):
            model, checkpoint = _facts_of(document.body, document.place)
            if model in found:
                raise DocumentError(f"{document.place}: model: {shown(model)}: another facts file holds it: give one")
            found[model] = checkpoint
    return found


def _facts_of(body: Mapping[str, Any], place: str) -> tuple[str, Checkpoint]:
    model = body.get("model")
    if body.get("kind") != _KIND or not isinstance(model, str) or not model.strip("/"):
        raise DocumentError(f"{place}: is no facts file: write one with specdecode models add")
    try:
        checkpoint = checkpoint_of(body)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DocumentError(f"{place}: config or weights are not those of a facts file: write it anew") from error
    if checkpoint.weights.total_bytes > _MOST_BYTES:
        total = f"{checkpoint.weights.total_bytes:,}"
        raise DocumentError(f"{place}: weights.total_bytes: {total}: no model is so large: write it anew")
    if problem := _contradiction(model, checkpoint):
        raise DocumentError(f"{place}: {printable(problem)}")
    return model, checkpoint


def _contradiction(model: str, checkpoint: Checkpoint) -> str | None:
    """Return why config.json and headers are not of one model; None if they may be."""
    stored, weights = stored_weights(checkpoint), checkpoint.weights
    if sum(weights.bytes_by_dtype.values()) != weights.total_bytes:
        return _unequal(weights.total_bytes, "bytes_by_dtype", weights.bytes_by_dtype)
    if weights.bytes_by_part and sum(weights.bytes_by_part.values()) != weights.total_bytes:
        return _unequal(weights.total_bytes, "bytes_by_part", weights.bytes_by_part)
    try:
        geometry = geometry_from_config(model, checkpoint.config, stored)
    except SizingError as error:
        return f"config.{error.field}: {error.message}"
    if stored is None or method_of_head(geometry) is not None:
        # Nothing to compare with; or only the method says how the config is read, and the plan compares then.
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
            f" {format_gib(by_shape)} GiB: they are of another model"
        )
    return None


def _unequal(total: int, key: str, sizes: Mapping[str, int]) -> str:
    return (
        f"weights.total_bytes: {total:,}: contradicts the {sum(sizes.values()):,} bytes in {key}: write the file again"
        " with specdecode models add"
    )
