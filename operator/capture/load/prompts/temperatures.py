"""Which request is sampled at which temperature."""

from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from random import Random

from specdecode_operator.api.capture_workload import TemperatureShare


class TemperatureMix:
    """Which request is sampled at which temperature.

    The shares hold exactly in every block of requests, not only on average:
    a block is as short as the shares allow, and shuffled by the seed.
    """

    def __init__(self, shares: Sequence[TemperatureShare], seed: int) -> None:
        unit = gcd(*(share.share_percent for share in shares))
        self._block = [float(share.temperature) for share in shares for _ in range(share.share_percent // unit)]
        self._seed = seed
        self._shuffled = lru_cache(maxsize=64)(self._shuffle)

    def at(self, phase: str, index: int) -> float:
        """Return the temperature of a request."""
        number, place = divmod(index, len(self._block))
        return self._shuffled(phase, number)[place]

    def _shuffle(self, phase: str, number: int) -> list[float]:
        block = list(self._block)
        Random(f"{self._seed}/{phase}/{number}/temperatures").shuffle(block)  # noqa: S311 - not for secrets
        return block
