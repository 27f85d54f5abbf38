"""`specdecode replay drive`: send recorded arrivals to a real server."""

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from specdecode_operator.capture.files.formats import CLIENT
from specdecode_operator.capture.load.prompts import BlockPrompts, TokenIds
from specdecode_operator.capture.load.shutdown import Stop, stop_on_signals
from specdecode_operator.capture.trace_reader import Recording, RecordingError, read_recording
from specdecode_operator.cli.options import TextOrJson, ended
from specdecode_operator.cli.outputs import print_json
from specdecode_operator.cli.terminal import say, say_line
from specdecode_operator.cli.text_files import DocumentError, new_folder
from specdecode_operator.problems import printable
from specdecode_operator.replay import drive as driving
from specdecode_operator.replay.model_file import BLOCK_TOKENS


def drive_command(  # noqa: PLR0913  each is an option
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Folder of a capture, or a trace.")],
    *,
    url: Annotated[str, typer.Option(help="Server with OpenAI's API, such as http://localhost:8000.")],
    model: Annotated[
        str | None,
        typer.Option(help="Model name on the server. Defaults to the recorded name, or to the only model served."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="New folder for client.jsonl. It must not exist.")] = None,
    time_scale: Annotated[
        float, typer.Option(help="Factor for the time between arrivals: 0.5 doubles the load.", min=0, max=1000)
    ] = 1.0,
    requests: Annotated[int | None, typer.Option(help="Send only the first N requests.", min=1)] = None,
    vocab_size: Annotated[
        int,
        typer.Option(
            help="Upper bound of token ids in prompts. At most the model's vocabulary size.", min=64, max=2**31
        ),
    ] = 32_000,
    seed: Annotated[
        int, typer.Option(help="Seed of the prompts. Change it to avoid prefix cache hits from earlier runs.")
    ] = 0,
    api_key_variable: Annotated[
        str | None, typer.Option(help="Environment variable with the API key of the server.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Timeout of a request in seconds.", min=0.1, max=86_400)] = 600.0,
    skip_bad_lines: Annotated[bool, typer.Option("--skip-bad-lines", help="Skip lines that cannot be parsed.")] = False,
    output: Annotated[TextOrJson, typer.Option("--output", "-o", help="Format: text or json.")] = TextOrJson.TEXT,
) -> None:
    """Send the requests of a capture to a server with OpenAI's API, at their recorded times.

    Prompts are generated with the recorded lengths and shared prefixes, and
    responses have the recorded lengths. A turn of a conversation waits for the
    previous turn. The results are printed next to the recorded ones.

    For example: specdecode replay drive captures/demo --url http://localhost:8000

    Exits with 0 when every request was answered, 1 when some were not, 2 when no
    request can be sent, and 130 after Ctrl-C. Unfinished requests are then
    recorded as cancelled.
    """
    with ended(RecordingError, driving.TargetError, DocumentError):
        address, key = driving.Address.parse(url), _key(api_key_variable)
        recording = read_recording(trace, skip_bad_lines=skip_bad_lines)
        plan = driving.planned(recording, time_scale, requests)
        for note in _notes(recording, plan, requests):
            say_line(f"note: {note}", err=True)
        server = asyncio.run(driving.find_target(address, model, recording.meta.model, key))
        prompts = BlockPrompts(TokenIds(vocab_size), recording.meta.block_size or BLOCK_TOKENS, seed)
        progress = partial(say_line, err=True) if sys.stderr.isatty() else None
        drive = driving.Drive(
            server=server, monitor_url=address.root, prompts=prompts, timeout_s=timeout, progress=progress
        )
        with tempfile.TemporaryDirectory(prefix="specdecode-drive-") if out is None else new_folder(out) as folder:
            driven = asyncio.run(_run(drive, plan, Path(folder)))
            summary = driving.summarize(plan, driven)
            driven.client_file.rename(Path(folder) / CLIENT)
    if output is TextOrJson.JSON:
        print_json(msgspec.to_builtins(summary))
    else:
        say(driving.summary_text(summary))
        if summary.first_failure is not None and "vocab" in summary.first_failure:
            say_line(f"hint: {printable(server.model)} has fewer tokens: set --vocab-size to its vocab_size")
    if summary.stop_reason is not None:
        raise typer.Exit(130)  # as shells report SIGINT
    raise typer.Exit(int(summary.outcomes != {"completed": summary.planned}))


async def _run(drive: driving.Drive, plan: Sequence[driving.Planned], folder: Path) -> driving.Driven:
    stop = Stop()
    stop_on_signals(stop)
    return await drive.run(plan, folder, stop)


def _notes(recording: Recording, plan: Sequence[driving.Planned], most: int | None) -> Iterator[str]:
    if recording.skipped_lines:
        yield f"skipped {recording.skipped_lines} lines that cannot be parsed"
    if most is None and len(plan) < len(recording.requests):
        yield f"skipped {len(recording.requests) - len(plan)} records without arrival_ms"
    if not any(each.request.block_hashes for each in plan):
        yield "no record has block_hashes: prompts share no prefixes, and turns do not wait for each other"


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key, name = os.environ.get(variable, "").strip(), f"--api-key-variable: {printable(variable)}"
    if not key:
        raise driving.TargetError(f"{name}: is not set: export it, or omit the option")
    if not (key.isascii() and key.isprintable()):
        raise driving.TargetError(f"{name}: contains characters that are invalid in an HTTP header: set it again")
    return key
