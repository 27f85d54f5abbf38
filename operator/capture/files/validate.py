"""Validate the files of a capture: rules for each line, quality gates, notes on engine and prompts.

Reads every file once, line by line, plain or gzip, in constant memory except for one number per request and
measure. Notes say that the vLLM was not tested with the recorder or is not the planned version, and that acceptance
measured with random prompts does not carry over.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from specdecode_operator.capture.files.accounting import Accounting, account, gates, gates_of_live, missing_steps
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
    Live,
    Manifest,
    NoTrailerError,
    SegmentEntry,
    TraceRecord,
    read_lines,
)
from specdecode_operator.capture.files.publish import UnreadableManifestError, decode_manifest, verify
from specdecode_operator.capture.files.totals import ClientTotals, StepTotals, TraceTotals
from specdecode_operator.capture.files.trace_rules import (
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
            f"the recorder is not tested with vLLM {version}: it recorded because all interfaces that it uses are"
            f" the same as in {TRIED}, with which it is tested"
        )
    planned, said = context.get("engine_version"), version_of_engine(vllm)
    if isinstance(planned, str) and said not in (None, planned):
        notes.append(
            f"the engine is vLLM {version}, but was planned and started as version {_short(planned)}"
            " (spec.engine.version of its deployment)"
        )
    return notes


def maker_note(specdecode: str) -> list[str]:
    """Note that files of a newer operator may hold more than is read here."""
    if not is_newer(specdecode, __version__):
        return []
    return [
        f"made by {_short(specdecode)}, newer than this {__version__}, which ignores fields that it does not support"
    ]


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
    "the prompts are random tokens (workload.prompts): times and memory apply to other prompts of these lengths,"
    " but acceptance does not. It is usually 0.13 to 0.27, and higher if a model repeats itself; decide by your own"
    " prompts"
)


def are_random(workload: Mapping[str, Any]) -> bool:
    """Whether the prompts of a manifest's workload are random, which is the default."""
    prompts = workload.get("prompts", {"synthetic": {}})
    if not workload or not isinstance(prompts, Mapping):  # a live capture has no workload
        return False
    dataset = prompts.get("dataset")
    return prompts.get("synthetic") is not None or (isinstance(dataset, Mapping) and dataset.get("format") == "Trace")


