"""What is looked at after each event of a watch."""

import asyncio
from typing import Any, cast

import kopf
import pytest

from specdecode_operator.api import capture, deployment
from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.resources import (
    CAPTURE_LABEL,
    CONFIG_MAP,
    DEPLOYMENT_LABEL,
    MODEL_FACTS_LABEL,
    MODEL_FACTS_NAME,
    NODE,
    POD,
    WATCHED,
)
from specdecode_operator.handlers import main
from specdecode_operator.handlers.operator_state import OperatorState
from specdecode_operator.handlers.queue import WorkQueue
from tests.support.objects import H200, Body
from tests.support.waiting import DEADLINE_S
from tests.unit.handlers.test_queue import Counted, Failing, Retries, running

LLAMA, OTHER = Key("team", "llama"), Key("team", "other")
DEMO = Key("team", "demo", capture.KIND)
LAST = Key("last", "last")


def body(name: str, version: int = 1, *, namespace: str = "team", **parts: Any) -> Body:
    metadata = {"namespace": namespace, "name": name, "uid": f"{namespace}-{name}", "resourceVersion": str(version)}
    return {"metadata": {**metadata, **parts.pop("metadata", {})}, **parts}


def demo(version: int = 1, **spec: Any) -> Body:
    return body("demo", version, spec={"deployment": "llama", **spec})


def labelled(name: str, version: int = 1, **labels: str) -> Body:
    known = {"deployment": DEPLOYMENT_LABEL, "capture": CAPTURE_LABEL, "facts": MODEL_FACTS_LABEL}
    return body(name, version, metadata={"labels": {known[key]: value for key, value in labels.items()}})


def event(type_: str | None, seen: Body) -> Any:
    return {"type": type_, "object": seen}


@pytest.fixture
async def state() -> OperatorState:
    """An operator that knows two deployments, one in another namespace, and a capture of the first."""
    state = OperatorState()
    for each in (body("llama"), body("other"), body("llama", namespace="elsewhere")):
        await main.on_deployment(event(None, each), state)
    await main.on_capture(event(None, demo()), state)
    assert await looked_at(state) == [LLAMA, OTHER, Key("elsewhere", "llama"), DEMO]
    return state


async def looked_at(state: OperatorState) -> list[Key]:
    """Work the queue off; return what it held: deployments first, those of the team ahead."""
    found: list[Key] = []
    done = asyncio.Event()

    async def work(key: Key) -> None:
        found.append(key)
        if not state.queue.longest_wait_s():
            done.set()

    state.queue.add(LAST)
    task = asyncio.create_task(state.queue.run(work))
    async with asyncio.timeout(DEADLINE_S):
        await done.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    state.queue = WorkQueue()  # in which nothing rests
    found.remove(LAST)
    return sorted(found, key=lambda key: (key.kind == capture.KIND, key.namespace != LLAMA.namespace, key.name))


async def belonging(state: OperatorState, kind: str, type_: str, seen: Body) -> list[Key]:
    resource = next(each for each in WATCHED if each.kind == kind)
    known = kopf.Resource(resource.group, "v1", resource.plural, kind=kind)
    await main.on_child(event(type_, seen), known, state)
    return await looked_at(state)


