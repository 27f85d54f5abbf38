"""`capture validate`, `compare`, `gate`, `report` and `push`: evaluate fetched captures and copy them to a bucket."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import msgspec
import typer

from specdecode_operator.capture.comparison.compare_arms import compare_capture
from specdecode_operator.capture.comparison.comparison_file import Arm, Comparison, Load
from specdecode_operator.capture.comparison.golden_records import NotComparableError, repetitions_of
from specdecode_operator.capture.comparison.regression import Limits, Regression, RegressionVerdict, judge
from specdecode_operator.capture.files.formats import DATA_FILES, MANIFEST, CaptureError, FileEntry
from specdecode_operator.capture.files.publish import decode_manifest, file_entry, verify
from specdecode_operator.capture.files.summary import summarize, summary_text
from specdecode_operator.capture.files.validate import Validation, find, validate_capture, validate_file
from specdecode_operator.capture.trace_reader import RecordingError
from specdecode_operator.cli.json_text import printable_json
from specdecode_operator.cli.options import ExitCode, HiddenName, TextOrJson, ended, fail, refused
from specdecode_operator.cli.terminal import say, say_line
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip


def validate_command(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            help="File of a capture (plain or .gz), folder of a capture, or folder that contains captures.",
        ),
    ],
    *,
    output: Annotated[TextOrJson, typer.Option("--output", "-o", help="Format: text or json.")] = TextOrJson.TEXT,
) -> None:
    """Validate the files of captures: report each problem with its line, and quality metrics.

    The rules match the vllm-vcr reader, so valid files can be replayed there. For a
    published capture, the checksums in its manifest are also checked.

    For example: specdecode capture validate demo/

    Exits with 0 when there are no problems, 1 when there are, 2 when a path
    contains no files to validate.
    """
    found: list[tuple[Path, Validation]] = []
    errors: list[str] = []
    for path in paths:
        try:
            targets = [(each, validate_file if each.is_file() else validate_capture) for each in _targets(path)]
            found += [(each, judge_files(each)) for each, judge_files in targets]
        except CaptureError as error:
            errors.append(str(error))
        except OSError as error:
            errors.append(f"{error.filename or path}: {error.strerror}")
    if output is TextOrJson.JSON:
        rows = [
            {
                "path": str(path),
                "passed": each.passed,
                "files": [asdict(report) for report in each.files],
                "gates": each.gates,
                "summary": _summary(path, each),
            }
            for path, each in found
        ]
        typer.echo(printable_json(msgspec.json.format(msgspec.json.encode({"validated": rows})).decode()))
    elif found:
        say("\n\n".join(_validation_text(path, each) for path, each in found))
    for message in errors:
        say_line(f"error: {message}", err=True)
    raise typer.Exit(2 if errors else int(not all(each.passed for _, each in found)))


def _targets(path: Path) -> list[Path]:
    """Return the units to validate: a file, a folder with a capture's files, or the captures and files below it."""
    if not path.exists():
        raise FileNotFoundError(0, "not found: use a file or a folder", str(path))
    if path.is_file() or any(find(path, name) for name in (MANIFEST, *DATA_FILES)):
        return [path]
    captures = [manifest.parent for manifest in sorted(path.rglob(MANIFEST))]
    files = [each for each in sorted(path.iterdir()) if each.is_file() and each.name.endswith((".jsonl", ".jsonl.gz"))]
    if not captures and not files:
        why = "contains no capture and no .jsonl or .jsonl.gz file: use another folder"
        raise FileNotFoundError(0, why, str(path))
    return captures or files


def _summary(path: Path, found: Validation) -> Any:
    """Return the summary of a capture if its trace exists, and its client file or the account of a live capture."""
    if found.trace is None or (found.client is None and found.live is None):
        return None
    return summarize(found, sum(file.stat().st_size for name in DATA_FILES if (file := find(path, name)) is not None))


