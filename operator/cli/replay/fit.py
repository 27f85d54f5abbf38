"""`specdecode replay fit` and `compare`: fit an engine model to captures, and compare two recordings."""

from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from specdecode_operator.capture.trace_reader import Recording, RecordingError, read_recording
from specdecode_operator.cli.options import TextOrJson
from specdecode_operator.cli.terminal import say
from specdecode_operator.cli.text_files import replaced_whole
from specdecode_operator.problems import printable
from specdecode_operator.replay.model_file import FittedModel, Limits, decode_model, encode_model
from specdecode_operator.untrusted import UnreadableTextError

if TYPE_CHECKING:
    from specdecode_operator.replay.compare import Comparison, Figure


_OF_CAPTURE: Final = "Absent: as the capture says."

NO_NUMPY: Final = "numpy is not installed: pip install '.[replay]' in a clone"

MaxNumSeqs = Annotated[
    int | None, typer.Option(help=f"Requests in one batch at most. {_OF_CAPTURE}", min=1, max=65_536)
]
MaxNumBatchedTokens = Annotated[
    int | None, typer.Option(help=f"Tokens in one step at most. {_OF_CAPTURE}", min=1, max=2**24)
]
NumGpuBlocks = Annotated[int | None, typer.Option(help=f"Blocks of the KV cache. {_OF_CAPTURE}", min=1, max=2**32)]


def fit_command(  # noqa: PLR0913  each is an option
    traces: Annotated[
        list[Path], typer.Argument(help="Captures' folders, or traces, of one engine.", metavar="TRACE...")
    ],
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")],
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    num_gpu_blocks: NumGpuBlocks = None,
    draft_share: Annotated[
        float,
        typer.Option(
            help="Bytes of the draft's weights by those of the target's, where a model drafts: what the draft takes "
            "of a step cannot be told from one K, and the emulated engine needs it for another.",
            min=0,
            max=1,
        ),
    ] = 0.0,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Leave out lines that cannot be read.")
    ] = False,
) -> None:
    """Fit a model to captures: what replay draws steps and bursts from, under loads that were never run.

    Several captures must be of one model and one K; more loads make a model that holds for more.

    For example: specdecode replay fit captures/demo -o demo-model.json
    """
    try:
        recordings = [read_recording(path, skip_bad_lines=skip_bad_lines) for path in traces]
        model = _fitted(recordings, draft_share)
    except RecordingError as error:
        raise typer.BadParameter(str(error), param_hint="TRACE") from error
    model = with_limits(model, max_num_seqs, max_num_batched_tokens, num_gpu_blocks)
    text = encode_model(model)
    try:
        decode_model(text)
    except UnreadableTextError as error:
        raise typer.BadParameter(f"no engine is so: {error}", param_hint="TRACE") from error
    with replaced_whole(out) as stream:
        stream.write(text.decode())
    say("\n".join([f"{printable(str(out))}: {_size(model)}", *_limits_text(model.origin.limits), *_ranges_text(model)]))
    engines = {request.engine for recording in recordings for request in recording.requests}
    if len(engines) > 1:
        say(f"{len(engines)} data-parallel engines were recorded: the model is of one of them", err=True)
    if skipped := sum(each.skipped_lines for each in recordings):
        say(f"{skipped} lines could not be read and were left out", err=True)


def with_limits(
    model: FittedModel, max_num_seqs: int | None, max_num_batched_tokens: int | None, num_gpu_blocks: int | None
) -> FittedModel:
    """Return a model with the limits that options say, for those that are given."""
    given: dict[str, Any] = {
        name: value
        for name, value in (
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
            ("num_gpu_blocks", num_gpu_blocks),
        )
        if value is not None
    }
    limits = msgspec.structs.replace(model.origin.limits, **given)
    return msgspec.structs.replace(model, origin=msgspec.structs.replace(model.origin, limits=limits))


def _fitted(recordings: list[Any], draft_share: float) -> FittedModel:
    try:
        from specdecode_operator.replay.fit import fit  # noqa: PLC0415  numpy is heavy, and an extra
    except ImportError as error:
        raise typer.BadParameter(NO_NUMPY) from error
    return fit(recordings, draft_share=draft_share)


def _size(model: FittedModel) -> str:
    captures = model.origin.captures
    requests, steps = sum(each.requests for each in captures), sum(each.steps for each in captures)
    return (
        f"fitted to {requests:,} requests in {steps:,} steps of {printable(model.origin.model or 'an unnamed model')}"
    )


def _limits_text(limits: Limits) -> list[str]:
    known = {name: value for name, value in msgspec.structs.asdict(limits).items() if value is not None}
    blocks = " (num_gpu_blocks about, where no manifest says it)" if "num_gpu_blocks" in known else ""
    return [f"  limits: {', '.join(f'{name} {value}' for name, value in known.items())}{blocks}"] if known else []


def _ranges_text(model: FittedModel) -> list[str]:
    ranges = model.donors.ranges if model.donors else {}
    return [f"  {name}: {seen.least:g} to {seen.most:g}" for name, seen in ranges.items()]


class ExitCode(IntEnum):
    """What the shell gets."""

    OK = 0
    TOO_FAR = 1


def compare_command(
    first: Annotated[Path, typer.Argument(help="A capture's folder, or a trace.")],
    second: Annotated[Path, typer.Argument(help="What is held against it, such as its replay.")],
    *,
    output: Annotated[TextOrJson, typer.Option("--output", "-o", help="text or json.")] = TextOrJson.TEXT,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 where a figure is farther than it may be.")
    ] = False,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Leave out lines that cannot be read.")
    ] = False,
) -> None:
    """Say how far one recording is from another: times, throughput, burst sizes, acceptance.

    For example: specdecode replay compare captures/demo replayed
    """
    try:
        recordings = [read_recording(path, skip_bad_lines=skip_bad_lines) for path in (first, second)]
        found = _compared(*recordings)
    except RecordingError as error:
        raise typer.BadParameter(str(error)) from error
    say(msgspec.json.format(msgspec.json.encode(found)).decode() if output is TextOrJson.JSON else _as_text(found))
    if check and not found.passed:
        raise typer.Exit(ExitCode.TOO_FAR)


def _compared(first: Recording, second: Recording) -> "Comparison":
    try:
        from specdecode_operator.replay.compare import compare  # noqa: PLC0415  numpy is an extra
    except ImportError as error:
        raise typer.BadParameter(NO_NUMPY) from error
    return compare(first, second)


def _as_text(found: "Comparison") -> str:
    wide = max(len(figure.name) for figure in found.figures)
    counts = " and ".join(f"{count:,}" for count in found.requests)
    lines = [f"{printable(found.first)} against {printable(found.second)}: {counts} requests"]
    lines += [f"  {_row(figure, wide)}" for figure in found.figures]
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def _row(figure: "Figure", wide: int) -> str:
    values = f"{figure.first:>10.2f}  {figure.second:>10.2f}  {figure.unit:<8}"
    limit = "" if figure.limit is None else f"  (limit {figure.limit:g})"
    verdict = "    " if figure.limit is None else "ok  " if figure.passed else "FAR "
    return f"{verdict}{figure.name:<{wide}}  {values}  {figure.difference:>+8.2f} {figure.difference_unit}{limit}"
