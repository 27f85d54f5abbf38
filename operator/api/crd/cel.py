"""One CEL rule of a CRD."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain


class Reason(StrEnum):
    """How the API server introduces a message. Its fourth word, duplicate, drops the message."""

    INVALID = "FieldValueInvalid"
    REQUIRED = "FieldValueRequired"
    FORBIDDEN = "FieldValueForbidden"


@dataclass(frozen=True)
class Rule:
    """What must hold inside one model, and what to say where it does not."""

    field: str
    """The field to blame, relative to the model: ``serving.port``."""
    holds: str
    """CEL expression that is true for a good object; ``self`` is the model."""
    message: str
    """What is wrong, then what to write instead. The API server puts the field's full path in front of it. ``%s`` and
    ``%d`` stand for values."""
    values: tuple[str, ...] = ()
    """CEL expressions of the values in the message."""
    reason: Reason = Reason.INVALID
    """How the API server introduces the message."""

    def as_validation(self) -> dict[str, str]:
        """Return the rule as an entry of ``x-kubernetes-validations``."""
        validation = {"rule": self.holds, "fieldPath": f".{self.field}", "reason": self.reason.value}
        # Also where there is an expression: of one with a line break in it the API server shows neither, but this, and
        # without this the rule.
        validation["message"] = self.words("…" for _ in self.values)
        if self.values:
            # format() and not string(): the API server cannot bound the cost of the latter.
            validation["messageExpression"] = f"'{self.message}'.format([{', '.join(self.values)}])"
        return validation

    def reads(self, field: str) -> bool:
        """Return whether the rule depends on a field of its model, or on what is in that field."""
        return any(re.search(rf"\bself\.{re.escape(field)}\b", text) for text in (self.holds, *self.values))

    def words(self, values: Iterable[str]) -> str:
        """Return the message with these values in it."""
        return "".join(chain.from_iterable(zip(re.split("%[sd]", self.message), [*values, ""], strict=True)))
