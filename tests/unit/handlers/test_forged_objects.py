"""Forged ConfigMaps and pods are not believed."""

import copy
from unittest.mock import AsyncMock

import pytest

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.cluster.client import Cluster
from specdecode_operator.cluster.resources import (
    CONFIG_MAP,
    DEPLOYMENT,
    JOB,
    NODE,
    POD,
    READS_FOR_LABEL,
    SPECDECODE_DEPLOYMENT,
)
from specdecode_operator.deployment.models.checkpoint_reader import Checkpoint
from specdecode_operator.deployment.models.model_facts import CONFIG_MAP_NAME, facts_config_map, facts_entry
from specdecode_operator.deployment.models.model_jobs import downloads_config_map, wanted_downloads
from specdecode_operator.deployment.models.model_locations import undescribed_models
from specdecode_operator.deployment.parsed_deployment import ParsedDeployment, parse_deployment
from specdecode_operator.deployment.planning import make_plan
from specdecode_operator.deployment.rollout.rollback import (
    Failure,
    LastGood,
    attempt_of,
    read_last_good,
    render_last_good,
)
from specdecode_operator.deployment.validation import valid_facts
from specdecode_operator.sizing.plan import Plan
from tests.support.api_server import ApiServer
from tests.support.model_caches import CACHE, DRAFT, TARGET, cached
from tests.support.objects import H200, Body, ended, tiny_cpu
from tests.unit.deployment.models.test_model_facts import DRAFT_CONFIG, WEIGHTS, answers, undescribed
from tests.unit.handlers.reconciler_world import World, pod_metadata

BROKEN = {"serving": {"maxModelLen": 512}}
"""A change of the spec, whose engines are played to fail."""

READY = [{"type": "Ready", "status": "True"}]

REFUSED = ended(2, "vllm: error: unrecognized arguments: --nonsense")


@pytest.fixture
async def world(api: ApiServer, cluster: Cluster) -> World:
    return World(api, cluster)


def owner(world: World) -> ParsedDeployment:
    return parse_deployment(world.object)


def pod_spec(world: World) -> Body:
    (found,) = world.all(DEPLOYMENT)
    spec: Body = found["spec"]["template"]["spec"]
    return spec


def hostile(workload: Body) -> Body:
    """A workload that runs a program of others', with all that the operator looks for, and nothing that no pod may."""
    forged = copy.deepcopy({field: workload[field] for field in ("apiVersion", "kind", "spec")})
    forged["spec"]["template"]["spec"]["containers"][0] |= {"image": "others/miner", "command": ["mine"]}
    forged["spec"]["template"]["metadata"]["annotations"]["specdecode.io/template-hash"] = "0" * 16
    return forged


def attempt(world: World) -> str:
    """What the operator calls an attempt: all of it can be computed by whoever may read the object."""
    spec = owner(world).spec
    assert isinstance(spec, SpecDecodeDeploymentSpec)
    facts = valid_facts(spec)
    plan = make_plan(facts, (), None)
    assert isinstance(plan, Plan)
    return attempt_of(facts.spec, plan.chosen)


def forge(world: World) -> None:
    """Write the ConfigMap of what served last as the operator would have."""
    (workload,) = world.all(DEPLOYMENT)
    body = world.api.find(CONFIG_MAP, "llama-last-good")
    forged = LastGood.of(hostile(workload), Failure(attempt(world), "EngineFailed", "it did"))
    rendered = render_last_good(owner(world).key, owner(world).uid, forged)
    if body is None:
        world.api.create(CONFIG_MAP, rendered)
    else:
        world.api.change(CONFIG_MAP, "llama-last-good", data=rendered["data"])


def fail(world: World) -> None:
    """Let engines of the present template end for good."""
    (deployment,) = world.all(DEPLOYMENT)
    meta = pod_metadata(deployment)
    status = {"containerStatuses": [{**REFUSED, "restartCount": 0}]}
    world.api.create(POD, {"metadata": {**meta, "namespace": "team", "name": "llama-broken"}, "status": status})


