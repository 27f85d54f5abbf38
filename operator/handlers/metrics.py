"""Metrics of the operator and its webhook, and the /metrics server."""

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import product
from typing import Final, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import MetricsHandler
from prometheus_client.registry import Collector

from specdecode_operator.api import capture, deployment, training
from specdecode_operator.api.base import Body
from specdecode_operator.api.capture_status import CapturePhase
from specdecode_operator.api.deployment import Key
from specdecode_operator.api.training_status import TrainingPhase
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import Waits, counted_waits
from specdecode_operator.deployment.autoscaler import CAPACITY_METRIC, LOAD_METRIC, load_labels
from specdecode_operator.deployment.observed.engine_reports import BudgetResidual
from specdecode_operator.deployment.observed.replica_load import ReplicaLoad
from specdecode_operator.enums import PolicyAction, PolicyOutcome
from specdecode_operator.handlers.http_server import BoundedHandler, BoundedServer
from specdecode_operator.sizing.memory.budget import Verdict

_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
OUTCOMES = ("allowed", "warned", "refused", "failed")
"""Outcomes of a request. ``failed``: the request is not a review, or the operator failed to answer it."""


class AdmissionCollector(Collector):
    """Metrics of the webhook: duration and outcome of reviews, and end of the certificate's validity."""

    def __init__(self, expires: Callable[[], datetime | None]) -> None:
        self._expires = expires
        self._seconds = prometheus_client.Histogram(
            "specdecode_admission_duration_seconds",
            "Duration of one review of the admission webhook, without the connection.",
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
            "Expiry time of the admission webhook's certificate; 0 without a certificate.",
            value=expires.timestamp() if expires else 0,
        )


_LABELS: Final = ("product", "engine_version", "runner", "tensor")
"""Each label has few values: known products and versions, two runners, powers of two."""

_ENDED: Final = (CapturePhase.SUCCEEDED, CapturePhase.FAILED)
"""Final phases. ``Cancelled`` is not one, because a cancelled capture can be resumed."""

_TRAININGS_ENDED: Final = (TrainingPhase.COMPLETE, TrainingPhase.FAILED)

_MOST_CONDITIONS: Final = 200
"""Maximum number of series of conditions. Reasons of pods are untrusted text; our own reasons are fewer."""

_logger = logging.getLogger(__name__)

_RECONCILE_BUCKETS_S: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)

_Polled = TypeVar("_Polled")


