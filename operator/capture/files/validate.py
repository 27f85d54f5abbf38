"""Validate the files of a capture: rules for each line, quality gates, notes on engine and prompts.

Reads every file once, line by line, plain or gzip, in constant memory except for one number per request and
measure. Notes say that the vLLM was not tested with the recorder or is not the planned version, and that acceptance
measured with random prompts does not carry over.
"""

import tempfile
from collections.abc import Callable, Mapping
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
    """Return doubts about the engine's version; ``context`` is the operator's."""
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
    """Note that files of a newer operator may hold more than is read here."""
    if not is_newer(specdecode, __version__):
        return []
    return [f"made by {_short(specdecode)}, newer than this {__version__}, which passes over what it does not know"]


def status_notes(manifest: Manifest) -> dict[str, Any]:
    """Return the part of ``status.summary`` about the engine and the prompts."""
    found = {
        "engineVersion": _short(manifest.vllm),
        "engineNotes": engine_notes(manifest.vllm, recorder_tried=manifest.recorder_tried, context=manifest.context),
        "promptNotes": prompt_notes(manifest.workload, manifest.summary),
    }
    return {name: value for name, value in found.items() if value != []}


def _short(version: str) -> str:
    return clip(printable(version), _LONGEST_VERSION)


RANDOM_PROMPTS: Final = (
    "the prompts are random tokens (workload.prompts): times and memory hold for other prompts of these lengths,"
    " acceptance does not: 0.13 to 0.27 is usual, and more where a model repeats itself; decide by prompts of your own"
)


def are_random(workload: Mapping[str, Any]) -> bool:
    """Whether the prompts of a manifest's workload are random, as they are by default."""
    prompts = workload.get("prompts", {"synthetic": {}})
    if not isinstance(prompts, Mapping):
        return False
    dataset = prompts.get("dataset")
    return prompts.get("synthetic") is not None or (isinstance(dataset, Mapping) and dataset.get("format") == "Trace")


def prompt_notes(workload: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    """Return a note if acceptance was measured with random prompts; takes two fields of a manifest."""
    return [RANDOM_PROMPTS] if summary.get("speculation") and are_random(workload) else []


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
    """One file and its problems."""

    file: str
    kind: str  # what it holds: trace, step-stats, client or aborted
    lines: int = 0
    broken: int = 0
    problems: list[FileProblem] = field(default_factory=list)  # the first of them; all are counted in `broken`
    notes: list[str] = field(default_factory=list)  # no errors for any reader

    def add(self, line: int, broken: BrokenRule) -> None:
        """Add a problem."""
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
        """Return the problems of all files, and the gates that failed."""
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
        try:
            if not report.broken:
                manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=_Recorded)
                segments, counters = manifest.segments, manifest.engine_counters
                steps_wanted = wants_steps(manifest.record)
                report.notes += maker_note(manifest.specdecode)
                report.notes += engine_notes(
                    manifest.vllm, recorder_tried=manifest.recorder_tried, context=manifest.context
                )
        except msgspec.DecodeError as error:
            report.add(1, BrokenRule("manifest", f"{MANIFEST} cannot be read: {error}"))
    for name, check in _CHECKS.items():
        if (path := find(folder, name)) is not None:
            check(path, found)
    client, trace = find(folder, CLIENT), find(folder, TRACE)
    unreadable = any(report.broken for report in found.files if report.kind in (CLIENT, TRACE, ABORTED))
    if client is not None and trace is not None and not unreadable:
        with tempfile.TemporaryDirectory(prefix="specdecode-", dir=scratch) as place:
            found.accounting = account(client, trace, find(folder, ABORTED), Path(place))
    found.gates = gates(found.trace, found.steps, found.accounting, segments, counters)
    if steps_wanted and found.trace is not None:
        found.gates["missing_steps"] = missing_steps(found.trace, found.steps)
    return found


def wants_steps(record: Mapping[str, Any]) -> bool:
    """Whether a capture's ``spec.record`` asks for step statistics, which is the default."""
    return bool(record.get("stepStats", True))


def validate_file(path: Path) -> Validation:
    """Validate one file, whose first line shows its kind.

    Raises
    ------
    CaptureError
        If it is not a file of a capture.
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
    """The fields of a manifest that validation needs."""

    segments: list[SegmentEntry] | None = None
    engine_counters: EngineCounters | None = None
    record: dict[str, Any] = {}
    vllm: str = ""
    recorder_tried: bool = True
    specdecode: str = ""
    context: dict[str, Any] = {}


def _kind(path: Path) -> str:
    """Return the kind by the fields of the first line, or of an empty file by its name."""
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
    totals = TraceTotals()

    def take(text: bytes, report: FileReport, number: int) -> None:
        if report.lines == 1 and is_meta(text):
            totals.meta = decode_meta(text)
            return
        record = decode(_RECORD, text) if report.lines == 1 else decode_record(_RECORD, text)
        broken = list(broken_rules(record))
        for each in broken:
            report.add(number, each)
        if not broken:
            totals.add(record)

    report = _check(path, TRACE, take)
    if not totals.records:
        # If lines are broken, the number of records is not known.
        report.notes += [] if report.broken else ["holds no record: nothing can be replayed from it"]
    elif not totals.with_arrival:
        report.notes.append("no record has arrival_ms: replay by arrival is not possible")
    found.files.append(report)
    found.trace = totals


def _check_steps(path: Path, found: Validation) -> None:
    totals = StepTotals()
    report = _check(path, STEP_STATS, lambda text, *_: totals.add(decode_step(text)))
    if not totals.steps and not report.broken:
        report.notes.append("holds no step: statistics were not recorded")
    found.files.append(report)
    found.steps = totals


def _check_client(path: Path, found: Validation) -> None:
    totals = ClientTotals()
    found.files.append(_check(path, CLIENT, lambda text, *_: totals.add(decode(_CLIENT, text))))
    found.client = totals


def _check_aborted(path: Path, found: Validation) -> None:
    found.files.append(_check(path, ABORTED, lambda text, *_: decode(_ABORTED, text)))


def _check(path: Path, kind: str, take: Callable[[bytes, FileReport, int], object]) -> FileReport:
    """Call `take` with each line, the report and the line's number, and report the lines that cannot be read."""
    report = FileReport(path.name, kind)
    try:
        for line in read_lines(path):
            report.lines += 1
            try:
                take(line.text, report, line.number)
            except UnreadableLineError as error:
                broken = error.broken
                if broken.rule == "json" and not line.whole:
                    message = f"the last line is cut off after {len(line.text)} bytes: remove it"
                    broken = BrokenRule("torn-line", message)
                report.add(line.number, broken)
    except NoTrailerError as error:
        report.notes.append(f"{error}: it was not finished; what follows the last whole line is missing")
    except BrokenGzipError as error:
        report.add(report.lines + 1, BrokenRule("gzip", f"damaged: {error}"))
    return report


_CHECKS: Final[dict[str, Callable[[Path, Validation], None]]] = {
    TRACE: _check_trace,
    STEP_STATS: _check_steps,
    CLIENT: _check_client,
    ABORTED: _check_aborted,
}
