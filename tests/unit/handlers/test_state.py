"""What the operator sees at its start and later, whatever watches miss, and how it ends."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.api.deployment import KIND
from specdecode_operator.api.key import Key
from specdecode_operator.cluster import client
from specdecode_operator.cluster.errors import ClusterError
from specdecode_operator.handlers import queue, turns
from specdecode_operator.handlers import state as module
from specdecode_operator.handlers.settings import Settings
from specdecode_operator.handlers.state import OperatorState, OperatorStuckError
from specdecode_operator.kube.labels import MANAGED_BY_LABEL, MANAGER
from specdecode_operator.kube.manifests import child_labels
from specdecode_operator.kube.resources import (
    LEADER_WORKER_SET,
    NODE,
    POD,
    SPECDECODE_CAPTURE,
    SPECDECODE_DEPLOYMENT,
    WATCHED,
    Resource,
)
from specdecode_operator.sizing.pair.calibration import Calibration, serialize_calibration
from tests.support.api_server import ApiServer
from tests.support.captures import capture_spec
from tests.support.embedded_operator import DEADLINE_S, until
from tests.support.objects import H100, Body, tiny_cpu
from tests.unit.deployment.pods.groups import WIDE, spec_at
from tests.unit.sizing.memory.test_calibration import ENTRY

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


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Rounds:
    made = Rounds()

    class Clock:
        sleep = staticmethod(made.sleep)

        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

    monkeypatch.setattr(module, "asyncio", Clock())
    return made


async def stop(state: OperatorState) -> None:
    """Stop an operator; one that does not end is a failure and no hanging test."""
    async with asyncio.timeout(DEADLINE_S):
        await state.stop()


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

    async def reconcile(_: Any, key: Key) -> bool:
        found.append(key.name)
        return False

    monkeypatch.setattr(module.Reconciler, "reconcile", reconcile)
    return found


class TestStart:
    async def test_nodes_and_children_are_known_before_the_first_object_is_looked_at(
        self, api: ApiServer, state: OperatorState, rounds: Rounds
    ) -> None:
        add(api, spec=spec_at(WIDE))
        add_node(api, "a")
        add_node(api, "b")
        await state.start()
        await rounds.go()
        await until(lambda: reason(api), lambda: "the object has a status")
        assert reason(api, "Planned") == "Fits"
        assert api.names(LEADER_WORKER_SET) == ["llama-lws"]

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

    async def test_it_may_be_tried_again_after_the_cluster_failed(self, api: ApiServer, state: OperatorState) -> None:
        add(api)
        api.refusals["list nodes"] = (500, "etcd is slow")
        with pytest.raises(ClusterError, match="etcd is slow"):
            await state.start()
        assert state.cache.parents() == ()
        del api.refusals["list nodes"]
        await state.start()
        state.check()
        assert state.cache.parents() == (LLAMA,)

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

    async def test_a_crd_that_is_missing_holds_nothing_up(self, api: ApiServer, state: OperatorState) -> None:
        del api.served[SPECDECODE_CAPTURE.qualified_plural]
        add(api)
        await state.start()
        assert state.cache.parents() == (LLAMA,)

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


class TestResync:
    async def test_objects_of_a_kind_that_no_watch_has_brought_are_listed_each_round(
        self, api: ApiServer, state: OperatorState, rounds: Rounds
    ) -> None:
        await state.start()
        add(api)
        await rounds.go()
        await until(lambda: reason(api) == "Suspended", lambda: "it is found without a watch")
        state.watched.add(KIND)
        add(api, "later")
        api.requests.clear()
        await rounds.go()
        assert f"list {SPECDECODE_DEPLOYMENT.qualified_plural}" not in api.requests
        assert f"list {SPECDECODE_CAPTURE.qualified_plural}" in api.requests

    async def test_what_watches_missed_is_seen_with_the_next_full_list(
        self, api: ApiServer, state: OperatorState, rounds: Rounds
    ) -> None:
        for name in ("llama", "stays"):
            add(api, name)
        labels = child_labels(LLAMA)
        api.create(POD, {"metadata": {"namespace": "team", "name": "p", "labels": labels}})
        add_node(api, "n")
        await state.start()
        state.watched.update((KIND, SPECDECODE_CAPTURE.kind))
        await rounds.go()
        names = ("llama", "stays")
        await until(
            lambda: {reason(api, name=name) for name in names} == {"Suspended"}, lambda: "nothing is left to write"
        )
        assert len(state.cache.nodes()) == len(state.cache.children_of(LLAMA, POD.kind)) == 1
        for resource, name in ((SPECDECODE_DEPLOYMENT, "llama"), (POD, "p"), (NODE, "n")):
            api.remove(resource, name)
        await rounds.go(19)
        assert LLAMA in state.cache.parents(), "no full list yet"
        await rounds.go()
        assert state.cache.parents() == (Key("team", "stays"),)
        assert state.cache.nodes() == ()
        assert state.cache.children_of(LLAMA, POD.kind) == []

    async def test_what_went_before_watches_began_is_missed_for_one_round(
        self, api: ApiServer, state: OperatorState, rounds: Rounds
    ) -> None:
        """kopf lists once more at a start, and tells of nothing that is no longer there then."""
        labels = child_labels(LLAMA)
        api.create(POD, {"metadata": {"namespace": "team", "name": "p", "labels": labels}})
        await state.start()
        api.remove(POD, "p")
        assert state.cache.children_of(LLAMA, POD.kind)
        await rounds.go()
        assert not state.cache.children_of(LLAMA, POD.kind)

    async def test_it_outlives_a_cluster_that_fails_for_a_while(
        self, api: ApiServer, state: OperatorState, rounds: Rounds
    ) -> None:
        await state.start()
        api.refusals[f"list {GROUPS}"] = (500, "etcd is slow")
        add(api)
        await rounds.go(3)
        state.check()
        api.refusals.clear()
        await rounds.go()
        await until(lambda: reason(api) == "Suspended", lambda: "work goes on")

    async def test_what_changes_by_itself_is_looked_at_again_each_round_but_what_keeps_failing(
        self, api: ApiServer, state: OperatorState, rounds: Rounds, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looked: list[str] = []

        async def reconcile(_: Any, key: Key) -> bool:
            looked.append(key.name)
            if key.name == "fails":
                raise RuntimeError
            return True

        monkeypatch.setattr(queue, "_FIRST_RETRY_S", 60.0)
        monkeypatch.setattr(module.Reconciler, "reconcile", reconcile)
        for name in ("llama", "fails"):
            add(api, name)
        await state.start()
        await until(lambda: sorted(looked) == ["fails", "llama"], lambda: f"both are looked at: {looked}")
        await rounds.go()
        await until(lambda: looked.count("llama") == 2, lambda: f"once more: {looked}")
        assert looked.count("fails") == 1, "it has a slower rhythm of its own"

    async def test_looks_by_the_clock_are_spread_over_the_round(
        self, api: ApiServer, state: OperatorState, rounds: Rounds, looked: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        delays: list[float] = []
        loop = asyncio.get_running_loop()
        arm = loop.call_later

        def call_later(delay_s: float, callback: Callable[..., None], *arguments: Any) -> asyncio.TimerHandle:
            if callback == state.queue.add_unless_failing:
                delays.append(delay_s)
            return arm(delay_s, callback, *arguments)

        for number in range(60):
            add(api, f"llama-{number}")
        await state.start()
        await until(lambda: len(looked) == 60, lambda: f"all are looked at after the start: {looked}")
        monkeypatch.setattr(loop, "call_later", call_later)
        await rounds.go()
        assert delays == [0.0, module.RESYNC_S / 5, module.RESYNC_S * 3 / 5]

    async def test_objects_that_keep_failing_take_nobodys_turn(
        self, api: ApiServer, state: OperatorState, rounds: Rounds, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looked: list[str] = []
        failing: set[str] = set()

        async def reconcile(_: Any, key: Key) -> bool:
            looked.append(key.name)
            if key.name in failing:
                raise RuntimeError
            return True

        monkeypatch.setattr(queue, "_FIRST_RETRY_S", 60.0)
        monkeypatch.setattr(turns, "_MOST_LOOKS", 1)
        monkeypatch.setattr(module.Reconciler, "reconcile", reconcile)
        for name in ("a", "b"):
            add(api, name)
        await state.start()
        await until(lambda: sorted(looked) == ["a", "b"], lambda: f"both are looked at after the start: {looked}")
        first, second = looked
        failing.add(first)
        await rounds.go()
        await until(lambda: looked.count(first) == 2, lambda: f"its turn: {looked}")
        await rounds.go(2)
        await until(lambda: looked.count(second) == 2, lambda: f"engines of the other are asked as before: {looked}")

    async def test_of_what_waits_for_nothing_only_another_version_is_looked_at_before_its_turn(
        self, api: ApiServer, state: OperatorState, rounds: Rounds, looked: list[str]
    ) -> None:
        names = [f"llama-{number}" for number in range(20)]
        for name in names:
            add(api, name)
        await state.start()
        await until(lambda: sorted(looked) == sorted(names), lambda: f"all are looked at after the start: {looked}")
        looked.clear()
        await rounds.go(2)
        await until(lambda: len(looked) == 2, lambda: f"one in each round: {looked}")
        last = next(name for name in names if name not in looked)
        api.change(SPECDECODE_DEPLOYMENT, last, spec=tiny_cpu())  # no watch tells of it
        await rounds.go()
        await until(lambda: last in looked, lambda: f"the list tells: {looked}")
        assert len(looked) <= 4

    async def test_groups_that_come_are_news_for_all(
        self, api: ApiServer, state: OperatorState, rounds: Rounds, looked: list[str]
    ) -> None:
        api.refusals[f"list {GROUPS}"] = (404, "no")
        names = ("a", "b", "c")
        for name in names:
            add(api, name)
        await state.start()
        await until(lambda: sorted(looked) == list(names), lambda: f"all are looked at after the start: {looked}")
        looked.clear()
        api.refusals.clear()
        await rounds.go()
        await until(lambda: set(looked) == set(names), lambda: f"plans may change: {looked}")

    async def test_a_calibration_that_comes_is_news_for_all(
        self, api: ApiServer, tmp_path: Path, rounds: Rounds, looked: list[str]
    ) -> None:
        state = OperatorState(Settings(calibration=tmp_path / "calibration.json"))
        names = ("a", "b", "c")
        for name in names:
            add(api, name)
        try:
            await state.start()
            await until(lambda: sorted(looked) == list(names), lambda: f"all are looked at after the start: {looked}")
            looked.clear()
            (tmp_path / "calibration.json").write_text(serialize_calibration(Calibration((ENTRY,))))
            await rounds.go()
            await until(lambda: set(looked) == set(names), lambda: f"estimates changed: {looked}")
        finally:
            await stop(state)


class TestRelations:
    async def test_captures_are_carried_out_by_their_own_reconciler(
        self, api: ApiServer, state: OperatorState, rounds: Rounds
    ) -> None:
        add(api)
        meta = {"namespace": "team", "name": "demo"}
        api.create(SPECDECODE_CAPTURE, {"metadata": meta, "spec": capture_spec(deployment="nobody")})
        await state.start()
        await rounds.go()
        await until(
            lambda: "phase" in (api.find(SPECDECODE_CAPTURE, "demo") or {}).get("status", {}), lambda: "it has a phase"
        )


class TestHealth:
    async def test_it_is_well_while_its_tasks_work(self, api: ApiServer, state: OperatorState) -> None:
        await state.start()
        state.check()

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

    async def test_it_may_be_stopped_before_it_was_started(self) -> None:
        await stop(OperatorState())
