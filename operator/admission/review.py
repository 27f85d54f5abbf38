"""An AdmissionReview, answered.

https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers/
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

from specdecode_operator.admission.judgement import (
    Level,
    Remark,
    Terms,
    capture_remarks,
    deployment_remarks,
    refusals,
)
from specdecode_operator.api import base, capture, deployment
from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import SpecDecodeCaptureSpec
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.key import Key
from specdecode_operator.deployment.spec.pydantic_problems import parsed_spec
from specdecode_operator.kube.untyped import mapping
from specdecode_operator.problems import InvalidSpecError
from specdecode_operator.redaction import clip

API_VERSION: Final = "admission.k8s.io/v1"
_JUDGED: Final = ("CREATE", "UPDATE")
_MOST_REFUSALS: Final = 32
"""An object may have thousands of what is refused, and nobody reads four megabytes."""

_MOST_WARNINGS: Final = 8
_REASONS: Final = {
    HTTPStatus.FORBIDDEN: "Forbidden",
    HTTPStatus.UNPROCESSABLE_ENTITY: "Invalid",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailable",
}
"""As the API server calls them."""

_LONGEST_WARNING: Final = 250
"""Of a warning the API server shows 256 characters where there are many, and of all together 4,096."""


class NoReviewError(Exception):
    """A request that is no AdmissionReview."""


def answer(review: Any, terms: Terms) -> Body:
    """Return the answer to an AdmissionReview; nothing is asked of anybody for it.

    Raises
    ------
    NoReviewError
        When it is none.
    """
    request = request_of(review)
    remarks = [*_remarks(request, terms)]
    warned = [each.sentence for each in remarks if each.level is Level.WARNING]
    warnings = [clip(each, _LONGEST_WARNING) for each in warned[:_MOST_WARNINGS]]
    if errors := [each for each in remarks if each.level is Level.ERROR]:
        left = len(errors) - _MOST_REFUSALS
        message = "; ".join(each.sentence for each in errors[:_MOST_REFUSALS])
        message += f"; and {left:,} more" if left > 0 else ""
        return refused(request, HTTPStatus.UNPROCESSABLE_ENTITY, f"{message} [{errors[0].rule}]", warnings)
    return allowed(request, warnings)


def request_of(review: Any) -> Body:
    """Return what an AdmissionReview asks.

    Raises
    ------
    NoReviewError
        When it is none.
    """
    request = mapping(review, "request") if isinstance(review, dict) else {}
    if not request or review.get("apiVersion") != API_VERSION or not isinstance(request.get("uid"), str):
        raise NoReviewError(f"send an AdmissionReview of {API_VERSION}")
    return request


def allowed(request: Body, warnings: Sequence[str] = ()) -> Body:
    """Return the answer that lets a request through."""
    return _answered(request, warnings, {"allowed": True})


def refused(request: Body, status: HTTPStatus, message: str, warnings: Sequence[str] = ()) -> Body:
    """Return the answer that does not."""
    told = {"code": status.value, "reason": _REASONS[status], "message": message}
    return _answered(request, warnings, {"allowed": False, "status": told})


def _answered(request: Body, warnings: Sequence[str], said: Body) -> Body:
    response = {"uid": request["uid"], **said} | ({"warnings": [*warnings]} if warnings else {})
    return {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response}


def _remarks(request: Body, terms: Terms) -> Iterator[Remark]:
    """What is to be said of the object of a request; nothing of one that goes, or whose spec stays."""
    body, before = mapping(request, "object"), mapping(request, "oldObject")
    spec, metadata = body.get("spec"), mapping(body, "metadata")
    kind = _KINDS.get((body.get("apiVersion"), body.get("kind")))
    if kind is None or request.get("operation") not in _JUDGED or metadata.get("deletionTimestamp"):
        return
    if before and before.get("spec") == spec:
        return
    key = Key(str(request.get("namespace") or "default"), str(metadata.get("name") or ""))
    try:
        yield from kind(key, spec, terms)
    except InvalidSpecError as error:
        yield from refusals(error)


def _of_deployment(key: Key, document: Any, terms: Terms) -> Iterator[Remark]:
    yield from deployment_remarks(key, parsed_spec(SpecDecodeDeploymentSpec, document, newer=True), terms)


def _of_capture(_key: Key, document: Any, terms: Terms) -> Iterator[Remark]:
    yield from capture_remarks(parsed_spec(SpecDecodeCaptureSpec, document, newer=True), terms)


_KINDS: Final[Mapping[tuple[Any, Any], Callable[[Key, Any, Terms], Iterator[Remark]]]] = {
    (base.API_VERSION, deployment.KIND): _of_deployment,
    (base.API_VERSION, capture.KIND): _of_capture,
}
