"""What the webhook publishes at /metrics."""

from collections.abc import Callable, Iterator
from datetime import datetime

import prometheus_client
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
OUTCOMES = ("allowed", "warned", "refused", "failed")
"""Of a review. Failed: the API server sent none, or the operator itself failed on it."""


class AdmissionCollector(Collector):
    """How long reviews take and what comes of them, and until when the certificate can be shown."""

    def __init__(self, expires: Callable[[], datetime | None]) -> None:
        self._expires = expires
        self._seconds = prometheus_client.Histogram(
            "specdecode_admission_duration_seconds",
            "Time of one answer of the admission webhook, without the connection.",
            ["outcome"],
            buckets=_BUCKETS_S,
            registry=None,
        )
        for outcome in OUTCOMES:
            self._seconds.labels(outcome)

    def observe(self, outcome: str, took_s: float) -> None:
        """Count one answer."""
        self._seconds.labels(outcome).observe(took_s)

    def collect(self) -> Iterator[Metric]:
        """Yield the samples of one scrape."""
        yield from self._seconds.collect()
        expires = self._expires()
        yield GaugeMetricFamily(
            "specdecode_admission_certificate_expiry_timestamp_seconds",
            "When the certificate of the admission webhook ends; 0 while there is none.",
            value=expires.timestamp() if expires else 0,
        )
