"""Resync: full lists, namespaces, turns of objects, stalled watches and CRD versions."""

import json
import logging
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from typing import Any, cast

import pytest

from specdecode_operator.api.deployment import KIND, Key
from specdecode_operator.cluster import client
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import Cluster, ClusterError, Page
from specdecode_operator.cluster.manifests import child_labels
from specdecode_operator.cluster.resources import (
    CONFIG_MAP,
    CUSTOM_RESOURCE_DEFINITION,
    DEVICE_CLASS,
    MANAGED_BY_LABEL,
    MANAGER,
    NODE,
    POD,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    SPECDECODE_CAPTURE,
    SPECDECODE_DEPLOYMENT,
    Resource,
)
from specdecode_operator.deployment.models.model_facts import CONFIG_MAP_NAME, facts_config_map
from specdecode_operator.deployment.requeue import Requeue
from specdecode_operator.handlers import main as module
from specdecode_operator.handlers import queue, resync
from specdecode_operator.handlers.main import OperatorState
from specdecode_operator.handlers.resync import STALLED_S, Lists, ResyncOrder, WatchProgress
from specdecode_operator.handlers.settings import Settings
from specdecode_operator.untrusted import read_answer
from tests.support.api_server import ApiServer
from tests.support.devices import GPUS, claiming, gpu, resource_slice
from tests.support.embedded_operator import embedded_operator, until
from tests.support.objects import Body, pair_70b, tiny_cpu
from tests.unit.cluster.test_cache import body, versions
from tests.unit.handlers.resync_rounds import LLAMA, Rounds, add, add_node, reason, stop
from tests.unit.handlers.test_leadership import Clock


def labelled(name: str) -> Body:
    """A pod of the object."""
    return {"metadata": {"namespace": "team", "name": name, "labels": child_labels(LLAMA)}}


