"""Finish a capture: merge, validate and publish its raw files, or leave them and report why."""

import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from specdecode_operator.capture.files.config_hash import engine_hash, gpu_label, header_hash
from specdecode_operator.capture.files.formats import (
    MANIFEST_SCHEMA,
    CaptureError,
    EngineCounters,
    Experiment,
    FileEntry,
    Manifest,
    SegmentEntry,
    TraceMeta,
)
from specdecode_operator.capture.files.merge import Merged, merge
from specdecode_operator.capture.files.publish import finish_publication, publish, read_manifest, seal
from specdecode_operator.capture.files.segments import Segment
from specdecode_operator.capture.files.summary import Summary, status_summary, summarize
from specdecode_operator.capture.files.totals import ClientTotals
from specdecode_operator.capture.files.validate import (
    Validation,
    engine_notes,
    prompt_notes,
    status_notes,
    validate_capture,
    wants_steps,
)
from specdecode_operator.capture.job.pod_files import Places, volume_errors
from specdecode_operator.capture.recorder.segment_format import Header
from specdecode_operator.version import __version__

_SOURCE: Final = "specdecode-operator"
_SHOWN: Final = 5


class Asked(Struct, frozen=True, kw_only=True):
    """What was asked for, as it goes to the manifest."""

    capture_uid: str | None = None
    workload: dict[str, Any] = {}  # ``spec.workload``, as it was given
    seed: int = 0
    record: dict[str, Any] = {}
    context: dict[str, Any] = {}  # image, plan, flags added: whatever the operator gave
    experiment: Experiment | None = None  # what it is a part of, where there are several arms


class Run(Struct, frozen=True, kw_only=True):
    """What a run found out that is not in its files."""

    zero_monotonic_s: float
    zero_wall_s: float
    segments: list[Segment]
    counters: EngineCounters | None = None  # what /metrics says of it
    no_counters: str | None = None  # or why nothing is known of that
    node: str | None = None
    image_id: str | None = None  # image that the engine's container runs, with its digest, where it is known


class Published(Struct, frozen=True, kw_only=True):
    """A published capture."""

    manifest: Manifest
    summary: Summary
    status: dict[str, Any]  # the same as ``status.summary`` has it


def finish(places: Places, asked: Asked, run: Run) -> Published:
    """Merge, validate and publish an attempt whose recorders have finished.

    Raises
    ------
    CaptureError
        When the files are not what they must be, or the volume fails; the attempt stays as it is.
    """
    header = run.segments[0].header
    with volume_errors(places.root):
        merged = merge(places.folder, _meta(places, asked, run, header), run.zero_monotonic_s)
        recorded = [_segment_entry(segment) for segment in run.segments]
        validation = validate_capture(
            places.folder, recorded, run.counters, scratch=places.folder, steps_wanted=wants_steps(asked.record)
        )
        _refuse_faults(validation)
        _refuse_emptiness(validation)
        files = seal(places.folder)
        summary = summarize(validation, sum(entry.bytes for entry in files.values()))
        notes = engine_notes(header.vllm, recorder_tried=header.recorder_tried, context=asked.context)
        notes += prompt_notes(asked.workload, msgspec.to_builtins(summary))
        manifest = _manifest(places, asked, run, _Outcome(validation, merged, files, summary, recorded, notes))
        publish(places.folder, places.final, manifest)
    return _published(places, manifest, summary)


def published_before(places: Places, asked: Asked) -> Published | None:
    """Return what an earlier attempt of this very capture published; None where none did.

    A pod may die after the renaming and before it could say so; or just before it, and then it is renamed here.
    """
    if asked.capture_uid is None:
        return None
    with volume_errors(places.root):
        finish_publication(places.final, asked.capture_uid)
        manifest = read_manifest(places.final)
    if manifest is None or manifest.capture_uid != asked.capture_uid:
        return None
    summary = msgspec.convert(manifest.summary, Summary)
    return _published(places, manifest, summary)


def _published(places: Places, manifest: Manifest, summary: Summary) -> Published:
    status = status_summary(summary, manifest.files, places.path) | status_notes(manifest)
    return Published(manifest=manifest, summary=summary, status=status)


