"""`capture export`: write the requests of a fetched capture for other tools."""

import os
from pathlib import Path
from typing import Annotated

import typer

from specdecode_operator.capture.files.export import ExportError, ExportFormat, RebuildPrompt, export_capture
from specdecode_operator.capture.trace_reader import RecordingError
from specdecode_operator.cli.options import ended, fail
from specdecode_operator.cli.terminal import say, say_line
from specdecode_operator.problems import printable


def export_command(  # noqa: PLR0913  each is an option
    capture: Annotated[Path, typer.Argument(help="Folder of a capture (of one repetition), or a trace.")],
    *,
    form: Annotated[ExportFormat, typer.Option("--format", help="Tool that reads the file.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="JSONL file to write.")],
    phase: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Export only the requests of this phase. May be repeated."),
    ] = None,
    dataset: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="For speculators: folder with the dataset of the capture, to rebuild prompts. prompts.dataset.path "
            "is relative to it.",
        ),
    ] = None,
    tokenizer_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="For speculators: vLLM server of the target, such as http://localhost:8000, which tokenizes the "
            "rebuilt prompts.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write the requests of a capture in the input format of another tool.

    vllm-bench, guidellm, aiperf and mooncake get arrival times, lengths and shared
    prefixes, without text. speculators gets the tokens of prompts and answers, to
    train a draft. The output lists what the format cannot hold.

    For example: specdecode capture export captures/demo --format vllm-bench --out demo.jsonl

    Exits with 0 when the file is written, 2 when the capture cannot be exported in
    this format.
    """
    if os.path.lexists(out) and not (force and out.is_file()):
        is_file = out.is_file()
        fail(
            f"--out: {out}: {'already exists: add --force to replace it' if is_file else 'is not a file: use another'}"
        )
    with ended(ExportError, RecordingError):
        rebuild = _rebuild(capture, form, dataset, tokenizer_url)
        exported = export_capture(capture, form, out, phases=phase or [], rebuild=rebuild)
    for each in exported.left_out:
        say(f"left out: {printable(each)}")
    blocks = f", {exported.block_tokens} tokens per hash id" if exported.block_tokens else ""
    say_line(f"{out}: {exported.requests:,} request{'s' * (exported.requests != 1)}{blocks}")


def _rebuild(capture: Path, form: ExportFormat, dataset: Path | None, url: str | None) -> RebuildPrompt | None:
    if form is not ExportFormat.SPECULATORS:
        if dataset is not None or url is not None:
            option = "--dataset" if dataset is not None else "--tokenizer-url"
            fail(f"{option}: only used with --format speculators: omit it")
        return None
    from specdecode_operator.capture.load import rebuilt_prompts  # noqa: PLC0415  imports httpx

    rebuilt_prompts.refuse_random_prompts(capture)
    if dataset is None and url is None:
        return None
    if dataset is None or url is None:
        missing = "--dataset" if dataset is None else "--tokenizer-url"
        fail(f"{missing}: missing: prompts are rebuilt from --dataset with --tokenizer-url: set both")
    return rebuilt_prompts.RebuiltPrompts(capture, dataset, rebuilt_prompts.tokenizer_at(url))
