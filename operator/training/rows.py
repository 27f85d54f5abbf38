"""Write the rows to train on, from captures or a file, split by prompt.

The folder gets ``training.jsonl``, ``holdout.jsonl`` with the held-out prompts, and, last, ``rows.json`` with counts
and checksums. Captures and files are untrusted.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from specdecode_operator.api.training import RowCounts
from specdecode_operator.capture.files import formats
from specdecode_operator.capture.files.trace_requests import ExportError, TraceRequests, notes_of
from specdecode_operator.capture.files.training_rows import (
    CaptureRows,
    Split,
    TrainingError,
    TrainingRow,
    create,
    reject_untrainable,
    write_split,
)
from specdecode_operator.capture.load.rebuilt_prompts import (
    RebuiltPrompts,
    Tokenize,
    read_manifest,
    refuse_random_prompts,
)
from specdecode_operator.capture.observation import CapturedDeployment
from specdecode_operator.capture.recorder.segment_format import EMULATED
from specdecode_operator.capture.trace_reader import RecordingError, find_file, find_trace
from specdecode_operator.problems import printable, shown, shown_or_missing
from specdecode_operator.redaction import clip
from specdecode_operator.untrusted import mapping, parse_json

TRAINING: Final = "training.jsonl"
HOLDOUT: Final = "holdout.jsonl"
ROWS: Final = "rows.json"

_SCHEMA: Final = 1
_MOST_NOTES: Final = 8
_LONGEST_NOTE: Final = 512
_MOST_FOLDERS: Final = 256  # repetitions of all arms of one capture
_MOST_ROWS_FILE_BYTES: Final = 2**20
_CHUNK_BYTES: Final = 2**20
_NO_PROMPT: Final = "without a prompt"


@dataclass(frozen=True, kw_only=True)
class Target:
    """Target of the answers. Answers of another model, revision or precision cannot train a draft for it."""

    model: str
    revision: str | None
    quantization: str  # precision of the linear layers in the plan


def target_of(source: CapturedDeployment) -> Target:
    """Return the target that a deployment serves."""
    target = source.launch.facts.spec.target
    return Target(
        model=target.model, revision=target.revision, quantization=source.launch.plan_status.target_quantization
    )


@dataclass(frozen=True, kw_only=True)
class CaptureSource:
    """Rows of a published capture."""

    name: str  # of the SpecDecodeCapture
    mount: Path  # where the claim with its files is mounted
    path: str  # of its files in the claim: status.path
    target: Target  # of the deployment
    dataset: Path | None = None  # where its dataset is mounted, if its prompts come from one


@dataclass(frozen=True, kw_only=True)
class FileSource:
    """Rows of a given file."""

    mount: Path  # where the ConfigMap or claim is mounted
    path: str


RowSource = CaptureSource | FileSource


def write_rows(  # noqa: PLR0913  the fields of the spec
    sources: Sequence[RowSource],
    out: Path,
    *,
    holdout_percent: int,
    max_tokens: int,
    min_rows: int,
    seed: int,
    tokenize: Tokenize | None = None,
) -> RowCounts:
    """Write the rows of captures or of a file to a folder, and return their counts.

    Without ``tokenize``, text prompts become pending rows, which `training.job.pending_rows` completes.

    Raises
    ------
    TrainingError
        If a capture or the file cannot be used, or there are too few rows.
    """
    reading = _Reading(tokenize)
    split = Split(seed=seed, holdout_percent=holdout_percent, max_tokens=max_tokens)
    training, held_out = out / f"{TRAINING}{formats.PART_SUFFIX}", out / f"{HOLDOUT}{formats.PART_SUFFIX}"
    out.mkdir(parents=True, exist_ok=True)
    (out / ROWS).unlink(missing_ok=True)
    try:
        written = write_split(reading.rows(sources), training, held_out, split)
        left_out = reading.left_out + written.left_out
        if not written.rows and not written.held_out:
            reject_untrainable(", ".join(map(_name, sources)), left_out)
        _check_counts(written.rows, written.held_out, min_rows, split)
        for part, name in ((training, TRAINING), (held_out, HOLDOUT)):
            part.replace(out / name)
    except TrainingError:
        raise
    except (ExportError, RecordingError) as error:
        raise TrainingError("UnreadableCapture", str(error)) from error
    finally:
        for part in (training, held_out):
            part.unlink(missing_ok=True)
    notes = [*reading.notes, *notes_of(Counter(dict(left_out.most_common())))]
    counts = RowCounts(
        training=written.rows,
        holdout=written.held_out,
        duplicates=written.duplicates,
        tokens=written.tokens,
        left_out=[clip(printable(each), _LONGEST_NOTE) for each in notes[:_MOST_NOTES]] or None,
    )
    with create(out / ROWS) as stream:
        stream.write(
            msgspec.json.encode(
                {
                    "schema": _SCHEMA,
                    "seed": seed,
                    "holdoutPercent": holdout_percent,
                    "maxTokens": max_tokens,
                    "counts": counts.model_dump(mode="json", by_alias=True, exclude_none=True),
                    "sources": reading.sources,
                    "files": {name: {"sha256": _sha256(out / name)} for name in (TRAINING, HOLDOUT)},
                }
            )
        )
    return counts


def read_counts(out: Path) -> RowCounts | None:
    """Return the counts of rows that were written to a folder, or None if they are incomplete."""
    try:
        with (out / ROWS).open("rb") as stream:
            found = parse_json(stream.read(_MOST_ROWS_FILE_BYTES + 1), _MOST_ROWS_FILE_BYTES)
        return RowCounts.parse(mapping(found, "counts"), newer=True) if isinstance(found, dict) else None
    except (OSError, ValueError):  # neither JSON nor valid
        return None


def compatible(name: str, manifest: Mapping[str, Any], target: Target) -> None:
    """Raise TrainingError if the answers of a capture cannot train a draft for a target.

    Parameters
    ----------
    name
        Name of the capture, for the message.
    manifest
        Content of the capture's ``manifest.json``.
    target
        Target of the deployment.
    """
    refuse_random_prompts(Path(name), manifest)
    record, is_live = mapping(manifest, "record"), manifest.get("source") == "live"
    if record.get("tokenIds") is not True:
        message = f"{printable(name)}: records no token ids of answers: capture again with record.tokenIds: true"
        raise TrainingError("NoTokenIds", message)
    if is_live and record.get("promptTokenIds") is not True:
        message = f"{printable(name)}: records no token ids of prompts: capture again with record.promptTokenIds: true"
        raise TrainingError("NoTokenIds", message)
    if str(manifest.get("gpu")).startswith(EMULATED):
        message = f"{printable(name)}: emulated engines compute no answers: use a capture of a real engine"
        raise TrainingError("EmulatedAnswers", message)
    if difference := _difference(manifest, target):
        raise TrainingError("CaptureOfOtherTarget", f"{printable(name)}: {difference}: capture the deployment again")


def _difference(manifest: Mapping[str, Any], target: Target) -> str | None:
    """Return how the captured target differs from the deployment's target."""
    context = mapping(manifest, "context")
    captured = mapping(context, "target")
    pairs = (
        ("target.model", captured.get("model"), target.model),
        ("target.revision", captured.get("revision"), target.revision),
        ("target.quantization", mapping(context, "plan").get("targetQuantization"), target.quantization),
    )
    for what, theirs, ours in pairs:
        if theirs != ours:
            return f"its {what} {_said(theirs)}, and that of the deployment {_said(ours)}"
    lossy = mapping(mapping(manifest, "experiment"), "lossy")
    if (arm := str(manifest.get("arm"))) in lossy:
        return f"its arm {shown(arm)} has settings that can change answers"
    return None


