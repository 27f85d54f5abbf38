"""Work queue that deduplicates keys and serves namespaces in turn."""

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Container

from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.client import ClusterError

Work = Callable[[Key], Awaitable[None]]
Check = Callable[[Key, bool], Awaitable[bool]]
"""Returns whether a key needs work; the second argument is whether its turn in a resync has come."""

_FIRST_RETRY_S = 1.0
_LAST_RETRY_S = 60.0
_MOST_DOUBLINGS = 10
_LEAST_OF_DELAY = 0.75
"""Minimum of the random factor of a delay, which spreads the retries of keys that failed together."""

_REST_S = 0.5
"""Minimum time between reconciles of an object whose children change. A start causes ten events within 2 s."""

_GATHER_S = 0.25
"""Delay after a child's first event. More usually follow: the pod becomes ready, then its workload."""

_CALM_TURN = 4
"""Every 4th turn is for a key that can wait, in a namespace without user changes."""

_ANY_TURN = 20
"""Every 20th turn is for a key that can wait, in any namespace."""

_logger = logging.getLogger(__name__)


class _Line:
    """Keys, taken from each namespace in turn, so that a namespace with many keys does not delay the others."""

    def __init__(self) -> None:
        self.namespaces: OrderedDict[str, dict[Key, None]] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self.namespaces.get(key.namespace, ())

    def add(self, key: Key) -> None:
        self.namespaces.setdefault(key.namespace, {})[key] = None

    def take(self, but_not_in: Container[str] = ()) -> Key | None:
        """Return the oldest key of the namespace whose turn it is."""
        namespace = next((each for each in self.namespaces if each not in but_not_in), None)
        if namespace is None:
            return None
        key = next(iter(self.namespaces[namespace]))
        self.discard(key)
        if namespace in self.namespaces:
            self.namespaces.move_to_end(namespace)
        return key

    def discard(self, key: Key) -> None:
        keys = self.namespaces.get(key.namespace, {})
        keys.pop(key, None)
        if not keys:
            self.namespaces.pop(key.namespace, None)


