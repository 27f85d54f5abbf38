"""A certificate that signs for itself, for clusters without cert-manager: made, kept while it is good, renewed."""

from collections.abc import Mapping, Sequence
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

from specdecode_operator.admission.certificate import CERTIFICATE_FILE, KEY_FILE

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
