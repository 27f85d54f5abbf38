"""Record one API server from its start to its end, through hooks around four methods of vLLM.

Each hook calls the original with the same arguments, returns its result and lets its exceptions pass. Errors of the
recorder itself are counted and never reach the engine.
"""

import atexit
import functools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .collector import BoundedQueue, Collector
from .segment_format import CLOSE_FILE, EXIT, ORDERED, UNKNOWN_SHAPE, WRITE_ERROR, Settings
from .vllm_internals import EngineClasses, find_classes, header, unknown_shapes
from .writer import Segment, Writer


class Hooks:
    """Wrapped methods of one process."""

    def __init__(self, classes: EngineClasses, collector: Collector) -> None:
        self._collector = collector
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
            setattr(owner, name, functools.wraps(original)(wrap(self._collector, original)))

    def remove(self) -> None:
        """Restore the originals. A pending message still passes the old hook, which is harmless."""
        for owner, name, original, _ in self._methods:
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
            # When vLLM requests the next message, it has processed all slices of the previous one.
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


logger = logging.getLogger("vllm.specdecode_recorder")
"""Child of vLLM's logger, whose handler prints it with the engine's lines."""

TURN_EVERY_S = 0.05
EXIT_TIMEOUT_S = 10.0
SMALLEST_BLOCK_SIZE = 16

_first = threading.Lock()
"""Never released: a process has one recorder, however many engines it talks to."""


def start(vllm_config: Any, engines: list[int]) -> None:
    """Start recording if the environment configures it; log a failure. Never raises."""
    try:
        settings = Settings.from_environment()
        if settings is not None and _first.acquire(blocking=False):
            _start(settings, vllm_config, engines)
    except Exception:
        logger.exception("recorder: off, because it could not start")


def _start(settings: Settings, vllm_config: Any, engines: list[int]) -> None:
    boot = secrets.token_hex(8)
    first_line = header(vllm_config, engines, boot, settings)
    segment = Segment(settings.folder / f"segment-{boot}-{os.getpid()}.jsonl")
    queue = BoundedQueue()
    collector = Collector(queue, token_ids=settings.token_ids, steps=settings.steps)
    writer = Writer(segment, collector, queue, first_line.config.block_size or SMALLEST_BLOCK_SIZE)
    writer.begin(first_line)
    classes = None
    try:
        classes = find_classes()
        problems = unknown_shapes(classes)
    except ImportError as error:
        problems = [str(error)]
    except Exception as error:  # noqa: BLE001 (inspecting an unknown class may raise anything)
        problems = [f"{type(error).__name__}: {error}"]
    if classes is None or problems:
        writer.turn_off(UNKNOWN_SHAPE, "; ".join(problems))
        logger.warning("recorder: off, because this engine is not supported: %s", "; ".join(problems))
        return
    hooks = Hooks(classes, collector)
    hooks.install()
    Recording(writer, hooks, settings.folder / CLOSE_FILE).start()
    if not first_line.recorder_tried:
        logger.warning("recorder: not tested with vLLM %s, whose classes have the expected form", first_line.vllm)
    logger.info("recorder: on, writing %s", segment.path)


class Recording(threading.Thread):
    """Thread of the writer, until an order to close or the end of the process."""

    def __init__(self, writer: Writer, hooks: Hooks, close_file: Path) -> None:
        super().__init__(name="specdecode-recorder", daemon=True)
        self._writer = writer
        self._hooks = hooks
        self._close_file = close_file
        self._process_ends = threading.Event()
        self._process = os.getpid()
        atexit.register(self.end)

    def run(self) -> None:
        """Write until the segment is closed; then restore the engine's methods."""
        try:
            while not self._writer.is_closed:
                process_ends = self._process_ends.wait(TURN_EVERY_S)
                if self._close_file.exists():
                    self._writer.close(ORDERED)
                elif process_ends:
                    self._writer.close(EXIT)
                else:
                    self._writer.turn()
        except Exception as error:
            logger.exception("recorder: off")
            self._writer.turn_off(WRITE_ERROR, f"{type(error).__name__}: {error}")
        finally:
            self._hooks.remove()
            logger.info("recorder: closed (%s)", self._writer.closed_as)

    def end(self) -> None:
        """Close the segment when the process ends. vLLM exits in order on SIGTERM."""
        if os.getpid() == self._process:  # a fork does not have the thread
            self._process_ends.set()
            self.join(EXIT_TIMEOUT_S)
