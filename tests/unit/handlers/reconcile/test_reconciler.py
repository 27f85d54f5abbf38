"""One reconcile against an API server in memory: the order of its steps, and what stands in its way."""

import time
from typing import Any

import pytest

from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.client import ClusterError, ConflictError
from specdecode_operator.cluster.manifests import owned
from specdecode_operator.cluster.resources import (
    CHILDREN,
    CONFIG_MAP,
    EVENT,
    JOB,
    NODE,
    POD,
    READS_FOR_LABEL,
    SERVICE,
    SPECDECODE_DEPLOYMENT,
)
from specdecode_operator.deployment.models.model_facts import CONFIG_MAP_NAME
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.handlers.mounted_files import CalibrationFile
from tests.support.objects import H100, H200, Body, pair_70b, tiny_cpu
from tests.unit.deployment.spec.test_model_facts import answers, undescribed
from tests.unit.handlers.reconcile.reconciler_world import World

STATUS = "patch specdecodedeployments.specdecode.io/status llama"
CHILD_WRITES = ["patch configmaps llama-plan", "patch services llama", "patch deployments.apps llama"]


class TestSteps:
    async def test_names_are_checked_then_children_are_applied_then_the_status_tells(self, world: World) -> None:
        world.add(tiny_cpu())
        world.see()
        await world.reconciler.reconcile(parse_deployment(world.object).key)
        asked = [each for each in world.api.requests if "events" not in each]
        checks = [each.replace("patch", "get") for each in CHILD_WRITES]
        assert asked == [*checks, *CHILD_WRITES, STATUS]
        assert world.told() == ["Fits"]

    async def test_a_second_look_writes_nothing_though_the_api_server_filled_fields_in(self, world: World) -> None:
        world.add(tiny_cpu())
        assert await world.look() == [*CHILD_WRITES, STATUS]
        assert (world.api.find(SERVICE, "llama") or {})["spec"]["clusterIP"]
        assert await world.look() == []
        await world.reconciler.reconcile(parse_deployment(world.object).key)
        assert world.api.requests == [], "of what is there nothing is asked either"

    async def test_another_process_writes_nothing_where_all_is_as_the_one_before_left_it(self, world: World) -> None:
        world.add(tiny_cpu())
        await world.look()
        world.restart()
        assert await world.look() == []

    async def test_what_changed_while_no_operator_was_there_is_undone_and_told(self, world: World) -> None:
        world.add(tiny_cpu())
        await world.look()
        service = world.api.find(SERVICE, "llama") or {}
        world.api.change(SERVICE, "llama", spec={**service["spec"], "ports": []})
        world.restart()
        assert await world.look() == ["patch services llama"]
        assert (world.api.find(SERVICE, "llama") or {})["spec"] == service["spec"]
        assert "DriftRepaired" in world.told()

    async def test_without_its_status_all_is_applied_once_for_nobody_knows_what_was_answered(
        self, world: World
    ) -> None:
        world.add(tiny_cpu())
        await world.look()
        world.api.change(SPECDECODE_DEPLOYMENT, "llama", status={})
        world.restart()
        versions = [body["metadata"]["resourceVersion"] for each in CHILDREN for body in world.all(each)]
        assert await world.look() == [*CHILD_WRITES, STATUS]
        assert versions == [body["metadata"]["resourceVersion"] for each in CHILDREN for body in world.all(each)]
        assert await world.look() == []

    async def test_what_others_changed_is_undone_and_nothing_else_written(self, world: World) -> None:
        world.add(tiny_cpu())
        await world.look()
        service = world.api.find(SERVICE, "llama") or {}
        world.api.change(SERVICE, "llama", spec={**service["spec"], "ports": []})
        assert await world.look() == ["patch services llama"]
        assert (world.api.find(SERVICE, "llama") or {})["spec"] == service["spec"]
        assert world.told().count("DriftRepaired") == 1
        assert "DriftRepaired" not in [
            each["reason"] for each in world.all(EVENT) if "spec.ports" not in each["message"]
        ]

    async def test_what_changed_again_before_the_repair_is_told_with_it(self, world: World) -> None:
        world.add(tiny_cpu())
        await world.look()
        service = world.api.find(SERVICE, "llama") or {}
        world.api.change(SERVICE, "llama", spec={**service["spec"], "ports": []})
        world.see()
        world.api.change(SERVICE, "llama", spec={**service["spec"], "ports": [], "selector": {}})
        await world.reconciler.reconcile(parse_deployment(world.object).key)
        assert (world.api.find(SERVICE, "llama") or {})["spec"] == service["spec"]
        (told,) = (each["message"] for each in world.all(EVENT) if each["reason"] == "DriftRepaired")
        assert "spec.ports[http], spec.selector." in told

    async def test_who_changes_a_child_after_each_repair_is_named_and_answered_ever_more_rarely(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        world.add(tiny_cpu())
        await world.look()
        service = world.api.find(SERVICE, "llama") or {}
        now_s, repaired = time.monotonic(), []
        for second in range(60):
            monkeypatch.setattr(time, "monotonic", lambda second=second: now_s + second)
            if (world.api.find(SERVICE, "llama") or {})["spec"]["ports"]:
                world.api.change(SERVICE, "llama", spec={**service["spec"], "ports": []})
            if "patch services llama" in await world.look():
                repaired.append(second)
        assert repaired == [0, 1, 2, 10, 26, 58]
        assert world.said("ChildrenInSync")[1] == "RepairsUndone"
        assert "Service llama: spec.ports" in world.said("ChildrenInSync")[2]

    async def test_another_plan_is_told_as_an_event(self, world: World) -> None:
        for number, product in enumerate((H100, H200)):
            node = {"metadata": {"name": f"n{number}", "labels": {"nvidia.com/gpu.product": product}}}
            world.api.create(NODE, {**node, "status": {"allocatable": {"nvidia.com/gpu": "8"}}})
        world.add(pair_70b())
        await world.look()
        assert "PlanChanged" not in world.told()
        world.api.change(SPECDECODE_DEPLOYMENT, "llama", spec=pair_70b(parallelism={"tensor": 4}))
        await world.look()
        assert world.told().count("PlanChanged") == 1

    async def test_engines_that_serve_are_remembered_before_the_status_says_so(self, world: World) -> None:
        world.add(tiny_cpu())
        await world.look()
        world.serve()
        assert await world.look() == ["patch configmaps llama-last-good", STATUS]
        assert await world.look() == []

    async def test_what_a_stranger_remembers_by_that_name_is_left_alone(self, world: World) -> None:
        world.add(tiny_cpu())
        await world.look()
        world.serve()
        theirs = world.api.create(CONFIG_MAP, {"metadata": {"namespace": "team", "name": "llama-last-good"}})
        assert await world.look() == [STATUS]
        assert world.said()[:2] == ("False", "ChildNameConflict")
        assert world.api.find(CONFIG_MAP, "llama-last-good") == theirs

    async def test_what_cannot_be_remembered_is_told_in_the_status(self, world: World) -> None:
        world.add(tiny_cpu())
        await world.look()
        world.serve()
        world.api.refusals["patch configmaps"] = (403, "no")
        await world.look()
        assert world.said()[1] == "Forbidden"
        del world.api.refusals["patch configmaps"]
        assert "patch configmaps llama-last-good" in await world.look()
        assert world.said()[1] == "Serving"


class TestModels:
    @pytest.fixture
    async def read(self, world: World) -> World:
        """The pods of both Jobs have read their models."""
        world.add(undescribed())
        await world.look()
        assert world.said()[1] == "ResolvingModel"
        assert len(world.all(JOB)) == 2
        for number, pod in enumerate(answers(undescribed())):
            labels = {**pod["metadata"]["labels"], READS_FOR_LABEL: "llama"}
            meta = {**pod["metadata"], "labels": labels, "namespace": "team", "name": f"reader-{number}"}
            world.api.create(POD, {**pod, "metadata": meta})
        return world

    async def test_what_was_read_is_kept_before_its_jobs_go(self, read: World) -> None:
        written = await read.look()
        assert written[0] == "create configmaps"
        assert [each.split()[0] for each in written if "jobs" in each] == ["delete", "delete"]
        assert "patch deployments.apps llama" in written

    async def test_no_job_goes_while_it_cannot_be_kept(self, read: World) -> None:
        read.api.refusals["create configmaps"] = (403, "exceeded quota: small")
        assert not [each for each in await read.look() if each.startswith("delete")]
        assert read.said()[1] == "RefusedForNow"

    async def test_a_strangers_config_map_is_left_alone(self, read: World) -> None:
        theirs = read.api.create(CONFIG_MAP, {"metadata": {"namespace": "team", "name": CONFIG_MAP_NAME}, "data": {}})
        assert await read.look() == [STATUS]
        assert read.said()[:2] == ("False", "ChildNameConflict")
        assert read.api.find(CONFIG_MAP, CONFIG_MAP_NAME) == theirs


class TestObstacles:
    async def test_a_taken_name_stops_all_writes(self, world: World) -> None:
        world.api.create(SERVICE, {"metadata": {"namespace": "team", "name": "llama"}, "spec": {}})
        world.add(tiny_cpu())
        assert await world.look() == [STATUS]
        assert world.said()[:2] == ("False", "ChildNameConflict")
        assert world.said("Stalled")[0] == "True"
        world.api.remove(SERVICE, "llama")
        assert await world.look() == [*CHILD_WRITES, STATUS]

    @pytest.mark.parametrize("name", ["llama", "llama-more"])
    @pytest.mark.parametrize("owners", [[], [{"kind": "Service", "apiVersion": "v1", "name": "other", "uid": "other"}]])
    async def test_labels_alone_make_nothing_ours(self, world: World, name: str, owners: list[Body]) -> None:
        body = owned({"kind": "Service", "metadata": {"name": name}, "spec": {}}, Key("team", "llama"), "any")
        body["metadata"]["ownerReferences"] = owners
        before = world.api.create(SERVICE, body)
        world.add(tiny_cpu())
        assert await world.look() == ([STATUS] if name == "llama" else [*CHILD_WRITES, STATUS])
        assert world.api.find(SERVICE, name) == before
        assert (world.said()[1] == "ChildNameConflict") == (name == "llama")

    @pytest.mark.parametrize(
        ("owner", "reason"),
        [
            ({}, "WaitingForCleanup"),
            ({"name": "other"}, "ChildNameConflict"),
            ({"kind": "Deployment"}, "ChildNameConflict"),
            ({"apiVersion": "example.org/v1"}, "ChildNameConflict"),
        ],
        ids=["an earlier object of this name", "another object", "another kind", "a kind of others"],
    )
    async def test_only_what_an_earlier_object_of_the_name_left_is_waited_for(
        self, world: World, owner: Body, reason: str
    ) -> None:
        left_by = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "name": "llama"}
        meta = {"namespace": "team", "name": "llama", "ownerReferences": [{**left_by, "uid": "earlier", **owner}]}
        world.api.create(SERVICE, {"metadata": meta, "spec": {}})
        world.add(tiny_cpu())
        assert await world.look() == [STATUS]
        assert world.said()[1] == reason

    @pytest.mark.parametrize("status_is_current", [False, True])
    async def test_a_failing_api_server_is_told_once_for_a_spec(self, world: World, *, status_is_current: bool) -> None:
        world.add(tiny_cpu())
        if status_is_current:
            world.api.refusals["create services"] = (403, "no")
            await world.look()
        before = world.object.get("status")
        world.api.refusals["create services"] = (500, "etcd is slow")
        if status_is_current:
            with pytest.raises(ClusterError, match="etcd is slow"):
                await world.look()
            assert world.object["status"] == before, "what it says still holds; the queue tries again"
        else:
            await world.look()
            assert world.said() == ("Unknown", "ApiServerError", "patch services team/llama: etcd is slow")

    async def test_a_refused_child_names_the_pod_template_only_where_there_is_one(self, world: World) -> None:
        world.add(tiny_cpu())
        world.api.refusals["create deployments.apps"] = (422, "spec.template is wrong")
        await world.look()
        assert world.said()[:2] == ("False", "ChildRefused")
        assert "podTemplate" not in world.said()[2]
        world.api.change(
            SPECDECODE_DEPLOYMENT, "llama", spec=tiny_cpu(podTemplate={"metadata": {"labels": {"team": "a"}}})
        )
        await world.look()
        assert "spec.podTemplate is merged into it" in world.said()[2]

    async def test_a_stumble_of_the_operator_is_told_without_its_words_and_tried_again(self, world: World) -> None:
        class Broken(CalibrationFile):
            def read(self) -> Any:
                message = "token hunter2"
                raise RuntimeError(message)

        world.calibration = Broken(None)
        world.restart()
        world.add(tiny_cpu())
        with pytest.raises(RuntimeError):
            await world.look()
        assert world.said()[1] == "InternalError"
        assert "hunter2" not in str(world.object["status"])

    async def test_events_that_cannot_be_posted_hold_nothing_up(self, world: World) -> None:
        world.add(tiny_cpu())
        world.api.refusals["create events"] = (403, "no")
        assert await world.look() == [*CHILD_WRITES, STATUS]


