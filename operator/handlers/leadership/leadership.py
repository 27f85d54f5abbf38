"""Which of several operators works: the one that holds a Lease of their namespace.

The official client has a leader election that does not keep its word: a connection
that fails ends its loop and not the work, a request may outlast the Lease, it goes by the
wall clock, and the Lease is never given back.
"""

import asyncio
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import Any, Final

from prometheus_client import Gauge

from specdecode_operator.cluster.client import Cluster
from specdecode_operator.cluster.errors import ClusterError, ConflictError
from specdecode_operator.handlers.leadership.lease import Candidate, LeaseName

RENEW_WITHIN_S: Final = 20.0
"""Whoever could not renew its Lease for so long ends, well before another may take it."""

_RETRY_S: Final = 5.0
_REQUEST_S: Final = 10.0

EXIT_STATUS: Final = 3
"""Of a process that has lost its Lease."""

_logger = logging.getLogger(__name__)


class Leadership:
    """A thread that holds the Lease while the operator works, however busy its event loop is.

    ``lost`` is called, with the reason, when the Lease could not be renewed.
    """

    def __init__(self, lease: LeaseName, gauge: Gauge, lost: Callable[[str], None]) -> None:
        self._lease, self._gauge, self._lost = lease, gauge, lost
        self._loop = asyncio.new_event_loop()
        self._ends, self._has_it = asyncio.Event(), Event()
        self.stands_by = False
        """Whether the API server has said that another one works."""
        self._thread = Thread(target=self._run, name="leadership", daemon=True)

    def start(self) -> None:
        """Begin to ask for the Lease."""
        self._thread.start()

    def wait(self) -> None:
        """Wait until this process has the Lease."""
        self._has_it.wait()

    def stop(self) -> None:
        """Give the Lease back, if this process has it: nothing may be written after that."""
        with suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._ends.set)
        self._thread.join(timeout=_REQUEST_S)

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
                async with asyncio.timeout(_REQUEST_S):
                    await candidate.release()
        except (ClusterError, TimeoutError) as error:
            _logger.warning("the Lease was not given back, and ends by itself: %s", error)
        finally:
            await cluster.close()

    async def _renew(self, candidate: Candidate) -> bool:
        """Ask for the Lease and renew it until the end is asked for; return whether it is to be given back."""
        until_s = math.inf
        while not self._ends.is_set():
            asked_s = time.monotonic()
            holds, why = await self._look(candidate, min(_REQUEST_S, until_s - asked_s))
            if holds:
                until_s = asked_s + RENEW_WITHIN_S
                self._begin()
            pause_s = min(_RETRY_S, until_s - time.monotonic())
            if self._has_it.is_set() and (holds is False or pause_s <= 0):
                self._gauge.set(0)
                self._lost(why)
                return False
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ends.wait(), pause_s)
        return self._has_it.is_set()

    async def _look(self, candidate: Candidate, within_s: float) -> tuple[bool | None, str]:
        """Return whether the Lease is held, None where that cannot be told, and why not."""
        try:
            async with asyncio.timeout(max(0.0, within_s)):
                holds = await candidate.take()
        except (ClusterError, TimeoutError) as error:
            why = str(error) or "the API server did not answer in time"
            if not isinstance(error, ConflictError):  # or somebody wrote in between: the next look tells who
                _logger.warning("Lease %s/%s: %s", self._lease.namespace, self._lease.name, why)
            self.stands_by = False
            return None, why
        if not (holds or self.stands_by or self._has_it.is_set()):
            _logger.info("%s works; this one waits for its Lease", candidate.holder)
        self.stands_by = not holds
        return holds, f"{candidate.holder} has it"

    def _begin(self) -> None:
        if not self._has_it.is_set():
            _logger.info("this one works: it has the Lease %s/%s", self._lease.namespace, self._lease.name)
            self._gauge.set(1)
            self._has_it.set()


def leader_gauge() -> Gauge:
    """Return what /metrics says of it, by what is served: the whole `Cluster`, or named namespaces (`Namespaced`)."""
    text = "1 where this replica works, 0 where it waits for the Lease."
    return Gauge("specdecode_leader", text, ("scope",), registry=None)


def end_at_once(why: str) -> None:
    """End the process, whatever it is about: another one may work from now on."""
    _logger.critical("the Lease is lost, and this process ends: %s", why)
    logging.shutdown()
    os._exit(EXIT_STATUS)


@contextmanager
def working(leadership: Leadership | None) -> Iterator[None]:
    """Wait for the Lease, let the block work while it is held, and give it back."""
    if leadership is None:
        yield
        return
    # Until kopf sets its own: a process that is the first of its container ignores what it has no handler for.
    before = signal.signal(signal.SIGTERM, _exit)
    leadership.start()
    try:
        leadership.wait()
        yield
    finally:
        leadership.stop()
        signal.signal(signal.SIGTERM, before)


def _exit(*_: Any) -> None:
    raise SystemExit(0)
