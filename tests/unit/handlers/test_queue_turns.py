"""Whose turn it is: no namespace waits for all objects of another, and no change for all that are looked at again."""

import asyncio
from collections.abc import Callable

import pytest

from specdecode_operator.api.deployment import Key
from specdecode_operator.handlers.queue import WorkQueue
from tests.unit.handlers.test_queue import Counted, Failing, Retries, running

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
async def test_who_fills_one_namespace_holds_up_no_other(add: Callable[[WorkQueue, Key], None]) -> None:
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
async def test_a_change_goes_ahead_of_what_children_say_and_that_of_what_is_only_looked_at_again(
    first: Callable[[WorkQueue, Key], None], then: Callable[[WorkQueue, Key], None]
) -> None:
    queue = WorkQueue(workers=1)
    for key in CROWD:
        then(queue, key)
    first(queue, CROWD[-1])
    assert await taken(queue, len(CROWD)) == [CROWD[-1], *CROWD[:-1]]


@pytest.mark.parametrize("waiting", [LONE, OWN], ids=["of another namespace", "of theirs"])
@pytest.mark.parametrize("add", [WorkQueue.add_calmly, WorkQueue.add_soon])
async def test_what_is_only_looked_at_again_comes_to_its_turn_while_others_change_all_the_time(
    add: Callable[[WorkQueue, Key], None], waiting: Key
) -> None:
    queue, seen = WorkQueue(workers=1), asyncio.Event()

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
async def test_who_changes_much_holds_up_what_comes_of_it_in_that_namespace_alone(
    add: Callable[[WorkQueue, Key], None],
) -> None:
    queue = WorkQueue(workers=1)
    for key in (OWN, LONE):
        add(queue, key)
    for key in CROWD[:12]:
        queue.add(key)
    order = await taken(queue, 14)
    assert (order.index(LONE), order.index(OWN)) == (3, 13)


async def test_what_failed_at_one_moment_does_not_come_back_at_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
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
async def test_a_change_that_fails_goes_ahead_when_it_is_tried_again(
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


async def test_what_children_say_right_after_a_look_brings_one_more_and_a_change_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue, work = WorkQueue(workers=1), Counted()
    async with running(queue, work):
        timers = Retries(monkeypatch)
        queue.add_soon(LONE)
        await work.ran(1)
        for _ in range(3):
            queue.add_soon(LONE)
        assert work.runs == 1
        timers.fire()
        await work.ran(2)
        queue.add_soon(LONE)
        queue.add(LONE)
        await work.ran(3)
        timers.fire()
        queue.add(CROWD[0])
        await work.ran(4)
        assert queue.longest_wait_s() == 0, "the change was looked at with all that was told"


@pytest.mark.parametrize("changed", [False, True], ids=["children", "the object, too"])
async def test_what_came_during_a_look_brings_one_more_and_only_a_change_at_once(
    monkeypatch: pytest.MonkeyPatch, *, changed: bool
) -> None:
    queue, work = WorkQueue(workers=1), Counted()
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


async def test_what_is_looked_at_again_comes_to_its_turn_while_children_change_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue, order, done = WorkQueue(workers=1), list[Key](), asyncio.Event()

    async def work(key: Key) -> None:
        order.append(key)
        timers.fire()
        for each in CROWD:
            if each != key:
                queue.add_soon(each)
        if len(order) == 2 * len(CROWD):
            done.set()

    queue.add_soon(CROWD[0])
    queue.add_calmly(LONE)
    async with running(queue, work):
        timers = Retries(monkeypatch)
        await done.wait()
    assert LONE in order[:8]


@pytest.mark.parametrize("then", [WorkQueue.add_soon, WorkQueue.add_calmly])
async def test_a_change_during_a_look_stays_one_whatever_is_told_after_it(
    monkeypatch: pytest.MonkeyPatch, then: Callable[[WorkQueue, Key], None]
) -> None:
    queue, order = WorkQueue(workers=1), list[Key]()
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


async def test_what_is_gone_is_not_looked_at_after_its_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, work = WorkQueue(workers=1), Counted()
    async with running(queue, work):
        timers = Retries(monkeypatch)
        queue.add_soon(LONE)
        await work.ran(1)
        queue.add_soon(LONE)
        queue.forget(LONE)
        assert timers.fire() == 1
        assert queue.longest_wait_s() == 0, "nothing waits"
