"""The work queue: once a key, one at a time, again after a failure."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from specdecode_operator.api.deployment import Key
from specdecode_operator.handlers import queue as module
from specdecode_operator.handlers.queue import Work, WorkQueue
from tests.support.waiting import DEADLINE_S

A, B = Key("default", "a"), Key("default", "b")


@asynccontextmanager
async def running(queue: WorkQueue, work: Work) -> AsyncIterator[None]:
    task = asyncio.create_task(queue.run(work))
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_key_asked_for_twice_before_work_is_worked_on_once() -> None:
    worked: list[Key] = []
    done = asyncio.Event()

    async def work(key: Key) -> None:
        worked.append(key)
        if key == B:
            done.set()

    queue = WorkQueue(workers=1)
    for key in (A, A, A, B):
        queue.add(key)
    async with running(queue, work):
        await done.wait()
    assert worked == [A, B]


async def test_a_key_that_comes_back_during_work_is_worked_on_again_but_not_at_once() -> None:
    started, go_on, done = asyncio.Event(), asyncio.Event(), asyncio.Event()
    at_once = most_at_once = runs = 0

    async def work(_: Key) -> None:
        nonlocal at_once, most_at_once, runs
        at_once += 1
        runs += 1
        most_at_once = max(most_at_once, at_once)
        started.set()
        await go_on.wait()
        at_once -= 1
        if runs == 2:
            done.set()

    queue = WorkQueue(workers=4)
    queue.add(A)
    async with running(queue, work):
        await started.wait()
        queue.add(A)
        queue.add(A)
        go_on.set()
        await done.wait()
    assert (runs, most_at_once) == (2, 1)


async def test_a_failure_is_tried_again_and_does_not_stop_the_others() -> None:
    attempts: list[Key] = []
    done = asyncio.Event()

    async def work(key: Key) -> None:
        attempts.append(key)
        if attempts.count(A) == 1 and key == A:
            raise RuntimeError
        if attempts.count(A) == 2:
            done.set()

    queue = WorkQueue(workers=1)
    queue.add(A)
    queue.add(B)
    async with running(queue, work):
        await done.wait()
    assert attempts == [A, B, A]


def longest_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each delay be the longest of those that it is drawn from."""
    monkeypatch.setattr(module.random, "uniform", lambda _, longest: longest)


class Retries:
    """Virtual time: retries are armed as the queue asks, and fired only by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        longest_delays(monkeypatch)
        self.delays: list[float] = []
        self._loop = asyncio.get_running_loop()
        self._handles: list[tuple[asyncio.TimerHandle, Callable[..., None], tuple[Any, ...]]] = []
        monkeypatch.setattr(self._loop, "call_later", self._call_later)

    def _call_later(self, delay_s: float, callback: Callable[..., None], *arguments: Any) -> asyncio.TimerHandle:
        self.delays.append(delay_s)
        handle = self._loop.call_at(self._loop.time() + 86_400, callback, *arguments)
        self._handles.append((handle, callback, arguments))
        return handle

    def fire(self) -> int:
        """Let all armed retries come due; return how many there were."""
        due = [each for each in self._handles if not each[0].cancelled()]
        self._handles.clear()
        for handle, callback, arguments in due:
            handle.cancel()
            callback(*arguments)
        return len(due)


class Counted:
    """Work that can be waited for."""

    def __init__(self) -> None:
        self.runs = 0
        self._changed = asyncio.Condition()

    async def __call__(self, _: Key) -> None:
        async with self._changed:
            self.runs += 1
            self._changed.notify_all()

    async def ran(self, times: int) -> None:
        """Wait until it ran so often; the queue acts on its end before anybody else runs."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.runs >= times)


class Failing(Counted):
    """Work that always fails."""

    async def __call__(self, key: Key) -> None:
        await super().__call__(key)
        raise RuntimeError("it fails")


async def test_a_failing_key_that_is_asked_for_meanwhile_has_one_chain_of_retries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue, work = WorkQueue(workers=1), Failing()
    async with running(queue, work):
        retries = Retries(monkeypatch)
        for times in range(1, 4):
            queue.add(A)  # a change of the object, which does not wait for the retry
            await work.ran(times)
        assert retries.fire() == 1, "the retries of earlier failures are off"
        await work.ran(4)


async def test_a_key_that_is_made_anew_begins_with_the_first_delay_and_owes_no_retry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue, work = WorkQueue(workers=1), Failing()
    async with running(queue, work):
        retries = Retries(monkeypatch)
        for times in range(1, 4):
            queue.add(A)
            await work.ran(times)
        queue.forget(A)
        assert retries.fire() == 0
        queue.add(A)
        await work.ran(4)
    assert retries.delays == [1, 2, 4, 1]


async def test_a_key_that_is_forgotten_during_work_is_not_worked_on_again_for_what_came_before() -> None:
    started, go_on, done = asyncio.Event(), asyncio.Event(), asyncio.Event()
    worked: list[Key] = []

    async def work(key: Key) -> None:
        worked.append(key)
        if key == B:
            done.set()
            return
        started.set()
        await go_on.wait()

    queue = WorkQueue(workers=1)
    queue.add(A)
    async with running(queue, work):
        await started.wait()
        queue.add(A)
        queue.forget(A)
        go_on.set()
        queue.add(B)
        await done.wait()
    assert worked == [A, B]


async def test_a_key_that_keeps_failing_for_days_neither_floods_nor_breaks_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Virtual time: retries are armed, but fired by the test."""
    delays: list[float] = []
    pending: list[asyncio.TimerHandle] = []
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def call_later(delay_s: float, *arguments: Any) -> asyncio.TimerHandle:
        delays.append(delay_s)
        handle = loop.call_at(loop.time(), *arguments)
        pending.append(handle)
        return handle

    async def work(key: Key) -> None:
        if key == B:
            done.set()
            return
        if len(delays) == 2000:
            queue.add(B)
            return
        # Events go on coming while it fails: that must not arm a second chain of retries.
        queue.add_unless_failing(A)
        raise RuntimeError

    longest_delays(monkeypatch)
    queue = WorkQueue(workers=1)
    async with running(queue, work):
        monkeypatch.setattr(loop, "call_later", call_later)
        queue.add(A)
        await done.wait()
    assert delays[:7] == [1, 2, 4, 8, 16, 32, 60]
    assert max(delays) == 60
