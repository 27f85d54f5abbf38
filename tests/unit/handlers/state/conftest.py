"""An operator without watches, whose rounds begin when the test says so."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from specdecode_operator.api.key import Key
from specdecode_operator.deployment.attention import Attention
from specdecode_operator.handlers import state as module
from specdecode_operator.handlers.state import OperatorState
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

    async def reconcile(_: Any, key: Key) -> Attention:
        found.append(key.name)
        return Attention(is_close=False)

    monkeypatch.setattr(module.Reconciler, "reconcile", reconcile)
    return found
