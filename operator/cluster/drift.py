"""Detect drift of live objects: content digests, changed fields and their field managers.

An apply removes a field only if the operator had written it before. The operator therefore takes over fields of
other managers first, as `kubectl apply --server-side` does for its earlier versions (client-go, util/csaupgrade).
Defaults of the API server and additions by webhooks have no manager and are not drift.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from specdecode_operator.api.base import Body
from specdecode_operator.cluster.clock import rfc3339
from specdecode_operator.cluster.resources import APPLIED_HASH_ANNOTATION, JOB, MANAGER, PERSISTENT_VOLUME_CLAIM, POD
from specdecode_operator.untrusted import parse_json

_FIELDS_NAMED: Final = 5
_KEYS: Final = ("name", "uid")
"""Keys of list elements that are objects."""


def needs_apply(desired: Body, live: Body, applied: str | None) -> bool:
    """Return whether applying the desired object would change the live one.

    ``applied`` is the `content_digest` of the response to the last apply: values are normalized (1024Mi to 1Gi), so the
    live object is compared with that response. Without one it is applied once, which changes nothing.
    """
    return not is_same_wish(desired, live) or applied is None or content_digest(live, desired) != applied


def is_same_wish(desired: Body, live: Body) -> bool:
    """Return whether the live object was applied for the same desired object: then a difference is drift."""
    return wish_of(live) == wish_of(desired)


def wish_of(body: Body) -> str | None:
    """Return the hash of the desired object for which an object was applied, or of a desired object itself."""
    annotations = body["metadata"].get("annotations") or {}
    wish: str | None = annotations.get(APPLIED_HASH_ANNOTATION)
    return wish


def changed_fields(before: Body, after: Body) -> str:
    """Return the first few fields in which two versions of an object differ, as text; empty if they are equal."""
    names = sorted({*before, *after} - {"apiVersion", "kind", "metadata", "status"})
    paths = [path for name in names for path in differing_paths(name, before.get(name), after.get(name))]
    owners = [each["metadata"].get("ownerReferences") for each in (before, after)]
    paths += differing_paths("metadata.ownerReferences", *owners)
    more = len(paths) - _FIELDS_NAMED
    return ", ".join(paths[:_FIELDS_NAMED]) + (f" and {more} more" if more > 0 else "")


def differing_paths(path: str, before: Any, after: Any) -> Iterator[str]:
    """Yield the paths at which two values differ, or that only one has."""
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
    """Return the members of a value by key; None for one that is compared as a whole."""
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        return None
    key = next((key for key in _KEYS if all(key in each for each in value)), None)
    found = {str(each[key]): each for each in value} if key else None
    return found if found is not None and len(found) == len(value) else None


def content_hash(value: Any) -> str:
    """Return a short hash of JSON, such as an object."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def content_digest(body: Body, desired: Body) -> str:
    """Return the digest of the content that users can change: no status, bookkeeping, or labels of other tools.

    The content itself would take much memory for thousands of children.
    """
    metadata = body["metadata"]
    kept = {field: value for field, value in body.items() if field not in {"apiVersion", "kind", "metadata", "status"}}
    labels = metadata.get("labels") or {}
    wanted = {name: labels.get(name) for name in desired["metadata"].get("labels") or {}}
    content = {**kept, "labels": wanted, "ownerReferences": metadata.get("ownerReferences")}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=dict).encode()).hexdigest()


Identity = tuple[str, str]
"""Kind and name of a child."""


def identity(body: Body) -> Identity:
    """Return the identity of a child."""
    return body["kind"], body["metadata"]["name"]


def is_owned(body: Body, uid: str) -> bool:
    """Return whether an object of this UID owns a child."""
    return any(owner["uid"] == uid for owner in body["metadata"].get("ownerReferences") or [])


_LEFT_TO_OTHERS: Final = frozenset({JOB.kind, PERSISTENT_VOLUME_CLAIM.kind, POD.kind})
"""Kinds without repair: queues such as Kueue suspend and place Jobs, whose pods are immutable; claims are bound by a
controller and grown by people."""

_OF_OTHERS: Final = ("f:labels", "f:annotations", "f:finalizers")
"""Metadata of other tools, which starts no pods."""

_LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"

_RESTARTED: Final = ("f:spec", "f:template", "f:metadata", "f:annotations", "f:kubectl.kubernetes.io/restartedAt")
"""Field of `kubectl rollout restart`, which is no drift."""

Fields = dict[str, Any]
"""A tree of FieldsV1; a leaf is empty."""


def foreign_entries(kind: str, metadata: Body) -> list[Body]:
    """Return the entries of `managedFields` of other managers, reduced to fields that only the operator may set.

    Fields that the operator applied too, the status, and `_OF_OTHERS` are left out.
    """
    if kind in _LEFT_TO_OTHERS:
        return []
    entries = metadata.get("managedFields") or []
    ours = next((_fields(entry) for entry in entries if _is_ours(entry)), {})
    others = [{**entry, "fieldsV1": _contested(_fields(entry), ours)} for entry in entries if not _is_ours(entry)]
    return [entry for entry in others if entry["fieldsV1"]]


