"""Reconcile one object: order of steps, obstacles, deletion, figures, decay and arms."""

import copy
import json
import time
from collections.abc import Mapping
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from specdecode_operator.api.deployment import Key, SpecDecodeDeploymentSpec
from specdecode_operator.api.deployment_status import FiguresSource, FiguresStatus, FigureStatus
from specdecode_operator.cluster.client import Cluster, ClusterError, ConflictError
from specdecode_operator.cluster.manifests import owned
from specdecode_operator.cluster.observed_figures import FiguresReader
from specdecode_operator.cluster.resources import (
    CONFIG_MAP,
    DEPLOYMENT,
    DEPLOYMENT_LABEL,
    EVENT,
    JOB,
    NODE,
    POD,
    SERVICE,
    SPECDECODE_CAPTURE,
    SPECDECODE_DEPLOYMENT,
)
from specdecode_operator.deployment.desired_state import Launch
from specdecode_operator.deployment.observed.decay import LEARNED_WINDOWS
from specdecode_operator.deployment.parsed_deployment import engine_spec_hash, parse_deployment
from specdecode_operator.handlers import reconcile_deployment
from specdecode_operator.handlers.decision_cache import DecisionCache
from specdecode_operator.handlers.mounted_files import CalibrationFile
from specdecode_operator.vllm.engine_metrics import Reading, Unreachable
from tests.support.api_server import ApiServer
from tests.support.captures import capture
from tests.support.engine_work import LOOK_S, Working
from tests.support.model_caches import CACHE, DRAFT, TARGET, cached
from tests.support.model_caches import pod as downloaded_by
from tests.support.objects import H200, Body, ended, tiny_cpu
from tests.support.trainings import training
from tests.unit.deployment.test_speculation_in_force import counting
from tests.unit.handlers.reconciler_world import World, pod_metadata

SCHEDULE = {"name": "daily", "schedule": "0 3 * * *", "suspend": True}
STATUS = "patch specdecodedeployments.specdecode.io/status llama"
CHILD_WRITES = [
    "patch services llama",
    "patch configmaps specdecode-recorder",
    "patch deployments.apps llama",
    "patch configmaps llama-plan",
]


