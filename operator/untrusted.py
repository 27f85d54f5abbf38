"""What the API server answers, with no more of each object than a program can hold, whatever others put into it.

An object has 1.5 MB at most, says etcd, but made of empty lists that is 40 MB of memory, and all objects of a cluster
are kept. Nothing of use has as many values as are let through: what has more is read as who it is, and how it stood.
"""

from collections.abc import Callable
from itertools import islice
from typing import Any, Final, TypeVar

import msgspec

from specdecode_operator.documents.deep_json import in_unicode, read_json, without_deep, without_strings

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