def _validation_text(path: Path, found: Validation) -> str:
    lines = [f"{path}: {'ok' if found.passed else 'PROBLEMS'}"]
    for report in found.files:
        counts = [] if report.file == MANIFEST else [f"{report.lines} line{'s' * (report.lines != 1)}"]
        counts += [f"{report.broken} problem{'s' * (report.broken != 1)}"] if report.broken else []
        lines.append(f"  {report.file}: {', '.join(counts) or 'ok'}")
        for problem in report.problems:
            place = f"line {problem.line}: " if problem.line else ""
            lines.append(f"    {place}{problem.message} [{problem.rule}]")
        if report.broken > len(report.problems):
            lines.append(f"    and {report.broken - len(report.problems)} more")
        lines += [f"    note: {note}" for note in report.notes]
    for name, gate in found.gates.items():
        limit = f" (limit {gate.limit:g})" if gate.limit is not None else ""
        lines.append(f"  {'pass' if gate.passed else 'FAIL'}  {name} {gate.value:g}{limit}: {gate.why}")
    if (summary := _summary(path, found)) is not None:
        lines += [f"  {line}" for line in summary_text(summary).splitlines()]
    return "\n".join(map(printable, lines))


_ROW = "  {:<18}{:>9}{:>11}{:>9}{:>18}{:>10}{:>10}{:>10}{:>8}"
_HEAD = ("load", "running", "goodput", "change", "95 %", "TTFT P50", "TPOT P50", "TPOT P99", "accept")


class TableOrJson(StrEnum):
    """Output format."""

    TABLE = "table"
    JSON = "json"


def compare_command(
    folder: Annotated[Path, typer.Argument(help="Folder of the capture, which has one folder per arm.")],
    *,
    price: Annotated[
        float | None,
        typer.Option(
            "--price-per-gpu-hour",
            metavar="PRICE",
            min=0,
            max=1e6,
            help="Price of a GPU hour, in any currency. Adds the cost.",
        ),
    ] = None,
    output: Annotated[TableOrJson, typer.Option("--output", "-o", help="Format: table or json.")] = TableOrJson.TABLE,
) -> None:
    """Compare the arms of a capture with the first one: verdict, goodput and interval per load.

    -o json prints comparison.json, computed again from the files. The command
    uses no cluster.

    For example: specdecode capture compare captures/demo

    Exits with 0 for every verdict, 2 when the arms cannot be compared.
    """
    try:
        comparison = compare_capture(folder, price)
    except CaptureError as error:
        say(f"error: {error}", err=True)
        raise typer.Exit(ExitCode.INVALID) from error
    if output is TableOrJson.JSON:
        typer.echo(printable_json(msgspec.json.format(msgspec.json.encode(comparison), indent=2).decode()))
    else:
        say("\n".join(_lines(comparison)))


def _lines(comparison: Comparison) -> Iterator[str]:
    baseline, *others = comparison.arms
    for arm in others:
        yield f"{arm.name} against {baseline.name}: {arm.verdict}"
        yield f"  {arm.message}"
        yield _ROW.format(*_HEAD)
        for load in arm.loads:
            plain = next(each for each in baseline.loads if each.phase == load.phase)
            for each, name in ((plain, f"{clip(load.phase, 14)} *"), (load, clip(load.phase, 16))):
                yield _ROW.format(name, *_cells(each)).rstrip()
        yield from _figures(arm, priced=comparison.price_per_gpu_hour is not None)
        if comparison.slo.given:
            yield f"  within the SLO {sum(each.within_slo for each in arm.loads):,} requests"
        yield ""
    yield f"* {baseline.name}, the baseline; goodput in tokens/s, TTFT and TPOT in ms"
    yield from (f"note: {each}" for each in comparison.notes)


def _cells(load: Load) -> Iterator[str]:
    ratios = load.compared and (load.compared.ratio, load.compared.low, load.compared.high)
    ratio, low, high = ratios or (None, None, None)
    ttft, tpot = load.ttft_ms, load.tpot_ms
    yield from ("-" if each is None else f"{each:,.1f}" for each in (load.running, load.goodput))
    yield "" if ratio is None else f"{ratio - 1:+.1%}"
    yield "" if low is None or high is None else f"{low - 1:+.1%} {high - 1:+.1%}"
    yield "-" if ttft is None else f"{ttft.p50:,.1f}"
    yield from ("-" if each is None else f"{each:,.2f}" for each in (tpot and tpot.p50, tpot and tpot.p99))
    yield "" if load.acceptance is None else f"{load.acceptance:.0%}"


