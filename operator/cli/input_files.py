"""Read SpecDecodeDeployments, nodes, config.json files and calibrations.

Sources are files, folders and standard input.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdecode_operator.api.base import API_VERSION, GROUP, Body
from specdecode_operator.api.capture import KIND as CAPTURE
from specdecode_operator.api.deployment import KIND
from specdecode_operator.cli.text_files import STANDARD_INPUT, DocumentError, first_errors, place_of, read_text
from specdecode_operator.cluster.nodes import NodeFacts, node_facts
from specdecode_operator.cluster.storage_classes import StorageClasses
from specdecode_operator.deployment.models.checkpoint_reader import Checkpoint, FolderOfHeaders, read_checkpoint
from specdecode_operator.deployment.models.facts_files import FactsFileError, facts_in, held_twice
from specdecode_operator.problems import printable, shown, shown_or_missing
from specdecode_operator.sizing.calibration import UNCALIBRATED, Calibration, CalibrationError, parse_calibration
from specdecode_operator.sizing.estimate_fields import full_product
from specdecode_operator.untrusted import UnreadableTextError
from specdecode_operator.untrusted_yaml import parse_yaml_or_json

_SUFFIXES = (".yaml", ".yml", ".json")
_SHOWN_OTHERS = 3
_MOST_FILES = 50_000
"""Of a folder, whatever they are: no repository of manifests has so many, but homes and disks have."""
_TEMPLATE = "is a template, not YAML: render it first (helm template CHART | specdecode plan -f -)"


@dataclass(frozen=True)
class Document:
    """One object and where it was read."""

    file: str
    """As it was named; ``-`` for standard input."""
    body: Body
    number: int | None = None
    """Of the document in the file, from 1; None where it comes from no file."""
    item: int | None = None
    """Of the object in the List that the document is, from 1; None where it is none."""

    @property
    def place(self) -> str:
        """File, and number of the document in it, as messages say it."""
        number = "" if self.number is None else f", document {self.number}"
        item = "" if self.item is None else f", item {self.item}"
        return f"{place_of(self.file)}{number}{item}"

    @property
    def kind(self) -> str:
        """The object's kind."""
        return str(self.body.get("kind"))

    @property
    def name(self) -> str:
        """Name in the object's metadata; its place where it has none."""
        metadata = self.body.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        return printable(str(name)) if name else self.place

    @property
    def namespace(self) -> str | None:
        """Namespace in the object's metadata; None where it says none."""
        metadata = self.body.get("metadata")
        namespace = metadata.get("namespace") if isinstance(metadata, dict) else None
        return str(namespace) if namespace else None

    @property
    def qualified_name(self) -> str:
        """Namespace and name; the name alone where the object says no namespace."""
        metadata = self.body.get("metadata")
        namespace = metadata.get("namespace") if isinstance(metadata, dict) else None
        return f"{printable(str(namespace))}/{self.name}" if namespace else self.name


@dataclass(frozen=True)
class Other:
    """Something else in a file, by what people would call it, such as ``Service (v1)``."""

    name: str


_Found = Document | DocumentError | Other


@dataclass(frozen=True)
class Reading:
    """The objects of ours in some sources, in the order of reading."""

    documents: tuple[Document, ...]
    errors: tuple[DocumentError, ...]
    """What could not be read; where nothing is wrong and no object was found, what was."""


def read_deployments(sources: Iterable[str]) -> Reading:
    """Return the SpecDecodeDeployments of files, folders (to any depth) and ``-``; other kinds are passed over."""
    return read_ours(sources, (KIND,))


def read_ours(sources: Iterable[str], kinds: Sequence[str] = (KIND, CAPTURE)) -> Reading:
    """Return the objects of these kinds of ours in files, folders (to any depth) and ``-``; others are passed over."""
    sources = tuple(sources)
    found = list(_told_apart(item for source in sources for item in _read(source, kinds)))
    documents = tuple(item for item in found if isinstance(item, Document))
    errors = tuple(first_errors([item for item in found if isinstance(item, DocumentError)]))
    if not documents and not errors:
        others = dict.fromkeys(item.name for item in found if isinstance(item, Other))
        errors = (_nothing_found(sources, kinds, list(others)),)
    return Reading(documents, errors)


