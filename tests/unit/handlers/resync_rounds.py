"""Objects of a cluster, and a clock that starts the rounds of the resync."""

import asyncio

from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.resources import LEADER_WORKER_SET, NODE, SPECDECODE_DEPLOYMENT
from specdecode_operator.handlers.main import OperatorState
from tests.support.api_server import ApiServer
from tests.support.objects import H100, Body, tiny_cpu
from tests.support.waiting import DEADLINE_S

LLAMA = Key("team", "llama")
GROUPS = LEADER_WORKER_SET.qualified_plural


def add(api: ApiServer, name: str = "llama", spec: Body | None = None) -> None:
    body = {"metadata": {"namespace": "team", "name": name}, "spec": spec or tiny_cpu(suspend=True)}
    api.create(SPECDECODE_DEPLOYMENT, body)


def add_node(api: ApiServer, name: str) -> None:
    node = {"metadata": {"name": name, "labels": {"nvidia.com/gpu.product": H100}}}
    api.create(NODE, {**node, "status": {"allocatable": {"nvidia.com/gpu": "8"}}})


def reason(api: ApiServer, type_: str = "Ready", name: str = "llama") -> str | None:
    status = (api.find(SPECDECODE_DEPLOYMENT, name) or {}).get("status", {})
    return next((each["reason"] for each in status.get("conditions", []) if each["type"] == type_), None)


class Rounds:
    """The clock of the resync: a round begins when the test says so."""

    def __init__(self) -> None:
        self._begin: asyncio.Queue[None] = asyncio.Queue()
        self._waits = asyncio.Event()

    async def sleep(self, _: float) -> None:
        """Wait for the next round."""
        self._waits.set()
        await self._begin.get()

    async def go(self, rounds: int = 1) -> None:
        """Let some rounds go by."""
        async with asyncio.timeout(DEADLINE_S):
            await self._waits.wait()
            for _ in range(rounds):
                self._waits.clear()
                self._begin.put_nowait(None)
                await self._waits.wait()


async def stop(state: OperatorState) -> None:
    """Stop an operator; one that does not end is a failure and no hanging test."""
    async with asyncio.timeout(DEADLINE_S):
        await state.stop()