class TestSteps:
    async def test_reconcile_creates_children_then_writes_status(self, world: World) -> None:
        world.add(tiny_cpu())
        world.see()
        await world.reconciler.reconcile(parse_deployment(world.object).key)
        asked = [each for each in world.api.requests if "events" not in each]
        assert asked == [*CHILD_WRITES, STATUS]
        assert world.told() == ["Fits"]

    async def test_second_reconcile_writes_nothing_despite_api_server_defaults(self, world: World) -> None:
        world.add(tiny_cpu())
        assert await world.look() == [*CHILD_WRITES, STATUS]
        assert (world.api.find(SERVICE, "llama") or {})["spec"]["clusterIP"]
        assert await world.look() == []
        await world.reconciler.reconcile(parse_deployment(world.object).key)
        assert world.api.requests == [], "of what is there nothing is asked either"

    async def test_drift_event_includes_changes_made_before_the_repair(self, world: World) -> None:
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

    async def test_undone_rollout_is_reported_as_drift(self, world: World) -> None:
        world.add(tiny_cpu())
        await world.look()
        first = copy.deepcopy(world.api.find(DEPLOYMENT, "llama") or {})
        world.api.change(SPECDECODE_DEPLOYMENT, "llama", spec=tiny_cpu(serving={"maxModelLen": 512}))
        await world.look()
        second = copy.deepcopy(world.api.find(DEPLOYMENT, "llama") or {})
        assert second["spec"] != first["spec"]
        assert not any(each["reason"] == "DriftRepaired" for each in world.all(EVENT)), "a change of the spec"
        # `kubectl rollout undo` restores the annotations of the ReplicaSet, too.
        metadata = {**second["metadata"], "annotations": first["metadata"]["annotations"]}
        undone = {**second["spec"], "template": first["spec"]["template"]}
        world.api.change(DEPLOYMENT, "llama", spec=undone, metadata=metadata)
        assert await world.look() == ["patch deployments.apps llama"]
        assert (world.api.find(DEPLOYMENT, "llama") or {})["spec"] == second["spec"]
        (told,) = (each["message"] for each in world.all(EVENT) if each["reason"] == "DriftRepaired")
        assert "Deployment llama: spec.template." in told

    async def test_last_good_template_is_saved_before_the_status_is_written(self, world: World) -> None:
        world.add(tiny_cpu())
        await world.look()
        world.serve()
        assert await world.look() == ["patch configmaps llama-last-good", STATUS]
        assert await world.look() == []

    async def test_refused_last_good_write_is_reported_in_the_status(self, world: World) -> None:
        world.add(tiny_cpu())
        await world.look()
        world.serve()
        world.api.refusals["patch configmaps"] = (403, "no")
        await world.look()
        assert world.said()[1] == "Forbidden"
        del world.api.refusals["patch configmaps"]
        assert "patch configmaps llama-last-good" in await world.look()
        assert world.said()[1] == "Serving"

    async def test_engines_are_scraped_while_the_last_good_write_is_refused(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        world.add(tiny_cpu())
        await world.look()
        world.start_engines()
        world.serve()
        read_all = AsyncMock(return_value={"llama-1": counting(600, 600)})
        monkeypatch.setattr(world.probe, "read_all", read_all)
        world.api.refusals["patch configmaps"] = (403, "no")
        for looks in (1, 2):
            await world.look()
            assert world.said()[1] == "Forbidden"
            assert read_all.await_count == looks


class TestObstacles:
    @pytest.mark.parametrize("name", ["llama", "llama-more"])
    @pytest.mark.parametrize("owners", [[], [{"kind": "Service", "apiVersion": "v1", "name": "other", "uid": "other"}]])
    async def test_object_with_our_labels_and_other_owner_is_not_changed(
        self, world: World, name: str, owners: list[Body]
    ) -> None:
        body = owned({"kind": "Service", "metadata": {"name": name}, "spec": {}}, Key("team", "llama"), "any")
        body["metadata"]["ownerReferences"] = owners
        before = world.api.create(SERVICE, body)
        world.add(tiny_cpu())
        assert await world.look() == ([CHILD_WRITES[0], STATUS] if name == "llama" else [*CHILD_WRITES, STATUS])
        assert bool(world.all(CONFIG_MAP)) == (name != "llama")
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
    async def test_only_children_of_an_earlier_object_of_the_name_are_waited_for(
        self, world: World, owner: Body, reason: str
    ) -> None:
        left_by = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "name": "llama"}
        meta = {"namespace": "team", "name": "llama", "ownerReferences": [{**left_by, "uid": "earlier", **owner}]}
        world.api.create(SERVICE, {"metadata": meta, "spec": {}})
        world.add(tiny_cpu())
        assert await world.look() == [CHILD_WRITES[0], STATUS]
        assert not world.all(CONFIG_MAP)
        assert world.said()[1] == reason

    @pytest.mark.parametrize("status_is_current", [False, True])
    async def test_api_server_failure_is_reported_once_per_spec(self, world: World, *, status_is_current: bool) -> None:
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

    async def test_internal_error_is_reported_without_its_message(self, world: World) -> None:
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

    async def test_refused_events_do_not_block_the_reconcile(self, world: World) -> None:
        world.add(tiny_cpu())
        world.api.refusals["create events"] = (403, "no")
        assert await world.look() == [*CHILD_WRITES, STATUS]


