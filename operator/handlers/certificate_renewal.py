"""Create, renew and store the self-signed TLS certificate of a webhook, for clusters without cert-manager.

`write_certificate` stores it in a Secret and sets the CA bundle of the ValidatingWebhookConfiguration, with the rights
of the chart's Job.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
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
from specdecode_operator.handlers.webhook_certificate import CERTIFICATE_FILE, KEY_FILE

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
