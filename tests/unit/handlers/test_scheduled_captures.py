"""Scheduled captures: retention, taken names and lost status."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from specdecode_operator.api import capture
from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import CaptureSchedule, ScheduleStatus
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.client import Cluster, ClusterError
from specdecode_operator.cluster.clock import ServerTime
from specdecode_operator.cluster.resources import (
    CAPTURE_LABEL,
    CAPTURED_DEPLOYMENT_LABEL,
    EVENT,
    PUBLISHED_LABEL,
    SCHEDULE_LABEL,
    SPECDECODE_CAPTURE,
    SPECDECODE_DEPLOYMENT,
)
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import ParsedDeployment, parse_deployment
from specdecode_operator.deployment.status import compose_status
from specdecode_operator.handlers.reconcile_deployment import keep_schedules
from specdecode_operator.handlers.status_writer import Reporter
from tests.support.decisions import desired_state
from tests.support.objects import pair_70b, parent
from tests.unit.handlers.reconciler_world import World

RETENTION = {"count": 1}
"""Of two claims of a schedule, one is too many."""


class FakeCluster:
    """Remembers what was written to it; refuses what has some letters in its name."""

    clock = ServerTime()

    def __init__(self, *, refuses: str = " ") -> None:
        self.written: list[tuple[str, str]] = []
        self._refuses = refuses

    def post_event(self, *_: object) -> None:
        pass

    async def delete(self, body: Body) -> None:
        self._write("delete", body)

    async def create(self, body: Body) -> Body:
        self._write("create", body)
        return {**body, "metadata": {**body["metadata"], "uid": body["metadata"]["name"], "resourceVersion": "1"}}

    def _write(self, verb: str, body: Body) -> None:
        if self._refuses in body["metadata"]["name"]:
            raise ClusterError("no")
        self.written.append((verb, f"{body['kind']} {body['metadata']['name']}"))


def labelled(name: str, schedule: str, day: int, **labels: str) -> Body:
    return {
        "metadata": {
            "namespace": "default",
            "name": name,
            "uid": name,
            "resourceVersion": "1",
            "labels": {SCHEDULE_LABEL: schedule, **labels},
            "creationTimestamp": f"2026-11-{day:02}T12:00:00Z",
            "ownerReferences": [{"uid": "uid-1"}],
        }
    }


def cache_with(*schedules: str) -> Cache:
    """Two captures that succeeded of each schedule, with a claim each."""
    cache = Cache()
    for schedule in schedules:
        for day in (1, 2):
            name = f"llama-{schedule}-{day}"
            status = {"spec": {"deployment": "llama"}, "status": {"phase": "Succeeded"}}
            cache.put_parent(capture.KIND, {**labelled(name, schedule, day), **status})
            labels = {CAPTURE_LABEL: name, CAPTURED_DEPLOYMENT_LABEL: "llama", PUBLISHED_LABEL: "true"}
            cache.put("PersistentVolumeClaim", labelled(name, schedule, day, **labels))
    return cache


def owner(*schedules: str, status_of: str, **fields: object) -> ParsedDeployment:
    told = [{"name": status_of, "schedule": "0 0 1 1 * UTC", "since": "2026-11-01T00:00:00Z"}]
    rest = {"schedule": "0 0 1 1 *", "suspend": True, "retention": RETENTION, **fields}
    captures = [{"name": name, **rest} for name in schedules]
    return parse_deployment(parent(pair_70b(captures=captures), status={"captures": told}))


def keep(cluster: FakeCluster, cache: Cache, owner: ParsedDeployment) -> list[ScheduleStatus]:
    schedules = [CaptureSchedule.model_validate(each) for each in owner.raw_spec["captures"]]
    reporter = Reporter(cast("Cluster", cluster), cache, owner.key, owner.uid)
    return asyncio.run(keep_schedules(reporter, owner, schedules)) or []


def status(owner: ParsedDeployment, kept: list[ScheduleStatus]) -> Any:
    return compose_status(owner, desired_state(owner, ()), Observation(), datetime.now(UTC), kept).captures


def test_retention_deletes_only_the_older_claim_of_its_schedule() -> None:
    cluster = FakeCluster()
    kept = keep(cluster, cache_with("yearly", "removed"), owner("yearly", status_of="yearly"))
    assert cluster.written == [("delete", "PersistentVolumeClaim llama-yearly-1")], "nothing of the other schedule"
    assert [each.name for each in kept] == ["yearly"]


def test_labelled_captures_of_other_owners_are_not_counted_or_deleted() -> None:
    cluster, cache = FakeCluster(), cache_with("yearly")
    over = {"spec": {"deployment": "llama"}, "status": {"phase": "Succeeded"}}
    for day in (3, 4, 5, 6):
        theirs = labelled(f"theirs-{day}", "yearly", day)
        theirs["metadata"]["ownerReferences"] = [{"uid": "another-uid"}] if day > 4 else []
        cache.put_parent(capture.KIND, {**theirs, **over})
    keep(cluster, cache, owner("yearly", status_of="yearly", successfulHistoryLimit=1))
    assert [name for _, name in cluster.written if "Claim" not in name] == ["SpecDecodeCapture llama-yearly-1"]


@pytest.mark.parametrize("left", [(), ("another",)], ids=["the last one", "one of two"])
def test_removed_schedule_keeps_its_captures_and_claims(left: tuple[str, ...]) -> None:
    cluster, holder = FakeCluster(), owner(*left, status_of="removed")
    kept = keep(cluster, cache_with("removed"), holder)
    assert cluster.written == []
    assert [each.name for each in status(holder, kept)] == [*left]


def test_refused_capture_does_not_block_other_schedules() -> None:
    fields = {"schedule": "* * * * *", "startingDeadlineSeconds": 86_400}
    told = [{"name": name, "schedule": "* * * * * UTC", "since": "2026-11-01T00:00:00Z"} for name in ("no", "yes")]
    captures = [{"name": name, **fields} for name in ("no", "yes")]
    holder = parse_deployment(parent(pair_70b(captures=captures), status={"captures": told}))
    cluster = FakeCluster(refuses="-no-")
    first, second = keep(cluster, Cache(), holder)
    assert [name.split("-")[1] for _, name in cluster.written] == ["yes"]
    assert (first.last_schedule_time, second.last_schedule_time is None) == (None, False)


NOW = datetime.now(UTC)
DUE = NOW - timedelta(hours=1)
LINE = f"{DUE.minute} {DUE.hour} {DUE.day} {DUE.month} *"
"""Due once within the test, whatever the time is."""

OF_SCHEDULE = {SCHEDULE_LABEL: "nightly"}


def status_before(schedule: str) -> Body:
    since = (NOW - timedelta(hours=2)).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"captures": [{"name": schedule, "schedule": f"{LINE} UTC", "since": since}]}


def deploy(world: World, name: str = "llama", schedule: str = "nightly", **fields: object) -> None:
    once = {"name": schedule, "schedule": LINE, "startingDeadlineSeconds": 86_400, **fields}
    world.add(pair_70b(captures=[once]), name, status=status_before(schedule))


def forget(world: World) -> None:
    """Let another operator take over after the status and the Events were lost."""
    world.restart()
    for body in world.all(EVENT):
        world.api.remove(EVENT, body["metadata"]["name"])
    world.api.change(SPECDECODE_DEPLOYMENT, "llama", status=status_before("nightly"))


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


async def test_unseen_capture_of_other_owner_is_not_changed(world: World) -> None:
    deploy(world)
    theirs = await put_a_strangers_in_place(world, suspend=True)
    await world.look()
    assert world.all(SPECDECODE_CAPTURE) == [theirs]
    assert not {"CaptureStarted", "MissedSchedule"} & {*told(world)}
    see_captures(world)
    await world.look()
    assert "MissedSchedule" in told(world)


@pytest.mark.parametrize("seen", [False, True], ids=["before the watch", "after it"])
async def test_lost_status_does_not_create_a_capture_twice(world: World, *, seen: bool) -> None:
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


async def test_deployments_with_similar_names_both_get_their_captures(world: World) -> None:
    deploy(world, "llama", "prod-nightly")
    deploy(world, "llama-prod", "nightly")
    await world.look()
    await world.look("llama-prod")
    of = sorted(body["metadata"]["ownerReferences"][0]["name"] for body in world.all(SPECDECODE_CAPTURE))
    assert of == ["llama", "llama-prod"]
