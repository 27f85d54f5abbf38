"""Admission webhook: HTTPS server, reviews of our kinds, and reviews of attested pods.

The server runs on its own threads, so standby replicas answer too. `answer` reviews a SpecDecodeDeployment or a
SpecDecodeCapture. `answer_pod` admits only pods that match an attestation of their deployment.
https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers/
"""

import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from threading import Lock
from typing import Any, Final

from specdecode_operator.api import base, capture, deployment
from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import SpecDecodeCaptureSpec
from specdecode_operator.api.deployment import Key, SpecDecodeDeploymentSpec
from specdecode_operator.api.spec_problems import parsed_spec
from specdecode_operator.attestation.pod_admission import Gate, engine_labels, owner_of
from specdecode_operator.cluster.client import ClusterError, ForbiddenError
from specdecode_operator.cluster.resources import (
    ATTESTED_PODS_LABEL,
    CAPTURE_LABEL,
    COMPUTES_FOR_LABEL,
    DEPLOYMENT_LABEL,
    POD,
    READS_FOR_LABEL,
)
from specdecode_operator.handlers.admission_findings import (
    Level,
    Remark,
    Terms,
    capture_remarks,
    deployment_remarks,
    refusals,
)
from specdecode_operator.handlers.http_server import TIMEOUT_S, BoundedHandler, BoundedServer, Places
from specdecode_operator.handlers.metrics import AdmissionCollector
from specdecode_operator.handlers.webhook_certificate import CertificateFolder
from specdecode_operator.problems import InvalidSpecError, shown
from specdecode_operator.redaction import clip
from specdecode_operator.untrusted import UnreadableTextError, mapping, parse_json

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


Read = Callable[[Key], Body | None]
"""Returns the ConfigMap with the attestations of a deployment, as it is now; None where there is none."""

_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""Of an object. It becomes part of a path at the API server, and the labels of a pod are anybody's."""

_BORN: Final = (
    "a pod is an engine's from its creation or never:"
    f" its labels {DEPLOYMENT_LABEL} and {COMPUTES_FOR_LABEL} stay as they are; delete it"
)
"""What ran before in one that becomes an engine's was not asked about, and its files are there still."""


def answer_pod(review: Any, gate: Gate, read: Read) -> Body:
    """Return the answer to an AdmissionReview of a pod that is created or changed.

    Raises
    ------
    NoReviewError
        When it is none, or of another kind.
    """
    request = request_of(review)
    pod, before = mapping(request, "object"), mapping(request, "oldObject")
    if (pod.get("apiVersion"), pod.get("kind")) != (POD.api_version, POD.kind):
        raise NoReviewError("send reviews of pods that are created or changed: nothing else is judged here")
    if before and engine_labels(pod) != engine_labels(before):
        return refused(request, HTTPStatus.FORBIDDEN, _BORN)
    if before and gate.is_unchanged(pod, before):
        return allowed(request)
    return _judged(request, gate, read)


def _judged(request: Body, gate: Gate, read: Read) -> Body:
    pod, before = mapping(request, "object"), mapping(request, "oldObject")
    owner, namespace = owner_of(pod), request.get("namespace")
    if owner is None:
        return refused(request, HTTPStatus.FORBIDDEN, f"only engines with an attestation start here: {_stranger(pod)}")
    if not _is_name(owner) or not _is_name(namespace):
        message = f"{shown(owner)} in {shown(namespace)}: is no name of a SpecDecodeDeployment and its namespace"
        return refused(request, HTTPStatus.FORBIDDEN, message)
    key = Key(str(namespace), str(owner))
    try:
        kept = read(key)
        refusal = gate.refusal_of_change(pod, before, key, kept) if before else gate.refusal(pod, key, kept)
    except ForbiddenError:
        message = f"its attestation cannot be read: let the webhook get ConfigMaps in namespace {namespace}"
        return refused(request, HTTPStatus.SERVICE_UNAVAILABLE, message)
    except ClusterError as error:
        return refused(request, HTTPStatus.SERVICE_UNAVAILABLE, f"its attestation cannot be read: {error}")
    return refused(request, HTTPStatus.FORBIDDEN, f"engine of {key}: {refusal}") if refusal else allowed(request)


