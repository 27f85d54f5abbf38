"""Strict parsers for untrusted JSON, API server responses, numbers and objects, with shared bounds.

JSON is rejected for duplicate keys, NaN, deep nesting and trailing values. `JsonLines` parses repeated values of
JSON lines only once. The typed getters (`mapping`, `objects`, `texts`) read fields of objects that may hold any
value.

Responses of the API server are never rejected, because a parser that fails on one object would hide the rest of the
list. An object of 1.5 MB (etcd's limit) made of empty lists takes 40 MB of memory, and the cache keeps all objects
of a cluster. Objects with more than `MOST_VALUES` values are therefore reduced to identity and status. Values
nested too deeply become null, and invalid Unicode becomes U+FFFD.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final, TypeVar

import msgspec

from specdecode_operator.problems import shown
from specdecode_operator.redaction import clip

MAX_BYTES: Final = 32 * 2**20
"""Of a text: a list of a thousand nodes as kubectl prints it has 15 MB; one object has 1.5 MB at most, says etcd."""

MAX_DEPTH: Final = 100
"""Of objects and lists in one another: the deepest of published CRDs, a schema of pods, has 60."""

MAX_DIGITS: Final = 308
"""Of a number: the largest that a program can compute with has so many."""

MANY_VALUES: Final = 50_000
"""Values that a YAML text may have in any case: the largest CRDs in use have as many."""

BYTES_PER_VALUE: Final = 12
"""A larger YAML text may have a value in so many bytes; what kubectl prints has one in 25. Each takes 3 microseconds
to read, so that what is made to take long ends within a third of a second for each megabyte."""


class UnreadableTextError(ValueError):
    """A text that is not what it should be, or is made to hurt: where, what, and what to do, in one line."""

    line: int | None = None


def check_size(text: str | bytes, most_bytes: int = MAX_BYTES) -> None:
    """Refuse a text that is too large.

    Raises
    ------
    UnreadableTextError
        When it is.
    """
    if len(text) > most_bytes:
        raise too_large(most_bytes)


def too_large(most_bytes: int = MAX_BYTES) -> UnreadableTextError:
    """Return what is said of a text that is too large."""
    size = f"{most_bytes // 2**20} MiB" if most_bytes >= 2**20 else f"{most_bytes // 2**10} KiB"
    return UnreadableTextError(f"has more than {size}: write less, or split it")


def inner_values(level: Iterable[Any]) -> list[Any]:
    """Return what lies in objects and lists, one level deeper: what is nested deep must not be walked by recursion."""
    return [
        inner
        for outer in level
        for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
    ]


MOST_DIGITS: Final = 15
"""Digits of the largest number that is read: more than the bytes of memory of any machine, and exact as a float."""


def whole_number(text: object, most: int = 10**MOST_DIGITS - 1) -> int | None:
    """Return the number that ASCII digits stand for; None for any other value and for a number above ``most``.

    Python's ``int`` takes digits of all scripts, and raises an error for more than 4,300 of them.
    """
    digits = str(text) if isinstance(text, str) or (type(text) is int and 0 <= text <= most) else ""
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= MOST_DIGITS):
        return None
    number = int(digits)
    return number if number <= most else None


def objects(body: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the objects of a list; none where there is no list."""
    found = body.get(key)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def mapping(body: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return an object inside another; empty where there is none."""
    found = body.get(key)
    return found if isinstance(found, dict) else {}


def texts(body: Mapping[str, Any], key: str) -> list[str]:
    """Return the entries of a list as text; none where there is no list."""
    found = body.get(key)
    return [str(each) for each in found] if isinstance(found, list) else []


def name_of(body: Mapping[str, Any]) -> str:
    """Return the name of a volume, a mount, a variable or a container."""
    return str(body.get("name"))


_SPACE: Final = " \t\r\n"


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
        text = _decoded_json(text)
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


def _decoded_json(text: bytes) -> str:
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


def _json_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
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


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_json_object, parse_int=_whole_number, parse_float=_number)


_MOST_REMEMBERED_BYTES: Final = 8 * 2**20
"""Of text: as objects of Python it is ten times as large."""

_EACH_BYTES: Final = 100
"""What a value takes beside its text."""

_WITH_BLANKS: Final = (b", ", b'"%b": %b')
_WITHOUT: Final = (b",", b'"%b":%b')
"""How programs write an object: as Python does, and the shortest way."""


class SharedObject(dict[str, Any]):
    """An object that many lines hold and nobody changes: the digest of its content is worked out once."""

    digest: bytes | None = None


class JsonLines:
    """Reads line after line. What lies in an object is one object for lines that say the same: do not change it."""

    def __init__(self, most_line_bytes: int) -> None:
        self._most_line_bytes = most_line_bytes
        self._split: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self._known: dict[bytes, Any] = {}
        self._known_bytes = 0

    def parse(self, line: str | bytes) -> Any:
        """Return the value of a line.

        Raises
        ------
        UnreadableTextError
            As `parse_json` does.
        """
        parts = self._parts(line.strip()) if isinstance(line, bytes) else None
        if parts is None:
            return parse_json(line, self._most_line_bytes)
        return {key: self._value(text) for key, text in parts}

    def _parts(self, line: bytes) -> list[tuple[str, bytes]] | None:
        """Return keys and texts of an object; None where a line is anything else, has a key twice, or looks unusual."""
        if len(line) > self._most_line_bytes:
            return None
        try:
            found = self._split.decode(line)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return None
        parts = [(key, bytes(text)) for key, text in found.items()]
        once = line == _joined(parts, *_WITH_BLANKS) or line == _joined(parts, *_WITHOUT)
        return parts if once and "".join(found).isprintable() else None

    def _value(self, text: bytes) -> Any:
        if text in self._known:
            return self._known[text]
        value = parse_json(text, self._most_line_bytes)
        if isinstance(value, dict):
            value = SharedObject(value)
        self._known_bytes += len(text) + _EACH_BYTES
        if self._known_bytes > _MOST_REMEMBERED_BYTES:
            self._known.clear()
            self._known_bytes = len(text) + _EACH_BYTES
        self._known[text] = value
        return value


def _joined(parts: list[tuple[str, bytes]], separator: bytes, form: bytes) -> bytes:
    return b"{%b}" % separator.join([form % (key.encode(), text) for key, text in parts])


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


MOST_VALUES: Final = 50_000
"""Of one object: its spec may have some 40,000, a pod with all that the API server and others add has some thousand."""

TOO_LARGE: Final = "tooLarge"
"""The field in the spec of an object that says how large it is where the rest is not read; no kind has such a field."""

_MOST_LABELS: Final = 64
_MOST_OWNERS: Final = 16
_NOTHING: Final = msgspec.Raw(b"{}")


_Kind = TypeVar("_Kind", bound=msgspec.Struct)


class _List(msgspec.Struct):
    items: list[msgspec.Raw] | msgspec.UnsetType = msgspec.UNSET
    metadata: msgspec.Raw = _NOTHING
    kind: str = ""
    apiVersion: str = ""  # noqa: N815  as it is called there


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Identity(msgspec.Struct, rename="camel", omit_defaults=True):
    name: str
    uid: str = ""
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    resource_version: str = ""
    labels: dict[str, str] | None = None


class _Metadata(_Identity, rename="camel", omit_defaults=True):
    generation: int | msgspec.UnsetType = msgspec.UNSET
    creation_timestamp: str | msgspec.UnsetType = msgspec.UNSET
    deletion_timestamp: str | msgspec.UnsetType = msgspec.UNSET
    owner_references: list[dict[str, Any]] | None = None


class _Identified(msgspec.Struct):
    metadata: _Identity


class _Object(msgspec.Struct, rename="camel", omit_defaults=True):
    metadata: _Metadata
    kind: str = ""
    api_version: str = ""
    status: msgspec.Raw = _NOTHING


def read_answer(text: bytes, is_known: Callable[[dict[str, Any]], bool] | None = None) -> Any:
    """Return an object, a list of objects, or whatever else the API server answers.

    With ``is_known``, which is asked with name, UID, version and labels of each object of a list, the list has under
    ``known`` the UIDs of those that are known, and in ``items`` only the others: all of an object takes far longer.

    Raises
    ------
    ValueError
        When it is no JSON.
    """
    text = in_unicode(text)
    if is_known is None and not _may_be_too_large(text):
        return read_json(text)
    found = _decoded(text, _List)
    if found.items is msgspec.UNSET:
        return _object(text)
    items, known = [], []
    for item in map(bytes, found.items):
        if is_known is not None and is_known(who := msgspec.to_builtins(_decoded(item, _Identified))):
            known.append(who["metadata"]["uid"])
        else:
            items.append(_object(item))
    read = {"kind": found.kind, "apiVersion": found.apiVersion, "metadata": read_json(bytes(found.metadata))}
    return {**read, "items": items, **({} if is_known is None else {"known": known})}


def bounded_event(line: bytes) -> bytes:
    """Return one line of a watch as anybody can read it."""
    line = in_unicode(line)
    if _may_be_too_large(line):
        event = _decoded(line, _Event)
        if _is_too_large(seen := bytes(event.object)):
            return msgspec.json.encode({"type": event.type, "object": _stub(seen)})
    return without_deep(line)


def _object(text: bytes) -> Any:
    return _stub(text) if _is_too_large(text) else read_json(text)


def _stub(text: bytes) -> dict[str, Any]:
    found = _decoded(text, _Object)
    metadata = found.metadata
    metadata.labels = dict(islice((metadata.labels or {}).items(), _MOST_LABELS))
    metadata.owner_references = (metadata.owner_references or [])[:_MOST_OWNERS]
    status = bytes(found.status)
    return {
        "apiVersion": found.api_version,
        "kind": found.kind,
        "metadata": msgspec.to_builtins(metadata),
        "spec": {TOO_LARGE: f"{len(text):,} bytes"},
        "status": {} if _is_too_large(status) else read_json(status),
    }


def _may_be_too_large(text: bytes) -> bool:
    return len(text) > 2 * MOST_VALUES


def _is_too_large(text: bytes) -> bool:
    return _may_be_too_large(text) and _values(text) > MOST_VALUES and _values(without_strings(text)) > MOST_VALUES


def _values(text: bytes) -> int:
    return text.count(b",") + text.count(b"{") + text.count(b"[")


def _decoded(text: bytes, kind: type[_Kind]) -> _Kind:
    try:
        try:
            return msgspec.json.decode(text, type=kind)
        except RecursionError:
            return msgspec.json.decode(without_deep(text), type=kind)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