class OperatorMetrics(Collector):
    """Metrics of objects and reconciles.

    No series is per object, except those that autoscalers follow; kubectl shows single objects.

    Reconciles that take ``told_from_s`` or longer are logged.
    """

    def __init__(self, cache: Cache, told_from_s: float | None = None) -> None:
        self._cache, self._told_from_s = cache, told_from_s
        self._residuals: dict[Key, BudgetResidual] = {}
        self._loads: dict[Key, ReplicaLoad] = {}
        # Known series start at 0, so that Prometheus sees the first increase.
        self._ended = prometheus_client.Counter(
            "specdecode_captures_ended", "SpecDecodeCaptures that ended.", ["phase"], registry=None
        )
        for phase in _ENDED:
            self._ended.labels(phase.value)
        self._trainings_ended = prometheus_client.Counter(
            "specdecode_trainings_ended", "SpecDecodeTrainings that ended.", ["phase"], registry=None
        )
        for training_phase in _TRAININGS_ENDED:
            self._trainings_ended.labels(training_phase.value)
        self._decisions = prometheus_client.Counter(
            "specdecode_policy_decisions",
            "New decisions of policies, by action and outcome.",
            ["action", "outcome"],
            registry=None,
        )
        for action, outcome in product(PolicyAction, PolicyOutcome):
            if action is not PolicyAction.KEEP and outcome is not PolicyOutcome.KEPT:
                self._decisions.labels(action.value, outcome.value)
        self._seconds = prometheus_client.Histogram(
            "specdecode_reconcile_duration_seconds",
            "Duration of one reconcile of one object; a failed one is retried.",
            ["kind", "outcome"],
            buckets=_RECONCILE_BUCKETS_S,
            registry=None,
        )
        for labels in product((deployment.KIND, capture.KIND, training.KIND), ("done", "failed")):
            self._seconds.labels(*labels)
        self._poll_seconds = prometheus_client.Histogram(
            "specdecode_poll_duration_seconds",
            "Duration of a poll, which scrapes the engines of a settled SpecDecodeDeployment to check whether it must"
            " be reconciled.",
            ["outcome"],
            buckets=_RECONCILE_BUCKETS_S,
            registry=None,
        )
        for poll_outcome in ("unchanged", "changed", "failed"):
            self._poll_seconds.labels(poll_outcome)

    def set_residual(self, key: Key, residual: BudgetResidual | None) -> None:
        """Store the residual of one deployment; None removes it."""
        if residual is None:
            self._residuals.pop(key, None)
        else:
            self._residuals[key] = residual

    def set_load(self, key: Key, load: ReplicaLoad | None) -> None:
        """Store the load that the autoscaler of a deployment follows; None removes it."""
        if load is None:
            self._loads.pop(key, None)
        else:
            self._loads[key] = load

    def count_capture(self, before: CapturePhase | None, now: CapturePhase | None) -> None:
        """Count a capture if it has just ended."""
        if now in _ENDED and before not in _ENDED:
            self._ended.labels(now.value).inc()

    def count_training(self, before: TrainingPhase | None, now: TrainingPhase | None) -> None:
        """Count a training if it has just ended."""
        if now in _TRAININGS_ENDED and before not in _TRAININGS_ENDED:
            self._trainings_ended.labels(now.value).inc()

    def count_policy_decision(self, action: PolicyAction, outcome: PolicyOutcome) -> None:
        """Count a policy decision; the caller skips repeated ones."""
        self._decisions.labels(action.value, outcome.value).inc()

    @contextmanager
    def measured(self, key: Key) -> Iterator[None]:
        """Measure the block as one reconcile; an exception counts as a failure."""
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

    async def measured_poll(self, poll: Awaitable[_Polled | None]) -> _Polled | None:
        """Measure a poll and return its result, which is None if a reconcile must follow."""
        started_s, outcome = time.perf_counter(), "unchanged"
        try:
            result = await poll
            outcome = "changed" if result is None else outcome
        except Exception:
            outcome = "failed"
            raise
        finally:
            self._poll_seconds.labels(outcome).observe(time.perf_counter() - started_s)
        return result

    def collect(self) -> Iterator[Metric]:
        """Yield the samples of one scrape."""
        # Residuals by kind of engine, because errors of estimates depend on device, vLLM version, runner and TP size.
        residuals = GaugeMetricFamily(
            "specdecode_budget_residual_bytes",
            "Predicted less reported KV cache on one GPU, the maximum of all objects; positive if engines got less than"
            " predicted.",
            labels=_LABELS,
        )
        worst: dict[tuple[str, ...], int] = {}
        for residual in list(self._residuals.values()):
            labels = (residual.product, residual.engine_version, residual.runner, str(residual.tensor))
            worst[labels] = max(residual.residual_bytes, worst.get(labels, residual.residual_bytes))
        for kind, value in sorted(worst.items()):
            residuals.add_metric(kind, value)
        yield residuals
        yield from self._load_metrics()
        for counter in (self._ended, self._trainings_ended, self._decisions, self._seconds, self._poll_seconds):
            yield from counter.collect()
        captures = GaugeMetricFamily("specdecode_captures", "SpecDecodeCaptures by phase.", labels=("phase",))
        phases = Counter(status.get("phase") for status in self._statuses(capture.KIND))
        for phase in CapturePhase:
            captures.add_metric((phase.value,), phases[phase.value])
        yield captures
        trainings = GaugeMetricFamily("specdecode_trainings", "SpecDecodeTrainings by phase.", labels=("phase",))
        phases = Counter(status.get("phase") for status in self._statuses(training.KIND))
        for training_phase in TrainingPhase:
            trainings.add_metric((training_phase.value,), phases[training_phase.value])
        yield trainings
        statuses = self._statuses(deployment.KIND)
        conditions = GaugeMetricFamily(
            "specdecode_deployments",
            "SpecDecodeDeployments by condition, status and reason.",
            labels=("condition", "status", "reason"),
        )
        counts = Counter(
            (str(each.get("type")), str(each.get("status")), str(each.get("reason")))
            for status in statuses
            for each in status.get("conditions") or []
        )
        for values, count in counts.most_common(_MOST_CONDITIONS):
            conditions.add_metric(values, count)
        yield conditions
        plans = GaugeMetricFamily("specdecode_plans", "SpecDecodeDeployments by their plan.", labels=("verdict",))
        verdicts = Counter((status.get("plan") or {}).get("verdict") for status in statuses)
        for verdict in Verdict:
            plans.add_metric((verdict.value,), verdicts[verdict.value])
        yield plans

    def _load_metrics(self) -> Iterator[Metric]:
        labels = tuple(load_labels(Key("", "")))
        capacities = GaugeMetricFamily(
            CAPACITY_METRIC,
            "Running requests at which the goodput of a replica is highest, by the newest capture with arms.",
            labels=labels,
        )
        loads = GaugeMetricFamily(
            LOAD_METRIC,
            "Running and waiting requests of all replicas over the capacity of one replica.",
            labels=labels,
        )
        for key, load in sorted(self._loads.items()):
            values = tuple(load_labels(key).values())
            if load.capacity is not None:
                capacities.add_metric(values, load.capacity)
            if load.replicas is not None:
                loads.add_metric(values, load.replicas)
        yield capacities
        yield loads

    def _statuses(self, kind: str) -> list[Body]:
        return [(self._cache.parent(key) or {}).get("status") or {} for key in self._cache.parents(kind)]


def told(key: Key, outcome: str, took_s: float, waits: Waits) -> str:
    """Return the log line about one reconcile: its duration and its waits."""
    api, engines = waits.api_server, waits.engines
    rest_s = took_s - api.seconds - engines.seconds
    return (
        f"{key}: reconcile {outcome} in {took_s:.3f} s: "
        f"{api.seconds:.3f} s for {api.questions} calls of the API server, "
        f"{engines.seconds:.3f} s for engines, {rest_s:.3f} s for the rest"
    )


def serve_metrics(port: int, *collectors: Collector) -> int:
    """Serve collectors at /metrics from a separate thread; return the port, which the system chooses for 0."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)

    class Scrape(BoundedHandler, MetricsHandler):
        """Handler of one scrape. Silent clients cannot replace its connection."""

        def do_GET(self) -> None:
            """Answer the scrape."""
            self.keep_place()
            super().do_GET()

    Scrape.registry = registry
    return int(BoundedServer(port, Scrape).serve("metrics").server_port)
