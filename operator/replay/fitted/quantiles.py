"""Many values as a few of them, evenly spread over their quantiles, and draws from those."""

from collections.abc import Sequence


def thinned(values: Sequence[float], most: int, digits: int = 5) -> list[float]:
    """Return so many of some values at most: ascending, each the middle of an equal share of them."""
    ordered = sorted(values)
    if len(ordered) > most:
        ordered = [ordered[int((index + 0.5) * len(ordered) / most)] for index in range(most)]
    return [round(float(value), digits) for value in ordered]


def at(ascending: Sequence[float], share: float) -> float:
    """Return the value below which a share of them lies, with straight lines between them."""
    place = share * len(ascending) - 0.5
    if place <= 0:
        return ascending[0]
    below = int(place)
    if below + 1 >= len(ascending):
        return ascending[-1]
    return ascending[below] + (place - below) * (ascending[below + 1] - ascending[below])
