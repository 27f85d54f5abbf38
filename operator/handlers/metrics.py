"""Metrics of the operator and its webhook, and the /metrics server."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Final

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import MetricsHandler
from prometheus_client.registry import Collector

from specdecode_operator.api import capture, deployment
from specdecode_operator.api.base import Body
from specdecode_operator.api.capture_status import CapturePhase
from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import Waits, counted_waits
from specdecode_operator.deployment.observed.engine_reports import BudgetResidual
from specdecode_operator.enums import PolicyAction, PolicyOutcome
from specdecode_operator.handlers.http_server import BoundedHandler, BoundedServer
from specdecode_operator.sizing.memory.budget import Verdict

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


_LABELS: Final = ("product", "engine_version", "runner", "tensor")
"""Each has few values: known products and versions, two runners, powers of two."""

_ENDED: Final = (CapturePhase.SUCCEEDED, CapturePhase.FAILED)
"""For good: one that was cancelled may go on."""

_MOST_CONDITIONS: Final = 200
"""Series of conditions: more than there are reasons. A reason of a pod's own is a word that others may write."""

_logger = logging.getLogger(__name__)

_RECONCILE_BUCKETS_S: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class ResidualCollector(Collector):
    """The residuals of all objects, the worst of each kind of engine.

    Not a series an object: what errs are the estimates for a device, a vLLM
    version, a runner and a tensor parallelism, whoever uses them.
    """

    def __init__(self) -> None:
        self._residuals: dict[Key, BudgetResidual] = {}

    def set(self, key: Key, residual: BudgetResidual | None) -> None:
        """Remember the residual of one object; None when its engines no longer tell."""
        if residual is None:
            self._residuals.pop(key, None)
        else:
            self._residuals[key] = residual

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the samples of one scrape."""
        family = GaugeMetricFamily(
            "specdecode_budget_residual_bytes",
            "Predicted less reported KV cache on one GPU, the largest of all objects:"
            " positive where engines got less than was predicted.",
            labels=_LABELS,
        )
        worst: dict[tuple[str, ...], int] = {}
        for residual in list(self._residuals.values()):
            labels = (residual.product, residual.engine_version, residual.runner, str(residual.tensor))
            worst[labels] = max(residual.residual_bytes, worst.get(labels, residual.residual_bytes))
        for kind, value in sorted(worst.items()):
            family.add_metric(kind, value)
        yield family


class CaptureCollector(Collector):
    """How many captures there are in each phase."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the samples of one scrape."""
        family = GaugeMetricFamily("specdecode_captures", "SpecDecodeCaptures by phase.", labels=("phase",))
        bodies = [self._cache.parent(key) or {} for key in self._cache.parents(capture.KIND)]
        phases = Counter((body.get("status") or {}).get("phase") for body in bodies)
        for phase in CapturePhase:
            family.add_metric((phase.value,), phases[phase.value])
        yield family


class DeploymentCollector(Collector):
    """How many SpecDecodeDeployments say what: not a series an object, for which there is kubectl."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the samples of one scrape."""
        bodies = [self._cache.parent(key) or {} for key in self._cache.parents(deployment.KIND)]
        statuses: list[Body] = [body.get("status") or {} for body in bodies]
        conditions = GaugeMetricFamily(
            "specdecode_deployments",
            "SpecDecodeDeployments by what their conditions say.",
            labels=("condition", "status", "reason"),
        )
        said = Counter(
            (str(each.get("type")), str(each.get("status")), str(each.get("reason")))
            for status in statuses
            for each in status.get("conditions") or []
        )
        for labels, count in said.most_common(_MOST_CONDITIONS):
            conditions.add_metric(labels, count)
        yield conditions
        plans = GaugeMetricFamily("specdecode_plans", "SpecDecodeDeployments by their plan.", labels=("verdict",))
        verdicts = Counter((status.get("plan") or {}).get("verdict") for status in statuses)
        for verdict in Verdict:
            plans.add_metric((verdict.value,), verdicts[verdict.value])
        yield plans


