"""Validate the files of a capture: rules for each line, quality gates, notes on engine and prompts.

Reads every file once, line by line, plain or gzip, in constant memory except for one number per request and
measure. Notes say that the vLLM was not tested with the recorder or is not the planned version, and that acceptance
measured with random prompts does not carry over.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from specdecode_operator.capture.files.accounting import Accounting, account, gates, missing_steps
from specdecode_operator.capture.files.formats import (
    ABORTED,
    CLIENT,
    GZIP_SUFFIX,
    MANIFEST,
    PART_SUFFIX,
    STEP_STATS,
    TRACE,
    AbortedRecord,
    BrokenGzipError,
    CaptureError,
    ClientRecord,
    EngineCounters,
    Gate,
    Line,
    Manifest,
    NoTrailerError,
    SegmentEntry,
    TraceRecord,
    read_lines,
)
from specdecode_operator.capture.files.publish import verify
from specdecode_operator.capture.files.totals import ClientTotals, StepTotals, TraceTotals
from specdecode_operator.capture.files.trace_rules import (
    BrokenRule,
    UnreadableLineError,
    broken_rules,
    decode,
    decode_meta,
    decode_record,
    decode_step,
    is_meta,
)
from specdecode_operator.capture.recorder.vllm_internals import TRIED
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip
from specdecode_operator.version import __version__, is_newer
from specdecode_operator.vllm.versions import version_of_engine

_LONGEST_VERSION = 64


def engine_notes(vllm: str, *, recorder_tried: bool, context: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each doubt; ``context`` is what the operator gave."""
    version, notes = _short(vllm), []
    if not recorder_tried:
        notes.append(
            f"nobody tried the recorder with vLLM {version}: it recorded because all that it uses of the engine is as"
            f" in {TRIED}, with which it was tried"
        )
    planned, said = context.get("engine_version"), version_of_engine(vllm)
    if isinstance(planned, str) and said not in (None, planned):
        notes.append(
            f"the engine is vLLM {version}, and was planned and started as spec.engine.version"
            f" {_short(planned)} of its deployment"
        )
    return notes


def maker_note(specdecode: str) -> list[str]:
    """Say of files that a newer operator's pod made that they may hold more than is read here."""
    if not is_newer(specdecode, __version__):
        return []
    return [f"made by {_short(specdecode)}, newer than this {__version__}, which passes over what it does not know"]


def engine_status(manifest: Manifest) -> dict[str, Any]:
    """Return what ``status.summary`` of a SpecDecodeCapture says of the engine."""
    notes = engine_notes(manifest.vllm, recorder_tried=manifest.recorder_tried, context=manifest.context)
    return {"engineVersion": _short(manifest.vllm)} | ({"engineNotes": notes} if notes else {})


def _short(version: str) -> str:
    return clip(printable(version), _LONGEST_VERSION)


RANDOM_PROMPTS: Final = (
    "the prompts are random tokens (workload.prompts): times and memory hold for other prompts of these lengths,"
    " acceptance does not: 0.13 to 0.27 is usual, and more where a model repeats itself; decide by prompts of your own"
)
_TRACE: Final = "Trace"


def are_random(workload: Mapping[str, Any]) -> bool:
    """Whether the prompts of a manifest's workload are; one without prompts has the usual ones, which are."""
    prompts = workload.get("prompts", {"synthetic": {}})
    if not isinstance(prompts, Mapping):
        return False
    dataset = prompts.get("dataset")
    return prompts.get("synthetic") is not None or (isinstance(dataset, Mapping) and dataset.get("format") == _TRACE)


