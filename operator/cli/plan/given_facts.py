"""Facts about models that are given on the command line: in files, in folders, or on the hub."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specdecode_operator.cli.input_files import read_models
from specdecode_operator.cli.text_files import DocumentError, place_of, read_text
from specdecode_operator.deployment.models.facts_files import FactsFileError, facts_in, held_twice
from specdecode_operator.problems import printable
from specdecode_operator.resolver.read_model_facts import Checkpoint, FolderOfHeaders, read_checkpoint


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


def read_given(
    model_configs: Iterable[str], facts: Iterable[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, Checkpoint]]:
    """Return the config.json of each ``ID=PATH``, and the facts of models in folders and files, by the models' ids.

    Raises
    ------
    DocumentError
        As read_models and read_facts, and if both give one model with different weights or configs.
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
        text = read_text(file)
        try:
            facts = facts_in(text, place_of(file), is_json=Path(file).suffix == ".json")
            for model in facts:
                if model in found:
                    raise held_twice(place_of(file), model)
        except FactsFileError as error:
            raise DocumentError(str(error)) from error
        found |= facts
    return found
