"""What `verdict` prints, a line a block."""

from typing import Literal

from pydantic import RootModel

from specdecode_operator.cli.outputs.base import Output


class FindingOutput(Output):
    """What a series says after a block, from that block and those before it."""

    series: str | int | None
    """That of the block; null where it has none."""
    block: int
    """That of the block."""
    verdict: Literal["Pays", "DoesNotPay", "Inconclusive"]
    """Pays where low is above 1, DoesNotPay where high is below 1."""
    ratio: float | None
    """Goodput of the candidate to that of the baseline, the mean of log ratios without the outer fifths; null where one
    of them did nothing in half of the blocks or more, or neither ever did anything."""
    low: float | None
    """Lower end of the interval; null while there is none."""
    high: float | None
    """Upper end of the interval; null while there is none."""
    level: float
    """Probability that the true ratio lies in the intervals after all blocks at once."""


class BlockErrorOutput(Output):
    """A line that is no block, or none that can be counted."""

    series: str | int | None
    """That of the line; null where it cannot be read."""
    block: int | None
    """That of the line; null where it cannot be read."""
    error: str
    """Why."""


class VerdictOutput(RootModel[FindingOutput | BlockErrorOutput]):
    """One line of the results."""
