"""`specdecode replay fit` and `compare`: fit an engine model to captures, and compare two recordings."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from specdecode_operator.capture.trace_reader import RecordingError, read_recording
from specdecode_operator.cli.options import HiddenName, TextOrJson, refused
from specdecode_operator.cli.terminal import say
from specdecode_operator.cli.text_files import replaced_whole
from specdecode_operator.problems import printable
from specdecode_operator.replay.model_file import FittedModel, decode_model, encode_model
from specdecode_operator.untrusted import UnreadableTextError

if TYPE_CHECKING:
    from specdecode_operator.replay.compare import Comparison


NO_NUMPY: Final = "numpy is not installed: pip install '.[replay]' in a clone"

MaxNumSeqs = Annotated[
    int | None,
    typer.Option(help="Maximum number of requests per batch. Defaults to the value in the capture.", min=1, max=65_536),
]
MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option(help="Maximum number of tokens per step. Defaults to the value in the capture.", min=1, max=2**24),
]
NumGpuBlocks = Annotated[
    int | None, typer.Option(help="Number of KV cache blocks. Defaults to the value in the capture.", min=1, max=2**32)
]


def fit_command(  # noqa: PLR0913  each is an option
    traces: Annotated[
        list[Path], typer.Argument(help="Folders of captures, or traces, of one engine.", metavar="TRACE...")
    ],
    *,
    out: Annotated[Path, typer.Option("--out", HiddenName("-o"), help="File to write.")],
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    num_gpu_blocks: NumGpuBlocks = None,
    draft_share: Annotated[
        float,
        typer.Option(
            help="Weight bytes of the draft model divided by weight bytes of the target. The emulated engine "
            "needs it for a K other than the captured one.",
            min=0,
            max=1,
        ),
    ] = 0.0,
    skip_bad_lines: Annotated[bool, typer.Option("--skip-bad-lines", help="Skip lines that cannot be parsed.")] = False,
) -> None:
    """Fit a model of an engine to captures, so that replay can simulate other loads.

    All captures must have the same model and the same K. The fitted model is valid for the range of loads in them.

    For example: specdecode replay fit captures/demo --out demo-model.json
    """
    try:
        from specdecode_operator.replay.fit import fit  # noqa: PLC0415  numpy is heavy, and an extra
    except ImportError as error:
        raise typer.BadParameter(NO_NUMPY) from error
    with refused("TRACE", RecordingError):
        recordings = [read_recording(path, skip_bad_lines=skip_bad_lines) for path in traces]
        model = fit(recordings, draft_share=draft_share)
    model = with_limits(model, max_num_seqs, max_num_batched_tokens, num_gpu_blocks)
    text = encode_model(model)
    try:
        decode_model(text)
    except UnreadableTextError as error:
        raise typer.BadParameter(f"the captures result in an invalid model: {error}", param_hint="TRACE") from error
    with replaced_whole(out) as stream:
        stream.write(text.decode())
    captures, name = model.origin.captures, printable(model.origin.model or "an unnamed model")
    requests, steps = sum(each.requests for each in captures), sum(each.steps for each in captures)
    lines = [f"{printable(str(out))}: fitted to {requests:,} requests in {steps:,} steps of {name}"]
    limits = msgspec.structs.asdict(model.origin.limits)
    if known := ", ".join(f"{limit} {value}" for limit, value in limits.items() if value is not None):
        about = limits["num_gpu_blocks"] is not None
        lines.append(f"  limits: {known}{' (num_gpu_blocks is approximate if not in a manifest)' * about}")
    ranges = model.donors.ranges if model.donors else {}
    lines += (f"  {figure}: {seen.least:g} to {seen.most:g}" for figure, seen in ranges.items())
    say("\n".join(lines))
    engines = {request.engine for recording in recordings for request in recording.requests}
    if len(engines) > 1:
        say(f"{len(engines)} engines were recorded: the model describes one of them", err=True)
    shares = {recording.meta.sample_percent for recording in recordings} - {None}
    if shares:
        say(
            f"only {min(filter(None, shares))} % of the requests were recorded: the others count in steps alone",
            err=True,
        )
    if skipped := sum(each.skipped_lines for each in recordings):
        say(f"skipped {skipped} lines that cannot be parsed", err=True)


def with_limits(model: FittedModel, *limits: int | None) -> FittedModel:
    """Override max_num_seqs, max_num_batched_tokens and num_gpu_blocks of a model. None keeps a limit."""
    names = ("max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks")
    given: dict[str, Any] = {name: value for name, value in zip(names, limits, strict=True) if value is not None}
    changed = msgspec.structs.replace(model.origin.limits, **given)
    return msgspec.structs.replace(model, origin=msgspec.structs.replace(model.origin, limits=changed))


def compare_command(
    first: Annotated[Path, typer.Argument(help="Folder of a capture, or a trace.")],
    second: Annotated[Path, typer.Argument(help="Recording to compare with the first, such as its replay.")],
    *,
    output: Annotated[TextOrJson, typer.Option("--output", "-o", help="Format: text or json.")] = TextOrJson.TEXT,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 if a figure differs by more than its limit.")
    ] = False,
    skip_bad_lines: Annotated[bool, typer.Option("--skip-bad-lines", help="Skip lines that cannot be parsed.")] = False,
) -> None:
    """Compare two recordings: latencies, throughput, burst sizes and acceptance.

    For example: specdecode replay compare captures/demo replayed
    """
    try:
        from specdecode_operator.replay.compare import compare  # noqa: PLC0415  numpy is an extra
    except ImportError as error:
        raise typer.BadParameter(NO_NUMPY) from error
    with refused(None, RecordingError):
        found = compare(*(read_recording(path, skip_bad_lines=skip_bad_lines) for path in (first, second)))
    say(msgspec.json.format(msgspec.json.encode(found)).decode() if output is TextOrJson.JSON else _as_text(found))
    if check and not found.passed:
        raise typer.Exit(1)


def _as_text(found: "Comparison") -> str:
    wide = max(len(figure.name) for figure in found.figures)
    counts = " and ".join(f"{count:,}" for count in found.requests)
    lines = [f"{printable(found.first)} against {printable(found.second)}: {counts} requests"]
    for each in found.figures:
        limit = "" if each.limit is None else f"  (limit {each.limit:g})"
        verdict = "    " if each.limit is None else "ok  " if each.passed else "FAR "
        values = f"{each.first:>10.2f}  {each.second:>10.2f}  {each.unit:<8}"
        lines.append(
            f"  {verdict}{each.name:<{wide}}  {values}  {each.difference:>+8.2f} {each.difference_unit}{limit}"
        )
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])
