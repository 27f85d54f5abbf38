"""Strict parsers for untrusted JSON, API server responses, numbers and objects, with shared bounds.

Responses of the API server are never rejected, because a parser that fails on one object would hide the rest of the
list. An object of 1.5 MB (etcd's limit) made of empty lists takes 40 MB of memory, and the cache keeps all objects of
a cluster. So objects with more than `MOST_VALUES` values are reduced to identity and status, values that are nested
too deeply become null, and invalid Unicode becomes U+FFFD.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final, TypeVar

import msgspec

from specdecode_operator.problems import shown
from specdecode_operator.redaction import clip

MAX_BYTES: Final = 32 * 2**20
"""Size of a text. A list of 1,000 nodes from kubectl has 15 MB, and etcd limits an object to 1.5 MB."""
MAX_DEPTH: Final = 100
"""Nesting of objects and lists. The deepest published CRD, a schema of pods, has 60 levels."""
MAX_DIGITS: Final = 308
"""Digits of a number: those of the largest float."""
MANY_VALUES: Final = 50_000
"""Values that any YAML text may have: those of the largest CRDs in use."""
BYTES_PER_VALUE: Final = 12
"""A larger YAML text may have a value per 12 bytes; kubectl's output has one per 25. Each takes 3 microseconds to read,
which bounds the time of a hostile text at a third of a second per megabyte."""
MOST_DIGITS: Final = 15
"""Digits of a quantity: more than the bytes of memory of any machine, and exact as a float."""
MOST_VALUES: Final = 50_000
"""Values of one API object: a large spec has 40,000, a pod with everything that is added to it has a few thousand."""

_SPACE: Final = re.compile(r"[ \t\r\n]*")


class UnreadableTextError(ValueError):
    """A text that is malformed or hostile; the message says where and how to fix it, in one line."""

    line: int | None = None


def check_size(text: str | bytes, most_bytes: int = MAX_BYTES) -> None:
    """Raise UnreadableTextError for a text that is too large."""
    if len(text) > most_bytes:
        raise too_large(most_bytes)


def too_large(most_bytes: int = MAX_BYTES) -> UnreadableTextError:
    """Return the error for a text that is too large."""
    size = f"{most_bytes // 2**20} MiB" if most_bytes >= 2**20 else f"{most_bytes // 2**10} KiB"
    return UnreadableTextError(f"has more than {size}: write less, or split it")


def inner_values(level: Iterable[Any]) -> list[Any]:
    """Return the values in objects and lists, one level deeper; recursion over deep nesting would fail."""
    return [
        inner
        for outer in level
        for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
    ]


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
    """Return the objects of a list; empty if there is no list."""
    found = body.get(key)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def mapping(body: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return an object inside another; empty if there is none."""
    found = body.get(key)
    return found if isinstance(found, dict) else {}


def texts(body: Mapping[str, Any], key: str) -> list[str]:
    """Return the entries of a list as text; empty if there is no list."""
    found = body.get(key)
    return [str(each) for each in found] if isinstance(found, list) else []


def name_of(body: Mapping[str, Any]) -> str:
    """Return the name of a volume, a mount, a variable or a container."""
    return str(body.get("name"))


def parse_json(text: str | bytes, most_bytes: int = MAX_BYTES) -> Any:
    """Return the one value of a text; raise UnreadableTextError as `parse_json_values`, and for any other number."""
    found = list(parse_json_values(text, most_bytes))
    if len(found) != 1:
        raise UnreadableTextError(f"holds {len(found)} values: write one" if found else "is empty: write JSON")
    return found[0]


def parse_json_values(text: str | bytes, most_bytes: int = MAX_BYTES) -> Iterator[Any]:
    """Yield the concatenated values of a text, as kubectl accepts them.

    Raises UnreadableTextError if one is not JSON, or is larger or deeper than allowed.
    """
    check_size(text, most_bytes)
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            raise UnreadableTextError("is not UTF-8 text: write JSON in UTF-8") from error
    text = text.removeprefix("\ufeff")
    too_deep = UnreadableTextError(f"is nested more than {MAX_DEPTH} deep, which no object is: name another file")
    position = _after_space(text, 0)
    while position < len(text):
        try:
            value, end = _DECODER.raw_decode(text, position)
        except json.JSONDecodeError as error:
            place = f"line {error.lineno}, column {error.colno}" if "\n" in text.strip() else f"column {error.colno}"
            why = f"{error.msg[:1].lower()}{error.msg[1:]}".removesuffix(" at")
            unreadable = UnreadableTextError(f"is not valid JSON at {place}: {why}")
            unreadable.line = error.lineno
            raise unreadable from error
        except RecursionError as error:
            raise too_deep from error
        level = [value]
        for _ in range(MAX_DEPTH):
            level = [inner for inner in inner_values(level) if isinstance(inner, dict | list)]
            if not level:
                break
        else:
            raise too_deep
        yield value
        position = _after_space(text, end)


