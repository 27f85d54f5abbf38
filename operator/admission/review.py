"""An AdmissionReview, answered.

https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers/
"""

from collections.abc import Callable, Iterator, Mapping
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

API_VERSION: Final = "admission.k8s.io/v1"
_JUDGED: Final = ("CREATE", "UPDATE")
_MOST_REFUSALS: Final = 32
"""An object may have thousands of what is refused, and nobody reads four megabytes."""

_MOST_WARNINGS: Final = 8
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
    request = mapping(review, "request") if isinstance(review, dict) else {}
    if not request or review.get("apiVersion") != API_VERSION or not isinstance(request.get("uid"), str):
        raise NoReviewError(f"send an AdmissionReview of {API_VERSION}")
    remarks = [*_remarks(request, terms)]
    response: Body = {"uid": request["uid"], "allowed": True}
    if warnings := [_shortened(each.sentence) for each in remarks if each.level is Level.WARNING]:
        response["warnings"] = warnings[:_MOST_WARNINGS]
    if refused := [each for each in remarks if each.level is Level.ERROR]:
        left = len(refused) - _MOST_REFUSALS
        message = "; ".join(each.sentence for each in refused[:_MOST_REFUSALS])
        message += f"; and {left:,} more" if left > 0 else ""
        status = {"code": 422, "reason": "Invalid", "message": f"{message} [{refused[0].rule}]"}
        response |= {"allowed": False, "status": status}
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


def _of_capture(_key: Key, document: Any, _terms: Terms) -> Iterator[Remark]:
    yield from capture_remarks(parsed_spec(SpecDecodeCaptureSpec, document, newer=True))


_KINDS: Final[Mapping[tuple[Any, Any], Callable[[Key, Any, Terms], Iterator[Remark]]]] = {
    (base.API_VERSION, deployment.KIND): _of_deployment,
    (base.API_VERSION, capture.KIND): _of_capture,
}


def _shortened(sentence: str) -> str:
    return sentence if len(sentence) <= _LONGEST_WARNING else f"{sentence[: _LONGEST_WARNING - 1]}…"