def prompt_notes(workload: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    """Return a note if acceptance was measured with random prompts; takes two fields of a manifest."""
    return [RANDOM_PROMPTS] if summary.get("speculation") and are_random(workload) else []


SHOWN: Final = 20
"""Problems of one file that are named; the rest is counted."""


@dataclass(frozen=True)
class FileProblem:
    """A problem of a line, or of a whole file (line 0)."""

    file: str
    line: int
    rule: str
    message: str


@dataclass
class FileReport:
    """One file and its problems."""

    file: str
    kind: str  # published name of such a file
    lines: int = 0
    broken: int = 0
    problems: list[FileProblem] = field(default_factory=list)  # the first of them; all are counted in `broken`
    notes: list[str] = field(default_factory=list)  # no errors for any reader

    def add(self, line: int, rule: str, message: str) -> None:
        """Add a problem."""
        self.broken += 1
        if len(self.problems) < SHOWN:
            self.problems.append(FileProblem(self.file, line, rule, message))


@dataclass
class Validation:
    """The outcome."""

    files: list[FileReport] = field(default_factory=list)
    gates: dict[str, Gate] = field(default_factory=dict)
    # What was added up on the way; absent without the file.
    trace: TraceTotals | None = None
    steps: StepTotals | None = None
    client: ClientTotals | None = None
    aborted: Counter[str] = field(default_factory=Counter)  # requests without a token, by their end
    accounting: Accounting | None = None
    live: Live | None = None  # of a live capture

    @property
    def problems(self) -> list[FileProblem]:
        """Return the problems of all files, and the gates that failed."""
        failed = [FileProblem(name, 0, "gate", gate.why) for name, gate in self.gates.items() if not gate.passed]
        return [problem for report in self.files for problem in report.problems] + failed

    @property
    def passed(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


def validate_capture(
    folder: Path,
    segments: list[SegmentEntry] | None = None,
    counters: EngineCounters | Live | None = None,
    scratch: Path | None = None,
    *,
    steps_wanted: bool = False,
) -> Validation:
    """Validate the files of a published capture, an attempt (``.part``), or any other folder.

    ``segments``, ``counters`` and ``steps_wanted`` (``record.stepStats``) are taken from the manifest of a published
    capture. ``counters`` are the engine's counters during a load, or the account of a live capture. ``scratch`` is the
    folder to sort in; it defaults to the system's folder for temporary files.
    """
    found = Validation()
    if (folder / MANIFEST).exists():
        report = FileReport(MANIFEST, "manifest", lines=1)
        found.files.append(report)
        for fault in verify(folder):
            report.add(0, "manifest", fault)
        try:
            if not report.broken:
                manifest = decode_manifest(folder / MANIFEST, _Recorded)
                segments, counters = manifest.segments, manifest.live or manifest.engine_counters
                steps_wanted = wants_steps(manifest.record)
                notes = engine_notes(manifest.vllm, recorder_tried=manifest.recorder_tried, context=manifest.context)
                report.notes += [*maker_note(manifest.specdecode), *notes]
        except UnreadableManifestError as error:
            report.add(1, "manifest", f"{MANIFEST} cannot be read: {error}")
    for name in (TRACE, STEP_STATS, CLIENT, ABORTED):
        if (path := find(folder, name)) is not None:
            _check(path, name, found)
    client, trace = find(folder, CLIENT), find(folder, TRACE)
    unreadable = any(report.broken for report in found.files if report.kind in (CLIENT, TRACE, ABORTED))
    if client is not None and trace is not None and not unreadable:
        with tempfile.TemporaryDirectory(prefix="specdecode-", dir=scratch) as place:
            found.accounting = account(client, trace, find(folder, ABORTED), Path(place))
    if isinstance(counters, Live):
        found.live = counters
        found.gates = gates_of_live(found.trace, found.steps, counters, segments or [], found.aborted.total())
    else:
        found.gates = gates(found.trace, found.steps, found.accounting, segments, counters)
    if steps_wanted and found.trace is not None:
        found.gates["missing_steps"] = missing_steps(found.trace, found.steps)
    return found


def wants_steps(record: Mapping[str, Any]) -> bool:
    """Whether a capture's ``spec.record`` requests step statistics, which is the default."""
    return bool(record.get("stepStats", True))


def validate_file(path: Path) -> Validation:
    """Validate one file, whose first line shows its kind.

    Raises
    ------
    CaptureError
        If it is not a file of a capture.
    """
    found = Validation()
    _check(path, _kind(path), found)
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
    live: Live | None = None


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
    raise CaptureError("UnknownFile", f"{path}: is not a file of a capture: name one like {known}, or a folder")


_TELLING: Final = {
    STEP_STATS: ("scheduler",),
    CLIENT: ("outcome",),
    TRACE: ("meta", "ttft_ms", "output_tokens"),
    ABORTED: ("ended_by",),
}
"""Fields that identify the kind of a line, in the order of the search."""

_RECORD: Final = msgspec.json.Decoder(TraceRecord)
_CLIENT: Final = msgspec.json.Decoder(ClientRecord)
_ABORTED: Final = msgspec.json.Decoder(AbortedRecord)


def _check(path: Path, kind: str, found: Validation) -> None:
    """Add the report and the totals of one file."""
    if not path.is_file():
        report = FileReport(path.name, kind)
        report.add(0, "file", "not a regular file; devices and pipes are not read")
    elif kind == TRACE:
        trace = found.trace = TraceTotals()
        report = _read(path, kind, partial(_take_record, trace))
        if trace.records and not trace.with_arrival:
            report.notes.append("no record has arrival_ms: replay by arrival is not possible")
        elif not trace.records and not report.broken:  # if lines are broken, the number of records is not known
            report.notes.append("has no records: a replay needs at least one")
    elif kind == STEP_STATS:
        steps = found.steps = StepTotals()
        report = _read(path, kind, lambda _, line: steps.add(decode_step(line.text)))
        if not steps.steps and not report.broken:
            report.notes.append("has no steps: statistics were not recorded")
    elif kind == CLIENT:
        client = found.client = ClientTotals()
        report = _read(path, kind, lambda _, line: client.add(decode(_CLIENT, line.text)))
    else:
        report = _read(path, kind, lambda _, line: found.aborted.update([decode(_ABORTED, line.text).ended_by]))
    found.files.append(report)


def _read(path: Path, kind: str, take: Callable[[FileReport, Line], object]) -> FileReport:
    """Call `take` with each line, and report the lines that cannot be read."""
    report = FileReport(path.name, kind)
    try:
        for line in read_lines(path):
            report.lines += 1
            try:
                take(report, line)
            except UnreadableLineError as error:
                rule, message = error.broken.rule, error.broken.message
                if rule == "json" and not line.whole:
                    rule, message = "torn-line", f"the last line is cut off after {len(line.text)} bytes: remove it"
                report.add(line.number, rule, message)
    except NoTrailerError as error:
        report.notes.append(f"{error}: the file was not finished; data after the last whole line is missing")
    except BrokenGzipError as error:
        report.add(report.lines + 1, "gzip", f"damaged: {error}")
    return report


def _take_record(totals: TraceTotals, report: FileReport, line: Line) -> None:
    if report.lines == 1 and is_meta(line.text):
        totals.meta = decode_meta(line.text)
        return
    record = decode(_RECORD, line.text) if report.lines == 1 else decode_record(_RECORD, line.text)
    broken = list(broken_rules(record))
    for each in broken:
        report.add(line.number, each.rule, each.message)
    if not broken:
        totals.add(record)
