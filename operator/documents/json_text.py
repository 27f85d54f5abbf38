"""Reads JSON that others wrote, as JSON: no key twice, no number that is none, nothing deeper than any object is."""

import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

from specdecode_operator.documents.limits import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_DIGITS,
    UnreadableTextError,
    check_size,
    inner_values,
)
from specdecode_operator.problems import shown
from specdecode_operator.redaction import clip

_SPACE: Final = " \t\r\n"
_LOOKS_LIKE_JSON: Final = re.compile(r'\s*(\{\s*"|\[\s*[\[{"])')


def parse_json(text: str | bytes, most_bytes: int = MAX_BYTES) -> Any:
    """Return the one value of a text.

    Raises
    ------
    UnreadableTextError
        When it holds another number of values, is no JSON, or is larger or deeper than it may be.
    """
    found = list(parse_json_values(text, most_bytes))
    if len(found) != 1:
        raise UnreadableTextError(f"holds {len(found)} values: write one" if found else "is empty: write JSON")
    return found[0]


def parse_json_values(text: str | bytes, most_bytes: int = MAX_BYTES) -> Iterator[Any]:
    """Return the values of a text one by one, as kubectl takes them: one after the other.

    Raises
    ------
    UnreadableTextError
        When one is no JSON, or is larger or deeper than it may be.
    """
    check_size(text, most_bytes)
    if isinstance(text, bytes):
        text = _decoded(text)
    text = text.removeprefix("\ufeff")
    position = _next(text, 0)
    while position < len(text):
        try:
            value, end = _DECODER.raw_decode(text, position)
        except json.JSONDecodeError as error:
            place = f"line {error.lineno}, column {error.colno}" if "\n" in text.strip() else f"column {error.colno}"
            unreadable = UnreadableTextError(f"is no JSON at {place}: {_lowered(error.msg).removesuffix(' at')}")
            unreadable.line = error.lineno
            raise unreadable from error
        except RecursionError as error:
            raise _too_deep() from error
        _check_depth(value)
        yield value
        position = _next(text, end)


def parse_yaml_or_json(text: str, *, is_json: bool) -> Iterable[Any]:
    """Return the documents of a text that is JSON or YAML.

    ``is_json`` says that the file's name ends with .json: then errors are those of JSON. YAML may begin as JSON does.

    Raises
    ------
    UnreadableTextError
        As parse_json_values and parse_yaml.
    """
    named_json = is_json and "\n---" not in text
    if named_json or _LOOKS_LIKE_JSON.match(text):
        try:
            return list(parse_json_values(text))
        except UnreadableTextError:
            if named_json:
                raise
    # PyYAML takes longer to load than JSON to be read.
    from specdecode_operator.documents.yaml_text import parse_yaml  # noqa: PLC0415

    return parse_yaml(text)


def _decoded(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise UnreadableTextError("is not UTF-8 text: write JSON in UTF-8") from error


def _next(text: str, position: int) -> int:
    while position < len(text) and text[position] in _SPACE:
        position += 1
    return position


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for inner in inner_values(level) if isinstance(inner, dict | list)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> UnreadableTextError:
    return UnreadableTextError(f"is nested more than {MAX_DEPTH} deep, which no object is: name another file")


def _lowered(message: str) -> str:
    return message[:1].lower() + message[1:]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise UnreadableTextError(f"the key {shown(twice)} is there twice in one object: remove one")
    return found


def _whole_number(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise UnreadableTextError(f"the number {clip(text, 20)} has {len(text):,} digits: write one with fewer")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise UnreadableTextError(f"the number {clip(text, 20)} is too large: write a smaller one")
    return value


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_object, parse_int=_whole_number, parse_float=_number)
