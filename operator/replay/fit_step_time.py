"""Fit the `step_time` section of a model file: the duration of a step by its content."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from specdecode_operator.capture.files.trace_rules import StepLine
from specdecode_operator.capture.trace_reader import RecordedRequest, Recording, read_steps
from specdecode_operator.replay.emulated.engine_model import StepShape

Numbers = NDArray[np.float64]

SAME_STEP_MS: Final = 0.05
"""Tolerance for matching a chunk of output to the step that produced it.

A chunk's time is a sum of rounded gaps, so it may differ from the end of its step. All steps take longer than this.
"""


@dataclass(frozen=True)
class MeasuredSteps:
    """Content, as in `StepShape`, and duration of steps; all arrays have the same length."""

    requests: Numbers
    scheduled_tokens: Numbers
    prefill_tokens: Numbers
    context_tokens: Numbers
    prefill_pairs: Numbers
    drafted: Numbers
    ms: Numbers  # from the end of the step before to its own; after a pause, its own time and the host's usual share
    host_ms: Numbers  # the part of ms between the steps, nan if unknown

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.ms)

    def every(self, stride: int) -> Self:
        """Return every ``stride``-th step."""
        return replace(self, **{field.name: getattr(self, field.name)[::stride] for field in fields(self)})

    @classmethod
    def of(cls, recordings: Iterable[Recording]) -> Self:
        """Return all steps of some recordings whose content and duration are known."""
        found = []
        for recording in recordings:
            lines: dict[int, list[StepLine]] = {}
            for line in read_steps(recording.steps) if recording.steps is not None else ():
                lines.setdefault(line.engine, []).append(line)
            arrived = [each for each in recording.requests if each.arrival_ms is not None]
            for engine, its_lines in lines.items():
                its_lines.sort(key=lambda line: line.ts_ms)
                requests = [each for each in arrived if each.engine == engine]
                found.append(_of_engine(its_lines, requests, recording.num_speculative_tokens))
        empty = np.zeros(0)
        return cls(
            **{field.name: np.concatenate([empty, *(each[field.name] for each in found)]) for field in fields(cls)}
        )


def _of_engine(lines: Sequence[StepLine], requests: Sequence[RecordedRequest], k: int) -> dict[str, Numbers]:
    ends_ms = np.array([line.ts_ms for line in lines])
    chunks = _chunks_by_step(ends_ms, requests)
    details = [iteration_counts(line, *_COUNTS) for line in lines]
    known = np.array([each is not None for each in details], dtype=bool)
    prefilling, prefill, decoding, decoded = np.array([each or (0,) * 5 for each in details], dtype=float).T[1:]
    # The time since the step before, if the engine continued at once, and the part of it outside the step.
    period_ms, host_ms = np.full(len(lines), np.nan), np.full(len(lines), np.nan)
    for index, ((before, at), (line, now)) in enumerate(pairwise(zip(lines, details, strict=True)), start=1):
        if at is None or now is None or now[0] != at[0] + 1 or not before.scheduler.num_running_reqs:
            continue
        period_ms[index] = line.ts_ms - before.ts_ms
        if line.duration_ms is not None:
            host_ms[index] = max(0.0, period_ms[index] - line.duration_ms)
    own_ms = np.array([line.duration_ms for line in lines], dtype=np.float64)
    usual_ms = float(np.nanmedian(host_ms)) if np.isfinite(host_ms).any() else 0.0
    ms = np.where(np.isfinite(period_ms), period_ms, own_ms + usual_ms)
    # For prompts that continue in the next step, only the tokens of this step are known.
    share = np.divide(prefill, chunks["uncached"], out=np.zeros_like(prefill), where=chunks["uncached"] > 0)
    rest = np.maximum(0, prefill - chunks["uncached"])
    columns = {
        "requests": prefilling + decoding,
        "scheduled_tokens": prefill + decoded,
        "prefill_tokens": prefill,
        "context_tokens": chunks["context"] + decoded + rest,
        "prefill_pairs": chunks["pairs"] * np.minimum(1, share) + rest * rest,
        "drafted": np.where(chunks["count"] > 0, float(k), 0.0),
        "ms": ms,
        "host_ms": host_ms,
    }
    wanted = known & np.isfinite(ms) & (ms > 0) & (columns["requests"] > 0)
    return {name: column[wanted] for name, column in columns.items()}


_COUNTS: Final = (
    "iteration_index",
    "num_ctx_requests",
    "num_ctx_tokens",
    "num_generation_requests",
    "num_generation_tokens",
)


def iteration_counts(line: StepLine, *names: str) -> tuple[int, ...] | None:
    """Return counts of vLLM's iteration details; None if any of them is missing or not a count."""
    given = line.scheduler.iteration_details
    found = [given.get(name) for name in names] if isinstance(given, dict) else [None]
    if not all(isinstance(each, int) and 0 <= each < 2**40 for each in found):
        return None
    return tuple(int(each or 0) for each in found)


