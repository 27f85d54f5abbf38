"""What the work queue tells of itself: how long keys wait for a worker, and what failed."""

import asyncio
import logging

import pytest

from specdecode_operator.api.deployment import Key
from specdecode_operator.handlers import queue as module
from specdecode_operator.handlers.queue import WorkQueue
from tests.unit.handlers.test_queue import Failing, Retries, running

A, B = Key("default", "a"), Key("default", "b")


class Clock:
    """Stands still between a test's steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now_s


async def test_the_wait_is_that_of_the_key_that_no_worker_took_for_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, queue, taken = Clock(monkeypatch), WorkQueue(workers=1), asyncio.Event()

    async def work(_: Key) -> None:
        taken.set()
        await asyncio.Event().wait()

    assert queue.longest_wait_s() == 0
    queue.add(A)
    clock.now_s += 3
    queue.add(B)
    queue.add(A)
    clock.now_s += 4
    assert queue.longest_wait_s() == 7
    async with running(queue, work):
        await taken.wait()
        assert queue.longest_wait_s() == 4, "one that is worked on does not wait"


async def test_after_a_success_failures_are_counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    fails = iter([True, True, False, True])
    ran: asyncio.Queue[Key] = asyncio.Queue()

    async def work(key: Key) -> None:
        ran.put_nowait(key)
        if next(fails):
            raise RuntimeError

    queue = WorkQueue(workers=1)
    async with running(queue, work):
        retries = Retries(monkeypatch)
        for _ in range(4):
            queue.add(A)
            await ran.get()
    assert [delay_s for delay_s in retries.delays if delay_s >= 1] == [1, 2, 1], (
        "and between them is the rest after a look"
    )


async def test_a_failure_is_logged_with_its_cause_and_the_next_try_and_traced_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    queue, work = WorkQueue(workers=1), Failing()
    async with running(queue, work):
        Retries(monkeypatch)
        for times in (1, 2):
            queue.add(A)
            await work.ran(times)
    assert [record.getMessage() for record in caplog.records] == [
        "default/a: RuntimeError: it fails; next try in 1 s",
        "default/a: RuntimeError: it fails; next try in 2 s",
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert [bool(record.exc_info) for record in caplog.records] == [True, False]
