"""Fit the `acceptance` section of a model file: the outcome of drafts.

Each chunk beyond one token was accepted, so a request is a series of accepted lengths. Step statistics give drafted
tokens only in sum; these are divided among the chunks. Classes of requests, and dependence between steps, are added
only where they improve the fit by Schwarz's criterion (BIC), so a small capture gets one class.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from specdecode_operator.capture.trace_reader import RecordedRequest, Recording, read_steps
from specdecode_operator.replay.fit_step_time import Numbers

LEAST_CHUNKS: Final = 100
"""Fewer of one temperature carry no fit of their own."""

MOST_K: Final = 64
"""Longer drafts are no speculation as vLLM has it, but blocks of a diffusion model or a header that is wrong."""

MOST_CLASSES: Final = 4
_MOST_REQUESTS: Final = 2000
"""More do not make the classes any clearer; these are spread over the recording."""

_ROUNDS: Final = 200
_SAME: Final = 1e-7
_DOUBT: Final = 0.5
"""Chunks of each outcome that are added to those that were seen: what was not seen is rare, not impossible."""

_LEAST_IN_ROW: Final = 20
"""After an outcome that was rarer, the next one is drawn as if nothing were known of it."""

_DIGITS: Final = 6


@dataclass(frozen=True)
class _Series:
    """What was accepted in the steps of some requests; axis 0 are requests, the others accepted lengths."""

    follows: Numbers  # how often a length came after another; the last row is for the first step

    @property
    def counts(self) -> Numbers:
        counts: Numbers = self.follows.sum(axis=1)
        return counts


@dataclass(frozen=True)
class _Mixture:
    shares: Numbers
    chances: Numbers  # by class, the length before (the last one: none), and the length
    criterion: float  # Schwarz's, less is better


def fit_acceptance(recordings: Sequence[Recording]) -> dict[str, Any] | None:
    """Return the section; None where nothing was drafted, too little to tell, or more than any engine drafts."""
    k = max((each.num_speculative_tokens for each in recordings), default=0)
    requests = _spread([request for each in recordings for request in each.requests])
    whole = _series(requests, k) if 0 < k <= MOST_K else None
    if whole is None or whole.counts.sum() < LEAST_CHUNKS:
        return None
    outcomes, chances = _outcomes(whole.counts.sum(axis=0), _drafted_lengths(recordings, k))
    if not any(drafted for drafted, _ in outcomes):
        return None
    classes = [
        each
        for temperature, its_requests in _by_temperature(requests, k)
        for each in _classes(
            _series(its_requests, k), temperature, len(its_requests) / len(requests), outcomes, chances
        )
    ]
    return {
        "num_speculative_tokens": k,
        "outcomes": [list(each) for each in outcomes],
        "classes": classes,
        "ranges": {"requests": len(requests), "chunks": int(whole.counts.sum())},
    }


def _spread(requests: Sequence[RecordedRequest]) -> Sequence[RecordedRequest]:
    return requests[:: -(-len(requests) // _MOST_REQUESTS)] if requests else requests


def _series(requests: Iterable[RecordedRequest], k: int) -> _Series:
    """Return what was accepted, but for steps whose draft the end of the answer may have cut."""
    found = []
    for request in requests:
        chunks = np.frombuffer(request.chunk_tokens, dtype=np.uint32).astype(int)
        before = np.cumsum(chunks)[:-1]
        # Decided by what was there before the step, not by what came: that would favour short ones.
        whole = before <= before[-1] + chunks[-1] - (k + 1) if len(before) else np.zeros(0, dtype=bool)
        accepted = np.clip(chunks[1:][whole] - 1, 0, k)
        follows = np.zeros((k + 2, k + 1))
        if len(accepted):
            follows[-1, accepted[0]] += 1
            np.add.at(follows, (accepted[:-1], accepted[1:]), 1)
        found.append(follows)
    return _Series(np.array(found).reshape(-1, k + 2, k + 1))


def _by_temperature(
    requests: Sequence[RecordedRequest], k: int
) -> list[tuple[float | None, Sequence[RecordedRequest]]]:
    """Return the requests of each temperature; those of all as one where there are too few of any."""
    groups: dict[float | None, list[RecordedRequest]] = {}
    for request in requests:
        groups.setdefault(request.temperature, []).append(request)
    if any(_series(each, k).counts.sum() < LEAST_CHUNKS for each in groups.values()):
        return [(None, requests)]
    return sorted(groups.items(), key=lambda item: (item[0] is not None, item[0] or 0.0))


def _drafted_lengths(recordings: Sequence[Recording], k: int) -> Numbers | None:
    """Return how many drafts had each length from 0 (none was made) to K; None where that was not recorded."""
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
                # All as long as each other, as those of a draft model are.
                given = [stats.num_drafts] * (stats.num_draft_tokens // max(1, stats.num_drafts))
            reaching = np.array([*given, *[0] * k][:k], dtype=float)
            lengths[1:] += reaching - np.append(reaching[1:], 0.0)
        chunks += sum(len(request.gaps_ms) for request in recording.requests)
    lengths[0] = max(0.0, chunks - lengths.sum())
    return np.maximum(0.0, lengths)


def _outcomes(accepted: Numbers, lengths: Numbers | None) -> tuple[list[tuple[int, int]], Numbers]:
    """Return which (drafted, accepted) there are, and for each accepted length how it divides among them."""
    k = len(accepted) - 1
    if lengths is None or lengths[1:].sum() == 0:
        lengths = np.append(np.zeros(k), 1.0)
    left = lengths / lengths.sum() * accepted.sum()
    if k and left[k] >= (1 - 1e-3) * accepted.sum():
        left = np.append(np.zeros(k), accepted.sum())  # always K: what is missing are ends of answers
    table = np.zeros((k + 1, k + 1))
    # A draft is at least as long as what was accepted of it: the longest have the least choice.
    for length in range(k, -1, -1):
        room = np.where(np.arange(k + 1) >= length, left, 0.0)
        share = room / room.sum() if room.sum() > 0 else np.eye(k + 1)[max(length, 0) if length else k]
        table[:, length] = accepted[length] * share
        left = np.maximum(0.0, left - table[:, length])
    outcomes = [(drafted, taken) for drafted in range(k + 1) for taken in range(drafted + 1) if table[drafted, taken]]
    of_accepted = np.maximum(table.sum(axis=0), 1e-300)
    return outcomes, np.array([table[drafted, taken] / of_accepted[taken] for drafted, taken in outcomes])


def _classes(
    series: _Series,
    temperature: float | None,
    share: float,
    outcomes: Sequence[tuple[int, int]],
    chances: Numbers,
) -> list[dict[str, Any]]:
    """Return the classes of requests of one temperature."""
    mixture = _best_mixture(series)
    accepted = np.array([each[1] for each in outcomes])

    def row(of_accepted: Numbers) -> list[float]:
        spread = of_accepted[accepted] * chances
        return [round(float(each), _DIGITS) for each in spread / spread.sum()]

    classes = []
    for its_share, rows in zip(mixture.shares, mixture.chances, strict=True):
        made: dict[str, Any] = {"share": round(float(its_share * share), _DIGITS), "outcomes": row(rows[-1])}
        if np.abs(rows[:-1] - rows[-1]).max() > 0:
            made["after"] = [row(rows[before]) for before in accepted]
        classes.append(made if temperature is None else made | {"temperature": temperature})
    return classes


def _best_mixture(series: _Series) -> _Mixture:
    """Return as many classes, and as much memory, as the series can tell."""
    best: _Mixture | None = None
    for remembers in (False, True):
        for classes in range(1, MOST_CLASSES + 1):
            found = _fit_mixture(series, classes, remembers)
            if best is not None and found.criterion >= best.criterion:
                if classes > 1:
                    break
                continue
            best = found
    assert best is not None  # noqa: S101  the first one is
    return best


def _fit_mixture(series: _Series, classes: int, remembers: bool) -> _Mixture:
    """Return the likeliest classes of a number (Dempster, Laird and Rubin 1977)."""
    follows = series.follows
    lengths = follows.shape[2]
    marginal = series.counts.sum(axis=0) / series.counts.sum()
    belongs = _first_guess(series, classes)
    likelihood = -np.inf
    shares, chances = np.ones(classes) / classes, np.zeros((classes, lengths + 1, lengths))
    for _ in range(_ROUNDS):
        shares = belongs.mean(axis=0)
        chances = _chances(np.einsum("rc,rbl->cbl", belongs, follows), marginal, remembers)
        logs = np.einsum("rbl,cbl->rc", follows, np.log(np.maximum(chances, 1e-12)))
        logs += np.log(np.maximum(shares, 1e-12))
        most = logs.max(axis=1, keepdims=True)
        weights = np.exp(logs - most)
        belongs = weights / weights.sum(axis=1, keepdims=True)
        before, likelihood = likelihood, float((most[:, 0] + np.log(weights.sum(axis=1))).sum())
        if likelihood - before < _SAME * abs(likelihood):
            break
    rows = (lengths if remembers else 0) + 1
    terms = classes * rows * (lengths - 1) + classes - 1
    return _Mixture(shares, chances, terms * np.log(max(2.0, follows.sum())) - 2 * likelihood)


def _first_guess(series: _Series, classes: int) -> Numbers:
    """Return to which class each request belongs at first: in order of what was accepted on average."""
    counts = series.counts
    mean = counts @ np.arange(counts.shape[1]) / np.maximum(1, counts.sum(axis=1))
    place: NDArray[np.intp] = np.argsort(np.argsort(mean)) * classes // max(1, len(mean))
    return np.asarray(0.9 * np.eye(classes)[place] + 0.1 / classes, dtype=np.float64)


def _chances(seen: Numbers, marginal: Numbers, remembers: bool) -> Numbers:
    """Return the chances of each class; where it remembers, after each length its own."""
    all_of_class = seen.sum(axis=1) + _DOUBT * len(marginal) * marginal
    whole = all_of_class / all_of_class.sum(axis=1, keepdims=True)
    chances = np.repeat(whole[:, None, :], seen.shape[1], axis=1)
    if remembers:
        rows = seen[:, :-1] + _DOUBT * len(marginal) * whole[:, None, :]
        enough = seen[:, :-1].sum(axis=2, keepdims=True) >= _LEAST_IN_ROW
        chances[:, :-1] = np.where(enough, rows / rows.sum(axis=2, keepdims=True), chances[:, :-1])
    return chances
