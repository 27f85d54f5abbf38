"""Read SpecDecodeDeployments, nodes, config.json files and calibrations.

Sources are files, folders and standard input.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from specdecode_operator.api.base import API_VERSION, GROUP, Body
from specdecode_operator.api.capture import KIND as CAPTURE
from specdecode_operator.api.deployment import KIND
from specdecode_operator.cli.text_files import STANDARD_INPUT, DocumentError, first_errors, place_of, read_text
from specdecode_operator.cluster.nodes import NodeFacts, node_facts
from specdecode_operator.cluster.storage_classes import StorageClasses
from specdecode_operator.deployment.models.checkpoint_reader import (
    Checkpoint,
    CheckpointError,
    FolderOfHeaders,
    read_checkpoint,
    shortened,
)
from specdecode_operator.deployment.models.facts_files import FactsFileError, facts_in, held_twice
from specdecode_operator.problems import printable, shown, shown_or_missing
from specdecode_operator.sizing.calibration import UNCALIBRATED, Calibration, CalibrationError, parse_calibration
from specdecode_operator.sizing.estimate_fields import full_product
from specdecode_operator.untrusted import UnreadableTextError, mapping
from specdecode_operator.untrusted_yaml import parse_yaml_or_json

_SUFFIXES = (".yaml", ".yml", ".json")
_SHOWN_OTHERS = 3
_IMPORTED = ("Deployment", "StatefulSet", "InferenceService", "LLMInferenceService")
"""Kinds of other servers that `specdecode import` reads from a file."""
_MOST_FILES = 50_000
"""Of a folder, whatever they are: no repository of manifests has so many, but homes and disks have."""
_TEMPLATE = "is a template, not YAML: render it first (helm template CHART | specdecode plan -f -)"


@dataclass(frozen=True)
class Document:
    """One object and where it was read."""

    file: str  # As it was named; ``-`` for standard input
    body: Body
    number: int | None = None  # Of the document in the file, from 1; None if it comes from no file
    item: int | None = None  # Of the object in a List, from 1

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
        """Name in the object's metadata; its place if it has none."""
        name = mapping(self.body, "metadata").get("name")
        return printable(str(name)) if name else self.place

    @property
    def namespace(self) -> str | None:
        """Namespace in the object's metadata."""
        namespace = mapping(self.body, "metadata").get("namespace")
        return str(namespace) if namespace else None

    @property
    def qualified_name(self) -> str:
        """Namespace and name; the name alone if the object has no namespace."""
        return f"{printable(self.namespace)}/{self.name}" if self.namespace else self.name


@dataclass(frozen=True)
class Other:
    """Something else in a file, such as ``Service (v1)``."""

    name: str


_Found = Document | DocumentError | Other


@dataclass(frozen=True)
class Reading:
    """The objects of ours in some sources, in the order of reading."""

    documents: tuple[Document, ...]
    errors: tuple[DocumentError, ...]
    """Also says what was found if that is neither an object nor an error."""


class Models(Protocol):
    """A source of model facts, such as the hub."""

    def find(self, model: str, revision: str | None) -> Checkpoint:
        """Return the facts of a model, or raise CheckpointError."""


@dataclass(frozen=True)
class Inputs:
    """What is known beside the objects."""

    nodes: tuple[NodeFacts, ...] | None = None  # None: nodes are assumed
    configs: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # Content of config.json by model id
    given: Mapping[str, Checkpoint] = field(default_factory=dict)  # Facts of models in folders and files
    calibration: Calibration = UNCALIBRATED
    models: Models | None = None  # Asked for models that neither the above nor the catalogue describe
    allowed: frozenset[str] | None = None  # What podTemplate may ask for; None: not checked


@dataclass(frozen=True)
class InputOptions:
    """Options that name those inputs."""

    nodes: str | None = None
    model_configs: Sequence[str] = ()  # ID=PATH
    calibration: str | None = None
    facts: Sequence[str] = ()
    models: Models | None = None
    allowed: frozenset[str] | None = None

    def read(self, documents: Sequence[Document]) -> Inputs:
        """Read the files; raise DocumentError if one is unusable, or if no document needs one of the configs."""
        nodes = None if self.nodes is None else read_nodes(self.nodes)
        configs, given = _read_given(self.model_configs, self.facts)
        refuse_unused(configs, documents)
        return Inputs(nodes, configs, given, read_calibration(self.calibration), self.models, self.allowed)