class TestDeletion:
    @pytest.mark.parametrize("is_leaving", [False, True], ids=["gone", "being deleted"])
    async def test_nothing_is_written_for_what_is_gone(self, world: World, *, is_leaving: bool) -> None:
        world.add(tiny_cpu())
        key = parse_deployment(world.object).key
        if is_leaving:
            meta = {**world.object["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}
            world.api.change(SPECDECODE_DEPLOYMENT, "llama", metadata=meta)
            world.see()
        await world.reconciler.reconcile(key)
        assert world.api.requests == []

    async def test_one_that_goes_in_the_middle_is_forgotten_though_no_event_says_so(self, world: World) -> None:
        world.add(tiny_cpu())
        key = parse_deployment(world.object).key
        world.see()
        world.api.before["patch services"] = lambda: world.api.remove(SPECDECODE_DEPLOYMENT, "llama")
        await world.reconciler.reconcile(key)
        assert world.cache.parent(key) is None
        assert world.told() == []
        world.api.requests.clear()
        await world.reconciler.reconcile(key)
        assert world.api.requests == []

    async def test_one_made_anew_in_the_middle_does_not_get_the_status_of_its_predecessor(self, world: World) -> None:
        world.add(tiny_cpu())
        key = parse_deployment(world.object).key
        world.see()

        def replace() -> None:
            world.api.remove(SPECDECODE_DEPLOYMENT, "llama")
            world.add(tiny_cpu(replicas=2))

        world.api.before[STATUS.removesuffix(" llama")] = replace
        with pytest.raises(ConflictError):
            await world.reconciler.reconcile(key)
        assert "status" not in world.object
        assert STATUS in await world.look()

    async def test_its_residual_goes_from_the_metrics(self, world: World, engine_port: int) -> None:
        await world.measure(engine_port)
        assert world.measured()
        world.cache.drop_parent(SPECDECODE_DEPLOYMENT.kind, world.object)
        await world.reconciler.reconcile(parse_deployment(world.object).key)
        assert not world.measured()
