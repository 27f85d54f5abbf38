"""The fault proxy itself: what each fault looks like to a client, and what the server gets of it."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from specdecode_operator.cluster.resources import POD
from tests.support.api_server import ApiServer
from tests.support.faults.calls import Call, Moment
from tests.support.faults.faults import (
    Delay,
    DropEvent,
    EndWatch,
    Fault,
    Refuse,
    RepeatEvent,
    Reset,
    Silence,
    Stale,
    Truncate,
)
from tests.support.faults.proxy import FaultProxy

PODS = "/api/v1/namespaces/team/pods"
WATCH = f"{PODS}?watch=true"


class World:
    """A server in memory, the proxy before it, and a client."""

    def __init__(self, server: ApiServer, proxy: FaultProxy, client: aiohttp.ClientSession) -> None:
        self.server, self.proxy, self._client = server, proxy, client

    async def ask(self, path: str = PODS, method: str = "GET", body: Any = None) -> tuple[int, Any]:
        async with self._client.request(method, self.proxy.address + path, json=body) as answer:
            return answer.status, json.loads(await answer.read())

    async def create(self, name: str) -> int:
        status, _ = await self.ask(PODS, "POST", {"metadata": {"name": name, "namespace": "team"}})
        return status

    async def watch(self, count: int) -> list[str]:
        """Return so many events, or fewer where the watch ends."""
        found = []
        async with self._client.get(self.proxy.address + WATCH) as answer:
            async for line in answer.content:
                event = json.loads(line)
                found.append(f"{event['type']} {event['object'].get('metadata', {}).get('name', '')}".rstrip())
                if len(found) == count:
                    break
        return found


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    server, kubeconfig = ApiServer(), tmp_path / "kubeconfig"
    async with server.serving(kubeconfig), aiohttp.ClientSession() as client:
        with FaultProxy(kubeconfig) as proxy:
            yield World(server, proxy, client)


async def test_proxy_without_faults_forwards_and_records_all_calls(world: World) -> None:
    assert await world.create("a") == 200
    assert (await world.ask(f"{PODS}/a"))[1]["metadata"]["name"] == "a"
    assert await world.watch(1) == ["ADDED a"]
    assert (await world.ask(f"{PODS}/b"))[0] == 404
    assert (await world.ask("/version"))[0] == 200
    assert [str(call) for call in world.proxy.calls] == [
        "1 create pods team 200",
        "2 get pods team/a 200",
        "3 watch pods team 200",
        "4 get pods team/b 404",
        "5 get 200",
    ]
    assert [call.writes for call in world.proxy.calls] == [True, False, False, False, False]


async def test_fault_applies_only_to_matching_calls(world: World) -> None:
    world.proxy.faults = [Fault(Refuse(409), "create pods", skip=1, times=1)]
    assert [await world.create(name) for name in "abc"] == [200, 409, 200]
    assert world.server.names(POD) == ["a", "c"]
    world.proxy.faults = [Fault(Refuse(429, retry_after_s=7), "* pods", name="b")]
    assert [(await world.ask(f"{PODS}/{name}"))[0] for name in "abc"] == [200, 429, 200]


async def test_same_seed_selects_the_same_calls(world: World) -> None:
    runs = []
    for _ in range(2):
        world.proxy.faults = [Fault(Refuse(500), share=0.5, seed=3)]
        runs.append([(await world.ask())[0] for _ in range(12)])
    assert runs[0] == runs[1]
    assert set(runs[0]) == {200, 500}


async def test_refuse_fault_sends_retry_after_header(world: World) -> None:
    world.proxy.faults = [Fault(Refuse(429, retry_after_s=7))]
    async with aiohttp.ClientSession() as client, client.get(world.proxy.address + PODS) as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (429, "7")
        assert (await answer.json())["reason"] == "TooManyRequests"


@pytest.mark.parametrize(("after", "there"), [(False, []), (True, ["a"])])
async def test_reset_fault_cuts_before_or_after_the_server_acts(world: World, after: bool, there: list[str]) -> None:
    world.proxy.faults = [Fault(Reset(after=after), "create *")]
    with pytest.raises(aiohttp.ClientConnectionError):
        await world.create("a")
    assert world.server.names(POD) == there
    (call,) = world.proxy.calls
    assert call.cut
    assert (call.passed, call.status) == ((True, 200) if after else (False, 0))


async def test_stale_fault_repeats_an_earlier_response_to_the_same_request(world: World) -> None:
    world.proxy.faults = [Fault(Stale(), "list pods")]
    assert (await world.ask())[1]["items"] == [], "the first one is passed on"
    await world.create("a")
    assert (await world.ask())[1]["items"] == []
    world.proxy.faults = []
    assert len((await world.ask())[1]["items"]) == 1


async def test_truncated_response_raises_payload_error_or_looks_complete(world: World) -> None:
    world.proxy.faults = [Fault(Truncate(), times=1), Fault(Truncate(is_noticed=False), skip=1)]
    with pytest.raises(aiohttp.ClientPayloadError):
        await world.ask()
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        await world.ask()


async def test_watch_events_are_dropped_repeated_or_replaced_by_error(world: World) -> None:
    for name in "abcd":
        await world.create(name)
    world.proxy.faults = [
        Fault(DropEvent(), "watch pods", skip=1, times=1),
        Fault(RepeatEvent(), "watch pods", skip=2, times=1),
        Fault(EndWatch(), "watch pods", skip=3),
    ]
    assert await world.watch(9) == ["ADDED a", "ADDED c", "ADDED c", "ERROR"]


async def test_silence_fault_keeps_the_watch_open_without_events(world: World) -> None:
    await world.create("a")
    world.proxy.faults = [Fault(Silence(), "watch pods", skip=1, times=1)]
    async with aiohttp.ClientSession() as client, client.get(world.proxy.address + WATCH) as silent:
        assert b'"a"' in await silent.content.readline()
        await world.create("b")
        next_line = asyncio.create_task(silent.content.readline())
        assert await world.watch(2) == ["ADDED a", "ADDED b"], "others are told"
        assert not next_line.done()
        next_line.cancel()


async def test_delay_fault_still_delivers_the_call(world: World) -> None:
    world.proxy.faults = [Fault(Delay(0.01))]
    assert await world.create("a") == 200


async def test_hook_runs_before_and_after_a_call_and_can_abort_it(world: World) -> None:
    seen: list[tuple[str, Moment]] = []

    def hook(call: Call, moment: Moment) -> bool:
        seen.append((call.verb, moment))
        return (call.number, moment) == (2, "before")

    world.proxy.hook = hook
    await world.create("a")
    with pytest.raises(aiohttp.ClientConnectionError):
        await world.create("b")
    assert seen == [("create", "before"), ("create", "after"), ("create", "before")]
    assert world.server.names(POD) == ["a"]
