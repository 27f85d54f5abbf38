"""Whether the API server can ask the admission webhook, as far as its configuration tells."""

import binascii
from base64 import b64decode
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.doctor.findings import Finding, Reading, Unreadable, fail, ok, unknown, warn
from specdecode_operator.kube.untyped import mapping, objects

_SUBJECT: Final = "admission"
_SOON: Final = timedelta(days=14)
_RENEW: Final = "see the CronJob of the chart (webhook.certificate.from: Job), or cert-manager's Certificate"


def webhook_findings(configurations: Reading[Sequence[Body]], now: datetime) -> list[Finding]:
    """Judge the webhooks of our charts, by the certificates that the API server trusts; none where there are none."""
    if isinstance(configurations, Unreadable):
        return [unknown(_SUBJECT, configurations)]
    return [finding for each in configurations for finding in _findings(each, now)]


def _findings(configuration: Body, now: datetime) -> Iterator[Finding]:
    name = mapping(configuration, "metadata").get("name")
    for webhook in objects(configuration, "webhooks"):
        # Of what is refused then nothing else gets in.
        judged = fail if webhook.get("failurePolicy") != "Ignore" else warn
        then = "objects cannot be stored" if judged is fail else "objects pass unjudged"
        ends = _last_end(mapping(webhook, "clientConfig").get("caBundle"))
        if ends is None:
            yield judged(_SUBJECT, f"the API server trusts no certificate of webhook {name}: {then}", _RENEW)
        elif ends < now:
            yield judged(_SUBJECT, f"the certificate of webhook {name} has expired on {ends:%Y-%m-%d}: {then}", _RENEW)
        elif ends - now < _SOON:
            yield warn(_SUBJECT, f"the certificate of webhook {name} expires on {ends:%Y-%m-%d}", _RENEW)
        else:
            yield ok(_SUBJECT, f"webhook {name} is trusted until {ends:%Y-%m-%d}")


def _last_end(bundle: object) -> datetime | None:
    """Until when one of the certificates of a bundle is good; None where there is none."""
    from cryptography import x509  # noqa: PLC0415  it takes longer to load than most commands

    try:
        pem = b64decode(str(bundle or ""), validate=True)
        return max(each.not_valid_after_utc for each in x509.load_pem_x509_certificates(pem))
    except (binascii.Error, ValueError):
        return None
