"""Fit an engine model to captures.

The steps of an engine are reconstructed from the chunks of its requests: all chunks of one step carry the same
timestamp. Step statistics, if recorded, add the content of each step and the steps without output.

Bursts that max_tokens cut count as at least as long as seen. Requests are split into as many difficulty classes as
the data supports, and closed-loop clients are recognised by the number of requests in flight.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from specdecode_operator.capture.files.formats import TraceMeta
from specdecode_operator.capture.files.publish import read_manifest
from specdecode_operator.capture.files.trace_rules import StepLine
from specdecode_operator.capture.trace_reader import (
    LONGEST_GAP_MS,
    RecordedRequest,
    Recording,
    RecordingError,
    read_steps,
    refuse_different,
)
from specdecode_operator.enums import Method
from specdecode_operator.replay import model_file
from specdecode_operator.replay.emulated.engine_model import StepTime, step_time_from_json
from specdecode_operator.replay.fit_acceptance import fit_acceptance
from specdecode_operator.replay.fit_step_time import fit_step_time
from specdecode_operator.replay.model_file import (
    CONTEXT,
    DECODING,
    MOST_DONORS,
    PACES,
    POSITION,
    PREFILL_TOKENS,
    SCHEMA,
    Bursts,
    Cell,
    Clients,
    Donors,
    Drafts,
    FittedCapture,
    FittedModel,
    Limits,
    Origin,
    Range,
    Stops,
    Ttft,
    thinned,
)
from specdecode_operator.vllm.profiles import UnknownEngineVersionError, find_profile
from specdecode_operator.vllm.versions import version_of_engine

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

SAME_STEP_MS: Final = 0.05
"""Stamps of one step differ by what rounding adds up to; no step is so short."""


_MOST_TOKENS: Final = 2**31


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Steps of one engine in order; arrays named by what they hold, one entry a step or one a chunk."""

    k: int
    # Of steps
    end_ms: Floats
    duration_ms: Floats  # nan where it is not known when it began
    follows: Bools  # it began when the one before ended
    requests: Ints
    decoding: Ints  # of them, those that have their next tokens
    prefill_tokens: Ints
    context_tokens: Ints
    kv_cache_usage: Floats  # nan without step statistics
    # Of chunks, those of a request one after another
    chunk_request: Ints
    chunk_step: Ints
    chunk_tokens: Ints
    chunk_before: Ints  # tokens that the request had been given before
    chunk_is_first: Bools
    chunk_is_cut: Bools  # the last of a request that ended at max_tokens
    # Of requests
    prompt_tokens: Ints
    lead_ms: Floats  # from arrival to the first scheduling, of those who found the engine idle


@dataclass(frozen=True)
class _Chunks:
    request: Ints
    stamp_ms: Floats
    tokens: Ints
    before: Ints
    is_first: Bools
    is_last: Bools


def timeline(requests: Sequence[RecordedRequest], lines: Iterable[StepLine], k: int) -> Timeline:
    """Return the steps of one engine, of requests that have an arrival."""
    chunks = _chunks(requests)
    stats = list(lines)
    stats_ms = np.array([line.ts_ms for line in stats], dtype=np.float64)
    step_of, end_ms = _clustered(np.concatenate([chunks.stamp_ms, stats_ms]))
    chunk_step, stats_step = step_of[: len(chunks.stamp_ms)], step_of[len(chunks.stamp_ms) :]
    known = [each.scheduled_ms if each.scheduled_ms is not None else each.arrival_ms for each in requests]
    begin_ms = np.array(known, dtype=np.float64)
    last_ms = chunks.stamp_ms[chunks.is_last]
    starts = _starts(end_ms, begin_ms, last_ms)
    decoding, context = _decoding(requests, chunks, chunk_step, len(end_ms))
    prefill, prefilling = _prefill(requests, chunk_step[chunks.is_first], end_ms, begin_ms)
    batch = decoding + prefilling
    usage = np.full(len(end_ms), np.nan)
    for line, step in zip(stats, stats_step, strict=True):
        usage[step] = line.scheduler.kv_cache_usage
        _take_details(line.scheduler.iteration_details, int(step), (batch, decoding, prefill))
    ended = np.array([each.finish_reason == "length" for each in requests])
    return Timeline(
        k=k,
        end_ms=end_ms,
        duration_ms=end_ms - starts.ms,
        follows=starts.follows,
        requests=batch,
        decoding=decoding,
        prefill_tokens=prefill,
        context_tokens=context,
        kv_cache_usage=usage,
        chunk_request=chunks.request,
        chunk_step=chunk_step,
        chunk_tokens=chunks.tokens,
        chunk_before=chunks.before,
        chunk_is_first=chunks.is_first,
        chunk_is_cut=chunks.is_last & ended[chunks.request],
        prompt_tokens=np.array([each.prompt_tokens for each in requests], dtype=np.int64),
        lead_ms=_leads_ms(requests, begin_ms, last_ms),
    )


