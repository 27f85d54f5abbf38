"""Typed access to one JSON case: each wrong value becomes one clear error."""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from specdecode_operator.problems import printable, shown_or_nothing

_CLOSE: Final = 0.8
"""How alike two keys are before one counts as a slip of the pen for the other (1 is equal)."""

_SHOWN_CHARACTERS: Final = 80


class CaseError(ValueError):
    """A case that cannot be sized; the text names the key, the value and the fix."""

    def __init__(self, key: str, value: object, message: str) -> None:
        super().__init__(f"{printable(key)}: {shown_or_nothing(value, _SHOWN_CHARACTERS)}: {message}")


@dataclass(frozen=True)
class CaseFields:
    """The values of a case, or of an object in it."""

    values: Mapping[str, Any]  # The JSON object
    prefix: str = ""  # What stands before a key in messages, such as ``speculative.``

    def refuse_slips(self, known: Iterable[str]) -> None:
        """Raise CaseError for a key that is almost a known one; remarks of other names are passed over."""
        known = tuple(known)
        for key in self.values:
            if key in known:
                continue
            meant = difflib.get_close_matches(key, known, n=1, cutoff=_CLOSE)
            if meant:
                raise self.error(key, f"is no key of a case: did you mean {meant[0]}?")

    def whole(self, key: str, most: int, default: int | None = None) -> int | None:
        """Return a whole number from 1, or the default where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return default
        # JSON's true is an int to Python.
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, "must be a whole number")
        if not 1 <= value <= most:
            raise self.error(key, f"must lie between 1 and {most:,}")
        return value

    def number(self, key: str, most: float) -> float | None:
        """Return a number above 0, or None where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, "must be a number")
        if not 0 < value <= most:
            raise self.error(key, f"must be above 0 and at most {most:g}")
        return float(value)

    def text(self, key: str) -> str | None:
        """Return a string that is not empty, or None where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, str) or not value:
            raise self.error(key, "must be a string")
        return value

    def flag(self, key: str) -> bool:
        """Return a boolean; false where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def section(self, key: str) -> "CaseFields | None":
        """Return a nested object, or None where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "must be an object")
        return CaseFields(value, f"{self.prefix}{key}.")

    def error(self, key: str, message: str) -> CaseError:
        """Return an error about a key."""
        return CaseError(f"{self.prefix}{key}", self.values.get(key), message)
