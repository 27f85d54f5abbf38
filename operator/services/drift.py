"""Tells whether a live object still is what was asked for."""

from specdecode_operator.api.base import Body
from specdecode_operator.labels import APPLIED_HASH_ANNOTATION


def needs_apply(desired: Body, live: Body, applied: Body | None) -> bool:
    """Whether applying the desired object would change the live one.

    ``applied`` is the `content` of the API server's answer when it was last
    applied: values come back in other words (1024Mi as 1Gi), so the live
    object is compared with that answer and not with what was sent. Without an
    answer, after a start, it is applied once; that changes nothing.
    """
    annotations = live["metadata"].get("annotations") or {}
    if annotations.get(APPLIED_HASH_ANNOTATION) != desired["metadata"]["annotations"][APPLIED_HASH_ANNOTATION]:
        return True
    return applied is None or content(live) != applied


def content(body: Body) -> Body:
    """What a person could change of an object: all but its status and its book-keeping."""
    metadata = body["metadata"]
    kept = {field: value for field, value in body.items() if field not in {"apiVersion", "kind", "metadata", "status"}}
    return {**kept, "labels": metadata.get("labels"), "ownerReferences": metadata.get("ownerReferences")}


def is_owned(body: Body, uid: str) -> bool:
    """Whether an object of this UID owns a child."""
    return any(owner["uid"] == uid for owner in body["metadata"].get("ownerReferences") or [])
