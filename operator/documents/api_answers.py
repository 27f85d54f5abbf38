"""What the API server answers, with no more of each object than a program can hold, whatever others put into it.

An object has 1.5 MB at most, says etcd, but made of empty lists that is 40 MB of memory, and all objects of a cluster
are kept. Nothing of use has as many values as are let through: what has more is read as who it is, and how it stood.
"""

from itertools import islice
from typing import Any, Final, TypeVar

import msgspec

from specdecode_operator.documents.deep_json import read_json, without_deep, without_strings

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


class _Metadata(msgspec.Struct, rename="camel", omit_defaults=True):
    name: str
    uid: str = ""
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    resource_version: str = ""
    generation: int | msgspec.UnsetType = msgspec.UNSET
    creation_timestamp: str | msgspec.UnsetType = msgspec.UNSET
    deletion_timestamp: str | msgspec.UnsetType = msgspec.UNSET
    labels: dict[str, str] | None = None
    owner_references: list[dict[str, Any]] | None = None


class _Object(msgspec.Struct, rename="camel", omit_defaults=True):
    metadata: _Metadata
    kind: str = ""
    api_version: str = ""
    status: msgspec.Raw = _NOTHING


def read_answer(text: bytes) -> Any:
    """Return an object, a list of objects, or whatever else the API server answers.

    Raises
    ------
    ValueError
        When it is no JSON.
    """
    if not _may_be_too_large(text):
        return read_json(text)
    found = _decoded(text, _List)
    if found.items is msgspec.UNSET:
        return _object(text)
    metadata, items = read_json(bytes(found.metadata)), [_object(bytes(item)) for item in found.items]
    return {"kind": found.kind, "apiVersion": found.apiVersion, "metadata": metadata, "items": items}


def bounded_event(line: bytes) -> bytes:
    """Return one line of a watch as anybody can read it."""
    if _may_be_too_large(line):
        event = _decoded(line, _Event)
        if _is_too_large(seen := bytes(event.object)):
            return msgspec.json.encode({"type": event.type, "object": _stub(seen)})
    return without_deep(line)


def _object(text: bytes) -> Any:
    return _stub(text) if _is_too_large(text) else read_json(text)


def _stub(text: bytes) -> dict[str, Any]:
    """Return who an object is and how it stood, and how large it is."""
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
    """Whether a text is long enough for so many values: each takes two characters at least."""
    return len(text) > 2 * MOST_VALUES


def _is_too_large(text: bytes) -> bool:
    return _may_be_too_large(text) and _values(text) > MOST_VALUES and _values(without_strings(text)) > MOST_VALUES


def _values(text: bytes) -> int:
    """Return how many values a text has at most: each follows a comma, or is the first in an object or a list."""
    return text.count(b",") + text.count(b"{") + text.count(b"[")


def _decoded(text: bytes, kind: type[_Kind]) -> _Kind:
    try:
        try:
            return msgspec.json.decode(text, type=kind)
        except RecursionError:
            return msgspec.json.decode(without_deep(text), type=kind)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
