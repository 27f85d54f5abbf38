"""Leader election by a Lease, and claims on namespaces when several operators share a cluster.

One replica of an installation holds the Lease and writes. Claims prevent two installations from serving the same
namespace.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Thread
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from specdecode_operator.api.base import Body
from specdecode_operator.cluster.client import Cluster, ClusterError, ConflictError, NotFoundError
from specdecode_operator.cluster.resources import LEASE
from specdecode_operator.cluster.rights import SERVES
from specdecode_operator.problems import printable
from specdecode_operator.untrusted import mapping

_LONGEST_LEASE_S: Final = 600
_MOST_TRANSITIONS: Final = 2**31 - 1
"""Limit of the API server, which rejects a Lease with a higher count."""


@dataclass(frozen=True)
class LeaseName:
    """A Lease, its candidate, and its duration without a renewal."""

    namespace: str
    name: str
    identity: str
    duration_s: int


class Silence:
    """Time since the last renewal of a Lease by this process's clock, because clocks of nodes may differ.

    The time between two checks counts for at most half of the duration: while the API server is down, no holder can
    renew its Lease.
    """

    def __init__(self, clock: Callable[[], float], duration_s: int) -> None:
        self._clock, self._most_s = clock, duration_s / 2
        self._version, self._silent_s, self._looked_s = "", 0.0, 0.0

    def lasts_s(self, lease: Body) -> float:
        """Return the seconds since the last renewal, given the Lease as just read."""
        before_s, self._looked_s = self._looked_s, self._clock()
        self._silent_s += min(self._looked_s - before_s, self._most_s)
        if (version := str(lease["metadata"]["resourceVersion"])) != self._version:
            self._version, self._silent_s = version, 0.0
        return self._silent_s


class Candidate:
    """Takes and renews a Lease; each call is one attempt. A restarted container keeps the Lease of its pod."""

    def __init__(self, cluster: Cluster, lease: LeaseName, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster, self._lease = cluster, lease
        self._silence = Silence(clock, lease.duration_s)
        self._held: Body | None = None
        """Lease as this candidate last wrote it."""
        self.holder = ""
        self.transitions = 0

    async def take(self, *, only_renew: bool = False) -> bool:
        """Take or renew the Lease; return whether this candidate has it.

        With ``only_renew``, it is not taken if another candidate has held it since. A ClusterError means unknown.
        """
        if self._held is not None:
            held, self._held = self._held, None
            try:
                return await self._write(held)
            except (ConflictError, NotFoundError):
                pass  # Another client wrote it in between.
        live = await self._cluster.get(LEASE, self._lease.namespace, self._lease.name)
        if live is None:
            name = {"namespace": self._lease.namespace, "name": self._lease.name}
            spec = self._spec({})
            body = {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": name} | spec
            self._held = await self._cluster.create(body)
            return True
        return await self._write(live) if self._may_take(live, only_renew=only_renew) else False

    async def release(self) -> None:
        """Release the Lease, so that the next holder need not wait."""
        live = await self._cluster.get(LEASE, self._lease.namespace, self._lease.name)
        if live is not None and mapping(live, "spec").get("holderIdentity") == self._lease.identity:
            version = {"metadata": {"resourceVersion": live["metadata"]["resourceVersion"]}}
            await self._cluster.merge(live, version | {"spec": {"holderIdentity": ""}})

    async def _write(self, live: Body) -> bool:
        """Write the Lease if its resourceVersion is unchanged."""
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
    # The Lease is untrusted input.
    found = spec.get("leaseTransitions")
    return found if isinstance(found, int) and 0 <= found < _MOST_TRANSITIONS else 0


_RENEW_WITHIN: Final = 2 / 3
"""Share of the duration after which a holder stops writing if it cannot renew, before another can take over."""

_RETRY_AFTER: Final = 1 / 6
"""Share of the duration between two attempts."""

_STOP_S: Final = 10.0

EXIT_STATUS: Final = 3
"""Exit status of a process that lost its Lease to another one."""

_logger = logging.getLogger(__name__)


class Leadership:
    """Thread that renews the Lease, even while the event loop is busy.

    ``lost`` is called with the reason if another replica has held the Lease, because the state is then out of date.
    """

    def __init__(self, lease: LeaseName, lost: Callable[[str], None]) -> None:
        self._lease, self._lost = lease, lost
        self._renew_within_s = lease.duration_s * _RENEW_WITHIN
        self._retry_s = lease.duration_s * _RETRY_AFTER
        self._loop = asyncio.new_event_loop()
        self._ends = asyncio.Event()
        self._led: Future[None] = Future()
        self._led.set_running_or_notify_cancel()  # So that a cancelled waiter does not cancel it.
        self._until_s = -math.inf
        """Time until which this process may write, on the clock of `_now_s`."""
        self.stands_by = False
        """Whether another replica held the Lease at the last read."""
        self._failure = ""
        """Error of the last read; empty without one."""
        self.transitions: int | None = None
        """Number of times that the Lease changed its holder; None before the first read."""
        self._thread = Thread(target=self._run, name="leadership", daemon=True)

    def start(self) -> None:
        """Start trying to take the Lease."""
        self._thread.start()

    def may_write(self) -> bool:
        """Return whether this process holds the Lease now; thread-safe."""
        return _now_s() < self._until_s

    async def led(self) -> None:
        """Wait until this process has held the Lease once."""
        await asyncio.wrap_future(self._led)

    def stop(self) -> None:
        """Release the Lease if this process holds it; the caller must not write afterwards. Idempotent."""
        with suppress(RuntimeError):  # The loop has already ended.
            self._loop.call_soon_threadsafe(self._ends.set)
        self._thread.join(timeout=_STOP_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._hold())
        except Exception as error:
            _logger.exception("leader election thread failed")
            self._lost(f"{type(error).__name__} in the leader election thread")
        finally:
            self._loop.close()

    async def _hold(self) -> None:
        cluster = await Cluster.connect()
        try:
            candidate = Candidate(cluster, self._lease)
            if await self._renew(candidate):
                async with asyncio.timeout(self._renew_within_s):
                    await candidate.release()
        except (ClusterError, TimeoutError) as error:
            _logger.warning("failed to release the lease; it expires: %s", error)
        finally:
            await cluster.close()

    async def _renew(self, candidate: Candidate) -> bool:
        """Take and renew the Lease until the process ends; return whether to release it."""
        led = False
        while not self._ends.is_set():
            asked_s = _now_s()
            holds, why = await self._look(candidate)
            self.transitions = self.transitions if holds is None else candidate.transitions
            if holds:
                self._until_s = asked_s + self._renew_within_s
            elif holds is False and self._led.done():
                self._until_s = -math.inf
                self._lost(why)
                return False
            before, led = led, self.may_write()
            if before and not led:
                _logger.warning("lease not renewed; writes are paused: %s", why)
            elif led and not self._led.done():
                _logger.info("leading: acquired lease %s/%s", self._lease.namespace, self._lease.name)
                self._led.set_result(None)
            elif led and not before:
                _logger.info("lease renewed; resuming writes")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ends.wait(), max(0.0, asked_s + self._retry_s - _now_s()))
        self._until_s = -math.inf
        return self._led.done()

    async def _look(self, candidate: Candidate) -> tuple[bool | None, str]:
        """Return whether this process holds the Lease, None if unknown, and the reason if it does not."""
        has_led = self._led.done()
        try:
            # The first attempt gets half of the time, so that another can follow if its connection hangs.
            async with asyncio.timeout(self._lease.duration_s if self._failure else self._renew_within_s / 2):
                holds = await candidate.take(only_renew=has_led)
        except (ClusterError, TimeoutError) as error:
            why = str(error) or "the API server did not answer in time"
            if why != self._failure and not isinstance(error, ConflictError):  # The next read explains it
                _logger.warning("Lease %s/%s: %s", self._lease.namespace, self._lease.name, why)
            self.stands_by, self._failure = False, why
            return None, why
        self._failure = ""
        if not (holds or self.stands_by or has_led):
            _logger.info("standby: %s holds the lease", candidate.holder)
        self.stands_by = not holds
        return holds, f"held by {candidate.holder}" if candidate.holder else "not held"


class LeaderCollector(Collector):
    """Metrics of the Lease. The scope is ``Cluster``, or ``Namespaced`` if namespaces are named."""

    def __init__(self, leadership: Leadership | None = None, scope: str = "Cluster") -> None:
        self._leadership, self._scope = leadership, scope

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the samples of one scrape; without a Lease, the only replica is the leader."""
        leads = self._leadership is None or self._leadership.may_write()
        transitions = None if self._leadership is None else self._leadership.transitions
        for name, text, value in (
            ("specdecode_leader", "1 if this replica leads, 0 if it is on standby.", leads),
            ("specdecode_lease_transitions", "Number of times the lease changed its holder.", transitions),
        ):
            family = GaugeMetricFamily(name, text, labels=("scope",))
            if value is not None:
                family.add_metric((self._scope,), value)
            yield family