def read_ours(sources: Iterable[str], kinds: Sequence[str] = (KIND, CAPTURE)) -> Reading:
    """Return our objects of these kinds in files, folders (to any depth) and ``-``."""
    sources, found, known = tuple(sources), list[_Found](), dict[tuple[str, str], Document]()
    for item in (item for source in sources for item in _read(source, kinds)):
        first = known.setdefault((item.kind, item.qualified_name), item) if isinstance(item, Document) else item
        if isinstance(item, Document) and isinstance(first, Document) and first is not item:
            what = f"{item.kind} {item.qualified_name} is there already ({first.place})"
            error = DocumentError(
                f"{item.place}: metadata.name: {item.name}: {what}: remove one, or give it another name"
            )
            error.file = item.file
            found.append(error)
        else:
            found.append(item)
    documents = tuple(item for item in found if isinstance(item, Document))
    errors = tuple(first_errors([item for item in found if isinstance(item, DocumentError)]))
    if not documents and not errors:
        others = list(dict.fromkeys(item.name for item in found if isinstance(item, Other)))
        but = ", ".join([*others[:_SHOWN_OTHERS], *(["more"] if len(others) > _SHOWN_OTHERS else [])])
        fix = "name another file or folder"
        if CAPTURE not in kinds and any(other.startswith(CAPTURE) for other in others):
            fix = (
                "name that of its deployment; specdecode lint and render take both files, and plan each arm of the"
                " capture"
            )
        if any(other.partition(" ")[0] in _IMPORTED for other in others):
            fix = f"convert it with specdecode import -f {sources[0]}, or name another file or folder"
        but = f"; it has {but}" if but else ""
        message = f"{', '.join(sources)}: holds no {' or '.join(kinds)}{but}: {fix}"
        errors = (DocumentError(message),)
    return Reading(documents, errors)


def read_deployments(sources: Iterable[str]) -> Reading:
    """Return the SpecDecodeDeployments of files, folders (to any depth) and ``-``."""
    return read_ours(sources, (KIND,))


def read_nodes(file: str) -> tuple[NodeFacts, ...]:
    """Return the nodes with GPUs in the output of ``kubectl get nodes -o yaml`` or ``-o json``.

    A label may be short, such as ``H100``, in a file that was written by hand.
    """
    nodes = [each for each in read_all(file) if isinstance(each, Document) and each.body.get("kind") == "Node"]
    if not nodes:
        raise DocumentError(f"{file}: holds no Node: write it with kubectl get nodes -o yaml")
    try:
        found = [node_facts(document.body) for document in nodes]
    except (KeyError, AttributeError, TypeError) as error:
        raise DocumentError(f"{file}: a Node lacks its metadata: write it with kubectl get nodes -o yaml") from error
    return tuple(replace(facts, product=full_product(facts.product)) for facts in found if facts is not None)


def read_storage_classes(file: str) -> StorageClasses:
    """Return the StorageClasses in the output of ``kubectl get storageclasses -o yaml`` or ``-o json``."""
    kind, text = "StorageClass", read_text(file)
    found = [each.body for each in objects_in(text, file) if each.body.get("kind") == kind]
    # kubectl prints an empty List for a cluster without StorageClasses.
    if not found and not any(
        isinstance(each, Document) and each.body.get("items") == [] for each in _documents_in(text, file)
    ):
        raise DocumentError(f"{file}: holds no {kind}: write it with kubectl get storageclasses -o yaml")
    return StorageClasses.of(found)


def read_all(file: str) -> list[Document | Other]:
    """Return every object of a file, those of a List one by one, and what else it holds."""
    return [*_objects_in(read_text(file), file)]


def objects_in(text: str, file: str) -> list[Document]:
    """Return every object of a file's text, those of a List one by one."""
    return [each for each in _objects_in(text, file) if isinstance(each, Document)]


def read_models(named: Iterable[str]) -> tuple[dict[str, dict[str, Any]], dict[str, Checkpoint]]:
    """Return the config.json of each ``ID=PATH`` by model id, and the facts of those that are folders."""
    configs: dict[str, dict[str, Any]] = {}
    folders: dict[str, Checkpoint] = {}
    for text in named:
        model, _, file = text.partition("=")
        if not (model and file):
            raise DocumentError(f"--model-config: {text}: write ID=PATH, such as my/model=config.json")
        if model in configs:
            raise DocumentError(f"--model-config: {model}: is given twice: remove one")
        if Path(file).is_dir():
            try:
                folders[model] = read_checkpoint(FolderOfHeaders(file))
            except CheckpointError as error:
                no_weights = error.reason == "WeightsNotFound"
                fix = ": name its config.json to size the model by that alone" if no_weights else ""
                raise DocumentError(f"{file}: {printable(error.message)}{fix}") from error
            configs[model] = folders[model].config
            continue
        content = list(_documents_in(read_text(file), file))
        if len(content) != 1 or not isinstance(content[0], Document):
            raise DocumentError(f"{file}: must hold one object, the content of a model's config.json")
        configs[model] = shortened(content[0].body)
    return configs, folders


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
    if isinstance(spec.get("arms"), list):  # of a capture, each with its own speculation
        spec["arms"] = [with_configs(arm, model_configs) for arm in spec["arms"]]
    return spec


