"""Record one API server from its start to its end, or be ready for live captures, as the environment says."""

import atexit
import logging
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .collector import BoundedQueue, Collector
from .head_update import HeadUpdater, engine_under_construction
from .live import LiveRecorder, Parts
from .method_hooks import Hooks
from .segment_format import CLOSE_FILE, EXIT, ORDERED, UNKNOWN_SHAPE, WRITE_ERROR, LiveSettings, Settings
from .vllm_internals import (
    EngineClasses,
    find_classes,
    header,
    live_problems,
    read_counters,
    unknown_shapes,
)
from .writer import Segment, Writer

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
        settings, live = Settings.from_environment(), LiveSettings.from_environment()
        if (settings is None and live is None) or not _first.acquire(blocking=False):
            return
        if settings is not None:  # a capture's own engine
            _start(settings, vllm_config, engines)
        elif live is not None:
            _start_live(live, vllm_config, engines)
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
    classes, problem = _supported_classes(unknown_shapes)
    if classes is None:
        writer.turn_off(UNKNOWN_SHAPE, problem)
        return
    hooks = Hooks(classes, collector)
    hooks.install()
    Recording(writer, hooks, settings.folder / CLOSE_FILE).start()
    if not first_line.recorder_tried:
        logger.warning("recorder: not tested with vLLM %s, whose classes have the expected form", first_line.vllm)
    logger.info("recorder: on, writing %s", segment.path)


def _start_live(settings: LiveSettings, vllm_config: Any, engines: list[int]) -> None:
    classes, problem = _supported_classes(lambda found: unknown_shapes(found) + live_problems(found))
    hooks = Hooks(classes) if classes is not None else None
    parts = Parts(
        switch=hooks.switch if hooks is not None else None,
        problem=problem,
        header=lambda boot, chosen: header(vllm_config, engines, boot, chosen),
        read_counters=read_counters,
        heads=HeadUpdater(engine_under_construction(), vllm_config),
    )
    recorder = LiveRecorder(settings, parts)
    if hooks is not None:
        hooks.install()
    recorder.start()


def _supported_classes(problems_of: Callable[[EngineClasses], list[str]]) -> tuple[EngineClasses | None, str]:
    """Return vLLM's classes, or None and the reason why they cannot be hooked."""
    try:
        classes = find_classes()
        problems = problems_of(classes)
    except ImportError as error:
        problems = [str(error)]
    except Exception as error:  # noqa: BLE001 (inspecting an unknown class may raise anything)
        problems = [f"{type(error).__name__}: {error}"]
    if not problems:
        return classes, ""
    reason = "; ".join(problems)
    logger.warning("recorder: off, because this engine is not supported: %s", reason)
    return None, reason


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
