"""Failures that the steps in the trainer's image report."""


class StepError(Exception):
    """A step failed; ``reason`` is a CamelCase word for programs."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
