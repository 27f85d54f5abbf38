"""TLS certificate of the webhook: reload from a folder, create or renew, store in a Secret.

`CertificateFolder` reads a mounted Secret; a renewed certificate applies from the next connection.
`kept_or_renewed` creates a self-signed certificate for clusters without cert-manager. `write_certificate` stores it
and sets the CA bundle of the ValidatingWebhookConfiguration, with the rights of the chart's Job.
"""

import logging
import ssl
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Lock
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from specdecode_operator.cluster.client import Cluster
from specdecode_operator.cluster.resources import Resource

CERTIFICATE_FILE: Final = "tls.crt"
KEY_FILE: Final = "tls.key"

_logger = logging.getLogger(__name__)


class CertificateFolder:
    """Reads a mounted Secret, which may appear later than the pod; ignores an invalid one."""

    def __init__(self, folder: Path) -> None:
        self._files = (folder / CERTIFICATE_FILE, folder / KEY_FILE)
        self._seen: object = None
        """Last files or error, so that each is logged once."""
        self._context: ssl.SSLContext | None = None
        self._expires: datetime | None = None
        self._lock = Lock()

    @property
    def expires(self) -> datetime | None:
        """End of the current certificate's validity; None without a certificate."""
        return self._expires

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS context of the next connection; None without a certificate."""
        with self._lock:
            try:
                # The kubelet updates a mounted Secret by changing a link.
                seen = [(status.st_ino, status.st_mtime_ns) for status in (file.stat() for file in self._files)]
                if seen != self._seen:
                    certificate, key = self._files
                    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                    context.minimum_version = ssl.TLSVersion.TLSv1_2
                    context.load_cert_chain(certificate, key)
                    expires = x509.load_pem_x509_certificates(certificate.read_bytes())[0].not_valid_after_utc
                    self._context, self._expires, self._seen = context, expires, seen
                    if expires < datetime.now(UTC):
                        message = "%s expired on %s; the API server rejects it"
                        _logger.warning(message, certificate, expires.isoformat())
                    else:
                        message = "serving with certificate %s, which expires on %s"
                        _logger.info(message, certificate, expires.isoformat())
            except (OSError, ValueError) as error:  # Errors of ssl and of PEM
                why = str(error)
                if why != self._seen:
                    self._seen = why
                    kept = "keeping the previous certificate" if self._context else "no object can be reviewed"
                    _logger.warning("webhook certificate: %s; %s", why, kept)
            return self._context


TRUST_FILE: Final = "ca.crt"
LASTS: Final = timedelta(days=90)
RENEWED_BEFORE: Final = timedelta(days=30)
"""Remaining lifetime at which a certificate is renewed. It is checked every week."""

_CLOCKS_DIFFER_BY: Final = timedelta(hours=1)
_LONGEST_COMMON_NAME: Final = 64


@dataclass(frozen=True)
class ServerCertificate:
    """Content of a Secret of type kubernetes.io/tls."""

    certificate: bytes
    key: bytes
    trust: bytes
    """CA bundle: the certificate, and the previous one until it expires, because pods present it until they reload."""

    @property
    def files(self) -> dict[str, bytes]:
        """Entries of the Secret."""
        return {CERTIFICATE_FILE: self.certificate, KEY_FILE: self.key, TRUST_FILE: self.trust}


def kept_or_renewed(files: Mapping[str, bytes], hosts: Sequence[str], now: datetime | None = None) -> ServerCertificate:
    """Return the certificate in the files if it is valid for these hosts; otherwise a new one."""
    now, current = now or datetime.now(UTC), None
    with suppress(ValueError):
        current = x509.load_pem_x509_certificate(files.get(CERTIFICATE_FILE, b""))
    key, trust = files.get(KEY_FILE, b""), files.get(TRUST_FILE, b"")
    if current is not None and _is_good(current, key, hosts, now):
        certificate = current.public_bytes(Encoding.PEM)
        return ServerCertificate(certificate, key, trust if certificate.strip() in trust else certificate)
    certificate, key = _made(hosts, now)
    before = b"" if current is None or current.not_valid_after_utc < now else current.public_bytes(Encoding.PEM)
    return ServerCertificate(certificate, key, certificate + before)


def _is_good(certificate: x509.Certificate, key: bytes, hosts: Sequence[str], now: datetime) -> bool:
    if certificate.not_valid_after_utc - now < RENEWED_BEFORE:
        return False
    try:
        named = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        own = load_pem_private_key(key, None).public_key().public_bytes(*form)
        is_pair = own == certificate.public_key().public_bytes(*form)
    except (ValueError, TypeError, x509.ExtensionNotFound):
        return False
    return is_pair and set(named.get_values_for_type(x509.DNSName)) == set(hosts)


def _made(hosts: Sequence[str], now: datetime) -> tuple[bytes, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:_LONGEST_COMMON_NAME])])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER_BY)
        .not_valid_after(now + LASTS)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, SHA256())
    )
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return certificate.public_bytes(Encoding.PEM), pem


_SECRET: Final = Resource("v1", "Secret", "secrets")
_CONFIGURATION: Final = Resource(
    "admissionregistration.k8s.io/v1", "ValidatingWebhookConfiguration", "validatingwebhookconfigurations"
)


async def write_certificate(
    cluster: Cluster, files: Mapping[str, bytes], trust: bytes, secret: tuple[str, str], webhook: tuple[str, str]
) -> None:
    """Set the CA bundle of a webhook, then write the files to a Secret that the webhook's configuration owns.

    ``secret`` is its namespace and name. ``webhook`` has the names of the configuration and of the webhook in it.
    """
    configuration, name = webhook
    kind = {"apiVersion": _CONFIGURATION.api_version, "kind": _CONFIGURATION.kind}
    trusting = {
        **kind,
        "metadata": {"name": configuration},
        "webhooks": [{"name": name, "clientConfig": {"caBundle": b64encode(trust).decode()}}],
    }
    owner = await cluster.apply(trusting, _CONFIGURATION)
    namespace, secret_name = secret
    body = {
        "apiVersion": _SECRET.api_version,
        "kind": _SECRET.kind,
        "type": "kubernetes.io/tls",
        "metadata": {
            "namespace": namespace,
            "name": secret_name,
            "labels": {"app.kubernetes.io/part-of": "specdecode"},
            "ownerReferences": [{**kind, "name": configuration, "uid": owner["metadata"]["uid"]}],
        },
        "data": {file: b64encode(content).decode() for file, content in files.items()},
    }
    await cluster.apply(body, _SECRET)
