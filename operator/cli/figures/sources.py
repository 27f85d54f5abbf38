"""Engines that are looked at twice, and what figures are taken of them."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.cli.capture.kubectl import Kubectl, KubectlError
from specdecode_operator.cluster.web import DEADLINE_S, MOST_BYTES, NoAnswerError, fetch, place_of
from specdecode_operator.kube.labels import DEPLOYMENT_LABEL, OWNED_SELECTOR
from specdecode_operator.monitoring.figures import Figure
from specdecode_operator.monitoring.growth import Page, UnreadablePageError, growth_between, read_page
from specdecode_operator.monitoring.measures import Values

_PORTS: Final = {"http": "", "https": "https:"}
"""Names of an engine's port, with what the API server's proxy wants before the pod's name."""


@dataclass(frozen=True)
class Engine:
    """One engine, and how its /metrics is read."""

    name: str
    read: Callable[[], str]


@dataclass(frozen=True)
class Taken:
    """Figures, and of how many engines; None where a Prometheus does not say."""

    values: dict[str, Values]
    over_s: float
    engines: int | None = None
    left_out: list[str] = field(default_factory=list)


def named_engines(urls: Sequence[str]) -> list[Engine]:
    """Return engines by their URLs."""

    def reader(url: str) -> Callable[[], str]:
        return lambda: fetch(f"{url.rstrip('/')}/metrics").decode(errors="replace")

    return [Engine(place_of(url), reader(url)) for url in urls]


def engines_of(kubectl: Kubectl, name: str) -> list[Engine]:
    """Return the ready engines of a SpecDecodeDeployment, read through the API server.

    Raises
    ------
    KubectlError
        When kubectl cannot ask for them.
    """
    pods = kubectl.items("pods", f"--selector={OWNED_SELECTOR},{DEPLOYMENT_LABEL}={name}")
    return [engine for pod in pods if (engine := _engine(kubectl, pod)) is not None]


def _engine(kubectl: Kubectl, pod: Body) -> Engine | None:
    conditions = (pod.get("status") or {}).get("conditions") or []
    if not any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions):
        return None
    ports = [port for container in pod["spec"]["containers"] for port in container.get("ports") or ()]
    port = next((port for port in ports if port.get("name") in _PORTS), None)
    if port is None:
        return None
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    address = f"{_PORTS[port['name']]}{name}:{port['containerPort']}"
    path = f"/api/v1/namespaces/{namespace}/pods/{address}/proxy/metrics"
    asked = ("get", "--raw", path, f"--request-timeout={DEADLINE_S}s")
    return Engine(name, lambda: kubectl.short_text(*asked, most_bytes=MOST_BYTES))


def look_twice(engines: Sequence[Engine], figures: Sequence[Figure], over_s: float) -> Taken:
    """Return figures of what engines did in so many seconds; one that does not answer twice is left out."""
    names = frozenset().union(*(figure.measure.series() for figure in figures))
    left_out: dict[str, str] = {}
    before = _look(engines, names, left_out)
    time.sleep(over_s if before else 0)
    after = _look([engine for engine in engines if engine.name in before], names, left_out)
    growth = growth_between([(before[name], page) for name, page in after.items()])
    values = {figure.name: _finite(figure.measure.values(growth)) for figure in figures}
    return Taken(values, over_s, len(after), [f"{name}: {why}" for name, why in left_out.items()])


def _finite(values: Values) -> Values:
    """Return what says something, as of a Prometheus: who answers need not be an engine."""
    return {label: value for label, value in values.items() if math.isfinite(value)}


def _look(engines: Sequence[Engine], names: frozenset[str], left_out: dict[str, str]) -> dict[str, Page]:
    pages = {}
    for engine in engines:
        try:
            pages[engine.name] = read_page(engine.read(), names, time.monotonic())
        except (NoAnswerError, KubectlError, UnreadablePageError) as error:
            left_out[engine.name] = str(error)
    return pages
