"""Fits a model to captures: what is drawn from when an engine is played that they say nothing of."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from specdecode_operator.capture.files.formats import TraceMeta
from specdecode_operator.capture.files.publish import read_manifest
from specdecode_operator.engine.image_version import version_of_engine
from specdecode_operator.engine.profiles import UnknownEngineVersionError, find_profile
from specdecode_operator.replay.emulated.step_time import StepTime, step_time_from_json
from specdecode_operator.replay.fitted import buckets
from specdecode_operator.replay.fitted.acceptance import fit_acceptance
from specdecode_operator.replay.fitted.buckets import CONTEXT, DECODING, PACES, POSITION, PREFILL_TOKENS
from specdecode_operator.replay.fitted.censored import uncut
from specdecode_operator.replay.fitted.clients import turnarounds_ms
from specdecode_operator.replay.fitted.difficulty import classes
from specdecode_operator.replay.fitted.donors import MOST_DONORS, Bursts, Cell, Clients, Donors, Drafts, Stops, Ttft
from specdecode_operator.replay.fitted.model import SCHEMA, FittedCapture, FittedModel, Limits, Origin
from specdecode_operator.replay.fitted.quantiles import thinned
from specdecode_operator.replay.fitted.ranges import Range
from specdecode_operator.replay.fitted.step_time import fit_step_time
from specdecode_operator.replay.fitted.timeline import Floats, Ints, Timeline, timeline
from specdecode_operator.replay.fitted.trend import expected_ms, fitted_trend
from specdecode_operator.replay.recording.read import LONGEST_GAP_MS, RecordingError, read_steps, refuse_different
from specdecode_operator.replay.recording.recording import RecordedRequest, Recording
from specdecode_operator.vocabulary import Method

_LEAST_STEPS: Final = 8
"""A pool of fewer is none: steps near to it stand in."""
_MOST_LEADS: Final = 64
_MOST_STOPS: Final = 200
_SEED: Final = 0
_USED_CACHE: Final = 0.05
"""A KV cache used less tells too little of its size."""
_LEAST_MS: Final = 1e-3
_MOST_SIZES: Final = 32
"""Larger bursts are all alike, as far as they tell easy requests from hard ones."""


@dataclass(frozen=True)
class _Drafted:
    """What the step statistics of captures say of drafts, added up."""

    drafts: int = 0
    tokens: int = 0


def fit(recordings: Sequence[Recording], *, draft_share: float = 0.0) -> FittedModel:
    """Return the model of the engine that some captures are of.

    Parameters
    ----------
    draft_share
        What one pass of the draft reads, by what one of the target does: see `fit_step_time`.

    Raises
    ------
    RecordingError
        They are of different engines, or say too little.
    """
    refuse_different(recordings)
    k = max(each.num_speculative_tokens for each in recordings)
    lines, fitted, drafted = list[Timeline](), list[FittedCapture](), _Drafted()
    for recording in recordings:
        found, steps, of_steps = _timelines(recording, k)
        lines += found
        drafted = _Drafted(drafted.drafts + of_steps.drafts, drafted.tokens + of_steps.tokens)
        fitted.append(_capture(recording, steps))
    if not lines or not any(np.isfinite(line.duration_ms).any() for line in lines):
        raise RecordingError(f"{recordings[0].trace}: no request has arrival_ms: nothing can be fitted to it")
    requests = [request for recording in recordings for request in recording.requests]
    leads = np.concatenate([line.lead_ms for line in lines])
    return FittedModel(
        schema=SCHEMA,
        origin=_origin(recordings, fitted, lines),
        donors=_donors(lines, requests, k, drafted),
        ttft=Ttft(lead_ms=thinned(np.minimum(leads, LONGEST_GAP_MS).tolist(), _MOST_LEADS)),
        clients=_clients(recordings),
        step_time=fit_step_time(
            recordings, draft_share=draft_share, one_pass=any(each.meta.drafts_in_one_pass for each in recordings)
        ),
        acceptance=fit_acceptance(recordings),
    )


def _capture(recording: Recording, steps: int) -> FittedCapture:
    name, requests = recording.trace.parent.name, len(recording.requests)
    return FittedCapture(name=name, config_hash=recording.meta.config_hash, requests=requests, steps=steps)


def _clients(recordings: Sequence[Recording]) -> Clients | None:
    found = [value for recording in recordings for value in turnarounds_ms(recording.requests)]
    found = [min(value, LONGEST_GAP_MS) for value in found]
    return Clients(turnarounds_ms=thinned(found, _MOST_LEADS)) if found else None


def _timelines(recording: Recording, k: int) -> tuple[list[Timeline], int, _Drafted]:
    """Return the timelines of a capture's engines, its steps, and what was drafted in them."""
    stats = list(read_steps(recording.steps)) if recording.steps is not None else []
    arrived = [request for request in recording.requests if request.arrival_ms is not None]
    lines = [
        timeline(
            [request for request in arrived if request.engine == engine],
            [line for line in stats if line.engine == engine],
            k,
        )
        for engine in sorted({request.engine for request in arrived})
    ]
    drafts = [line.scheduler.spec_decoding_stats for line in stats]
    drafted = _Drafted(
        sum(each.num_drafts for each in drafts if each), sum(each.num_draft_tokens for each in drafts if each)
    )
    return lines, sum(len(line.end_ms) for line in lines), drafted


