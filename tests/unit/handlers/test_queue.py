"""The work queue: one worker per key, fair turns, retries, and what it reports."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.client import ClusterError
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


async def test_key_added_several_times_before_work_is_worked_on_once() -> None:
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


async def test_key_added_during_work_is_worked_on_again_but_not_concurrently() -> None:
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


async def test_failed_key_is_retried_without_blocking_others() -> None:
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

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error or RuntimeError("it fails")

    async def __call__(self, key: Key) -> None:
        await super().__call__(key)
        raise self.error


async def test_failing_key_added_meanwhile_has_a_single_retry_timer(
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


async def test_forgotten_key_loses_its_retry_and_restarts_its_backoff(
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


async def test_key_forgotten_during_work_is_not_worked_on_again() -> None:
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


async def test_constantly_failing_key_has_bounded_backoff(
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
        queue.add_turn(A)
        raise RuntimeError

    longest_delays(monkeypatch)
    queue = WorkQueue(workers=1)
    async with running(queue, work):
        monkeypatch.setattr(loop, "call_later", call_later)
        queue.add(A)
        await done.wait()
    assert delays[:7] == [1, 2, 4, 8, 16, 32, 60]
    assert max(delays) == 60


CROWD = [Key("crowd", str(number)) for number in range(20)]
OWN = Key("crowd", "own")
LONE = Key("lone", "one")


async def taken(queue: WorkQueue, count: int) -> list[Key]:
    """Return the keys that one worker takes, in order."""
    worked: list[Key] = []
    done = asyncio.Event()

    async def work(key: Key) -> None:
        worked.append(key)
        if len(worked) == count:
            done.set()

    async with running(queue, work):
        await done.wait()
    return worked


@pytest.mark.parametrize("add", [WorkQueue.add, WorkQueue.add_calmly])
async def test_full_namespace_does_not_delay_other_namespaces(add: Callable[[WorkQueue, Key], None]) -> None:
    queue = WorkQueue(workers=1)
    for key in (*CROWD, LONE):
        add(queue, key)
    order = await taken(queue, len(CROWD) + 1)
    assert order.index(LONE) == 1
    assert [key for key in order if key != LONE] == CROWD


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (WorkQueue.add, WorkQueue.add_soon),
        (WorkQueue.add, WorkQueue.add_calmly),
        (WorkQueue.add_soon, WorkQueue.add_calmly),
    ],
)
async def test_object_changes_precede_child_events_and_both_precede_resync(
    first: Callable[[WorkQueue, Key], None], then: Callable[[WorkQueue, Key], None]
) -> None:
    queue = WorkQueue(workers=1, gather_s=0)
    for key in CROWD:
        then(queue, key)
    first(queue, CROWD[-1])
    assert await taken(queue, len(CROWD)) == [CROWD[-1], *CROWD[:-1]]


@pytest.mark.parametrize("waiting", [LONE, OWN], ids=["of another namespace", "of theirs"])
@pytest.mark.parametrize("add", [WorkQueue.add_calmly, WorkQueue.add_soon])
async def test_low_priority_key_is_not_starved_by_constant_changes(
    add: Callable[[WorkQueue, Key], None], waiting: Key
) -> None:
    queue, seen = WorkQueue(workers=1, gather_s=0), asyncio.Event()

    async def work(key: Key) -> None:
        await asyncio.sleep(0)  # as work does that asks the API server
        if key == waiting:
            seen.set()
        else:
            for each in CROWD:
                queue.add(each)

    add(queue, waiting)
    queue.add(CROWD[0])
    async with running(queue, work):
        await seen.wait()


@pytest.mark.parametrize("add", [WorkQueue.add_calmly, WorkQueue.add_soon])
async def test_many_changes_delay_low_priority_keys_only_in_their_namespace(
    add: Callable[[WorkQueue, Key], None],
) -> None:
    queue = WorkQueue(workers=1, gather_s=0)
    for key in (OWN, LONE):
        add(queue, key)
    for key in CROWD[:12]:
        queue.add(key)
    order = await taken(queue, 14)
    assert (order.index(LONE), order.index(OWN)) == (3, 13)


async def test_retries_of_simultaneous_failures_are_spread_by_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[float] = []
    loop, work = asyncio.get_running_loop(), Failing()

    def call_later(delay_s: float, *_: object) -> asyncio.TimerHandle:
        delays.append(delay_s)
        return loop.call_at(loop.time() + 86_400, lambda: None)

    queue = WorkQueue(workers=1)
    async with running(queue, work):
        monkeypatch.setattr(loop, "call_later", call_later)
        for key in CROWD:
            queue.add(key)
        await work.ran(len(CROWD))
    assert len(set(delays)) > len(CROWD) // 2
    assert 0.75 <= min(delays) <= max(delays) <= 1


@pytest.mark.parametrize(("add", "ahead"), [(WorkQueue.add, True), (WorkQueue.add_calmly, False)])
async def test_failed_change_keeps_its_priority_on_retry(
    monkeypatch: pytest.MonkeyPatch, add: Callable[[WorkQueue, Key], None], ahead: bool
) -> None:
    queue, worked = WorkQueue(workers=1), []
    failed, done = asyncio.Event(), asyncio.Event()

    async def work(key: Key) -> None:
        worked.append(key)
        if worked == [LONE]:
            failed.set()
            raise RuntimeError
        if len(worked) == 1 + len(CROWD) + 1:
            done.set()

    async with running(queue, work):
        retries = Retries(monkeypatch)
        add(queue, LONE)
        await failed.wait()
        for key in CROWD:
            queue.add(key)
        retries.fire()
        await done.wait()
    assert (worked.index(LONE, 1) <= 2) == ahead


async def a_change_includes_child_events(queue: WorkQueue, work: Counted, timers: Retries) -> None:
    """After two runs, add a child event and a change; one run serves both."""
    queue.add_soon(LONE)
    queue.add(LONE)
    await work.ran(3)
    timers.fire()
    queue.add(CROWD[0])
    await work.ran(4)
    assert queue.longest_wait_s() == 0, "the change included the event"


async def test_first_child_event_waits_for_more_and_a_change_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, work = WorkQueue(workers=1), Counted()
    async with running(queue, work):
        timers = Retries(monkeypatch)
        for _ in range(3):
            queue.add_soon(LONE)
        queue.add(CROWD[0])
        await work.ran(1)
        assert queue.is_pending(LONE)
        assert timers.fire() == 2
        await work.ran(2)
        assert not queue.is_pending(LONE)
        timers.fire()
        await a_change_includes_child_events(queue, work, timers)


async def test_child_events_do_not_extend_a_delay_and_the_one_after_work_is_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An object whose children change all the time would never be reconciled."""
    queue, work = WorkQueue(workers=1, gather_s=0.2), Counted()
    async with running(queue, work):
        timers = Retries(monkeypatch)
        for delays in ([0.2], [0.2, 0.5], [0.2, 0.5, 0.5]):
            for _ in range(3):
                queue.add_soon(LONE)
            assert timers.delays == delays
            timers.fire()
            await work.ran(len(delays))