class TestObjects:
    async def test_a_deployment_is_looked_at_with_its_captures_once_for_many_events(self, state: OperatorState) -> None:
        for version in (2, 3, 4):
            await main.on_deployment(event("MODIFIED", body("llama", version)), state)
        assert await looked_at(state) == [LLAMA, DEMO]
        assert (state.cache.parent(LLAMA) or {})["metadata"]["resourceVersion"] == "4"

    async def test_events_that_come_late_bring_nothing_old_back(self, state: OperatorState) -> None:
        await main.on_deployment(event("MODIFIED", body("llama", 9)), state)
        await main.on_deployment(event("MODIFIED", body("llama", 8)), state)
        assert (state.cache.parent(LLAMA) or {})["metadata"]["resourceVersion"] == "9"
        await main.on_deployment(event("DELETED", body("llama", 10)), state)
        await main.on_deployment(event("MODIFIED", body("llama", 9)), state)
        assert state.cache.parent(LLAMA) is None

    async def test_one_that_is_gone_is_looked_at_once_more_so_that_it_is_forgotten(self, state: OperatorState) -> None:
        await main.on_deployment(event("DELETED", body("llama", 2)), state)
        assert state.cache.parent(LLAMA) is None
        assert await looked_at(state) == [LLAMA, DEMO]

    async def test_one_made_anew_does_not_wait_for_the_failures_of_its_predecessor(
        self, state: OperatorState, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        work = Failing()
        async with running(state.queue, work):
            retries = Retries(monkeypatch)
            for times in range(1, 4):
                state.queue.add(OTHER)
                await work.ran(times)
            await main.on_deployment(event("DELETED", body("other", 2)), state)
            await main.on_deployment(event("ADDED", body("other", 3, metadata={"uid": "anew"})), state)
            await work.ran(4)
        assert retries.delays == [1, 2, 4, 1]

    @pytest.mark.parametrize(("echo", "runs"), [(True, 1), (False, 2)], ids=["its own write", "a change"])
    async def test_right_after_a_look_a_change_does_not_wait_and_what_the_operator_wrote_does(
        self, state: OperatorState, monkeypatch: pytest.MonkeyPatch, runs: int, *, echo: bool
    ) -> None:
        work = Counted()
        async with running(state.queue, work):
            Retries(monkeypatch)
            state.queue.add(OTHER)
            await work.ran(1)
            if echo:
                state.cache.put_parent(deployment.KIND, body("other", 2))
            await main.on_deployment(event("MODIFIED", body("other", 2)), state)
            for _ in range(5):
                await asyncio.sleep(0)
            assert work.runs == runs

    async def test_a_capture_is_looked_at_with_the_deployment_whose_gpus_it_may_have(
        self, state: OperatorState
    ) -> None:
        await main.on_capture(event("MODIFIED", demo(2, suspend=True)), state)
        assert await looked_at(state) == [LLAMA, DEMO]
        await main.on_capture(event("DELETED", demo(3)), state)
        assert await looked_at(state) == [LLAMA, DEMO], "the deployment has its GPUs back"
        assert state.cache.captures_of(LLAMA) == []

    async def test_captures_that_keep_their_engines_make_room_for_one_that_borrows_and_for_its_end(
        self, state: OperatorState
    ) -> None:
        ended = {"type": "Succeeded", "status": "True", "reason": "R", "message": "", "observedGeneration": 1}
        ended |= {"lastTransitionTime": "2026-01-01T00:00:00Z"}
        over = body("over", spec={"deployment": "llama"}, metadata={"generation": 1}, status={"conditions": [ended]})
        waits = body("waits", spec={"deployment": "other"}, metadata={"generation": 1}, namespace="elsewhere")
        for each in (over, waits):
            await main.on_capture(event("ADDED", each), state)
        await main.on_capture(event("DELETED", demo(2)), state)
        await looked_at(state)
        borrows = body("borrows", spec={"deployment": "other", "deploymentDuringCapture": "Suspend"})
        itself = Key("team", "borrows", capture.KIND)
        for type_ in ("ADDED", "DELETED"):
            await main.on_capture(event(type_, borrows), state)
            assert {*await looked_at(state)} == {itself, OTHER, Key("elsewhere", "waits", capture.KIND)}

    async def test_a_capture_of_nobody_brings_no_deployment(self, state: OperatorState) -> None:
        lost = body("lost", spec={"deployment": "nobody"})
        await main.on_capture(event("ADDED", lost), state)
        await main.on_capture(event("ADDED", body("empty")), state)
        assert await looked_at(state) == [Key("team", name, capture.KIND) for name in ("empty", "lost")]

    async def test_what_a_watch_lists_as_it_begins_anew_is_listed_and_what_it_tells_later_is_not(self) -> None:
        state, pod = OperatorState(), kopf.Resource("", "v1", POD.plural, kind=POD.kind)
        for type_, due in (("ADDED", set()), (None, {deployment.KIND, capture.KIND, NODE.kind, POD.kind})):
            await main.on_deployment(event(type_, body("llama")), state)
            await main.on_capture(event(type_, demo()), state)
            await main.on_node(event(type_, body("n")), state)
            await main.on_child(event(type_, labelled("p")), pod, state)
            assert state.relist.due == due

    async def test_a_watch_that_brought_an_object_works_for_its_kind(self) -> None:
        state = OperatorState()
        await main.on_deployment(event(None, body("llama")), state)
        assert state.relist.watched == {deployment.KIND}


class TestNodes:
    @staticmethod
    def node(version: int, gpus: int = 8) -> Body:
        labels = {"nvidia.com/gpu.product": H200}
        metadata = {"name": "n", "uid": "n-1", "labels": labels, "resourceVersion": str(version)}
        return {"metadata": metadata, "status": {"allocatable": {"nvidia.com/gpu": str(gpus)}}}

    async def test_all_deployments_are_planned_anew_when_gpus_change_and_only_then(self, state: OperatorState) -> None:
        everyone = [LLAMA, OTHER, Key("elsewhere", "llama")]
        for type_, seen, looked in (
            ("ADDED", self.node(1), everyone),
            ("MODIFIED", self.node(2), []),
            ("MODIFIED", self.node(3, gpus=4), everyone),
            ("DELETED", self.node(4, gpus=4), everyone),
            ("DELETED", self.node(5, gpus=4), []),
        ):
            await main.on_node(event(type_, seen), state)
            assert await looked_at(state) == looked, (type_, seen)
        assert state.cache.nodes() == ()


class TestBelongings:
    @pytest.mark.parametrize("type_", ["ADDED", "MODIFIED", "DELETED"])
    async def test_what_a_deployment_owns_brings_it_and_its_captures(self, state: OperatorState, type_: str) -> None:
        assert await belonging(state, POD.kind, type_, labelled("p", deployment="llama")) == [LLAMA, DEMO]

    @pytest.mark.parametrize(("type_", "first"), [("MODIFIED", LLAMA), (None, OTHER)], ids=["told", "only listed"])
    async def test_what_becomes_of_a_child_goes_ahead_of_what_is_only_looked_at_again(
        self, state: OperatorState, type_: str | None, first: Key
    ) -> None:
        taken: list[Key] = []
        done = asyncio.Event()

        async def work(key: Key) -> None:
            taken.append(key)
            if {LLAMA, OTHER} <= set(taken):
                done.set()

        state.queue = WorkQueue(workers=1)
        state.queue.add_calmly(OTHER)
        pod = kopf.Resource("", "v1", POD.plural, kind=POD.kind)
        await main.on_child(event(type_, labelled("p", deployment="llama")), pod, state)
        async with running(state.queue, work):
            await done.wait()
        assert next(key for key in taken if key in (LLAMA, OTHER)) == first

    async def test_what_a_capture_owns_brings_it_alone(self, state: OperatorState) -> None:
        assert await belonging(state, POD.kind, "ADDED", labelled("p", capture="demo")) == [DEMO]

    @pytest.mark.parametrize("labels", [{"deployment": "nobody"}, {"capture": "nobody"}, {}], ids=str)
    async def test_what_belongs_to_nobody_brings_nobody(self, state: OperatorState, labels: dict[str, str]) -> None:
        assert await belonging(state, POD.kind, "ADDED", labelled("p", **labels)) == []

    async def test_a_deleted_one_is_seen_no_more(self, state: OperatorState) -> None:
        await belonging(state, POD.kind, "ADDED", labelled("p", deployment="llama"))
        assert len(state.cache.children_of(LLAMA, POD.kind)) == 1
        await belonging(state, POD.kind, "DELETED", labelled("p", 2, deployment="llama"))
        assert state.cache.children_of(LLAMA, POD.kind) == []

    async def test_what_was_read_of_models_brings_all_of_its_namespace(self, state: OperatorState) -> None:
        facts = {**labelled(MODEL_FACTS_NAME, facts="true"), "data": {"model": "{}"}}
        assert await belonging(state, CONFIG_MAP.kind, "ADDED", facts) == [LLAMA, OTHER]


def test_every_kind_that_belongs_to_an_object_is_watched_by_our_label() -> None:
    registry = kopf.OperatorRegistry()
    main.register_watches(registry, nodes=True)
    handlers = registry._watching.get_all_handlers()
    found = {
        (str(each.selector.group or ""), each.selector.any_name or each.selector.plural): each.labels
        for each in handlers
        if each.fn is cast("Any", main.on_child)
    }
    ours = {"app.kubernetes.io/managed-by": "specdecode-operator"}
    assert found == {(each.group, each.plural): ours for each in WATCHED}