def _origin(recordings: Sequence[Recording], captures: list[FittedCapture], lines: list[Timeline]) -> Origin:
    meta = recordings[0].meta
    manifest = read_manifest(recordings[0].trace.parent)
    config = manifest.config if manifest else None
    counted = manifest.engine_counters.num_gpu_blocks if manifest and manifest.engine_counters else None
    return Origin(
        model=meta.model,
        gpu=meta.gpu,
        tp=meta.tp or None,
        vllm_version=meta.vllm_version,
        speculative=meta.speculative,
        limits=Limits(
            max_num_seqs=meta.max_num_seqs or None,
            max_num_batched_tokens=config.max_num_batched_tokens if config else None,
            max_model_len=config.max_model_len if config else None,
            block_size=meta.block_size or None,
            num_gpu_blocks=counted or _blocks(lines, meta.block_size or None),
            enable_prefix_caching=config.enable_prefix_caching if config else None,
            async_scheduling=config.async_scheduling if config else None,
            draft_slots=_draft_slots(meta),
        ),
        captures=captures,
    )


def _draft_slots(meta: TraceMeta) -> int | None:
    """Return what vLLM's scheduler keeps free for drafting, for each request of a step; None where it is not known."""
    method, k = ((meta.speculative or {}).get(name) for name in ("method", "num_speculative_tokens"))
    version = version_of_engine(meta.vllm_version or "")
    if method not in tuple(Method) or type(k) is not int or version is None:
        return None
    try:
        slots = find_profile(version).extra_draft_slots
    except UnknownEngineVersionError:
        return None
    of_method = slots.get(Method(method))
    return max(0, of_method.at(k)) if of_method else None


def _blocks(lines: list[Timeline], block_size: int | None) -> int | None:
    """Return about how many blocks the KV cache has: what requests took by the share that it was; None if unknown."""
    found: list[float] = []
    for line in lines:
        used = line.kv_cache_usage
        following = np.concatenate([line.decoding[1:], [0]])
        # Who ends in a step has given its blocks back when usage is counted; so steps are taken in which nobody does.
        whole = (used > _USED_CACHE) & (line.prefill_tokens == 0) & (following == line.decoding)
        if block_size and whole.any():
            # Each has room for its drafts, too, and half a block more than it needs on average.
            tokens = line.context_tokens[whole] + line.k * line.decoding[whole]
            blocks = tokens / block_size + line.decoding[whole] / 2
            found += (blocks / used[whole]).tolist()
    return max(1, round(float(np.median(found)))) if len(found) >= _LEAST_STEPS else None