def _figures(arm: Arm, *, priced: bool) -> Iterator[str]:
    drafting, cache = arm.drafting, arm.prefix_cache
    if drafting is not None:
        positions = " ".join(f"{share:.0%}" for share in drafting.per_position)
        most = "" if drafting.largest_block_efficiency is None else f" of {drafting.largest_block_efficiency}"
        yield (
            f"  acceptance {drafting.acceptance:.1%}, by position {positions}; "
            f"{drafting.block_efficiency:.2f}{most} tokens per verification"
        )
    if cache is not None and cache.hit_rate is not None:
        tax = (
            "" if cache.tax_tokens is None else f"; prefix-cache tax {cache.tax_tokens:,} tokens, {cache.tax_percent} %"
        )
        yield f"  prefix cache {cache.hit_rate:.1%} hits{tax}"
    costs = []
    for each in arm.loads:
        if each.gpu_seconds_per_1000_tokens is not None:
            price = "" if each.cost_per_1000_tokens is None else f" ({each.cost_per_1000_tokens:.3g})"
            costs.append(f"{each.gpu_seconds_per_1000_tokens:.3g} s{price} in {each.phase}")
    if costs:
        yield f"  GPU time per 1,000 tokens{' (and cost)' if priced else ''} {', '.join(costs)}"


_MOST_PERCENT: Final = 90


def gate_command(  # noqa: PLR0913  options of a command
    golden: Annotated[Path, typer.Argument(help="Folder of the golden capture.")],
    found: Annotated[Path, typer.Argument(metavar="NEW", help="Folder of a capture with the same workload and seed.")],
    *,
    goodput: Annotated[int, typer.Option(help="Maximum loss of goodput in percent.", min=1, max=_MOST_PERCENT)] = 5,
    acceptance: Annotated[
        int, typer.Option(help="Maximum loss of acceptance in percent.", min=1, max=_MOST_PERCENT)
    ] = 10,
    step_time: Annotated[
        int, typer.Option(help="Maximum increase of step time in percent.", min=1, max=_MOST_PERCENT)
    ] = 5,
    latency: Annotated[
        int, typer.Option(help="Maximum increase of TTFT and TPOT in percent.", min=1, max=_MOST_PERCENT)
    ] = 20,
    output: Annotated[TextOrJson, typer.Option("--output", "-o", help="Format: text or json.")] = TextOrJson.TEXT,
) -> None:
    """Check whether an engine performs as well as in an earlier capture of the same prompts.

    It compares goodput, acceptance by position, step time by running requests,
    latency and, if tokens were recorded, greedy responses, each with an interval.
    The gate fails if a loss can be as large as its limit. A loss of more than
    half the limit is a regression, unless chance explains it. spec.rollout.gate
    uses the same check.

    For example: specdecode capture gate captures/golden captures/new

    Exits with 0 when the gate passes, 1 when the engine is worse or the captures
    are too short to decide, 2 when they cannot be compared.
    """
    limits = Limits(goodput=goodput, acceptance=acceptance, step_time=step_time, latency=latency)
    with refused(None, NotComparableError):
        regression = judge(repetitions_of(golden), repetitions_of(found), limits)
    as_json = output is TextOrJson.JSON
    say(msgspec.json.format(msgspec.json.encode(regression)).decode() if as_json else _gate_as_text(regression))
    raise typer.Exit(int(regression.verdict is not RegressionVerdict.HOLDS))


def _gate_as_text(regression: Regression) -> str:
    rows = [("figure", "golden", "new", "change", "interval", "may be lost", "verdict")]
    for each in regression.figures:
        golden, found = ("" if side is None else f"{side:,.4g}" for side in (each.golden, each.found))
        change = "" if each.change_percent is None else f"{each.change_percent:+.1f} %"
        interval = ""
        if each.low_percent is not None and each.high_percent is not None:
            interval = f"{each.low_percent:+.1f} to {each.high_percent:+.1f} %"
        limit = "" if each.loss_limit_percent is None else f"{each.loss_limit_percent:g} %"
        verdict = each.verdict.value if each.verdict else "not known"
        rows.append((f"{each.name} ({each.unit})", golden, found, change, interval, limit, verdict))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others, last in rows:
        middle = (cell.rjust(width) for cell, width in zip(others, widths[1:-1], strict=True))
        lines.append("  ".join([first.ljust(widths[0]), *middle, last]).rstrip())
    notes = [f"note: {each}" for each in regression.notes]
    return "\n".join(map(printable, [*lines, "", regression.message, *notes]))


_SHOWN_WARNINGS = 10