def _leads_ms(requests: Sequence[RecordedRequest], begin_ms: Floats, last_ms: Floats) -> Floats:
    """Return the time to the scheduler, of those who found nobody there when they came and when they began."""
    arrival_ms = np.array([each.arrival_ms for each in requests], dtype=np.float64)
    alone = _active(arrival_ms, begin_ms, last_ms) + _active(begin_ms, begin_ms, last_ms) == 0
    known = np.array([each.scheduled_ms is not None for each in requests])
    return np.asarray(np.maximum(0.0, begin_ms - arrival_ms)[alone & known], dtype=np.float64)


def _chunks(requests: Sequence[RecordedRequest]) -> _Chunks:
    counts = np.array([len(each.chunk_tokens) for each in requests], dtype=np.int64)
    stamps = []
    for each in requests:
        times = np.empty(len(each.chunk_tokens))
        times[0] = (each.arrival_ms or 0.0) + each.ttft_ms
        times[1:] = each.gaps_ms
        stamps.append(np.cumsum(times))
    tokens = np.concatenate([np.asarray(each.chunk_tokens, dtype=np.int64) for each in requests])
    ends = np.cumsum(counts)
    is_first, is_last = np.zeros(len(tokens), dtype=bool), np.zeros(len(tokens), dtype=bool)
    is_first[ends - counts], is_last[ends - 1] = True, True
    total = np.cumsum(tokens) - tokens
    request = np.repeat(np.arange(len(requests)), counts)
    return _Chunks(request, np.concatenate(stamps), tokens, total - total[ends - counts][request], is_first, is_last)


def _clustered(stamps_ms: Floats) -> tuple[Ints, Floats]:
    """Return the step of each stamp, and when each step ended."""
    order = np.argsort(stamps_ms, kind="stable")
    ordered = stamps_ms[order]
    begins = np.concatenate([[True], np.diff(ordered) > SAME_STEP_MS])
    of_ordered = np.cumsum(begins) - 1
    step_of = np.empty(len(stamps_ms), dtype=np.int64)
    step_of[order] = of_ordered
    return step_of, ordered[begins]


@dataclass(frozen=True)
class _Starts:
    ms: Floats
    follows: Bools


def _active(at_ms: Floats, begin_ms: Floats, last_ms: Floats) -> Ints:
    """Return how many requests had begun and were not over at each moment."""
    begun = np.searchsorted(np.sort(begin_ms), at_ms - SAME_STEP_MS, side="right")
    over = np.searchsorted(np.sort(last_ms), at_ms + SAME_STEP_MS, side="right")
    return np.asarray(begun - over, dtype=np.int64)


def _starts(end_ms: Floats, begin_ms: Floats, last_ms: Floats) -> _Starts:
    """Return when each step began: when the one before ended, or its first request came into an idle engine."""
    before = np.concatenate([[-np.inf], end_ms[:-1]])
    # Who is scheduled right at the end of a step has its stamp a moment later.
    follows = _active(before + 2 * SAME_STEP_MS, begin_ms, last_ms) > 0
    ordered = np.sort(begin_ms)
    first = np.searchsorted(ordered, before, side="left")
    came = ordered[np.minimum(first, len(ordered) - 1)]
    idle = np.where((first < len(ordered)) & (came < end_ms), came, np.nan)
    return _Starts(np.where(follows, before, idle), follows)


def _decoding(requests: Sequence[RecordedRequest], chunks: _Chunks, chunk_step: Ints, steps: int) -> tuple[Ints, Ints]:
    """Return, for each step: requests that decode, tokens that all attend to."""
    prompts = np.array([each.prompt_tokens for each in requests], dtype=np.int64)
    attended = (prompts[chunks.request] + chunks.before).astype(np.float64)
    context = np.bincount(chunk_step, weights=attended, minlength=steps)
    return np.bincount(chunk_step[~chunks.is_first], minlength=steps), context.astype(np.int64)