def read_nodes(file: str) -> tuple[NodeFacts, ...]:
    """Return the nodes with GPUs in the output of ``kubectl get nodes -o yaml`` or ``-o json``.

    A label may be short, such as ``H100``, in a file that somebody wrote by hand.
    """
    nodes = [each for each in _objects(file) if isinstance(each, Document) and each.body.get("kind") == "Node"]
    if not nodes:
        raise DocumentError(f"{file}: holds no Node: write it with kubectl get nodes -o yaml")
    try:
        found = [node_facts(document.body) for document in nodes]
    except (KeyError, AttributeError, TypeError) as error:
        raise DocumentError(f"{file}: a Node lacks its metadata: write it with kubectl get nodes -o yaml") from error
    return tuple(replace(facts, product=full_product(facts.product)) for facts in found if facts is not None)


def read_storage_classes(file: str) -> StorageClasses:
    """Return the StorageClasses in the output of ``kubectl get storageclasses -o yaml`` or ``-o json``."""
    kind = "StorageClass"
    found = [each.body for each in _objects(file) if isinstance(each, Document) and each.body.get("kind") == kind]
    if not found:
        raise DocumentError(f"{file}: holds no {kind}: write it with kubectl get storageclasses -o yaml")
    return StorageClasses.of(found)


def read_all(file: str) -> list[Document | Other]:
    """Return every object of a file, those of a List one by one, and what else stands there."""
    return [*_objects(file)]


def objects_in(text: str, file: str) -> list[Document]:
    """Return every object of a file's text, those of a List one by one."""
    return [each for each in _objects_in(text, file) if isinstance(each, Document)]