def prompt_notes(workload: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    """Return the doubt about acceptance that was measured with random prompts, if it was; from a manifest's parts."""
    return [RANDOM_PROMPTS] if summary.get("speculation") and are_random(workload) else []


def prompt_status(manifest: Manifest) -> dict[str, Any]:
    """Return what ``status.summary`` of a SpecDecodeCapture says of the prompts."""
    notes = prompt_notes(manifest.workload, manifest.summary)
    return {"promptNotes": notes} if notes else {}


SHOWN: Final = 20
"""Problems of one file that are named; the rest is counted."""

_RECORD: Final = msgspec.json.Decoder(TraceRecord)
_CLIENT: Final = msgspec.json.Decoder(ClientRecord)
_ABORTED: Final = msgspec.json.Decoder(AbortedRecord)


@dataclass(frozen=True)
class FileProblem:
    """What is wrong with a line, or with a whole file (line 0)."""

    file: str
    line: int
    rule: str
    message: str


@dataclass
class FileReport:
    """One file and what is wrong with it."""

    file: str
    kind: str  # what it holds: trace, step-stats, client or aborted
    lines: int = 0
    broken: int = 0
    problems: list[FileProblem] = field(default_factory=list)  # the first of them; all are counted in `broken`
    notes: list[str] = field(default_factory=list)  # what no reader refuses but somebody should know

    def add(self, line: int, broken: BrokenRule) -> None:
        """Take one problem."""
        self.broken += 1
        if len(self.problems) < SHOWN:
            self.problems.append(FileProblem(self.file, line, broken.rule, broken.message))


@dataclass
class Validation:
    """The outcome."""

    files: list[FileReport] = field(default_factory=list)
    gates: dict[str, Gate] = field(default_factory=dict)
    # What was added up on the way; absent without the file.
    trace: TraceTotals | None = None
    steps: StepTotals | None = None
    client: ClientTotals | None = None
    accounting: Accounting | None = None

    @property
    def problems(self) -> list[FileProblem]:
        """Return what is wrong with files, and the gates that did not pass."""
        failed = [FileProblem(name, 0, "gate", gate.why) for name, gate in self.gates.items() if not gate.passed]
        return [problem for report in self.files for problem in report.problems] + failed

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def validate_capture(
    folder: Path,
    segments: list[SegmentEntry] | None = None,
    counters: EngineCounters | None = None,
    scratch: Path | None = None,
    *,
    steps_wanted: bool = False,
) -> Validation:
    """Validate the files in a folder: of a published capture, of an attempt (``.part``), or from anywhere else.

    ``segments``, ``counters`` and ``steps_wanted`` (``record.stepStats``) are taken from the manifest of a published
    capture. ``scratch`` is the folder to sort in; absent: the system's for temporary files.
    """
    found = Validation()
    if (folder / MANIFEST).exists():
        report = FileReport(MANIFEST, "manifest", lines=1)
        for fault in verify(folder):
            report.add(0, BrokenRule("manifest", fault))
        found.files.append(report)
        if not report.broken and (manifest := _recorded(folder / MANIFEST, report)) is not None:
            segments, counters = manifest.segments, manifest.engine_counters
            steps_wanted = wants_steps(manifest.record)
            report.notes += maker_note(manifest.specdecode)
            report.notes += engine_notes(
                manifest.vllm, recorder_tried=manifest.recorder_tried, context=manifest.context
            )
    for name, check in _CHECKS.items():
        if (path := find(folder, name)) is not None:
            check(path, found)
    _take_accounting(folder, found, scratch)
    found.gates = gates(found.trace, found.steps, found.accounting, segments, counters)
    if steps_wanted and found.trace is not None:
        found.gates["missing_steps"] = missing_steps(found.trace, found.steps)
    return found


def wants_steps(record: Mapping[str, Any]) -> bool:
    """Whether a capture's ``spec.record`` asks for step statistics, which is the default."""
    return bool(record.get("stepStats", True))


def validate_file(path: Path) -> Validation:
    """Validate one file; its first line says of which kind it is.

    Raises
    ------
    CaptureError
        When it is none that a capture has.
    """
    found = Validation()
    _CHECKS[_kind(path)](path, found)
    found.gates = gates(found.trace, found.steps, None, None)
    return found


def find(folder: Path, name: str) -> Path | None:
    """Return a file of a capture under its published name, compressed, or not yet published."""
    return next(
        (path for suffix in ("", GZIP_SUFFIX, PART_SUFFIX) if (path := folder / f"{name}{suffix}").exists()), None
    )


class _Recorded(msgspec.Struct):
    """What a manifest tells that the files do not."""

    segments: list[SegmentEntry] | None = None
    engine_counters: EngineCounters | None = None
    record: dict[str, Any] = {}
    vllm: str = ""
    recorder_tried: bool = True
    specdecode: str = ""
    context: dict[str, Any] = {}


def _recorded(path: Path, report: FileReport) -> _Recorded | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Recorded)
    except msgspec.DecodeError as error:
        report.add(1, BrokenRule("manifest", f"{MANIFEST} cannot be read: {error}"))
        return None