class EndedCaptures(Collector):
    """How many captures ended since the operator started, by how."""

    def __init__(self) -> None:
        self._ended = prometheus_client.Counter(
            "specdecode_captures_ended", "SpecDecodeCaptures that ended.", ["phase"], registry=None
        )
        for phase in _ENDED:  # from 0, or the first would not be seen to come
            self._ended.labels(phase.value)

    def count(self, before: CapturePhase | None, now: CapturePhase | None) -> None:
        """Count a capture whose status has a phase, if it had not ended before."""
        if now in _ENDED and before not in _ENDED:
            self._ended.labels(now.value).inc()

    def collect(self) -> Iterator[Metric]:
        """Yield the samples of one scrape."""
        yield from self._ended.collect()


class PolicyDecisions(Collector):
    """What policies decided since the operator started, and what became of it; what is kept is not counted."""

    def __init__(self) -> None:
        self._decisions = prometheus_client.Counter(
            "specdecode_policy_decisions",
            "Decisions of policies that are news, by what is best and what came of it.",
            ["action", "outcome"],
            registry=None,
        )
        for action in PolicyAction:
            for outcome in PolicyOutcome:
                if action is not PolicyAction.KEEP and outcome is not PolicyOutcome.KEPT:
                    self._decisions.labels(action.value, outcome.value)

    def count(self, action: PolicyAction, outcome: PolicyOutcome) -> None:
        """Count one."""
        self._decisions.labels(action.value, outcome.value).inc()

    def collect(self) -> Iterator[Metric]:
        """Yield the samples of one scrape."""
        yield from self._decisions.collect()


class ReconcileTimes(Collector):
    """How long reconciles take, and how many of them fail; those that take long are told in the log, if asked for."""

    def __init__(self, told_from_s: float | None = None) -> None:
        self._told_from_s = told_from_s
        self._seconds = prometheus_client.Histogram(
            "specdecode_reconcile_duration_seconds",
            "Time of one look at one object; one that failed is tried again.",
            ["kind", "outcome"],
            buckets=_RECONCILE_BUCKETS_S,
            registry=None,
        )
        for kind in (deployment.KIND, capture.KIND):
            for outcome in ("done", "failed"):
                self._seconds.labels(kind, outcome)

    @contextmanager
    def measured(self, key: Key) -> Iterator[None]:
        """Measure the block as one reconcile; an error is its failure, and goes on."""
        started_s, outcome = time.perf_counter(), "done"
        with counted_waits() as waits:
            try:
                yield
            except Exception:
                outcome = "failed"
                raise
            finally:
                took_s = time.perf_counter() - started_s
                self._seconds.labels(key.kind, outcome).observe(took_s)
                if self._told_from_s is not None and took_s >= self._told_from_s:
                    _logger.info("%s", told(key, outcome, took_s, waits))

    def collect(self) -> Iterator[Metric]:
        """Yield the samples of one scrape."""
        yield from self._seconds.collect()


def told(key: Key, outcome: str, took_s: float, waits: Waits) -> str:
    """Return what one reconcile was busy with, as the log has it."""
    api, engines = waits.api_server, waits.engines
    rest_s = took_s - api.seconds - engines.seconds
    return (
        f"{key}: reconcile {outcome} in {took_s:.3f} s: "
        f"{api.seconds:.3f} s for {api.questions} calls of the API server, "
        f"{engines.seconds:.3f} s for engines, {rest_s:.3f} s for the rest"
    )


def serve_metrics(port: int, *collectors: Collector) -> int:
    """Serve collectors at /metrics from a thread of its own; return the port, which 0 leaves to the system."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)

    class Scrape(BoundedHandler, MetricsHandler):
        """One scrape; who scrapes takes none from another, however many connect and are silent."""

        def do_GET(self) -> None:
            """Answer it."""
            self.keep_place()
            super().do_GET()

    Scrape.registry = registry
    return int(BoundedServer(port, Scrape).serve("metrics").server_port)
