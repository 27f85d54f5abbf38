"""What `figures` prints."""

from specdecode_operator.cli.outputs.base import Output


class FigureOutput(Output):
    """One figure of docs/reference/metrics.md."""

    name: str
    """As in the name of its recorded series."""
    unit: str
    """Empty where it has none."""
    value: float | None
    """Null where there was nothing to divide by, or the engines do not tell it."""
    by_position: dict[str, float] | None
    """Of a figure by position in the draft, counted from 0; null of all others."""


class FiguresOutput(Output):
    """Figures of one deployment."""

    source: str
    """Who was asked."""
    over_seconds: float
    """What they are taken over."""
    engines: int | None
    """How many engines answered at both looks; null of a Prometheus."""
    left_out: list[str]
    """Engines that did not answer, and why."""
    figures: list[FigureOutput]
    """In the order of the page."""
