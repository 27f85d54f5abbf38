"""How the duration of steps grows with what is in them, in a few numbers: what pools of donors are drawn around."""

from typing import Any, Final

import numpy as np

from specdecode_operator.replay.emulated.step_time import StepTime
from specdecode_operator.replay.fitted.timeline import Bools, Floats, Timeline

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