def report_command(  # noqa: PLR0913  each is an option
    captures: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Folder of a capture, folder that contains captures, or a trace."),
    ],
    *,
    replayed: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="Capture of a replay, to compare with. May be repeated.")
    ] = None,
    out: Annotated[
        Path,
        typer.Option("--out", HiddenName("--output"), HiddenName("-o"), metavar="FILE", help="HTML file to write."),
    ] = Path("report.html"),
    png: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for figures as PNG files.")] = None,
    svg: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for figures as SVG files.")] = None,
    perfetto: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON file of requests and counters for ui.perfetto.dev.")
    ] = None,
) -> None:
    """Draw captures into one HTML page: bursts, acceptance, latency, KV cache, requests.

    Several captures share the same figures. Figures without data are omitted with
    the reason. Lines that cannot be parsed are skipped and listed.

    For example: specdecode capture report captures/demo --out report.html
    """
    try:
        from specdecode_operator.capture.report.report import Outputs, ReportError, make_report  # noqa: PLC0415  heavy
    except ImportError:
        fail("matplotlib is not installed: pip install '.[plot]' in a clone")
    with ended(RecordingError, ReportError):
        made = make_report(captures, replayed or [], Outputs(out, png=png, svg=svg, perfetto=perfetto))
    for warning in made.warnings[:_SHOWN_WARNINGS]:
        say(f"warning: {warning}", err=True)
    for each in made.left_out:
        say(f"left out: {each.title}: {each.why}")
    say(f"{out}: {len(made.pictures)} figure{'s' * (len(made.pictures) != 1)}")
    for what in (png, svg, perfetto):
        if what is not None:
            say(f"{what}: written")


if TYPE_CHECKING:
    from obstore.store import ObjectStore, S3Config

_COMPARISON: Final = "comparison.json"
"""Comparison of arms, in the folder above theirs. Manifests do not list it."""
_URL: Final = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/+([A-Za-z0-9._=/-]*))?")
_ENDPOINT: Final = re.compile(r"https?://[^/@?#\s]+/?")
_PIECE_BYTES: Final = 1 << 20
_PART_BYTES: Final = 16 << 20
_MOST_PARTS: Final = 10_000  # limit of S3
_RETRIES: Final = 4
_RETRY_TIMEOUT: Final = timedelta(seconds=60)


class PushFolderError(Exception):
    """The folder holds no complete capture. The message is one line with a fix."""


class PushError(Exception):
    """The upload failed. The message is one line with a fix."""


class Upload(NamedTuple):
    """A file and its place below the prefix."""

    key: str
    path: Path
    entry: FileEntry


class _Files(msgspec.Struct):
    files: dict[str, FileEntry]


def uploads(folder: Path) -> list[Upload]:
    """Return the files of a capture after checking them against its manifests. Manifests come last.

    Raises
    ------
    PushFolderError
        If the folder has no manifest, or a file differs from its manifest.
    """
    parts = (
        [folder] if (folder / MANIFEST).is_file() else sorted(path.parent for path in folder.glob(f"*/*/{MANIFEST}"))
    )
    if not parts:
        raise PushFolderError(f"{folder}: contains no {MANIFEST}: use a folder that specdecode capture fetch wrote")
    data, manifests = list[Upload](), list[Upload]()
    for part in parts:
        if faults := verify(part):
            raise PushFolderError(f"{part}: {faults[0]}: fetch the capture again")
        below = "" if part == folder else f"{part.relative_to(folder).as_posix()}/"
        found = decode_manifest(part / MANIFEST, _Files).files
        if compressed := sorted(name for name in found if not (part / name).is_file()):
            raise PushFolderError(f"{part}: {compressed[0]} is compressed: decompress it, as the manifest names it")
        data += [Upload(f"{below}{name}", part / name, entry) for name, entry in sorted(found.items())]
        manifests.append(_whole(f"{below}{MANIFEST}", part / MANIFEST))
    comparison = folder / _COMPARISON
    above = [_whole(_COMPARISON, comparison)] if parts != [folder] and comparison.is_file() else []
    return [*data, *above, *manifests]


def _whole(key: str, path: Path) -> Upload:
    return Upload(key, path, file_entry(path))


