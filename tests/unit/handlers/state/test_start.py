"""What the operator sees at its start."""

import pytest

from specdecode_operator.cluster import client
from specdecode_operator.cluster.client import ClusterError
from specdecode_operator.cluster.manifests import child_labels
from specdecode_operator.cluster.resources import (
    LEADER_WORKER_SET,
    MANAGED_BY_LABEL,
    MANAGER,
    NODE,
    POD,
    SPECDECODE_CAPTURE,
    SPECDECODE_DEPLOYMENT,
    WATCHED,
    Resource,
)
from specdecode_operator.handlers.operator_state import OperatorState
from tests.support.api_server import ApiServer
from tests.support.embedded_operator import until
from tests.unit.deployment.pods.groups import WIDE, spec_at
from tests.unit.handlers.state.resync_rounds import GROUPS, LLAMA, Rounds, add, add_node, reason


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
