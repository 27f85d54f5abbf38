"""JSON from the API server, nested as deep as others like: that takes 10,000 levels, and Python reads and copies fewer.

A reader that ends at one object sees none of the others either, so what is too deep is left out.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from specdecode_operator.documents.limits import MAX_DEPTH

_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"')
_TOKEN: Final = re.compile(_STRING.pattern + rb"|[\[\]{}]")
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))


def read_json(text: bytes) -> Any:
    """Return a value, with null in place of objects and lists that lie in MAX_DEPTH others.

    Raises
    ------
    json.JSONDecodeError
        When it is no JSON: what kopf expects of an answer in plain text, such as that there is no such kind.
    """
    try:
        return msgspec.json.decode(without_deep(text))
    except msgspec.DecodeError as error:
        raise json.JSONDecodeError(str(error), "", 0) from error


def without_deep(text: bytes) -> bytes:
    """Return JSON with null in place of objects and lists that lie in MAX_DEPTH others."""
    if not _is_deep(text):
        return text
    kept, position = [], 0
    for start, end in _deep(text):
        kept.append(text[position:start])
        position = end
    return b"null".join([*kept, text[position:]])


def without_strings(text: bytes) -> bytes:
    """Return JSON without what stands in quotes."""
    return _STRING.sub(b"", text)


def _is_deep(text: bytes) -> bool:
    """Take away what is innermost, again and again: much faster than counting, which nearly no text needs."""
    brackets = without_strings(text).translate(None, _NO_BRACKETS)
    for _ in range(MAX_DEPTH):
        if not brackets:
            return False
        brackets = brackets.replace(b"{}", b"").replace(b"[]", b"")
    return bool(brackets)


def _deep(text: bytes) -> Iterator[tuple[int, int]]:
    """Yield where objects and lists begin and end that lie in MAX_DEPTH others."""
    depth = start = 0
    for token in _TOKEN.finditer(text):
        match token[0]:
            case b"{" | b"[":
                depth += 1
                if depth == MAX_DEPTH + 1:
                    start = token.start()
            case b"}" | b"]":
                if depth == MAX_DEPTH + 1:
                    yield start, token.end()
                depth -= 1
    if depth > MAX_DEPTH:
        yield start, len(text)
