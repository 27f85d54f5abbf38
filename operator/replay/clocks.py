"""Clocks of replayed engines: real time, scaled time, and virtual time.

The event loop's timers resolve only to whole milliseconds; the real-time clock uses timerfd where it exists.
"""

import asyncio
import ctypes
import heapq
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

from specdecode_operator.replay.engine import Clock, Ticket


@dataclass(frozen=True)
class ScaledClock:
    """Clock on which one second passes in ``scale`` seconds of the clock below."""

    clock: Clock
    scale: float

    def now_ms(self) -> float:
        """Return the current time."""
        return self.clock.now_ms() / self.scale

    def call_at(self, when_ms: float, callback: Callable[[], None]) -> Ticket:
        """Call back at that time, or as soon as possible if it has passed."""
        return self.clock.call_at(when_ms * self.scale, callback)


class _Timer(list[Any]):
    """Heap entry: time in ms, sequence number, which orders equal times, and callback."""

    __slots__ = ()

    def cancel(self) -> None:
        self[2] = None


@dataclass
class VirtualClock:
    """Time that passes only while `run` is called, from one timer to the next."""

    _now_ms: float = 0.0
    _timers: list[_Timer] = field(default_factory=list)
    _numbers: "count[int]" = field(default_factory=count)

    def now_ms(self) -> float:
        """Return the current time."""
        return self._now_ms

    def call_at(self, when_ms: float, callback: Callable[[], None]) -> Ticket:
        """Call back at that time; timers of the same time go off in the order in which they were set."""
        timer = _Timer((max(when_ms, self._now_ms), next(self._numbers), callback))
        heapq.heappush(self._timers, timer)
        return timer

    def run(self, until_ms: float = float("inf")) -> None:
        """Advance the time until no timer is left, or to that time."""
        while self._timers and self._timers[0][0] <= until_ms:
            self._now_ms, _, callback = heapq.heappop(self._timers)
            if callback is not None:
                callback()
        if until_ms != float("inf"):
            self._now_ms = max(self._now_ms, until_ms)


LATE_MS: Final = 1.0
_EARLY_MS: Final = 0.05  # timers due this soon go off now: setting the kernel's timer would take as long
_NS_PER_MS: Final = 1_000_000
_NS_PER_S: Final = 1_000_000_000


class TimerClock:
    """Clock on the running event loop, in milliseconds since it was created. Once stopped, no timer fires."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.zero_ns = time.monotonic_ns()
        self._loop = loop
        self._timers: list[_Timer] = []
        self._numbers = count()
        self._armed_ms = float("inf")  # when the alarm goes off; -inf if a turn is scheduled or the clock has stopped
        # Timers that went off, and those of them later than LATE_MS.
        self.timers = 0
        self.late_timers = 0
        self._turn_ms: float | None = None
        self._stopped = False
        make = _TimerFd if sys.platform == "linux" else _LoopTimer
        self._alarm: _TimerFd | _LoopTimer = make(loop, self._ring)

    def now_ms(self) -> float:
        """Return the current time. All callbacks of one turn of the event loop get the time at which the turn began."""
        return (time.monotonic_ns() - self.zero_ns) / _NS_PER_MS if self._turn_ms is None else self._turn_ms

    def call_at(self, when_ms: float, callback: Callable[[], None]) -> Ticket:
        """Call back at that time, or in the loop's next turn if it has passed."""
        timer = _Timer((when_ms, next(self._numbers), callback))
        heapq.heappush(self._timers, timer)
        if when_ms < self._armed_ms:
            self._arm(when_ms)
        return timer

    def stop(self) -> None:
        """Cancel all timers."""
        self._stopped = True
        self._armed_ms = float("-inf")
        self._alarm.close()

    def _arm(self, when_ms: float) -> None:
        self._armed_ms = when_ms
        if when_ms <= self.now_ms() + _EARLY_MS:
            self._armed_ms = float("-inf")
            self._loop.call_soon(self._ring)
        else:
            self._alarm.ring_at(self.zero_ns + int(when_ms * _NS_PER_MS))

    def _ring(self) -> None:
        if self._stopped:
            return
        timers, now_ms, due = self._timers, self.now_ms(), []
        while timers and timers[0][0] <= now_ms + _EARLY_MS:
            due.append(heapq.heappop(timers))
        self.timers += len(due)
        if due and due[0][0] < now_ms - LATE_MS:
            self.late_timers += sum(timer[0] < now_ms - LATE_MS for timer in due)
        # Timers that these set wait for the next turn, so that the loop reads and writes between tokens.
        self._armed_ms = float("-inf")
        self._turn_ms = now_ms
        for timer in due:
            callback = timer[2]
            if callback is not None:
                try:
                    callback()
                except Exception as error:  # noqa: BLE001  one request's error must not end the others
                    self._loop.call_exception_handler({"message": "a timer's callback failed", "exception": error})
        self._turn_ms = None
        if self._stopped:
            return
        self._armed_ms = float("inf")
        if timers:
            self._arm(timers[0][0])


class _TimerFd:
    """Linux's timerfd, which the loop watches like a socket."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._libc = ctypes.CDLL(None, use_errno=True)
        # Both constants are those of open(2): TFD_NONBLOCK, TFD_CLOEXEC.
        self._file = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "no timer: the kernel provides no timerfd")
        # struct itimerspec: seconds and nanoseconds of the interval, then of the start.
        self._spec = (ctypes.c_long * 4)()
        loop.add_reader(self._file, self._readable)

    def ring_at(self, when_ns: int) -> None:
        # A time of 0 would disarm the timer.
        self._spec[2], self._spec[3] = divmod(max(when_ns, 1), _NS_PER_S)
        self._libc.timerfd_settime(self._file, 1, ctypes.byref(self._spec), None)  # 1: TFD_TIMER_ABSTIME

    def close(self) -> None:
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1

    def _readable(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:  # set to a later time after it had gone off
            return
        self._ring()


class _LoopTimer:
    """The loop's own timer, to a millisecond: for systems without timerfd."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._handle: asyncio.TimerHandle | None = None

    def ring_at(self, when_ns: int) -> None:
        self.close()
        delay_s = max(0.0, (when_ns - time.monotonic_ns()) / _NS_PER_S)
        self._handle = self._loop.call_later(delay_s, self._ring)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
