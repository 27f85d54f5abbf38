"""What one reconcile makes of its engines: silence, drafts, residuals, figures and the claims that they wait for."""

import time
from unittest.mock import AsyncMock

import pytest

from specdecode_operator.cluster.resources import PERSISTENT_VOLUME_CLAIM, POD, SPECDECODE_DEPLOYMENT
from tests.support.objects import Body, tiny_cpu, waiting
from tests.unit.deployment.proof.test_recent import engine as counting
from tests.unit.handlers.reconcile.reconciler_world import World


async def test_an_engine_is_unreachable_after_half_a_minute_of_silence(
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


async def test_what_an_engine_drafted_lately_is_remembered_from_look_to_look(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
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


async def test_an_engine_that_misses_a_question_keeps_its_residual(world: World, engine_port: int) -> None:
    await world.measure(engine_port)
    before = world.measured()
    pod = world.api.find(POD, "llama-1") or {}
    world.api.change(POD, "llama-1", status={**pod["status"], "podIP": "::1"})
    await world.look()
    assert world.measured() == before != []


async def test_engines_of_an_earlier_spec_are_not_asked_for_this_one(world: World, engine_port: int) -> None:
    def spec(length: int) -> Body:
        return tiny_cpu(serving={"maxModelLen": length, "port": engine_port})

    world.add(spec(1024))
    await world.look()
    world.start_engines("old")
    world.api.change(SPECDECODE_DEPLOYMENT, "llama", spec=spec(512))
    await world.look()
    assert "observed" not in world.object["status"]
    world.start_engines("new")
    await world.look()
    assert world.object["status"]["observed"]["engines"] == 1


async def test_figures_that_were_just_written_rest(
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


async def test_who_names_a_claim_too_is_told_to_a_pod_that_waits_for_it(world: World) -> None:
    elsewhere = {"volume": {"persistentVolumeClaim": {"claimName": "else"}}}
    world.add(tiny_cpu())
    world.add(tiny_cpu(), name="sharer")
    world.add(tiny_cpu(models=elsewhere), name="other")
    theirs = {"namespace": "theirs", "name": "namesake", "uid": "u", "generation": 1, "resourceVersion": "1"}
    world.cache.put_parent(SPECDECODE_DEPLOYMENT.kind, {"metadata": theirs, "spec": tiny_cpu()})
    claim = {"metadata": {"namespace": "team", "name": "tiny-models"}}
    world.api.create(PERSISTENT_VOLUME_CLAIM, claim)
    await world.look()
    message = "0/1 nodes are available: 1 node(s) unavailable due to PersistentVolumeClaim with ReadWriteOncePod"
    unscheduled = {"type": "PodScheduled", "status": "False", "message": message}
    world.start_engines(conditions=[unscheduled], containerStatuses=[waiting("PodInitializing")])
    await world.look()
    assert world.said()[1] == "VolumeInUse"
    assert "SpecDecodeDeployment sharer names it too" in world.said()[2]
