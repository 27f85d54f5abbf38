"""Finish a capture: merge, validate and publish its raw files, or leave them and report why."""

import time
from typing import Any, Final

import msgspec
from msgspec import Struct

from specdecode_operator.capture.files import formats, validate
from specdecode_operator.capture.files.accounting import Accounting
from specdecode_operator.capture.files.config_hash import engine_hash, header_hash
from specdecode_operator.capture.files.live import Recorded, loss_text
from specdecode_operator.capture.files.merge import Merged, merge, trace_meta
from specdecode_operator.capture.files.publish import finish_publication, publish, read_manifest, seal
from specdecode_operator.capture.files.segments import Segment
from specdecode_operator.capture.files.summary import Summary, status_summary, summarize
from specdecode_operator.capture.files.totals import ClientTotals
from specdecode_operator.capture.job.pod_files import Places, volume_errors
from specdecode_operator.version import __version__

_SHOWN: Final = 5
_FROM_HEADER: Final = ("vllm", "recorder_tried", "model", "gpu", "gpu_uuids", "host", "config")


class Asked(Struct, frozen=True, kw_only=True):
    """Request for a capture, as the manifest repeats it."""

    capture_uid: str | None = None
    workload: dict[str, Any] = {}  # ``spec.workload``
    seed: int = 0
    record: dict[str, Any] = {}
    context: dict[str, Any] = {}  # from the operator: image, plan, added flags
    experiment: formats.Experiment | None = None  # of a capture with several arms


class Run(Struct, frozen=True, kw_only=True):
    """Facts about a run that are not in its files."""

    zero_monotonic_s: float
    zero_wall_s: float
    segments: list[Segment]
    counters: formats.EngineCounters | None = None  # from /metrics
    no_counters: str | None = None  # why they are unknown
    node: str | None = None
    image_id: str | None = None  # of the engine's container, with its digest
    live: Recorded | None = None  # a live capture, with what its collector knows of the segments


class Published(Struct, frozen=True, kw_only=True):
    """A published capture."""

    manifest: formats.Manifest
    summary: Summary
    status: dict[str, Any]  # ``status.summary``


def finish(places: Places, asked: Asked, run: Run) -> Published:
    """Merge, validate and publish an attempt whose recorders have finished."""
    header = run.segments[0].header
    config_digest, engine_digest = header_hash(header), engine_hash(header, asked.context, run.image_id)
    meta = msgspec.structs.replace(
        trace_meta(header),
        capture=f"{places.namespace}/{places.capture}",
        attempt=places.attempt,
        zero_monotonic_s=run.zero_monotonic_s,
        zero_wall_s=run.zero_wall_s,
        engine_hash=engine_digest,
        block_hash=None if run.live is None else header.block_hash,
    )
    recorded = [_entry(each) for each in run.segments] if run.live is None else run.live.entries()
    with volume_errors(places.root):
        merged = merge(places.folder, meta, run.zero_monotonic_s, run.live)
        live = None if run.live is None else run.live.live(merged.records + merged.aborted)
        validation = validate.validate_capture(
            places.folder,
            recorded,
            live or run.counters,
            scratch=places.folder,
            steps_wanted=validate.wants_steps(asked.record),
        )
        accounting = _accepted(validation)
        files = seal(places.folder)
        summary = summarize(validation, sum(entry.bytes for entry in files.values()))
        notes = validate.engine_notes(header.vllm, recorder_tried=header.recorder_tried, context=asked.context)
        notes += validate.prompt_notes(asked.workload, msgspec.to_builtins(summary))
        manifest = formats.Manifest(
            **msgspec.structs.asdict(asked),
            **{name: getattr(header, name) for name in _FROM_HEADER},
            namespace=places.namespace,
            capture=places.capture,
            arm=places.arm,
            repetition=places.repetition,
            attempt=places.attempt,
            specdecode=__version__,
            node=run.node,
            image_id=run.image_id,
            zero_monotonic_s=run.zero_monotonic_s,
            zero_wall_s=run.zero_wall_s,
            published_wall_s=round(time.time(), 3),
            config_hash=config_digest,
            engine_hash=engine_digest,
            accounting=None if accounting is None else accounting.entry(),
            engine_counters=run.counters,
            files=files,
            gates=validation.gates,
            segments=recorded,
            notes=notes + _notes(run, validation, merged),
            summary=msgspec.to_builtins(summary),
            source="load" if live is None else "live",
            live=live,
        )
        publish(places.folder, places.final, manifest)
    return _published(places, manifest, summary)


