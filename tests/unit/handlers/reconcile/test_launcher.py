"""What is written when engines of one kind and of the other take each other's place."""

import asyncio
import time
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, cast

import pytest

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import Cluster
from specdecode_operator.cluster.clock import ServerTime
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.cluster.resources import CHILDREN
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.models.model_facts import facts_config_map
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.rollout.blocked_pods import POD_REJECTED
from specdecode_operator.deployment.rollout.rollout_progress import NO_GROUP_HISTORY, GroupHistory
from specdecode_operator.handlers.apply_children import ChildNameTakenError, EngineChildren
from tests.support.decisions import desired_state
from tests.support.model_caches import cached
from tests.support.objects import parent
from tests.unit.deployment.objects.test_multi_node import FOUR_H100
from tests.unit.deployment.pods.groups import WIDE, spec_at

OWNER = (Key("default", "llama"), "uid-1")


class FakeCluster:
    """Stores what is written; one version and one UID for each object."""

    clock = ServerTime()

    def __init__(self) -> None:
        self.stored: dict[tuple[str, str], Body] = {}
        self.merges = 0

    async def get(self, resource: Any, _namespace: str, name: str, **_: bool) -> Body | None:
        return self.stored.get((resource.kind, name))

    async def apply_new(self, body: Body) -> Body:
        return await self.apply(body)

    async def apply(self, body: Body) -> Body:
        return self._store(body)

    async def merge(self, body: Body, change: Body) -> Body:
        self.merges += 1
        return self._store({**body, "spec": {**body["spec"], **change["spec"]}})

    async def delete(self, body: Body) -> bool:
        return self.stored.pop((body["kind"], body["metadata"]["name"]), None) is not None

    def jobs(self) -> int:
        """How many Jobs there are."""
        return sum(kind == "Job" for kind, _ in self.stored)

    def engines(self) -> dict[str, int]:
        """How many engines each kind starts."""
        kinds = {"Deployment", "LeaderWorkerSet"}
        return {kind: body["spec"]["replicas"] for (kind, _), body in self.stored.items() if kind in kinds}

    def _store(self, body: Body) -> Body:
        name = f"{body['kind']}/{body['metadata']['name']}"
        metadata = {**body["metadata"], "uid": name, "resourceVersion": "1"}
        self.stored[body["kind"], body["metadata"]["name"]] = {**body, "metadata": metadata}
        return {**body, "metadata": metadata}


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


def launch(cluster: FakeCluster, *specs: Body, nodes: Sequence[tuple[NodeFacts, ...]] = ()) -> None:
    """Launch one spec after the other, each on its nodes."""
    cache = Cache()
    launcher = EngineChildren(cast("Cluster", cluster), cache, *OWNER)
    for spec, present in zip_longest(specs, nodes, fillvalue=FOUR_H100):
        owner = parse_deployment(parent(cast("Body", spec)))
        asyncio.run(
            launcher.carry_out(
                owner, desired_state(owner, cast("tuple[NodeFacts, ...]", present), has_leader_worker_sets=True)
            )
        )
        for resource in CHILDREN:
            live = [body for (kind, _), body in cluster.stored.items() if kind == resource.kind]
            cache.retain(resource.kind, [body["metadata"]["uid"] for body in live], 1)


ONE_NODE = spec_at({"tensor": 4}, replicas=1)


@pytest.mark.parametrize(("changes", "engines"), [({"replicas": 3}, 3), ({"suspend": True}, 0), ({"replicas": 0}, 0)])
def test_engines_that_a_pause_keeps_are_as_many_as_are_wanted(
    cluster: FakeCluster, changes: Body, engines: int
) -> None:
    launch(cluster, ONE_NODE, spec_at(WIDE, rollout={"paused": True}, **changes))
    assert cluster.engines() == {"Deployment": engines}


def test_engines_that_are_as_many_as_are_wanted_are_not_scaled_again(cluster: FakeCluster) -> None:
    paused = spec_at(WIDE, rollout={"paused": True}, replicas=3)
    launch(cluster, ONE_NODE, paused, paused)
    assert cluster.merges == 1


def test_the_other_kind_takes_over_after_the_pause(cluster: FakeCluster) -> None:
    launch(cluster, ONE_NODE, spec_at(WIDE, rollout={"paused": True}), spec_at(WIDE))
    assert cluster.engines() == {"LeaderWorkerSet": 1}


