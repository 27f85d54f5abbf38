"""Whom the load generator takes for the engine, where it serves TLS."""

import ssl
from pathlib import Path
from typing import Final

from specdecode_operator.capture.load.workload import EngineAddress, InvalidSettingsError
from specdecode_operator.problems import Problem

CERTIFICATE: Final = "tls.crt"
AUTHORITY: Final = "ca.crt"
"""Keys of the Secret that hold no secret. Who maintains it, such as cert-manager, adds the authority's."""

_NO_CHECK_TIME: Final = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME of OpenSSL (x509_vfy.h), which Python has no name for."""


def tls_of(engine: EngineAddress) -> ssl.SSLContext | None:
    """Return what believes the certificates that the engine was given, and no others; None for plain HTTP.

    It is asked at its own pod's address, which no certificate names. One that has expired meets the engine's clients,
    and says nothing of what is measured; one that is renewed in the meantime is believed if its authority is known.

    Raises
    ------
    InvalidSettingsError
        There are no certificates.
    """
    if engine.certificates is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    folder = Path(engine.certificates)
    try:
        context.load_verify_locations(folder / CERTIFICATE)
        if (folder / AUTHORITY).exists():
            context.load_verify_locations(folder / AUTHORITY)
    except OSError as error:
        wanted = f"has no certificates that can be read ({error}): put PEM into {CERTIFICATE}, and {AUTHORITY} if any"
        raise InvalidSettingsError(Problem("spec.serving.tlsSecret", "its Secret", wanted)) from error
    return context
