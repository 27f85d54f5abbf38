"""Measures how fast the API server creates Services. It allocates cluster addresses one after the other.

This limits creation regardless of the operator. Its Services have addresses; those of LeaderWorkerSets are headless.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from bench.operator.stand import Stand

SERVICES: Final = 100
_NAMESPACE: Final = "default"
_AT_ONCE: Final = 16
"""Number of objects that the operator reconciles in parallel."""


def service_s(stand: Stand, *, headless: bool) -> float:
    """Create Services in parallel, delete them, and return the creation time per Service."""
    spec: dict[str, Any] = {"ports": [{"port": 80}]} | ({"clusterIP": "None"} if headless else {})
    names = [f"floor-{number}" for number in range(SERVICES)]

    def create(name: str) -> None:
        body = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}
        stand.api.create(_NAMESPACE, "services", body)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        started_s = time.monotonic()
        list(pool.map(create, names))
        took_s = time.monotonic() - started_s
        list(pool.map(lambda name: stand.api.delete(_NAMESPACE, "services", name), names))
    return took_s / SERVICES
