"""Errors of sizing. Each names the field, the value and the fix."""

from specdecode_operator.problems import sentence, shown_or_missing


class SizingError(ValueError):
    """An input that cannot be sized: its field, value, and a message with the problem and the fix."""

    def __init__(self, field: str, value: object, message: str) -> None:
        super().__init__(sentence(field, shown_or_missing(value), message))
        self.field = field
        self.value = value
        self.message = message


class GeometryError(SizingError):
    """A config.json from which no geometry follows."""


class UnmodelledError(GeometryError):
    """A config.json with a feature that sizing does not implement, although vLLM may serve it."""


class PlanError(SizingError):
    """A question that has no plan: no usable GPU, or an impossible tensor parallelism."""
