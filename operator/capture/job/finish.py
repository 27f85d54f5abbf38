"""Finish a capture: merge, validate and publish its raw files, or leave them and report why."""

import time
from typing import Any, Final

import msgspec
from msgspec import Struct

from specdecode_operator.capture.files.accounting import Accounting
from specdecode_operator.capture.files.config_hash import engine_hash, gpu_label, header_hash
from specdecode_operator.capture.files.formats import (
    MANIFEST_SCHEMA,
    CaptureError,
    EngineCounters,
    Experiment,
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
from specdecode_operator.version import __version__

_SHOWN: Final = 5


class Asked(Struct, frozen=True, kw_only=True):
    """Request for a capture, as the manifest repeats it."""

    capture_uid: str | None = None
    workload: dict[str, Any] = {}  # ``spec.workload``
    seed: int = 0
    record: dict[str, Any] = {}
    context: dict[str, Any] = {}  # from the operator: image, plan, added flags
    experiment: Experiment | None = None  # of a capture with several arms


class Run(Struct, frozen=True, kw_only=True):
    """Facts about a run that are not in its files."""

    zero_monotonic_s: float
    zero_wall_s: float
    segments: list[Segment]
    counters: EngineCounters | None = None  # from /metrics
    no_counters: str | None = None  # why they are unknown
    node: str | None = None
    image_id: str | None = None  # of the engine's container, with its digest


class Published(Struct, frozen=True, kw_only=True):
    """A published capture."""

    manifest: Manifest
    summary: Summary
    status: dict[str, Any]  # ``status.summary``


def finish(places: Places, asked: Asked, run: Run) -> Published:
    """Merge, validate and publish an attempt whose recorders have finished."""
    header = run.segments[0].header
    speculative = header.config.speculative
    meta = TraceMeta(
        model=header.model,
        gpu=gpu_label(header.gpu),
        tp=header.config.tensor_parallel,
        max_num_seqs=header.config.max_num_seqs,
        source="specdecode-operator",
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
    recorded = []
    for segment in run.segments:
        entry = SegmentEntry(boot=segment.header.boot, client_index=segment.header.client_index)
        if closed := segment.closed:
            entry = msgspec.structs.replace(
                entry,
                closed=closed.reason,
                requests=closed.requests,
                steps=closed.steps,
                dropped=closed.dropped,
                unfinished=closed.unfinished,
            )
        recorded.append(entry)
    with volume_errors(places.root):
        merged = merge(places.folder, meta, run.zero_monotonic_s)
        validation = validate_capture(
            places.folder, recorded, run.counters, scratch=places.folder, steps_wanted=wants_steps(asked.record)
        )
        accounting = _accepted(validation)
        files = seal(places.folder)
        summary = summarize(validation, sum(entry.bytes for entry in files.values()))
        notes = engine_notes(header.vllm, recorder_tried=header.recorder_tried, context=asked.context)
        notes += prompt_notes(asked.workload, msgspec.to_builtins(summary))
        manifest = Manifest(
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
            config_hash=meta.config_hash,
            engine_hash=meta.engine_hash,
            accounting=accounting.entry(),
            engine_counters=run.counters,
            files=files,
            gates=validation.gates,
            segments=recorded,
            notes=[*notes, *_notes(run, validation, merged)],
            summary=msgspec.to_builtins(summary),
        )
        publish(places.folder, places.final, manifest)
    return _published(places, manifest, summary)


def published_before(places: Places, asked: Asked) -> Published | None:
    """Return what an earlier attempt of this capture published, if any.

    A pod may stop after the rename and before its message, or just before the rename, which is then completed here.
    """
    if asked.capture_uid is None:
        return None
    with volume_errors(places.root):
        finish_publication(places.final, asked.capture_uid)
        manifest = read_manifest(places.final)
    if manifest is None or manifest.capture_uid != asked.capture_uid:
        return None
    return _published(places, manifest, msgspec.convert(manifest.summary, Summary))


def _published(places: Places, manifest: Manifest, summary: Summary) -> Published:
    status = status_summary(summary, manifest.files, places.path) | status_notes(manifest)
    return Published(manifest=manifest, summary=summary, status=status)


def _accepted(validation: Validation) -> Accounting:
    """Return the accounting of valid files with at least one record.

    With a wrong API key, for example, every request is rejected and accounted for, and there is nothing to publish.
    """
    problems = [
        f"{each.file}{f', line {each.line}' if each.line else ''}: {each.message}" for each in validation.problems
    ]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CaptureError("ValidationFailed", "; ".join(problems[:_SHOWN]) + more)
    if validation.trace is None or not validation.trace.records:
        client = validation.client or ClientTotals()
        outcomes = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in sorted(client.outcomes.items()))
        first = client.first_failure
        status = f"HTTP {first.http_status}, " if first and first.http_status else ""
        why = f"; the first one, {first.id}: {status}{first.error or first.outcome}" if first else ""
        raise CaptureError("NothingRecorded", f"no request got a token ({outcomes or 'none was due'}){why}")
    if validation.accounting is None:
        raise CaptureError("ValidationFailed", "client.jsonl or trace.jsonl is missing: nothing can be accounted for")
    return validation.accounting


def _notes(run: Run, validation: Validation, merged: Merged) -> list[str]:
    notes = [note for report in validation.files for note in report.notes]
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
