"""Reconcile trainings: claims that several want, names that are taken, and what is created once."""

import asyncio
from typing import Any

import pytest

from specdecode_operator.api.deployment import Key
from specdecode_operator.api.training import KIND
from specdecode_operator.cluster.resources import (
    EVENT,
    JOB,
    PERSISTENT_VOLUME_CLAIM,
    POD,
    SPECDECODE_CAPTURE,
    SPECDECODE_TRAINING,
)
from specdecode_operator.handlers.reconcile_job import Servings, Shared
from specdecode_operator.handlers.reconcile_training import TrainingReconciler
from tests.support.better_trainings import better_training
from tests.support.objects import Body, tiny_cpu
from tests.support.trainings import published, source, training_spec
from tests.unit.handlers.reconciler_world import World

SHARED = {"persistentVolumeClaim": {"claimName": "shared"}}


class Trainings:
    """Trainings of the deployment `llama`, whose capture has succeeded."""

    def __init__(self, world: World) -> None:
        self.world, self.api = world, world.api
        world.add(tiny_cpu(suspend=True))
        self.claim("evening-capture")
        captured = source()
        metadata = {"namespace": "team", "name": "evening"}
        self.api.create(SPECDECODE_CAPTURE, {**captured, "metadata": metadata})
        self.restart()

    def restart(self) -> None:
        """Let another process take over."""
        self.world.restart()
        world = self.world
        parts = (world._cluster, world.cache, world.reconciler, world.metrics, world.settings)
        self.reconciler = TrainingReconciler(Shared(*parts, Servings(world.cache)))

    def claim(self, name: str) -> None:
        self.api.create(PERSISTENT_VOLUME_CLAIM, {"metadata": {"namespace": "team", "name": name}, "spec": {}})

    def add(self, name: str, **spec: Any) -> None:
        metadata = {"namespace": "team", "name": name}
        self.api.create(SPECDECODE_TRAINING, {"metadata": metadata, "spec": training_spec(**spec)})

    def see(self) -> None:
        self.world.see()
        for resource in (SPECDECODE_CAPTURE, SPECDECODE_TRAINING):
            for body in self.world.all(resource):
                self.world.cache.put_parent(resource.kind, body)
        for body in self.world.all(PERSISTENT_VOLUME_CLAIM):
            self.world.cache.put(PERSISTENT_VOLUME_CLAIM.kind, body)

    async def look(self, *names: str) -> list[str]:
        """Reconcile trainings at the same time; return what was written."""
        self.see()
        self.api.requests.clear()
        await asyncio.gather(*(self.reconciler.reconcile(Key("team", name, KIND)) for name in names))
        await self.world._cluster.events_posted()
        return self.api.writes()

    def finish(self, name: str) -> None:
        """Let a training's Job publish a head."""
        job = self.api.find(JOB, f"{name}-training") or {}
        metadata = job["metadata"]
        owner = {"kind": "Job", "name": metadata["name"], "uid": metadata["uid"]}
        labels = job["spec"]["template"]["metadata"]["labels"]
        pod = {"namespace": "team", "name": f"{name}-x", "labels": labels, "ownerReferences": [owner]}
        self.api.create(POD, {"metadata": pod, "status": published()["status"]})
        complete = {"type": "Complete", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        self.api.change(JOB, metadata["name"], status={"conditions": [complete]})

    def reason(self, name: str, type_: str = "Ready") -> str:
        body: Body = self.api.find(SPECDECODE_TRAINING, name) or {}
        return next(each["reason"] for each in body["status"]["conditions"] if each["type"] == type_)


@pytest.fixture
async def trainings(world: World) -> Trainings:
    return Trainings(world)


async def test_second_look_writes_nothing(trainings: Trainings) -> None:
    trainings.add("head")
    assert "patch jobs.batch head-training" in await trainings.look("head")
    assert await trainings.look("head") != [], "the Job has no pod yet"
    assert await trainings.look("head") == []


async def test_two_trainings_on_one_claim_do_not_start_together(trainings: Trainings) -> None:
    trainings.claim("shared")
    for name in ("a", "b"):
        trainings.add(name, storage=SHARED)
    await trainings.look("a", "b")
    assert len(trainings.world.all(JOB)) == 1
    assert sorted(map(trainings.reason, ("a", "b"))) == ["ClaimInUse", "Starting"]
    (first,) = (name for name in ("a", "b") if trainings.reason(name) != "ClaimInUse")
    other = {"a": "b", "b": "a"}[first]
    trainings.finish(first)
    await trainings.look(first)
    await trainings.look(other)
    assert len(trainings.world.all(JOB)) == 2


async def test_trainings_with_claims_of_their_own_start_together(trainings: Trainings) -> None:
    for name in ("a", "b"):
        trainings.add(name)
    await trainings.look("a", "b")
    assert len(trainings.world.all(JOB)) == 2


async def test_head_is_measured_once_even_by_another_process(trainings: Trainings) -> None:
    trainings.add("head")
    await trainings.look("head")
    trainings.finish("head")
    for _ in range(2):
        await trainings.look("head")
    assert trainings.reason("head") == "Judging"
    arms = (trainings.api.find(SPECDECODE_CAPTURE, "head-judge") or {})["spec"]["arms"]
    assert [each["name"] for each in arms] == ["current", "trained", "none", "ngram"]
    before = len(trainings.world.all(SPECDECODE_CAPTURE))
    trainings.restart()
    await trainings.look("head")
    assert len(trainings.world.all(SPECDECODE_CAPTURE)) == before == 2
    assert [each["reason"] for each in trainings.world.all(EVENT)].count("JudgementStarted") == 1


async def test_capture_of_another_owner_is_left_alone(trainings: Trainings) -> None:
    theirs = {"metadata": {"namespace": "team", "name": "head-judge"}, "spec": {"deployment": "llama"}}
    trainings.api.create(SPECDECODE_CAPTURE, theirs)
    trainings.add("head")
    await trainings.look("head")
    trainings.finish("head")
    for _ in range(2):
        await trainings.look("head")
    assert trainings.reason("head", "Better") == "ChildNameConflict"
    assert trainings.reason("head", "Succeeded") == "HeadPublished"
    trainings.api.remove(SPECDECODE_CAPTURE, "head-judge")
    trainings.world.cache.drop_parent(SPECDECODE_CAPTURE.kind, {**theirs, "metadata": found(trainings, "head-judge")})
    await trainings.look("head")
    assert trainings.reason("head", "Better") == "NotJudged"


def found(trainings: Trainings, name: str) -> Body:
    body = trainings.world.cache.parent(Key("team", name, SPECDECODE_CAPTURE.kind)) or {}
    metadata: Body = body["metadata"]
    return metadata


async def test_better_head_says_whether_its_deployment_takes_it(trainings: Trainings) -> None:
    body = better_training(of=tiny_cpu())
    metadata = {"namespace": "team", "name": "chat"}
    trainings.api.create(SPECDECODE_TRAINING, {"metadata": metadata, "spec": body["spec"], "status": body["status"]})
    await trainings.look("chat")
    assert trainings.reason("chat", "Promoted") == "NotEnabled"


async def test_time_ahead_in_the_status_is_replaced(trainings: Trainings) -> None:
    trainings.add("head", judgement={"enabled": False})
    await trainings.look("head")
    trainings.finish("head")
    for _ in range(2):
        await trainings.look("head")
    status = (trainings.api.find(SPECDECODE_TRAINING, "head") or {})["status"]
    assert status["phase"] == "Complete"
    trainings.api.change(SPECDECODE_TRAINING, "head", status={**status, "finishedAt": "2999-01-01T00:00:00Z"})
    await trainings.look("head")
    assert (trainings.api.find(SPECDECODE_TRAINING, "head") or {})["status"]["finishedAt"] < "2999"


async def test_missing_right_is_reported(trainings: Trainings) -> None:
    trainings.add("head")
    trainings.api.refusals["get persistentvolumeclaims"] = (403, "may not get claims")
    await trainings.look("head")
    assert trainings.reason("head") == "Forbidden"


async def test_changed_conditions_are_told(trainings: Trainings) -> None:
    trainings.add("head")
    await trainings.look("head")
    trainings.finish("head")
    await trainings.look("head")
    told = [each["reason"] for each in trainings.world.all(EVENT)]
    assert told.count("HeadPublished") == 1


async def test_training_of_the_same_name_owns_its_children(trainings: Trainings) -> None:
    trainings.add("head", storage={"retain": False})
    await trainings.look("head")
    first = trainings.api.find(SPECDECODE_TRAINING, "head") or {}
    trainings.api.remove(SPECDECODE_TRAINING, "head")
    for resource in (JOB, PERSISTENT_VOLUME_CLAIM):
        trainings.world.cache.retain(resource.kind, [], 10**9)
    trainings.add("head", storage={"retain": False})
    await trainings.look("head")
    second = trainings.api.find(SPECDECODE_TRAINING, "head") or {}
    (owner,) = (trainings.api.find(JOB, "head-training") or {})["metadata"]["ownerReferences"]
    assert owner["uid"] == second["metadata"]["uid"] != first["metadata"]["uid"]


async def test_job_without_labels_is_found_again(trainings: Trainings) -> None:
    trainings.add("head")
    await trainings.look("head")
    metadata = (trainings.api.find(JOB, "head-training") or {})["metadata"]
    trainings.api.change(JOB, "head-training", metadata={**metadata, "labels": {}})
    captured = trainings.api.find(SPECDECODE_CAPTURE, "evening") or {}
    trainings.api.change(SPECDECODE_CAPTURE, "evening", spec={**captured["spec"], "deployment": "other"})
    trainings.restart()
    await trainings.look("head")
    assert trainings.reason("head") == "WaitingForPod", "a running training no longer needs its captures"
    job = trainings.api.find(JOB, "head-training") or {}
    assert job["metadata"]["labels"]["specdecode.io/training"] == "head"
    assert len(trainings.world.all(JOB)) == 1