def push(store: "ObjectStore", files: list[Upload]) -> Iterator[tuple[Upload, bool]]:
    """Upload files that are not in the store. Yield each with whether it was uploaded, after its copy is verified.

    Raises
    ------
    PushError
        If an object has other content, or an upload fails. Manifests come last, so there is none after a failure.
    """
    import obstore  # noqa: PLC0415  an optional dependency

    # Another capture's manifest may not describe files of this one.
    for each in files:
        if each.path.name == MANIFEST:
            _is_there(store, each)
    for each in files:
        uploaded = not _is_there(store, each)
        if uploaded:
            part_bytes = max(_PART_BYTES, -(-each.entry.bytes // _MOST_PARTS))
            with _reported(each.key):
                obstore.put(store, each.key, each.path, chunk_size=part_bytes, max_concurrency=4)
            if not _is_there(store, each):
                raise PushError(f"{each.key}: is missing after the upload: check the rules of the bucket")
        yield each, uploaded


def _is_there(store: "ObjectStore", file: Upload) -> bool:
    """Return whether the store has an object with the content of the file, which is read to compare checksums."""
    import obstore  # noqa: PLC0415  an optional dependency

    digest, size_bytes = hashlib.sha256(), 0
    with _reported(file.key):
        try:
            size_bytes = obstore.head(store, file.key)["size"]
            if size_bytes == file.entry.bytes:
                for piece in obstore.get(store, file.key).stream(min_chunk_size=_PIECE_BYTES):
                    digest.update(piece)
        except (FileNotFoundError, obstore.exceptions.NotFoundError):
            return False
    if size_bytes != file.entry.bytes or digest.hexdigest() != file.entry.sha256:
        raise PushError(f"{file.key}: exists with other content: use another prefix, or delete the object")
    return True


@contextmanager
def _reported(key: str) -> Iterator[None]:
    from obstore.exceptions import (  # noqa: PLC0415  as above
        BaseError,
        NotFoundError,
        PermissionDeniedError,
        UnauthenticatedError,
    )

    try:
        yield
    except (FileNotFoundError, NotFoundError) as error:
        raise PushError(f"{key}: the bucket does not exist: create it, or use another") from error
    except (PermissionDeniedError, UnauthenticatedError, PermissionError) as error:
        raise PushError(f"{key}: permission denied: set credentials that may read and write the prefix") from error
    except (BaseError, OSError) as error:
        why = printable(str(error).strip().partition("\n")[0])
        raise PushError(f"{key}: {why}: push again to resume") from error


def push_command(
    folder: Annotated[Path, typer.Argument(help="Folder of a fetched capture.")],
    destination: Annotated[str, typer.Argument(metavar="s3://BUCKET/PREFIX", help="Bucket and prefix of the copy.")],
    *,
    endpoint_url: Annotated[
        str | None, typer.Option(metavar="URL", help="S3 server. Defaults to AWS_ENDPOINT_URL, then to AWS.")
    ] = None,
) -> None:
    """Copy a fetched capture to a bucket, and verify the copy.

    Files are checked against the manifest before the upload, and read back after
    it. Files that the bucket already has are not uploaded again, so that a repeated
    command resumes. The manifest comes last. Other content is never overwritten.

    Credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, from a web
    identity token, or from the metadata service. It needs the extra s3.

    For example: specdecode capture push captures/demo s3://bucket/captures/demo

    Exits with 0 when the copy is complete, 1 when an upload fails, 2 when the
    folder holds no complete capture.
    """
    found = _URL.fullmatch(destination)
    if found is None or {".", ".."} & set((found[2] or "").split("/")):
        fail(f"{destination}: is not a bucket with a prefix: use s3://BUCKET/PREFIX")
    if endpoint_url is not None and not _ENDPOINT.fullmatch(endpoint_url):
        fail("--endpoint-url: is not the URL of a server: use http://HOST:PORT or https://HOST")
    bucket, prefix = found[1], (found[2] or "").strip("/")
    try:
        from obstore.store import S3Store  # noqa: PLC0415  an optional dependency
    except ImportError:
        fail("obstore is not installed: pip install '.[s3]' in a clone")
    with ended(PushFolderError):
        files = uploads(folder)
    config: S3Config = {"checksum_algorithm": "SHA256"}
    if endpoint_url is not None:
        config["endpoint"] = endpoint_url
    try:
        with _reported("configuration"):
            store = S3Store(
                bucket,
                prefix=prefix or None,
                config=config,
                client_options={"allow_http": True},
                retry_config={"max_retries": _RETRIES, "retry_timeout": _RETRY_TIMEOUT},
            )
        uploaded = 0
        for file, is_new in push(store, files):
            uploaded += is_new
            say_line(f"{file.key}: {'uploaded' if is_new else 'already there'}, {file.entry.bytes:,} bytes")
    except PushError as error:
        say_line(f"error: {destination}: {error}", err=True)
        raise typer.Exit(1) from error
    say_line(f"{destination}: {len(files)} files, {uploaded} uploaded, all verified")
