"""One Lease: taken, renewed and given back, with one look each time."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.cluster.client import Cluster
from specdecode_operator.cluster.errors import ConflictError, NotFoundError
from specdecode_operator.kube.resources import LEASE
from specdecode_operator.kube.untyped import mapping
from specdecode_operator.problems import printable

_LONGEST_LEASE_S: Final = 600
_MOST_TRANSITIONS: Final = 2**31 - 1
"""The API server takes no more, and a Lease whose counter is full could not be taken by anybody."""


@dataclass(frozen=True)
class LeaseName:
    """Which Lease, who asks for it, and after how long without a renewal others may take it."""

    namespace: str
    name: str
    identity: str
    duration_s: int


class Silence:
    """How long a Lease of another has not been renewed, from when that was seen: clocks of nodes may differ.

    The time between two looks counts for no more than half of the Lease: while the API server answers nobody,
    nobody can renew one.
    """

    def __init__(self, clock: Callable[[], float], duration_s: int) -> None:
        self._clock, self._most_s = clock, duration_s / 2
        self._version, self._silent_s, self._looked_s = "", 0.0, 0.0

    def lasts_s(self, lease: Body) -> float:
        """Return it in seconds, as of this look at the Lease."""
        before_s, self._looked_s = self._looked_s, self._clock()
        self._silent_s += min(self._looked_s - before_s, self._most_s)
        if (version := str(lease["metadata"]["resourceVersion"])) != self._version:
            self._version, self._silent_s = version, 0.0
        return self._silent_s


class Candidate:
    """Asks for the Lease and renews it: one look each time. A container that was started anew has its pod's Lease."""

    def __init__(self, cluster: Cluster, lease: LeaseName, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster, self._lease = cluster, lease
        self._silence = Silence(clock, lease.duration_s)
        self._held: Body | None = None
        """The Lease as this candidate has written it last."""
        self.holder = ""
        self.transitions = 0
        """How many times it changed hands."""

    async def take(self, *, only_renew: bool = False) -> bool:
        """Take the Lease or renew it, and return whether this candidate has it.

        With ``only_renew`` it is not taken where another has had it since.

        Raises
        ------
        ClusterError
            When that cannot be told.
        """
        if self._held is not None:
            held, self._held = self._held, None
            try:
                return await self._write(held)
            except (ConflictError, NotFoundError):
                pass  # somebody wrote it in between: who?
        live = await self._cluster.get(LEASE, self._lease.namespace, self._lease.name)
        if live is None:
            name = {"namespace": self._lease.namespace, "name": self._lease.name}
            spec = self._spec({})
            body = {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": name} | spec
            self._held = await self._cluster.create(body)
            return True
        return await self._write(live) if self._may_take(live, only_renew=only_renew) else False

    async def release(self) -> None:
        """Give the Lease back, so that the next one need not wait for its end."""
        live = await self._cluster.get(LEASE, self._lease.namespace, self._lease.name)
        if live is not None and mapping(live, "spec").get("holderIdentity") == self._lease.identity:
            version = {"metadata": {"resourceVersion": live["metadata"]["resourceVersion"]}}
            await self._cluster.merge(live, version | {"spec": {"holderIdentity": ""}})

    async def _write(self, live: Body) -> bool:
        """Write the Lease, unless it is another by now than it was seen."""
        version = {"metadata": {"resourceVersion": live["metadata"]["resourceVersion"]}}
        self._held = await self._cluster.merge(live, version | self._spec(mapping(live, "spec")))
        return True

    def _may_take(self, live: Body, *, only_renew: bool) -> bool:
        spec = mapping(live, "spec")
        self.holder = printable(str(spec.get("holderIdentity") or ""))
        self.transitions = _transitions(spec)
        if self.holder == self._lease.identity:
            return True
        if only_renew or self.holder == "":
            return not only_renew
        lasts_s = spec.get("leaseDurationSeconds")
        if not isinstance(lasts_s, int) or not 0 < lasts_s <= _LONGEST_LEASE_S:
            lasts_s = self._lease.duration_s
        return self._silence.lasts_s(live) >= lasts_s

    def _spec(self, before: Body) -> Body:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        identity = self._lease.identity
        spec = {"holderIdentity": identity, "leaseDurationSeconds": self._lease.duration_s, "renewTime": now}
        if before.get("holderIdentity") != identity:
            self.transitions = _transitions(before) + 1 if "leaseTransitions" in before else 0
            spec |= {"acquireTime": now, "leaseTransitions": self.transitions}
        return {"spec": spec}


def _transitions(spec: Body) -> int:
    """Return how many times a Lease changed hands, as it says; others may have written it."""
    found = spec.get("leaseTransitions")
    return found if isinstance(found, int) and 0 <= found < _MOST_TRANSITIONS else 0
