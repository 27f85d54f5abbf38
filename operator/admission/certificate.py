"""The certificate that the webhook shows, as it lies in a folder now."""

import logging
import ssl
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Final

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
