"""What a capture's arms would come to, with models that neighbours of its deployment downloaded."""

import json
from typing import Any

import pytest

from specdecode_operator.cluster.client import Cluster
from specdecode_operator.cluster.resources import CONFIG_MAP, JOB, NODE, POD, SPECDECODE_DEPLOYMENT
from specdecode_operator.deployment.desired_state import Launch
from specdecode_operator.handlers import reconcile_deployment
from specdecode_operator.handlers.decision_cache import DecisionCache
from tests.support.api_server import ApiServer
from tests.support.model_caches import CACHE, DRAFT, TARGET, cached, pod
from tests.support.objects import H200, tiny_cpu
from tests.unit.handlers.reconcile.reconciler_world import World

SPEC = cached(models=CACHE)


async def download(world: World, name: str, *commits: str) -> None:
    """Let an object download its models."""
    world.add(SPEC, name=name)
    await world.look(name)
    own = [job for job in world.all(JOB) if job["metadata"]["name"].startswith(name)]
    for commit, job in zip(commits, sorted(own, key=lambda each: "70B" not in str(each["spec"])), strict=True):
        ended = pod(job, json.dumps({"commit": commit}))
        metadata = {**ended["metadata"], "namespace": "team", "name": job["metadata"]["name"]}
        world.api.create(POD, {**ended, "metadata": metadata})
    await world.look(name)


@pytest.fixture
async def world(api: ApiServer, cluster: Cluster) -> World:
    """A cluster in which one object has downloaded its models, and another, of the same claim, has not begun."""
    world = World(api, cluster)
    node = {"metadata": {"name": "n", "labels": {"nvidia.com/gpu.product": H200}}}
    api.create(NODE, {**node, "status": {"allocatable": {"nvidia.com/gpu": "8"}}})
    await download(world, "llama", TARGET, DRAFT)
    world.add(SPEC, name="other")
    world.see()
    return world


def launches(world: World) -> bool:
    """Whether another object of the namespace, with the spec of an arm, would be launched as it is."""
    other = world.api.find(SPECDECODE_DEPLOYMENT, "other") or {}
    desired = world.reconciler.decider_of_arms("team")(other, DecisionCache())
    return isinstance(desired.outcome, Launch)


async def test_what_a_neighbour_downloaded_is_there_for_an_arm(world: World) -> None:
    assert launches(world)
    world.restart()
    world.see()
    assert launches(world), "another process believes it, too"


async def test_what_the_deployment_itself_downloaded_goes_before_what_others_did(world: World) -> None:
    await download(world, "zephyr", "c" * 40, "d" * 40)
    for name in world.api.names(POD):
        world.api.remove(POD, name)
    await world.look("zephyr")
    body = world.object
    serves = world.reconciler.desired_state_of(body)[1].outcome
    arm = world.reconciler.decider_of_arms("team")(body, DecisionCache()).outcome
    assert isinstance(serves, Launch)
    assert isinstance(arm, Launch)
    assert (serves.facts.spec.target.revision, arm.facts.spec.target.revision) == (TARGET, TARGET)


async def test_what_somebody_wrote_in_its_place_is_not(world: World) -> None:
    data: dict[str, str] = (world.api.find(CONFIG_MAP, "llama-downloads") or {})["data"]
    forged = {key: text.replace(TARGET, "f" * 40) for key, text in data.items()}
    world.api.change(CONFIG_MAP, "llama-downloads", data=forged)
    world.see()
    assert not launches(world)


async def test_neighbours_are_not_parsed_for_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        world.add(tiny_cpu(), name=name)
    world.see()
    parsed, read = [], reconcile_deployment.parse_deployment

    def noting(body: Any, **rest: Any) -> Any:
        parsed.append(body["metadata"]["name"])
        return read(body, **rest)

    monkeypatch.setattr(reconcile_deployment, "parse_deployment", noting)
    assert launches(world)
    assert parsed == ["other"]


async def test_what_was_downloaded_in_another_namespace_is_not_there(world: World) -> None:
    world.api.create(SPECDECODE_DEPLOYMENT, {"metadata": {"namespace": "elsewhere", "name": "far"}, "spec": SPEC})
    world.see()
    far = world.api.find(SPECDECODE_DEPLOYMENT, "far") or {}
    desired = world.reconciler.decider_of_arms("elsewhere")(far, DecisionCache())
    assert not isinstance(desired.outcome, Launch)