def _after_space(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return found.end() if found else position


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

_CACHED_BYTES: Final = 8 * 2**20
"""Text behind the values that `JsonLines` keeps; as Python objects it is ten times as large."""
_ENTRY_BYTES: Final = 100
"""Overhead of one kept value."""


class SharedObject(dict[str, Any]):
    """A read-only object that many lines share; the digest of its content is computed once."""

    digest: bytes | None = None


class JsonLines:
    """Parser of JSON lines whose inner objects are shared between lines with the same text: do not change them."""

    def __init__(self, most_line_bytes: int) -> None:
        self._most_line_bytes = most_line_bytes
        self._split: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self._known: dict[bytes, Any] = {}
        self._known_bytes = 0

    def parse(self, line: str | bytes) -> Any:
        """Return the value of a line; raise UnreadableTextError as `parse_json`."""
        texts = self.split(line) if isinstance(line, bytes) else None
        if texts is None:
            return parse_json(line, self._most_line_bytes)
        return {key: self.value(text) for key, text in texts.items()}

    def split(self, line: bytes) -> dict[str, msgspec.Raw] | None:
        """Return the text of each value of an object; None for lines that only `parse` reads, such as invalid ones.

        The values may be invalid.
        """
        line = line.strip()
        if len(line) > self._most_line_bytes:
            return None
        try:
            found = self._split.decode(line)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return None
        # A duplicate key has a comma that is in no value and does not separate two of them.
        commas = b"".join(found.values()).count(b",") + len(found) - 1
        if line.count(b",") != commas or not "".join(found).isprintable():
            return None
        return found

    def value(self, raw: msgspec.Raw) -> Any:
        """Return the value of a text that `split` returned; raise UnreadableTextError as `parse_json`."""
        text = bytes(raw)
        if text.isdigit() and len(text) <= MOST_DIGITS:
            return int(text)
        if text in self._known:
            return self._known[text]
        value = parse_json(text, self._most_line_bytes)
        if isinstance(value, dict):
            value = SharedObject(value)
        self._known_bytes += len(text) + _ENTRY_BYTES
        if self._known_bytes > _CACHED_BYTES:
            self._known.clear()
            self._known_bytes = len(text) + _ENTRY_BYTES
        self._known[text] = value
        return value


_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"')
_TOKEN: Final = re.compile(_STRING.pattern + rb"|[\[\]{}]")
_SURROGATES: Final = re.compile(
    rb"(?<!\\)(?P<before>(?:\\\\)*+)"  # backslashes that are characters themselves
    rb"(?:(?P<pair>\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
_SURROGATE: Final = re.compile(rb"\\u[dD]")
_NO_BRACKETS_OR_QUOTES: Final = bytes(set(range(256)) - set(b'[]{}"'))
_BRACKETS_IN_QUOTES: Final = re.compile(rb'"[^"]*"')


def read_json(text: bytes) -> Any:
    """Return a value, with null in place of objects and lists inside MAX_DEPTH others.

    Raises
    ------
    json.JSONDecodeError
        If it is not JSON. kopf expects this error for a plain text answer, such as for an unknown kind.
    """
    shallow = _without_deep(text)
    try:
        return msgspec.json.decode(shallow)
    except msgspec.DecodeError:  # not JSON, or a number that is too large
        return json.loads(shallow)


def in_unicode(text: bytes) -> bytes:
    """Return JSON with U+FFFD in place of invalid bytes and escapes.

    The API server keeps managedFields of its own kinds byte for byte, for all writers.
    """
    if not text.isascii():
        try:
            text.decode()
        except UnicodeDecodeError:
            text = text.decode(errors="replace").encode()
    if _SURROGATE.search(text):
        text = _SURROGATES.sub(lambda found: found["before"] + (found["pair"] or rb"\ufffd"), text)
    return text


def _brackets_outside_strings(text: bytes) -> bytes:
    """Return the brackets of a JSON text, without those inside strings."""
    # Removing escapes and other characters first is faster than matching each string.
    without_escapes = text.replace(rb"\\", b"").replace(rb"\"", b"")
    brackets = without_escapes.translate(None, _NO_BRACKETS_OR_QUOTES).replace(b'""', b"")
    return _BRACKETS_IN_QUOTES.sub(b"", brackets).replace(b'"', b"") if b'"' in brackets else brackets


def _without_deep(text: bytes) -> bytes:
    """Return JSON with null in place of objects and lists inside MAX_DEPTH others."""
    # Removing the innermost pairs again and again is much faster than counting, which few texts need.
    brackets = _brackets_outside_strings(text)
    for _ in range(MAX_DEPTH):
        if not brackets:
            return text
        brackets = brackets.replace(b"{}", b"").replace(b"[]", b"")
    if not brackets:
        return text
    kept: list[bytes] = []
    position = depth = start = 0
    for token in _TOKEN.finditer(text):
        match token[0]:
            case b"{" | b"[":
                depth += 1
                if depth == MAX_DEPTH + 1:
                    start = token.start()
            case b"}" | b"]":
                if depth == MAX_DEPTH + 1:
                    kept.append(text[position:start])
                    position = token.end()
                depth -= 1
    if depth > MAX_DEPTH:
        kept.append(text[position:start])
        position = len(text)
    return b"null".join([*kept, text[position:]])


TOO_LARGE: Final = "tooLarge"
"""Key in the spec of an object that is not read in full; no kind has such a field. Its value is the object's size."""

_MOST_LABELS: Final = 64
_MOST_OWNERS: Final = 16
_EMPTY: Final = msgspec.Raw(b"{}")

_Kind = TypeVar("_Kind", bound=msgspec.Struct)


class _List(msgspec.Struct):
    items: list[msgspec.Raw] | msgspec.UnsetType | None = msgspec.UNSET
    """None in an empty list of metadata."""
    metadata: msgspec.Raw = _EMPTY
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


class _Typed(msgspec.Struct):
    metadata: msgspec.Raw = _EMPTY
    kind: str = ""


class _Object(msgspec.Struct, rename="camel", omit_defaults=True):
    metadata: _Metadata
    kind: str = ""
    api_version: str = ""
    status: msgspec.Raw = _EMPTY


def read_answer(text: bytes, is_known: Callable[[dict[str, Any]], bool] | None = None) -> Any:
    """Return an object, a list of objects, or any other response of the API server.

    ``is_known`` gets name, UID, version and labels of each object of a list. The result then has the UIDs of known
    objects in ``known``, and only the others in ``items``: parsing an object in full takes far longer.

    Raises ValueError if it is not JSON.
    """
    text = in_unicode(text)
    if is_known is None and not _may_be_too_large(text):
        return read_json(text)
    found = _decoded(text, _List)
    if found.items is msgspec.UNSET:
        return _stub(text) if _is_too_large(text) else read_json(text)
    items, known = [], []
    for item in map(bytes, found.items or ()):
        if is_known is not None and is_known(who := msgspec.to_builtins(_decoded(item, _Identified))):
            known.append(who["metadata"]["uid"])
        else:
            items.append(_stub(item) if _is_too_large(item) else read_json(item))
    read = {"kind": found.kind, "apiVersion": found.apiVersion, "metadata": read_json(bytes(found.metadata))}
    return {**read, "items": items, **({} if is_known is None else {"known": known})}


def kind_of_list(text: bytes) -> str:
    """Return the kind of the objects of a list; empty for any other response."""
    try:
        kind = _decoded(in_unicode(text), _List).kind
    except ValueError:  # not JSON
        return ""
    return kind.removesuffix("List") if kind.endswith("List") else ""


_NEW_VERSIONS: Final = ("ADDED", "MODIFIED")
"""Types of events with the latest version of an object."""


def read_event(
    line: bytes, kinds: Collection[str] = (), is_known: Callable[[str, dict[str, Any]], bool] = lambda *_: False
) -> tuple[str, Any] | None:
    """Return type and object of a line of a watch; None if the object is known.

    ``is_known`` is called for objects of ``kinds`` that were added or changed, with the kind and with name, UID,
    version and labels: parsing an object in full takes far longer.

    Raises ValueError if the line is not an event.
    """
    event = _decoded(in_unicode(line), _Event)
    seen = bytes(event.object)
    if event.type in _NEW_VERSIONS and (typed := _decoded(seen, _Typed)).kind in kinds:
        metadata = msgspec.to_builtins(_decoded(bytes(typed.metadata), _Identity))
        if is_known(typed.kind, {"metadata": metadata}):
            return None
    return event.type, _stub(seen) if _is_too_large(seen) else read_json(seen)


def _stub(text: bytes) -> dict[str, Any]:
    """Return identity, status and size of an object."""
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
    # Each value takes at least two characters.
    return len(text) > 2 * MOST_VALUES


def _is_too_large(text: bytes) -> bool:
    return _may_be_too_large(text) and _values(text) > MOST_VALUES and _values(_STRING.sub(b"", text)) > MOST_VALUES


def _values(text: bytes) -> int:
    # Each value follows a comma, or is the first in an object or a list.
    return text.count(b",") + text.count(b"{") + text.count(b"[")


def _decoded(text: bytes, kind: type[_Kind]) -> _Kind:
    try:
        try:
            return msgspec.json.decode(text, type=kind)
        except RecursionError:
            return msgspec.json.decode(_without_deep(text), type=kind)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