async def test_child_events_after_work_are_merged_and_changes_do_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue, work = WorkQueue(workers=1, gather_s=0), Counted()
    async with running(queue, work):
        timers = Retries(monkeypatch)
        queue.add_soon(LONE)
        await work.ran(1)
        for _ in range(3):
            queue.add_soon(LONE)
        assert work.runs == 1
        timers.fire()
        await work.ran(2)
        await a_change_includes_child_events(queue, work, timers)


@pytest.mark.parametrize("changed", [False, True], ids=["children", "the object, too"])
async def test_child_events_during_work_are_delayed_and_changes_are_not(
    monkeypatch: pytest.MonkeyPatch, *, changed: bool
) -> None:
    queue, work = WorkQueue(workers=1, gather_s=0), Counted()
    began, go_on = asyncio.Event(), asyncio.Event()

    async def held_up(key: Key) -> None:
        began.set()
        await go_on.wait()
        await work(key)

    async with running(queue, held_up):
        timers = Retries(monkeypatch)
        queue.add_soon(LONE)
        await began.wait()
        queue.add_soon(LONE)
        if changed:
            queue.add(LONE)
        else:
            queue.add(CROWD[0])
        go_on.set()
        await work.ran(2)
        if not changed:
            assert queue.longest_wait_s() == 0, "it rests"
            timers.fire()
            await work.ran(3)


