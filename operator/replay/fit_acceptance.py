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
"""Chunks that a fit needs; temperatures with fewer share one fit."""

MOST_K: Final = 64
"""Longer drafts are blocks of a diffusion model, or the header is wrong."""

MOST_CLASSES: Final = 4
_MOST_REQUESTS: Final = 2000  # spread over the recording: more do not make the classes any clearer
_ROUNDS: Final = 200
_SAME: Final = 1e-7
_DOUBT: Final = 0.5  # chunks added to each outcome, so that unseen ones are rare instead of impossible
_LEAST_IN_ROW: Final = 20  # chunks after an outcome that its own chances for the next step need


@dataclass(frozen=True)
class _Mixture:
    shares: Numbers
    chances: Numbers  # by class, the length before (the last one: none), and the length
    criterion: float  # Schwarz's, less is better


def fit_acceptance(recordings: Sequence[Recording]) -> dict[str, Any] | None:
    """Return the section; None if there are no drafts, too few chunks, or drafts longer than those of any engine."""
    k = max((each.num_speculative_tokens for each in recordings), default=0)
    requests: Sequence[RecordedRequest] = [request for each in recordings for request in each.requests]
    if not 0 < k <= MOST_K or not requests:
        return None
    requests = requests[:: -(-len(requests) // _MOST_REQUESTS)]
    accepted = _follows(requests, k).sum(axis=(0, 1))
    if accepted.sum() < LEAST_CHUNKS:
        return None
    outcomes, chances = _outcomes(accepted, _drafted_lengths(recordings, k))
    if not any(drafted for drafted, _ in outcomes):
        return None
    classes = [
        each
        for temperature, its_requests in _by_temperature(requests, k)
        for each in _classes(
            _follows(its_requests, k), temperature, len(its_requests) / len(requests), outcomes, chances
        )
    ]
    return {
        "num_speculative_tokens": k,
        "outcomes": [list(each) for each in outcomes],
        "classes": classes,
        "ranges": {"requests": len(requests), "chunks": int(accepted.sum())},
    }


def _follows(requests: Iterable[RecordedRequest], k: int) -> Numbers:
    """Return how often, by request, an accepted length (axis 2) came after another (axis 1).

    The last row of axis 1 is for the first step. Steps whose draft the end of the answer may have cut do not count.
    """
    found = []
    for request in requests:
        chunks = np.frombuffer(request.chunk_tokens, dtype=np.uint32).astype(int)
        before = np.cumsum(chunks)[:-1]
        # Decide by the tokens before the step: deciding by those after it would favour short steps.
        whole = before <= before[-1] + chunks[-1] - (k + 1) if len(before) else np.zeros(0, dtype=bool)
        accepted = np.clip(chunks[1:][whole] - 1, 0, k)
        follows = np.zeros((k + 2, k + 1))
        if len(accepted):
            follows[-1, accepted[0]] += 1
            np.add.at(follows, (accepted[:-1], accepted[1:]), 1)
        found.append(follows)
    return np.array(found).reshape(-1, k + 2, k + 1)


def _by_temperature(
    requests: Sequence[RecordedRequest], k: int
) -> list[tuple[float | None, Sequence[RecordedRequest]]]:
    """Return the requests of each temperature; all of them together if any has too few chunks."""
    groups: dict[float | None, list[RecordedRequest]] = {}
    for request in requests:
        groups.setdefault(request.temperature, []).append(request)
    if any(_follows(each, k).sum() < LEAST_CHUNKS for each in groups.values()):
        return [(None, requests)]
    return sorted(groups.items(), key=lambda item: (item[0] is not None, item[0] or 0.0))


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
    """Return the observed (drafted, accepted) pairs, and the share of each among those of its accepted length."""
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
        share = room / room.sum() if room.sum() > 0 else np.eye(k + 1)[max(length, 0) if length else k]
        table[:, length] = accepted[length] * share
        left = np.maximum(0.0, left - table[:, length])
    outcomes = [(drafted, taken) for drafted in range(k + 1) for taken in range(drafted + 1) if table[drafted, taken]]
    of_accepted = np.maximum(table.sum(axis=0), 1e-300)
    return outcomes, np.array([table[drafted, taken] / of_accepted[taken] for drafted, taken in outcomes])


def _classes(
    follows: Numbers,
    temperature: float | None,
    share: float,
    outcomes: Sequence[tuple[int, int]],
    chances: Numbers,
) -> list[dict[str, Any]]:
    """Return the classes of requests of one temperature."""
    mixture = _best_mixture(follows)
    accepted = np.array([each[1] for each in outcomes])

    def row(of_accepted: Numbers) -> list[float]:
        spread = of_accepted[accepted] * chances
        return [round(float(each), 6) for each in spread / spread.sum()]

    classes = []
    for its_share, rows in zip(mixture.shares, mixture.chances, strict=True):
        made: dict[str, Any] = {"share": round(float(its_share * share), 6), "outcomes": row(rows[-1])}
        if np.abs(rows[:-1] - rows[-1]).max() > 0:
            made["after"] = [row(rows[before]) for before in accepted]
        classes.append(made if temperature is None else made | {"temperature": temperature})
    return classes


def _best_mixture(follows: Numbers) -> _Mixture:
    """Return the mixture with the number of classes and the memory that Schwarz's criterion selects."""
    best: _Mixture | None = None
    for remembers in (False, True):
        for classes in range(1, MOST_CLASSES + 1):
            found = _fit_mixture(follows, classes, remembers)
            if best is not None and found.criterion >= best.criterion:
                if classes > 1:
                    break
                continue
            best = found
    assert best is not None  # noqa: S101  the first one is
    return best


def _fit_mixture(follows: Numbers, classes: int, remembers: bool) -> _Mixture:
    """Return the likeliest mixture of this many classes (Dempster, Laird and Rubin 1977)."""
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


def _chances(seen: Numbers, marginal: Numbers, remembers: bool) -> Numbers:
    """Return the chances of each class; with memory, separate ones after each length."""
    all_of_class = seen.sum(axis=1) + _DOUBT * len(marginal) * marginal
    whole = all_of_class / all_of_class.sum(axis=1, keepdims=True)
    chances = np.repeat(whole[:, None, :], seen.shape[1], axis=1)
    if remembers:
        rows = seen[:, :-1] + _DOUBT * len(marginal) * whole[:, None, :]
        enough = seen[:, :-1].sum(axis=2, keepdims=True) >= _LEAST_IN_ROW
        chances[:, :-1] = np.where(enough, rows / rows.sum(axis=2, keepdims=True), chances[:, :-1])
    return chances
