"""An operator without watches, whose rounds begin when the test says so."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from specdecode_operator.api.deployment import Key
from specdecode_operator.deployment.requeue import Requeue
from specdecode_operator.handlers import operator_state as module
from specdecode_operator.handlers.operator_state import OperatorState
from tests.support.api_server import ApiServer
from tests.unit.handlers.state.resync_rounds import Rounds, stop


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Rounds:
    made = Rounds()

    class Clock:
        sleep = staticmethod(made.sleep)

        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

    monkeypatch.setattr(module, "asyncio", Clock())
    return made


@pytest.fixture
async def state(api: ApiServer, rounds: Rounds) -> AsyncIterator[OperatorState]:
    """An operator without watches, not yet started."""
    state = OperatorState()
    yield state
    await stop(state)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all that is looked at, and waits for nothing."""
    found: list[str] = []

    async def reconcile(_: Any, key: Key) -> Requeue:
        found.append(key.name)
        return Requeue(is_close=False)

    monkeypatch.setattr(module.Reconciler, "reconcile", reconcile)
    return found
