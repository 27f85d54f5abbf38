"""Typed access to one JSON case: each wrong value becomes one clear error."""

import difflib
import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from specdecode_operator.documents.json_text import parse_json
from specdecode_operator.documents.limits import UnreadableTextError
from specdecode_operator.problems import printable, sentence, shown_or_missing

_CLOSE: Final = 0.6
"""How alike two keys are before one counts as a slip of the pen for the other (1 is equal)."""

_SHOWN_CHARACTERS: Final = 80


class CaseError(ValueError):
    """A case that cannot be sized; the text names the key, the value and the fix."""

    def __init__(self, key: str, value: object, message: str) -> None:
        super().__init__(sentence(printable(key), shown_or_missing(value, _SHOWN_CHARACTERS), message))


@dataclass(frozen=True)
class CaseFields:
    """The values of a case, or of an object in it."""

    values: Mapping[str, Any]  # The JSON object
    prefix: str = ""  # What stands before a key in messages, such as ``speculative.``

    # How the case itself calls a key, where that is another name
    spelled: Mapping[str, str] = field(default_factory=dict)

    def named(self, spellings: Mapping[str, str], remarks: Container[str] = ()) -> "CaseFields":
        """Return the values by our names, given all spellings of these; remarks are left out.

        Names are taken as Python, JSON and the command line write them: tensor_parallel_size, --tensor-parallel-size.

        Raises
        ------
        CaseError
            For a key that is none, and for two that contradict each other.
        """
        if all(spellings.get(key) == key for key in self.values):
            return self
        values: dict[str, Any] = {}
        spelled: dict[str, str] = {}
        for key, value in self.values.items():
            name = spellings.get(key) or spellings.get(_plain(key))
            if name is None:
                if (plain := _plain(key)) not in remarks:
                    raise self.error(key, _unknown(plain, spellings))
            elif values.get(name) is None:
                values[name], spelled[name] = value, key
            elif value is not None and (value != values[name] or _kind(value) is not _kind(values[name])):
                raise self.error(key, f"contradicts {spelled[name]}, {values[name]!r}: remove one of the two")
        return CaseFields(values, self.prefix, spelled)

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

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return a boolean, or the default where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def section(self, key: str) -> "CaseFields | None":
        """Return a nested object, or None where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, str) and value.lstrip().startswith("{"):
            # As it stands behind a flag of the command line.
            try:
                value = parse_json(value)
            except UnreadableTextError as error:
                raise self.error(key, str(error)) from error
        if not isinstance(value, dict):
            raise self.error(key, "must be an object")
        return CaseFields(value, f"{self.prefix}{self.spelled.get(key, key)}.")

    def error(self, key: str, message: str) -> CaseError:
        """Return an error about a key."""
        return CaseError(f"{self.prefix}{self.spelled.get(key, key)}", self.values.get(key), message)


def _kind(value: object) -> type:
    """Return what JSON tells apart: an object that lines share is an object."""
    return dict if isinstance(value, dict) else type(value)


def _plain(key: str) -> str:
    return key.removeprefix("--").replace("-", "_")


def _unknown(key: str, known: Mapping[str, str]) -> str:
    meant = difflib.get_close_matches(key, known, n=1, cutoff=_CLOSE)
    if meant:
        return f"is no key of a case: did you mean {meant[0]}?"
    return f"is no key of a case: remove it, or use one of {', '.join(dict.fromkeys(known.values()))}"
