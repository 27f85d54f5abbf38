"""What a capture with several arms found out, in its status: each arm against the baseline, load step by load step."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from specdecode_operator.api.base import ApiModel
from specdecode_operator.api.status.deployment import Word

ShortSentence = Annotated[str, StringConstraints(max_length=1024)]


class ArmVerdict(StrEnum):
    """Whether an arm brings more than the baseline on the same GPUs."""

    PAYS = "Pays"
    DOES_NOT_PAY = "DoesNotPay"
    DEPENDS_ON_LOAD = "DependsOnLoad"
    INCONCLUSIVE = "Inconclusive"
    INCORRECT = "Incorrect"


class Outputs(StrEnum):
    """Whether an arm answers what the baseline answers."""

    EQUAL = "Equal"
    EXPLAINED = "Explained"
    DIFFERENT = "Different"
    LOSSY = "Lossy"
    NOT_CHECKED = "NotChecked"


class ComparedLoad(ApiModel):
    """One load step: the phase of the workload, and what both arms did in it."""

    phase: Word
    """Name of the phase."""

    running: Word
    """Requests running at once in the baseline on average, as a decimal."""

    arm_running: Word | None = None
    """The same of this arm: where requests come at a given rate, one that is faster has fewer; absent where it is the
    baseline's number."""

    baseline_goodput: Word
    """Tokens a second of the baseline's requests within the SLO, as a decimal."""

    goodput: Word
    """The same of this arm."""

    verdict: ArmVerdict
    """Pays, DoesNotPay or Inconclusive at this load."""

    ratio: Word | None = None
    """Goodput of the arm to that of the baseline, as a decimal; absent where nothing is known."""

    low: Word | None = None
    """Lower end of the interval of that ratio; absent where it has none yet."""

    high: Word | None = None
    """Upper end of it."""


class ComparedArm(ApiModel):
    """One arm against the baseline."""

    name: Word
    """Name of the arm."""

    verdict: ArmVerdict
    """What all load steps and the checks of its outputs come to."""

    message: ShortSentence
    """The same in a sentence with its figures."""

    outputs: Outputs
    """Equal: greedy outputs are the baseline's, token for token. Explained: where they part, both tokens were about
    equally likely. Different: they were not. Lossy: the arm may answer otherwise by its settings."""

    acceptance_percent: int | None = None
    """Accepted share of the drafted tokens in percent; absent where nothing was drafted."""

    loads: list[ComparedLoad] = Field(default=[], max_length=32)
    """Its load steps that could be compared, in the order of the workload."""


class ComparisonStatus(ApiModel):
    """The arms of a capture against its first one."""

    baseline: Word
    """Name of the arm that the others are compared with."""

    level_percent: int
    """Probability, in percent, that no interval of an arm misses the true ratio, however often they were looked at."""

    baseline_acceptance_percent: int | None = None
    """Accepted share of the tokens that the baseline drafted in percent; absent where it drafted none."""

    arms: list[ComparedArm] = Field(
        max_length=8,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """The other arms."""

    crossover_running: Word | None = None
    """Requests running at once above which the first of them stops paying, as a decimal; absent where it does not."""
