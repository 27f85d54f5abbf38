"""Output as JSON, with non-printable characters escaped."""

import json
from functools import cache
from typing import Any


def json_text(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON, with non-printable characters escaped."""
    return printable_json(_encoder(indent).encode(value))


@cache
def _encoder(indent: int | None) -> json.JSONEncoder:
    # json.dumps makes one for each call.
    return json.JSONEncoder(indent=indent, ensure_ascii=False)


def printable_json(text: str) -> str:
    """Escape non-printable characters in JSON; the values stay the same."""
    if text.isprintable() or is_printable(text):
        return text
    # Outside strings, the only such character is the line break.
    return "".join(each if each == "\n" or each.isprintable() else json.dumps(each)[1:-1] for each in text)


def is_printable(text: str) -> bool:
    """Return whether a text has only printable characters and line breaks."""
    return text.replace("\n", "").isprintable()
