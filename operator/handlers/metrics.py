"""What the operator itself publishes at /metrics."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from specdecode_operator.api import capture
from specdecode_operator.api.capture_status import CapturePhase
from specdecode_operator.api.key import Key
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.deployment.proof.residual import BudgetResidual

_LABELS: Final = ("product", "engine_version", "runner", "tensor")
"""Each has few values: known products and versions, two runners, powers of two."""


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


def serve_metrics(port: int, *collectors: Collector) -> int:
    """Serve collectors at /metrics from a thread of its own; return the port, which 0 leaves to the system."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    server, _ = start_http_server(port, registry=registry)
    return int(server.server_port)
