"""`specdecode replay drive`: send recorded arrivals to a real server."""

import asyncio
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from specdecode_operator.capture.files.formats import CLIENT
from specdecode_operator.capture.load.engine_client import Server
from specdecode_operator.capture.load.prompts import BlockPrompts, TokenIds
from specdecode_operator.capture.load.shutdown import Stop, stop_on_signals
from specdecode_operator.capture.trace_reader import Recording, RecordingError, read_recording
from specdecode_operator.cli.options import TextOrJson, fail
from specdecode_operator.cli.outputs import print_json
from specdecode_operator.cli.terminal import say, say_line
from specdecode_operator.cli.text_files import DocumentError, new_folder
from specdecode_operator.problems import printable
from specdecode_operator.replay.drive import (
    Address,
    Drive,
    Driven,
    DriveSummary,
    Planned,
    TargetError,
    find_target,
    planned,
    summarize,
    summary_text,
)

_FAILED: Final = 1
_INTERRUPTED: Final = 130
"""As shells say that a signal ended a program."""
_BLOCK_TOKENS: Final = 16
"""Of a trace whose header does not say it, as vllm-vcr has it."""


def drive_command(  # noqa: PLR0913  each is an option
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Folder of a capture, or a trace.")],
    *,
    url: Annotated[str, typer.Option(help="Server that speaks OpenAI's API, such as http://localhost:8000.")],
    model: Annotated[
        str | None, typer.Option(help="Name that it serves the model under. Absent: the recorded one, or the only one.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for client.jsonl, which must not be there yet.")
    ] = None,
    time_scale: Annotated[
        float, typer.Option(help="Factor of the times between arrivals: 0.5 is twice the load.", min=0, max=1000)
    ] = 1.0,
    requests: Annotated[int | None, typer.Option(help="Send the first so many only.", min=1)] = None,
    vocab_size: Annotated[
        int, typer.Option(help="Prompts have token ids below it: the model's own, or less.", min=64, max=2**31)
    ] = 32_000,
    seed: Annotated[
        int, typer.Option(help="Another one makes other prompts, which no prefix cache knows from a run before.")
    ] = 0,
    api_key_variable: Annotated[
        str | None, typer.Option(help="Environment variable with the key that the server wants.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds until a request is given up.", min=0.1, max=86_400)] = 600.0,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Leave lines out that cannot be read.")
    ] = False,
    output: Annotated[TextOrJson, typer.Option("--output", "-o", help="text or json.")] = TextOrJson.TEXT,
) -> None:
    """Send the requests of a capture again, to any server that speaks OpenAI's API, at their recorded moments.

    Prompts are made up, as long as the recorded ones, with as much in common;
    answers are as long, too. A turn of a conversation waits for the one before.
    Says what came beside what was recorded.

    For example: specdecode replay drive captures/demo --url http://localhost:8000

    Ends with 0 when every request was answered, with 1 when some were not, with
    2 where nothing can be sent, and with 130 after Ctrl-C, when what was in
    flight is written down as cancelled.
    """
    try:
        address, key = Address.parse(url), _key(api_key_variable)
        recording = read_recording(trace, skip_bad_lines=skip_bad_lines)
        plan = planned(recording, time_scale, requests)
        _say_what_is_missing(recording, plan, requests)
        server = asyncio.run(find_target(address, model, recording.meta.model, key))
        drive = Drive(
            server=server,
            monitor_url=address.root,
            prompts=BlockPrompts(TokenIds(vocab_size), recording.meta.block_size or _BLOCK_TOKENS, seed),
            timeout_s=timeout,
            progress=partial(say_line, err=True) if sys.stderr.isatty() else None,
        )
        with _folder(out) as folder:
            driven = asyncio.run(_run(drive, plan, folder))
            summary = summarize(plan, driven)
            driven.client_file.rename(folder / CLIENT)
    except (RecordingError, TargetError, DocumentError) as error:
        fail(error)
    _tell(summary, server, output)
    if summary.stop_reason is not None:
        raise typer.Exit(_INTERRUPTED)
    raise typer.Exit(0 if summary.outcomes == {"completed": summary.planned} else _FAILED)


async def _run(drive: Drive, plan: Sequence[Planned], folder: Path) -> Driven:
    stop = Stop()
    stop_on_signals(stop)
    return await drive.run(plan, folder, stop)


def _tell(summary: DriveSummary, server: Server, output: TextOrJson) -> None:
    if output is TextOrJson.JSON:
        print_json(msgspec.to_builtins(summary))
        return
    say(summary_text(summary))
    if summary.first_failure is not None and re.search(r"vocab", summary.first_failure):
        say_line(f"hint: {printable(server.model)} has fewer tokens: give --vocab-size what its config.json says")


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    if out is not None:
        with new_folder(out) as folder:
            yield folder
    else:
        with tempfile.TemporaryDirectory(prefix="specdecode-drive-") as name:
            yield Path(name)


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise TargetError(f"--api-key-variable: {printable(variable)}: is not set: export it, or leave the option out")
    if not (key.isascii() and key.isprintable()):
        raise TargetError(f"--api-key-variable: {printable(variable)}: holds what no header can carry: set it again")
    return key


def _say_what_is_missing(recording: Recording, plan: Sequence[Planned], most: int | None) -> None:
    notes = []
    if recording.skipped_lines:
        notes.append(f"{recording.skipped_lines} lines that cannot be read are left out")
    if most is None and len(plan) < len(recording.requests):
        notes.append(f"{len(recording.requests) - len(plan)} records without arrival_ms are left out")
    if not any(each.request.block_hashes for each in plan):
        notes.append("no record has block_hashes: prompts have nothing in common, and no turn waits for another")
    for note in notes:
        say_line(f"note: {note}", err=True)
