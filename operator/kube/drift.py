"""Tells whether a live object still is what was asked for, and in what it is not."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any, Final

from specdecode_operator.api.base import Body
from specdecode_operator.kube.labels import APPLIED_HASH_ANNOTATION

_FIELDS_NAMED: Final = 5
_KEYS: Final = ("name", "uid")
"""What elements of a list are told apart by, where they are objects."""


def needs_apply(desired: Body, live: Body, applied: str | None) -> bool:
    """Whether applying the desired object would change the live one.

    ``applied`` is the `content_digest` of the API server's answer when it was last
    applied: values come back in other words (1024Mi as 1Gi), so the live
    object is compared with that answer and not with what was sent. Without an
    answer it is applied once; that changes nothing.
    """
    return not is_same_wish(desired, live) or applied is None or content_digest(live, desired) != applied


def is_same_wish(desired: Body, live: Body) -> bool:
    """Whether the live object was applied for just what is desired now: then a difference is drift."""
    annotations = live["metadata"].get("annotations") or {}
    wish: str = desired["metadata"]["annotations"][APPLIED_HASH_ANNOTATION]
    return annotations.get(APPLIED_HASH_ANNOTATION) == wish


def changed_fields(before: Body, after: Body) -> str:
    """Name the fields of an object in which two versions of it differ, the first few of them; empty for none."""
    paths = [
        path for name in _compared(before, after) for path in differing_paths(name, before.get(name), after.get(name))
    ]
    owners = [each["metadata"].get("ownerReferences") for each in (before, after)]
    paths += differing_paths("metadata.ownerReferences", *owners)
    more = len(paths) - _FIELDS_NAMED
    return ", ".join(paths[:_FIELDS_NAMED]) + (f" and {more} more" if more > 0 else "")


def _compared(*bodies: Body) -> list[str]:
    return sorted({*bodies[0], *bodies[1]} - {"apiVersion", "kind", "metadata", "status"})


def differing_paths(path: str, before: Any, after: Any) -> Iterator[str]:
    """Yield the paths at which two values differ; of something that only one has, its own path."""
    if before == after:
        return
    one, other = _by_key(before), _by_key(after)
    if one is None or other is None:
        yield path
        return
    for key in sorted({*one, *other}):
        inner = f"{path}[{key}]" if isinstance(before, list) else f"{path}.{key}"
        if key in one and key in other:
            yield from differing_paths(inner, one[key], other[key])
        else:
            yield inner


def _by_key(value: Any) -> dict[str, Any] | None:
    """Return what a value has, by name; None for one that is compared as a whole."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        return None
    key = next((key for key in _KEYS if all(key in each for each in value)), None)
    found = {str(each[key]): each for each in value} if key else None
    return found if found is not None and len(found) == len(value) else None


def content_digest(body: Body, desired: Body) -> str:
    """Digest of what a person could change of an object: all but its status, its book-keeping and labels of others.

    It is compared and never read, and of thousands of children the content itself is much memory.
    """
    metadata = body["metadata"]
    kept = {field: value for field, value in body.items() if field not in {"apiVersion", "kind", "metadata", "status"}}
    labels = metadata.get("labels") or {}
    wanted = {name: labels.get(name) for name in desired["metadata"].get("labels") or {}}
    content = {**kept, "labels": wanted, "ownerReferences": metadata.get("ownerReferences")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


Identity = tuple[str, str]
"""Kind and name of a child."""


def identity(body: Body) -> Identity:
    """Return kind and name of a child."""
    return body["kind"], body["metadata"]["name"]


def is_owned(body: Body, uid: str) -> bool:
    """Whether an object of this UID owns a child."""
    return any(owner["uid"] == uid for owner in body["metadata"].get("ownerReferences") or [])
