"""What is put around four methods of vLLM, and taken away again.

Each calls the original exactly as it was called, returns what that returns and lets its exceptions pass.
What the recorder itself does wrong is counted, and never seen by the engine.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

from .collector import Collector
from .shapes import EngineClasses


class Hooks:
    """The wrapped methods of one process."""

    def __init__(self, classes: EngineClasses, collector: Collector) -> None:
        processor, client = classes.output_processor, classes.client
        self._originals = [
            (processor, "add_request", processor.add_request),
            (processor, "process_outputs", processor.process_outputs),
            (processor, "abort_requests", processor.abort_requests),
            (client, "get_output_async", client.get_output_async),
        ]
        self._wraps = {
            "add_request": functools.partial(_add_request, collector),
            "process_outputs": functools.partial(_process_outputs, collector),
            "abort_requests": functools.partial(_abort_requests, collector),
            "get_output_async": functools.partial(_get_output_async, collector),
        }

    def install(self) -> None:
        """Put the hooks around the methods."""
        for owner, name, original in self._originals:
            setattr(owner, name, functools.wraps(original)(self._wraps[name](original)))

    def remove(self) -> None:
        """Put the originals back. A message that is being waited for still passes the old hook, which is harmless."""
        for owner, name, original in self._originals:
            setattr(owner, name, original)


def _add_request(collector: Collector, original: Callable[..., Any]) -> Callable[..., Any]:
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        arrival_monotonic_s = time.monotonic()
        result = original(self, request, *args, **kwargs)
        try:
            collector.admit(request, arrival_monotonic_s)
        except Exception as error:  # noqa: BLE001 (the engine must not see any)
            collector.fail(error)
        return result

    return add_request


def _process_outputs(collector: Collector, original: Callable[..., Any]) -> Callable[..., Any]:
    def process_outputs(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, engine_core_outputs, *args, **kwargs)
        try:
            if result.reqs_to_abort:
                collector.stop(result.reqs_to_abort, engine_core_outputs)
        except Exception as error:  # noqa: BLE001 (the engine must not see any)
            collector.fail(error)
        return result

    return process_outputs


def _abort_requests(collector: Collector, original: Callable[..., Any]) -> Callable[..., Any]:
    def abort_requests(self: Any, *args: Any, **kwargs: Any) -> Any:
        aborted = original(self, *args, **kwargs)
        try:
            collector.abort(aborted)
        except Exception as error:  # noqa: BLE001 (the engine must not see any)
            collector.fail(error)
        return aborted

    return abort_requests


def _get_output_async(collector: Collector, original: Callable[..., Any]) -> Callable[..., Any]:
    async def get_output_async(self: Any) -> Any:
        try:
            # Asked for the next message, vLLM is done with all slices of the one before.
            collector.settle()
        except Exception as error:  # noqa: BLE001 (the engine must not see any)
            collector.fail(error)
        message = await original(self)
        try:
            collector.take(message)
        except Exception as error:  # noqa: BLE001 (the engine must not see any)
            collector.fail(error)
        return message

    return get_output_async
