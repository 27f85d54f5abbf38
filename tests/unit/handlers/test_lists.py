"""Full lists of several namespaces, in some of which the operator may do nothing."""

import logging
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from specdecode_operator.api.deployment import KIND, Key
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import Cluster, ClusterError, ForbiddenError, Page
from specdecode_operator.cluster.manifests import child_labels
from specdecode_operator.cluster.resources import POD, SPECDECODE_DEPLOYMENT
from specdecode_operator.handlers.resync import Lists
from specdecode_operator.handlers.settings import Settings
from tests.support.api_server import ApiServer
from tests.support.embedded_operator import embedded_operator, until
from tests.support.objects import tiny_cpu
from tests.unit.cluster.test_cache import body, versions

NAMESPACES = ("team", "gone")


def add(api: ApiServer, namespace: str, name: str = "llama") -> None:
    metadata = {"namespace": namespace, "name": name}
    api.create(SPECDECODE_DEPLOYMENT, {"metadata": metadata, "spec": tiny_cpu(suspend=True)})


def add_pod(api: ApiServer, namespace: str) -> None:
    labels = child_labels(Key(namespace, "llama"))
    api.create(POD, {"metadata": {"namespace": namespace, "name": f"of-{namespace}", "labels": labels}})


async def test_what_is_known_of_a_namespace_that_is_barred_stays_and_the_others_are_seen(
    api: ApiServer, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache()
    lists = Lists(cache, NAMESPACES)
    for namespace in NAMESPACES:
        add(api, namespace)
        add_pod(api, namespace)
    assert await lists.changes(cluster, SPECDECODE_DEPLOYMENT) == {Key(each, "llama") for each in NAMESPACES}
    assert await lists.changes(cluster, POD) == {Key(each, "llama") for each in NAMESPACES}

    api.barred = {"gone"}
    for namespace in NAMESPACES:
        api.remove(POD, f"of-{namespace}")
    add(api, "team", "second")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            seen = await lists.changes(cluster, SPECDECODE_DEPLOYMENT), await lists.changes(cluster, POD)
            assert seen in [({Key("team", "second")}, {Key("team", "llama")}), (set(), set())]
    assert set(cache.parents(KIND)) == {*(Key(each, "llama") for each in NAMESPACES), Key("team", "second")}
    assert [len(cache.children_of(Key(each, "llama"), POD.kind)) for each in NAMESPACES] == [0, 1]
    assert caplog.text.count("namespace gone is passed over") == 2, "once for each kind"

    api.barred = set()
    assert await lists.changes(cluster, POD) == {Key("gone", "llama")}


async def test_a_namespace_that_is_barred_again_is_told_again(
    api: ApiServer, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    lists = Lists(Cache(), NAMESPACES)
    with caplog.at_level(logging.WARNING):
        for api.barred in ({"gone"}, set(), {"gone"}):
            await lists.changes(cluster, SPECDECODE_DEPLOYMENT)
    assert caplog.text.count("namespace gone is passed over") == 2


async def test_what_was_made_between_two_pages_is_not_taken_for_gone() -> None:
    class Paged:
        async def pages(self, *_: Any, **__: Any) -> AsyncIterator[Page]:
            for version in (5, 9):
                yield Page([], [], version)

    cache = Cache()
    cache.put(POD.kind, body("a", 7))
    await Lists(cache, ()).changes(cast("Cluster", Paged()), POD)
    assert versions(cache, POD.kind) == ["7"]


async def test_who_may_list_nowhere_is_told_so(api: ApiServer, cluster: Cluster) -> None:
    api.barred = {*NAMESPACES}
    with pytest.raises(ForbiddenError, match="specdecodedeployments"):
        await Lists(Cache(), NAMESPACES).changes(cluster, SPECDECODE_DEPLOYMENT)


async def test_a_failure_in_one_namespace_is_no_bar(api: ApiServer, cluster: Cluster) -> None:
    pods = f"list {POD.qualified_plural}"

    def fails() -> None:
        api.refusals[pods] = (500, "etcd is slow")

    api.before[pods] = lambda: api.before.update({pods: fails})
    with pytest.raises(ClusterError, match="etcd is slow"):
        await Lists(Cache(), NAMESPACES).changes(cluster, POD)


async def test_a_namespace_that_is_barred_stops_the_work_in_no_other(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.barred = {"gone"}
    for namespace in NAMESPACES:
        add(api, namespace, f"in-{namespace}")

    def is_looked_at(name: str) -> bool:
        return "status" in (api.find(SPECDECODE_DEPLOYMENT, name) or {})

    async with embedded_operator(monkeypatch, Settings(namespaces=NAMESPACES)):
        await until(lambda: is_looked_at("in-team"), lambda: "it is looked at")
        assert not is_looked_at("in-gone")
        api.barred = set()
        await until(lambda: is_looked_at("in-gone"), lambda: "what is no longer barred is looked at")
