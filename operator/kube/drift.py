"""Tells whether a live object still is what was asked for."""

import hashlib
import json

from specdecode_operator.api.base import Body
from specdecode_operator.kube.labels import APPLIED_HASH_ANNOTATION


def needs_apply(desired: Body, live: Body, applied: str | None) -> bool:
    """Whether applying the desired object would change the live one.

    ``applied`` is the `content_digest` of the API server's answer when it was last
    applied: values come back in other words (1024Mi as 1Gi), so the live
    object is compared with that answer and not with what was sent. Without an
    answer, after a start, it is applied once; that changes nothing.
    """
    annotations = live["metadata"].get("annotations") or {}
    if annotations.get(APPLIED_HASH_ANNOTATION) != desired["metadata"]["annotations"][APPLIED_HASH_ANNOTATION]:
        return True
    return applied is None or content_digest(live) != applied


def content_digest(body: Body) -> str:
    """Digest of what a person could change of an object: all but its status and its book-keeping.

    It is compared and never read, and of thousands of children the content itself is much memory.
    """
    metadata = body["metadata"]
    kept = {field: value for field, value in body.items() if field not in {"apiVersion", "kind", "metadata", "status"}}
    content = {**kept, "labels": metadata.get("labels"), "ownerReferences": metadata.get("ownerReferences")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


Identity = tuple[str, str]
"""Kind and name of a child."""


def identity(body: Body) -> Identity:
    """Return kind and name of a child."""
    return body["kind"], body["metadata"]["name"]


def is_owned(body: Body, uid: str) -> bool:
    """Whether an object of this UID owns a child."""
    return any(owner["uid"] == uid for owner in body["metadata"].get("ownerReferences") or [])
