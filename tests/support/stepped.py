"""Engines in virtual time for tests, and what their requests got."""

from dataclasses import dataclass, field

from specdecode_operator.replay.clocks import VirtualClock
from specdecode_operator.replay.emulated.engine_model import StepTime, from_rates
from specdecode_operator.replay.engine import Burst, Incoming, Ticket
from specdecode_operator.replay.model_file import Limits
from specdecode_operator.replay.stepped_engine import OnStep, SteppedEngine, StepReport
from specdecode_operator.replay.virtual_run import GivenBehaviour


@dataclass
class Got:
    """What one request got."""

    arrival_ms: float
    bursts: list[Burst] = field(default_factory=list)
    at_ms: list[float] = field(default_factory=list)
    ticket: Ticket | None = None

    @property
    def tokens(self) -> list[int]:
        return [burst.tokens for burst in self.bursts]

    @property
    def ttft_ms(self) -> float:
        return self.at_ms[0] - self.arrival_ms


class Rig:
    """An engine with steps of 10 ms, and 1 ms more for each 100 tokens of prompts."""

    def __init__(
        self, limits: Limits, rates: tuple[float, ...] = (), on_step: OnStep | None = None, drafting: float = 1.0
    ) -> None:
        self.clock = VirtualClock()
        self.steps: list[StepReport] = []
        step_time = StepTime(curve=((1, 10.0),), prefill_token_us=10.0)
        behaviour = GivenBehaviour(step_time, from_rates(rates, drafting) if rates else None, seed=1)
        self.engine = SteppedEngine(self.clock, behaviour, limits, on_step or self.steps.append)

    def send(
        self, request_id: str = "r", prompt: int = 100, output: int = 10, *, at_ms: float = 0.0, **more: object
    ) -> Got:
        """Have a request come at a moment."""
        request = Incoming(request_id=request_id, prompt_tokens=prompt, max_tokens=output, **more)  # type: ignore[arg-type]
        got = Got(at_ms)

        def take(burst: Burst) -> None:
            got.bursts.append(burst)
            got.at_ms.append(self.clock.now_ms())

        def arrive() -> None:
            got.ticket = self.engine.submit(request, take)

        self.clock.call_at(at_ms, arrive)
        return got