class TestDeletion:
    @pytest.mark.parametrize("is_leaving", [False, True], ids=["gone", "being deleted"])
    async def test_nothing_is_written_for_deleted_objects(self, world: World, *, is_leaving: bool) -> None:
        world.add(tiny_cpu())
        key = parse_deployment(world.object).key
        if is_leaving:
            meta = {**world.object["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}
            world.api.change(SPECDECODE_DEPLOYMENT, "llama", metadata=meta)
            world.see()
        await world.reconciler.reconcile(key)
        assert world.api.requests == []

    async def test_recreated_object_does_not_get_the_status_of_its_predecessor(self, world: World) -> None:
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


async def test_engine_is_unreachable_after_30_seconds_without_an_answer(
    world: World, engine_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.add(tiny_cpu(serving={"maxModelLen": 1024, "port": engine_port}))
    await world.look()
    world.start_engines()
    world.serve()
    reasons, now_s = [], time.monotonic()
    for look, address in enumerate(("127.0.0.1", "::1", "::1", "127.0.0.1", "::1", "::1", "::1", "127.0.0.1")):
        monkeypatch.setattr(time, "monotonic", lambda look=look: now_s + 15 * look)
        pod = world.api.find(POD, "llama-1") or {}
        world.api.change(POD, "llama-1", status={**pod["status"], "podIP": address})
        await world.look()
        reasons.append(world.said("SpeculationActive")[1])
    known = reasons[0]
    assert known != "Unreachable"
    assert reasons == [known] * 6 + ["Unreachable", known]


async def test_not_drafting_is_detected_over_several_reconciles(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.add(tiny_cpu())
    await world.look()
    world.start_engines()
    world.serve()
    reasons = []
    for steps, drafts in ((600, 600), (900, 600), (1200, 600), (1800, 1200)):
        said = AsyncMock(return_value={"llama-1": counting(steps, drafts)})
        monkeypatch.setattr(world.probe, "read_all", said)
        await world.look()
        reasons.append(world.said("SpeculationActive")[1])
    assert reasons == ["Drafting", "Drafting", "NotDrafting", "Drafting"]


async def test_observed_status_is_written_at_most_once_a_minute(
    world: World, engine_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.monotonic()

    async def engines_after(seconds: float) -> int:
        monkeypatch.setattr(time, "monotonic", lambda: now_s + seconds)
        await world.look()
        return int(world.object["status"]["observed"]["engines"])

    world.add(tiny_cpu(replicas=2, serving={"maxModelLen": 1024, "port": engine_port}))
    await world.look()
    world.start_engines("llama-1")
    assert await engines_after(0) == 1
    world.start_engines("llama-2")
    assert await engines_after(59) == 1, "they may change again in a minute"
    assert await engines_after(60) == 2
    world.start_engines("llama-3")
    assert await engines_after(61) == 2
    world.restart()
    assert await engines_after(61) == 3


class TestLook:
    """Looks at the engines of an object at rest."""

    KEY = Key("team", "llama")

    @pytest.fixture(autouse=True)
    def _clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        start_s = time.monotonic()
        self.passed_s = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: start_s + self.passed_s)

    async def reconciled(self, world: World, readings: list[Reading], **spec: Any) -> None:
        """Reconcile once per reading, a minute apart."""
        world.add(tiny_cpu(**spec))
        await world.look()
        world.start_engines()
        world.serve()
        for reading in readings:
            self.passed_s += 60
            world.probe.read_all = AsyncMock(return_value={"llama-1": reading})  # type: ignore[method-assign]
            await world.look()

    async def test_nothing_is_to_do_while_engines_report_the_same(self, world: World) -> None:
        await self.reconciled(world, [counting(600, 600)] * 3)
        world.api.requests.clear()
        requeue = await world.reconciler.look(self.KEY)
        assert requeue is not None
        assert requeue.is_close
        assert world.api.requests == []

    async def test_engines_that_report_something_else_are_reconciled(self, world: World) -> None:
        await self.reconciled(world, [counting(600, 600)] * 3)
        world.probe.read_all = AsyncMock(return_value={"llama-1": counting(1200, 600)})  # type: ignore[method-assign]
        assert await world.reconciler.look(self.KEY) is None
        await world.look()
        assert world.said("SpeculationActive")[1] == "NotDrafting"

    async def test_versions_in_the_cache_are_reconciled_without_an_event(self, world: World) -> None:
        """A list that failed halfway has stored them."""
        await self.reconciled(world, [counting(600, 600)] * 3)
        world.api.change(SERVICE, "llama", spec={"clusterIP": "10.0.0.7"})
        world.see()
        assert await world.reconciler.look(self.KEY) is None

    async def test_write_of_figures_alone_settles_an_object(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(FiguresReader, "read", AsyncMock(side_effect=[None, figures("1")]))
        await self.reconciled(world, [counting(600, 600)] * 2)
        assert world.object["status"]["figures"]["values"][0]["value"] == "1"
        assert await world.reconciler.look(self.KEY) is not None

    async def test_write_of_more_than_figures_does_not_settle_an_object(self, world: World) -> None:
        await self.reconciled(world, [counting(600, 600)] * 2)
        world.api.change(DEPLOYMENT, "llama", status={"readyReplicas": 1})
        self.passed_s += 60
        assert await world.look() == [STATUS]
        assert await world.reconciler.look(self.KEY) is None

    async def test_object_whose_observed_status_waits_is_reconciled(self, world: World) -> None:
        await self.reconciled(world, [counting(600, 600)])
        world.start_engines("llama-2")
        readings = dict.fromkeys(("llama-1", "llama-2"), counting(600, 600))
        world.probe.read_all = AsyncMock(return_value=readings)  # type: ignore[method-assign]
        for engines, seconds in ((1, 10), (1, 10), (2, 60)):
            self.passed_s += seconds
            await world.look()
            assert world.object["status"]["observed"]["engines"] == engines
            assert await world.reconciler.look(self.KEY) is None

    async def test_figures_that_moved_are_written(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(FiguresReader, "read", AsyncMock(side_effect=map(figures, "12")))
        await self.reconciled(world, [counting(600, 600)] * 3)
        assert await world.reconciler.look(self.KEY) is not None
        self.passed_s += 300
        assert await world.reconciler.look(self.KEY) is None

    async def test_objects_at_rest_are_reconciled_from_time_to_time(self, world: World) -> None:
        await self.reconciled(world, [counting(600, 600)] * 3)
        looks = [await world.reconciler.look(self.KEY) is not None for _ in range(30)]
        assert looks == [True] * 20 + [False] * 10

    @pytest.mark.parametrize(
        ("readings", "spec"),
        [
            ([counting(600, 600)], {}),
            ([counting(600, 600), counting(900, 900)], {}),
            ([Unreachable("/metrics answered 500")] * 3, {}),
            ([counting(600, 600)] * 3, {"captures": [SCHEDULE]}),
            ([counting(600, 600)] * 3, {"policy": {"mode": "Observe"}}),
            ([counting(600, 600)] * 3, {"speculation": {**tiny_cpu()["speculation"], "trainedDrafts": True}}),
        ],
        ids=[
            *("first reading", "busy engines", "silent engines", "with a schedule", "with a policy"),
            "with trained drafts",
        ],
    )
    async def test_other_objects_are_reconciled(self, world: World, readings: list[Reading], spec: Body) -> None:
        await self.reconciled(world, readings, **spec)
        assert await world.reconciler.look(self.KEY) is None

    async def test_changed_child_is_reconciled(self, world: World) -> None:
        await self.reconciled(world, [counting(600, 600)] * 3)
        world.api.remove(SERVICE, "llama")
        await world.look()
        assert await world.reconciler.look(self.KEY) is None


class TestNews:
    """Changes that need another reconcile."""

    KEY = Key("team", "llama")

    def needs_reconcile(self, world: World) -> bool:
        world.see()
        return world.reconciler.needs_reconcile(self.KEY)

    async def begun(self, world: World, **spec: Any) -> None:
        world.add(tiny_cpu(**spec))
        await world.look()

    async def test_own_writes_are_no_news(self, world: World) -> None:
        await self.begun(world)
        assert not self.needs_reconcile(world)

    async def test_own_changes_of_children_are_no_news(self, world: World) -> None:
        await self.begun(world)
        world.api.change(SPECDECODE_DEPLOYMENT, "llama", spec=tiny_cpu(replicas=2))
        assert "patch deployments.apps llama" in await world.look()
        assert not self.needs_reconcile(world)

    async def test_object_without_a_reconcile_is_news(self, world: World) -> None:
        world.add(tiny_cpu())
        assert self.needs_reconcile(world)

    async def test_engines_that_start_are_news_when_their_deployment_counts_them(self, world: World) -> None:
        await self.begun(world)
        world.start_engines(phase="Pending")
        assert not self.needs_reconcile(world)
        world.api.change(DEPLOYMENT, "llama", status={"observedGeneration": 1, "unavailableReplicas": 1})
        assert not self.needs_reconcile(world)
        world.api.change(POD, "llama-1", status={"conditions": [{"type": "Ready", "status": "True"}]})
        assert not self.needs_reconcile(world), "the Deployment does not count it yet"
        world.api.change(DEPLOYMENT, "llama", status={"readyReplicas": 1})
        assert self.needs_reconcile(world)

    @pytest.mark.parametrize(
        "change",
        [
            lambda world: world.api.change(SPECDECODE_DEPLOYMENT, "llama", spec=tiny_cpu(replicas=2)),
            lambda world: world.api.change(SERVICE, "llama", spec={"clusterIP": "10.0.0.7"}),
            lambda world: world.api.remove(SERVICE, "llama"),
            lambda world: world.api.remove(SPECDECODE_DEPLOYMENT, "llama"),
            lambda world: world.start_engines(phase="Failed"),
        ],
        ids=["spec", "child", "missing child", "deletion", "failed pod"],
    )
    async def test_changes_by_others_are_news(self, world: World, change: Any) -> None:
        await self.begun(world)
        change(world)
        if world.api.find(SPECDECODE_DEPLOYMENT, "llama") is None:
            world.cache.retain_parents(SPECDECODE_DEPLOYMENT.kind, [], 10**9)
        assert self.needs_reconcile(world)

    @pytest.mark.parametrize(
        ("kind", "run"),
        [("SpecDecodeCapture", capture(deployment="llama")), ("SpecDecodeTraining", training())],
        ids=["capture", "training"],
    )
    async def test_run_is_news_until_it_is_reconciled(self, world: World, kind: str, run: Body) -> None:
        await self.begun(world)
        world.cache.put_parent(kind, {**run, "metadata": {**run["metadata"], "namespace": "team"}})
        assert self.needs_reconcile(world)
        await world.look()
        assert not self.needs_reconcile(world)

    async def served(self, world: World, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Reading]:
        """Start the engines and reconcile twice, so that nothing is left to do; return their readings."""
        await self.begun(world)
        world.start_engines()
        world.serve()
        readings = {"llama-1": counting(600, 600)}
        monkeypatch.setattr(world.probe, "read_all", AsyncMock(return_value=readings))
        for _ in range(2):
            await world.look()
        return readings

    async def test_object_that_is_deleted_during_a_reconcile_is_news(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        readings = await self.served(world, monkeypatch)

        async def read_all(*_: Any, **__: Any) -> Mapping[str, Reading]:
            world.cache.drop_parent(SPECDECODE_DEPLOYMENT.kind, world.object)
            return readings

        monkeypatch.setattr(world.probe, "read_all", read_all)
        await world.look()
        assert world.reconciler.needs_reconcile(self.KEY)

    async def test_status_that_others_write_during_a_reconcile_is_news(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        readings = await self.served(world, monkeypatch)

        async def read_all(*_: Any, **__: Any) -> Mapping[str, Reading]:
            world.api.change(SPECDECODE_DEPLOYMENT, "llama", status={**world.object["status"], "ready": "7/7"})
            world.see()
            return readings

        monkeypatch.setattr(world.probe, "read_all", read_all)
        await world.look()
        assert self.needs_reconcile(world)

    async def test_pod_that_comes_and_goes_during_a_reconcile_is_news(self, world: World) -> None:
        """The reconcile may have kept something for it."""
        await self.begun(world)
        (workload,) = world.all(DEPLOYMENT)
        metadata = {**pod_metadata(workload), "namespace": "team", "name": "llama-1", "uid": "1"}
        pod = {"metadata": {**metadata, "resourceVersion": "99"}, "status": {"phase": "Pending"}}
        world.api.change(SPECDECODE_DEPLOYMENT, "llama", spec=tiny_cpu(serving={"maxModelLen": 512}))
        world.api.before["patch deployments.apps"] = lambda: world.cache.put(POD.kind, pod)
        world.api.before["patch configmaps"] = lambda: world.cache.drop(POD.kind, pod)
        assert "patch configmaps llama-plan" in await world.look()
        assert self.needs_reconcile(world)

    async def test_blocked_reconcile_is_repeated_at_the_next_event(self, world: World) -> None:
        world.api.refusals["patch deployments.apps"] = (500, "etcd is slow")
        await self.begun(world)
        assert world.said()[1] == "ApiServerError"
        assert self.needs_reconcile(world)

    async def test_postponed_repair_is_news(self, world: World) -> None:
        await self.begun(world)
        for _ in range(4):
            world.api.change(SERVICE, "llama", spec={"clusterIP": "10.0.0.7"})
            written = await world.look()
        assert "patch services llama" not in written, "other writers keep changing it"
        assert self.needs_reconcile(world)

    async def test_fields_of_others_in_the_response_to_an_apply_are_news(self, world: World) -> None:
        entry = {"manager": "kubectl-edit", "operation": "Update", "fieldsV1": {"f:spec": {"f:externalName": {}}}}

        def edit() -> None:
            metadata = (world.api.find(SERVICE, "llama") or {})["metadata"]
            fields = [*metadata.get("managedFields", []), entry]
            world.api.change(SERVICE, "llama", metadata={**metadata, "managedFields": fields})

        await self.begun(world)
        world.api.change(SERVICE, "llama", spec={"clusterIP": "10.0.0.7"})
        world.api.before["patch services"] = edit
        assert "patch services llama" in await world.look()
        assert self.needs_reconcile(world)

    async def test_change_during_a_reconcile_is_news(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        """The reconcile has read the Service, and does not see the change."""
        await self.begun(world)
        world.start_engines()
        world.serve()

        async def read_all(*_: Any, **__: Any) -> dict[str, Reading]:
            world.api.change(SERVICE, "llama", spec={"clusterIP": "10.0.0.7"})
            world.see()
            return {}

        monkeypatch.setattr(world.probe, "read_all", read_all)
        await world.look()
        assert self.needs_reconcile(world)

    async def test_spec_that_changes_during_a_reconcile_is_news(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The reconcile used the old spec; the response to its status write has the new one."""
        await self.begun(world)
        world.start_engines()
        world.serve()
        readings = {"llama-1": counting(600, 600)}
        monkeypatch.setattr(world.probe, "read_all", AsyncMock(return_value=readings))
        await world.look()
        await world.look()
        assert not self.needs_reconcile(world)
        assert world.reconciler.settled() == [self.KEY]

        async def read_all(*_: Any, **__: Any) -> dict[str, Reading]:
            world.api.change(SPECDECODE_DEPLOYMENT, "llama", spec=tiny_cpu(replicas=2))
            world.see()
            return readings

        monkeypatch.setattr(world.probe, "read_all", read_all)
        await world.look()
        assert self.needs_reconcile(world)
        assert world.reconciler.settled() == []

    async def test_failed_rollout_is_news_because_it_is_rolled_back(self, world: World) -> None:
        await self.begun(world)
        world.serve()
        assert "patch configmaps llama-last-good" in await world.look()
        world.api.change(SPECDECODE_DEPLOYMENT, "llama", spec=tiny_cpu(serving={"maxModelLen": 512}))
        world.serve(0)
        await world.look()
        error = ended(2, "vllm: error: unrecognized arguments: --x")
        world.start_engines(phase="Running", containerStatuses=[error])
        assert "patch configmaps llama-last-good" in await world.look()
        assert self.needs_reconcile(world)
        assert "patch deployments.apps llama" in await world.look()

    async def test_reconcile_that_fails_before_it_observes_is_repeated(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await self.begun(world)
        assert not self.needs_reconcile(world)
        monkeypatch.setattr(DecisionCache, "decide", Mock(side_effect=ClusterError("gone")))
        with pytest.raises(ClusterError):
            await world.look()
        assert self.needs_reconcile(world)

    async def test_failed_reconcile_is_repeated(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        await self.begun(world)
        world.start_engines()
        world.serve()
        monkeypatch.setattr(world.probe, "read_all", AsyncMock(side_effect=ClusterError("gone")))
        with pytest.raises(ClusterError):
            await world.look()
        assert self.needs_reconcile(world)

    @pytest.mark.parametrize(
        ("rollout", "is_news"),
        [({}, False), ({"strategy": "Canary"}, True), ({"gate": {"capture": "golden"}}, True)],
        ids=["surge", "canary", "gate"],
    )
    async def test_stored_workload_is_news_only_if_others_are_compared_with_it(
        self, world: World, monkeypatch: pytest.MonkeyPatch, rollout: Body, *, is_news: bool
    ) -> None:
        await self.begun(world, rollout=rollout)
        world.start_engines()
        world.serve()
        monkeypatch.setattr(world.probe, "read_all", AsyncMock(return_value={"llama-1": counting(600, 600)}))
        assert "patch configmaps llama-last-good" in await world.look()
        assert self.needs_reconcile(world) == is_news


def figures(value: str) -> FiguresStatus:
    told = [FigureStatus(name="acceptance_rate", value=value)]
    return FiguresStatus(source=FiguresSource.PODS, over_seconds=300, values=told)


async def test_figures_are_written_every_five_minutes_and_removed_with_the_plan(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []
    world.add(tiny_cpu())
    reads = [None, *map(figures, "123")]
    monkeypatch.setattr(FiguresReader, "read", AsyncMock(side_effect=reads))
    for now_s in (0, 15, 30, 300, 315, 330):
        monkeypatch.setattr(reconcile_deployment, "time", Mock(monotonic=Mock(return_value=now_s), time=time.time))
        await world.look()
        told = world.object["status"].get("figures")
        shown.append(told and told["values"][0]["value"])
    assert shown == [None, "1", "1", "1", "2", "2"]
    world.api.change(SPECDECODE_DEPLOYMENT, "llama", spec={**world.object["spec"], "target": {"model": "no/such"}})
    await world.look()
    assert "figures" not in world.object["status"]


async def looks(world: World, monkeypatch: pytest.MonkeyPatch, *shares: float) -> None:
    """Let an engine accept such shares of its drafts, look by look."""
    engine = Working(k=3)
    for look, acceptance in enumerate(shares):
        monkeypatch.setattr(
            reconcile_deployment, "time", Mock(monotonic=Mock(return_value=look * LOOK_S), time=time.time)
        )
        monkeypatch.setattr(world.probe, "read_all", AsyncMock(return_value={"llama-1": engine.works(acceptance)}))
        await world.look()


async def start(world: World) -> None:
    world.add(tiny_cpu())
    await world.look()
    world.start_engines()
    world.serve()


def said(world: World) -> list[Body]:
    return [each for each in world.object["status"]["conditions"] if each["type"] == "SpeculationEffective"]


async def test_acceptance_decay_is_reported_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await start(world)
    await looks(world, monkeypatch, *[0.9] * (LEARNED_WINDOWS + 2), *[0.1] * 15)
    assert world.said("SpeculationEffective")[:2] == ("False", "AcceptanceDecayed")
    assert world.told().count("AcceptanceDecayed") == 1


async def test_acceptance_is_compared_with_the_newest_capture_of_the_spec(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await start(world)
    summary = {"requests": {"sent": 1, "completed": 1}, "acceptancePercent": 90, "meanAcceptanceLength": "3.70"}
    parent, desired = world.reconciler.desired_state_of(world.object)
    assert isinstance(parent.spec, SpecDecodeDeploymentSpec)
    word = engine_spec_hash(parent.spec, desired.outcome.plan_status)
    found = {"phase": "Succeeded", "engine": word, "summary": summary}
    body = capture(status=found, namespace="team")
    body["spec"]["deployment"] = "llama"
    world.cache.put_parent(SPECDECODE_CAPTURE.kind, body)
    await looks(world, monkeypatch, *[0.5] * (LEARNED_WINDOWS + 40))
    (condition,) = said(world)
    assert all(part in condition["message"] for part in ("50%", "90%", "capture demo"))


@pytest.mark.parametrize("labels", [{DEPLOYMENT_LABEL: "other"}, {}], ids=["of another", "of none"])
async def test_change_made_together_with_a_label_change_is_repaired(world: World, labels: dict[str, str]) -> None:
    world.add(tiny_cpu())
    for _ in range(3):
        await world.look()
    (before,) = world.all(DEPLOYMENT)
    changed = copy.deepcopy(before)
    changed["spec"]["template"]["spec"]["containers"][0]["image"] = "evil/image:1"
    del changed["metadata"]["labels"][DEPLOYMENT_LABEL]
    changed["metadata"]["labels"] |= labels
    world.api.change(DEPLOYMENT, "llama", spec=changed["spec"], metadata=changed["metadata"])
    assert {*await world.look()} == {"patch deployments.apps llama"}
    (after,) = world.all(DEPLOYMENT)
    assert (after["spec"], after["metadata"]["labels"]) == (before["spec"], before["metadata"]["labels"])
    assert await world.look() == []


SPEC = cached(models=CACHE)


async def download(shared: World, name: str, *commits: str) -> None:
    """Let an object download its models."""
    shared.add(SPEC, name=name)
    await shared.look(name)
    own = [job for job in shared.all(JOB) if job["metadata"]["name"].startswith(name)]
    for commit, job in zip(commits, sorted(own, key=lambda each: "70B" not in str(each["spec"])), strict=True):
        ended = downloaded_by(job, json.dumps({"commit": commit}))
        metadata = {**ended["metadata"], "namespace": "team", "name": job["metadata"]["name"]}
        shared.api.create(POD, {**ended, "metadata": metadata})
    await shared.look(name)


@pytest.fixture
async def shared(api: ApiServer, cluster: Cluster) -> World:
    """A cluster in which one object has downloaded its models, and another, of the same claim, has not begun."""
    shared = World(api, cluster)
    node = {"metadata": {"name": "n", "labels": {"nvidia.com/gpu.product": H200}}}
    api.create(NODE, {**node, "status": {"allocatable": {"nvidia.com/gpu": "8"}}})
    await download(shared, "llama", TARGET, DRAFT)
    shared.add(SPEC, name="other")
    shared.see()
    return shared


def launches(shared: World) -> bool:
    """Whether another object of the namespace, with the spec of an arm, would be launched as it is."""
    other = shared.api.find(SPECDECODE_DEPLOYMENT, "other") or {}
    desired = shared.reconciler.decider_of_arms("team")(other, DecisionCache())
    return isinstance(desired.outcome, Launch)


async def test_arm_can_use_downloads_of_another_deployment(shared: World) -> None:
    assert launches(shared)
    shared.restart()
    shared.see()
    assert launches(shared), "another process believes it, too"


async def test_own_downloads_take_precedence_over_those_of_others(shared: World) -> None:
    await download(shared, "zephyr", "c" * 40, "d" * 40)
    for name in shared.api.names(POD):
        shared.api.remove(POD, name)
    await shared.look("zephyr")
    body = shared.object
    serves = shared.reconciler.desired_state_of(body)[1].outcome
    arm = shared.reconciler.decider_of_arms("team")(body, DecisionCache()).outcome
    assert isinstance(serves, Launch)
    assert isinstance(arm, Launch)
    assert (serves.facts.spec.target.revision, arm.facts.spec.target.revision) == (TARGET, TARGET)


async def test_forged_downloads_config_map_is_not_used(shared: World) -> None:
    data: dict[str, str] = (shared.api.find(CONFIG_MAP, "llama-downloads") or {})["data"]
    forged = {key: text.replace(TARGET, "f" * 40) for key, text in data.items()}
    shared.api.change(CONFIG_MAP, "llama-downloads", data=forged)
    shared.see()
    assert not launches(shared)


async def test_downloads_of_another_namespace_are_not_used(shared: World) -> None:
    shared.api.create(SPECDECODE_DEPLOYMENT, {"metadata": {"namespace": "elsewhere", "name": "far"}, "spec": SPEC})
    shared.see()
    far = shared.api.find(SPECDECODE_DEPLOYMENT, "far") or {}
    desired = shared.reconciler.decider_of_arms("elsewhere")(far, DecisionCache())
    assert not isinstance(desired.outcome, Launch)