class WorkQueue:
    """Runs one coroutine per key; runs it again after a failure, and if the key was added meanwhile.

    User changes come before changed children and resyncs, so they need not wait for a thousand objects that start or
    are resynced. Many user changes in one namespace delay only later keys of that namespace.
    """

    def __init__(self, workers: int = 16, gather_s: float = _GATHER_S) -> None:
        self._workers, self._gather_s = workers, gather_s
        self._urgent, self._news, self._calm = _Line(), _Line(), _Line()
        self._turns = 0
        self._to_take = asyncio.Semaphore(0)
        self._waiting: dict[Key, float] = {}
        self._resync_due: set[Key] = set()
        """Waiting keys whose turn in a resync has come."""
        self._unchecked: set[Key] = set()
        """Keys that skip the check."""
        self._running: set[Key] = set()
        self._again: dict[Key, Callable[[Key], None]] = {}
        """Functions that add keys again that were added while a worker had them."""
        self._resting: dict[Key, asyncio.TimerHandle] = {}
        self._after_rest: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._retries: dict[Key, asyncio.TimerHandle] = {}
        self._last_done_s = time.monotonic()
        self.is_open = True
        """Whether the queue accepts keys. A standby replica drops them, and adds all keys when it becomes leader."""

    def add(self, key: Key) -> None:
        """Add a key whose object changed, possibly through a user's edit. Idempotent until work on it starts."""
        if not self.is_open:
            return
        if key in self._running:
            self._again[key] = self.add
            return
        self._news.discard(key)
        self._calm.discard(key)
        self._urgent.add(key)
        self._count(key)

    def add_soon(self, key: Key) -> None:
        """Add a key whose children changed, after a short delay that collects more events; user changes come first."""
        if not self.is_open:
            return
        if key in self._running:
            if self._again.get(key) != self.add:
                self._again[key] = self.add_soon
            return
        if key in self._waiting and key not in self._calm:
            return
        if key not in self._resting and self._gather_s:
            self._rest(key, self._gather_s)
        if key in self._resting:
            self._after_rest.add(key)
        else:
            self._add_news(key)

    def _add_news(self, key: Key) -> None:
        if key in self._calm or key not in self._waiting:
            self._calm.discard(key)
            self._news.add(key)
            self._count(key)

    def add_calmly(self, key: Key) -> None:
        """Add a key at low priority, to be worked on without a check."""
        if not self.is_open:
            return
        self._unchecked.add(key)
        if key in self._running:
            self._again.setdefault(key, self.add_calmly)
        elif key not in self._waiting:
            self._calm.add(key)
            self._count(key)

    def add_turn(self, key: Key) -> None:
        """Add a key whose turn in a resync has come, unless a worker has it or it backs off after failures."""
        if self.is_open and not any(key in each for each in (self._retries, self._running, self._waiting)):
            self._resync_due.add(key)
            self._calm.add(key)
            self._count(key)

    def _count(self, key: Key) -> None:
        if key not in self._waiting:
            self._waiting[key] = time.monotonic()
            self._to_take.release()

    def forget(self, key: Key) -> None:
        """Drop the state of the key of a deleted object."""
        self._failures.pop(key, None)
        self._again.pop(key, None)
        self._after_rest.discard(key)
        self._cancel_retry(key)

    def is_pending(self, key: Key) -> bool:
        """Return whether work on a key waits, runs, was cancelled, or is to be repeated."""
        return any(key in each for each in (self._waiting, self._running, self._again, self._after_rest, self._retries))

    def longest_wait_s(self) -> float:
        """Return how long the oldest key has waited for a worker."""
        oldest = next(iter([*self._waiting.values()]), None)  # A copy, because another thread reads it.
        return 0.0 if oldest is None else time.monotonic() - oldest

    def idle_s(self) -> float:
        """Return the time since a worker last finished a key."""
        return time.monotonic() - self._last_done_s

    async def run(self, work: Work, check: Check | None = None) -> None:
        """Run the workers until cancelled; call once per queue. ``check`` is asked unless the key skips it."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._workers):
                group.create_task(self._run_worker(work, check))

    async def _run_worker(self, work: Work, check: Check | None) -> None:
        while True:
            await self._to_take.acquire()
            key, ask_again = self._take()
            del self._waiting[key]
            is_unchecked, is_turn = key in self._unchecked, key in self._resync_due
            self._unchecked.discard(key)
            self._resync_due.discard(key)
            self._running.add(key)
            self._after_rest.discard(key)
            self._cancel_retry(key)
            try:
                if is_unchecked or check is None or await check(key, is_turn):
                    await work(key)
            except Exception as error:  # noqa: BLE001  one object must not stop the others
                self._retry_later(key, error, ask_again)
            else:
                self._failures.pop(key, None)
                self._rest(key, _REST_S)
            # A cancelled worker does not get here, so its key stays pending.
            self._running.discard(key)
            self._last_done_s = time.monotonic()
            if ask := self._again.pop(key, None):
                ask(key)
            await asyncio.sleep(0)  # Otherwise keys whose work never awaits would block the event loop.

    def _take(self) -> tuple[Key, Callable[[Key], None]]:
        """Return the key whose turn it is, and the function to add it again, so that a failed change stays urgent."""
        self._turns += 1
        news, calm = (self._news, self.add_soon), (self._calm, self.add_calmly)
        if self._turns % _CALM_TURN == 0:
            busy = () if self._turns % _ANY_TURN == 0 else self._urgent.namespaces
            for line, ask in (news, calm) if self._turns % (2 * _CALM_TURN) == 0 else (calm, news):
                if key := line.take(but_not_in=busy):
                    return key, ask
        taken = ((line.take(), ask) for line, ask in ((self._urgent, self.add), news, calm))
        return next((key, ask) for key, ask in taken if key)

    def _retry_later(self, key: Key, error: Exception, ask_again: Callable[[Key], None]) -> None:
        self._unchecked.add(key)
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        # The exponent is also bounded, because an object may fail for days.
        delay_s = min(_FIRST_RETRY_S * 2 ** min(failures - 1, _MOST_DOUBLINGS), _LAST_RETRY_S)
        delay_s *= random.uniform(_LEAST_OF_DELAY, 1)  # noqa: S311  no secret
        kind = type(error).__name__
        # A ClusterError names the request, and occurs each time the API server is slow or unavailable.
        show_traceback = failures == 1 and not isinstance(error, ClusterError)
        _logger.warning("%s: %s: %s; next try in %.0f s", key, kind, error, delay_s, exc_info=show_traceback)
        self._retries[key] = asyncio.get_running_loop().call_later(delay_s, ask_again, key)

    def _rest(self, key: Key, rest_s: float) -> None:
        """Hold back reconciles of a key for child events for ``rest_s``."""
        if earlier := self._resting.pop(key, None):
            earlier.cancel()
        self._resting[key] = asyncio.get_running_loop().call_later(rest_s, self._end_rest, key)

    def _end_rest(self, key: Key) -> None:
        del self._resting[key]
        if key in self._after_rest:
            self._after_rest.discard(key)
            self._add_news(key)

    def _cancel_retry(self, key: Key) -> None:
        if handle := self._retries.pop(key, None):
            handle.cancel()