def _with_config(model: Any, model_configs: Mapping[str, dict[str, Any]]) -> Any:
    if not isinstance(model, dict):
        return model
    if isinstance(model.get("checkpoints"), list):
        model = {**model, "checkpoints": [_with_config(each, model_configs) for each in model["checkpoints"]]}
    name = model.get("model")
    config = model_configs.get(name) if isinstance(name, str) and model.get("config") is None else None
    return model if config is None else {**model, "config": config}


def refuse_unused(model_configs: Mapping[str, dict[str, Any]], documents: Sequence[Document]) -> None:
    """Reject a config.json that goes into no object."""
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
    """Return the models of a spec, and whether each has a config."""
    if not isinstance(spec, dict):
        return
    for arm in spec["arms"] if isinstance(spec.get("arms"), list) else ():
        yield from _models(arm)
    speculation = spec.get("speculation")
    for model in (spec.get("target"), speculation.get("draft") if isinstance(speculation, dict) else None):
        checkpoints = model.get("checkpoints") if isinstance(model, dict) else None
        for each in (model, *(checkpoints if isinstance(checkpoints, list) else [])):
            if isinstance(each, dict) and isinstance(each.get("model"), str):
                yield each["model"], each.get("config") is not None


def read_calibration(file: str | None) -> Calibration:
    """Return the content of a calibration file; empty if none is named."""
    if file is None:
        return UNCALIBRATED
    try:
        return parse_calibration(read_text(file))
    except CalibrationError as error:
        raise DocumentError(f"{file}: {error}") from error


def _read(source: str, kinds: Sequence[str]) -> Iterator[_Found]:
    path = Path(source)
    if source in {STANDARD_INPUT, ""} or not path.is_dir():
        yield from _ours(source, kinds)
        return
    try:
        files = files_below(path)
    except DocumentError as error:
        yield error
        return
    if not files:
        yield DocumentError(f"{place_of(source)}: no {', '.join(_SUFFIXES)} file is in this folder: name another")
    for file in files:
        yield from _ours(str(file), kinds)


def files_below(folder: Path) -> list[Path]:
    """Return the YAML and JSON files of a folder, sorted, but not those of .git, .github and the like."""
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
        for found in _objects_in(read_text(file), file):
            ours = _our(found, kinds) if isinstance(found, Document) else found
            if isinstance(ours, DocumentError):
                ours.file = file
            yield ours
    except DocumentError as error:
        error.file = file
        yield error


def _our(document: Document, kinds: Sequence[str]) -> _Found:
    """Return the object if it is of these kinds, and an error if it was meant to be one of ours."""
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


def _objects_in(text: str, file: str) -> Iterator[Document | Other]:
    for found in _documents_in(text, file):
        if isinstance(found, Document) and found.kind.endswith("List"):
            items = found.body.get("items")
            for index, item in enumerate(items if isinstance(items, list) else [], start=1):
                is_object = isinstance(item, dict)
                yield Document(file, item, found.number, index) if is_object else Other("a list without objects")
        else:
            yield found


def _documents_in(text: str, file: str) -> Iterator[Document | Other]:
    number = 0
    try:
        for number, body in enumerate(parse_yaml_or_json(text, is_json=Path(file).suffix == ".json"), start=1):
            if isinstance(body, dict):
                yield Document(file, body, number)
            elif body is not None:
                yield Other("a list" if isinstance(body, list) else "plain text")
    except UnreadableTextError as error:
        unreadable = DocumentError(f"{place_of(file)}, document {number + 1}: {_TEMPLATE if '{{' in text else error}")
        if error.line is not None and file != STANDARD_INPUT:
            # A missing end is reported in the line after the last.
            unreadable.line = max(1, min(error.line, len(text.splitlines())))
        raise unreadable from error


def _read_given(
    model_configs: Iterable[str], facts: Iterable[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, Checkpoint]]:
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
    """Return the facts in some files by model id; a model may be in one file only."""
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
