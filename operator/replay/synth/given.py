"""An engine of which everything is given: for traces whose distributions are known."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from specdecode_operator.replay.emulated.acceptance import Acceptance, Drafting
from specdecode_operator.replay.emulated.step_time import Paces, StepShape, StepTime
from specdecode_operator.replay.engines.engine import Incoming


@dataclass(slots=True)
class _Course:
    drafting: Drafting | None
    width: int
    output_tokens: int
    finish_reason: str = "length"
    coming: tuple[int, int] | None = None

    def first(self) -> int:
        return 1

    def planned(self) -> int:
        if self.coming is None:
            self.coming = self.drafting.next(self.width) if self.drafting is not None else (0, 0)
        return self.coming[0]

    def next(self, output_tokens: int) -> tuple[int, int]:  # noqa: ARG002  chance alone decides here
        drafted = self.planned(), self.coming[1] if self.coming is not None else 0
        self.coming = None
        return drafted


class GivenBehaviour:
    """Steps of given length, drafts accepted by given chances."""

    def __init__(
        self,
        step_time: StepTime,
        acceptance: Acceptance | None,
        seed: int,
        *,
        lead_ms: float = 0.0,
        width: int | None = None,
    ) -> None:
        """Without acceptance nothing is drafted; a width is K where it is not that of the acceptance."""
        self.acceptance = acceptance
        self.num_speculative_tokens = (width or acceptance.num_speculative_tokens) if acceptance else 0
        self.random = Random(f"{seed}/steps")  # noqa: S311  not for secrets
        self._paces = Paces(step_time, self.random)
        self._lead_ms = lead_ms

    def lead_ms(self) -> float:
        """Return how long a request takes to the scheduler."""
        return self._lead_ms

    def begin(self, request: Incoming) -> _Course:
        """Return how a request goes: to its last token."""
        acceptance = self.acceptance
        drafting = None
        if acceptance is not None:
            drafting = Drafting(acceptance, acceptance.draw_class(request.temperature, self.random), self.random)
        return _Course(drafting, self.num_speculative_tokens, request.max_tokens)

    def step_ms(self, step: StepShape, decoding: int) -> float:  # noqa: ARG002  all is in the step
        """Return how long a step takes."""
        return self._paces.draw_ms(step)


def spread(deviation: float, points: int = 101) -> tuple[float, ...]:
    """Return residuals of a step time: a normal distribution around 1 with this standard deviation."""
    from statistics import NormalDist  # noqa: PLC0415

    if not deviation:
        return ()
    inverse: Callable[[float], float] = NormalDist(1.0, deviation).inv_cdf
    return tuple(max(0.05, inverse((index + 0.5) / points)) for index in range(points))
