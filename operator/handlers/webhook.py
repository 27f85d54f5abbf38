"""Admission webhook: HTTPS server, reviews of our kinds, and reviews of attested pods.

The server runs on its own threads, so standby replicas answer too. `answer` reviews an object of our
kinds. `answer_pod` admits only pods that match an attestation of their deployment.
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

from specdecode_operator.api import base, capture, deployment, training
from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import SpecDecodeCaptureSpec
from specdecode_operator.api.deployment import Key, SpecDecodeDeploymentSpec
from specdecode_operator.api.spec_problems import parsed_spec
from specdecode_operator.api.training import SpecDecodeTrainingSpec
from specdecode_operator.attestation.pod_admission import Gate, engine_labels, owner_of
from specdecode_operator.cluster.client import ClusterError, ForbiddenError
from specdecode_operator.cluster.resources import (
    ATTESTED_PODS_LABEL,
    CAPTURE_LABEL,
    COMPUTES_FOR_LABEL,
    DEPLOYMENT_LABEL,
    POD,
    READS_FOR_LABEL,
    TRAINING_LABEL,
)
from specdecode_operator.handlers.admission_findings import (
    Level,
    Remark,
    Terms,
    capture_remarks,
    deployment_remarks,
    refusals,
    training_remarks,
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
"""Maximum number of errors in a message, because an object may have thousands."""

_MOST_WARNINGS: Final = 8
_REASONS: Final = {
    HTTPStatus.FORBIDDEN: "Forbidden",
    HTTPStatus.UNPROCESSABLE_ENTITY: "Invalid",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailable",
}
"""Reasons of the API server by status code."""

_LONGEST_WARNING: Final = 250
"""Maximum length of a warning. The API server shortens many warnings to 256 characters each, and 4,096 in total."""


class NoReviewError(Exception):
    """A request that is not an AdmissionReview."""


def answer(review: Any, terms: Terms) -> Body:
    """Return the response to an AdmissionReview, without any network request; raise NoReviewError."""
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
    """Return the request of an AdmissionReview; raise NoReviewError."""
    request = mapping(review, "request") if isinstance(review, dict) else {}
    if not request or review.get("apiVersion") != API_VERSION or not isinstance(request.get("uid"), str):
        raise NoReviewError(f"send an AdmissionReview of {API_VERSION}")
    return request


def allowed(request: Body, warnings: Sequence[str] = ()) -> Body:
    """Return the response that admits a request."""
    return _answered(request, warnings, {"allowed": True})


def refused(request: Body, status: HTTPStatus, message: str, warnings: Sequence[str] = ()) -> Body:
    """Return the response that rejects a request."""
    told = {"code": status.value, "reason": _REASONS[status], "message": message}
    return _answered(request, warnings, {"allowed": False, "status": told})


def _answered(request: Body, warnings: Sequence[str], said: Body) -> Body:
    response = {"uid": request["uid"], **said} | ({"warnings": [*warnings]} if warnings else {})
    return {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response}


def _remarks(request: Body, terms: Terms) -> Iterator[Remark]:
    """Yield the findings about the object of a request; none for deletions and for unchanged specs."""
    body, before = mapping(request, "object"), mapping(request, "oldObject")
    document, metadata = body.get("spec"), mapping(body, "metadata")
    if request.get("operation") not in _JUDGED or metadata.get("deletionTimestamp"):
        return
    if body.get("apiVersion") != base.API_VERSION or (before and before.get("spec") == document):
        return
    try:
        if body.get("kind") == deployment.KIND:
            key = Key(str(request.get("namespace") or "default"), str(metadata.get("name") or ""))
            yield from deployment_remarks(key, parsed_spec(SpecDecodeDeploymentSpec, document, newer=True), terms)
        elif body.get("kind") == capture.KIND:
            yield from capture_remarks(parsed_spec(SpecDecodeCaptureSpec, document, newer=True), terms)
        elif body.get("kind") == training.KIND:
            yield from training_remarks(parsed_spec(SpecDecodeTrainingSpec, document, newer=True), terms)
    except InvalidSpecError as error:
        yield from refusals(error)


Read = Callable[[Key], Body | None]
"""Returns the ConfigMap with the attestations of a deployment, or None."""

_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""Name of an object. It is part of a URL path, and comes from labels of a pod, which are untrusted."""

_BORN: Final = (
    f"labels {DEPLOYMENT_LABEL} and {COMPUTES_FOR_LABEL} of a pod cannot change after its creation;"
    " delete the pod and create it again"
)
"""Message for a pod that gets the label of engines later. Programs that ran in it before were not attested."""


def answer_pod(review: Any, gate: Gate, read: Read) -> Body:
    """Return the response to an AdmissionReview of a pod that is created or changed; raise NoReviewError."""
    request = request_of(review)
    pod, before = mapping(request, "object"), mapping(request, "oldObject")
    if (pod.get("apiVersion"), pod.get("kind")) != (POD.api_version, POD.kind):
        raise NoReviewError("only reviews of created or changed pods are supported")
    if before and engine_labels(pod) != engine_labels(before):
        return refused(request, HTTPStatus.FORBIDDEN, _BORN)
    if before and gate.is_unchanged(pod, before):
        return allowed(request)
    return _judged(request, gate, read)


