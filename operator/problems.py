"""What is wrong with an input, said once for every place that reports it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that the user must change.

    Attributes
    ----------
    field
        Path in the object, such as ``spec.parallelism.tensor``.
    value
        What stands there, as text.
    message
        What is wrong with it and what to write instead.
    """

    field: str
    value: str
    message: str

    def __str__(self) -> str:
        """One sentence that names field, value and fix."""
        return f"{self.field}: {self.value}: {self.message}"


class InvalidSpecError(Exception):
    """A spec that cannot run anywhere, whatever the cluster."""

    def __init__(self, problems: list[Problem], reason: str = "Invalid") -> None:
        self.problems = problems
        self.reason = reason
        super().__init__("; ".join(map(str, problems)))
