"""Other ways to decide between two arms at every look, held beside `specdecode verdict` on the same noise."""

import math
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

ALPHA: Final = 0.05
_NORMAL_QUANTILE: Final = 1.959964
_FEWEST: Final = 5
"""Blocks before which a t-test or an estimate of a variance is not asked."""

Values = NDArray[np.float64]


def repeated_t_test(differences: Values) -> Values:
    """Return for each look whether Student's t-test at 95 % rejects, as people do who look until it does."""
    count, mean, variance = _moments(differences)
    freedom = np.maximum(count - 1, 1)
    z = _NORMAL_QUANTILE
    # Cornish and Fisher's expansion of the quantile.
    quantile = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return _from_fifth(np.abs(mean) * np.sqrt(count) > quantile * np.sqrt(variance))


def asymptotic_sequence(differences: Values, tuned_to: int = 50) -> Values:
    """Return for each look whether an asymptotic confidence sequence leaves 0 out (Waudby-Smith et al. 2021, eq. 8)."""
    count, mean, variance = _moments(differences)
    rho2 = (-2 * math.log(ALPHA) + math.log(-2 * math.log(ALPHA) + 1)) / tuned_to
    radius = np.sqrt(2 * (count * rho2 + 1) / (count**2 * rho2) * np.log(np.sqrt(count * rho2 + 1) / ALPHA))
    return _from_fifth(np.abs(mean) > radius * np.sqrt(variance))


def anytime_t_test(differences: Values, prior: float = 4.0) -> Values:
    """Return for each look whether the e-process of a t-test, for effects near 1/2, reaches 20 (Wang, Ramdas 2023)."""
    count = np.arange(1, differences.shape[1] + 1)
    total, squares = np.cumsum(differences, axis=1), np.cumsum(differences**2, axis=1)
    left = np.maximum(squares - total**2 / (count + prior), 1e-300)
    log_evidence = 0.5 * np.log(prior / (count + prior)) + count / 2 * np.log(squares / left)
    return np.asarray(log_evidence >= -math.log(ALPHA), dtype=np.float64)


METHODS: Final[dict[str, Callable[[Values], Values]]] = {
    "t-test": repeated_t_test,
    "asymptotic": asymptotic_sequence,
    "anytime t-test": anytime_t_test,
}


def first_decided(decided: Values) -> list[int | None]:
    """Return the look at which each run is decided."""
    return [int(row.argmax()) + 1 if row.any() else None for row in decided]


def _moments(differences: Values) -> tuple[Values, Values, Values]:
    count = np.arange(1, differences.shape[1] + 1, dtype=np.float64)
    mean = np.cumsum(differences, axis=1) / count
    variance = (np.cumsum(differences**2, axis=1) - count * mean**2) / np.maximum(count - 1, 1)
    return count, mean, np.maximum(variance, 1e-300)


def _from_fifth(decided: NDArray[np.bool_]) -> Values:
    decided[:, : _FEWEST - 1] = False
    return np.asarray(decided, dtype=np.float64)
