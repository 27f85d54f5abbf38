"""Reads the TLS certificate of a webhook from a mounted Secret; a renewed one applies from the next connection."""

import logging
import ssl
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Final

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
        # Importing it takes 8 MB, and only the webhook needs it.
        from cryptography import x509  # noqa: PLC0415

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