def end_at_once(why: str) -> None:
    """End the process immediately, because another replica leads."""
    _logger.critical("lease lost; exiting: %s", why)
    logging.shutdown()
    os._exit(EXIT_STATUS)


@contextmanager
def holding(leadership: Leadership | None) -> Iterator[None]:
    """Hold the Lease while the block runs."""
    if leadership is None:
        yield
        return
    leadership.start()
    try:
        yield
    finally:
        leadership.stop()


def _now_s() -> float:
    # This clock is never set, and also runs while the machine is suspended.
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


CLAIM_S: Final = 30
"""Duration of a claim, which is renewed every 15 s."""

_RELEASE_S: Final = 2.0


class Claims:
    """Claims on namespaces, as of the last read of their Leases."""

    def __init__(
        self, cluster: Cluster, namespaces: Sequence[str], identity: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cluster, self._identity, self._clock = cluster, identity, clock
        leases = {each: LeaseName(each, SERVES, identity, CLAIM_S) for each in namespaces}
        self._candidates = {each: Candidate(cluster, lease, clock) for each, lease in leases.items()}
        self._silences: dict[str, Silence] = {}
        self._others: dict[str, str] = {}
        """Holders of the namespaces that another operator serves."""

    def serves(self, namespace: str) -> bool:
        """Return whether this operator reconciles objects of a namespace."""
        return namespace not in self._others

    async def look(self) -> Collection[str]:
        """Renew the claims, or read the claims of other operators; keep the last result if they cannot be read.

        Returns the namespaces that this operator has started or stopped serving.
        """
        others = await (self._claim() if self._candidates else self._claimed_by_others())
        for namespace, holder in others.items():
            if self._others.get(namespace) != holder:
                _logger.warning("namespace %s is skipped: %s serves it (lease %s)", namespace, holder, SERVES)
        for namespace in self._others.keys() - others.keys():
            _logger.info("namespace %s is now served", namespace)
        changed = self._others.keys() ^ others.keys()
        self._others = others
        return changed

    async def release(self) -> None:
        """Release the claims, within 2 s, so that another operator need not wait until they expire."""
        until_s = asyncio.get_running_loop().time() + _RELEASE_S
        for candidate in self._candidates.values():
            try:
                async with asyncio.timeout_at(until_s):
                    await candidate.release()
            except (ClusterError, TimeoutError) as error:
                _logger.warning("failed to release the claim of a namespace; it expires: %s", error)

    async def _claim(self) -> dict[str, str]:
        """Claim each namespace; return the holders of the namespaces that other operators have claimed."""
        found = {}
        for namespace, candidate in self._candidates.items():
            try:
                if not await candidate.take():
                    found[namespace] = candidate.holder
            except ClusterError as error:
                _logger.warning("cannot read whether another operator serves namespace %s: %s", namespace, error)
                if namespace in self._others:
                    found[namespace] = self._others[namespace]
        return found

    async def _claimed_by_others(self) -> dict[str, str]:
        try:
            bodies, _ = await self._cluster.list(LEASE, name=SERVES)
        except ClusterError as error:
            _logger.warning("cannot list the operators of selected namespaces: %s", error)
            return self._others
        found, silences = {}, {}
        for body in bodies:
            namespace = body["metadata"]["namespace"]
            holder = printable(str(mapping(body, "spec").get("holderIdentity") or ""))
            silences[namespace] = self._silences.get(namespace, Silence(self._clock, CLAIM_S))
            if silences[namespace].lasts_s(body) < CLAIM_S and holder not in ("", self._identity):
                found[namespace] = holder
        self._silences = silences
        return found
