import asyncio
from collections.abc import AsyncIterator

import pytest

from specdecode_operator.replay.clocks import TimerClock


@pytest.fixture
async def clock() -> AsyncIterator[TimerClock]:
    made = TimerClock(asyncio.get_running_loop())
    yield made
    made.stop()


async def until(clock: TimerClock, when_ms: float) -> None:
    reached = asyncio.Event()
    clock.call_at(when_ms, reached.set)
    async with asyncio.timeout(120):
        await reached.wait()


async def test_timers_go_off_in_order_and_not_before_their_moment(clock: TimerClock) -> None:
    seen: list[tuple[str, float]] = []
    begin_ms = clock.now_ms()
    for name, after_ms in (("second", 20.0), ("first", 10.0), ("third", 20.0)):
        clock.call_at(begin_ms + after_ms, lambda name=name: seen.append((name, clock.now_ms() - begin_ms)))
    await until(clock, begin_ms + 30)
    assert [name for name, _ in seen] == ["first", "second", "third"]
    assert all(at_ms >= least_ms - 0.1 for (_, at_ms), least_ms in zip(seen, (10, 20, 20), strict=True))


async def test_a_moment_that_is_over_is_the_next_turn(clock: TimerClock) -> None:
    seen: list[str] = []
    clock.call_at(-5.0, lambda: seen.append("over"))
    assert seen == []
    await until(clock, clock.now_ms())
    assert seen == ["over"]


async def test_what_is_set_while_timers_go_off_waits_for_the_loop_s_next_turn(clock: TimerClock) -> None:
    loop, seen = asyncio.get_running_loop(), list[str]()

    def first() -> None:
        seen.append("timer")
        loop.call_soon(seen.append, "loop")
        clock.call_at(0.0, lambda: seen.append("timer again"))

    clock.call_at(0.0, first)
    await until(clock, clock.now_ms() + 5)
    assert seen == ["timer", "loop", "timer again"]


async def test_time_stands_still_while_timers_go_off(clock: TimerClock) -> None:
    seen: set[float] = set()
    for _ in range(50):
        clock.call_at(0.0, lambda: seen.add(clock.now_ms()))
    await until(clock, clock.now_ms())
    assert len(seen) == 1


async def test_a_cancelled_timer_does_not_go_off(clock: TimerClock) -> None:
    seen: list[str] = []
    ticket = clock.call_at(clock.now_ms() + 1, lambda: seen.append("cancelled"))
    ticket.cancel()
    await until(clock, clock.now_ms() + 5)
    assert seen == []


async def test_one_that_fails_does_not_stop_the_clock(clock: TimerClock) -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))

    def fail() -> None:
        raise ValueError

    clock.call_at(0.0, fail)
    await until(clock, clock.now_ms() + 1)
    assert [type(each) for each in told] == [ValueError]


async def test_stopped_nothing_happens_any_more(clock: TimerClock) -> None:
    seen: list[str] = []
    clock.call_at(clock.now_ms() + 1, lambda: seen.append("before"))
    clock.stop()
    clock.stop()
    clock.call_at(0.0, lambda: seen.append("after"))
    other = TimerClock(asyncio.get_running_loop())
    await until(other, other.now_ms() + 5)
    other.stop()
    assert seen == []
