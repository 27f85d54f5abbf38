"""One Lease: taken, renewed and given back, with one look each time."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.cluster.client import Cluster
from specdecode_operator.kube.resources import LEASE
from specdecode_operator.kube.untyped import mapping
from specdecode_operator.problems import printable

LEASE_S: Final = 30
"""A Lease that nobody has renewed for so long may be taken."""

_LONGEST_LEASE_S: Final = 600
_MOST_TRANSITIONS: Final = 2**31 - 1
"""The API server takes no more, and a Lease whose counter is full could not be taken by anybody."""


@dataclass(frozen=True)
class LeaseName:
    """Which Lease, and who asks for it."""

    namespace: str
    name: str
    identity: str


class Silence:
    """How long a Lease of another has not been renewed, from when that was seen: clocks of nodes may differ."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._version, self._since_s = "", 0.0

    def lasts_s(self, lease: Body) -> float:
        """Return it in seconds, as of this look at the Lease."""
        if (version := str(lease["metadata"]["resourceVersion"])) != self._version:
            self._version, self._since_s = version, self._clock()
        return self._clock() - self._since_s


class Candidate:
    """Asks for the Lease and renews it: one look each time. A container that was started anew has its pod's Lease."""

    def __init__(self, cluster: Cluster, lease: LeaseName, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster, self._lease = cluster, lease
        self._silence = Silence(clock)
        self.holder = ""

    async def take(self) -> bool:
        """Take the Lease or renew it, and return whether this candidate has it.

        Raises
        ------
        ClusterError
            When that cannot be told.
        """
        name = {"namespace": self._lease.namespace, "name": self._lease.name}
        live = await self._cluster.get(LEASE, **name)
        if live is None:
            spec = self._spec({})
            await self._cluster.create({"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": name} | spec)
            return True
        if not self._may_take(live):
            return False
        version = {"metadata": {"resourceVersion": live["metadata"]["resourceVersion"]}}
        await self._cluster.merge(live, version | self._spec(mapping(live, "spec")))
        return True

    async def release(self) -> None:
        """Give the Lease back, so that the next one need not wait for its end."""
        live = await self._cluster.get(LEASE, self._lease.namespace, self._lease.name)
        if live is not None and mapping(live, "spec").get("holderIdentity") == self._lease.identity:
            version = {"metadata": {"resourceVersion": live["metadata"]["resourceVersion"]}}
            await self._cluster.merge(live, version | {"spec": {"holderIdentity": ""}})

    def _may_take(self, live: Body) -> bool:
        spec = mapping(live, "spec")
        self.holder = printable(str(spec.get("holderIdentity") or ""))
        if self.holder in ("", self._lease.identity):
            return True
        lasts_s = spec.get("leaseDurationSeconds")
        if not isinstance(lasts_s, int) or not 0 < lasts_s <= _LONGEST_LEASE_S:
            lasts_s = LEASE_S
        return self._silence.lasts_s(live) >= lasts_s

    def _spec(self, before: Body) -> Body:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": self._lease.identity, "leaseDurationSeconds": LEASE_S, "renewTime": now}
        if before.get("holderIdentity") != self._lease.identity:
            transitions = before.get("leaseTransitions")
            spec |= {"acquireTime": now, "leaseTransitions": 0}
            if isinstance(transitions, int) and transitions < _MOST_TRANSITIONS:
                spec["leaseTransitions"] = transitions + 1
        return {"spec": spec}
