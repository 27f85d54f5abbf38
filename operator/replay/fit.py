"""Fit an engine model to captures.

The steps of an engine are reconstructed from the chunks of its requests: all chunks of one step carry the same
timestamp. Step statistics, if recorded, add the content of each step and the steps without output.

Bursts that max_tokens cut count as at least as long as seen. Requests are split into as many difficulty classes as
the data supports by Schwarz's criterion (BIC), and closed-loop clients are recognised by the number of requests in
flight. Each chunk beyond one token was accepted, so a request is a series of accepted lengths.
"""

from bisect import bisect_right
from collections.abc import Sequence
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
    reject_different,
)
from specdecode_operator.enums import Method
from specdecode_operator.replay import model_file
from specdecode_operator.replay.emulated.engine_model import step_time_from_json
from specdecode_operator.replay.fit_step_time import (
    SAME_STEP_MS,
    MeasuredSteps,
    Numbers,
    fit_step_time,
    iteration_counts,
)
from specdecode_operator.replay.model_file import BURST, CONTEXT, DECODING, PACES, POSITION, PREFILL_TOKENS, thinned
from specdecode_operator.vllm.profiles import UnknownEngineVersionError, find_profile
from specdecode_operator.vllm.versions import version_of_engine

LEAST_CHUNKS: Final = 100
"""Chunks that a fit needs; temperatures with fewer share one fit."""

MOST_K: Final = 64
"""Longer drafts are blocks of a diffusion model, or the header is wrong."""

