"""The webhook over real HTTPS: answers, certificates that come and change, and clients that mean harm."""

import http.client
import json
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from specdecode_operator.handlers.admission_findings import Terms
from specdecode_operator.handlers.metrics import AdmissionCollector
from specdecode_operator.handlers.webhook import VALIDATE, answer, serve_admission
from specdecode_operator.handlers.webhook_certificate import CertificateFolder
from tests.support.admission_cases import ADMITTED, REFUSED, TOO_LARGE, deployment
from tests.support.certificates import DAY, write_certificate
from tests.unit.handlers.test_review import review

REFUSAL = deployment(next(iter(REFUSED.values()))[0])


class Webhook:
    """A webhook on loopback, and what its client trusts."""

    def __init__(self, folder: Path, reply: Callable[[Any], Any] | None = None) -> None:
        self.folder = folder
        self.certificate = CertificateFolder(folder)
        self.registry = CollectorRegistry()
        collector = AdmissionCollector(lambda: self.certificate.expires)
        self.registry.register(collector)
        answers = {VALIDATE: reply or (lambda document: answer(document, Terms()))}
        self.port = serve_admission(0, self.certificate, answers, collector)

    def post(self, body: bytes | str, path: str = VALIDATE, trust: bytes | None = None) -> tuple[int, Any]:
        trusted = ssl.create_default_context(cadata=(trust or (self.folder / "tls.crt").read_bytes()).decode())
        client = http.client.HTTPSConnection("127.0.0.1", self.port, context=trusted, timeout=60)
        try:
            client.request("POST", path, body)
            response = client.getresponse()
            return response.status, json.loads(response.read())
        finally:
            client.close()

    def counted(self, outcome: str) -> float | None:
        name = "specdecode_admission_duration_seconds_count"
        return self.registry.get_sample_value(name, {"outcome": outcome})

    @property
    def expiry_s(self) -> float | None:
        return self.registry.get_sample_value("specdecode_admission_certificate_expiry_timestamp_seconds")


@pytest.fixture
def webhook(tmp_path: Path) -> Webhook:
    write_certificate(tmp_path / "certificate")
    return Webhook(tmp_path / "certificate")


def test_reviews_are_answered_and_counted(webhook: Webhook) -> None:
    for body, allowed in ((deployment(ADMITTED), True), (REFUSAL, False), (deployment(TOO_LARGE), True)):
        status, answered = webhook.post(json.dumps(review(body)))
        assert (status, answered["response"]["allowed"]) == (200, allowed)
    assert [webhook.counted(each) for each in ("allowed", "refused", "warned", "failed")] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b"[]", b'{"request": 1}', b'{"a": 1, "a": 2}', b"[" * 100_000],
    ids=["nothing", "half", "no text", "a list", "no request", "a key twice", "too deep"],
)
def test_what_is_no_review_is_refused_and_nothing_ends(webhook: Webhook, body: bytes) -> None:
    status, answered = webhook.post(body)
    assert (status, set(answered)) == (400, {"error"})
    assert webhook.counted("failed") == 1
    assert webhook.post(json.dumps(review(deployment(ADMITTED))))[0] == 200


def test_a_request_that_is_too_large_is_not_read(webhook: Webhook) -> None:
    trusted = ssl.create_default_context(cadata=(webhook.folder / "tls.crt").read_text())
    client = http.client.HTTPSConnection("127.0.0.1", webhook.port, context=trusted, timeout=60)
    client.putrequest("POST", VALIDATE)
    client.putheader("Content-Length", str(2**40))
    client.endheaders()
    assert client.getresponse().status == 400
    client.close()


def test_more_values_than_an_object_has_are_not_made(webhook: Webhook) -> None:
    status, answered = webhook.post(b'{"a": [' + b",".join([b"{}"] * 400_000) + b"]}")
    assert (status, answered["error"]) == (400, "send at most 400,000 values: no object has more")


def test_a_length_that_is_no_number_is_no_fault_of_the_operator(
    webhook: Webhook, caplog: pytest.LogCaptureFixture
) -> None:
    trusted = ssl.create_default_context(cadata=(webhook.folder / "tls.crt").read_text())
    client = http.client.HTTPSConnection("127.0.0.1", webhook.port, context=trusted, timeout=60)
    client.putrequest("POST", VALIDATE)
    client.putheader("Content-Length", "1" * 5000)
    client.endheaders()
    assert client.getresponse().status == 400
    client.close()
    assert "please report it" not in caplog.text


