"""The webhook: HTTPS for the API server, from threads of its own, so that replicas that wait to lead answer as well."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from threading import Lock
from typing import Any, Final

from specdecode_operator.admission.certificate import CertificateFolder
from specdecode_operator.admission.metrics import AdmissionCollector
from specdecode_operator.admission.review import NoReviewError
from specdecode_operator.api.base import Body
from specdecode_operator.documents.json_text import parse_json
from specdecode_operator.documents.limits import UnreadableTextError
from specdecode_operator.http_server import TIMEOUT_S, BoundedHandler, BoundedServer, Places

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