class TestLastGood:
    async def test_forged_last_good_config_map_is_not_run(self, world: World) -> None:
        world.add(tiny_cpu())
        await world.look()
        rendered = pod_spec(world)
        forge(world)
        await world.look()
        assert pod_spec(world) == rendered
        assert world.said()[1] != "RolledBack"
        assert world.api.find(CONFIG_MAP, "llama-last-good") is None, "of an object whose engines never served"

    @pytest.mark.parametrize("restarts", [False, True])
    async def test_changed_last_good_config_map_is_not_run(self, world: World, *, restarts: bool) -> None:
        world.add(tiny_cpu())
        await world.look()
        world.serve()
        await world.look()
        rendered = pod_spec(world)
        forge(world)
        if restarts:
            world.restart()
        for _ in range(2):
            await world.look()
            assert pod_spec(world) == rendered
        kept = read_last_good(world.api.find(CONFIG_MAP, "llama-last-good"))
        assert kept is not None
        assert kept.workload["spec"]["template"]["spec"] == rendered

    async def test_earlier_last_good_config_map_is_not_accepted(self, world: World) -> None:
        world.add(tiny_cpu())
        await world.look()
        world.serve()
        await world.look()
        first = world.api.find(CONFIG_MAP, "llama-last-good") or {}
        world.api.change(SPECDECODE_DEPLOYMENT, "llama", spec=tiny_cpu(**BROKEN))
        for _ in range(2):
            await world.look()
            world.serve()
        assert (world.api.find(CONFIG_MAP, "llama-last-good") or {})["data"] != first["data"]
        world.api.change(CONFIG_MAP, "llama-last-good", data=first["data"])
        world.restart()
        await world.look()
        assert (world.api.find(CONFIG_MAP, "llama-last-good") or {}).get("data") != first["data"]

    @pytest.mark.parametrize("restarts", [False, True])
    async def test_rollback_uses_the_operators_last_good_template(self, world: World, *, restarts: bool) -> None:
        await self.roll_back(world)
        if restarts:
            world.restart()
            await world.look()
        assert "512" not in pod_spec(world)["containers"][0]["command"]
        assert world.said()[1] == "RolledBack"

    @pytest.mark.parametrize("taken", ["deleted", "forged"])
    async def test_removed_or_forged_last_good_does_not_start_the_failed_spec(self, world: World, taken: str) -> None:
        await self.roll_back(world)
        before = world.api.find(CONFIG_MAP, "llama-last-good") or {}
        if taken == "deleted":
            world.api.remove(CONFIG_MAP, "llama-last-good")
        else:
            forge(world)
        await world.look()
        assert "512" not in pod_spec(world)["containers"][0]["command"]
        assert (world.api.find(CONFIG_MAP, "llama-last-good") or {})["data"] == before["data"]

    async def roll_back(self, world: World) -> None:
        world.add(tiny_cpu())
        await world.look()
        world.serve()
        await world.look()
        world.api.change(SPECDECODE_DEPLOYMENT, "llama", spec=tiny_cpu(**BROKEN))
        world.serve(0)
        await world.look()
        assert "512" in pod_spec(world)["containers"][0]["command"]
        fail(world)
        await world.look()
        await world.look()