def _chunks_by_step(ends_ms: Numbers, requests: Sequence[RecordedRequest]) -> dict[str, Numbers]:
    """Return sums over the requests that got a chunk at the end of each step.

    ``count``: their number. ``context``: tokens that they attend to, without those that the step decodes. For requests
    with their first chunk, ``uncached``: computed prompt tokens, and ``pairs``: these multiplied by the prompt tokens.
    """
    sums = {name: np.zeros(len(ends_ms)) for name in ("count", "context", "uncached", "pairs")}
    if not len(ends_ms):
        return sums
    for request in requests:
        chunks = np.frombuffer(request.chunk_tokens, dtype=np.uint32).astype(float)
        gaps_ms = np.frombuffer(request.gaps_ms, dtype=np.float64)
        chunk_ms = (request.arrival_ms or 0.0) + request.ttft_ms + np.concatenate(([0.0], np.cumsum(gaps_ms)))
        above = np.clip(np.searchsorted(ends_ms, chunk_ms), min(1, len(ends_ms) - 1), len(ends_ms) - 1)
        below = np.maximum(above - 1, 0)
        step = np.where(chunk_ms - ends_ms[below] <= ends_ms[above] - chunk_ms, below, above)
        found = np.abs(ends_ms[step] - chunk_ms) <= SAME_STEP_MS
        # The last known token is the first that the step decodes.
        context = request.prompt_tokens + np.concatenate(([0.0], np.cumsum(chunks)[:-1] - 1))
        np.add.at(sums["count"], step[found], 1.0)
        np.add.at(sums["context"], step[found], context[found])
        if found[0]:
            uncached = max(0, request.prompt_tokens - request.cached_tokens)
            sums["uncached"][step[0]] += uncached
            sums["pairs"][step[0]] += uncached * request.prompt_tokens
    return sums


LEAST_STEPS: Final = 50
"""Steps that a fit needs."""

_MOST_STEPS: Final = 8000  # spread over the recording: more do not make the terms any clearer
_LEAST_IN_SEGMENT: Final = 30  # steps between two knots of the curve
_HUBER: Final = 1.5  # larger deviations, as a multiple of the usual one, count less
_WORTH: Final = 0.003  # share of the squared deviations by which a term must improve the fit to stay
_BEND: Final = 0.02  # the same for a bend of the curve
_HOST_QUANTILE: Final = 0.9  # of the time between steps: slower ones are noise that the residuals have already

_UNITS: Final = {
    "request_us": 1e-3,
    "prefill_token_us": 1e-3,
    "context_ns": 1e-6,
    "prefill_pair_ps": 1e-9,
    "draft_ms": 1.0,
    "draft_request_us": 1e-3,
}
"""Milliseconds in each."""

_DOUBTFUL: Final = ("prefill_pair_ps", "context_ns", "prefill_token_us", "draft_request_us", "request_us")
"""Terms that are dropped if they make little difference, in this order."""