def _meta(places: Places, asked: Asked, run: Run, header: Header) -> TraceMeta:
    speculative = header.config.speculative
    return TraceMeta(
        model=header.model,
        gpu=gpu_label(header.gpu),
        tp=header.config.tensor_parallel,
        max_num_seqs=header.config.max_num_seqs,
        source=_SOURCE,
        block_size=header.config.block_size,
        config_hash=header_hash(header),
        vllm_version=header.vllm,
        schema=MANIFEST_SCHEMA,
        capture=f"{places.namespace}/{places.capture}",
        attempt=places.attempt,
        zero_monotonic_s=run.zero_monotonic_s,
        zero_wall_s=run.zero_wall_s,
        engine_hash=engine_hash(header, asked.context, run.image_id),
        speculative=msgspec.to_builtins(speculative) if speculative else None,
    )


def _segment_entry(segment: Segment) -> SegmentEntry:
    closed = segment.closed
    return SegmentEntry(
        boot=segment.header.boot,
        client_index=segment.header.client_index,
        closed=closed.reason if closed else None,
        requests=closed.requests if closed else None,
        steps=closed.steps if closed else None,
        dropped=closed.dropped if closed else None,
        unfinished=closed.unfinished if closed else None,
    )


def _refuse_faults(validation: Validation) -> None:
    problems: Sequence[str] = [
        f"{each.file}{f', line {each.line}' if each.line else ''}: {each.message}" for each in validation.problems
    ]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CaptureError("ValidationFailed", "; ".join(problems[:_SHOWN]) + more)


def _refuse_emptiness(validation: Validation) -> None:
    """With a wrong key, say, every request is refused: all are accounted for, and there is nothing to publish."""
    if validation.trace is not None and validation.trace.records:
        return
    client = validation.client or ClientTotals()
    outcomes = ", ".join(f"{count} {outcome.replace('_', ' ')}" for outcome, count in sorted(client.outcomes.items()))
    first = client.first_failure
    status = f"HTTP {first.http_status}, " if first and first.http_status else ""
    why = f"; the first one, {first.id}: {status}{first.error or first.outcome}" if first else ""
    raise CaptureError("NothingRecorded", f"no request got a token ({outcomes or 'none was due'}){why}")


class _Outcome(Struct, frozen=True):
    validation: Validation
    merged: Merged
    files: dict[str, FileEntry]
    summary: Summary
    segments: list[SegmentEntry]
    doubts: list[str]


def _manifest(places: Places, asked: Asked, run: Run, outcome: _Outcome) -> Manifest:
    header = run.segments[0].header
    accounting = outcome.validation.accounting
    if accounting is None:
        raise CaptureError("ValidationFailed", "client.jsonl or trace.jsonl is missing: nothing can be accounted for")
    return Manifest(
        namespace=places.namespace,
        capture=places.capture,
        arm=places.arm,
        repetition=places.repetition,
        experiment=asked.experiment,
        capture_uid=asked.capture_uid,
        attempt=places.attempt,
        specdecode=__version__,
        vllm=header.vllm,
        recorder_tried=header.recorder_tried,
        model=header.model,
        gpu=header.gpu,
        gpu_uuids=header.gpu_uuids,
        host=header.host,
        config=header.config,
        node=run.node,
        image_id=run.image_id,
        context=asked.context,
        workload=asked.workload,
        seed=asked.seed,
        record=asked.record,
        zero_monotonic_s=run.zero_monotonic_s,
        zero_wall_s=run.zero_wall_s,
        published_wall_s=round(time.time(), 3),
        config_hash=header_hash(header),
        engine_hash=engine_hash(header, asked.context, run.image_id),
        accounting=accounting.entry(),
        engine_counters=run.counters,
        files=outcome.files,
        gates=outcome.validation.gates,
        segments=outcome.segments,
        notes=[*outcome.doubts, *_notes(run, outcome)],
        summary=msgspec.to_builtins(outcome.summary),
    )


def _notes(run: Run, outcome: _Outcome) -> list[str]:
    merged = outcome.merged
    notes = [note for report in outcome.validation.files for note in report.notes]
    notes += [f"{torn.path.name}: {torn.size_bytes} bytes of a torn line {torn.line} left out" for torn in merged.torn]
    if merged.warmup_records:
        notes.append(f"{merged.warmup_records} warm-up requests left out of trace and step statistics")
    if run.image_id is None:
        notes.append("the digest of the engine's image is not known: the operator did not say it in time")
    if run.no_counters:
        notes.append(f"the engine's own counters are not known, and were not compared: {run.no_counters}")
    if merged.steps_without_stats:
        notes.append(f"{merged.steps_without_stats} messages without statistics, which another API server got")
    return notes
