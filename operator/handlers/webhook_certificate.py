"""TLS certificate of the webhook: reload it from a folder, create or renew it, store it in a Secret.

`CertificateFolder` follows a mounted Secret; a renewed certificate applies from the next connection on.
`kept_or_renewed` creates a self-signed certificate for clusters without cert-manager. `write_certificate` stores it
and sets the CA bundle of the ValidatingWebhookConfiguration, with the rights of the chart's Job.
"""

import logging
import ssl
from base64 import b64encode
from collections.abc import Mapping, Sequence
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
"""As Secrets of type kubernetes.io/tls have them."""

_logger = logging.getLogger(__name__)


class CertificateFolder:
    """Follows a mounted Secret: a certificate that is renewed there counts from the next connection on.

    The Secret may come later than the pod, and one that cannot be used changes nothing.
    """

    def __init__(self, folder: Path) -> None:
        self._files = (folder / CERTIFICATE_FILE, folder / KEY_FILE)
        self._seen: object = None
        """What was last looked at, or went wrong: each is told once."""
        self._context: ssl.SSLContext | None = None
        self._expires: datetime | None = None
        self._lock = Lock()

    @property
    def expires(self) -> datetime | None:
        """When the certificate ends that is shown; None while there is none."""
        return self._expires

    def context(self) -> ssl.SSLContext | None:
        """Return what the next connection is secured with; None while there is no certificate."""
        with self._lock:
            try:
                # A mounted Secret changes by a link: other files, whatever their times say.
                seen = [(status.st_ino, status.st_mtime_ns) for status in (file.stat() for file in self._files)]
                if seen != self._seen:
                    self._load()
                    self._seen = seen
            except (OSError, ValueError) as error:  # ssl's errors are of the one kind, those of PEM of the other
                self._refuse(str(error))
            return self._context

    def _load(self) -> None:
        from cryptography import x509  # noqa: PLC0415  only who serves needs it

        certificate, key = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(certificate, key)
        expires = x509.load_pem_x509_certificates(certificate.read_bytes())[0].not_valid_after_utc
        self._context, self._expires = context, expires
        if expires < datetime.now(UTC):
            _logger.warning("%s has expired on %s: the API server refuses it", certificate, expires.isoformat())
        else:
            _logger.info("%s is shown to the API server; it expires on %s", certificate, expires.isoformat())

    def _refuse(self, why: str) -> None:
        if why != self._seen:
            self._seen = why
            kept = "that of before is shown on" if self._context else "no object can be judged"
            _logger.warning("webhook certificate: %s; %s", why, kept)


TRUST_FILE: Final = "ca.crt"
LASTS: Final = timedelta(days=90)
RENEWED_BEFORE: Final = timedelta(days=30)
"""A certificate this near to its end is made anew: it is looked at each week."""

_CLOCKS_DIFFER_BY: Final = timedelta(hours=1)
_LONGEST_COMMON_NAME: Final = 64


@dataclass(frozen=True)
class ServerCertificate:
    """What a Secret holds."""

    certificate: bytes
    key: bytes
    trust: bytes
    """The certificate, and the one before it while that has not ended: pods show it until they have the new one."""

    @property
    def files(self) -> dict[str, bytes]:
        """As a Secret of type kubernetes.io/tls has them."""
        return {CERTIFICATE_FILE: self.certificate, KEY_FILE: self.key, TRUST_FILE: self.trust}


def kept_or_renewed(files: Mapping[str, bytes], hosts: Sequence[str], now: datetime | None = None) -> ServerCertificate:
    """Return what the files hold while it is good for these hosts, else a new certificate."""
    now = now or datetime.now(UTC)
    current = _readable(files.get(CERTIFICATE_FILE, b""))
    key, trust = files.get(KEY_FILE, b""), files.get(TRUST_FILE, b"")
    if current is not None and _is_good(current, key, hosts, now):
        certificate = current.public_bytes(Encoding.PEM)
        return ServerCertificate(certificate, key, trust if certificate.strip() in trust else certificate)
    certificate, key = _made(hosts, now)
    before = b"" if current is None or current.not_valid_after_utc < now else current.public_bytes(Encoding.PEM)
    return ServerCertificate(certificate, key, certificate + before)


def _readable(pem: bytes) -> x509.Certificate | None:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError:
        return None


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
    """Have a webhook trusted by ``trust``, then write the files to a Secret, which goes with the webhook.

    ``secret`` is namespace and name, ``webhook`` the name of its configuration and its own in there.

    Raises
    ------
    ClusterError
        When the API server refuses or cannot be reached.
    """
    configuration, name = webhook
    trusting = {
        "apiVersion": _CONFIGURATION.api_version,
        "kind": _CONFIGURATION.kind,
        "metadata": {"name": configuration},
        "webhooks": [{"name": name, "clientConfig": {"caBundle": b64encode(trust).decode()}}],
    }
    owner = await cluster.apply_to(_CONFIGURATION, trusting)
    namespace, secret_name = secret
    body = {
        "apiVersion": _SECRET.api_version,
        "kind": _SECRET.kind,
        "type": "kubernetes.io/tls",
        "metadata": {
            "namespace": namespace,
            "name": secret_name,
            "labels": {"app.kubernetes.io/part-of": "specdecode"},
            "ownerReferences": [
                {
                    "apiVersion": _CONFIGURATION.api_version,
                    "kind": _CONFIGURATION.kind,
                    "name": configuration,
                    "uid": owner["metadata"]["uid"],
                }
            ],
        },
        "data": {file: b64encode(content).decode() for file, content in files.items()},
    }
    await cluster.apply_to(_SECRET, body)
