"""Whether losses became larger than they may be, watched without end: an e-detector with a known rate of false alarms.

A loss is a number of 0 or more, in units of the largest mean that is allowed. Who bets a share b on losses above 1 has

    1 + b (loss - 1)

for each unit after one of them: on average no more than it was, as long as losses have a mean of 1 at most, whatever
came before and however they are distributed. A decline may have begun at any of them, so a new bet begins with each,
and all that was won is added up (Shiryaev 1963, Roberts 1966; as e-detector: Shin, Ramdas and Rinaldo 2023). That sum
grows by 1 a loss at most, on average. So it reaches A after A losses on average or later, and within n of them with a
probability of at most n / A. The mean over several shares is as good.
"""

from dataclasses import dataclass
from statistics import fmean
from typing import Final

_SHARES: Final = (0.0625, 0.125, 0.25, 0.5, 1.0)
"""Each is best for losses of another size."""

_LARGEST: Final = 4.0
"""What a loss counts at most, so that a moment in which everything stood still does not decide; it lowers means."""

_LAST: Final = 8
"""Losses that have to be as they may be, on average, before it is over."""


@dataclass(frozen=True)
class Decline:
    """What is known of one kind of loss."""

    sums: tuple[float, ...] = (0.0,) * len(_SHARES)
    """What all bets have won, by share."""

    last: tuple[float, ...] = ()
    """The last losses."""

    found: bool = False
    """Whether losses are larger than they may be."""

    def after(self, loss: float, losses_between_alarms: float) -> "Decline":
        """Return what is known after one more loss.

        Parameters
        ----------
        losses_between_alarms
            How many losses there are between two false alarms on average, at the least.
        """
        loss = min(loss, _LARGEST)
        last = (*self.last, loss)[-_LAST:]
        if self.found:
            is_over = len(last) == _LAST and fmean(last) <= 1
            return Decline() if is_over else Decline(self.sums, last, found=True)
        sums = tuple((won + 1) * (1 + share * (loss - 1)) for won, share in zip(self.sums, _SHARES, strict=True))
        found = fmean(sums) >= losses_between_alarms
        # What led to the alarm is not what ends it.
        return Decline(sums, () if found else last, found=found)
