"""Which of several operators works: the one that holds a Lease of their namespace.

The official client has a leader election that does not keep its word: a connection
that fails ends its loop and not the work, a request may outlast the Lease, it goes by the
wall clock, and the Lease is never given back.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from specdecode_operator.cluster.client import Cluster
from specdecode_operator.cluster.errors import ClusterError, ConflictError
from specdecode_operator.handlers.leadership.lease import Candidate, LeaseName

_RENEW_WITHIN: Final = 2 / 3
"""Of the Lease: who could not renew it for so long writes nothing, well before another may take it."""

_RETRY_AFTER: Final = 1 / 6
"""Of the Lease: how often it is renewed, and how often who waits looks at it."""

_STOP_S: Final = 10.0

EXIT_STATUS: Final = 3
"""Of a process whose Lease another has taken."""

_logger = logging.getLogger(__name__)


class Leadership:
    """A thread that holds the Lease while the operator works, however busy its event loop is.

    ``lost`` is called, with the reason, when another has had it: what this process knows is of before then.
    """

    def __init__(self, lease: LeaseName, lost: Callable[[str], None]) -> None:
        self._lease, self._lost = lease, lost
        self._renew_within_s = lease.duration_s * _RENEW_WITHIN
        self._retry_s = lease.duration_s * _RETRY_AFTER
        self._loop = asyncio.new_event_loop()
        self._ends = asyncio.Event()
        self._led: Future[None] = Future()
        self._led.set_running_or_notify_cancel()  # whoever waits for it may give up, and it comes about all the same
        self._until_s = -math.inf
        """Until when this process may write, as `_now_s` counts."""
        self.stands_by = False
        """Whether the API server has said that another one works."""
        self._failure = ""
        """Why the last look told nothing."""
        self.transitions: int | None = None
        """How many times the Lease changed hands; None before the first look at it."""
        self._thread = Thread(target=self._run, name="leadership", daemon=True)

    def start(self) -> None:
        """Begin to ask for the Lease."""
        self._thread.start()

    def may_write(self) -> bool:
        """Whether this process holds the Lease now; any thread may ask."""
        return _now_s() < self._until_s

    async def led(self) -> None:
        """Wait until this process has had the Lease."""
        await asyncio.wrap_future(self._led)

    def stop(self) -> None:
        """Give the Lease back, if this process has it: nothing may be written after that. Twice is once."""
        with suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._ends.set)
        self._thread.join(timeout=_STOP_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._hold())
        except Exception as error:
            _logger.exception("the thread that holds the Lease has ended")
            self._lost(f"{type(error).__name__} in the thread that holds it")
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
            _logger.warning("the Lease was not given back, and ends by itself: %s", error)
        finally:
            await cluster.close()

    async def _renew(self, candidate: Candidate) -> bool:
        """Ask for the Lease and renew it until the end is asked for; return whether it is to be given back."""
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
            led = self._say(led, why)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ends.wait(), max(0.0, asked_s + self._retry_s - _now_s()))
        self._until_s = -math.inf
        return self._led.done()

    async def _look(self, candidate: Candidate) -> tuple[bool | None, str]:
        """Return whether the Lease is held, None where that cannot be told, and why not."""
        has_led = self._led.done()
        try:
            # Half of what there is: a connection that hangs leaves time for another. Then the server is slow.
            async with asyncio.timeout(self._lease.duration_s if self._failure else self._renew_within_s / 2):
                holds = await candidate.take(only_renew=has_led)
        except (ClusterError, TimeoutError) as error:
            why = str(error) or "the API server did not answer in time"
            if why != self._failure and not isinstance(error, ConflictError):  # of which the next look tells more
                _logger.warning("Lease %s/%s: %s", self._lease.namespace, self._lease.name, why)
            self.stands_by, self._failure = False, why
            return None, why
        self._failure = ""
        if not (holds or self.stands_by or has_led):
            _logger.info("%s works; this one waits for its Lease", candidate.holder)
        self.stands_by = not holds
        return holds, f"{candidate.holder or 'nobody'} has it"

    def _say(self, led: bool, why: str) -> bool:
        """Tell, where it changed, whether this process may write, and return it."""
        leads = self.may_write()
        if led and not leads:
            _logger.warning("nothing is written until the Lease can be renewed: %s", why)
        elif leads and not self._led.done():
            _logger.info("this one works: it has the Lease %s/%s", self._lease.namespace, self._lease.name)
            self._led.set_result(None)
        elif leads and not led:
            _logger.info("the Lease is renewed, and nobody else had it: this one goes on")
        return leads


class LeaderCollector(Collector):
    """What /metrics says of it, by what is served: the whole ``Cluster``, or named namespaces (``Namespaced``)."""

    def __init__(self, leadership: Leadership | None = None, scope: str = "Cluster") -> None:
        self._leadership, self._scope = leadership, scope

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the samples of one scrape; who works alone leads."""
        leads = self._leadership is None or self._leadership.may_write()
        transitions = None if self._leadership is None else self._leadership.transitions
        for name, text, value in (
            ("specdecode_leader", "1 where this replica works, 0 where it waits for the Lease.", leads),
            ("specdecode_lease_transitions", "How many times the Lease of the replicas changed hands.", transitions),
        ):
            family = GaugeMetricFamily(name, text, labels=("scope",))
            if value is not None:
                family.add_metric((self._scope,), value)
            yield family


def end_at_once(why: str) -> None:
    """End the process, whatever it is about: another one works."""
    _logger.critical("the Lease is lost, and this process ends: %s", why)
    logging.shutdown()
    os._exit(EXIT_STATUS)


@contextmanager
def holding(leadership: Leadership | None) -> Iterator[None]:
    """Ask for the Lease while the block runs, and give it back."""
    if leadership is None:
        yield
        return
    leadership.start()
    try:
        yield
    finally:
        leadership.stop()


def _now_s() -> float:
    """Seconds on a clock that nobody sets, and that goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
