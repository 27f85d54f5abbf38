"""Read SpecDecodeDeployments, nodes, config.json files and calibrations from files, folders and standard input."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from specdecode_operator.api.base import API_VERSION, GROUP, Body
from specdecode_operator.api.capture import KIND as CAPTURE
from specdecode_operator.api.deployment import KIND
from specdecode_operator.api.training import KIND as TRAINING
from specdecode_operator.cli.text_files import (
    STANDARD_INPUT,
    DocumentError,
    first_errors,
    place_of,
    read_calibration,
    read_text,
)
from specdecode_operator.cluster.device_slices import DeviceInventory, read_inventory
from specdecode_operator.cluster.nodes import NodeFacts, node_facts
from specdecode_operator.cluster.resources import DEVICE_CLASS, RESOURCE_SLICE
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
from specdecode_operator.sizing.calibration import UNCALIBRATED, Calibration
from specdecode_operator.sizing.estimate_fields import full_product
from specdecode_operator.sizing.startup_time import UNKNOWN_RATES, Rates
from specdecode_operator.untrusted import UnreadableTextError, mapping
from specdecode_operator.untrusted_yaml import parse_yaml_or_json

if TYPE_CHECKING:
    from specdecode_operator.importing.foreign import ForeignServer

THE_OPTIONS = "the options"
"""Name of the source of an object that the options of the command line describe."""

_SUFFIXES = (".yaml", ".yml", ".json")
_SHOWN_OTHERS = 3
_IMPORTED = ("Deployment", "StatefulSet", "InferenceService", "LLMInferenceService", "DynamoGraphDeployment")
"""Kinds of other servers that `specdecode import` reads from a file."""
_RUN_VLLM = ("LLMInferenceService", "InferenceService", "RayService")
"""Kinds whose controllers start vLLM although the object may not name it."""
OUR_KINDS = (KIND, CAPTURE, TRAINING)
_MOST_FILES = 50_000
"""Maximum number of files below a folder: more than in a repository of manifests, but fewer than in a home."""
_TEMPLATE = "is a template, not YAML: render it first (helm template CHART | specdecode plan -f -)"


@dataclass(frozen=True)
class Document:
    """An object and its source."""

    file: str  # As named on the command line; ``-`` for standard input
    body: Body
    number: int | None = None  # Number of the document in the file, from 1; None if it is not from a file
    item: int | None = None  # Number of the object in a List, from 1
    foreign: "ForeignServer | None" = None  # The server of another project's object that the body stands for

    @property
    def place(self) -> str:
        """File and document number for messages."""
        number = "" if self.number is None else f", document {self.number}"
        item = "" if self.item is None else f", item {self.item}"
        return f"{place_of(self.file)}{number}{item}"

    @property
    def kind(self) -> str:
        """The object's kind."""
        return str(self.body.get("kind")) if self.foreign is None else self.foreign.kind

    @property
    def name(self) -> str:
        """Name in the object's metadata; its place if it has none."""
        if self.foreign is not None:
            return printable(self.foreign.name)
        name = mapping(self.body, "metadata").get("name")
        return printable(str(name)) if name else self.place

    @property
    def namespace(self) -> str | None:
        """Namespace in the object's metadata."""
        namespace = mapping(self.body, "metadata").get("namespace")
        return str(namespace) if namespace else None

    @property
    def qualified_name(self) -> str:
        """Namespace and name, or only the name if the object has no namespace."""
        return f"{printable(self.namespace)}/{self.name}" if self.namespace else self.name


@dataclass(frozen=True)
class Other:
    """Another object in a file, such as ``Service (v1)``."""

    name: str
    document: Document | None = None  # None if it is no object with a kind


Found = Document | DocumentError | Other
Converter = Callable[[Sequence[Found]], tuple[list[Found], tuple[str, ...]]]
"""Replaces objects of other projects, and returns remarks on those that it does not replace."""


@dataclass(frozen=True)
class Reading:
    """Our objects in the sources, in the order they were read."""

    documents: tuple[Document, ...]
    errors: tuple[DocumentError, ...]
    """Errors of unreadable documents, or one error if the sources contain none of our objects."""
    notes: tuple[str, ...] = ()
    """Remarks on other objects."""


