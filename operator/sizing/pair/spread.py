"""How a replica is spread beyond tensor parallelism: pipeline stages, data-parallel copies, experts."""

from dataclasses import dataclass
from functools import cache
from typing import Final

from specdecode_operator.sizing.model.geometry import ModelGeometry
from specdecode_operator.sizing.pair.pair import Parallelism

PIPELINE_FIELD: Final = "parallelism.pipeline"
"""Where users say in how many stages the layers lie."""

EXPERT_FIELD: Final = "parallelism.expert"
"""Where users say that whole experts are spread."""


@dataclass(frozen=True)
class Spread:
    """What of a split the user decides; the tensor parallelism may be left to the plan.

    Attributes
    ----------
    pipeline
        Stages of layers.
    data
        Copies of all but the experts.
    expert
        Whether whole experts are spread over tensor x data GPUs.
    """

    pipeline: int = 1
    data: int = 1
    expert: bool = False

    @property
    def groups(self) -> int:
        """Groups of GPUs that share layers: a replica takes so many times its tensor parallelism."""
        return self.pipeline * self.data

    def at(self, tensor: int) -> Parallelism:
        """Return the split with a tensor parallelism; always the same object for the same split."""
        return _split(tensor, self.pipeline, self.data, self.expert)


ONE_GROUP: Final = Spread()
"""Tensor parallelism alone."""


@dataclass(frozen=True)
class SpreadProblem:
    """One reason why a model cannot be spread so, whatever the tensor parallelism.

    Attributes
    ----------
    field
        Where users said so.
    value
        What they said.
    message
        What is wrong with it, and what to do.
    """

    field: str
    value: object
    message: str


def spread_problems(target: ModelGeometry, spread: Spread) -> tuple[SpreadProblem, ...]:
    """Return what stops a target from being spread so; empty when nothing does."""
    found = []
    if spread.pipeline > target.num_layers:
        message = (
            f"{target.name} has {target.num_layers} layers, and each stage needs one: use {target.num_layers} or less"
        )
        found.append(SpreadProblem(PIPELINE_FIELD, spread.pipeline, message))
    if spread.expert and not target.has_experts:
        # vllm/config/model.py, _verify_with_expert_parallelism.
        message = f"{target.name} has no experts to spread: remove it"
        found.append(SpreadProblem(EXPERT_FIELD, spread.expert, message))
    return tuple(found)


@cache
def _split(tensor: int, pipeline: int, data: int, expert: bool) -> Parallelism:
    return Parallelism(tensor, pipeline, data, expert)