def _donors(lines: list[Timeline], requests: Sequence[RecordedRequest], k: int, drafted: _Drafted) -> Donors:
    trend = fitted_trend(lines)
    section = step_time_from_json(trend)
    pools = _Pools(lines, section)
    shares, of_class = classes(_burst_counts(lines, k), _SEED)
    firsts = np.concatenate([line.chunk_tokens[line.chunk_is_first] for line in lines])
    values, counts = np.unique(firsts, return_counts=True)
    return Donors(
        num_speculative_tokens=k,
        trend=trend,
        cells=pools.cells(),
        persistence=pools.persistence(),
        classes=shares,
        bursts=_bursts(lines, pools.paces, of_class),
        firsts=[(int(value), int(count)) for value, count in zip(values, counts, strict=True)],
        drafts=_drafts(lines, k, drafted),
        stops=_stops(requests),
        ranges=_ranges(lines),
    )


class _Pools:
    """Steps by cell, and the pace of each within its own."""

    def __init__(self, lines: list[Timeline], trend: StepTime) -> None:
        self.paces: list[Floats] = []
        """Of each step of each timeline: its rank in its cell, from 0 to 1; nan where its duration is not known."""
        self._follows = [line.follows for line in lines]
        ratios = [np.maximum(line.duration_ms, _LEAST_MS) / expected_ms(trend, line) for line in lines]
        codes = [_cell_codes(line) for line in lines]
        self._ratio, self._code = np.concatenate(ratios), np.concatenate(codes)
        self._usable = np.isfinite(self._ratio) & (self._code > 0)
        pace = np.full(len(self._ratio), np.nan)
        for code in np.unique(self._code[self._usable]):
            of_cell = np.flatnonzero(self._usable & (self._code == code))
            ranks = np.argsort(np.argsort(self._ratio[of_cell], kind="stable"), kind="stable")
            pace[of_cell] = (ranks + 0.5) / len(of_cell)
        self.paces = np.split(pace, np.cumsum([len(each) for each in ratios])[:-1])

    def cells(self) -> list[Cell]:
        codes, counts = np.unique(self._code[self._usable], return_counts=True)
        least = min(_LEAST_STEPS, int(counts.max()))
        return [
            Cell(
                decoding=int(code) // buckets.buckets(PREFILL_TOKENS),
                prefill=int(code) % buckets.buckets(PREFILL_TOKENS),
                steps=int(count),
                ratios=thinned(self._ratio[self._usable & (self._code == code)].tolist(), MOST_DONORS),
            )
            for code, count in zip(codes, counts, strict=True)
            if count >= least
        ]

    def persistence(self) -> float:
        """Return how much the pace of a step says of that of the next: their correlation, where one follows another."""
        pairs = []
        for pace, follows in zip(self.paces, self._follows, strict=True):
            both = np.isfinite(pace[1:]) & np.isfinite(pace[:-1]) & follows[1:]
            pairs.append(np.stack([pace[:-1][both], pace[1:][both]], axis=1))
        joined = np.concatenate(pairs)
        if len(joined) < _LEAST_STEPS or not joined.std(axis=0).all():
            return 0.0
        return round(min(0.99, max(0.0, float(np.corrcoef(joined.T)[0, 1]))), 4)


def _cell_codes(line: Timeline) -> Ints:
    decoding = np.searchsorted(DECODING, line.decoding)
    prefill = np.searchsorted(PREFILL_TOKENS, line.prefill_tokens)
    return np.asarray(decoding * buckets.buckets(PREFILL_TOKENS) + prefill, dtype=np.int64)


def _burst_counts(lines: list[Timeline], k: int) -> Floats:
    """Return how many bursts of each size came after which, for each request, without those that max_tokens cut."""
    rows, most = [], min(k + 1, _MOST_SIZES)
    for line in lines:
        counted = ~line.chunk_is_first & ~line.chunk_is_cut
        before = np.searchsorted(buckets.BURST, _before(line)[counted])
        sizes = np.minimum(line.chunk_tokens[counted], most) - 1
        counts = np.zeros((len(line.prompt_tokens), buckets.buckets(buckets.BURST), most))
        np.add.at(counts, (line.chunk_request[counted], before, sizes), 1)
        rows.append(counts)
    return np.concatenate(rows)