def _prefill(requests: Sequence[RecordedRequest], last: Ints, end_ms: Floats, begin_ms: Floats) -> tuple[Ints, Ints]:
    """Return the tokens of prompts in each step, and of how many; ``last`` is where each request's prompt ended."""
    computed = np.array([max(1, each.prompt_tokens - each.cached_tokens) for each in requests], dtype=np.int64)
    prefill, prefilling = np.zeros(len(end_ms), dtype=np.int64), np.zeros(len(end_ms), dtype=np.int64)
    first = np.minimum(np.searchsorted(end_ms, begin_ms + SAME_STEP_MS, side="right"), last)
    alone = first == last
    np.add.at(prefill, last[alone], computed[alone])
    np.add.at(prefilling, last[alone], 1)
    for request in np.flatnonzero(~alone):
        # In chunks; of what size each was, nobody wrote down.
        span = slice(first[request], last[request] + 1)
        prefill[span] += -(-computed[request] // (last[request] + 1 - first[request]))
        prefilling[span] += 1
    return prefill, prefilling


def _take_details(details: Any, step: int, into: tuple[Ints, Ints, Ints]) -> None:
    """Take what the engine itself says of a step, in place of what was made out."""
    if not isinstance(details, dict):
        return
    names = ("num_ctx_requests", "num_generation_requests", "num_ctx_tokens")
    values = [value for name in names if isinstance(value := details.get(name), int) and 0 <= value < _MOST_TOKENS]
    if len(values) == len(names):
        batch, decoding, prefill = into
        batch[step], decoding[step], prefill[step] = values[0] + values[1], values[1], values[2]


_ROUNDS: Final = 2
_OUTLIER: Final = 4.0
"""A step that takes so many times what was expected is left out of the next round: something else ran."""

_WORTH: Final = 1.005
"""A term stays where the error grows by more than so much without it."""
_EXACT: Final = 1e-6
"""And by more than so much for each step, on average."""


def fitted_trend(timelines: list[Timeline]) -> dict[str, Any]:
    """Return a section `step_time` without residuals: base, requests, tokens of prompts, context; each 0 or more."""
    duration_ms = np.concatenate([each.duration_ms for each in timelines])
    requests = np.concatenate([each.requests for each in timelines])
    prefill = np.concatenate([each.prefill_tokens for each in timelines])
    context = np.concatenate([each.context_tokens for each in timelines])
    terms = np.stack([np.ones(len(requests)), requests, prefill, context], axis=1).astype(np.float64)
    usable = np.isfinite(duration_ms) & (duration_ms > 0) & (requests + prefill > 0)
    factors = _not_negative(terms, duration_ms, usable)
    for _ in range(_ROUNDS):
        ratio = duration_ms / np.maximum(terms @ factors, 1e-6)
        factors = _not_negative(terms, duration_ms, usable & (ratio < _OUTLIER) & (ratio > 1 / _OUTLIER))
    base_ms, request_ms, prefill_ms, context_ms = (float(factor) for factor in factors)
    return {
        "curve": [[1, round(max(base_ms, 1e-3), 6)]],
        "request_us": round(1e3 * request_ms, 6),
        "prefill_token_us": round(1e3 * prefill_ms, 6),
        "context_ns": round(1e6 * context_ms, 6),
    }


def expected_ms(trend: StepTime, line: Timeline) -> Floats:
    """Return what the trend says of each step."""
    base_ms = trend.curve[0][1]
    each_ms = base_ms + 1e-3 * (trend.request_us * line.requests + trend.prefill_token_us * line.prefill_tokens)
    return np.asarray(each_ms + 1e-6 * trend.context_ns * line.context_tokens, dtype=np.float64)


def _not_negative(terms: Floats, durations_ms: Floats, used: Bools) -> Floats:
    """Return the factors that fit best by relative error, without terms that are negative or explain nothing.

    Terms that go together, such as requests and what they attend to, would else share what is one's, and lead astray
    under loads in which they do not.
    """
    rows, durations = terms[used], durations_ms[used]
    factors = np.zeros(terms.shape[1])
    if not len(rows):
        factors[0] = 1.0
        return factors
    kept = [0, *(index for index in range(1, terms.shape[1]) if np.ptp(rows[:, index]) > 0)]
    solved, error = _solved(rows[:, kept], durations)
    while len(kept) > 1:
        without = [[index for index in kept if index != left_out] for left_out in kept[1:]]
        found = [(_solved(rows[:, columns], durations), columns) for columns in without]
        (fewer, larger), columns = min(found, key=lambda each: each[0][1])
        negative = (solved < 0).any()
        if not negative and larger > _WORTH * error + _EXACT * len(rows):
            break
        kept, solved, error = columns, fewer, larger if not negative else max(larger, error)
    factors[kept] = np.maximum(solved, 0.0)
    return factors


def _solved(rows: Floats, durations_ms: Floats) -> tuple[Floats, float]:
    """Return the factors by least squares of the relative error, and what is left of it."""
    scale = np.maximum(np.abs(rows).max(axis=0), 1.0)
    weighed = rows / scale / durations_ms[:, None]
    solved = np.linalg.lstsq(weighed, np.ones(len(rows)), rcond=None)[0]
    return solved / scale, float(((weighed @ solved - 1) ** 2).sum())


_SEED = 0


def uncut(tokens: Ints, cut: Bools, groups: Ints) -> Ints:
    """Return the sizes of bursts, those that were cut as one of their group that is at least as long.

    How likely each size is, is estimated after Kaplan and Meier: what was cut at a size counts for all below it.
    """
    found = tokens.copy()
    random = np.random.default_rng(_SEED)
    for group in np.unique(groups[cut]):
        mine = groups == group
        whole, ended = tokens[mine & ~cut], tokens[mine & cut]
        if not len(whole):
            continue
        sizes, chances = _chances(whole, ended)
        for place in np.flatnonzero(mine & cut):
            possible = np.where(sizes >= tokens[place], chances, 0.0)
            if possible.sum() > 0:
                found[place] = random.choice(sizes, p=possible / possible.sum())
    return found


def _chances(whole: Ints, ended: Ints) -> tuple[Ints, Floats]:
    sizes, counts = np.unique(whole, return_counts=True)
    left, chances = 1.0, np.zeros(len(sizes))
    for index, size in enumerate(sizes):
        at_risk = (whole >= size).sum() + (ended > size).sum()
        chances[index] = left * counts[index] / at_risk
        left -= chances[index]
    if left > 0:
        chances[-1] += left
    return sizes, chances


_CLOSED_SHARE: Final = 0.6
"""Of arrivals that find all clients but one waiting: where requests come by chance, few do."""
_AT_ONCE: Final = 0.2
"""Of the time between arrivals, that a client takes: where requests come evenly, as many are in flight, too."""
_SAME_MS: Final = 0.05


def turnarounds_ms(requests: Sequence[RecordedRequest]) -> list[float]:
    """Return how long clients took from an answer's last token to their next request, in phases that have clients."""
    found: list[float] = []
    arrived = [request for request in requests if request.arrival_ms is not None]
    ordered = sorted(arrived, key=lambda request: (request.phase or "", request.arrival_ms or 0.0))
    for _, of_phase in groupby(ordered, key=lambda request: request.phase):
        group = list(of_phase)
        arrivals_ms = [request.arrival_ms or 0.0 for request in group]
        ends_ms = sorted(request.end_ms or 0.0 for request in group)
        in_flight = [index - bisect_right(ends_ms, at_ms + _SAME_MS) for index, at_ms in enumerate(arrivals_ms, 1)]
        clients = max(in_flight)
        later = in_flight[clients:]
        if len(later) < clients or sum(each == clients for each in later) < _CLOSED_SHARE * len(later):
            continue
        waits_ms = [max(0.0, at_ms - end_ms) for at_ms, end_ms in zip(arrivals_ms[clients:], ends_ms, strict=False)]
        if median(waits_ms) * len(group) < _AT_ONCE * (arrivals_ms[-1] - arrivals_ms[0]):
            found += waits_ms
    return found


MOST_CLASSES: Final = 4
_DIFFICULTY_ROUNDS: Final = 60
_LEAST: Final = 1e-6


def difficulty_classes(counts: Floats, seed: int) -> tuple[list[float], Ints]:
    """Return the shares of classes, and the class of each request.

    ``counts`` says for each request how many bursts of each size it got after bursts of each size: a drafter that hits
    in a row is no sign of an easy request. A request's class is drawn by its chances, so that bursts of classes are as
    far apart as they are, and not as they happened to be.
    """
    best, best_score = _one(counts), float("inf")
    seen = max(1, int((counts.sum(axis=(0, 2)) > 0).sum()))
    for number in range(1, MOST_CLASSES + 1):
        chances, shares, likelihood = _fitted(counts, number)
        free = number * seen * (counts.shape[2] - 1) + number - 1
        score = free * np.log(max(2, len(counts))) - 2 * likelihood
        if score < best_score:
            best, best_score = (chances, shares), score
    chances, shares = best
    drawn = np.random.default_rng(seed).random(len(counts))
    chosen = (np.cumsum(chances, axis=1) < drawn[:, None]).sum(axis=1)
    of_class = np.minimum(chosen, len(shares) - 1).astype(np.int64)
    drawn_shares = np.bincount(of_class, minlength=len(shares)) / max(1, len(of_class))
    return [round(float(share), 6) for share in drawn_shares], of_class


def _one(counts: Floats) -> tuple[Floats, Floats]:
    return np.ones((len(counts), 1)), np.ones(1)


def _fitted(counts: Floats, number: int) -> tuple[Floats, Floats, float]:
    """Return each request's chances of each class, the shares of classes, and how likely it all is."""
    sizes = np.arange(counts.shape[2])
    totals = np.maximum(counts.sum(axis=(1, 2)), 1)
    order = np.argsort(counts.sum(axis=1) @ sizes / totals, kind="stable")
    chances = np.zeros((len(counts), number))
    for index, part in enumerate(np.array_split(order, number)):
        chances[part, index] = 1.0
    likelihood = 0.0
    shares = np.ones(number) / number
    for _ in range(_DIFFICULTY_ROUNDS):
        shares = np.maximum(chances.mean(axis=0), _LEAST)
        rates = np.tensordot(chances, counts, axes=(0, 0)) + _LEAST
        rates /= rates.sum(axis=2, keepdims=True)
        weights = np.tensordot(counts, np.log(rates), axes=([1, 2], [1, 2])) + np.log(shares)
        highest = weights.max(axis=1, keepdims=True)
        sums = highest[:, 0] + np.log(np.exp(weights - highest).sum(axis=1))
        chances = np.exp(weights - sums[:, None])
        before, likelihood = likelihood, float(sums.sum())
        if abs(likelihood - before) < 1e-6 * abs(likelihood):
            break
    return chances, shares / shares.sum(), likelihood


_LEAST_STEPS: Final = 8
"""A pool of fewer is none: steps near to it stand in."""
_MOST_LEADS: Final = 64
_MOST_STOPS: Final = 200
_FIT_SEED: Final = 0
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
    shares, of_class = difficulty_classes(_burst_counts(lines, k), _FIT_SEED)
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
                decoding=int(code) // model_file.buckets(PREFILL_TOKENS),
                prefill=int(code) % model_file.buckets(PREFILL_TOKENS),
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
    return np.asarray(decoding * model_file.buckets(PREFILL_TOKENS) + prefill, dtype=np.int64)


def _burst_counts(lines: list[Timeline], k: int) -> Floats:
    """Return how many bursts of each size came after which, for each request, without those that max_tokens cut."""
    rows, most = [], min(k + 1, _MOST_SIZES)
    for line in lines:
        counted = ~line.chunk_is_first & ~line.chunk_is_cut
        before = np.searchsorted(model_file.BURST, _before(line)[counted])
        sizes = np.minimum(line.chunk_tokens[counted], most) - 1
        counts = np.zeros((len(line.prompt_tokens), model_file.buckets(model_file.BURST), most))
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
            np.searchsorted(model_file.BURST, _before(line)[counted]),
            np.searchsorted(DECODING, line.decoding[step]),
            np.searchsorted(POSITION, line.chunk_before[counted]),
            np.searchsorted(CONTEXT, attended),
            line.chunk_tokens[counted],
        ]
        tables.append(np.stack(columns, axis=1))
        cut.append(line.chunk_is_cut[counted])
        first_request += len(line.prompt_tokens)
    table = np.concatenate(tables)
    table[:, -1] = uncut(
        table[:, -1], np.concatenate(cut), table[:, 0] * model_file.buckets(model_file.BURST) + table[:, 2]
    )
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