def _stranger(pod: Body) -> str:
    """Return why a pod that says to be no engine's is none, and what helps where it is one of the operator's own."""
    labels = mapping(mapping(pod, "metadata"), "labels")
    let_in = f"label the namespace {ATTESTED_PODS_LABEL}=engines"
    if CAPTURE_LABEL in labels:
        return f"captures are not attested; {let_in}, or capture the deployment in a namespace that has it"
    if READS_FOR_LABEL in labels:
        return (
            "Jobs that read or download models are not attested;"
            f" give each model with its config on a claim or in the image, without models.cache, or {let_in}"
        )
    return f"the pod has no label {DEPLOYMENT_LABEL}"


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(_NAME.fullmatch(value))


VALIDATE: Final = "/validate"

_MOST_BYTES: Final = 8 * 2**20
"""A review has an object and what it was before; the API server takes 3 MiB of each."""

_MOST_VALUES: Final = 400_000
"""Of a review: an object has 1.5 MiB at most, says etcd, and with what it was before not half as many."""

_LARGE_BYTES: Final = 256 * 2**10
_MOST_LARGE: Final = 4
"""Reviews of more than that are held by so few at once: 32 of the largest would take more memory than there is."""

Answer = Callable[[Any], Body]
"""Makes the answer to an AdmissionReview, or raises NoReviewError."""

_logger = logging.getLogger(__name__)


def serve_admission(
    port: int, certificate: CertificateFolder, answers: Mapping[str, Answer], collector: AdmissionCollector
) -> int:
    """Answer reviews by path until the process ends; return the port, which 0 leaves to the system."""
    certificate.context()  # what is wrong with it is told now, not when somebody asks
    return int(_Server(port, certificate, answers, collector).serve("admission").server_port)


class _Server(BoundedServer):
    """HTTPS, and no more reviews in memory than it can bear."""

    def __init__(
        self, port: int, certificate: CertificateFolder, answers: Mapping[str, Answer], collector: AdmissionCollector
    ) -> None:
        super().__init__(port, _Answering)
        self.answers, self.collector = answers, collector
        self._certificate = certificate
        self.large = Places(_MOST_LARGE)
        self.judging = Lock()
        """One at a time: side by side they are no sooner done, and take the memory of all at once."""

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection."""
        connection, address = super().get_request()
        context = self._certificate.context()
        if context is None:
            connection.close()
            raise OSError("there is no certificate yet")
        return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, however it ended."""
        self.large.leave(request)
        super().shutdown_request(request)


class _Answering(BoundedHandler):
    """One request a connection."""

    server: _Server

    def setup(self) -> None:
        """Shake hands in the thread of the connection: whoever is slow there delays nobody else."""
        self.request.do_handshake()
        super().setup()

    def do_POST(self) -> None:
        """Answer a review. Where the operator itself fails, failurePolicy says what comes of the object."""
        started_s, outcome = time.perf_counter(), "failed"
        try:
            # Read first: who is answered before it has sent all may not see the answer.
            text = self._body()
            with self.server.judging:
                status, body = HTTPStatus.OK, self._answer()(parse_json(text, _MOST_BYTES))
            response = body["response"]
            outcome = "refused" if not response["allowed"] else "warned" if response.get("warnings") else "allowed"
        except (NoReviewError, UnreadableTextError) as error:
            status, body = HTTPStatus.BAD_REQUEST, {"error": str(error)}
        except Exception as error:
            _logger.exception("the operator failed on a review; please report it")
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            body = {"error": f"the operator failed on this object ({type(error).__name__}); its log tells more"}
        self.server.collector.observe(outcome, time.perf_counter() - started_s)
        self._send(status, body)

    def _answer(self) -> Answer:
        answers = self.server.answers
        path = self.path.partition("?")[0]
        if path not in answers:
            raise NoReviewError(f"there is nothing at this path: use {', '.join(answers)}")
        return answers[path]

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        is_number = length.isascii() and length.isdigit() and len(length) <= len(str(_MOST_BYTES))
        if not is_number or int(length) > _MOST_BYTES:
            raise NoReviewError(f"send at most {_MOST_BYTES // 2**20} MiB, and its Content-Length")
        if int(length) > _LARGE_BYTES and not self.server.large.take(self.connection):
            raise NoReviewError("others that are as large are being judged: ask again")
        try:
            text = self.rfile.read(int(length))
        except OSError as error:
            raise NoReviewError(f"send all of it within {TIMEOUT_S:.0f} s") from error
        self.keep_place()
        self.server.large.keep(self.connection)
        # Counted before they are made: each takes many times the memory of its text.
        if sum(map(text.count, (b"[", b"{", b","))) > _MOST_VALUES:
            raise NoReviewError(f"send at most {_MOST_VALUES:,} values: no object has more")
        return text

    def _send(self, status: HTTPStatus, body: Body) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
