"""Bursts that max_tokens cut: as long as they may have been.

The burst that reaches max_tokens is likelier a long one, as long ones reach farther; to leave the last ones out would
make bursts shorter than they are, and so would taking them as they were cut.
"""

import numpy as np

from specdecode_operator.replay.fitted.timeline import Bools, Floats, Ints

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
