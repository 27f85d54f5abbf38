"""Problems of an input, and escaping of untrusted text for messages and log lines."""

import json
import logging
import math
import re
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from specdecode_operator.redaction import clip, redact

_SHOWN_CHARACTERS: Final = 120
_READS_AS_NO_TEXT: Final = re.compile(
    r"|~|null|true|false|[-+]?[0-9][0-9_]*(\.[0-9]*)?([eE][-+]?[0-9]+)?", re.IGNORECASE
)
MISSING: Final = "is missing"


@dataclass(frozen=True)
class Problem:
    """A value that the user must change, with the path of its field, such as ``spec.parallelism.tensor``."""

    field: str
    value: str
    message: str
    """What is wrong and what to write instead."""

    def __str__(self) -> str:
        return printable(sentence(self.field, self.value, self.message))


class InvalidSpecError(Exception):
    """A spec that cannot run anywhere, whatever the cluster."""

    def __init__(self, problems: list[Problem], reason: str = "Invalid") -> None:
        self.problems = problems
        self.reason = reason
        super().__init__("; ".join(map(str, problems)))


def printable(text: str) -> str:
    """Return an untrusted text as one line that is safe in a message, a log, an Event or a terminal.

    Line ends, NUL, escape sequences and bidirectional marks are escaped, and secrets masked. Shorten the text with
    `clip`, not with a slice.
    """
    text = redact(text)
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def shown(value: object, limit: int = _SHOWN_CHARACTERS) -> str:
    """Return a value as YAML or JSON, short enough for a message; quote text only if it reads as another type."""
    if isinstance(value, float) and not math.isfinite(value):
        text = str(value)
    elif not isinstance(value, str):
        try:
            text = json.dumps(value, ensure_ascii=False, default=str)
        except (TypeError, ValueError, RecursionError):
            # Keys that are not text, or a number of more than 4,300 digits, which Python does not print.
            text = f"a {type(value).__name__} that is not JSON"
    else:
        # The value of an enumeration's member.
        text = str.__str__(value)
        if text != text.strip() or _READS_AS_NO_TEXT.fullmatch(text):
            text = json.dumps(text, ensure_ascii=False)
    return clip(printable(clip(text, limit)), limit)


def shown_or_missing(value: object, limit: int = _SHOWN_CHARACTERS) -> str:
    """Return the value of an optional field, as `shown`."""
    return MISSING if value is None else shown(value, limit)


def some_of(names: Iterable[str], most: int = 6) -> str:
    """Return the first names and the number of the others."""
    listed = list(names)
    more = len(listed) - most
    return ", ".join(listed) if more <= 1 else f"{', '.join(listed[:most])} and {more} more"


def sentence(field: str, value: str, message: str) -> str:
    """Join field, value and fix, without repeating that the value is missing."""
    return f"{field}: {message}" if message.startswith(value) and value == MISSING else f"{field}: {value}: {message}"


class OneLine(logging.Filter):
    """Escapes control characters and masks secrets, so that no value ends a line of the log and begins another."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Rewrite the record in place, and let every record pass."""
        try:
            record.msg, record.args = printable(record.getMessage()), None
        except Exception:  # noqa: BLE001  a library's mistake: the handler reports it
            return True
        if record.exc_info and not record.exc_text:
            # A private key has several lines: mask it before splitting them.
            lines = redact("".join(traceback.format_exception(*record.exc_info))).splitlines()
            record.exc_text = "\n".join(f"  {printable(line)}" for line in lines)
        return True
