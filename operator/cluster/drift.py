"""Who wrote which fields of an object: the API server keeps that in `metadata.managedFields`.

What an apply leaves out is removed only where the operator had written it itself. What others wrote has to be taken
over first, as `kubectl apply --server-side` does with what earlier versions of it wrote (client-go, util/csaupgrade).
Defaults of the API server and what webhooks add belong to nobody, and so are nobody's drift.
"""

import json
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any, Final

from specdecode_operator.api.base import Body
from specdecode_operator.kube.labels import MANAGER
from specdecode_operator.kube.resources import JOB, PERSISTENT_VOLUME_CLAIM, POD

_LEFT_TO_OTHERS: Final = frozenset({JOB.kind, PERSISTENT_VOLUME_CLAIM.kind, POD.kind})
"""Kinds of which nothing is taken back: queues such as Kueue suspend and place Jobs, whose pods nobody can change once
they are made; claims are bound by a controller and grown by people."""

_OF_OTHERS: Final = ("f:labels", "f:annotations", "f:finalizers")
"""Metadata of the object itself that start nothing: tools put their marks there."""

_RESTARTED: Final = ("f:spec", "f:template", "f:metadata", "f:annotations", "f:kubectl.kubernetes.io/restartedAt")
"""What `kubectl rollout restart` writes: a restart is asked for, and nothing else is changed."""

Fields = dict[str, Any]
"""A tree of fields as the API server writes it (FieldsV1); a leaf is an empty one."""


def foreign_entries(kind: str, metadata: Body) -> list[Body]:
    """Return what others have written of an object that is the operator's to say, by field manager.

    ``metadata`` is that of the live object. Entries are those of `metadata.managedFields`, less what the operator
    applied too, the status, and what is left to others.
    """
    if kind in _LEFT_TO_OTHERS:
        return []
    entries = metadata.get("managedFields") or []
    ours = next((_fields(entry) for entry in entries if _is_ours(entry)), {})
    others = [{**entry, "fieldsV1": _contested(_fields(entry), ours)} for entry in entries if not _is_ours(entry)]
    return [entry for entry in others if entry["fieldsV1"]]


def foreign_managers(live: Body, kept: Collection[str] = ()) -> list[str]:
    """Return the field managers that have written what is the operator's to say, less those whose fields are kept."""
    entries = foreign_entries(live["kind"], live["metadata"])
    return sorted({str(entry.get("manager")) for entry in entries} - {*kept})


def with_fields_taken_over(live: Body, kept: Collection[str]) -> list[Body]:
    """Return the object's `managedFields` with what others wrote as written by the operator's own applies.

    The next apply then removes what it does not hold.
    """
    entries = live["metadata"].get("managedFields") or []
    ours = next((entry for entry in entries if _is_ours(entry)), _first_entry(live["apiVersion"]))
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
    """Return what is to be applied without the fields that managers have written whose fields are kept.

    An apply that held them would take them back.
    """
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
        return [_pruned(each, _fields_of_element(each, fields)) for each in value]
    return value


def _fields_of_element(element: Any, fields: Fields) -> Fields:
    """Return the fields of one element of a list, which are found by its keys: k:{"name":"engine"}."""
    for name, inner in fields.items():
        if name.startswith("k:") and isinstance(element, dict) and json.loads(name[2:]).items() <= element.items():
            found: Fields = inner
            return found
    return {}


def _is_ours(entry: Body) -> bool:
    return entry.get("manager") == MANAGER and entry.get("operation") == "Apply" and not entry.get("subresource")


def _fields(entry: Body) -> Fields:
    fields: Fields = entry.get("fieldsV1") or {}
    return fields


def _first_entry(api_version: str) -> Body:
    return {
        "manager": MANAGER,
        "operation": "Apply",
        "apiVersion": api_version,
        "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "fieldsType": "FieldsV1",
    }


def _contested(fields: Fields, ours: Fields) -> Fields:
    """Return the fields of an entry that are neither ours too nor left to others."""
    metadata = {name: value for name, value in fields.get("f:metadata", {}).items() if name not in _OF_OTHERS}
    rest = {name: value for name, value in fields.items() if name not in {"f:metadata", "f:status"}}
    return _less(rest | ({"f:metadata": metadata} if metadata else {}), ours, _RESTARTED)


def _less(fields: Fields, ours: Fields, left: tuple[str, ...] = ()) -> Fields:
    """Return a tree without what another one holds, and without the one field at a path."""
    found = {}
    for name, value in fields.items():
        if name == "." or left == (name,):
            continue
        if name not in ours and left[:1] != (name,):
            found[name] = value
        elif rest := _less(value, ours.get(name, {}), left[1:] if left[:1] == (name,) else ()):
            found[name] = rest
    return found


def _union(one: Fields, other: Fields) -> Fields:
    return {name: _union(one.get(name, {}), other.get(name, {})) for name in {**one, **other}}


def _without(fields: Fields, taken: Fields) -> Fields:
    """Return a tree without the leaves of another one, and without what that leaves empty."""
    found = {}
    for name, value in fields.items():
        if name not in taken:
            found[name] = value
        elif taken[name] and {*(rest := _without(value, taken[name]))} - {"."}:
            found[name] = rest
    return found
