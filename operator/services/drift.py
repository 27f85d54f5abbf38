"""Tells whether a live object still is what was asked for."""

from typing import Any

from specdecode_operator.labels import APPLIED_HASH_ANNOTATION

Body = dict[str, Any]


def needs_apply(desired: Body, live: Body | None) -> bool:
    """Whether applying the desired object would change the live one.

    The hash catches what is no longer asked for; the comparison catches what
    somebody else changed. Applying once too often is harmless.
    """
    if live is None:
        return True
    applied = (live["metadata"].get("annotations") or {}).get(APPLIED_HASH_ANNOTATION)
    if applied != desired["metadata"]["annotations"][APPLIED_HASH_ANNOTATION]:
        return True
    return not _contains(live, desired)


def _contains(live: Any, desired: Any) -> bool:
    """Whether live says all that desired says; the API server may have added defaults."""
    if isinstance(desired, dict) and isinstance(live, dict):
        return all(
            _contains(live[key], value) if key in live else value in ("", None, [], {})
            for key, value in desired.items()
        )
    if isinstance(desired, list) and isinstance(live, list):
        return len(live) == len(desired) and all(map(_contains, live, desired))
    return bool(live == desired)


def is_owned(body: Body, uid: str) -> bool:
    """Whether this very object is the controller of a child."""
    return any(owner["uid"] == uid for owner in body["metadata"].get("ownerReferences") or [])
