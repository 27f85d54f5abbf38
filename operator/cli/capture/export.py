"""`capture export`: write the requests of a fetched capture for other tools."""

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import httpx
import msgspec
import typer

from specdecode_operator.capture.files.export import ExportFormat, export_capture, held_out_file
from specdecode_operator.capture.files.trace_requests import ExportError
from specdecode_operator.capture.files.training_rows import RebuildPrompt, Split
from specdecode_operator.capture.load.rebuilt_prompts import Tokenize
from specdecode_operator.capture.trace_reader import RecordingError
from specdecode_operator.cli.options import ended, fail
from specdecode_operator.cli.terminal import say, say_line
from specdecode_operator.cluster.bounded_fetch import place_of
from specdecode_operator.problems import printable

_TIMEOUT_S: Final = 60


class _Tokenized(msgspec.Struct):
    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]]


def tokenizer_at(url: str) -> Tokenize:
    """Return the tokenizer of a vLLM server, which adds special tokens as for a completion."""
    return partial(_tokenize, httpx.Client(timeout=_TIMEOUT_S, trust_env=False), url)


def _tokenize(client: httpx.Client, url: str, text: str) -> list[int]:
    where = f"--tokenizer-url: {place_of(url)}"
    try:
        answer = client.post(f"{url.rstrip('/')}/tokenize", json={"prompt": text})
        answer.raise_for_status()
        return msgspec.json.decode(answer.content, type=_Tokenized).tokens
    except httpx.HTTPStatusError as error:
        code = error.response.status_code
        raise ExportError(f"{where}: answers /tokenize with HTTP {code}: use a vLLM server") from error
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise ExportError(f"{where}: does not answer: {printable(str(error))}: use a running vLLM server") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ExportError(f"{where}: /tokenize returns no tokens: use a vLLM server") from error


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
    holdout_percent: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            max=50,
            help="For speculators: share of the prompts, in percent, to write to a second file, FILE.holdout.jsonl, "
            "instead of the training data.",
        ),
    ] = 0,
    seed: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            max=2**31 - 1,
            help="Seed that chooses the held-out prompts. A training with the same seed and share holds out the same "
            "prompts.",
        ),
    ] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
) -> None:
    """Write the requests of a capture in the input format of another tool.

    vllm-bench, guidellm, aiperf and mooncake get arrival times, lengths and shared
    prefixes, without text. speculators gets the tokens of prompts and answers, to
    train a draft. The output lists what the format cannot hold.

    For example: specdecode capture export captures/demo --format vllm-bench --out demo.jsonl

    Exits with 0 when the file is written, 2 when the capture cannot be exported in
    this format.
    """
    if holdout_percent and form is not ExportFormat.SPECULATORS:
        fail("--holdout-percent: only used with --format speculators: omit it")
    held_out = held_out_file(out)
    for file in (out, held_out) if holdout_percent else (out,):
        if os.path.lexists(file) and not (force and file.is_file()):
            fix = "already exists: add --force to replace it" if file.is_file() else "is not a file: use another"
            fail(f"--out: {file}: {fix}")
    with ended(ExportError, RecordingError):
        rebuild = _rebuild(capture, form, dataset, tokenizer_url)
        split = Split(seed=seed, holdout_percent=holdout_percent)
        exported = export_capture(capture, form, out, phases=phase or [], rebuild=rebuild, split=split)
    for each in exported.left_out:
        say(f"left out: {printable(each)}")
    blocks = f", {exported.block_tokens} tokens per hash id" if exported.block_tokens else ""
    say_line(f"{out}: {exported.requests:,} request{'s' * (exported.requests != 1)}{blocks}")
    if holdout_percent:
        say_line(f"{held_out}: {exported.held_out:,} held-out prompt{'s' * (exported.held_out != 1)}")


def _rebuild(capture: Path, form: ExportFormat, dataset: Path | None, url: str | None) -> RebuildPrompt | None:
    if form is not ExportFormat.SPECULATORS:
        if dataset is not None or url is not None:
            option = "--dataset" if dataset is not None else "--tokenizer-url"
            fail(f"{option}: only used with --format speculators: omit it")
        return None
    from specdecode_operator.capture.load import rebuilt_prompts  # noqa: PLC0415  imports pydantic models
    from specdecode_operator.cli.capture.export import tokenizer_at  # noqa: PLC0415  imports httpx

    rebuilt_prompts.refuse_random_prompts(capture, rebuilt_prompts.read_manifest(capture))
    if dataset is None and url is None:
        return None
    if dataset is None or url is None:
        missing = "--dataset" if dataset is None else "--tokenizer-url"
        fail(f"{missing}: missing: prompts are rebuilt from --dataset with --tokenizer-url: set both")
    return rebuilt_prompts.RebuiltPrompts(capture, dataset, tokenizer_at(url))