def _said(value: object) -> str:
    return "is missing" if value is None else f"is {shown_or_missing(value)}"


class _GivenRow(Struct):
    input_ids: Annotated[list[formats.Word], Meta(min_length=1)]
    loss_mask: list[Annotated[int, Meta(ge=0, le=1)]]


_GIVEN_ROW: Final = msgspec.json.Decoder(_GivenRow)


@dataclass
class _Reading:
    """Reads sources, and counts the requests without a row."""

    tokenize: Tokenize | None
    left_out: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    sources: list[dict[str, Any]] = field(default_factory=list)  # with checksums

    def rows(self, sources: Sequence[RowSource]) -> Iterator[TrainingRow]:
        """Yield the rows of all sources."""
        for each in sources:
            yield from self._of_capture(each) if isinstance(each, CaptureSource) else self._of_file(each)

    def _of_capture(self, source: CaptureSource) -> Iterator[TrainingRow]:
        usable, refused = list[Path](), list[TrainingError]()
        for folder in _folders(source):
            manifest = read_manifest(_inside(source.mount, folder / formats.MANIFEST, source.name).parent)
            if not manifest:
                message = f"{printable(source.name)}: has no {formats.MANIFEST}: use another capture"
                raise TrainingError("UnreadableCapture", message)
            try:
                compatible(source.name, manifest, source.target)
            except TrainingError as error:
                refused.append(error)
                self.notes.append(f"arm {shown(manifest.get('arm'))}: {error}")
            else:
                usable.append(folder)
        if not usable:
            raise refused[0]
        self.notes = list(dict.fromkeys(self.notes))
        for folder in usable:
            yield from self._of_folder(source, folder)

    def _of_folder(self, source: CaptureSource, folder: Path) -> Iterator[TrainingRow]:
        manifest, trace = read_manifest(folder), _inside(source.mount, find_trace(folder), source.name)
        rebuild = None
        if manifest.get("source") != "live":
            if source.dataset is None:
                message = f"{printable(source.name)}: its dataset is missing: create it again, or use another capture"
                raise TrainingError("DatasetNotFound", message)
            rebuild = RebuiltPrompts(folder, source.dataset, self.tokenize)
        capture = CaptureRows(TraceRequests(trace), rebuild)
        yield from capture.rows()
        self.left_out += capture.left_out()
        self.sources.append(
            {
                "capture": source.name,
                "path": str(folder.relative_to(source.mount)),
                "sha256": {formats.MANIFEST: _sha256(folder / formats.MANIFEST), trace.name: _sha256(trace)},
            }
        )

    def _of_file(self, source: FileSource) -> Iterator[TrainingRow]:
        path = _inside(source.mount, source.mount / source.path, source.path)
        if not path.is_file():
            message = f"spec.dataset.path: {shown(source.path)}: not a file: name a file in the ConfigMap or volume"
            raise TrainingError("DatasetNotFound", message)
        try:
            for line in formats.read_lines(path):
                if row := self._given(line, source.path):
                    yield row
        except (formats.NoTrailerError, formats.BrokenGzipError) as error:
            raise TrainingError("InvalidRows", f"spec.dataset.path: {shown(source.path)}: {error}") from error
        except OSError as error:
            message = f"spec.dataset.path: {shown(source.path)}: cannot be read: {error.strerror}"
            raise TrainingError("InvalidRows", message) from error
        self.sources.append({"path": source.path, "sha256": {path.name: _sha256(path)}})

    def _given(self, line: formats.Line, path: str) -> TrainingRow | None:
        place = f"spec.dataset.path: {shown(path)}: line {line.number}"
        try:
            row = _GIVEN_ROW.decode(line.text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            message = f"{place}: invalid row ({printable(str(error))}): write an object with input_ids and loss_mask"
            raise TrainingError("InvalidRows", message) from error
        if len(row.input_ids) != len(row.loss_mask):
            lengths = f"{len(row.input_ids)} input_ids and {len(row.loss_mask)} values of loss_mask"
            message = f"{place}: has {lengths}: write the same number of both"
            raise TrainingError("InvalidRows", message)
        prompt_tokens = row.loss_mask.index(1) if 1 in row.loss_mask else 0
        if not prompt_tokens:
            self.left_out[_NO_PROMPT if 1 in row.loss_mask else "without a token to train on"] += 1
            return None
        prompt = row.input_ids[:prompt_tokens]
        return TrainingRow(
            prompt=prompt,
            prompt_ids=prompt,
            prompt_tokens=prompt_tokens,
            answer_ids=row.input_ids[prompt_tokens:],
            answer_mask=row.loss_mask[prompt_tokens:],
        )


def _folders(source: CaptureSource) -> list[Path]:
    """Return the folders with a trace: the capture's, or one for each repetition of each arm."""
    top = _inside(source.mount, source.mount / source.path, source.name)
    if find_file(top, formats.TRACE):
        return [top]
    found = sorted({each.parent for depth in ("*", "*/*") for each in top.glob(f"{depth}/{formats.TRACE}*")})
    # Attempts that were not published have a suffix.
    folders = [each for each in found if not any(formats.PART_SUFFIX in part for part in each.relative_to(top).parts)]
    if not folders:
        message = f"{printable(source.name)}: {shown(source.path)}: has no {formats.TRACE}: use another capture"
        raise TrainingError("UnreadableCapture", message)
    return [_inside(source.mount, each, source.name) for each in folders[:_MOST_FOLDERS]]


def _inside(mount: Path, path: Path, name: str) -> Path:
    if not path.resolve().is_relative_to(mount.resolve()):
        raise TrainingError(
            "UnreadableCapture", f"{printable(name)}: path points outside its volume: remove the symbolic link"
        )
    return path


def _check_counts(rows: int, held_out: int, min_rows: int, split: Split) -> None:
    if rows < min_rows:
        raise TrainingError(
            "TooFewRows",
            f"spec.minRows: {min_rows:,}: only {rows:,} rows to train on: capture more requests, or lower minRows",
        )
    if not held_out:
        raise TrainingError(
            "TooFewRows",
            f"spec.holdoutPercent: {split.holdout_percent}: no prompt is held out: use more prompts or a larger share,"
            " or export the file of spec.dataset again without --holdout-percent",
        )


def _name(source: RowSource) -> str:
    return printable(source.name if isinstance(source, CaptureSource) else source.path)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
