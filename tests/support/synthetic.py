"""Synthetic traces for tests, and fitted models played on the same load or another."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specdecode_operator.capture.files.formats import TraceMeta
from specdecode_operator.capture.trace_reader import RecordedRequest, Recording, read_recording
from specdecode_operator.replay.emulated.engine_model import Acceptance, StepTime, from_rates
from specdecode_operator.replay.model_file import FittedModel, Limits
from specdecode_operator.replay.modelled_engine import ModelledBehaviour
from specdecode_operator.replay.synthetic_load import Lengths, Prompts, parse_arrivals
from specdecode_operator.replay.virtual_run import GivenBehaviour, VirtualRun, replayed, spread

RATES = (0.8, 0.6, 0.42, 0.3)
PROMPTS = Prompts(
    prompt_tokens=Lengths(200, 400), output_tokens=Lengths(100, 100), shared_prefix_tokens=0, block_size=16, seed=3
)
LIMITS = Limits(max_num_seqs=64, block_size=16)
STEP_TIME = StepTime(curve=((1, 10.0),), request_us=500.0, prefill_token_us=20.0, residuals=spread(0.05))


def rates(acceptance: Acceptance) -> list[float]:
    """Return the share of drafts of which each position was accepted, as vLLM counts it; without ``after``."""
    chances = [
        sum(each.share * each.outcomes[index] / sum(each.outcomes) for each in acceptance.classes)
        for index in range(len(acceptance.outcomes))
    ]
    drafts = [(accepted, chance) for (k, accepted), chance in zip(acceptance.outcomes, chances, strict=True) if k]
    total = sum(chance for _, chance in drafts)
    positions = range(1, acceptance.num_speculative_tokens + 1)
    return [sum(chance for accepted, chance in drafts if accepted >= position) / total for position in positions]


@dataclass(frozen=True)
class Made:
    """A folder with a trace."""

    folder: Path

    @property
    def recording(self) -> Recording:
        return read_recording(self.folder)

    @property
    def requests(self) -> list[RecordedRequest]:
        return list(self.recording.requests)

    @property
    def arrivals_ms(self) -> list[float]:
        return [each.arrival_ms or 0.0 for each in self.requests]


@dataclass(frozen=True)
class Truth:
    """An engine of which everything is known."""

    acceptance: Acceptance | None = field(default_factory=lambda: from_rates(RATES))
    step_time: StepTime = STEP_TIME
    limits: Limits = LIMITS
    prompts: Prompts = PROMPTS

    def make(self, folder: Path, arrivals: str, requests: int, **prompts: Any) -> Made:
        """Make a trace of it under a load, or one after the other with commas between."""
        folder.mkdir()
        asked = replace(self.prompts, **prompts)
        k = self.acceptance.num_speculative_tokens if self.acceptance else 0
        run = VirtualRun(
            behaviour=GivenBehaviour(self.step_time, self.acceptance, asked.seed),
            limits=self.limits,
            meta=TraceMeta(
                schema=1,
                block_size=16,
                max_num_seqs=self.limits.max_num_seqs,
                speculative={"method": "eagle3", "num_speculative_tokens": k} if k else None,
            ),
        )
        phases = [parse_arrivals(each, requests, None) for each in arrivals.split(",")]
        run.phases(folder, asked, phases, "test")
        return Made(folder)


def play(folder: Path, model: FittedModel, load: Recording, seed: int = 0, load_factor: float = 1.0) -> Made:
    """Play a fitted model under a recorded load."""
    folder.mkdir()
    run = VirtualRun(behaviour=ModelledBehaviour(model, seed), limits=model.origin.limits, meta=load.meta)
    run.requests(folder, replayed(load.requests, load_factor, load.meta.block_size or 16))
    return Made(folder)


def forecast(folder: Path, model: FittedModel, arrivals: str, requests: int, **prompts: Any) -> Made:
    """Play a fitted model under a load that is given."""
    folder.mkdir()
    run = VirtualRun(
        behaviour=ModelledBehaviour(model, 0),
        limits=model.origin.limits,
        meta=TraceMeta(speculative=model.origin.speculative),
        turnarounds_ms=model.clients.turnarounds_ms if model.clients else (0.0,),
    )
    run.phases(folder, replace(PROMPTS, **prompts), [parse_arrivals(arrivals, requests, None)], "test")
    return Made(folder)
