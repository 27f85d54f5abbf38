"""The work queue: once a key, one at a time, again after a failure."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from specdecode_operator.api.key import Key
from specdecode_operator.handlers.queue import Work, WorkQueue

A, B = Key("default", "a"), Key("default", "b")
DEADLINE_S = 60


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

    queue = WorkQueue(workers=1)
    async with running(queue, work):
        monkeypatch.setattr(loop, "call_later", call_later)
        queue.add(A)
        await done.wait()
    assert delays[:7] == [1, 2, 4, 8, 16, 32, 60]
    assert max(delays) == 60