class Models(Protocol):
    """A source of model facts, such as the hub."""

    def find(self, model: str, revision: str | None) -> Checkpoint:
        """Return the facts of a model, or raise CheckpointError."""


@dataclass(frozen=True)
class Inputs:
    """Inputs in addition to the objects."""

    nodes: tuple[NodeFacts, ...] | None = None  # None: nodes are assumed
    devices: DeviceInventory | None = None  # For claims; None: they use the GPUs of the nodes
    configs: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # Content of config.json by model id
    given: Mapping[str, Checkpoint] = field(default_factory=dict)  # Facts of models in folders and files
    calibration: Calibration = UNCALIBRATED
    models: Models | None = None  # Source of models that are neither in the inputs above nor in the catalogue
    allowed: frozenset[str] | None = None  # Permissions for podTemplate; None: not checked
    rates: Rates = UNKNOWN_RATES  # For the start-up time


@dataclass(frozen=True)
class InputOptions:
    """Options for the inputs."""

    nodes: str | None = None
    model_configs: Sequence[str] = ()  # ID=PATH
    calibration: str | None = None
    facts: Sequence[str] = ()
    models: Models | None = None
    allowed: frozenset[str] | None = None
    rates: Rates = UNKNOWN_RATES

    def read(self, documents: Sequence[Document]) -> Inputs:
        """Read the files; raise DocumentError if one is unusable, or a config belongs to no document."""
        nodes, devices = (None, None) if self.nodes is None else read_fleet(self.nodes)
        configs, given = _read_given(self.model_configs, self.facts)
        refuse_unused(configs, documents)
        calibration = read_calibration(self.calibration)
        return Inputs(nodes, devices, configs, given, calibration, self.models, self.allowed, self.rates)


def read_ours(
    sources: Iterable[str], kinds: Sequence[str] = (KIND, CAPTURE), convert: Converter | None = None
) -> Reading:
    """Return our objects of these kinds in files, folders (to any depth) and ``-``.

    ``convert`` replaces objects of other projects by ours.
    """
    sources, found, known = tuple(sources), list[Found](), dict[tuple[str, str], Document]()
    read, notes = [item for source in sources for item in _read(source, kinds)], tuple[str, ...]()
    if convert is not None:
        read, notes = convert(read)
    for item in read:
        first = item
        if isinstance(item, Document) and item.foreign is None:
            first = known.setdefault((item.kind, item.qualified_name), item)
        if isinstance(item, Document) and isinstance(first, Document) and first is not item:
            what = f"{item.kind} {item.qualified_name} is also in {first.place}"
            error = DocumentError(f"{item.place}: metadata.name: {item.name}: {what}: remove or rename one")
            error.file = item.file
            found.append(error)
        else:
            found.append(item)
    documents = tuple(item for item in found if isinstance(item, Document))
    errors = tuple(first_errors([item for item in found if isinstance(item, DocumentError)]))
    if not documents and not errors:
        others = list(dict.fromkeys(item.name for item in found if isinstance(item, Other)))
        but = ", ".join([*others[:_SHOWN_OTHERS], *(["more"] if len(others) > _SHOWN_OTHERS else [])])
        fix = "use another file or folder"
        if CAPTURE not in kinds and any(other.startswith(CAPTURE) for other in others):
            fix = (
                "use the file of the capture's deployment, or pass both files to specdecode lint or render, which plan"
                " each arm of the capture"
            )
        if any(other.partition(" ")[0] in _IMPORTED for other in others):
            fix = f"convert it with specdecode import -f {sources[0]}, or use another file or folder"
            if convert is not None:
                fix = "use a file with an object that runs vLLM, which none of these does"
        but = f", only {but}" if but else ""
        message = f"{', '.join(sources)}: contains no {' or '.join(kinds)}{but}: {fix}"
        errors = (DocumentError(message),)
    return Reading(documents, errors, notes)


def may_run_vllm(body: Body) -> bool:
    """Return whether an object of another project may start vLLM."""
    return body.get("kind") in _RUN_VLLM or "vllm" in str(body).lower()


