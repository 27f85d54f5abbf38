"""When the operator says that it is of no use any more, and how it ends."""

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster import client
from specdecode_operator.cluster.client import ClusterError
from specdecode_operator.cluster.manifests import child_labels
from specdecode_operator.cluster.resources import (
    LEADER_WORKER_SET,
    LEASE,
    MANAGED_BY_LABEL,
    MANAGER,
    NODE,
    POD,
    SPECDECODE_DEPLOYMENT,
    WATCHED,
    Resource,
)
from specdecode_operator.handlers.operator_state import OperatorState, OperatorStuckError
from tests.support.api_server import ApiServer
from tests.support.embedded_operator import until
from tests.unit.deployment.pods.groups import WIDE, spec_at
from tests.unit.handlers.resync_rounds import GROUPS, LLAMA, Rounds, add, add_node, reason, stop
from tests.unit.handlers.test_leadership import METADATA, NAME, leading


class TestHealth:
    @pytest.mark.parametrize("ended", [0, 1], ids=["the queue", "the resync"])
    async def test_a_task_that_ended_is_told(self, api: ApiServer, state: OperatorState, ended: int) -> None:
        await state.start()
        state._tasks[ended].cancel()
        await asyncio.wait([state._tasks[ended]])
        with pytest.raises(OperatorStuckError, match="has ended"):
            state.check()

    @pytest.mark.parametrize(("waited_s", "stuck"), [(240.0, False), (301.0, True)])
    async def test_an_object_that_no_worker_takes_is_told(
        self, monkeypatch: pytest.MonkeyPatch, waited_s: float, *, stuck: bool
    ) -> None:
        state = OperatorState()
        state.queue.add(LLAMA)
        began = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: began + waited_s)
        if stuck:
            with pytest.raises(OperatorStuckError, match="waited for more than 300 s"):
                state.check()
        else:
            state.check()

    async def test_a_queue_that_gets_shorter_is_work_however_long_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        state, worked = OperatorState(), asyncio.Queue[Key]()
        now_s = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now_s)

        async def work(key: Key) -> None:
            worked.put_nowait(key)
            if key.name != "0":
                await asyncio.Event().wait()

        for number in range(40):  # more than there are workers
            state.queue.add(Key("team", str(number)))
        now_s += 10_000.0
        task = asyncio.create_task(state.queue.run(work))
        for _ in range(17):
            await worked.get()
        assert state.queue.longest_wait_s() > 300
        state.check()
        now_s += 301.0
        with pytest.raises(OperatorStuckError, match="nothing was done"):
            state.check()
        task.cancel()

    @pytest.mark.parametrize(("silent_s", "stuck"), [(240.0, False), (301.0, True)])
    async def test_an_event_loop_that_does_not_turn_is_told(
        self, api: ApiServer, state: OperatorState, monkeypatch: pytest.MonkeyPatch, silent_s: float, *, stuck: bool
    ) -> None:
        await state.start()
        now_s = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now_s + silent_s)
        if stuck:
            with pytest.raises(OperatorStuckError, match="has not turned for more than 300 s"):
                state.check()
        else:
            state.check()


class TestStop:
    async def test_work_ends_and_nothing_is_asked_afterwards(self, api: ApiServer, rounds: Rounds) -> None:
        add(api)
        state = OperatorState()
        await state.start()
        await rounds.go()
        await until(lambda: reason(api) == "Suspended", lambda: "it works")
        before = asyncio.all_tasks()
        await stop(state)
        assert len(before - asyncio.all_tasks()) >= 2 + 16, "the resync, the queue, and its workers"
        api.requests.clear()
        state.queue.add(LLAMA)
        for _ in itertools.repeat(None, 10):
            await asyncio.sleep(0)
        assert api.requests == []


class TestStart:
    @pytest.mark.parametrize("resource", [NODE, SPECDECODE_DEPLOYMENT, *WATCHED], ids=lambda each: each.kind)
    async def test_it_is_not_ready_before_each_kind_was_listed(
        self, api: ApiServer, state: OperatorState, resource: Resource
    ) -> None:
        seen: list[bool] = []
        api.before[f"list {resource.qualified_plural}"] = lambda: seen.append(state.has_started)
        await state.start()
        assert (seen[0], state.has_started) == (False, True)

    async def test_only_what_carries_our_label_is_asked_for(self, api: ApiServer, state: OperatorState) -> None:
        add(api)
        labels = child_labels(LLAMA)
        for name, given in (("ours", labels), ("theirs", {**labels, MANAGED_BY_LABEL: "somebody"})):
            api.create(POD, {"metadata": {"namespace": "team", "name": name, "labels": given}})
        await state.start()
        assert [pod["metadata"]["name"] for pod in state.cache.children_of(LLAMA, POD.kind)] == ["ours"]
        assert labels[MANAGED_BY_LABEL] == MANAGER

    @pytest.mark.parametrize("status", [404, 403])
    async def test_a_cluster_without_groups_of_pods_is_none_the_worse(
        self, api: ApiServer, state: OperatorState, rounds: Rounds, status: int
    ) -> None:
        api.refusals[f"list {GROUPS}"] = (status, "no")
        add(api, spec=spec_at(WIDE))
        add_node(api, "a")
        add_node(api, "b")
        await state.start()
        await rounds.go()
        await until(lambda: reason(api, "Planned"), lambda: "the object is planned")
        assert not state.cache.has_groups
        api.refusals.clear()
        await rounds.go()
        await until(lambda: "llama-lws" in api.names(LEADER_WORKER_SET), lambda: "they are used once they come")

    async def test_any_other_kind_that_cannot_be_seen_holds_the_start_up(
        self, api: ApiServer, state: OperatorState
    ) -> None:
        for resource in (each for each in WATCHED if each != LEADER_WORKER_SET):
            api.refusals = {f"list {resource.qualified_plural}": (403, "no")}
            with pytest.raises(ClusterError):
                await state.start()

    async def test_lists_come_in_pages_and_are_whole(
        self, api: ApiServer, state: OperatorState, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client, "_PAGE", 3)
        names = [f"llama-{number}" for number in range(8)]
        for name in names:
            add(api, name)
        await state.start()
        assert sorted(key.name for key in state.cache.parents()) == names
        assert api.requests.count(f"list {SPECDECODE_DEPLOYMENT.qualified_plural}") == 3


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