def _judged(request: Body, gate: Gate, read: Read) -> Body:
    pod, before = mapping(request, "object"), mapping(request, "oldObject")
    owner, namespace = owner_of(pod), request.get("namespace")
    if owner is None:
        return refused(request, HTTPStatus.FORBIDDEN, f"only attested engines may run here: {_stranger(pod)}")
    if not all(isinstance(each, str) and _NAME.fullmatch(each) for each in (owner, namespace)):
        message = f"{shown(owner)} in {shown(namespace)}: not a valid name of a SpecDecodeDeployment and its namespace"
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
    """Return why a pod is not an engine's, with the remedy if it is another pod of the operator."""
    labels = mapping(mapping(pod, "metadata"), "labels")
    let_in = f"label the namespace {ATTESTED_PODS_LABEL}=engines"
    if CAPTURE_LABEL in labels:
        return f"captures are not attested; {let_in}, or capture the deployment in a namespace that has it"
    if TRAINING_LABEL in labels:
        return f"trainings are not attested; {let_in}, or train in a namespace that has it"
    if READS_FOR_LABEL in labels:
        return (
            "Jobs that read or download models are not attested;"
            f" give each model with its config on a claim or in the image, without models.cache, or {let_in}"
        )
    return f"the pod has no label {DEPLOYMENT_LABEL}"


VALIDATE: Final = "/validate"

_MOST_BYTES: Final = 8 * 2**20
"""Maximum size of a review, which contains the new and the old object. The API server accepts 3 MiB of each."""

_MOST_VALUES: Final = 400_000
"""Maximum number of values in a review. Objects have at most 1.5 MiB in etcd, so two have less than half as many."""

_LARGE_BYTES: Final = 256 * 2**10
_MOST_LARGE: Final = 4
"""Maximum number of parallel large reviews, because 32 of the largest would exceed the memory."""

Answer = Callable[[Any], Body]
"""Returns the response to an AdmissionReview, or raises NoReviewError."""

_logger = logging.getLogger(__name__)


def serve_admission(
    port: int, certificate: CertificateFolder, answers: Mapping[str, Answer], collector: AdmissionCollector
) -> int:
    """Answer reviews by path until the process ends; return the port, which the system chooses for 0."""
    certificate.context()  # Log its errors now instead of at the first request.
    return int(_Server(port, certificate, answers, collector).serve("admission").server_port)


class _Server(BoundedServer):
    """HTTPS server with a bounded number of large reviews in memory."""

    def __init__(
        self, port: int, certificate: CertificateFolder, answers: Mapping[str, Answer], collector: AdmissionCollector
    ) -> None:
        super().__init__(port, _Answering)
        self.answers, self.collector = answers, collector
        self._certificate = certificate
        self.large = Places(_MOST_LARGE)
        self.judging = Lock()
        """Reviews run one at a time, because parallel ones take more memory and do not end sooner."""

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection."""
        connection, address = super().get_request()
        context = self._certificate.context()
        if context is None:
            connection.close()
            raise OSError("no certificate yet")
        return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, with or without an error."""
        self.large.leave(request)
        super().shutdown_request(request)


class _Answering(BoundedHandler):
    server: _Server

    def setup(self) -> None:
        """Do the TLS handshake in the connection's thread, so that a slow client does not delay others."""
        self.request.do_handshake()
        super().setup()

    def do_POST(self) -> None:
        """Answer a review; if the operator fails, failurePolicy decides."""
        started_s, outcome = time.perf_counter(), "failed"
        try:
            # Read the whole request first, because a client that is still sending may miss the response.
            text = self._body()
            with self.server.judging:
                status, body = HTTPStatus.OK, self._answer()(parse_json(text, _MOST_BYTES))
            response = body["response"]
            outcome = "refused" if not response["allowed"] else "warned" if response.get("warnings") else "allowed"
        except (NoReviewError, UnreadableTextError) as error:
            status, body = HTTPStatus.BAD_REQUEST, {"error": str(error)}
        except Exception as error:
            _logger.exception("internal error in an admission review; please report it")
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            body = {"error": f"internal error in the operator ({type(error).__name__}); see its log"}
        self.server.collector.observe(outcome, time.perf_counter() - started_s)
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _answer(self) -> Answer:
        answers, path = self.server.answers, self.path.partition("?")[0]
        if path not in answers:
            raise NoReviewError(f"unknown path; use {', '.join(answers)}")
        return answers[path]

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        is_number = length.isascii() and length.isdigit() and len(length) <= len(str(_MOST_BYTES))
        if not is_number or int(length) > _MOST_BYTES:
            raise NoReviewError(f"send at most {_MOST_BYTES // 2**20} MiB, with a Content-Length header")
        if int(length) > _LARGE_BYTES and not self.server.large.take(self.connection):
            raise NoReviewError("too many large reviews at the same time; try again")
        try:
            text = self.rfile.read(int(length))
        except OSError as error:
            raise NoReviewError(f"send the whole request within {TIMEOUT_S:.0f} s") from error
        self.keep_place()
        self.server.large.keep(self.connection)
        # Count values before parsing, because each value takes many times the memory of its text.
        if sum(map(text.count, (b"[", b"{", b","))) > _MOST_VALUES:
            raise NoReviewError(f"send at most {_MOST_VALUES:,} values")
        return text
