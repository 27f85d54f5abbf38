"""What a replica does first that has waited for the Lease."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from specdecode_operator.cluster.resources import LEASE, SPECDECODE_DEPLOYMENT
from specdecode_operator.handlers.operator_state import OperatorState
from tests.support.api_server import ApiServer
from tests.support.embedded_operator import until
from tests.unit.handlers.leadership.test_leadership import METADATA, NAME, leading
from tests.unit.handlers.state.resync_rounds import Rounds, add, stop


async def test_what_nobody_has_looked_at_as_it_is_now_goes_ahead_of_what_is_in_order(
    api: ApiServer, rounds: Rounds, looked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "changed"):
        add(api, name)
        if name != "changed":
            api.change(SPECDECODE_DEPLOYMENT, name, status={"observedGeneration": 1})
    api.create(LEASE, {"metadata": METADATA, "spec": {"holderIdentity": "other"}})
    loop, later = asyncio.get_running_loop(), list[tuple[float, Callable[[], None]]]()
    arm = loop.call_later

    def call_later(delay_s: float, act: Callable[..., None], *arguments: Any) -> asyncio.TimerHandle:
        if act == state._add_everything:
            later.append((delay_s, act))
            delay_s = 86_400
        return arm(delay_s, act, *arguments)

    monkeypatch.setattr(loop, "call_later", call_later)
    async with leading(monkeypatch) as (thread, _):
        state = OperatorState(leadership=thread)
        await state.start()
        try:
            api.requests.clear()
            await rounds.go()
            assert looked == [], "it waits for the Lease"
            assert f"list {LEASE.qualified_plural}" in api.requests, "and knows which namespaces others serve"
            api.change(LEASE, NAME, spec={"holderIdentity": ""})
            await until(lambda: looked and later, lambda: "it works")
            assert looked == ["changed"]
            ((delay_s, look_at_the_rest),) = later
            assert delay_s == 5
            look_at_the_rest()
            await until(lambda: {"a", "b"} <= set(looked), lambda: f"the others are looked at, too: {looked}")
        finally:
            await stop(state)
