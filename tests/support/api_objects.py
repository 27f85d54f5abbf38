"""What a Kubernetes API server makes of an object that is written: by apply, by merge patch, by itself."""

from typing import Any

from tests.support.objects import Body


def with_server_fields(body: Body) -> Body:
    """Return what is made of an object that is applied: a Service gets an address."""
    if body["kind"] != "Service":
        return body
    return {**body, "spec": {"clusterIP": "10.0.0.1", **body["spec"]}}


def after_apply(live: Any, earlier: Any, desired: Any) -> Any:
    """Return what an apply makes of a live object: what was applied earlier and no longer is goes, all else stays."""
    if not isinstance(live, dict) or not isinstance(desired, dict):
        return desired
    earlier = earlier if isinstance(earlier, dict) else {}
    kept = {field: value for field, value in live.items() if field in desired or field not in earlier}
    changed = {field: after_apply(live.get(field), earlier.get(field), value) for field, value in desired.items()}
    return {**kept, **changed}


def applied_fields(patch: Body) -> Body:
    """Return what somebody owns who applies this: nobody owns UID and version, not even who has named them."""
    metadata = {name: value for name, value in patch["metadata"].items() if name not in {"resourceVersion", "uid"}}
    return {**patch, "metadata": metadata}


def after_merge(live: Any, patch: Any) -> Any:
    """Return what a merge patch makes of something (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    merged = {**live} if isinstance(live, dict) else {}
    for field, value in patch.items():
        merged[field] = after_merge(merged.get(field), value)
    return {field: value for field, value in merged.items() if value is not None}


def matches(body: Body, selector: str) -> bool:
    labels = body["metadata"].get("labels") or {}
    return all(
        labels.get(name) == value for name, _, value in (each.partition("=") for each in selector.split(",") if each)
    )