def _entry(segment: Segment) -> formats.SegmentEntry:
    closed, names = segment.closed, ("requests", "steps", "dropped", "unfinished")
    return formats.SegmentEntry(
        boot=segment.header.boot,
        client_index=segment.header.client_index,
        closed=closed.reason if closed else None,
        **({name: getattr(closed, name) for name in names} if closed else {}),
    )


def published_before(places: Places, asked: Asked) -> Published | None:
    """Return the files that an earlier attempt of this capture published, if any."""
    # A pod may stop after the rename and before its message, or just before the rename, which is then completed here.
    if asked.capture_uid is None:
        return None
    with volume_errors(places.root):
        finish_publication(places.final, asked.capture_uid)
        manifest = read_manifest(places.final)
    if manifest is None or manifest.capture_uid != asked.capture_uid:
        return None
    return _published(places, manifest, msgspec.convert(manifest.summary, Summary))


def _published(places: Places, manifest: formats.Manifest, summary: Summary) -> Published:
    status = status_summary(summary, manifest.files, places.path, manifest.live) | validate.status_notes(manifest)
    return Published(manifest=manifest, summary=summary, status=status)


def _accepted(validation: validate.Validation) -> Accounting | None:
    """Return the accounting of valid files with at least one record; None of a live capture, which has its own."""
    # With a wrong API key, for example, every request is rejected and accounted for, and there is nothing to publish.
    problems = [
        f"{each.file}{f', line {each.line}' if each.line else ''}: {each.message}" for each in validation.problems
    ]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise formats.CaptureError("ValidationFailed", "; ".join(problems[:_SHOWN]) + more)
    if validation.live is not None and not (validation.trace and validation.trace.records):
        raise formats.CaptureError("NothingRecorded", _no_traffic(validation.live))
    if validation.trace is None or not validation.trace.records:
        client = validation.client or ClientTotals()
        outcomes = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in sorted(client.outcomes.items()))
        first = client.first_failure
        status = f"HTTP {first.http_status}, " if first and first.http_status else ""
        why = f"; the first one, {first.id}: {status}{first.error or first.outcome}" if first else ""
        raise formats.CaptureError("NothingRecorded", f"no request got a token ({outcomes or 'none was due'}){why}")
    if validation.accounting is None and validation.live is None:
        raise formats.CaptureError(
            "ValidationFailed", "client.jsonl or trace.jsonl is missing: requests cannot be accounted for"
        )
    return validation.accounting


def _no_traffic(live: formats.Live) -> str:
    counts, lost = live.accounting, "".join(f"; {loss_text(each)}" for each in live.lost[:_SHOWN])
    older = f" ({counts.older} of the requests were running when it opened)" if counts.older else ""
    return (
        f"no recorded request got a token in the window of {live.window.seconds:.0f} s: by their own counters, the"
        f" engines finished {counts.finished} requests in it{older}; {counts.equation}{lost}: record while users send"
        " requests, or raise the sample"
    )


def _notes(run: Run, validation: validate.Validation, merged: Merged) -> list[str]:
    notes = [note for report in validation.files for note in report.notes]
    if run.live is not None and validation.live is not None:
        return notes + run.live.all_notes(validation.live)
    notes += [f"{torn.path.name}: {torn.size_bytes} bytes of a torn line {torn.line} left out" for torn in merged.torn]
    if merged.warmup_records:
        notes.append(f"{merged.warmup_records} warm-up requests left out of trace and step statistics")
    if run.image_id is None:
        notes.append("the digest of the engine's image is not known: the operator did not report it in time")
    if run.no_counters:
        notes.append(f"the engine's own counters are not known, and were not compared: {run.no_counters}")
    if merged.steps_without_stats:
        notes.append(f"{merged.steps_without_stats} messages without statistics, which another API server got")
    return notes
