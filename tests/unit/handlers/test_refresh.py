"""Trainings of schedules: written to the status before they are created, created once, and deleted."""

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from specdecode_operator.api import capture, training
from specdecode_operator.cluster.client import ClusterError
from specdecode_operator.cluster.resources import (
    EVENT,
    SCHEDULE_LABEL,
    SCHEDULED_AT_ANNOTATION,
    SPECDECODE_CAPTURE,
    SPECDECODE_DEPLOYMENT,
    SPECDECODE_TRAINING,
)
from tests.support.objects import Body, tiny_cpu
from tests.support.refreshes import schedule_of, text
from tests.unit.handlers.reconciler_world import World

NOW = datetime.now(UTC)
STATUS = "patch specdecodedeployments.specdecode.io/status llama"
CREATE = "create specdecodetrainings.specdecode.io"
NOT_TODAY = "0 0 29 2 *"


def deploy(world: World, **schedule: Any) -> None:
    """A schedule that trains after each capture, and that was first seen two hours ago."""
    each = schedule_of(0, schedule=NOT_TODAY, template={"judgement": {"enabled": False}}, **schedule)
    since = text(NOW - timedelta(hours=2))
    trained = {"month": text(NOW)[:7], "lastCaptureTime": since, "reason": "WaitingForCapture"}
    told = {"name": "weekly", "schedule": f"{NOT_TODAY} UTC", "since": since, "training": trained}
    world.add(tiny_cpu(captures=[each]), status={"captures": [told]})


def add_capture(world: World, name: str = "first", hours_ago: int = 1) -> None:
    """Let a capture of the schedule have succeeded."""
    metadata = {
        "namespace": "team",
        "name": name,
        "labels": {SCHEDULE_LABEL: "weekly"},
        "annotations": {SCHEDULED_AT_ANNOTATION: text(NOW - timedelta(hours=hours_ago))},
        "ownerReferences": [{"kind": "SpecDecodeDeployment", "name": "llama", "uid": world.object["metadata"]["uid"]}],
    }
    body = {"metadata": metadata, "spec": {"deployment": "llama"}, "status": {"phase": "Succeeded"}}
    world.api.create(SPECDECODE_CAPTURE, body)


async def look(world: World) -> list[str]:
    """Let the operator see captures and trainings, and reconcile; return its writes of status and trainings."""
    for kind, resource in ((capture.KIND, SPECDECODE_CAPTURE), (training.KIND, SPECDECODE_TRAINING)):
        bodies = world.all(resource)
        for body in bodies:
            world.cache.put_parent(kind, body)
        world.cache.retain_parents(kind, [body["metadata"]["uid"] for body in bodies], 10**9)
    written = await world.look()
    return [each for each in written if each == STATUS or "specdecodetrainings" in each]


def told(world: World) -> Body:
    (found,) = world.object["status"]["captures"]
    return dict(found["training"])


def trainings(world: World) -> list[str]:
    return world.api.names(SPECDECODE_TRAINING)


async def test_training_is_in_the_status_before_it_is_created(world: World) -> None:
    deploy(world)
    await look(world)
    add_capture(world)
    assert await look(world) == [STATUS, CREATE]
    (name,) = trainings(world)
    body = world.api.find(SPECDECODE_TRAINING, name)
    assert body is not None
    assert body["spec"]["captures"] == ["first"]
    assert told(world)["running"]["name"] == name
    assert "RefreshStarted" in world.told()
    assert await look(world) == [STATUS], "it was found"
    assert await look(world) == []
    assert trainings(world) == [name]


async def test_no_training_is_created_if_the_status_cannot_be_written(world: World) -> None:
    deploy(world)
    await look(world)
    add_capture(world)
    world.api.refusals["patch specdecodedeployments.specdecode.io/status"] = (500, "etcd is gone")
    with suppress(ClusterError):
        await look(world)
    assert trainings(world) == []
    world.api.refusals.clear()
    assert await look(world) == [STATUS, CREATE]


async def test_refused_training_is_created_later(world: World) -> None:
    deploy(world)
    await look(world)
    add_capture(world)
    world.api.refusals[CREATE] = (403, "not allowed")
    await look(world)
    assert trainings(world) == []
    world.api.refusals.clear()
    world.restart()
    assert await look(world) == [CREATE]
    assert len(trainings(world)) == 1


async def test_deleted_deployment_gets_no_training(world: World) -> None:
    deploy(world)
    await look(world)
    add_capture(world)
    world.api.before["patch specdecodedeployments.specdecode.io/status"] = lambda: world.api.remove(
        SPECDECODE_DEPLOYMENT, "llama"
    )
    await look(world)
    assert trainings(world) == []


async def test_old_trainings_are_deleted_and_the_captures_of_new_ones_are_kept(world: World) -> None:
    deploy(world, failedHistoryLimit=0, successfulHistoryLimit=1)
    await look(world)
    add_capture(world)
    await look(world)
    (name,) = trainings(world)
    add_capture(world, "second", hours_ago=0)
    await look(world)
    assert "first" in world.api.names(SPECDECODE_CAPTURE), "a training reads it"
    stamp = {"observedGeneration": 1, "lastTransitionTime": text(NOW)}
    failed = {"type": "Succeeded", "status": "False", "reason": "TrainingFailed", "message": "", **stamp}
    ended = {"phase": "Failed", "conditions": [failed], "finishedAt": text(NOW)}
    world.api.change(SPECDECODE_TRAINING, name, status=ended)
    await look(world)
    await look(world)
    (second,) = trainings(world)
    assert second != name
    assert told(world)["running"]["capture"] == "second"
    await look(world)
    assert "first" not in world.api.names(SPECDECODE_CAPTURE)


async def test_reason_why_no_training_starts_is_told_once(world: World) -> None:
    deploy(world)
    schedule = world.object["spec"]["captures"][0]
    schedule["training"]["when"] = "Decayed"
    world.api.change(SPECDECODE_DEPLOYMENT, "llama", spec=tiny_cpu(captures=[schedule]))
    await look(world)
    add_capture(world)
    await look(world)
    await look(world)
    assert told(world)["reason"] == "NoBaseline"
    skipped = [each["message"] for each in world.all(EVENT) if each["reason"] == "RefreshSkipped"]
    assert len(skipped) == 1
    assert skipped[0].startswith("weekly: NoBaseline: ")


async def test_status_of_trainings_survives_a_change_of_the_schedule(world: World) -> None:
    deploy(world)
    add_capture(world)
    await look(world)
    await look(world)
    before = told(world)
    schedule = {**world.object["spec"]["captures"][0], "schedule": "0 0 1 1 *"}
    world.api.change(SPECDECODE_DEPLOYMENT, "llama", spec=tiny_cpu(captures=[schedule]))
    await look(world)
    assert told(world) == before
