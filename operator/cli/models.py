"""`specdecode models`: models and drafts of the catalogue, and facts files for other models."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from specdecode_operator.cli.hub import HubModels
from specdecode_operator.cli.input_files import read_facts
from specdecode_operator.cli.json_text import json_text
from specdecode_operator.cli.main import application
from specdecode_operator.cli.options import (
    ExitCode,
    FactsOption,
    HiddenName,
    HubOption,
    TextOrJson,
    ended,
    fail,
    hub_models,
)
from specdecode_operator.cli.outputs import print_json
from specdecode_operator.cli.plan.answers import others_named
from specdecode_operator.cli.terminal import aligned, say, say_line
from specdecode_operator.cli.text_files import DocumentError, replaced_whole
from specdecode_operator.deployment.models.checkpoint_reader import (
    Checkpoint,
    CheckpointError,
    FolderOfHeaders,
    read_checkpoint,
)
from specdecode_operator.deployment.models.checkpoints import stored_weights
from specdecode_operator.deployment.models.facts_files import FactsFileError, check_facts, facts_data
from specdecode_operator.enums import Precision
from specdecode_operator.problems import printable
from specdecode_operator.sizing import catalogue
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.errors import SizingError
from specdecode_operator.sizing.families.architectures import geometry_from_config
from specdecode_operator.sizing.families.draft_heads import method_of_head
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.rank_layers import Split
from specdecode_operator.sizing.weights import parameter_count, weight_bytes
from specdecode_operator.untrusted import mapping, texts

models_app = application("Models of the catalogue, their facts and their drafts.")
Output = Annotated[TextOrJson, typer.Option("--output", "-o", help="Format: text or json.")]


@models_app.command("list")
def list_command(
    word: Annotated[str, typer.Argument(help="List only ids that contain this text. Case is ignored.")] = "",
    *,
    output: Output = TextOrJson.TEXT,
) -> None:
    """List the models of the catalogue and published draft heads, with size and quantization."""
    ids = [name for name in catalogue.hub_ids() if word.lower() in name.lower()]
    rows = []
    for entry in filter(None, map(catalogue.find_entry, ids)):
        geometry, _ = _geometry(entry)
        row = {"id": entry.model_id, "kind": _kind(entry, geometry), "quantization": entry.quantization}
        rows.append({**row, "parameters": None if geometry is None else parameter_count(geometry)})
    if output is TextOrJson.JSON:
        print_json(rows)
        return
    titles = ("id", "kind", "quantization", "parameters")
    cells = [tuple(_lines(title, row[title])[0] for title in titles) for row in rows]
    if not cells:
        say_line(f"no id contains {word}: run specdecode models list to see all", err=True)
        raise typer.Exit(ExitCode.UNKNOWN)
    say("\n".join(aligned([titles, *cells], left=3, indent="")))


@models_app.command("show")
def show_command(
    model: Annotated[str, typer.Argument(help="Id of the model on the hub, such as meta-llama/Llama-3.1-8B-Instruct.")],
    *,
    facts: FactsOption = None,
    revision: Annotated[str | None, typer.Option(help="Revision on the hub, with --hub.")] = None,
    hub: HubOption = False,
    output: Output = TextOrJson.TEXT,
) -> None:
    """Show the known facts of a model: shape, weights, quantization, draft heads, and their source.

    Exits with 5 when the model is unknown.
    """
    entry, read = catalogue.find_entry(model), None
    if facts:
        with ended(DocumentError):
            read = read_facts(facts).get(model)
    if entry is None:
        source = "a facts file"
        if read is None and (models := hub_models(wanted=hub)):
            try:
                read = models.find(model, revision)
            except CheckpointError as error:
                _end_unknown(f"{model}: {error.message}")
            source = f"the hub at commit {read.commit}"
        if read is None:
            meant = catalogue.similar_model(model, heads=False) or catalogue.similar_model(model, heads=True)
            others = others_named(model, heads=False) or others_named(model, heads=True)
            or_meant = (
                f", did you mean {meant}?"
                if meant
                else f"{others}{'' if hub else ': add --hub to read it from the hub'}"
            )
            _end_unknown(f"{model}: not found in the catalogue{' or the facts files' if facts else ''}{or_meant}")
        entry = _entry(model, read, source)
    known = list(_facts(entry, read))
    if output is TextOrJson.JSON:
        print_json({**dict(known), "config": entry.config})
        return
    rows = []
    for name, value in known:
        rows += [("" if index else name, line) for index, line in enumerate(_lines(name, value))]
    say("\n".join(aligned(rows, left=2, indent="")))


def _end_unknown(message: str) -> NoReturn:
    say_line(f"error: {message}", err=True)
    raise typer.Exit(ExitCode.UNKNOWN)


def _entry(model: str, read: Checkpoint, source: str) -> catalogue.CatalogueEntry:
    sections = [each.get("quantization_config") for each in (read.config, mapping(read.config, "text_config"))]
    section = next((each for each in sections if isinstance(each, dict)), None)
    stored = "none" if section is None else str(section.get("quant_method") or "modelopt")
    return catalogue.CatalogueEntry(model, source, read.config, stored, "config.json")


@models_app.command("drafts")
def drafts_command(
    model: Annotated[str, typer.Argument(help="Id of the target on the hub, such as moonshotai/Kimi-K2.5.")],
    *,
    output: Output = TextOrJson.TEXT,
) -> None:
    """List drafts that are published or recommended for a target: method, size, tokens per step, source.

    A draft without an id is part of the target's own checkpoint. A draft of unknown size is not in the catalogue: to
    plan with it, add --hub or --facts. Exits with 5 when no draft is known.
    """
    rows: list[dict[str, Any]] = []
    for each in catalogue.known_drafts(model):
        entry = None if each.draft is None else catalogue.find_entry(each.draft)
        geometry = None if entry is None else _geometry(entry)[0]
        parameters = None if geometry is None else parameter_count(geometry)
        row = {"draft": each.draft, "method": each.method, "parameters": parameters}
        rows.append({**row, "tokens": each.tokens, "source": each.source})
    if not rows:
        meant = catalogue.similar_model(model, heads=False)
        or_meant = f", did you mean {meant}?" if meant and meant != model else ""
        _end_unknown(f"{model}: no known draft for this model{or_meant}")
    if output is TextOrJson.JSON:
        print_json(rows)
        return
    titles = ("draft", "method", "source", "parameters", "tokens")
    unknown = [row for row in rows if row["draft"] and row["parameters"] is None]
    for row in unknown:
        row["parameters"] = "unknown"
    cells = [
        (row["draft"] or "(its own layers)", *(_lines(title, row[title])[0] for title in titles[1:])) for row in rows
    ]
    say("\n".join(aligned([titles, *cells], left=3, indent="")))
    if unknown:
        say_line("note: the catalogue lacks drafts of unknown size: plan them with --hub or --facts", err=True)


@models_app.command("add")
def add_command(
    model: Annotated[str, typer.Argument(help="Folder of the model, or its id on the hub.")],
    *,
    name: Annotated[
        str | None,
        typer.Option("--id", help="Id of the model in specs. Defaults to the hub id, or to the folder as written."),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Revision on the hub.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", HiddenName("--file"), help="File to write. Defaults to standard output.")
    ] = None,
) -> None:
    """Write a facts file for --facts: config.json and the tensor sizes from the headers of the weights.

    A folder needs only the headers of its weights. Exits with 2 when the files
    contradict each other, 5 when they cannot be read.
    """
    try:
        if Path(model).is_dir():
            found, source = read_checkpoint(FolderOfHeaders(model)), "a folder"
        else:
            found = HubModels().find(model, revision)
            source = f"the hub at commit {found.commit}"
        check_facts(name or model, found)
    except CheckpointError as error:
        fix = ""
        if error.reason == "WeightsNotFound" and Path(model).is_dir():
            fix = (
                ": add them, or only their headers; without them, plan and lint can size the model by its config.json"
                f" with --model-config {shlex.quote(name or 'ID')}={shlex.quote(str(Path(model, 'config.json')))}"
            )
        _end_unknown(f"{printable(model)}: {printable(error.message)}{printable(fix)}")
    except FactsFileError as error:
        fail(error)
    text = json_text(facts_data(name or model, found, source), indent=2)
    if out is None:
        say(text)
        return
    try:
        with replaced_whole(out) as stream:
            stream.write(f"{text}\n")
    except OSError as error:
        say_line(f"error: --out: {out}: {error.strerror}", err=True)
        raise typer.Exit(ExitCode.INVALID) from None


def _facts(entry: catalogue.CatalogueEntry, read: Checkpoint | None = None) -> Iterator[tuple[str, Any]]:
    geometry, why = _geometry(entry, read)
    yield "id", entry.model_id
    yield "kind", _kind(entry, geometry)
    yield "architecture", ", ".join(texts(entry.config, "architectures")) or "-"
    if geometry is None:
        yield "cannot be sized", why
    else:
        yield "knowledge", geometry.knowledge.value
        precision = geometry.checkpoint_precision or Precision.BF16
        yield "parameters", parameter_count(geometry)
        yield "shape", f"{geometry.num_layers} layers of width {geometry.hidden_size}"
        yield "vocabulary", geometry.vocab_size
        yield "longest sequence", geometry.max_position_embeddings
        yield "weights", {"bytes": weight_bytes(geometry, precision, Split(1)), "precision": precision.value}
    yield "quantization", entry.quantization
    made_for = next((head.targets for head in catalogue.published_heads() if head.head == entry.model_id), ())
    if made_for:
        yield "made for", list(made_for)
    drafts = [f"{each.draft or 'its own layers'} ({each.method})" for each in catalogue.known_drafts(entry.model_id)]
    if drafts:
        yield "drafts", drafts
    yield "source", entry.source
    if entry.quantization_source != "config.json":
        yield "quantization source", entry.quantization_source


def _geometry(entry: catalogue.CatalogueEntry, read: Checkpoint | None = None) -> tuple[ModelGeometry | None, str]:
    try:
        if catalogue.find_entry(entry.model_id) is None:
            return geometry_from_config(entry.model_id, entry.config, stored_weights(read)), ""
        return catalogue.find_geometry(entry.model_id), ""
    except SizingError as error:
        return None, f"{error.field}: {error.message}"


def _kind(entry: catalogue.CatalogueEntry, geometry: ModelGeometry | None) -> str:
    published = next((head.method for head in catalogue.published_heads() if head.head == entry.model_id), None)
    method = published or (None if geometry is None else method_of_head(geometry))
    return "model" if method is None else f"{method} head"


def _lines(name: str, value: Any) -> list[str]:
    match value:
        case None:
            return ["-"]
        case {"bytes": weights_bytes, "precision": precision}:
            return [f"{weights_bytes / GIB:.2f} GiB in {precision}"]
        case int() if name == "parameters":
            return [f"{value / 1e9:.2f} B"]
        case list():
            return [printable(str(each)) for each in value]
    return [printable(str(value))]
