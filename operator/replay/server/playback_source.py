"""Read the traces or the model to serve, check them, and build the engine that plays them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from random import Random

import msgspec

from specdecode_operator.capture.files.formats import MANIFEST_SCHEMA, TraceMeta
from specdecode_operator.capture.trace_reader import Recording, concatenated, read_recording, read_steps
from specdecode_operator.problems import printable
from specdecode_operator.replay.clocks import ScaledClock
from specdecode_operator.replay.drafting import (
    AcceptanceSchedule,
    Drafting,
    assumed_drafting,
    draw_accepted,
    recorded_drafting,
)
from specdecode_operator.replay.engine import Clock, ReplayEngine
from specdecode_operator.replay.model_file import BLOCK_TOKENS, FittedModel, ModelFileError, read_model
from specdecode_operator.replay.modelled_engine import ModelledBehaviour, NoDonorsError
from specdecode_operator.replay.recorded_engine import (
    Matching,
    StepsEngine,
    StepsSettings,
    Unmatched,
    largest_batch_tokens,
    matcher,
    repeating,
)
from specdecode_operator.replay.stepped_engine import SteppedEngine


class ServeError(Exception):
    """An engine that cannot be served: the reason and the fix, in one line."""


class Mode(StrEnum):
    """How an engine generates its tokens."""

    STEPS = "steps"
    MODELLED = "modelled"


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """The recordings to play, and how to play them."""

    traces: Sequence[Path]
    skip_bad_lines: bool = False
    mode: Mode = Mode.STEPS
    matching: Matching = Matching.ARRIVAL
    unmatched: Unmatched = Unmatched.REPEAT
    kv_cache_tokens: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None  # of a modelled engine
    max_num_batched_tokens: int | None = None  # of a modelled engine
    time_scale: float = 1.0
    acceptance: AcceptanceSchedule | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Source:
    """A recording or model that was read; K is 0 without speculation."""

    meta: TraceMeta
    num_speculative_tokens: int
    kv_cache_tokens: int | None
    description: str  # for people
    recording: Recording | None = None
    drafting: Sequence[Drafting] | None = None  # of the recording's requests, if known
    model: FittedModel | None = None
    notes: Sequence[str] = ()  # warnings for the user


@dataclass(frozen=True)
class Played:
    """An engine, and the warnings about it once it has ended."""

    engine: ReplayEngine
    outside: Callable[[], Sequence[str]] = field(default=lambda: ())


def read_source(settings: SourceSettings) -> Source:
    """Read the recordings or the model to play.

    Raises
    ------
    RecordingError
        A trace cannot be read, two of them do not go together, or a model cannot be fitted to them.
    ServeError
        A setting contradicts the recordings, or a model cannot be used.
    """
    is_model = settings.mode is Mode.MODELLED and settings.traces[0].suffix == ".json"
    source = _read_model_file(settings.traces[0]) if is_model else _read_traces(settings)
    if settings.acceptance is not None and not source.num_speculative_tokens:
        raise ServeError("--acceptance: the engine did not speculate: remove the option, or name another capture")
    if settings.mode is Mode.MODELLED and (settings.kv_cache_tokens or source.kv_cache_tokens) is None:
        unknown = (
            "the size of the KV cache is not known, so it is unlimited, and kv_cache_usage_perc stays 0: "
            "set --kv-cache-tokens"
        )
        return replace(source, notes=[*source.notes, unknown])
    return source


def play(settings: SourceSettings, source: Source, clock: Clock) -> Played:
    """Return an engine that plays the source."""
    if settings.time_scale != 1:
        clock = ScaledClock(clock, settings.time_scale)
    modelled = _modelled(settings, source.model, clock) if source.model is not None else None
    if source.recording is None or settings.mode is Mode.MODELLED:
        if modelled is None:
            raise ServeError("--mode modelled: no model is given: name one, or traces for a fit")
        return modelled
    requests = source.recording.requests
    match = matcher(settings.matching, requests)
    if settings.unmatched is Unmatched.REPEAT:
        match = repeating(match, requests)
    schedule, k = settings.acceptance, source.num_speculative_tokens
    random = Random(settings.seed)  # noqa: S311  not for secrets
    steps = StepsSettings(
        kv_cache_tokens=settings.kv_cache_tokens,
        accepted=None if schedule is None else lambda now_ms: draw_accepted(schedule.at(now_ms), k, random),
        otherwise=modelled.engine if modelled is not None else None,
    )
    engine = StepsEngine(source.recording, clock, match, steps, source.drafting)
    return Played(engine, modelled.outside if modelled is not None else lambda: ())


def _modelled(settings: SourceSettings, model: FittedModel, clock: Clock) -> Played:
    limits, schedule = model.origin.limits, settings.acceptance
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
        if (asked := getattr(settings, name)) is not None:
            limits = msgspec.structs.replace(limits, **{name: asked})
    if settings.kv_cache_tokens is not None:
        blocks = max(1, settings.kv_cache_tokens // (limits.block_size or BLOCK_TOKENS))
        limits = msgspec.structs.replace(limits, num_gpu_blocks=blocks)
    acceptance = None if schedule is None else lambda: schedule.at(clock.now_ms())
    try:
        behaviour = ModelledBehaviour(model, settings.seed, acceptance)
    except NoDonorsError as error:
        raise ServeError(str(error)) from error
    return Played(SteppedEngine(clock, behaviour, limits), behaviour.outside)


def _read_model_file(path: Path) -> Source:
    try:
        model = read_model(path)
    except ModelFileError as error:
        raise ServeError(str(error)) from error
    origin, k = model.origin, model.donors.num_speculative_tokens if model.donors is not None else 0
    return Source(
        meta=origin.header(speculative=origin.speculative or ({"num_speculative_tokens": k} if k else None)),
        num_speculative_tokens=k,
        kv_cache_tokens=origin.limits.kv_cache_tokens,
        description=f"an engine fitted to {sum(each.requests for each in origin.captures)} requests of {origin.model}",
        model=model,
    )


def _read_traces(settings: SourceSettings) -> Source:
    recordings = [read_recording(path, skip_bad_lines=settings.skip_bad_lines) for path in settings.traces]
    recording, notes, model = concatenated(recordings), list[str](), None
    count, k = len(recording.requests), recording.num_speculative_tokens
    if recording.skipped_lines:
        notes.append(f"{recording.skipped_lines} unreadable lines were skipped")
    modelled = settings.mode is Mode.MODELLED
    if modelled or settings.unmatched is Unmatched.MODELLED:
        from specdecode_operator.replay.fit import fit  # noqa: PLC0415  takes a while, and few need it

        model = fit(recordings)
    largest = max(max(each.chunk_tokens[1:], default=0) for each in recording.requests)
    if k and largest > k + 1:
        notes.append(f"the largest burst has {largest} tokens, more than K + 1: K of them count as accepted")
    if not modelled:
        if all(request.arrival_ms is None for request in recording.requests):
            notes.append("no record has arrival_ms: they are used in the order of the file")
        if all(request.token_ids is None for request in recording.requests):
            notes.append("no record has token ids: return_token_ids returns the ids of invented words")
        if settings.matching is Matching.PREFIX and not any(request.block_hashes for request in recording.requests):
            raise ServeError("--match: prefix: no record has block_hashes: match by arrival or request-id")
        if settings.matching is Matching.PREFIX and recording.meta.block_hash is not None:
            raise ServeError(
                "--match: prefix: the block_hashes of a live capture are salted and match no prompt: match by arrival"
            )
    of_what = "an engine fitted to " if modelled else ""
    meta = _own_header(recording)
    return Source(
        meta=meta,
        num_speculative_tokens=k,
        kv_cache_tokens=model.origin.limits.kv_cache_tokens if modelled and model else largest_batch_tokens(recording),
        description=f"{of_what}{count} {'request' if count == 1 else 'requests'} of {meta.model}",
        recording=recording,
        drafting=_drafting(recordings, notes) if k and not modelled else None,
        model=model,
        notes=notes,
    )


def _own_header(recording: Recording) -> TraceMeta:
    """Return the header of a recording of the replay: without the fields that only hold for the first recording."""
    k, meta = recording.num_speculative_tokens, recording.meta
    # Bursts of several tokens without a draft are blocks of a diffusion model, which our schema does not cover.
    of_blocks = k == 0 and any(max(each.chunk_tokens) > 1 for each in recording.requests)
    return msgspec.structs.replace(
        meta,
        model=meta.model or recording.trace.name.partition(".")[0],
        schema=None if of_blocks else MANIFEST_SCHEMA,
        speculative=meta.speculative or ({"num_speculative_tokens": k} if k else None),
        capture=None,
        attempt=None,
        ready_response_hex=None,
    )


def _drafting(recordings: Sequence[Recording], notes: list[str]) -> Sequence[Drafting] | None:
    """Return the drafting of each request, from matching step statistics; None without a match."""
    of_steps = [
        recorded_drafting(each, read_steps(each.steps)) if each.steps is not None else None for each in recordings
    ]
    notes += [
        f"{printable(str(each.steps))} does not fit the trace: K drafted tokens are assumed in each step"
        for each, found in zip(recordings, of_steps, strict=True)
        if found is None and each.steps is not None
    ]
    if not any(of_steps):
        return None
    return [
        drafting
        for each, found in zip(recordings, of_steps, strict=True)
        for drafting in found or [assumed_drafting(one, each.num_speculative_tokens) for one in each.requests]
    ]
