"""What `explain -o json` prints."""

from specdecode_operator.cli.outputs.base import Output, ProblemOutput, Verdict


class TermOutput(Output):
    """One term of a budget."""

    name: str
    """What it is; - before what is taken off the budget, = before what is left."""
    bytes: int
    """Its size."""
    formula: str
    """How it comes about, with the numbers filled in."""
    source: str | None
    """Where the rule is from; null where it is plain arithmetic."""


class FigureOutput(Output):
    """One figure of what the KV cache holds."""

    name: str
    """What it is."""
    formula: str
    """How it comes about."""
    result: str
    """The figure, as it is printed."""


class ExplainedOutput(Output):
    """How the memory of one object is counted, at the candidate that `plan` chooses."""

    name: str
    """Its name."""
    namespace: str | None
    """Its namespace; null where it says none."""
    place: str
    """File, and number of the document in it."""
    verdict: Verdict
    """Whether it fits."""
    explanation: str
    """Why, in one sentence."""
    candidate: str | None
    """Where, such as 2 x H200, TP 2; null where there is no candidate."""
    memory: list[TermOutput]
    """The budget and what is taken off it; empty without a candidate. So are the next two."""
    kv_cache: list[FigureOutput]
    """What the KV cache holds."""
    judged: list[TermOutput]
    """What the verdict compares."""
    problems: list[ProblemOutput]
    """What is invalid."""


class ExplainOutput(Output):
    """The answer of `explain`."""

    objects: list[ExplainedOutput]
    """One for each object, in the order of reading."""
    errors: list[str]
    """What could not be read."""
