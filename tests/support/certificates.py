"""Certificates for HTTPS on loopback, made on the spot."""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)


def write_certificate(folder: Path, ends: datetime | None = None, name: str = "localhost") -> bytes:
    """Write tls.crt and tls.key of a server on loopback that signs for itself; return the certificate."""
    certificate, key = made_certificate(ends or datetime.now(UTC) + DAY, name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tls.crt").write_bytes(certificate)
    (folder / "tls.key").write_bytes(key)
    return certificate


def made_certificate(ends: datetime, name: str = "localhost") -> tuple[bytes, bytes]:
    """Return a certificate that ends then, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(ends - 30 * DAY)
        .not_valid_after(ends)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name), x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return made.public_bytes(Encoding.PEM), private