def applied_replicas_managers(metadata: Body) -> list[str]:
    """Return who applies a manifest with `spec.replicas`, which resets the number that an autoscaler chose.

    Other writers than server-side apply own the default of the field too, so of them only kubectl's record counts.
    """
    entries = metadata.get("managedFields") or []
    found = {
        str(entry.get("manager"))
        for entry in entries
        if entry.get("operation") == "Apply" and "f:replicas" in (_fields(entry).get("f:spec") or {})
    }
    try:
        last = parse_json((metadata.get("annotations") or {}).get(_LAST_APPLIED, "{}"))
        found |= {"kubectl apply"} if "replicas" in last["spec"] else set()
    except (KeyError, TypeError, ValueError):
        pass
    return sorted(found)


def foreign_managers(live: Body, kept: Collection[str] = ()) -> list[str]:
    """Return the managers of the fields of `foreign_entries`, without those whose fields are kept."""
    entries = foreign_entries(live["kind"], live["metadata"])
    return sorted({str(entry.get("manager")) for entry in entries} - {*kept})


def with_fields_taken_over(live: Body, kept: Collection[str]) -> list[Body]:
    """Return the object's `managedFields` with foreign fields moved to the operator's entry.

    The next apply then removes those that it lacks.
    """
    entries = live["metadata"].get("managedFields") or []
    first = {
        "manager": MANAGER,
        "operation": "Apply",
        "apiVersion": live["apiVersion"],
        "time": rfc3339(datetime.now(UTC)),
        "fieldsType": "FieldsV1",
    }
    ours = next((entry for entry in entries if _is_ours(entry)), first)
    taken, others = _fields(ours), []
    for entry in entries:
        fields = _fields(entry)
        if not _is_ours(entry) and entry.get("manager") not in kept:
            # A field that has another owner, too, would stay.
            contested = _contested(fields, _fields(ours))
            taken, fields = _union(taken, contested), _without(fields, contested)
        if fields and not _is_ours(entry):
            others.append({**entry, "fieldsV1": fields})
    return [{**ours, "fieldsV1": taken}, *others]


def without_kept_fields(desired: Body, live: Body, kept: Collection[str]) -> Body:
    """Return the desired object without fields of kept managers, which an apply would take back."""
    body = desired
    for entry in foreign_entries(live["kind"], live["metadata"]):
        if entry.get("manager") in kept:
            body = _pruned(body, entry["fieldsV1"])
    return body


def _pruned(value: Any, fields: Fields) -> Any:
    if isinstance(value, dict):
        inner = {name: fields.get(f"f:{name}") for name in value}
        return {name: _pruned(value[name], inner[name] or {}) for name in value if inner[name] != {}}
    if isinstance(value, list):
        # Elements are found by their keys: k:{"name":"engine"}.
        keyed = [(json.loads(name[2:]).items(), inner) for name, inner in fields.items() if name.startswith("k:")]
        return [
            _pruned(each, next((inner for keys, inner in keyed if isinstance(each, dict) and keys <= each.items()), {}))
            for each in value
        ]
    return value


def _is_ours(entry: Body) -> bool:
    return entry.get("manager") == MANAGER and entry.get("operation") == "Apply" and not entry.get("subresource")


def _fields(entry: Body) -> Fields:
    """Return the tree of fields. Trees inside MAX_DEPTH others are null (`read_json`), which means empty."""
    fields: Fields = entry.get("fieldsV1") or {}
    return fields


def _contested(fields: Fields, ours: Fields) -> Fields:
    metadata = {name: value for name, value in fields.get("f:metadata", {}).items() if name not in _OF_OTHERS}
    rest = {name: value for name, value in fields.items() if name not in {"f:metadata", "f:status"}}
    return _less(rest | ({"f:metadata": metadata} if metadata else {}), ours, _RESTARTED)


def _less(fields: Fields, ours: Fields, left: tuple[str, ...] = ()) -> Fields:
    """Subtract another tree, and the one field at a path."""
    found = {}
    for name, value in fields.items():
        if name == "." or left == (name,):
            continue
        if name not in ours and left[:1] != (name,):
            found[name] = value
        elif rest := _less(value or {}, ours.get(name) or {}, left[1:] if left[:1] == (name,) else ()):
            found[name] = rest
    return found


def _union(one: Fields, other: Fields) -> Fields:
    return {name: _union(one.get(name) or {}, other.get(name) or {}) for name in {**one, **other}}


def _without(fields: Fields, taken: Fields) -> Fields:
    """Subtract the leaves of another tree, and the nodes that this empties."""
    found = {}
    for name, value in fields.items():
        if name not in taken:
            found[name] = value
        elif taken[name] and {*(rest := _without(value or {}, taken[name]))} - {"."}:
            found[name] = rest
    return found