def read_model_configs(named: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the content of each config.json that is given as ``ID=PATH``, by the model's id; of a folder its own."""
    return read_models(named)[0]


def read_models(named: Iterable[str]) -> tuple[dict[str, dict[str, Any]], dict[str, "Checkpoint"]]:
    """Return the same, and what config.json and the headers of the weights say of those that are folders."""
    from specdecode_operator.deployment.models.checkpoint_reader import shortened  # noqa: PLC0415  only a config.json needs it

    configs: dict[str, dict[str, Any]] = {}
    folders: dict[str, Checkpoint] = {}
    for text in named:
        model, _, file = text.partition("=")
        if not (model and file):
            raise DocumentError(f"--model-config: {text}: write ID=PATH, such as my/model=config.json")
        if model in configs:
            raise DocumentError(f"--model-config: {model}: is given twice: remove one")
        if Path(file).is_dir():
            folders[model] = _model_folder(file)
            configs[model] = folders[model].config
            continue
        content = list(_documents(file))
        if len(content) != 1 or not isinstance(content[0], Document):
            raise DocumentError(f"{file}: must hold one object, the content of a model's config.json")
        configs[model] = shortened(content[0].body)
    return configs, folders


def _model_folder(path: str) -> "Checkpoint":
    from specdecode_operator.deployment.models.checkpoint_reader import (  # noqa: PLC0415  only a folder needs it
        CheckpointError,
        FolderOfHeaders,
        read_checkpoint,
    )

    try:
        return read_checkpoint(FolderOfHeaders(path))
    except CheckpointError as error:
        fix = ": name its config.json to size the model by that alone" if error.reason == "WeightsNotFound" else ""
        raise DocumentError(f"{path}: {printable(error.message)}{fix}") from error


def with_configs(spec: Any, model_configs: Mapping[str, dict[str, Any]]) -> Any:
    """Return a spec with a config.json put into each model that is named and has none."""
    if not isinstance(spec, dict):
        return spec
    spec = dict(spec)
    if "target" in spec:
        spec["target"] = _with_config(spec["target"], model_configs)
    speculation = spec.get("speculation")
    if isinstance(speculation, dict) and "draft" in speculation:
        spec["speculation"] = {**speculation, "draft": _with_config(speculation["draft"], model_configs)}
    if isinstance(spec.get("arms"), list):  # of a capture, each with a speculation of its own
        spec["arms"] = [with_configs(arm, model_configs) for arm in spec["arms"]]
    return spec


def refuse_unused(model_configs: Mapping[str, dict[str, Any]], documents: Sequence[Document]) -> None:
    """Refuse a config.json that goes into no object."""
    used = {model: given for document in documents for model, given in _models(document.body.get("spec"))}
    for model in model_configs if documents else ():
        if model not in used:
            named = ", ".join(sorted(used)) or "none"
            raise DocumentError(
                f"--model-config: {model}: no object names this model: use one of those named ({named})"
            )
        if used[model]:
            raise DocumentError(f"--model-config: {model}: the object has a config of its own: remove one of the two")


def _models(spec: Any) -> Iterator[tuple[str, bool]]:
    if not isinstance(spec, dict):
        return
    for arm in spec["arms"] if isinstance(spec.get("arms"), list) else ():
        yield from _models(arm)
    speculation = spec.get("speculation")
    served = [spec.get("target"), speculation.get("draft") if isinstance(speculation, dict) else None]
    for model in served:
        checkpoints = model.get("checkpoints") if isinstance(model, dict) else None
        for each in (model, *(checkpoints if isinstance(checkpoints, list) else [])):
            if isinstance(each, dict) and isinstance(each.get("model"), str):
                yield each["model"], each.get("config") is not None


def _with_config(model: Any, model_configs: Mapping[str, dict[str, Any]]) -> Any:
    if not isinstance(model, dict):
        return model
    if isinstance(model.get("checkpoints"), list):
        model = {**model, "checkpoints": [_with_config(each, model_configs) for each in model["checkpoints"]]}
    if model.get("config") is not None:
        return model
    name = model.get("model")
    config = model_configs.get(name) if isinstance(name, str) else None
    return model if config is None else {**model, "config": config}


def read_calibration(file: str | None) -> Calibration:
    """Return what a calibration file holds; empty where none is named."""
    if file is None:
        return UNCALIBRATED
    try:
        return parse_calibration(read_text(file))
    except CalibrationError as error:
        raise DocumentError(f"{file}: {error}") from error


def _nothing_found(sources: Sequence[str], kinds: Sequence[str], others: Sequence[str]) -> DocumentError:
    some = [*others[:_SHOWN_OTHERS], *(["more"] if len(others) > _SHOWN_OTHERS else [])]
    but = f" but {', '.join(some)}" if some else ""
    fix = "name another file or folder"
    if CAPTURE not in kinds and any(other.startswith(CAPTURE) for other in others):
        fix = (
            "name that of its deployment; specdecode lint and render take both files, and plan each arm of the capture"
        )
    return DocumentError(f"{', '.join(sources)}: holds no {' or '.join(kinds)}{but}: {fix}")


def _read(source: str, kinds: Sequence[str]) -> Iterator[_Found]:
    path = Path(source)
    if source in {STANDARD_INPUT, ""} or not path.is_dir():
        yield from _ours(source, kinds)
        return
    try:
        files = _files(path)
    except DocumentError as error:
        yield error
        return
    if not files:
        yield DocumentError(f"{place_of(source)}: no {', '.join(_SUFFIXES)} file is in this folder: name another")
    for file in files:
        yield from _ours(str(file), kinds)


def _told_apart(found: Iterable[_Found]) -> Iterator[_Found]:
    known: dict[tuple[str, str], Document] = {}
    for item in found:
        if isinstance(item, Document):
            first = known.setdefault((item.kind, item.qualified_name), item)
            if first is not item:
                yield _twice(item, first)
                continue
        yield item


def _twice(document: Document, first: Document) -> DocumentError:
    what = f"{document.kind} {document.qualified_name} is there already ({first.place})"
    error = DocumentError(
        f"{document.place}: metadata.name: {document.name}: {what}: remove one, or give it another name"
    )
    error.file = document.file
    return error


def _files(folder: Path) -> list[Path]:
    if folder.resolve() == Path(folder.resolve().anchor):
        raise DocumentError(f"{folder}: is the root of all files: name the folder with the manifests")
    found, looked_at = [], 0
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        looked_at += len(folders) + len(files)
        if looked_at > _MOST_FILES:
            raise DocumentError(f"{place_of(str(folder))}: holds more than {_MOST_FILES:,} files: name a folder in it")
        found += [Path(place, name) for name in files if not name.startswith(".") and Path(name).suffix in _SUFFIXES]
    return sorted(file for file in found if file.is_file())


def _ours(file: str, kinds: Sequence[str]) -> Iterator[_Found]:
    try:
        for found in _objects(file):
            ours = _our(found, kinds) if isinstance(found, Document) else found
            if isinstance(ours, DocumentError):
                ours.file = file
            yield ours
    except DocumentError as error:
        error.file = file
        yield error


def _our(document: Document, kinds: Sequence[str]) -> Document | DocumentError | Other:
    kind, version = document.body.get("kind"), document.body.get("apiVersion")
    ours = str(version).partition("/")[0] == GROUP
    if kind not in kinds and (kind in (KIND, CAPTURE) or not ours):
        return Other(f"{shown(kind)} ({shown(version)})" if kind else "an object without kind")
    if kind not in kinds:
        known = " or ".join(kinds)
        return DocumentError(f"{document.place}: kind: {shown_or_missing(kind)}: {GROUP} has no such kind: use {known}")
    if version != API_VERSION:
        return DocumentError(f"{document.place}: apiVersion: {shown_or_missing(version)}: use {API_VERSION}")
    metadata = document.body.get("metadata")
    if not isinstance(metadata, dict | None):
        return DocumentError(f"{document.place}: metadata: {shown(metadata)}: must be an object with the name")
    return document


def _objects(file: str) -> Iterator[Document | Other]:
    return _objects_in(read_text(file), file)


def _objects_in(text: str, file: str) -> Iterator[Document | Other]:
    for found in _documents_in(text, file):
        if isinstance(found, Document) and str(found.body.get("kind")).endswith("List"):
            items = found.body.get("items")
            for index, item in enumerate(items if isinstance(items, list) else [], start=1):
                is_object = isinstance(item, dict)
                yield Document(found.file, item, found.number, index) if is_object else Other("a list without objects")
        else:
            yield found


def _documents(file: str) -> Iterator[Document | Other]:
    return _documents_in(read_text(file), file)


def _documents_in(text: str, file: str) -> Iterator[Document | Other]:
    name = place_of(file)
    number = 0
    try:
        for number, body in enumerate(parse_yaml_or_json(text, is_json=Path(file).suffix == ".json"), start=1):
            if isinstance(body, dict):
                yield Document(file, body, number)
            elif body is not None:
                yield Other("a list" if isinstance(body, list) else "plain text")
    except UnreadableTextError as error:
        why = _TEMPLATE if "{{" in text else error
        unreadable = DocumentError(f"{name}, document {number + 1}: {why}")
        if error.line is not None and file != STANDARD_INPUT:
            # What is missing at the end is missed in the line after the last.
            unreadable.line = max(1, min(error.line, len(text.splitlines())))
        raise unreadable from error


def read_model(model: str, revision: str | None) -> tuple[Checkpoint, str]:
    """Return the facts of a model in a folder or on the hub, and where they were read."""
    if Path(model).is_dir():
        return read_checkpoint(FolderOfHeaders(model)), "a folder"
    from specdecode_operator.cli.hub import HubModels  # noqa: PLC0415  only the hub needs HTTP

    found = HubModels().find(model, revision)
    return found, f"the hub at commit {found.commit}"


def read_given(
    model_configs: Iterable[str], facts: Iterable[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, Checkpoint]]:
    """Return the config.json of each ``ID=PATH``, and the facts of models in folders and files, by the models' ids."""
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
    """Return the facts in some files, by the models' ids."""
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
