"""What the operator sees later, whatever watches miss."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import kopf
import pytest

from specdecode_operator.api.deployment import KIND, Key
from specdecode_operator.cluster.manifests import child_labels
from specdecode_operator.cluster.resources import CONFIG_MAP, NODE, POD, SPECDECODE_CAPTURE, SPECDECODE_DEPLOYMENT
from specdecode_operator.deployment.models.checkpoint_reader import Checkpoint
from specdecode_operator.deployment.models.model_facts import CONFIG_MAP_NAME, facts_config_map
from specdecode_operator.deployment.requeue import Requeue
from specdecode_operator.handlers import main, queue, resync
from specdecode_operator.handlers import operator_state as module
from specdecode_operator.handlers.mounted_files import CalibrationFile, FactsFolder, read_facts_file
from specdecode_operator.handlers.operator_state import OperatorState
from specdecode_operator.handlers.settings import Settings
from specdecode_operator.sizing.calibration import Calibration, serialize_calibration
from tests.support.api_server import ApiServer
from tests.support.captures import capture_spec
from tests.support.embedded_operator import until
from tests.support.facts_files import write_facts
from tests.support.objects import Body, tiny_cpu
from tests.support.waiting import DEADLINE_S
from tests.unit.handlers.state.resync_rounds import GROUPS, LLAMA, Rounds, add, add_node, reason, stop
from tests.unit.handlers.test_watch import event
from tests.unit.sizing.test_calibration import ENTRY


def labelled(name: str) -> Body:
    """A pod of the object."""
    return {"metadata": {"namespace": "team", "name": name, "labels": child_labels(LLAMA)}}


class TestResync:
    async def test_objects_of_a_kind_that_no_watch_has_brought_are_listed_each_round(
        self, api: ApiServer, state: OperatorState, rounds: Rounds
    ) -> None:
        await state.start()
        add(api)
        await rounds.go()
        await until(lambda: reason(api) == "Suspended", lambda: "it is found without a watch")
        state.relist.watched.add(KIND)
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
        api.create(POD, labelled("p"))
        add_node(api, "n")
        await state.start()
        state.relist.watched.update((KIND, SPECDECODE_CAPTURE.kind))
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

    async def test_what_was_deleted_before_a_watch_began_anew_is_seen_in_the_next_round(
        self, api: ApiServer, state: OperatorState, rounds: Rounds
    ) -> None:
        """kopf lists then, which tells of nothing that is no longer there."""
        pods = [api.create(POD, labelled(name)) for name in ("goes", "stays")]
        await state.start()
        await rounds.go()
        api.remove(POD, "goes")
        await main.on_child(event(None, pods[1]), kopf.Resource("", "v1", "pods", kind=POD.kind), state)
        lists = f"list {POD.qualified_plural}"
        api.refusals[lists] = (500, "etcd is slow")
        await rounds.go()
        api.refusals.clear()
        assert len(state.cache.children_of(LLAMA, POD.kind)) == 2, "it is tried again"
        await rounds.go(3)
        assert [pod["metadata"]["name"] for pod in state.cache.children_of(LLAMA, POD.kind)] == ["stays"]
        api.requests.clear()
        await rounds.go()
        assert lists not in api.requests, "once is enough"

    async def test_a_kind_whose_watch_begins_anew_while_it_is_listed_is_listed_once_more(
        self, api: ApiServer, state: OperatorState, rounds: Rounds
    ) -> None:
        lists = f"list {POD.qualified_plural}"
        await state.start()
        api.before[lists] = lambda: state.relist.due.add(POD.kind)
        await rounds.go()
        api.requests.clear()
        await rounds.go()
        assert lists in api.requests

    async def test_a_kind_that_cannot_be_listed_keeps_no_other_from_being_seen(
        self, api: ApiServer, state: OperatorState, rounds: Rounds
    ) -> None:
        await state.start()
        api.refusals[f"list {CONFIG_MAP.qualified_plural}"] = (500, "etcd is slow")
        add(api)
        api.create(POD, labelled("p"))
        await rounds.go(4)
        assert LLAMA in state.cache.parents()
        assert state.cache.children_of(LLAMA, POD.kind), "and what the full list missed is listed, too"

    async def test_a_change_that_watches_missed_is_seen_with_the_next_full_list_and_nothing_else_is_read(
        self, api: ApiServer, state: OperatorState, rounds: Rounds, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read: list[str] = []
        put = state.cache.put

        def noted(kind: str, body: Any) -> list[Key]:
            read.append(body["metadata"]["name"])
            return put(kind, body)

        for name in ("p", "stays"):
            api.create(POD, labelled(name))
        for name in ("team", "other"):
            api.create(CONFIG_MAP, facts_config_map(name, {"a": "1"}))
        await state.start()
        await rounds.go()
        monkeypatch.setattr(state.cache, "put", noted)
        api.change(POD, "p", status={"phase": "Running"})
        api.change(CONFIG_MAP, CONFIG_MAP_NAME, data={"a": "2"})
        await rounds.go(20)
        assert [pod.get("status") for pod in state.cache.children_of(LLAMA, POD.kind)] == [{"phase": "Running"}, None]
        assert [state.cache.model_facts(name) for name in ("team", "other")] == [{"a": "2"}, {"a": "1"}]
        assert sorted(read) == ["p", CONFIG_MAP_NAME]

    async def test_what_came_between_the_lists_of_two_namespaces_is_not_taken_for_gone(
        self, api: ApiServer, rounds: Rounds
    ) -> None:
        state = OperatorState(Settings(namespaces=("team", "other")))
        pods = f"list {POD.qualified_plural}"

        def comes() -> None:
            state.cache.put(POD.kind, api.create(POD, labelled("p")))  # as its watch tells

        api.before[pods] = lambda: api.before.update({pods: comes})
        try:
            await state.start()
            assert [pod["metadata"]["name"] for pod in state.cache.children_of(LLAMA, POD.kind)] == ["p"]
        finally:
            await stop(state)

    async def test_what_went_before_watches_began_is_missed_for_one_round(
        self, api: ApiServer, state: OperatorState, rounds: Rounds
    ) -> None:
        """kopf lists once more at a start, and tells of nothing that is no longer there then."""
        api.create(POD, labelled("p"))
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

        async def reconcile(_: Any, key: Key) -> Requeue:
            looked.append(key.name)
            if key.name == "fails":
                raise RuntimeError
            return Requeue()

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

        async def reconcile(_: Any, key: Key) -> Requeue:
            looked.append(key.name)
            if key.name in failing:
                raise RuntimeError
            return Requeue()

        monkeypatch.setattr(queue, "_FIRST_RETRY_S", 60.0)
        monkeypatch.setattr(resync, "_MOST_LOOKS", 1)
        monkeypatch.setattr(resync, "_LEAST_LOOKS", 1)
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

    async def test_what_is_due_is_looked_at_whosever_turn_it_is(
        self, api: ApiServer, state: OperatorState, rounds: Rounds, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A capture by the clock starts in its round, however many engines wait to be asked."""
        looked: list[str] = []

        async def reconcile(_: Any, key: Key) -> Requeue:
            looked.append(key.name)
            return Requeue(due_at_s=1.0 if key.name == "due" else None)

        monkeypatch.setattr(resync, "_MOST_LOOKS", 1)
        monkeypatch.setattr(resync, "_LEAST_LOOKS", 1)
        monkeypatch.setattr(module.Reconciler, "reconcile", reconcile)
        for name in ("a", "b", "due"):
            add(api, name)
        await state.start()
        await until(lambda: sorted(looked) == ["a", "b", "due"], lambda: f"all are looked at after the start: {looked}")
        for number in (2, 3):
            await rounds.go()
            await until(lambda n=number: looked.count("due") == n, lambda: f"each round: {looked}")
        assert len(looked) <= 7, "and of the others one"

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

    async def test_nodes_that_watches_missed_are_news_for_all(
        self, api: ApiServer, state: OperatorState, rounds: Rounds, looked: list[str]
    ) -> None:
        names = [f"llama-{number:02}" for number in range(41)]  # some would have their turn anyway
        for name in names:
            add(api, name)
        add_node(api, "goes")
        await state.start()
        await until(lambda: sorted(looked) == names, lambda: f"all are looked at after the start: {looked}")
        await rounds.go()
        for change in (partial(api.remove, NODE, "goes"), partial(add_node, api, "comes")):
            change()
            await rounds.go(19)
            looked.clear()
            await rounds.go()
            await until(lambda: set(looked) == set(names), lambda: f"plans may change: {sorted(looked)}")

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
        state = OperatorState(Settings(calibration=CalibrationFile(tmp_path / "calibration.json")))
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

    async def test_facts_files_that_come_are_news_for_all_and_are_parsed_beside_the_event_loop(
        self, api: ApiServer, tmp_path: Path, rounds: Rounds, looked: list[str]
    ) -> None:
        turned, in_time = threading.Event(), []
        loop = asyncio.get_running_loop()

        def read(file: Path) -> Mapping[str, Checkpoint]:
            loop.call_soon_threadsafe(turned.set)
            in_time.append(turned.wait(DEADLINE_S))
            return read_facts_file(file)

        state = OperatorState(Settings(facts=FactsFolder(tmp_path / "facts", read)))
        add(api)
        try:
            await state.start()
            await until(lambda: set(looked) == {"llama"}, lambda: f"it is looked at after the start: {looked}")
            looked.clear()
            write_facts(tmp_path / "facts", "tiny.json", "site/tiny")
            await rounds.go()
            await until(lambda: set(looked) == {"llama"}, lambda: f"facts came: {looked}")
        finally:
            await stop(state)
        assert in_time == [True], "the event loop turned while the file was read"


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