def fit_step_time(steps: MeasuredSteps, *, draft_share: float = 0.0, one_pass: bool = False) -> dict[str, Any] | None:
    """Return the section that describes some steps; None if there are too few.

    Parameters
    ----------
    draft_share
        Bytes that one pass of the draft reads, divided by the bytes for the target. A forecast for another K needs it
        if all recordings have the same K, as the cost of the draft cannot be measured then. Ignored if K varies.
    one_pass
        Whether the draft proposes all tokens in one pass.
    """
    if len(steps) < LEAST_STEPS:
        return None
    # Some of the steps suffice to choose the terms; their sizes are fitted to all steps.
    stride = -(-len(steps) // _MOST_STEPS)
    knots = _bends(steps.every(stride), _knots(steps.scheduled_tokens), draft_share, one_pass)
    table = _table(steps, knots, draft_share, one_pass)
    kept = _choose({name: column[::stride] for name, column in table.items()}, steps.ms[::stride])
    terms = _robust(np.column_stack([table[name] for name in kept]), steps.ms)
    found = dict.fromkeys(table, 0.0) | dict(zip(kept, terms, strict=True))
    modelled = np.column_stack(list(table.values())) @ np.array(list(found.values()))
    ratio = steps.ms / np.maximum(modelled, 1e-9)
    low, high = np.quantile(ratio, (0.001, 0.999))
    ratio = np.clip(ratio, low, high)
    level = float(np.average(ratio, weights=modelled))
    quantiles = np.quantile(ratio, np.linspace(0, 1, 101)) / level
    # Residuals are interpolated between the quantiles, which changes their mean slightly.
    mean = float((quantiles[:-1] + quantiles[1:]).mean() / 2)
    residuals = [round(float(each) / mean, 4) for each in quantiles]
    height = found["base"]
    curve = [[knots[0], round(float(level * height), 5)]]
    for index, (low, high) in enumerate(pairwise(knots)):
        height += found[f"segment {index}"] * (high - low)
        curve.append([high, round(float(level * height), 5)])
    sizes = {name: found.get(name, 0.0) for name in _UNITS}
    if "draft_ms" not in found:
        sizes["draft_ms"] = draft_share * found["base"]
        sizes["draft_request_us"] = draft_share * (1e3 * found.get("segment 0", 0.0) + sizes["request_us"])
    host = steps.host_ms[np.isfinite(steps.host_ms)]
    return {
        "curve": curve,
        **{name: round(float(level * value), 5) for name, value in sizes.items() if value},
        **({"one_pass": True} if one_pass else {}),
        "host_ms": round(float(np.quantile(host, _HOST_QUANTILE)), 4) if len(host) else 0.0,
        "ranges": {
            field.name: [float(getattr(steps, field.name).min()), float(getattr(steps, field.name).max())]
            for field in fields(StepShape)
        },
        "residuals": residuals,
        "persistence": round(persistence(ratio), 4),
    }


def persistence(ratio: Numbers) -> float:
    """Return the correlation of consecutive residuals that makes long runs vary as recorded.

    Noise of a machine fades slower than the correlation of neighbours suggests. So this keeps the sum of the
    correlations of all lags up to the first insignificant one: r + r^2 + … = r / (1 - r).
    """
    deviation = ratio - ratio.mean()
    lasting, spread = 0.0, max(1e-300, float((deviation**2).mean()))
    for lag in range(1, min(200, len(deviation) // 4)):
        correlation = float((deviation[:-lag] * deviation[lag:]).mean()) / spread
        if correlation < 2 / math.sqrt(len(deviation)):
            break
        lasting += correlation
    return lasting / (1 + lasting)


def _knots(tokens: Numbers) -> list[float]:
    """Return candidates for bends of the curve: powers of two, if there are enough steps between them."""
    low, high = float(tokens.min()), float(tokens.max())
    knots, step = [low], max(low, 8.0) * 2
    while step < high:
        between = ((tokens > knots[-1]) & (tokens <= step)).sum()
        if between >= _LEAST_IN_SEGMENT and (tokens > step).sum() >= _LEAST_IN_SEGMENT:
            knots.append(step)
        step *= 2
    return [*knots, high] if high > low else knots


def _bends(steps: MeasuredSteps, candidates: list[float], draft_share: float, one_pass: bool) -> list[float]:
    """Return the knots that improve the fit enough: needless bends extrapolate badly."""

    def cost(knots: list[float]) -> tuple[float, list[float]]:
        return _cost(list(_table(steps, knots, draft_share, one_pass).values()), steps.ms), knots

    best, kept = cost([candidates[0], candidates[-1]] if len(candidates) > 1 else candidates)
    while others := [each for each in candidates if each not in kept]:
        found, knots = min(cost(sorted([*kept, each])) for each in others)
        if found > best * (1 - _BEND):
            break
        best, kept = found, knots
    return kept


def _table(steps: MeasuredSteps, knots: Sequence[float], draft_share: float, one_pass: bool) -> dict[str, Numbers]:
    """Return the column of each term."""
    varies = bool(np.ptp(steps.drafted) > 0 and len(np.unique(steps.drafted[steps.drafted > 0])) > 1)
    # A pass of the draft reads its weights, and processes a token of each request.
    share, read = 0.0 if varies else draft_share, np.minimum(1.0, steps.drafted) if one_pass else steps.drafted
    passes, tokens = share * read, share * steps.drafted
    segments = {
        f"segment {index}": np.clip(steps.scheduled_tokens - low, 0, high - low)
        + tokens * np.clip(steps.requests, 0, high - low) * (index == 0)
        for index, (low, high) in enumerate(pairwise(knots))
    }
    terms = {
        "request_us": steps.requests * (1 + tokens),
        "prefill_token_us": steps.prefill_tokens,
        "context_ns": steps.context_tokens,
        "prefill_pair_ps": steps.prefill_pairs,
    }
    if varies:
        terms |= {"draft_ms": read, "draft_request_us": steps.drafted * steps.requests}
    return {"base": 1 + passes, **segments, **{name: _UNITS[name] * column for name, column in terms.items()}}


def _choose(table: Mapping[str, Numbers], ms: Numbers) -> list[str]:
    """Return the terms that the fit needs."""
    kept = list(table)
    best = _cost([table[name] for name in kept], ms)
    for name in _DOUBTFUL:
        fewer = [each for each in kept if each != name]
        if len(fewer) < len(kept) and (cost := _cost([table[each] for each in fewer], ms)) <= best * (1 + _WORTH):
            kept, best = fewer, cost
    return kept


def _cost(terms: Sequence[Numbers], ms: Numbers) -> float:
    """Return the error of the best fit, with Huber's loss."""
    columns = np.column_stack(terms)
    modelled = np.maximum(columns @ _robust(columns, ms), 1e-9)
    deviation = np.abs(ms / modelled - 1)
    bound = _HUBER * _usual(ms / modelled - 1)
    return float(np.where(deviation <= bound, deviation**2, bound * (2 * deviation - bound)).sum())


def _robust(columns: Numbers, ms: Numbers) -> Numbers:
    """Return non-negative terms that fit most steps, by relative deviations."""
    modelled = np.full(len(ms), float(np.median(ms)))
    terms = np.zeros(columns.shape[1])
    for _ in range(12):
        deviation = ms / modelled - 1
        bound = _HUBER * _usual(deviation)
        weights = np.minimum(1.0, bound / np.maximum(np.abs(deviation), 1e-12)) ** 0.5 / modelled
        terms = non_negative(columns * weights[:, None], ms * weights)
        # From the second round on, deviations are relative to the fit; the floor keeps weights finite.
        modelled = np.maximum(columns @ terms, 0.05 * float(np.median(ms)))
    return terms


def _usual(deviation: Numbers) -> float:
    return max(1e-6, float(np.median(np.abs(deviation - np.median(deviation)))) * 1.4826)


def non_negative(columns: Numbers, values: Numbers) -> Numbers:
    """Return the non-negative least squares solution (Lawson and Hanson 1974, chapter 23)."""
    scale = np.maximum(np.linalg.norm(columns, axis=0), 1e-300)
    normal = (columns / scale).T @ (columns / scale) + 1e-10 * np.eye(columns.shape[1])
    right = (columns / scale).T @ values
    solution = np.zeros(len(right))
    free = np.zeros(len(right), dtype=bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(right).max()))
    for _ in range(3 * len(right)):
        gradient = np.where(free, -np.inf, right - normal @ solution)
        if gradient.max() <= tolerance:
            break
        free[int(gradient.argmax())] = True
        solution = _within_bounds(normal, right, solution, free)
    found: Numbers = solution / scale
    return found


def _within_bounds(normal: Numbers, right: Numbers, solution: Numbers, free: Any) -> Numbers:
    """Return the solution of the free terms; fix those that would be negative at 0."""
    while True:
        trial = np.zeros(len(right))
        trial[free] = np.linalg.solve(normal[np.ix_(free, free)], right[free])
        negative = free & (trial <= 0)
        if not negative.any():
            return np.asarray(trial, dtype=np.float64)
        step = np.min(solution[negative] / (solution[negative] - trial[negative] + 1e-300))
        moved: Numbers = solution + step * (trial - solution)
        free &= moved > 1e-14  # noqa: PLR2004  zero but for rounding
        solution = np.where(free, moved, 0.0)
        if not free.any():
            return np.zeros(len(right))
