"""Which requests are easy and which are hard for a drafter: a mixture, as many classes as the bursts speak for."""

from typing import Final

import numpy as np

from specdecode_operator.replay.fitted.timeline import Floats, Ints

MOST_CLASSES: Final = 4
_ROUNDS: Final = 60
_LEAST: Final = 1e-6


def classes(counts: Floats, seed: int) -> tuple[list[float], Ints]:
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
    for _ in range(_ROUNDS):
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