def foreign_converter(engine_version: str | None = None) -> Converter:
    """Return the function that replaces objects of other projects that run vLLM.

    ``engine_version`` is the version of vLLM of servers whose image tag does not contain it.
    """

    def convert(found: Sequence[Found]) -> tuple[list[Found], tuple[str, ...]]:
        if not any(isinstance(each, Other) and each.document and may_run_vllm(each.document.body) for each in found):
            return [*found], ()
        # Importing the modules takes half a second, and our own objects do not need them.
        from specdecode_operator.cli.foreign_objects import with_servers  # noqa: PLC0415

        return with_servers(found, engine_version)

    return convert


def read_deployments(sources: Iterable[str], convert: Converter | None = None) -> Reading:
    """Return the SpecDecodeDeployments of files, folders (to any depth) and ``-``."""
    return read_ours(sources, (KIND,), convert)


def read_nodes(file: str) -> tuple[NodeFacts, ...]:
    """Return the nodes with GPUs in the output of ``kubectl get nodes -o yaml`` or ``-o json``.

    In files written by hand, the product label may be a short name such as ``H100``.
    """
    return read_fleet(file)[0]


def read_fleet(file: str) -> tuple[tuple[NodeFacts, ...], DeviceInventory | None]:
    """Return the nodes as `read_nodes`, and the devices of ResourceSlices and DeviceClasses; None without these."""
    given = [each for each in read_all(file) if isinstance(each, Document)]
    nodes = [each for each in given if each.body.get("kind") == "Node"]
    slices, classes = (
        [each.body for each in given if each.body.get("kind") == resource.kind]
        for resource in (RESOURCE_SLICE, DEVICE_CLASS)
    )
    devices = read_inventory(slices, classes) if slices or classes else None
    if not nodes and devices is None:
        raise DocumentError(f"{file}: contains no Node: create it with kubectl get nodes -o yaml")
    try:
        found = [node_facts(document.body) for document in nodes]
    except (KeyError, AttributeError, TypeError) as error:
        raise DocumentError(
            f"{file}: a Node has no valid metadata: create it with kubectl get nodes -o yaml"
        ) from error
    named = tuple(replace(facts, product=full_product(facts.product)) for facts in found if facts is not None)
    return named, devices


def read_storage_classes(file: str) -> StorageClasses:
    """Return the StorageClasses in the output of ``kubectl get storageclasses -o yaml`` or ``-o json``."""
    kind, text = "StorageClass", read_text(file)
    found = [each.body for each in objects_in(text, file) if each.body.get("kind") == kind]
    # kubectl prints an empty List for a cluster without StorageClasses.
    if not found and not any(
        isinstance(each, Document) and each.body.get("items") == [] for each in _documents_in(text, file)
    ):
        raise DocumentError(f"{file}: contains no {kind}: create it with kubectl get storageclasses -o yaml")
    return StorageClasses.of(found)


def read_all(file: str) -> list[Document | Other]:
    """Return every object in a file, with Lists expanded, and other documents."""
    return [*_objects_in(read_text(file), file)]


def objects_in(text: str, file: str) -> list[Document]:
    """Return every object in a file's text, with Lists expanded."""
    return [each for each in _objects_in(text, file) if isinstance(each, Document)]


def read_models(named: Iterable[str]) -> tuple[dict[str, dict[str, Any]], dict[str, Checkpoint]]:
    """Return the config.json of each ``ID=PATH`` by model id, and the facts of models in folders."""
    configs: dict[str, dict[str, Any]] = {}
    folders: dict[str, Checkpoint] = {}
    for text in named:
        model, _, file = text.partition("=")
        if not (model and file):
            raise DocumentError(f"--model-config: {text}: must be ID=PATH, such as my/model=config.json")
        if model in configs:
            raise DocumentError(f"--model-config: {model}: set twice: remove one")
        if Path(file).is_dir():
            try:
                folders[model] = read_checkpoint(FolderOfHeaders(file))
            except CheckpointError as error:
                no_weights = error.reason == "WeightsNotFound"
                fix = ": to size the model only by its config.json, use the path of that file" if no_weights else ""
                raise DocumentError(f"{file}: {printable(error.message)}{fix}") from error
            configs[model] = folders[model].config
            continue
        content = list(_documents_in(read_text(file), file))
        if len(content) != 1 or not isinstance(content[0], Document):
            raise DocumentError(f"{file}: must contain one object, a model's config.json")
        configs[model] = shortened(content[0].body)
    return configs, folders


