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
from typing import Any, Final, Protocol

from specdecode_operator.replay.engine import Clock, Ticket


@dataclass(frozen=True)
class ScaledClock:
    """Of two seconds on the clock below, one passes here with a scale of 2."""

    clock: Clock
    scale: float

    def now_ms(self) -> float:
        """Return what time it is."""
        return self.clock.now_ms() / self.scale

    def call_at(self, when_ms: float, callback: Callable[[], None]) -> Ticket:
        """Call back at that moment, or as soon as may be where it is over."""
        return self.clock.call_at(when_ms * self.scale, callback)


@dataclass(slots=True)
class _Timer:
    callback: Callable[[], None] | None

    def cancel(self) -> None:
        self.callback = None


@dataclass
class VirtualClock:
    """Time that passes only while `run` is called, from one timer to the next."""

    _now_ms: float = 0.0
    _timers: list[tuple[float, int, _Timer]] = field(default_factory=list)
    _numbers: "count[int]" = field(default_factory=count)

    def now_ms(self) -> float:
        """Return what time it is."""
        return self._now_ms

    def call_at(self, when_ms: float, callback: Callable[[], None]) -> Ticket:
        """Call back at that moment; timers of one moment go off in the order in which they were set."""
        timer = _Timer(callback)
        heapq.heappush(self._timers, (max(when_ms, self._now_ms), next(self._numbers), timer))
        return timer

    def run(self, until_ms: float = float("inf")) -> None:
        """Let time pass until nothing is left to do, or until that moment."""
        while self._timers and self._timers[0][0] <= until_ms:
            self._now_ms, _, timer = heapq.heappop(self._timers)
            if timer.callback is not None:
                timer.callback()
        if until_ms != float("inf"):
            self._now_ms = max(self._now_ms, until_ms)


LATE_MS: Final = 1.0
_EARLY_MS: Final = 0.05
"""What is due so soon goes off now: setting the kernel's timer would take as long."""
_NS_PER_MS: Final = 1_000_000
_NS_PER_S: Final = 1_000_000_000


class _OsTimer(list[Any]):
    """When in ms, a number by which timers of one moment keep their order, and the callback: one object in the heap."""

    __slots__ = ()

    def cancel(self) -> None:
        self[2] = None


class _Alarm(Protocol):
    def ring_at(self, moment_ns: int) -> None:
        """Call back once, at that moment of CLOCK_MONOTONIC, in place of any other moment."""

    def close(self) -> None:
        """Never call back again."""


class TimerClock:
    """A clock on the running event loop. Milliseconds since it was made; stopped, nothing more happens."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.zero_ns = time.monotonic_ns()
        self._loop = loop
        self._timers: list[_OsTimer] = []
        self._numbers = count()
        self._armed_ms = float("inf")  # for when the alarm is set; -inf: it need not be
        # How many timers went off, and how many of them so late that somebody should know.
        self.timers = 0
        self.late_timers = 0
        self._turn_ms: float | None = None
        self._stopped = False
        make = _TimerFd if sys.platform == "linux" else _LoopTimer
        self._alarm: _Alarm = make(loop, self._ring)

    def now_ms(self) -> float:
        """Return what time it is: while timers go off, the moment at which the first of them did."""
        return (time.monotonic_ns() - self.zero_ns) / _NS_PER_MS if self._turn_ms is None else self._turn_ms

    def call_at(self, when_ms: float, callback: Callable[[], None]) -> Ticket:
        """Call back at that moment, or in the loop's next turn where it is over."""
        timer = _OsTimer((when_ms, next(self._numbers), callback))
        heapq.heappush(self._timers, timer)
        if when_ms < self._armed_ms:
            self._arm(when_ms)
        return timer

    def stop(self) -> None:
        """Let no timer go off any more."""
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
        # What these set waits for the next turn, so that the loop reads and writes between one token and the next.
        self._armed_ms = float("-inf")
        self._turn_ms = now_ms
        for timer in due:
            callback = timer[2]
            if callback is not None:
                try:
                    callback()
                except Exception as error:  # noqa: BLE001  one request's must not end all others
                    self._loop.call_exception_handler({"message": "a timer's callback failed", "exception": error})
        self._turn_ms = None
        if self._stopped:
            return
        self._armed_ms = float("inf")
        if timers:
            self._arm(timers[0][0])


class _TimerFd:
    """Linux' timer as a file, which the loop watches like a socket."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._libc = ctypes.CDLL(None, use_errno=True)
        # Both constants are those of open(2): TFD_NONBLOCK, TFD_CLOEXEC.
        self._file = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "no timer: the kernel gives none")
        self._spec = _TimerSpec()
        loop.add_reader(self._file, self._readable)

    def ring_at(self, moment_ns: int) -> None:
        # A moment of 0 would switch it off.
        self._spec.seconds, self._spec.nanoseconds = divmod(max(moment_ns, 1), _NS_PER_S)
        self._libc.timerfd_settime(self._file, _ABSOLUTE, ctypes.byref(self._spec), None)

    def close(self) -> None:
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1

    def _readable(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:  # set to a later moment after it had gone off
            return
        self._ring()


_ABSOLUTE: Final = 1
"""TFD_TIMER_ABSTIME."""


class _TimerSpec(ctypes.Structure):
    """Struct itimerspec: every so often, and the first time."""

    _fields_ = (
        ("every_seconds", ctypes.c_long),
        ("every_nanoseconds", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    )


class _LoopTimer:
    """The loop's own timers, to a millisecond: for systems without timers as files."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._handle: asyncio.TimerHandle | None = None

    def ring_at(self, moment_ns: int) -> None:
        self.close()
        delay_s = max(0.0, (moment_ns - time.monotonic_ns()) / _NS_PER_S)
        self._handle = self._loop.call_later(delay_s, self._ring)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