@pytest.mark.parametrize("then", [WorkQueue.add_soon, WorkQueue.add_calmly])
async def test_change_during_work_keeps_its_priority_after_child_events(
    monkeypatch: pytest.MonkeyPatch, then: Callable[[WorkQueue, Key], None]
) -> None:
    queue, order = WorkQueue(workers=1, gather_s=0), list[Key]()
    began, go_on, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def held_up(key: Key) -> None:
        order.append(key)
        began.set()
        await go_on.wait()
        if len(order) == 2:
            done.set()

    async with running(queue, held_up):
        Retries(monkeypatch)
        queue.add(LONE)
        await began.wait()
        queue.add(LONE)
        then(queue, LONE)
        queue.add_soon(CROWD[0])
        go_on.set()
        await done.wait()
    assert order[:2] == [LONE, LONE]


A, B = Key("default", "a"), Key("default", "b")


class Clock:
    """Stands still between a test's steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now_s


async def test_longest_wait_is_that_of_the_oldest_waiting_key(monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_success_resets_the_retry_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_failure_is_logged_with_next_try_and_one_traceback(
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


async def test_api_server_failure_is_logged_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    queue, work = WorkQueue(workers=1), Failing(ClusterError("patch sdd a: the API server cannot be reached"))
    async with running(queue, work):
        Retries(monkeypatch)
        queue.add(A)
        await work.ran(1)
    assert [(record.levelno, bool(record.exc_info)) for record in caplog.records] == [(logging.WARNING, False)]


@pytest.mark.parametrize("ask", ["add", "add_soon", "add_calmly", "add_turn"])
async def test_closed_queue_drops_keys(ask: str) -> None:
    queue = WorkQueue(workers=1, gather_s=0)
    queue.is_open = False
    getattr(queue, ask)(A)
    assert not queue.is_pending(A)


async def test_turn_of_a_key_that_backs_off_waits_for_its_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, worked, done = WorkQueue(workers=1), list[Key](), asyncio.Event()
    failed = asyncio.Event()

    async def work(key: Key) -> None:
        worked.append(key)
        if key == B:
            done.set()
            return
        failed.set()
        raise RuntimeError

    async with running(queue, work):
        Retries(monkeypatch)
        queue.add(A)
        await failed.wait()
        queue.add_turn(A)
        queue.add_turn(B)
        await done.wait()
    assert worked == [A, B]


class TestChecks:
    """Keys whose turn has come, or whose object or children changed."""

    async def done(
        self, queue: WorkQueue, *, needs_work: bool, then: Callable[[], None] = lambda: None, steps: int = 1
    ) -> list[str]:
        """Run the workers, and call ``then`` in the check of A; return what was done to A, at least ``steps`` steps."""
        did, done = asyncio.Queue[str](), asyncio.Event()

        async def work(key: Key) -> None:
            if key == B:
                done.set()
            else:
                did.put_nowait("work")

        async def check(key: Key, is_turn: bool) -> bool:
            assert key == A
            did.put_nowait("check of its turn" if is_turn else "check")
            then()
            return needs_work

        task = asyncio.create_task(queue.run(work, check))
        async with asyncio.timeout(DEADLINE_S):
            seen = [await did.get() for _ in range(steps)]
            queue.add_calmly(B)
            await done.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return [*seen, *(did.get_nowait() for _ in range(did.qsize()))]

    @pytest.mark.parametrize(
        ("ask", "check"), [("add_turn", "check of its turn"), ("add_soon", "check"), ("add", "check")]
    )
    async def test_check_decides_about_a_key_that_may_need_no_work(self, ask: str, check: str) -> None:
        for needs_work, steps in ((False, [check]), (True, [check, "work"])):
            queue = WorkQueue(workers=1, gather_s=0)
            getattr(queue, ask)(A)
            assert await self.done(queue, needs_work=needs_work) == steps

    @pytest.mark.parametrize("other", ["add_turn", "add_soon", "add"])
    async def test_key_that_is_sure_to_need_work_is_not_checked(self, other: str) -> None:
        for asks in ((other, "add_calmly"), ("add_calmly", other)):
            queue = WorkQueue(workers=1, gather_s=0)
            for ask in asks:
                getattr(queue, ask)(A)
            assert await self.done(queue, needs_work=False) == ["work"]

    async def test_key_is_sure_to_need_work_only_once(self) -> None:
        queue = WorkQueue(workers=1, gather_s=0)
        queue.add_calmly(A)
        assert await self.done(queue, needs_work=False) == ["work"]
        queue.add(A)
        assert await self.done(queue, needs_work=False) == ["check"]

    async def test_late_deletion_of_an_earlier_object_leaves_the_work_of_its_successor(self) -> None:
        queue = WorkQueue(workers=1, gather_s=0)
        queue.add_calmly(A)
        queue.forget(A)
        assert await self.done(queue, needs_work=False) == ["work"]

    async def test_key_that_a_closed_queue_dropped_is_not_sure_to_need_work(self) -> None:
        queue = WorkQueue(workers=1, gather_s=0)
        queue.is_open = False
        queue.add_calmly(A)
        queue.is_open = True
        queue.add(A)
        assert await self.done(queue, needs_work=False) == ["check"]

    async def test_turn_comes_after_changes_of_other_objects(self) -> None:
        queue = WorkQueue(workers=1, gather_s=0)
        queue.add_turn(A)
        queue.add(B)
        assert await taken(queue, 2) == [B, A]

    async def test_retry_after_a_failure_is_not_checked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        queue, steps = WorkQueue(workers=1, gather_s=0), list[str]()
        failed, done = asyncio.Event(), asyncio.Event()

        async def check(*_: Any) -> bool:
            steps.append("check")
            return len(steps) == 1

        async def work(key: Key) -> None:
            if key == B:
                done.set()
                return
            steps.append("work")
            failed.set()
            raise RuntimeError

        retries = Retries(monkeypatch)
        queue.add(A)
        task = asyncio.create_task(queue.run(work, check))
        async with asyncio.timeout(DEADLINE_S):
            await failed.wait()
            retries.fire()
            queue.add_calmly(B)
            await done.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert steps == ["check", "work", "work"]

    async def test_turn_of_a_key_whose_children_change_meanwhile_stays_its_turn(self) -> None:
        queue = WorkQueue(workers=1, gather_s=0)
        queue.add_turn(A)
        queue.add_soon(A)
        assert await self.done(queue, needs_work=False) == ["check of its turn"]

    @pytest.mark.parametrize(
        ("asks", "step"),
        [
            (["add"], "check"),
            (["add_calmly"], "work"),
            (["add_soon", "add_calmly"], "work"),
            (["add_calmly", "add"], "work"),
        ],
    )
    async def test_key_that_changes_during_its_check_comes_again(self, asks: list[str], step: str) -> None:
        queue, changes = WorkQueue(workers=1, gather_s=0), iter(asks)
        queue.add_turn(A)

        def change_once() -> None:
            for ask in changes:
                getattr(queue, ask)(A)

        did = await self.done(queue, needs_work=False, then=change_once, steps=2)
        assert did == ["check of its turn", step]

    @pytest.mark.parametrize("needs_work", [False, True])
    async def test_children_that_change_during_a_check_are_checked_after_a_rest(self, *, needs_work: bool) -> None:
        queue, asked = WorkQueue(workers=1, gather_s=0), iter([A])
        queue.add_turn(A)

        def change_once() -> None:
            for key in asked:
                queue.add_soon(key)

        work = ["work"] * needs_work
        did = await self.done(queue, needs_work=needs_work, then=change_once, steps=2 + 2 * needs_work)
        assert did == ["check of its turn", *work, "check", *work]


async def test_cancelled_key_stays_pending() -> None:
    started = asyncio.Event()

    async def work(key: Key) -> None:
        if key == A:
            return
        started.set()
        await asyncio.Event().wait()

    queue = WorkQueue(workers=1)
    queue.add(A)
    queue.add(B)
    async with running(queue, work):
        await started.wait()
    assert (queue.is_pending(A), queue.is_pending(B)) == (False, True)
