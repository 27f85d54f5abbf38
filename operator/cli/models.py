"""`specdecode models`: models and drafts of the catalogue, and facts files for other models."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from specdecode_operator.cli.command_groups import application
from specdecode_operator.cli.hub import HubModels
from specdecode_operator.cli.input_files import read_facts, read_model
from specdecode_operator.cli.options import ExitCode, FactsOption, HubOption, TextOrJson, fail, hub_models
from specdecode_operator.cli.outputs import json_text, print_json
from specdecode_operator.cli.plan.answers import others_named
from specdecode_operator.cli.terminal import aligned, say, say_line
from specdecode_operator.cli.text_files import DocumentError, replaced_whole
from specdecode_operator.deployment.models.checkpoint_reader import Checkpoint, CheckpointError
from specdecode_operator.deployment.models.checkpoints import stored_weights
from specdecode_operator.deployment.models.facts_files import FactsFileError, check_facts, facts_data
from specdecode_operator.enums import Precision
from specdecode_operator.problems import printable
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.catalogue import (
    CatalogueEntry,
    KnownDraft,
    find_entry,
    find_geometry,
    hub_ids,
    known_drafts,
    published_heads,
    similar_model,
)
from specdecode_operator.sizing.errors import SizingError
from specdecode_operator.sizing.families.architectures import geometry_from_config
from specdecode_operator.sizing.families.draft_heads import method_of_head
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.rank_layers import Split
from specdecode_operator.sizing.weights import parameter_count, weight_bytes

models_app = application("Models that need no config of their own, and what is known of one.")
Output = Annotated[TextOrJson, typer.Option("--output", "-o", help="text or json.")]


@models_app.command("list")
def list_command(
    word: Annotated[str, typer.Argument(help="Only ids that hold this, whatever its case.")] = "",
    *,
    output: Output = TextOrJson.TEXT,
) -> None:
    """List the models of the catalogue and the published draft heads, with size and quantization."""
    ids = [name for name in hub_ids() if word.lower() in name.lower()]
    rows = [_row(entry) for name in ids if (entry := find_entry(name)) is not None]
    if output is TextOrJson.JSON:
        print_json(rows)
        return
    titles = ("id", "kind", "quantization", "parameters")
    cells = [tuple(_lines(title, row[title])[0] for title in titles) for row in rows]
    if not cells:
        say_line(f"no id holds {word}: specdecode models list shows all", err=True)
        raise typer.Exit(ExitCode.UNKNOWN)
    say("\n".join(aligned([titles, *cells], left=3, indent="")))


@models_app.command("show")
def show_command(
    model: Annotated[str, typer.Argument(help="Id on the hub, such as meta-llama/Llama-3.1-8B-Instruct.")],
    *,
    facts: FactsOption = None,
    revision: Annotated[str | None, typer.Option(help="Revision on the hub, with --hub.")] = None,
    hub: HubOption = False,
    output: Output = TextOrJson.TEXT,
) -> None:
    """Show what is known of a model: its shape, how it is stored, its heads, and where that was read.

    Exits with 5 when nothing is known of it here.
    """
    entry, read = find_entry(model), _in_files(model, facts or [])
    if entry is None:
        source = "a facts file"
        if read is None and (models := hub_models(wanted=hub)):
            read = _on_hub(models, model, revision)
            source = f"the hub at commit {read.commit}"
        if read is None:
            _fail_unknown(model, asked_hub=hub, asked_files=bool(facts))
        entry = _entry(model, read, source)
    known = list(_facts(entry, read))
    if output is TextOrJson.JSON:
        print_json({**dict(known), "config": entry.config})
        return
    rows = [(name, each) for name, value in known for each in _lines(name, value)]
    shown = [
        (name if index == 0 or rows[index - 1][0] != name else "", text) for index, (name, text) in enumerate(rows)
    ]
    say("\n".join(aligned(shown, left=2, indent="")))


@models_app.command("drafts")
def drafts_command(
    model: Annotated[str, typer.Argument(help="Id of a target on the hub, such as moonshotai/Kimi-K2.5.")],
    *,
    output: Output = TextOrJson.TEXT,
) -> None:
    """List the drafts that are published or recommended for a target: method, size, tokens a step, and source.

    A draft without an id is the target's own layers for multi-token prediction. Exits with 5 when none is known here.
    """
    rows = [_draft_row(each) for each in known_drafts(model)]
    if not rows:
        meant = similar_model(model, heads=False)
        or_meant = f", did you mean {meant}?" if meant and meant != model else ""
        say_line(f"error: {model}: no draft for this model is known here{or_meant}", err=True)
        raise typer.Exit(ExitCode.UNKNOWN)
    if output is TextOrJson.JSON:
        print_json(rows)
        return
    titles = ("draft", "method", "source", "parameters", "tokens")
    cells = [
        (row["draft"] or "(its own layers)", *(_lines(title, row[title])[0] for title in titles[1:])) for row in rows
    ]
    say("\n".join(aligned([titles, *cells], left=3, indent="")))


def _draft_row(each: "KnownDraft") -> dict[str, Any]:
    entry = None if each.draft is None else find_entry(each.draft)
    geometry = None if entry is None else _geometry(entry)[0]
    return {
        "draft": each.draft,
        "method": each.method,
        "parameters": None if geometry is None else parameter_count(geometry),
        "tokens": each.tokens,
        "source": each.source,
    }


@models_app.command("add")
def add_command(
    model: Annotated[str, typer.Argument(help="Folder of a model, or its id on the hub.")],
    *,
    name: Annotated[
        str | None, typer.Option("--id", help="What specs call it. Default: the id, or the folder as it is written.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Revision on the hub.")] = None,
    file: Annotated[Path | None, typer.Option("--file", help="File to write to. Default: standard output.")] = None,
) -> None:
    """Write a facts file: config.json and the bytes in the headers of the weights, for --facts elsewhere.

    Of a folder the headers are enough. Exits with 2 when the files contradict
    themselves, 5 when they cannot be read.
    """
    try:
        found, source = read_model(model, revision)
        check_facts(name or model, found)
    except CheckpointError as error:
        fix = ""
        if error.reason == "WeightsNotFound" and Path(model).is_dir():
            fix = (
                ": add them, or their headers alone; without them, plan and lint size the model by its config.json with"
                f" --model-config {shlex.quote(name or 'ID')}={shlex.quote(str(Path(model, 'config.json')))}"
            )
        say_line(f"error: {printable(model)}: {printable(error.message)}{printable(fix)}", err=True)
        raise typer.Exit(ExitCode.UNKNOWN) from None
    except FactsFileError as error:
        say_line(f"error: {error}", err=True)
        raise typer.Exit(ExitCode.INVALID) from None
    text = json_text(facts_data(name or model, found, source), indent=2)
    if file is None:
        say(text)
        return
    try:
        with replaced_whole(file) as stream:
            stream.write(f"{text}\n")
    except OSError as error:
        say_line(f"error: --file: {file}: {error.strerror}", err=True)
        raise typer.Exit(ExitCode.INVALID) from None


def _in_files(model: str, files: list[str]) -> "Checkpoint | None":
    if not files:
        return None

    try:
        return read_facts(files).get(model)
    except DocumentError as error:
        fail(error)


def _on_hub(models: "HubModels", model: str, revision: str | None) -> "Checkpoint":
    try:
        return models.find(model, revision)
    except CheckpointError as error:
        say_line(f"error: {model}: {error.message}", err=True)
        raise typer.Exit(ExitCode.UNKNOWN) from None


def _entry(model: str, read: "Checkpoint", source: str) -> "CatalogueEntry":
    config = read.config
    inner = config.get("text_config")
    sections = [each.get("quantization_config") for each in (config, inner) if isinstance(each, dict)]
    section = next((each for each in sections if isinstance(each, dict)), None)
    stored = "none" if section is None else str(section.get("quant_method") or "modelopt")
    return CatalogueEntry(model, source, config, stored, "config.json")


def _fail_unknown(model: str, *, asked_hub: bool, asked_files: bool) -> NoReturn:
    meant = similar_model(model, heads=False) or similar_model(model, heads=True)
    others = others_named(model, heads=False) or others_named(model, heads=True)
    fix = "" if asked_hub else ": add --hub to read it there"
    or_meant = f", did you mean {meant}?" if meant else f"{others}{fix}"
    or_files = " or the facts files" if asked_files else ""
    say_line(f"error: {model}: is not in the catalogue{or_files}{or_meant}", err=True)
    raise typer.Exit(ExitCode.UNKNOWN)


def _row(entry: "CatalogueEntry") -> dict[str, Any]:
    geometry, _ = _geometry(entry)
    return {
        "id": entry.model_id,
        "kind": _kind(entry, geometry),
        "quantization": entry.quantization,
        "parameters": None if geometry is None else parameter_count(geometry),
    }


def _facts(entry: "CatalogueEntry", read: "Checkpoint | None" = None) -> Iterator[tuple[str, Any]]:
    geometry, why = _geometry(entry, read)
    yield "id", entry.model_id
    yield "kind", _kind(entry, geometry)
    yield "architecture", ", ".join(_named(entry.config.get("architectures")))
    if geometry is not None:
        yield "knowledge", geometry.knowledge.value
    if geometry is None:
        yield "cannot be sized", why
    else:
        precision = geometry.checkpoint_precision or Precision.BF16
        yield "parameters", parameter_count(geometry)
        yield "shape", f"{geometry.num_layers} layers of width {geometry.hidden_size}"
        yield "vocabulary", geometry.vocab_size
        yield "longest sequence", geometry.max_position_embeddings
        yield "weights", {"bytes": weight_bytes(geometry, precision, Split(1)), "precision": precision.value}
    yield "quantization", entry.quantization
    made_for = next((head.targets for head in published_heads() if head.head == entry.model_id), ())
    if made_for:
        yield "made for", list(made_for)
    drafts = [f"{each.draft or 'its own layers'} ({each.method})" for each in known_drafts(entry.model_id)]
    if drafts:
        yield "drafts", drafts
    yield "source", entry.source
    if entry.quantization_source != "config.json":
        yield "quantization source", entry.quantization_source


def _named(architectures: Any) -> list[str]:
    return list(map(str, architectures)) if isinstance(architectures, list) and architectures else ["-"]


def _geometry(entry: "CatalogueEntry", read: "Checkpoint | None" = None) -> "tuple[ModelGeometry | None, str]":
    try:
        if find_entry(entry.model_id) is None:
            return geometry_from_config(entry.model_id, entry.config, stored_weights(read)), ""
        return find_geometry(entry.model_id), ""
    except SizingError as error:
        return None, f"{error.field}: {error.message}"


def _kind(entry: "CatalogueEntry", geometry: "ModelGeometry | None") -> str:
    published = next((head.method for head in published_heads() if head.head == entry.model_id), None)
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