def _take_accounting(folder: Path, found: Validation, scratch: Path | None) -> None:
    client, trace = find(folder, CLIENT), find(folder, TRACE)
    readable = not any(report.broken for report in found.files if report.kind in (CLIENT, TRACE, ABORTED))
    if client is None or trace is None or not readable:
        return
    with tempfile.TemporaryDirectory(prefix="specdecode-", dir=scratch) as place:
        found.accounting = account(client, trace, find(folder, ABORTED), Path(place))


def _kind(path: Path) -> str:
    """Tell the kind by the fields of the first line; an empty file by its name."""
    try:
        first = next(read_lines(path), None)
        value = decode(msgspec.json.Decoder(), first.text) if first else None
    except (UnreadableLineError, NoTrailerError, BrokenGzipError):
        value = None
    if isinstance(value, dict):
        for kind, names in _TELLING.items():
            if any(name in value for name in names):
                return kind
    for kind in _TELLING:
        if kind.removesuffix(".jsonl") in path.name:
            return kind
    known = ", ".join(_TELLING)
    raise CaptureError("UnknownFile", f"{path}: is no file of a capture: name one like {known}, or a folder")


_TELLING: Final = {
    STEP_STATS: ("scheduler",),
    CLIENT: ("outcome",),
    TRACE: ("meta", "ttft_ms", "output_tokens"),
    ABORTED: ("ended_by",),
}


def _check_trace(path: Path, found: Validation) -> None:
    report, totals = FileReport(path.name, TRACE), TraceTotals()
    for line in _lines(path, report):
        try:
            if report.lines == 1 and is_meta(line.text):
                totals.meta = decode_meta(line.text)
                continue
            record = decode(_RECORD, line.text) if report.lines == 1 else decode_record(_RECORD, line.text)
        except UnreadableLineError as error:
            report.add(line.number, _torn_or(line, error.broken))
            continue
        broken = list(broken_rules(record))
        for each in broken:
            report.add(line.number, each)
        if not broken:
            totals.add(record)
    _note_what_replay_misses(report, totals)
    found.files.append(report)
    found.trace = totals


def _note_what_replay_misses(report: FileReport, totals: TraceTotals) -> None:
    if not totals.records and report.broken:
        return  # What records there are is not known.
    if not totals.records:
        report.notes.append("holds no record: nothing can be replayed from it")
    elif not totals.with_arrival:
        report.notes.append("no record has arrival_ms: replay by arrival is not possible")


def _check_steps(path: Path, found: Validation) -> None:
    report, totals = FileReport(path.name, STEP_STATS), StepTotals()
    for line in _lines(path, report):
        try:
            totals.add(decode_step(line.text))
        except UnreadableLineError as error:
            report.add(line.number, _torn_or(line, error.broken))
    if not totals.steps and not report.broken:
        report.notes.append("holds no step: statistics were not recorded")
    found.files.append(report)
    found.steps = totals


def _check_client(path: Path, found: Validation) -> None:
    totals = ClientTotals()
    found.files.append(_check(path, CLIENT, _CLIENT, totals.add))
    found.client = totals


def _check_aborted(path: Path, found: Validation) -> None:
    found.files.append(_check(path, ABORTED, _ABORTED, lambda _: None))


def _check(path: Path, kind: str, decoder: "msgspec.json.Decoder[Any]", take: Callable[..., None]) -> FileReport:
    report = FileReport(path.name, kind)
    for line in _lines(path, report):
        try:
            take(decode(decoder, line.text))
        except UnreadableLineError as error:
            report.add(line.number, _torn_or(line, error.broken))
    return report


_CHECKS: Final[dict[str, Callable[[Path, Validation], None]]] = {
    TRACE: _check_trace,
    STEP_STATS: _check_steps,
    CLIENT: _check_client,
    ABORTED: _check_aborted,
}


def _torn_or(line: Line, broken: BrokenRule) -> BrokenRule:
    if line.whole or broken.rule != "json":
        return broken
    return BrokenRule("torn-line", f"the last line is cut off after {len(line.text)} bytes: remove it")


def _lines(path: Path, report: FileReport) -> Iterator[Line]:
    try:
        for line in read_lines(path):
            report.lines += 1
            yield line
    except NoTrailerError as error:
        report.notes.append(f"{error}: it was not finished; what follows the last whole line is missing")
    except BrokenGzipError as error:
        report.add(report.lines + 1, BrokenRule("gzip", f"damaged: {error}"))