def test_other_paths_have_nothing(webhook: Webhook) -> None:
    status, answered = webhook.post(json.dumps(review(deployment(ADMITTED))), path="/mutate")
    assert (status, answered) == (400, {"error": "there is nothing at this path: use /validate"})


def test_where_the_operator_fails_the_failure_policy_decides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fails(_document: Any) -> Any:
        raise RuntimeError("a slip")

    write_certificate(tmp_path)
    status, answered = Webhook(tmp_path, fails).post(b"{}")
    assert status == 500
    assert "a slip" not in answered["error"]
    assert "please report it" in caplog.text


def test_a_certificate_may_come_later_and_be_renewed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    webhook = Webhook(tmp_path / "later")
    assert webhook.expiry_s == 0
    assert "no object can be judged" in caplog.text
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", webhook.port), timeout=60) as plain:  # noqa: PT011
        ssl.create_default_context().wrap_socket(plain, server_hostname="localhost")
    write_certificate(tmp_path / "later")
    assert webhook.post(json.dumps(review(deployment(ADMITTED))))[0] == 200
    ends = (datetime.now(UTC) + 5 * DAY).replace(microsecond=0)
    write_certificate(tmp_path / "later", ends)
    assert webhook.post(json.dumps(review(deployment(ADMITTED))))[0] == 200
    assert webhook.expiry_s == ends.timestamp()


def test_a_certificate_that_cannot_be_used_leaves_the_one_before(webhook: Webhook) -> None:
    before = (webhook.folder / "tls.crt").read_bytes()
    (webhook.folder / "tls.crt").write_text("no certificate")
    assert webhook.post(json.dumps(review(deployment(ADMITTED))), trust=before)[0] == 200
    (webhook.folder / "tls.key").unlink()
    assert webhook.post(json.dumps(review(deployment(ADMITTED))), trust=before)[0] == 200


def test_one_that_has_expired_is_told_and_no_client_takes_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ended = datetime.now(UTC) - DAY
    write_certificate(tmp_path, ended)
    webhook = Webhook(tmp_path)
    assert "has expired" in caplog.text
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        webhook.post(b"{}")
    write_certificate(tmp_path)
    assert webhook.post(json.dumps(review(deployment(ADMITTED))))[0] == 200


def test_clients_that_say_nothing_keep_nobody_out(webhook: Webhook, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    silent = [socket.create_connection(("127.0.0.1", webhook.port)) for _ in range(100)]
    assert webhook.post(json.dumps(review(deployment(ADMITTED))))[0] == 200
    for each in silent:
        each.close()
    assert "Traceback" not in caplog.text


def announces(webhook: Webhook, length_bytes: int) -> ssl.SSLSocket:
    """A client that will send a review of that length, and has sent the first byte."""
    trusted = ssl.create_default_context(cadata=(webhook.folder / "tls.crt").read_text())
    plain = socket.create_connection(("127.0.0.1", webhook.port), timeout=60)
    client = trusted.wrap_socket(plain, server_hostname="localhost")
    client.sendall(f"POST {VALIDATE} HTTP/1.0\r\nContent-Length: {length_bytes}\r\n\r\n ".encode())
    return client


def is_hung_up_on(client: ssl.SSLSocket) -> bool:
    try:
        return client.recv(1) == b""
    except (ConnectionResetError, ssl.SSLEOFError):  # what it has sent was not read yet
        return True


def test_few_large_reviews_are_held_and_those_that_send_slowly_give_way(webhook: Webhook) -> None:
    slow = [announces(webhook, 2**20) for _ in range(4)]
    large = json.dumps(review(deployment(ADMITTED))).ljust(2**20)
    assert webhook.post(large)[0] == 200
    assert is_hung_up_on(slow[0])
    for each in slow:
        each.close()


def test_a_large_review_that_is_being_judged_gives_way_to_nobody(tmp_path: Path) -> None:
    judged, goes_on = threading.Event(), threading.Event()

    def waits(_document: Any) -> Any:
        judged.set()
        goes_on.wait(60)
        return {"response": {"allowed": True}}

    write_certificate(tmp_path)
    webhook, large = Webhook(tmp_path, waits), json.dumps({}).ljust(2**20)
    with ThreadPoolExecutor(1) as client:
        asked = client.submit(webhook.post, large)
        assert judged.wait(60)
        slow = [announces(webhook, 2**20) for _ in range(4)]
        assert is_hung_up_on(slow[0])
        goes_on.set()
        assert asked.result()[0] == 200
    for each in slow:
        each.close()
