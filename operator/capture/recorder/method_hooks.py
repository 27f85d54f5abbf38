"""Wrap four methods of vLLM, and pass what they see to a collector while there is one.

Each hook calls the original with the same arguments, returns its result and lets its exceptions pass. Errors of the
recorder itself are counted and never reach the engine.
"""

import asyncio
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from .collector import Collector
from .vllm_internals import EngineClasses


class Switch:
    """State of the hooks in one process. The engine's event loop reads it in every hook."""

    __slots__ = ("_due", "_loop", "collector", "has_work", "is_waiting", "processor")

    def __init__(self, collector: Collector | None = None) -> None:
        self.collector = collector  # None: asleep
        self.processor: Any = None  # vLLM's OutputProcessor, from the first request on
        self.is_waiting = False  # whether vLLM has processed all messages that it has, and waits for another
        self.has_work = True  # whether to call run_due before vLLM waits; initially to learn the event loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due: _Action | None = None

    def run_due(self) -> None:
        """Run the action that is due; vLLM has processed one message, and has not requested the next."""
        self.has_work = False
        self._loop = asyncio.get_running_loop()
        due, self._due = self._due, None
        if due is not None:
            due.run()

    def between_messages(self, action: Callable[[], None], timeout_s: float) -> bool:
        """Run an action while the engine's event loop processes no message; return whether it ran.

        It runs on the event loop, and is called by one other thread at a time. Counters of vLLM and of the hooks agree
        only between messages.
        """
        loop = self._loop
        if loop is None:
            return False
        if not loop.is_running():  # the process ends
            if self.is_waiting:
                action()
            return self.is_waiting
        due = self._due = _Action(action)
        self.has_work = True
        try:
            loop.call_soon_threadsafe(self._run_due_if_waiting)
        except RuntimeError:  # closed by now
            pass
        else:
            due.wait(timeout_s)
        self._due = None
        return due.finish()

    def _run_due_if_waiting(self) -> None:
        if self.is_waiting:
            self.run_due()


class _Action:
    """An action of another thread, which may give up waiting for it."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._is_given_up = False
        self._error: Exception | None = None

    def run(self) -> None:
        with self._lock:
            if self._is_given_up:
                return
            try:
                self._action()
            except Exception as error:  # noqa: BLE001 (the engine must not see any)
                self._error = error
            self._ended.set()

    def wait(self, timeout_s: float) -> None:
        self._ended.wait(timeout_s)

    def finish(self) -> bool:
        """Return whether the action ran; raise its error. If it has not run, it never will."""
        with self._lock:
            self._is_given_up = True
        if self._error is not None:
            raise self._error
        return self._ended.is_set()


class Hooks:
    """Wrapped methods of one process."""

    def __init__(self, classes: EngineClasses, collector: Collector | None = None) -> None:
        """Prepare the hooks; without a collector, they are asleep."""
        self.switch = Switch(collector)
        self._methods = [
            (owner, wrap.__name__.removeprefix("_"), getattr(owner, wrap.__name__.removeprefix("_")), wrap)
            for owner, wrap in (
                (classes.output_processor, _add_request),
                (classes.output_processor, _process_outputs),
                (classes.output_processor, _abort_requests),
                (classes.client, _get_output_async),
            )
        ]

    def install(self) -> None:
        """Wrap the methods."""
        for owner, name, original, wrap in self._methods:
            setattr(owner, name, functools.wraps(original)(wrap(self.switch, original)))

    def remove(self) -> None:
        """Restore the originals. A pending message still passes the old hook, which is harmless."""
        for owner, name, original, _ in self._methods:
            setattr(owner, name, original)


def _add_request(switch: Switch, original: Callable[..., Any]) -> Callable[..., Any]:
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        collector = switch.collector
        switch.processor = self
        if collector is None:
            return original(self, request, *args, **kwargs)
        arrival_monotonic_s = time.monotonic()
        result = original(self, request, *args, **kwargs)
        try:
            collector.admit(request, arrival_monotonic_s)
        except Exception as error:  # noqa: BLE001 (the engine must not see any)
            collector.fail(error)
        return result

    return add_request


def _process_outputs(switch: Switch, original: Callable[..., Any]) -> Callable[..., Any]:
    def process_outputs(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        collector = switch.collector
        if collector is None:
            return original(self, engine_core_outputs, *args, **kwargs)
        try:
            collector.before_outputs(self, engine_core_outputs)
        except Exception as error:  # noqa: BLE001 (the engine must not see any)
            collector.fail(error)
        result = original(self, engine_core_outputs, *args, **kwargs)
        try:
            collector.after_outputs(self, engine_core_outputs)
            if result.reqs_to_abort:
                collector.stop(result.reqs_to_abort, engine_core_outputs)
        except Exception as error:  # noqa: BLE001 (the engine must not see any)
            collector.fail(error)
        return result

    return process_outputs


def _abort_requests(switch: Switch, original: Callable[..., Any]) -> Callable[..., Any]:
    def abort_requests(self: Any, *args: Any, **kwargs: Any) -> Any:
        aborted = original(self, *args, **kwargs)
        collector = switch.collector
        if collector is not None:
            try:
                collector.abort(aborted)
            except Exception as error:  # noqa: BLE001 (the engine must not see any)
                collector.fail(error)
        return aborted

    return abort_requests


def _get_output_async(switch: Switch, original: Callable[..., Any]) -> Callable[..., Any]:
    async def get_output_async(self: Any) -> Any:
        collector = switch.collector
        if collector is not None:
            try:
                # When vLLM requests the next message, it has processed all slices of the previous one.
                collector.settle()
            except Exception as error:  # noqa: BLE001 (the engine must not see any)
                collector.fail(error)
        if switch.has_work:
            switch.run_due()
        switch.is_waiting = True
        message = await original(self)
        switch.is_waiting = False
        collector = switch.collector
        if collector is not None:
            try:
                collector.take(message)
            except Exception as error:  # noqa: BLE001 (the engine must not see any)
                collector.fail(error)
        return message

    return get_output_async
