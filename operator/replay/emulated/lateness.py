"""Count late steps, to tell whether this machine was fast enough for the emulation."""

from dataclasses import dataclass
from typing import Final

LATE_SHARE_OF_STEP: Final = 0.1
LATE_AT_LEAST_S: Final = 0.001
"""A step is late if its tokens came later by more than a tenth of it, and by more than a millisecond."""

BELIEVABLE_SHARE: Final = 0.05
"""Share of late steps up to which results are valid. Beyond it, medians may still be right, but tails are not."""

_ENOUGH_STEPS: Final = 200


@dataclass
class Lateness:
    """Counts steps, and how late they were."""

    steps: int = 0
    late_steps: int = 0
    late_s: float = 0.0
    modelled_s: float = 0.0

    def add(self, step_s: float, late_s: float) -> None:
        """Count a step by its modelled duration and the delay of its tokens."""
        self.steps += 1
        self.modelled_s += step_s
        self.late_s += max(0.0, late_s)
        self.late_steps += late_s > max(LATE_AT_LEAST_S, LATE_SHARE_OF_STEP * step_s)

    @property
    def share(self) -> float:
        """The share of steps that were late."""
        return self.late_steps / self.steps if self.steps else 0.0

    @property
    def is_believable(self) -> bool:
        """Whether the share of late steps is small enough."""
        return self.share <= BELIEVABLE_SHARE

    @property
    def is_hopeless(self) -> bool:
        """Whether to warn during the run."""
        return self.steps >= _ENOUGH_STEPS and not self.is_believable

    def verdict(self) -> str:
        """Return the verdict in one line."""
        if not self.steps:
            return "emulated: no step was run"
        longer = 100 * self.late_s / self.modelled_s if self.modelled_s else 0.0
        said = f"emulated: {self.steps} steps, {100 * self.share:.1f} % of them late, {longer:.1f} % longer in all"
        if self.is_believable:
            return said
        return (
            f"{said}: this machine was too slow for reliable results (at most {100 * BELIEVABLE_SHARE:.0f} % may be"
            " late): stop other work, or emulate fewer requests"
        )