MOST_CLASSES: Final = 4
_MOST_REQUESTS: Final = 2000  # spread over the recording: more do not make the classes any clearer
_ROUNDS: Final = 200
_SAME: Final = 1e-7
_DOUBT: Final = 0.5  # chunks added to each outcome, so that unseen ones are rare instead of impossible
_LEAST_IN_ROW: Final = 20  # chunks after an outcome that its own chances for the next step need

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def fit_acceptance(recordings: Sequence[Recording]) -> dict[str, Any] | None:
    """Return the section; None without drafts, with too few chunks, or with longer drafts than any engine makes."""
    k = max((each.num_speculative_tokens for each in recordings), default=0)
    requests = [request for each in recordings for request in each.requests]
    if not 0 < k <= MOST_K or not requests:
        return None
    requests = requests[:: -(-len(requests) // _MOST_REQUESTS)]
    follows = np.array([_follows(each, k) for each in requests])
    seen = follows.sum(axis=(0, 1))
    if seen.sum() < LEAST_CHUNKS:
        return None
    outcomes, chances = _outcomes(seen, _drafted_lengths(recordings, k))
    if not any(drafted for drafted, _ in outcomes):
        return None
    accepted = np.array([each[1] for each in outcomes])

    def row(of_accepted: Numbers) -> list[float]:
        spread = of_accepted[accepted] * chances
        return [round(float(each), 6) for each in spread / spread.sum()]

    groups: dict[float | None, list[int]] = {}
    for place, request in enumerate(requests):
        groups.setdefault(request.temperature, []).append(place)
    if any(follows[places].sum() < LEAST_CHUNKS for places in groups.values()):
        groups = {None: list(range(len(requests)))}
    classes = []
    for temperature, places in sorted(groups.items(), key=lambda item: (item[0] is not None, item[0] or 0.0)):
        for share, rows in _best_mixture(follows[places]):
            made = {"share": round(float(share * (len(places) / len(requests))), 6), "outcomes": row(rows[-1])}
            if np.abs(rows[:-1] - rows[-1]).max() > 0:
                made["after"] = [row(rows[before]) for before in accepted]
            classes.append(made if temperature is None else made | {"temperature": temperature})
    return {
        "num_speculative_tokens": k,
        "outcomes": [list(each) for each in outcomes],
        "classes": classes,
        "ranges": {"requests": len(requests), "chunks": int(seen.sum())},
    }


def _follows(request: RecordedRequest, k: int) -> Numbers:
    """Return how often an accepted length (axis 1) came after another (axis 0).

    The last row is for the first step. Steps whose draft the end of the answer may have cut do not count.
    """
    chunks = np.frombuffer(request.chunk_tokens, dtype=np.uint32).astype(int)
    before = np.cumsum(chunks)[:-1]
    # Decide by the tokens before the step: deciding by those after it would favour short steps.
    whole = before <= before[-1] + chunks[-1] - (k + 1) if len(before) else np.zeros(0, dtype=bool)
    accepted = np.clip(chunks[1:][whole] - 1, 0, k)
    follows = np.zeros((k + 2, k + 1))
    if len(accepted):
        follows[-1, accepted[0]] += 1
        np.add.at(follows, (accepted[:-1], accepted[1:]), 1)
    return follows


def _drafted_lengths(recordings: Sequence[Recording], k: int) -> Numbers | None:
    """Return the number of drafts of each length from 0 (no draft) to K; None if that was not recorded."""
    lengths, chunks = np.zeros(k + 1), 0
    for recording in recordings:
        if recording.steps is None:
            return None
        for line in read_steps(recording.steps):
            stats = line.scheduler.spec_decoding_stats
            if stats is None:
                continue
            given = stats.num_draft_tokens_per_pos
            if not isinstance(given, list) or not all(isinstance(each, int) for each in given):
                # Assume drafts of equal length, as those of a draft model are.
                given = [stats.num_drafts] * (stats.num_draft_tokens // max(1, stats.num_drafts))
            reaching = np.array([*given, *[0] * k][:k], dtype=float)
            lengths[1:] += reaching - np.append(reaching[1:], 0.0)
        chunks += sum(len(request.gaps_ms) for request in recording.requests)
    lengths[0] = max(0.0, chunks - lengths.sum())
    return np.maximum(0.0, lengths)


def _outcomes(accepted: Numbers, lengths: Numbers | None) -> tuple[list[tuple[int, int]], Numbers]:
    """Return the observed (drafted, accepted) pairs, and the share of each among the pairs of its accepted length."""
    k = len(accepted) - 1
    if lengths is None or lengths[1:].sum() == 0:
        lengths = np.append(np.zeros(k), 1.0)
    left = lengths / lengths.sum() * accepted.sum()
    if k and left[k] >= (1 - 1e-3) * accepted.sum():
        left = np.append(np.zeros(k), accepted.sum())  # always K: only ends of answers are missing
    table = np.zeros((k + 1, k + 1))
    # A draft is at least as long as its accepted tokens: start with the longest, which have the least choice.
    for length in range(k, -1, -1):
        room = np.where(np.arange(k + 1) >= length, left, 0.0)
        share = room / room.sum() if room.sum() > 0 else np.eye(k + 1)[length or k]
        table[:, length] = accepted[length] * share
        left = np.maximum(0.0, left - table[:, length])
    outcomes = [(drafted, taken) for drafted in range(k + 1) for taken in range(drafted + 1) if table[drafted, taken]]
    of_accepted = np.maximum(table.sum(axis=0), 1e-300)
    return outcomes, np.array([table[drafted, taken] / of_accepted[taken] for drafted, taken in outcomes])


def _best_mixture(follows: Numbers) -> list[tuple[float, Numbers]]:
    """Return share and chances of each class, with the classes and the memory that Schwarz's criterion selects."""
    best, least = list[tuple[float, Numbers]](), float("inf")
    for remembers in (False, True):
        for classes in range(1, MOST_CLASSES + 1):
            shares, chances, criterion = _fit_mixture(follows, classes, remembers)
            if criterion < least:
                best, least = list(zip(shares, chances, strict=True)), criterion
            elif classes > 1:
                break
    return best


def _fit_mixture(follows: Numbers, classes: int, remembers: bool) -> tuple[Numbers, Numbers, float]:
    """Return the likeliest mixture of this many classes (Dempster, Laird and Rubin 1977), and Schwarz's criterion.

    Chances are by class, the length before (the last one: no length), and the length.
    """
    lengths, counts = follows.shape[2], follows.sum(axis=1)
    marginal = counts.sum(axis=0) / counts.sum()
    # The first guess divides requests by their mean accepted length.
    mean = counts @ np.arange(lengths) / np.maximum(1, counts.sum(axis=1))
    place: NDArray[np.intp] = np.argsort(np.argsort(mean)) * classes // max(1, len(mean))
    belongs: Numbers = 0.9 * np.eye(classes)[place] + 0.1 / classes
    likelihood = -np.inf
    shares, chances = np.ones(classes) / classes, np.zeros((classes, lengths + 1, lengths))
    for _ in range(_ROUNDS):
        shares = belongs.mean(axis=0)
        seen = np.einsum("rc,rbl->cbl", belongs, follows)
        all_of_class = seen.sum(axis=1) + _DOUBT * lengths * marginal
        whole = all_of_class / all_of_class.sum(axis=1, keepdims=True)
        chances = np.repeat(whole[:, None, :], lengths + 1, axis=1)
        if remembers:  # separate chances after each length
            rows = seen[:, :-1] + _DOUBT * lengths * whole[:, None, :]
            enough = seen[:, :-1].sum(axis=2, keepdims=True) >= _LEAST_IN_ROW
            chances[:, :-1] = np.where(enough, rows / rows.sum(axis=2, keepdims=True), chances[:, :-1])
        logs = np.einsum("rbl,cbl->rc", follows, np.log(np.maximum(chances, 1e-12)))
        logs += np.log(np.maximum(shares, 1e-12))
        most = logs.max(axis=1, keepdims=True)
        weights = np.exp(logs - most)
        belongs = weights / weights.sum(axis=1, keepdims=True)
        before, likelihood = likelihood, float((most[:, 0] + np.log(weights.sum(axis=1))).sum())
        if likelihood - before < _SAME * abs(likelihood):
            break
    terms = classes * ((lengths if remembers else 0) + 1) * (lengths - 1) + classes - 1
    return shares, chances, float(terms * np.log(max(2.0, follows.sum())) - 2 * likelihood)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Steps of engines in order, as arrays with one entry for each step, chunk or request."""

    # Of steps
    end_ms: Numbers
    duration_ms: Numbers  # nan if its start is unknown
    follows: Bools  # whether it began when the one before ended
    requests: Ints
    decoding: Ints  # the requests beyond their prefill
    prefill_tokens: Ints
    context_tokens: Ints
    kv_cache_usage: Numbers  # nan without step statistics
    # Of chunks, those of each request in order
    chunk_request: Ints
    chunk_step: Ints
    chunk_tokens: Ints
    chunk_before: Ints  # tokens of the request before the chunk
    chunk_is_first: Bools
    chunk_is_cut: Bools  # the last of a request that ended at max_tokens
    # Of requests
    prompt_tokens: Ints
    lead_ms: Numbers  # from arrival to the first scheduling, of requests that found the engine idle

    @classmethod
    def joined(cls, lines: Sequence["Timeline"]) -> "Timeline":
        """Return the timelines of several engines as one."""
        found = {name: np.concatenate([getattr(line, name) for line in lines]) for name in cls.__dataclass_fields__}
        for name, counted in (("chunk_request", "prompt_tokens"), ("chunk_step", "end_ms")):
            before = np.cumsum([0, *(len(getattr(line, counted)) for line in lines)])[:-1]
            found[name] += np.repeat(before, [len(line.chunk_tokens) for line in lines])
        return cls(**found)


def timeline(requests: Sequence[RecordedRequest], stats: Sequence[StepLine]) -> Timeline:
    """Return the steps of one engine, from its step statistics and its requests that have an arrival."""
    counts = np.array([len(each.chunk_tokens) for each in requests], dtype=np.int64)
    chunk_ms = np.concatenate(
        [np.cumsum(np.concatenate([[(each.arrival_ms or 0.0) + each.ttft_ms], each.gaps_ms])) for each in requests]
    )
    tokens = np.concatenate([np.asarray(each.chunk_tokens, dtype=np.int64) for each in requests])
    ends = np.cumsum(counts)
    is_first, is_last = np.zeros(len(tokens), dtype=bool), np.zeros(len(tokens), dtype=bool)
    is_first[ends - counts], is_last[ends - 1] = True, True
    request, total = np.repeat(np.arange(len(requests)), counts), np.cumsum(tokens) - tokens
    before = total - total[ends - counts][request]

    stamps_ms = np.concatenate([chunk_ms, np.array([line.ts_ms for line in stats], dtype=np.float64)])
    order = np.argsort(stamps_ms, kind="stable")
    ordered = stamps_ms[order]
    begins = np.concatenate([[True], np.diff(ordered) > SAME_STEP_MS])
    end_ms = ordered[begins]
    step_of = np.empty(len(stamps_ms), dtype=np.int64)
    step_of[order] = np.cumsum(begins) - 1
    chunk_step, stats_step = step_of[: len(chunk_ms)], step_of[len(chunk_ms) :]

    arrival_ms = np.array([each.arrival_ms for each in requests], dtype=np.float64)
    scheduled_ms = np.array([each.scheduled_ms for each in requests], dtype=np.float64)  # nan if unknown
    begin_ms = np.where(np.isnan(scheduled_ms), arrival_ms, scheduled_ms)
    start_ms, follows = _starts(end_ms, begin_ms, chunk_ms[is_last])
    found_idle = _active(arrival_ms, begin_ms, chunk_ms[is_last]) + _active(begin_ms, begin_ms, chunk_ms[is_last]) == 0
    prompt_tokens = np.array([each.prompt_tokens for each in requests], dtype=np.int64)
    attended = (prompt_tokens[request] + before).astype(np.float64)
    decoding = np.bincount(chunk_step[~is_first], minlength=len(end_ms))
    prefill, prefilling = _prefill(requests, chunk_step[is_first], end_ms, begin_ms)
    batch, usage = decoding + prefilling, np.full(len(end_ms), np.nan)
    for line, step in zip(stats, stats_step, strict=True):
        usage[step] = line.scheduler.kv_cache_usage
        # The engine's own counts replace those derived from the chunks.
        counted = iteration_counts(line, "num_ctx_requests", "num_generation_requests", "num_ctx_tokens")
        if counted is not None:
            batch[step], decoding[step], prefill[step] = counted[0] + counted[1], counted[1], counted[2]
    return Timeline(
        end_ms=end_ms,
        duration_ms=end_ms - start_ms,
        follows=follows,
        requests=batch,
        decoding=decoding,
        prefill_tokens=prefill,
        context_tokens=np.bincount(chunk_step, weights=attended, minlength=len(end_ms)).astype(np.int64),
        kv_cache_usage=usage,
        chunk_request=request,
        chunk_step=chunk_step,
        chunk_tokens=tokens,
        chunk_before=before,
        chunk_is_first=is_first,
        chunk_is_cut=is_last & np.array([each.finish_reason == "length" for each in requests])[request],
        prompt_tokens=prompt_tokens,
        lead_ms=np.maximum(0.0, begin_ms - arrival_ms)[found_idle & ~np.isnan(scheduled_ms)],
    )


def _active(at_ms: Numbers, begin_ms: Numbers, last_ms: Numbers) -> Ints:
    """Return how many requests had begun and were not over at each time."""
    begun = np.searchsorted(np.sort(begin_ms), at_ms - SAME_STEP_MS, side="right")
    over = np.searchsorted(np.sort(last_ms), at_ms + SAME_STEP_MS, side="right")
    return np.asarray(begun - over, dtype=np.int64)


def _starts(end_ms: Numbers, begin_ms: Numbers, last_ms: Numbers) -> tuple[Numbers, Bools]:
    """Return when each step began, and whether that was the end of the step before.

    Otherwise its first request came into an idle engine.
    """
    before = np.concatenate([[-np.inf], end_ms[:-1]])
    # A request that is scheduled at the end of a step has a slightly later timestamp.
    follows = _active(before + 2 * SAME_STEP_MS, begin_ms, last_ms) > 0
    ordered = np.sort(begin_ms)
    first = np.searchsorted(ordered, before, side="left")
    came = ordered[np.minimum(first, len(ordered) - 1)]
    idle = np.where((first < len(ordered)) & (came < end_ms), came, np.nan)
    return np.where(follows, before, idle), follows


def _prefill(requests: Sequence[RecordedRequest], last: Ints, end_ms: Numbers, begin_ms: Numbers) -> tuple[Ints, Ints]:
    """Return the prompt tokens and the prefilling requests of each step; ``last`` is the step that ends each prompt."""
    computed = np.array([max(1, each.prompt_tokens - each.cached_tokens) for each in requests], dtype=np.int64)
    prefill, prefilling = np.zeros(len(end_ms), dtype=np.int64), np.zeros(len(end_ms), dtype=np.int64)
    first = np.minimum(np.searchsorted(end_ms, begin_ms + SAME_STEP_MS, side="right"), last)
    alone = first == last
    np.add.at(prefill, last[alone], computed[alone])
    np.add.at(prefilling, last[alone], 1)
    for request in np.flatnonzero(~alone):
        # The sizes of a prompt's chunks are not recorded: assume equal ones.
        span = slice(first[request], last[request] + 1)
        prefill[span] += -(-computed[request] // (last[request] + 1 - first[request]))
        prefilling[span] += 1
    return prefill, prefilling


_OUTLIER: Final = 4.0  # steps off by this factor are left out of the next round: something else ran
# A term stays if the error grows by this factor without it, and by this much for each step.
_WORTH: Final = 1.005
_EXACT: Final = 1e-6


def fitted_trend(line: Timeline) -> dict[str, Any]:
    """Return a section `step_time` without residuals, with terms that are not negative."""
    duration_ms, requests, prefill = line.duration_ms, line.requests, line.prefill_tokens
    columns = [np.ones(len(requests)), requests, prefill, line.context_tokens]
    terms = np.stack(columns, axis=1).astype(np.float64)
    usable = np.isfinite(duration_ms) & (duration_ms > 0) & (requests + prefill > 0)
    factors = _not_negative(terms, duration_ms, usable)
    for _ in range(2):
        ratio = duration_ms / np.maximum(terms @ factors, 1e-6)
        factors = _not_negative(terms, duration_ms, usable & (ratio < _OUTLIER) & (ratio > 1 / _OUTLIER))
    base_ms, request_ms, prefill_ms, context_ms = (float(factor) for factor in factors)
    return {
        "curve": [[1, round(max(base_ms, 1e-3), 6)]],
        "request_us": round(1e3 * request_ms, 6),
        "prefill_token_us": round(1e3 * prefill_ms, 6),
        "context_ns": round(1e6 * context_ms, 6),
    }


def _not_negative(terms: Numbers, durations_ms: Numbers, used: Bools) -> Numbers:
    """Return the factors with the best fit by relative error, without negative or useless terms.

    Correlated terms, such as requests and their context, would otherwise share a cost, and mislead under loads in which
    they are not correlated.
    """
    rows, durations = terms[used], durations_ms[used]
    factors = np.zeros(terms.shape[1])
    if not len(rows):
        factors[0] = 1.0
        return factors

    def solved(columns: list[int]) -> tuple[float, list[int], Numbers]:
        """Return the error of the least-squares factors by relative error, the columns, and the factors."""
        scale = np.maximum(np.abs(rows[:, columns]).max(axis=0), 1.0)
        weighed = rows[:, columns] / scale / durations[:, None]
        found = np.linalg.lstsq(weighed, np.ones(len(rows)), rcond=None)[0]
        return float(((weighed @ found - 1) ** 2).sum()), columns, found / scale

    error, kept, best = solved([0, *(index for index in range(1, len(factors)) if np.ptp(rows[:, index]) > 0)])
    while len(kept) > 1:
        without = [solved([index for index in kept if index != left_out]) for left_out in kept[1:]]
        larger, columns, fewer = min(without, key=lambda each: each[0])
        negative = (best < 0).any()
        if not negative and larger > _WORTH * error + _EXACT * len(rows):
            break
        kept, best, error = columns, fewer, larger if not negative else max(larger, error)
    factors[kept] = np.maximum(best, 0.0)
    return factors


_SEED = 0


def uncut(tokens: Ints, cut: Bools, groups: Ints) -> Ints:
    """Return the sizes of bursts, with each cut one replaced by a size of its group that is at least as large.

    The chance of each size is the estimate of Kaplan and Meier: a burst cut at a size counts for all below it.
    """
    found = tokens.copy()
    random = np.random.default_rng(_SEED)
    for group in np.unique(groups[cut]):
        mine = groups == group
        whole, ended = tokens[mine & ~cut], tokens[mine & cut]
        if not len(whole):
            continue
        sizes, counts = np.unique(whole, return_counts=True)
        left, chances = 1.0, np.zeros(len(sizes))
        for index, size in enumerate(sizes):
            at_risk = (whole >= size).sum() + (ended > size).sum()
            chances[index] = left * counts[index] / at_risk
            left -= chances[index]
        chances[-1] += max(0.0, left)
        for place in np.flatnonzero(mine & cut):
            possible = np.where(sizes >= tokens[place], chances, 0.0)
            if possible.sum() > 0:
                found[place] = random.choice(sizes, p=possible / possible.sum())
    return found


_CLOSED_SHARE: Final = 0.6  # of arrivals that find all other clients waiting: rare if requests come by chance
_AT_ONCE: Final = 0.2  # longest turnaround, as a share of the time between arrivals: tells clients from a steady rate


def turnarounds_ms(requests: Sequence[RecordedRequest]) -> list[float]:
    """Return the time from an answer's last token to the client's next request, in closed-loop phases."""
    found: list[float] = []
    arrived = [request for request in requests if request.arrival_ms is not None]
    ordered = sorted(arrived, key=lambda request: (request.phase or "", request.arrival_ms or 0.0))
    for _, of_phase in groupby(ordered, key=lambda request: request.phase):
        group = list(of_phase)
        arrivals_ms = [request.arrival_ms or 0.0 for request in group]
        ends_ms = sorted(request.end_ms or 0.0 for request in group)
        in_flight = [index - bisect_right(ends_ms, at_ms + SAME_STEP_MS) for index, at_ms in enumerate(arrivals_ms, 1)]
        clients = max(in_flight)
        later = in_flight[clients:]
        if len(later) < clients or sum(each == clients for each in later) < _CLOSED_SHARE * len(later):
            continue
        waits_ms = [max(0.0, at_ms - end_ms) for at_ms, end_ms in zip(arrivals_ms[clients:], ends_ms, strict=False)]
        if median(waits_ms) * len(group) < _AT_ONCE * (arrivals_ms[-1] - arrivals_ms[0]):
            found += waits_ms
    return found


_LEAST: Final = 1e-6


def difficulty_classes(counts: Numbers) -> tuple[list[float], Ints]:
    """Return the shares of classes, and the class of each request.

    ``counts`` has the bursts of each size after bursts of each size, for each request: a sequence of hits does not make
    a request easy. Each request's class is drawn by its probabilities, so that bursts of classes differ as in
    expectation.
    """
    best, best_score = (np.ones((len(counts), 1)), 1), float("inf")
    seen = max(1, int((counts.sum(axis=(0, 2)) > 0).sum()))
    for number in range(1, MOST_CLASSES + 1):
        chances, likelihood = _class_chances(counts, number)
        free = number * seen * (counts.shape[2] - 1) + number - 1
        score = free * np.log(max(2, len(counts))) - 2 * likelihood
        if score < best_score:
            best, best_score = (chances, number), score
    chances, number = best
    drawn = np.random.default_rng(_SEED).random(len(counts))
    chosen = (np.cumsum(chances, axis=1) < drawn[:, None]).sum(axis=1)
    of_class = np.minimum(chosen, number - 1).astype(np.int64)
    shares = np.bincount(of_class, minlength=number) / max(1, len(of_class))
    return [round(float(share), 6) for share in shares], of_class


def _class_chances(counts: Numbers, number: int) -> tuple[Numbers, float]:
    """Return each request's chances of each class, and the log-likelihood."""
    totals = np.maximum(counts.sum(axis=(1, 2)), 1)
    order = np.argsort(counts.sum(axis=1) @ np.arange(counts.shape[2]) / totals, kind="stable")
    chances = np.zeros((len(counts), number))
    for index, part in enumerate(np.array_split(order, number)):
        chances[part, index] = 1.0
    likelihood = 0.0
    for _ in range(60):
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
    return chances, likelihood


_LEAST_STEPS: Final = 8  # of a pool: nearby pools stand in for smaller ones
_MOST_LEADS: Final = 64
_USED_CACHE: Final = 0.05  # least usage of a KV cache that tells its size


def fit(recordings: Sequence[Recording], *, draft_share: float = 0.0) -> model_file.FittedModel:
    """Return a model of the engine that the captures were taken of.

    Parameters
    ----------
    draft_share
        Bytes that one pass of the draft reads, divided by the bytes for the target: see `fit_step_time`.

    Raises
    ------
    RecordingError
        The captures are of different engines, or have too little data.
    """
    reject_different(recordings)
    k = max(each.num_speculative_tokens for each in recordings)
    lines, captures, drafts, draft_tokens = list[Timeline](), list[model_file.FittedCapture](), 0, 0
    for recording in recordings:
        steps = list(read_steps(recording.steps)) if recording.steps is not None else []
        arrived = [request for request in recording.requests if request.arrival_ms is not None]
        found = [
            timeline(
                [request for request in arrived if request.engine == engine],
                [line for line in steps if line.engine == engine],
            )
            for engine in sorted({request.engine for request in arrived})
        ]
        lines += found
        captures.append(
            model_file.FittedCapture(
                name=recording.trace.parent.name,
                config_hash=recording.meta.config_hash,
                requests=len(recording.requests),
                steps=sum(len(line.end_ms) for line in found),
            )
        )
        for stats in (line.scheduler.spec_decoding_stats for line in steps):
            drafts += stats.num_drafts if stats else 0
            draft_tokens += stats.num_draft_tokens if stats else 0
    if not lines or not any(np.isfinite(line.duration_ms).any() for line in lines):
        raise RecordingError(f"{recordings[0].trace}: no request has arrival_ms, which a fit needs")
    requests = [request for recording in recordings for request in recording.requests]
    line = Timeline.joined(lines)
    turnarounds = [min(each, LONGEST_GAP_MS) for recording in recordings for each in turnarounds_ms(recording.requests)]
    return model_file.FittedModel(
        schema=model_file.SCHEMA,
        origin=_origin(recordings, captures, _blocks(lines, k, recordings[0].meta.block_size or None)),
        donors=_donors(line, requests, k, _drafts(line, k, drafts, draft_tokens)),
        ttft=model_file.Ttft(lead_ms=thinned(np.minimum(line.lead_ms, LONGEST_GAP_MS).tolist(), _MOST_LEADS)),
        clients=model_file.Clients(turnarounds_ms=thinned(turnarounds, _MOST_LEADS)) if turnarounds else None,
        step_time=_step_time(recordings, line, k, draft_share),
        acceptance=fit_acceptance(recordings),
    )


def _step_time(recordings: Sequence[Recording], line: Timeline, k: int, draft_share: float) -> dict[str, Any] | None:
    """Return the section `step_time`, from the engines' own counts or, without these, from the requests."""
    one_pass = any(each.meta.drafts_in_one_pass for each in recordings)
    counted = fit_step_time(MeasuredSteps.of(recordings), draft_share=draft_share, one_pass=one_pass)
    manifests = [read_manifest(each.trace.parent) for each in recordings]
    # A live capture may have recorded a sample of the requests, or lost some.
    lives = [manifest.live for manifest in manifests if manifest and manifest.live]
    if counted is not None or any(live.accounting.sampled_out or live.lost for live in lives):
        return counted
    return fit_step_time(_derived_steps(line, k), draft_share=draft_share, one_pass=one_pass)


def _derived_steps(line: Timeline, k: int) -> MeasuredSteps:
    """Return the steps that began when the one before ended, with the content that the requests give.

    Prompts that take several steps are assumed to be divided equally, and every decoding request to verify K drafts.
    """
    first = line.chunk_step[line.chunk_is_first]
    prompts = line.prompt_tokens[line.chunk_request[line.chunk_is_first]]
    steps = len(line.end_ms)
    ended, lengths = np.bincount(first, minlength=steps), np.bincount(first, weights=prompts, minlength=steps)
    attended = np.divide(lengths, ended, out=line.prefill_tokens.astype(np.float64), where=ended > 0)
    verified = line.decoding * (1.0 + k)
    columns = {
        "requests": line.requests.astype(np.float64),
        "scheduled_tokens": line.prefill_tokens + verified,
        "prefill_tokens": line.prefill_tokens.astype(np.float64),
        "context_tokens": line.context_tokens + verified,
        "prefill_pairs": line.prefill_tokens * attended,
        "drafted": np.where(line.decoding > 0, float(k), 0.0),
        "ms": line.duration_ms,
        "host_ms": np.full(steps, np.nan),
    }
    wanted = line.follows & np.isfinite(line.duration_ms) & (line.duration_ms > 0) & (line.requests > 0)
    return MeasuredSteps(**{name: column[wanted] for name, column in columns.items()})


def _origin(
    recordings: Sequence[Recording], captures: list[model_file.FittedCapture], blocks: int | None
) -> model_file.Origin:
    meta = recordings[0].meta
    manifest = read_manifest(recordings[0].trace.parent)
    config = manifest.config if manifest else None
    counted = manifest.engine_counters.num_gpu_blocks if manifest and manifest.engine_counters else None
    return model_file.Origin(
        model=meta.model,
        gpu=meta.gpu,
        tp=meta.tp or None,
        vllm_version=meta.vllm_version,
        speculative=meta.speculative,
        limits=model_file.Limits(
            max_num_seqs=meta.max_num_seqs or None,
            max_num_batched_tokens=config.max_num_batched_tokens if config else None,
            max_model_len=config.max_model_len if config else None,
            block_size=meta.block_size or None,
            num_gpu_blocks=counted or blocks,
            enable_prefix_caching=config.enable_prefix_caching if config else None,
            async_scheduling=config.async_scheduling if config else None,
            draft_slots=_draft_slots(meta),
        ),
        captures=captures,
    )


def _draft_slots(meta: TraceMeta) -> int | None:
    """Return the tokens that vLLM's scheduler reserves for drafting for each request of a step; None if unknown."""
    method, k = ((meta.speculative or {}).get(name) for name in ("method", "num_speculative_tokens"))
    version = version_of_engine(meta.vllm_version or "")
    if method not in tuple(Method) or type(k) is not int or version is None:
        return None
    try:
        of_method = find_profile(version).extra_draft_slots.get(Method(method))
    except UnknownEngineVersionError:
        return None
    return max(0, of_method.at(k)) if of_method else None


def _blocks(lines: list[Timeline], k: int, block_size: int | None) -> int | None:
    """Estimate the number of KV cache blocks from its usage and the tokens of its requests; None if unknown."""
    found: list[float] = []
    for line in lines:
        used = line.kv_cache_usage
        following = np.concatenate([line.decoding[1:], [0]])
        # Requests that end have released their blocks when usage is counted: take steps in which none ends.
        whole = (used > _USED_CACHE) & (line.prefill_tokens == 0) & (following == line.decoding)
        if block_size and whole.any():
            # Each request also holds room for its drafts, and on average half a block more than it needs.
            tokens = line.context_tokens[whole] + k * line.decoding[whole]
            blocks = tokens / block_size + line.decoding[whole] / 2
            found += (blocks / used[whole]).tolist()
    return max(1, round(float(np.median(found)))) if len(found) >= _LEAST_STEPS else None


def _donors(
    line: Timeline, requests: Sequence[RecordedRequest], k: int, drafts: model_file.Drafts
) -> model_file.Donors:
    trend = fitted_trend(line)
    cells, persistence, pace = _pools(line, trend)
    shares, of_class = difficulty_classes(_burst_counts(line, k))
    values, counts = np.unique(line.chunk_tokens[line.chunk_is_first], return_counts=True)
    stopped = [request.output_tokens for request in requests if request.finish_reason == "stop"]
    ended = sum(1 for request in requests if request.finish_reason in ("stop", "length"))
    seen = {
        "requests decoding at once": line.decoding[line.decoding > 0],
        "prompt tokens in a step": line.prefill_tokens[line.prefill_tokens > 0],
        "tokens of a prompt": line.prompt_tokens,
        "tokens of a request": line.prompt_tokens[line.chunk_request] + line.chunk_before + line.chunk_tokens,
    }
    return model_file.Donors(
        num_speculative_tokens=k,
        trend=trend,
        cells=cells,
        persistence=persistence,
        classes=shares,
        bursts=_bursts(line, pace, of_class),
        firsts=[(int(value), int(count)) for value, count in zip(values, counts, strict=True)],
        drafts=drafts,
        stops=model_file.Stops(
            share=round(len(stopped) / ended, 6) if ended else 0.0,
            output_tokens=[int(value) for value in thinned(stopped, 200)],
        ),
        ranges={
            name: model_file.Range(float(each.min()), float(each.max())) for name, each in seen.items() if len(each)
        },
    )


def _pools(line: Timeline, trend: dict[str, Any]) -> tuple[list[model_file.Cell], float, Numbers]:
    """Return the steps by cell, the persistence of paces, and the pace of each step.

    A pace is a step's rank in its cell, from 0 to 1, and nan if its duration is unknown. Persistence is the correlation
    of the paces of consecutive steps.
    """
    model = step_time_from_json(trend)
    each_us = model.request_us * line.requests + model.prefill_token_us * line.prefill_tokens
    expected_ms = model.curve[0][1] + 1e-3 * each_us + 1e-6 * model.context_ns * line.context_tokens
    ratio = np.maximum(line.duration_ms, 1e-3) / expected_ms
    prefill_buckets = len(PREFILL_TOKENS) + 1
    decoding_bucket = np.searchsorted(DECODING, line.decoding)
    code = decoding_bucket * prefill_buckets + np.searchsorted(PREFILL_TOKENS, line.prefill_tokens)
    usable = np.isfinite(ratio) & (code > 0)
    codes, counts = np.unique(code[usable], return_counts=True)
    cells, pace = list[model_file.Cell](), np.full(len(ratio), np.nan)
    for each, count in zip(codes, counts, strict=True):
        of_cell = np.flatnonzero(usable & (code == each))
        ranks = np.argsort(np.argsort(ratio[of_cell], kind="stable"), kind="stable")
        pace[of_cell] = (ranks + 0.5) / len(of_cell)
        if count >= min(_LEAST_STEPS, int(counts.max())):
            decoding, prefill = divmod(int(each), prefill_buckets)
            kept = thinned(ratio[of_cell].tolist(), model_file.MOST_DONORS)
            cells.append(model_file.Cell(decoding=decoding, prefill=prefill, steps=int(count), ratios=kept))
    both = np.isfinite(pace[1:]) & np.isfinite(pace[:-1]) & line.follows[1:]
    pairs = np.stack([pace[:-1][both], pace[1:][both]], axis=1)
    if len(pairs) < _LEAST_STEPS or not pairs.std(axis=0).all():
        return cells, 0.0, pace
    return cells, round(min(0.99, max(0.0, float(np.corrcoef(pairs.T)[0, 1]))), 4), pace


def _burst_counts(line: Timeline, k: int) -> Numbers:
    """Return how often a burst of each size followed one of each size, by request, without cut bursts."""
    most = min(k + 1, 32)  # larger bursts no longer tell easy requests from hard ones
    counted = ~line.chunk_is_first & ~line.chunk_is_cut
    before = np.searchsorted(BURST, _before(line)[counted])
    counts = np.zeros((len(line.prompt_tokens), len(BURST) + 1, most))
    np.add.at(counts, (line.chunk_request[counted], before, np.minimum(line.chunk_tokens[counted], most) - 1), 1)
    return counts


def _before(line: Timeline) -> Ints:
    """Return the tokens of the burst before each chunk; 0 if that burst ended the prefill."""
    before = np.concatenate([[0], line.chunk_tokens[:-1]])
    before[np.concatenate([[False], line.chunk_is_first[:-1]])] = 0
    return before


def _bursts(line: Timeline, pace: Numbers, of_class: Ints) -> model_file.Bursts:
    counted = ~line.chunk_is_first & np.isfinite(pace[line.chunk_step])
    request, step, before = line.chunk_request[counted], line.chunk_step[counted], line.chunk_before[counted]
    columns = {
        "classes": of_class[request],
        "paces": np.minimum((pace[step] * PACES).astype(np.int64), PACES - 1),
        "before": np.searchsorted(BURST, _before(line)[counted]),
        "decoding": np.searchsorted(DECODING, line.decoding[step]),
        "positions": np.searchsorted(POSITION, before),
        "contexts": np.searchsorted(CONTEXT, line.prompt_tokens[request] + before),
    }
    groups = columns["classes"] * (len(BURST) + 1) + columns["before"]
    columns["tokens"] = uncut(line.chunk_tokens[counted], line.chunk_is_cut[counted], groups)
    rows, counts = np.unique(np.stack(list(columns.values()), axis=1), axis=0, return_counts=True)
    return model_file.Bursts(counts=counts.tolist(), **dict(zip(columns, rows.T.tolist(), strict=True)))


def _drafts(line: Timeline, k: int, drafts: int, draft_tokens: int) -> model_file.Drafts:
    """Return drafts by the engine's counters, or K tokens in every step without counters."""
    if not drafts:
        return model_file.Drafts(singles=1.0 if k else 0.0, tokens=float(k))
    sizes = line.chunk_tokens[~line.chunk_is_first]
    several, singles = int((sizes > 1).sum()), int((sizes == 1).sum())
    share = (drafts - several) / singles if singles else 1.0
    return model_file.Drafts(singles=round(min(1.0, max(0.0, share)), 6), tokens=round(draft_tokens / drafts, 6))
