"""JSON from the API server, as others made it: nested 10,000 deep, where Python reads and copies less, or no Unicode.

A reader that ends at one object sees none of the others either, so what is too deep is left out, and what is no
character is replaced.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from specdecode_operator.documents.limits import MAX_DEPTH

_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"')
_TOKEN: Final = re.compile(_STRING.pattern + rb"|[\[\]{}]")
_SURROGATES: Final = re.compile(
    rb"(?<!\\)(?P<before>(?:\\\\)*+)"  # backslashes that are characters themselves
    rb"(?:(?P<pair>\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
_SURROGATE: Final = re.compile(rb"\\u[dD]")
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))


def read_json(text: bytes) -> Any:
    """Return a value, with null in place of objects and lists that lie in MAX_DEPTH others.

    Raises
    ------
    json.JSONDecodeError
        When it is no JSON: what kopf expects of an answer in plain text, such as that there is no such kind.
    """
    shallow = without_deep(text)
    try:
        return msgspec.json.decode(shallow)
    except msgspec.DecodeError:  # no JSON, or a number that is too large
        return json.loads(shallow)


def in_unicode(text: bytes) -> bytes:
    """Return JSON with U+FFFD in place of bytes and escapes that are no character.

    The API server keeps the managed fields of its own kinds byte for byte, whoever wrote them.
    """
    if not text.isascii():
        try:
            text.decode()
        except UnicodeDecodeError:
            text = text.decode(errors="replace").encode()
    if _SURROGATE.search(text):
        text = _SURROGATES.sub(lambda found: found["before"] + (found["pair"] or rb"\ufffd"), text)
    return text


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
