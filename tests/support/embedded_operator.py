"""The whole operator inside a test: started as its command line starts it, in the test's own event loop."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import kopf
import pytest

from devcluster.cluster.settings import free_ports
from specdecode_operator.handlers.main import OperatorState, run_operator
from specdecode_operator.handlers.settings import Settings
from tests.support.waiting import DEADLINE_S


class EmbeddedOperator:
    """A running operator."""

    def __init__(self, arguments: dict[str, Any], health_port: int) -> None:
        self.state: OperatorState = arguments["memo"]
        self.health_port = health_port
        self.stopped: asyncio.Event = arguments["stop_flag"]


@asynccontextmanager
async def embedded_operator(
    monkeypatch: pytest.MonkeyPatch, settings: Settings | None = None
) -> AsyncIterator[EmbeddedOperator]:
    """Run it until the block ends; it must end well."""
    arguments: dict[str, Any] = {}
    # kopf.run would have an event loop of its own; kopf.operator is the rest of it.
    monkeypatch.setattr(kopf, "run", lambda **given: arguments.update(given))
    (port,) = free_ports(1)
    root = logging.getLogger()
    before, thresholds = (root.handlers[:], root.level), gc.get_threshold()
    run_operator(settings or Settings(), health_port=port, metrics_port=0)
    running, ready = EmbeddedOperator(arguments, port), asyncio.Event()
    task = asyncio.create_task(kopf.operator(**arguments, ready_flag=ready))
    try:
        async with asyncio.timeout(DEADLINE_S):
            await ready.wait()
        yield running
    finally:
        running.stopped.set()
        async with asyncio.timeout(DEADLINE_S):
            await task
        root.handlers[:], root.level = before
        gc.set_threshold(*thresholds)


async def until(look: Callable[[], object], what: Callable[[], str]) -> None:
    """Wait until something holds, in the event loop that it runs in; ``what`` tells what was seen last."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not look():  # noqa: ASYNC110  what is looked at is no event of ours
                await asyncio.sleep(0.01)
    except TimeoutError:
        message = f"not within {DEADLINE_S} s: {what()}"
        raise AssertionError(message) from None
