"""The webhook's certificate: kept while it is valid, renewed with the previous one still trusted."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from specdecode_operator.handlers.certificate_renewal import LASTS, RENEWED_BEFORE, ServerCertificate, kept_or_renewed

HOSTS = ["o-webhook.ops.svc", "o-webhook.ops.svc.cluster.local"]
NOW = datetime.now(UTC).replace(microsecond=0)


@pytest.fixture
def first() -> ServerCertificate:
    return kept_or_renewed({}, HOSTS, NOW)


def authorities(pem: bytes) -> int:
    return len(x509.load_pem_x509_certificates(pem))


def test_certificate_is_valid_only_for_its_hosts_and_trust(first: ServerCertificate, tmp_path: Path) -> None:
    for name, content in first.files.items():
        (tmp_path / name).write_bytes(content)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    client = ssl.create_default_context(cadata=first.trust.decode())
    for host in HOSTS:
        assert shake_hands(server, client, host)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, client, "elsewhere.ops.svc")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, ssl.create_default_context(), HOSTS[0])


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> bool:
    """Let two ends of a connection in memory agree."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server, server_hostname=host)
    answering = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(10):
        waits = 0
        for end in (asking, answering):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                waits += 1
        if not waits:
            return True
    return False


def test_certificate_is_valid_from_five_minutes_ago(first: ServerCertificate) -> None:
    assert NOW - x509.load_pem_x509_certificate(first.certificate).not_valid_before_utc >= timedelta(minutes=5)


@pytest.mark.parametrize("later", [timedelta(0), LASTS - RENEWED_BEFORE - timedelta(minutes=1)])
def test_valid_certificate_is_kept(first: ServerCertificate, later: timedelta) -> None:
    assert kept_or_renewed(first.files, HOSTS, NOW + later) == first


def test_certificate_is_renewed_early_and_the_previous_one_stays_trusted(first: ServerCertificate) -> None:
    soon = NOW + LASTS - RENEWED_BEFORE + timedelta(minutes=1)
    second = kept_or_renewed(first.files, HOSTS, soon)
    assert second.certificate != first.certificate
    assert second.trust == second.certificate + first.certificate
    assert kept_or_renewed(second.files, HOSTS, soon) == second
    third = kept_or_renewed(second.files, HOSTS, soon + LASTS - RENEWED_BEFORE + timedelta(minutes=1))
    assert third.trust == third.certificate + second.certificate
    # One that has ended is trusted by nobody.
    late = kept_or_renewed(first.files, HOSTS, NOW + LASTS + timedelta(days=1))
    assert authorities(late.trust) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"tls.crt": b""},
        {"tls.crt": b"no PEM"},
        {"tls.key": b""},
        {"tls.key": b"no PEM"},
        {"tls.key": kept_or_renewed({}, HOSTS, NOW).key},
    ],
    ids=["no certificate", "a broken one", "no key", "a broken key", "another's key"],
)
def test_unusable_certificate_or_key_is_replaced(first: ServerCertificate, changes: dict[str, bytes]) -> None:
    second = kept_or_renewed({**first.files, **changes}, HOSTS, NOW)
    assert second.certificate != first.certificate
    assert second.trust.startswith(second.certificate)


def test_changed_hosts_get_a_new_certificate(first: ServerCertificate) -> None:
    assert kept_or_renewed(first.files, ["renamed.ops.svc"], NOW).certificate != first.certificate


def test_removed_ca_bundle_is_restored(first: ServerCertificate) -> None:
    assert kept_or_renewed({**first.files, "ca.crt": b""}, HOSTS, NOW) == first
