"""What a schedule makes of a capture that has the name of its own already."""

from datetime import UTC, datetime, timedelta

import pytest

from specdecode_operator.api import capture
from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.manifests import owner_reference
from specdecode_operator.cluster.resources import EVENT, SCHEDULE_LABEL, SPECDECODE_CAPTURE, SPECDECODE_DEPLOYMENT
from tests.support.objects import Body, pair_70b
from tests.unit.handlers.reconcile.reconciler_world import World

NOW = datetime.now(UTC)
DUE = NOW - timedelta(hours=1)
LINE = f"{DUE.minute} {DUE.hour} {DUE.day} {DUE.month} *"
"""Due once within the test, whatever the time is."""

KEY = Key("team", "llama")
OF_SCHEDULE = {SCHEDULE_LABEL: "nightly"}


def status(schedule: str) -> Body:
    since = (NOW - timedelta(hours=2)).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"captures": [{"name": schedule, "schedule": f"{LINE} UTC", "since": since}]}


def deploy(world: World, name: str = "llama", schedule: str = "nightly", **fields: object) -> None:
    once = {"name": schedule, "schedule": LINE, "startingDeadlineSeconds": 86_400, **fields}
    world.add(pair_70b(captures=[once]), name, status=status(schedule))


def forget(world: World) -> None:
    """Let another operator take over after the status and the Events were lost."""
    world.restart()
    for body in world.all(EVENT):
        world.api.remove(EVENT, body["metadata"]["name"])
    world.api.change(SPECDECODE_DEPLOYMENT, "llama", status=status("nightly"))


def see_captures(world: World) -> None:
    for body in world.all(SPECDECODE_CAPTURE):
        world.cache.put_parent(capture.KIND, body)


def told(world: World) -> dict[str, str]:
    return {body["reason"]: body["message"] for body in world.all(EVENT)}


async def put_a_strangers_in_place(world: World, **spec: object) -> Body:
    """Make a capture of the name that is due; return it."""
    await world.look()
    (due,) = world.all(SPECDECODE_CAPTURE)
    world.api.remove(SPECDECODE_CAPTURE, due["metadata"]["name"])
    metadata = {"namespace": "team", "name": due["metadata"]["name"], "labels": OF_SCHEDULE}
    theirs = world.api.create(SPECDECODE_CAPTURE, {"metadata": metadata, "spec": {**due["spec"], **spec}})
    forget(world)
    return theirs


async def test_a_strangers_capture_is_left_as_it_is_and_the_time_counts_as_missed(world: World) -> None:
    deploy(world)
    theirs = await put_a_strangers_in_place(world, suspend=True)
    see_captures(world)
    await world.look()
    assert world.all(SPECDECODE_CAPTURE) == [theirs]
    assert "CaptureStarted" not in told(world)
    assert f"SpecDecodeCapture {theirs['metadata']['name']} exists and does not belong" in told(world)["MissedSchedule"]
    assert world.object["status"]["captures"][0]["lastScheduleTime"]


async def test_a_strangers_capture_that_no_watch_has_told_of_is_left_as_it_is(world: World) -> None:
    deploy(world)
    theirs = await put_a_strangers_in_place(world, suspend=True)
    await world.look()
    assert world.all(SPECDECODE_CAPTURE) == [theirs]
    assert not {"CaptureStarted", "MissedSchedule"} & {*told(world)}
    see_captures(world)
    await world.look()
    assert "MissedSchedule" in told(world)


async def test_nothing_gives_way_to_a_capture_whose_name_is_taken(world: World) -> None:
    deploy(world, concurrencyPolicy="Replace")
    await put_a_strangers_in_place(world)
    owners = [owner_reference(KEY, world.object["metadata"]["uid"])]
    metadata = {"namespace": "team", "name": "earlier", "labels": OF_SCHEDULE, "ownerReferences": owners}
    world.api.create(SPECDECODE_CAPTURE, {"metadata": metadata, "spec": {"deployment": "llama"}})
    see_captures(world)
    await world.look()
    assert "MissedSchedule" in told(world)
    assert "suspend" not in (world.api.find(SPECDECODE_CAPTURE, "earlier") or {})["spec"]


@pytest.mark.parametrize("seen", [False, True], ids=["before the watch", "after it"])
async def test_a_capture_is_not_made_twice_where_the_status_was_lost(world: World, *, seen: bool) -> None:
    deploy(world)
    await world.look()
    made = world.all(SPECDECODE_CAPTURE)
    assert "CaptureStarted" in told(world)
    forget(world)
    if seen:
        see_captures(world)
    await world.look()
    see_captures(world)
    await world.look()
    assert world.all(SPECDECODE_CAPTURE) == made
    assert "MissedSchedule" not in told(world)


async def test_two_deployments_whose_names_read_alike_both_get_their_capture(world: World) -> None:
    deploy(world, "llama", "prod-nightly")
    deploy(world, "llama-prod", "nightly")
    await world.look()
    await world.look("llama-prod")
    of = sorted(body["metadata"]["ownerReferences"][0]["name"] for body in world.all(SPECDECODE_CAPTURE))
    assert of == ["llama", "llama-prod"]