def _before(line: Timeline) -> Ints:
    """Return the tokens of the burst before each chunk; 0 where that ended the prefill."""
    before = np.concatenate([[0], line.chunk_tokens[:-1]])
    before[np.concatenate([[False], line.chunk_is_first[:-1]])] = 0
    return before


def _bursts(lines: list[Timeline], paces: list[Floats], of_class: Ints) -> Bursts:
    tables, cut, first_request = [], [], 0
    for line, pace in zip(lines, paces, strict=True):
        counted = ~line.chunk_is_first & np.isfinite(pace[line.chunk_step])
        request, step = line.chunk_request[counted], line.chunk_step[counted]
        attended = line.prompt_tokens[request] + line.chunk_before[counted]
        columns = [
            of_class[first_request + request],
            np.minimum((pace[step] * PACES).astype(np.int64), PACES - 1),
            np.searchsorted(buckets.BURST, _before(line)[counted]),
            np.searchsorted(DECODING, line.decoding[step]),
            np.searchsorted(POSITION, line.chunk_before[counted]),
            np.searchsorted(CONTEXT, attended),
            line.chunk_tokens[counted],
        ]
        tables.append(np.stack(columns, axis=1))
        cut.append(line.chunk_is_cut[counted])
        first_request += len(line.prompt_tokens)
    table = np.concatenate(tables)
    table[:, -1] = uncut(table[:, -1], np.concatenate(cut), table[:, 0] * buckets.buckets(buckets.BURST) + table[:, 2])
    rows, counts = np.unique(table, axis=0, return_counts=True)
    names = ("classes", "paces", "before", "decoding", "positions", "contexts", "tokens")
    found: dict[str, Any] = {name: rows[:, index].tolist() for index, name in enumerate(names)}
    return Bursts(counts=counts.tolist(), **found)


def _drafts(lines: list[Timeline], k: int, drafted: _Drafted) -> Drafts:
    """Return what was drafted: by the engine's counters, or K in every step where nobody counted."""
    if not drafted.drafts:
        return Drafts(singles=1.0 if k else 0.0, tokens=float(k))
    sizes = np.concatenate([line.chunk_tokens[~line.chunk_is_first] for line in lines])
    several, singles = int((sizes > 1).sum()), int((sizes == 1).sum())
    share = (drafted.drafts - several) / singles if singles else 1.0
    return Drafts(singles=round(min(1.0, max(0.0, share)), 6), tokens=round(drafted.tokens / drafted.drafts, 6))


def _stops(requests: Sequence[RecordedRequest]) -> Stops:
    stopped = [request.output_tokens for request in requests if request.finish_reason == "stop"]
    ended = sum(1 for request in requests if request.finish_reason in ("stop", "length"))
    lengths = [int(value) for value in thinned(stopped, _MOST_STOPS)]
    return Stops(share=round(len(stopped) / ended, 6) if ended else 0.0, output_tokens=lengths)


def _ranges(lines: list[Timeline]) -> dict[str, Range]:
    """Return what was seen: requests that decode at once, tokens of prompts in a step, and lengths."""
    busy = np.concatenate([line.decoding for line in lines])
    prefill = np.concatenate([line.prefill_tokens for line in lines])
    prompts = np.concatenate([line.prompt_tokens for line in lines])
    contexts = [line.prompt_tokens[line.chunk_request] + line.chunk_before + line.chunk_tokens for line in lines]
    seen = {
        "requests decoding at once": busy[busy > 0],
        "prompt tokens in a step": prefill[prefill > 0],
        "tokens of a prompt": prompts,
        "tokens of a request": np.concatenate(contexts),
    }
    return {name: Range(float(values.min()), float(values.max())) for name, values in seen.items() if len(values)}