def test_groups_that_nodes_refuse_rest_and_come_back_though_neither_children_nor_plan_change(
    cluster: FakeCluster,
) -> None:
    owner, asked = parse_deployment(parent(spec_at(WIDE))), []
    desired = desired_state(owner, FOUR_H100, has_leader_worker_sets=True)
    launcher = EngineChildren(cast("Cluster", cluster), Cache(), *OWNER)
    crashed = frozenset(("0", "0", str(number)) for number in range(3))
    refused = GroupHistory(crashed=crashed, blocked=Blocked(POD_REJECTED, "no"), rejected_s=time.time())
    for groups in (NO_GROUP_HISTORY, NO_GROUP_HISTORY, NO_GROUP_HISTORY, refused, NO_GROUP_HISTORY):
        asyncio.run(launcher.carry_out(owner, desired, groups))
        asked.append(cluster.engines())
    assert [each["LeaderWorkerSet"] for each in asked] == [1, 1, 1, 0, 1]


def test_engines_that_were_in_line_are_those_that_others_replace(cluster: FakeCluster) -> None:
    launcher = EngineChildren(cast("Cluster", cluster), Cache(), *OWNER)
    before, after = (parse_deployment(parent(cast("Body", spec))) for spec in (ONE_NODE, spec_at(WIDE)))
    desired = desired_state(before, FOUR_H100, has_leader_worker_sets=True)
    for _ in range(3):
        asyncio.run(launcher.carry_out(before, desired))
    assert launcher.is_in_line(before, desired)
    live, replaced = launcher.workloads(desired_state(after, FOUR_H100, has_leader_worker_sets=True))
    assert live is None
    assert replaced is not None
    assert replaced["kind"] == "Deployment"


def test_no_engine_of_the_old_kind_stays_when_none_is_wanted(cluster: FakeCluster) -> None:
    launch(cluster, ONE_NODE, spec_at(WIDE, rollout={"strategy": "Surge"}, suspend=True))
    assert cluster.engines() == {"LeaderWorkerSet": 0}


DOWNLOADED = cached(parallelism={"tensor": 4})


def test_a_download_goes_on_while_the_nodes_are_away(cluster: FakeCluster) -> None:
    """An autoscaler takes idle nodes away, and engines come only after the download."""
    launch(cluster, DOWNLOADED, DOWNLOADED, nodes=[FOUR_H100, ()])
    assert cluster.jobs() == 2


def test_a_download_that_nobody_wants_any_more_ends(cluster: FakeCluster) -> None:
    launch(cluster, DOWNLOADED)
    assert cluster.jobs() == 2
    launch(cluster, DOWNLOADED, cached(parallelism={"tensor": 7}))
    assert cluster.jobs() == 0


class Facts:
    """Has the ConfigMap of what was read of models, or none, and notes how it is written."""

    def __init__(self, there: Body | None) -> None:
        self.there = there
        self.written: list[tuple[str, str | None]] = []

    async def get(self, *_: Any) -> Body | None:
        return self.there

    async def create(self, body: Body) -> Body:
        self.written.append(("create", None))
        return {**body, "metadata": {**body["metadata"], "uid": "new", "resourceVersion": "1"}}

    async def merge(self, body: Body, patch: Body) -> Body:
        self.written.append(("merge", body["metadata"]["uid"]))
        return {**body, **patch, "metadata": {**body["metadata"], **patch["metadata"], "resourceVersion": "2"}}


@pytest.mark.parametrize("is_known", [False, True])
def test_what_is_read_of_a_model_goes_into_the_very_config_map_that_was_seen_or_into_a_new_one(is_known: bool) -> None:
    ours = facts_config_map("default", {"a": "{}"})
    ours["metadata"] |= {"uid": "seen", "resourceVersion": "1"}
    for there, written in ((None, ("create", None)), (ours, ("merge", "seen"))):
        cache, cluster = Cache(), Facts(there)
        if is_known:  # by a watch that is late
            cache.put("ConfigMap", {**ours, "metadata": {**ours["metadata"], "uid": "of before"}})
        asyncio.run(EngineChildren(cast("Cluster", cluster), cache, *OWNER).keep_model_facts({"b": "{}"}))
        assert cluster.written == [written]


def test_a_config_map_that_is_not_ours_any_more_is_left_alone_though_a_watch_still_shows_ours() -> None:
    ours = facts_config_map("default", {"a": "{}"})
    ours["metadata"] |= {"uid": "of before", "resourceVersion": "1"}
    cache, cluster = Cache(), Facts({"metadata": {**ours["metadata"], "uid": "theirs", "labels": {}}})
    cache.put("ConfigMap", ours)
    with pytest.raises(ChildNameTakenError):
        asyncio.run(EngineChildren(cast("Cluster", cluster), cache, *OWNER).keep_model_facts({"b": "{}"}))
    assert not cluster.written
