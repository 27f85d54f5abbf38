"""Golden captures: an engine is judged by the record of an earlier one."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StrictInt, StringConstraints

from specdecode_operator.api.base import ApiModel, ObjectName

Percent = Annotated[StrictInt, Field(ge=1, le=90)]


class LossLimits(ApiModel):
    """The largest losses that pass, in percent. Half of one is an alarm where chance does not explain it."""

    goodput: Percent = 5
    """Of tokens a second, in each phase."""

    acceptance: Percent = 10
    """Of the accepted tokens, in all and at each position of the draft."""

    step_time: Percent = 5
    """By how much a step may take longer."""

    latency: Percent = 20
    """By how much TTFT and TPOT may be longer."""


class Against(ApiModel):
    """A golden capture, and how much worse than it an engine may be."""

    capture: ObjectName
    """A SpecDecodeCapture of one arm in this namespace that succeeded, with the workload and seed that this one has."""

    max_loss_percent: LossLimits = LossLimits()
    """The largest losses that pass."""


class Regressed(StrEnum):
    """Whether an engine serves as well as the one of the golden capture."""

    HOLDS = "Holds"
    REGRESSED = "Regressed"
    INCONCLUSIVE = "Inconclusive"
    NOT_COMPARABLE = "NotComparable"


Figure = Annotated[str, StringConstraints(max_length=64)]


class JudgedFigure(ApiModel):
    """One figure of both captures, as people read it."""

    name: Annotated[str, StringConstraints(max_length=96)]
    """Goodput in phase chat, for example."""

    golden: Figure
    """In the golden capture, with its unit."""

    found: Figure
    """In this one."""

    change: Figure
    """From the golden capture to this one, with its interval."""

    verdict: Regressed
    """Holds, Regressed or Inconclusive."""


class RegressionStatus(ApiModel):
    """A capture against its golden one."""

    against: Annotated[str, StringConstraints(max_length=253)]
    """Name of the golden capture."""

    verdict: Regressed
    """What all figures come to."""

    message: Annotated[str, StringConstraints(max_length=1024)]
    """The same in a sentence with the figures that decide."""

    figures: list[JudgedFigure] = Field(default=[], max_length=12)
    """The figures that decide, and others as far as there is room."""