def with_configs(spec: Any, model_configs: Mapping[str, dict[str, Any]]) -> Any:
    """Add each config.json to the models with its id that have no config."""
    if not isinstance(spec, dict):
        return spec
    spec = dict(spec)
    if "target" in spec:
        spec["target"] = _with_config(spec["target"], model_configs)
    speculation = spec.get("speculation")
    if isinstance(speculation, dict) and "draft" in speculation:
        spec["speculation"] = {**speculation, "draft": _with_config(speculation["draft"], model_configs)}
    if isinstance(spec.get("arms"), list):  # arms of a capture have their own speculation
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
    """Reject a config.json that no object uses."""
    used = {model: given for document in documents for model, given in _models(document.body.get("spec"))}
    for model in model_configs if documents else ():
        if model not in used:
            named = ", ".join(sorted(used)) or "none"
            raise DocumentError(f"--model-config: {model}: not used in any object: use one of these ids: {named}")
        if used[model]:
            raise DocumentError(f"--model-config: {model}: the object already has a config: remove one of them")


def _models(spec: Any) -> Iterator[tuple[str, bool]]:
    """Yield the models of a spec, and whether each has a config."""
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


def _read(source: str, kinds: Sequence[str]) -> Iterator[Found]:
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
        yield DocumentError(f"{place_of(source)}: no {', '.join(_SUFFIXES)} file in this folder: use another")
    for file in files:
        yield from _ours(str(file), kinds)


def files_below(folder: Path) -> list[Path]:
    """Return the YAML and JSON files below a folder, sorted, without hidden files and folders."""
    if folder.resolve() == Path(folder.resolve().anchor):
        raise DocumentError(f"{folder}: is the root folder: use the folder with the manifests")
    found, looked_at = [], 0
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        looked_at += len(folders) + len(files)
        if looked_at > _MOST_FILES:
            raise DocumentError(f"{place_of(str(folder))}: contains more than {_MOST_FILES:,} files: use a subfolder")
        found += [Path(place, name) for name in files if not name.startswith(".") and Path(name).suffix in _SUFFIXES]
    return sorted(file for file in found if file.is_file())


def _ours(file: str, kinds: Sequence[str]) -> Iterator[Found]:
    try:
        for found in _objects_in(read_text(file), file):
            ours = _our(found, kinds) if isinstance(found, Document) else found
            if isinstance(ours, DocumentError):
                ours.file = file
            yield ours
    except DocumentError as error:
        error.file = file
        yield error


def _our(document: Document, kinds: Sequence[str]) -> Found:
    """Return the object if it has one of these kinds, or an error if it has our API group but is not valid."""
    kind, version = document.body.get("kind"), document.body.get("apiVersion")
    ours = str(version).partition("/")[0] == GROUP
    if kind not in kinds and (kind in OUR_KINDS or not ours):
        return Other(f"{shown(kind)} ({shown(version)})" if kind else "an object without kind", document)
    if kind not in kinds:
        known = " or ".join(kinds)
        return DocumentError(f"{document.place}: kind: {shown_or_missing(kind)}: use {known}")
    if version != API_VERSION:
        return DocumentError(f"{document.place}: apiVersion: {shown_or_missing(version)}: use {API_VERSION}")
    metadata = document.body.get("metadata")
    if not isinstance(metadata, dict | None):
        return DocumentError(f"{document.place}: metadata: {shown(metadata)}: must be an object with a name")
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
            # The parser reports a missing end in the line after the last one.
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
            said = f"weights of {total:,} bytes differ from the {other:,} bytes"
        elif in_file.config != checkpoint.config:
            said = "its config differs from the one"
        else:
            continue
        raise DocumentError(
            f"--facts: {printable(model)}: {said} in the folder of --model-config: omit one of the options"
        )
    return configs, {**known, **folders}


def read_facts(files: Iterable[str]) -> dict[str, Checkpoint]:
    """Return the facts in these files by model id. Each model may be in only one file."""
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