class TestPods:
    @pytest.mark.parametrize(
        "owner",
        [
            None,
            {"kind": "ReplicaSet", "name": "llama-5d7f"},
            {"kind": "ReplicaSet", "name": "other-5d7f", "controller": True},
            {"kind": "StatefulSet", "name": "llama", "controller": True},
            {"kind": "Job", "name": "llama-5d7f", "controller": True},
        ],
    )
    async def test_a_pod_with_copied_labels_fails_no_rollout_and_is_not_read(
        self, world: World, monkeypatch: pytest.MonkeyPatch, owner: Body | None
    ) -> None:
        read = AsyncMock(return_value={})
        monkeypatch.setattr(world.probe, "read_all", read)
        world.add(tiny_cpu())
        await world.look()
        world.serve()
        await world.look()
        world.api.change(SPECDECODE_DEPLOYMENT, "llama", spec=tiny_cpu(**BROKEN))
        world.serve(0)
        await world.look()
        (deployment,) = world.all(DEPLOYMENT)
        meta = {**pod_metadata(deployment), "ownerReferences": [{"uid": "x", **owner}] if owner else []}
        refused = {"conditions": READY, "containerStatuses": [{**REFUSED, "restartCount": 0}]}
        forged = {**meta, "namespace": "team", "name": "llama-forged"}
        world.api.create(POD, {"metadata": forged, "status": refused})
        for _ in range(2):
            await world.look()
        assert "512" in pod_spec(world)["containers"][0]["command"]
        assert world.said()[1] != "RolledBack"
        assert [pods for (pods, *_), _ in read.await_args_list if pods] == []

    async def test_the_same_pod_of_the_deployments_replica_set_fails_the_rollout(self, world: World) -> None:
        await TestLastGood().roll_back(world)
        assert world.said()[1] == "RolledBack"


class TestModels:
    def forge(self, world: World, name: str = CONFIG_MAP_NAME) -> None:
        """Say of the models that they are something else."""
        spec = owner(world).spec
        assert isinstance(spec, SpecDecodeDeploymentSpec)
        lie = Checkpoint({**DRAFT_CONFIG, "hidden_size": 1024}, WEIGHTS, None)
        entries = {source.key: facts_entry(source, lie) for source in undescribed_models(spec).values()}
        body = facts_config_map("team", entries)
        body["metadata"]["name"] = name
        found = world.api.find(CONFIG_MAP, name)
        world.api.change(CONFIG_MAP, name, data=entries) if found else world.api.create(CONFIG_MAP, body)

    def answer(self, world: World) -> None:
        for number, pod in enumerate(answers(undescribed())):
            labels = {**pod["metadata"]["labels"], READS_FOR_LABEL: "llama"}
            meta = {**pod["metadata"], "labels": labels, "namespace": "team", "name": f"reader-{number}"}
            world.api.create(POD, {**pod, "metadata": meta})

    async def read(self, world: World) -> None:
        """Let the models be read, and their readers go."""
        world.add(undescribed())
        await world.look()
        self.answer(world)
        await world.look()
        for number in range(2):
            world.api.remove(POD, f"reader-{number}")

    async def test_forged_model_facts_are_not_used(self, world: World) -> None:
        world.add(undescribed())
        self.forge(world)
        await world.look()
        assert world.said()[1] == "ResolvingModel"
        assert len(world.all(JOB)) == 2
        self.answer(world)
        await world.look()
        assert world.said("Planned")[1] == "Fits"

    async def test_model_facts_survive_a_restart_and_are_rejected_once_changed(self, world: World) -> None:
        await self.read(world)
        world.restart()
        await world.look()
        assert world.said("Planned")[1] == "Fits"
        self.forge(world)
        await world.look()
        assert world.said()[1] == "ResolvingModel"

    @pytest.mark.parametrize("name", ["before", "the-last-that-is-seen"])
    async def test_forged_second_facts_config_map_does_not_hide_the_first(self, world: World, name: str) -> None:
        await self.read(world)
        self.forge(world, name)
        world.restart()
        await world.look()
        assert world.said("Planned")[1] == "Fits"

    async def test_engines_do_not_start_with_forged_download_commits(self, world: World) -> None:
        node = {"metadata": {"name": "n", "labels": {"nvidia.com/gpu.product": H200}}}
        world.api.create(NODE, {**node, "status": {"allocatable": {"nvidia.com/gpu": "8"}}})
        world.add(cached(models=CACHE))
        await world.look()
        spec = owner(world).spec
        assert isinstance(spec, SpecDecodeDeploymentSpec)
        sources = wanted_downloads(spec)
        commits = dict(zip((source.key for source in sources.values()), (TARGET, DRAFT), strict=True))
        forged = downloads_config_map(owner(world).key, owner(world).uid, sources, commits)
        world.api.create(CONFIG_MAP, forged)
        await world.look()
        assert world.said()[1] == "DownloadingModels"
        assert not world.all(DEPLOYMENT)