class TestResync:
    async def test_kinds_without_watch_events_are_listed_each_round(
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

    async def test_claims_wait_for_the_api_and_then_for_devices(
        self, api: ApiServer, state: OperatorState, rounds: Rounds
    ) -> None:
        await state.start()
        api.refusals[f"list {RESOURCE_CLAIM_TEMPLATE.qualified_plural}"] = (404, "no such resource")
        add(api, spec=pair_70b(accelerator=claiming(), suspend=True))

        async def comes(planned: str) -> None:
            await rounds.go(2)
            await until(lambda: reason(api, "Planned") == planned, lambda: f"{reason(api, 'Planned')}, not {planned}")

        await comes("ResourceClaimsMissing")
        api.refusals.clear()
        await comes("DeviceClassNotFound")
        api.create(DEVICE_CLASS, GPUS)
        await comes("NoMatchingDevices")
        api.create(RESOURCE_SLICE, resource_slice("h200-0", *[gpu()] * 8))
        await comes("Fits")
        api.refusals[f"list {RESOURCE_SLICE.qualified_plural}"] = (403, "no right")
        await rounds.go(4)
        assert not state.cache.devices.is_known

    async def test_devices_are_not_listed_for_objects_without_claims(
        self, api: ApiServer, state: OperatorState, rounds: Rounds
    ) -> None:
        await state.start()
        add(api)
        await rounds.go(20)
        assert f"list {RESOURCE_SLICE.qualified_plural}" not in api.requests

    async def test_missed_deletions_are_found_by_the_next_full_list(
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

    async def test_deletions_before_a_watch_restart_are_found_in_the_next_round(
        self, api: ApiServer, state: OperatorState, rounds: Rounds
    ) -> None:
        """kopf lists then, which tells of nothing that is no longer there."""
        pods = [api.create(POD, labelled(name)) for name in ("goes", "stays")]
        await state.start()
        await rounds.go()
        api.remove(POD, "goes")
        state.handle(None, {"kind": POD.kind, **pods[1]})
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

    async def test_watch_restart_during_a_list_causes_another_list(
        self, api: ApiServer, state: OperatorState, rounds: Rounds
    ) -> None:
        lists = f"list {POD.qualified_plural}"
        await state.start()
        api.before[lists] = lambda: state.relist.due.add(POD.kind)
        await rounds.go()
        api.requests.clear()
        await rounds.go()
        assert lists in api.requests

    async def test_kind_that_cannot_be_listed_does_not_block_other_kinds(
        self, api: ApiServer, state: OperatorState, rounds: Rounds
    ) -> None:
        await state.start()
        api.refusals[f"list {CONFIG_MAP.qualified_plural}"] = (500, "etcd is slow")
        add(api)
        api.create(POD, labelled("p"))
        await rounds.go(4)
        assert LLAMA in state.cache.parents()
        assert state.cache.children_of(LLAMA, POD.kind), "and what the full list missed is listed, too"

    async def test_full_list_stores_only_objects_with_missed_changes(
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

    async def test_object_created_between_lists_of_two_namespaces_is_kept(self, api: ApiServer, rounds: Rounds) -> None:
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

    async def test_requeued_objects_are_reconciled_each_round_except_failing_ones(
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

    async def test_due_objects_are_reconciled_out_of_turn(
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


NAMESPACES = ("team", "gone")


def add_to(api: ApiServer, namespace: str, name: str = "llama") -> None:
    metadata = {"namespace": namespace, "name": name}
    api.create(SPECDECODE_DEPLOYMENT, {"metadata": metadata, "spec": tiny_cpu(suspend=True)})


def add_pod(api: ApiServer, namespace: str) -> None:
    labels = child_labels(Key(namespace, "llama"))
    api.create(POD, {"metadata": {"namespace": namespace, "name": f"of-{namespace}", "labels": labels}})


async def test_forbidden_namespace_keeps_its_cache_and_others_are_listed(
    api: ApiServer, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cache, asked = Cache(), set[Key]()
    lists = Lists(cache, NAMESPACES, asked.add)

    async def changes(resource: Resource) -> set[Key]:
        asked.clear()
        await lists.update(cluster, resource)
        return {*asked}

    for namespace in NAMESPACES:
        add_to(api, namespace)
        add_pod(api, namespace)
    assert await changes(SPECDECODE_DEPLOYMENT) == {Key(each, "llama") for each in NAMESPACES}
    assert await changes(POD) == {Key(each, "llama") for each in NAMESPACES}

    api.barred = {"gone"}
    for namespace in NAMESPACES:
        api.remove(POD, f"of-{namespace}")
    add_to(api, "team", "second")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            seen = await changes(SPECDECODE_DEPLOYMENT), await changes(POD)
            assert seen in [({Key("team", "second")}, {Key("team", "llama")}), (set(), set())]
    assert set(cache.parents(KIND)) == {*(Key(each, "llama") for each in NAMESPACES), Key("team", "second")}
    assert [len(cache.children_of(Key(each, "llama"), POD.kind)) for each in NAMESPACES] == [0, 1]
    assert caplog.text.count("namespace gone is skipped") == 2, "once for each kind"

    api.barred = set()
    assert await changes(POD) == {Key("gone", "llama")}


async def test_pages_before_a_failure_are_reported(
    api: ApiServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next list leaves out their objects, because the cache has them."""
    monkeypatch.setattr(client, "_PAGE", 2)
    cache, asked = Cache(), list[Key]()
    lists = Lists(cache, (), asked.append)
    for name in "abcd":
        add(api, name)
    pages = f"list {SPECDECODE_DEPLOYMENT.qualified_plural}"

    def fails_next() -> None:
        api.before[pages] = lambda: api.refusals.update({pages: (500, "etcd is slow")})

    api.before[pages] = fails_next
    with pytest.raises(ClusterError):
        await lists.update(cluster, SPECDECODE_DEPLOYMENT)
    assert sorted(key.name for key in asked) == ["a", "b"]
    api.before.clear()
    api.refusals.clear()
    await lists.update(cluster, SPECDECODE_DEPLOYMENT)
    assert sorted(key.name for key in asked) == ["a", "b", "c", "d"], "each change once"


async def test_object_deleted_without_an_event_is_reported(api: ApiServer, cluster: Cluster) -> None:
    """Its reconcile drops its metrics and the recorder."""
    cache, asked = Cache(), list[Key]()
    lists = Lists(cache, (), asked.append)
    add(api)
    await lists.update(cluster, SPECDECODE_DEPLOYMENT)
    api.remove(SPECDECODE_DEPLOYMENT, "llama")
    asked.clear()
    await lists.update(cluster, SPECDECODE_DEPLOYMENT)
    assert asked == [LLAMA]


async def test_object_created_between_two_pages_is_kept() -> None:
    class Paged:
        async def pages(self, *_: Any, **__: Any) -> AsyncIterator[Page]:
            for version in (5, 9):
                yield Page([], [], version)

    cache = Cache()
    cache.put(POD.kind, body("a", 7))
    await Lists(cache, (), lambda _: None).update(cast("Cluster", Paged()), POD)
    assert versions(cache, POD.kind) == ["7"]


async def test_object_that_cannot_be_read_does_not_hide_others(caplog: pytest.LogCaptureFixture) -> None:
    unreadable = body("a", 8)
    unreadable["metadata"] |= {"name": "poison", "uid": "poison", "labels": ["a"]}

    class Paged:
        async def pages(self, *_: Any, **__: Any) -> AsyncIterator[Page]:
            yield Page([unreadable, body("a", 7)], [], 9)

    cache = Cache()
    await Lists(cache, (), lambda _: None).update(cast("Cluster", Paged()), POD)
    assert versions(cache, POD.kind) == ["7"]
    assert "default/poison" in caplog.text


@pytest.mark.parametrize("resource", [POD, CONFIG_MAP, SPECDECODE_DEPLOYMENT, SPECDECODE_CAPTURE])
@pytest.mark.parametrize("way", ["list", "event", "resync"])
async def test_object_without_a_namespace_does_not_hide_others(
    resource: Resource, way: str, state: OperatorState, caplog: pytest.LogCaptureFixture
) -> None:
    good = {**body("a", 7), "kind": resource.kind, "apiVersion": resource.api_version, "spec": {}}
    bad = json.loads(json.dumps(good))
    del bad["metadata"]["namespace"]
    bad["metadata"]["name"] = CONFIG_MAP_NAME
    if way == "event":
        for each in (bad, good):
            state.objects.read_line(json.dumps({"type": "ADDED", "object": each}).encode())
    else:
        whole = {"kind": f"{resource.kind}List", "apiVersion": resource.api_version, "items": [bad, good]}
        text = json.dumps({**whole, "metadata": {"resourceVersion": "9"}}).encode()
        if way == "list":
            state.objects.read_response(text)
        else:

            class Paged:
                async def pages(self, *_: Any, is_known: Callable[[Body], bool], **__: Any) -> AsyncIterator[Page]:
                    yield Page(read_answer(text, is_known)["items"], [], 9)

            await Lists(state.cache, (), lambda _: None).update(cast("Cluster", Paged()), resource)
    knows = state.cache.knows_parent if resource.kind.startswith("SpecDecode") else state.cache.knows
    assert knows(resource.kind, good)
    assert f"{resource.kind} None/{CONFIG_MAP_NAME}" in caplog.text


async def test_forbidden_namespace_does_not_stop_work_in_others(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.barred = {"gone"}
    for namespace in NAMESPACES:
        add_to(api, namespace, f"in-{namespace}")

    def is_looked_at(name: str) -> bool:
        return "status" in (api.find(SPECDECODE_DEPLOYMENT, name) or {})

    async with embedded_operator(monkeypatch, Settings(namespaces=NAMESPACES)):
        await until(lambda: is_looked_at("in-team"), lambda: "it is looked at")
        assert not is_looked_at("in-gone")
        api.barred = set()
        await until(lambda: is_looked_at("in-gone"), lambda: "what is no longer barred is looked at")


ROUND_S = 15.0


def keys(count: int) -> list[Key]:
    return [Key("team", str(number)) for number in range(count)]


def round_of(
    turns: ResyncOrder, present: list[Key], close: frozenset[Key], with_policy: frozenset[Key] = frozenset()
) -> list[Key]:
    """Look at all whose turn it is."""
    looked = turns.next(present, 0.0)
    for key in looked:
        turns.looked(key, Requeue(is_close=key in close | with_policy, has_policy=key in with_policy))
    return looked


def test_few_active_objects_are_reconciled_each_round() -> None:
    present, turns = keys(64), ResyncOrder(ROUND_S)
    close = frozenset(present)
    assert all(sorted(round_of(turns, present, close)) == sorted(present) for _ in range(3))
    assert turns.interval_s == 15.0


def test_many_active_objects_lengthen_the_interval_without_starvation() -> None:
    present, turns = keys(1000), ResyncOrder(ROUND_S)
    close = frozenset(present)
    round_of(turns, present, close)
    looked = [round_of(turns, present, close) for _ in range(16)]
    assert max(map(len, looked)) == 64
    assert {key for each in looked for key in each} == close
    (interval,) = (sample.value for family in turns.collect() for sample in family.samples)
    assert interval == turns.interval_s == 240.0


def test_resync_is_fair_between_large_and_small_namespaces() -> None:
    few, small = [Key("few", "one"), Key("few", "two")], [Key(f"small-{number}", "one") for number in range(200)]
    present, turns = [*keys(800), *few, *small], ResyncOrder(ROUND_S)
    close = frozenset(present)
    round_of(turns, present, close)
    looked = [round_of(turns, present, close) for _ in range(28)]
    assert {len(each) for each in looked} == {64}
    assert {key for each in looked for key in each} == close, "in twice the rounds of an average one, everybody"
    rounds = [number for number, each in enumerate(looked) if few[0] in each]
    assert max(after - before for before, after in pairwise([0, *rounds])) <= 8, "32 of 202 namespaces in each round"


def test_idle_objects_are_spread_over_twenty_rounds() -> None:
    present, turns = keys(100), ResyncOrder(ROUND_S)
    round_of(turns, present, frozenset())
    looked = [round_of(turns, present, frozenset()) for _ in range(20)]
    assert max(map(len, looked)) == 5
    assert sorted(key for each in looked for key in each) == sorted(present)


def test_objects_with_policy_have_a_turn_in_three_rounds() -> None:
    """Otherwise, policies of more than 400 objects would never see enough of their window."""
    present, turns = keys(2000), ResyncOrder(ROUND_S)
    with_policy, close = frozenset(present[:600]), frozenset(present[600:])
    round_of(turns, present, close, with_policy)
    looked = [round_of(turns, present, close, with_policy) for _ in range(3)]
    assert sorted(key for each in looked for key in each if key in with_policy) == sorted(with_policy)
    assert [len(close.intersection(each)) for each in looked] == [20] * 3, "nor are the others forgotten"
    assert turns.interval_s == 15.0 * 1400 / 20


def test_scheduled_object_is_reconciled_when_due_out_of_turn() -> None:
    """With 2,000 objects each is looked at every eight minutes, which is later than a schedule may be."""
    present, turns = keys(2000), ResyncOrder(ROUND_S)
    for key in present:
        turns.looked(key, Requeue())
    last = present[-1]
    turns.looked(last, Requeue(due_at_s=1000.0))
    assert last not in turns.next(present, 999.0)
    assert turns.next(present, 1000.0).count(last) == 1
    turns.looked(last, Requeue(due_at_s=4600.0))
    assert last not in turns.next(present, 1000.0)
    assert last not in turns.next(present[:-1], 4600.0)


def test_captures_that_are_due_share_the_limit_of_a_round() -> None:
    """A capture whose next attempt is due, but waits for its deployment, stays due."""
    turns, due = ResyncOrder(ROUND_S), Requeue(due_at_s=1000.0)
    captures = [Key("large", f"c{number}", SPECDECODE_CAPTURE.kind) for number in range(500)]
    other, scheduled = Key("small", "c", SPECDECODE_CAPTURE.kind), Key("small", "scheduled")
    waiting = [Key("others", str(number)) for number in range(100)]
    present = [*captures, other, scheduled, *waiting]

    def looks(now_s: float) -> list[Key]:
        found = turns.next(present, now_s)
        for key in found:
            turns.looked(key, due if key in captures or key in (other, scheduled) else Requeue())
        return found

    looks(0.0)
    rounds = [looks(1000.0 + number) for number in range(32)]
    assert {len(each) for each in rounds} <= {64, 65}, "the schedule may have its turn as well"
    assert all(scheduled in each for each in rounds)
    assert other in rounds[0]
    assert {key for each in rounds for key in each} == set(present)


def versioned(version: int, namespace: str = "team") -> Body:
    about = {"namespace": namespace, "name": "llama", "uid": "1", "resourceVersion": str(version)}
    return {"metadata": {**about, "labels": {MANAGED_BY_LABEL: MANAGER}}}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def progress(clock: Clock) -> WatchProgress:
    return WatchProgress(clock=clock)


def test_watch_that_delivers_no_known_changes_is_stalled(progress: WatchProgress, clock: Clock) -> None:
    progress.brings(KIND, versioned(5))
    clock.now_s += 10 * STALLED_S
    assert progress.stalled() is None, "there was no news"
    progress.knows(KIND, versioned(7))
    clock.now_s += STALLED_S
    assert progress.stalled() is None
    progress.knows(KIND, versioned(9))
    clock.now_s += 1
    assert (progress.stalled() or "").startswith(f"the watch of {KIND} has delivered no events for {STALLED_S:.0f} s")
    progress.brings(KIND, versioned(9))
    assert progress.stalled() is None


def test_slow_watch_is_not_stalled(progress: WatchProgress, clock: Clock) -> None:
    progress.brings(KIND, versioned(1))
    progress.knows(KIND, versioned(100))
    for version in range(2, 10):
        clock.now_s += STALLED_S - 1
        progress.brings(KIND, versioned(version))
        assert progress.stalled() is None
    clock.now_s += STALLED_S + 1
    assert progress.stalled()


def test_watch_that_never_delivered_an_event_is_not_stalled(progress: WatchProgress, clock: Clock) -> None:
    progress.knows(KIND, versioned(1))
    progress.brings(POD.kind, versioned(2))
    clock.now_s += STALLED_S + 1
    assert progress.stalled() is None


@pytest.mark.parametrize(("by_namespace", "where"), [(True, " in b"), (False, None)])
def test_stall_is_tracked_per_namespace_with_namespaced_watches(
    clock: Clock, by_namespace: bool, where: str | None
) -> None:
    progress = WatchProgress(by_namespace=by_namespace, clock=clock)
    for namespace in "ab":
        progress.brings(KIND, versioned(1, namespace))
    progress.knows(KIND, versioned(5, "b"))
    clock.now_s += STALLED_S + 1
    progress.brings(KIND, versioned(6, "a"))
    assert (progress.stalled() is None) == (where is None)
    assert where is None or where in str(progress.stalled())


NAME = "specdecodedeployments.specdecode.io"


def install(api: ApiServer, version: str | None) -> None:
    labels = {"app.kubernetes.io/part-of": "specdecode"} | ({"app.kubernetes.io/version": version} if version else {})
    api.create(CUSTOM_RESOURCE_DEFINITION, {"metadata": {"name": NAME, "labels": labels}})


async def said(caplog: pytest.LogCaptureFixture, state: OperatorState) -> list[str]:
    with caplog.at_level(logging.WARNING, resync.__name__):
        await state.start()
        await state.stop()
    return [record.getMessage() for record in caplog.records if "CRDs" in record.getMessage()]


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        ("1.9.0", "has version 1.9.0, older than this 1.10.0: the API server drops fields"),
        ("1.11.0", "has version 1.11.0, newer than this 1.10.0, which does not support its new fields"),
        ("1.10.1", "has version 1.10.1, newer than this 1.10.0"),
        (None, "has no version label, older than this 1.10.0"),
    ],
)
async def test_older_and_newer_crds_are_reported(
    api: ApiServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    installed: str | None,
    words: str,
) -> None:
    monkeypatch.setattr("specdecode_operator.api.crds.__version__", "1.10.0")
    install(api, installed)
    (sentence,) = await said(caplog, OperatorState())
    assert sentence.startswith(f"{NAME} {words}")
    assert "specdecode crds | kubectl apply --server-side" in sentence
