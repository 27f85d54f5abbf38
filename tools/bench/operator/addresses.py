"""How fast the API server makes Services: a cluster address is given to one at a time, and none to headless ones.

A bound of creation that is not the operator's: its Services have addresses, those of LeaderWorkerSets have none.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from bench.operator.stand import Stand

SERVICES: Final = 100
_NAMESPACE: Final = "default"
_AT_ONCE: Final = 16
"""As many objects as the operator works on at a time."""


def service_s(stand: Stand, *, headless: bool) -> float:
    """Return the time that each of some Services takes, several asked for at a time; they are gone at the end."""
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
