"""Clocks that are wrong or jump: schedules go on, and no data is deleted early."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from specdecode_operator.api import capture
from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key
from specdecode_operator.capture.observation import read_capture
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.clock import TIME_IN_FUTURE, ServerTime
from specdecode_operator.cluster.manifests import owner_reference
from specdecode_operator.cluster.resources import (
    CAPTURE_LABEL,
    CAPTURED_DEPLOYMENT_LABEL,
    EVENT,
    MANAGED_BY_LABEL,
    MANAGER,
    PERSISTENT_VOLUME_CLAIM,
    PUBLISHED_LABEL,
    SCHEDULE_LABEL,
    SPECDECODE_CAPTURE,
    SPECDECODE_DEPLOYMENT,
)
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.handlers.metrics import OperatorMetrics
from specdecode_operator.handlers.reconcile_capture import CaptureReconciler
from specdecode_operator.handlers.reconcile_job import Servings, Shared
from specdecode_operator.handlers.settings import Settings
from tests.support.captures import capture as capture_with
from tests.support.captures import capture_spec
from tests.support.driven_clock import DrivenServerTime
from tests.support.objects import pair_70b, parent
from tests.unit.handlers.reconciler_world import World

NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
HOUR_S, DAY_S = 3600.0, 86_400.0
OVER_AGE = "specdecode.io/over-age-since"
COUNTED_FROM = "specdecode.io/counted-from"
KEY = Key("team", "llama")


def text(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def scheduled(world: World, *, line: str = "0 * * * *", told: Body | None = None, **fields: Any) -> DrivenServerTime:
    """Add a deployment with one schedule, whose status tells some times; return the API server's time."""
    clock = world.clock = DrivenServerTime(NOON + timedelta(minutes=30))
    world.api.now = clock.now
    world.restart()
    known = {"name": "nightly", "schedule": f"{line} UTC", "since": text(NOON - timedelta(days=90)), **(told or {})}
    spec = pair_70b(captures=[{"name": "nightly", "schedule": line, **fields}])
    world.add(spec, status={"captures": [known]})
    return clock


def add_claim(world: World, name: str, made: datetime, *, published: bool = True, **annotations: str) -> None:
    """Add a claim that a capture of the schedule has left."""
    labels = {MANAGED_BY_LABEL: MANAGER, CAPTURE_LABEL: name, CAPTURED_DEPLOYMENT_LABEL: "llama"}
    labels |= {SCHEDULE_LABEL: "nightly"} | ({PUBLISHED_LABEL: "true"} if published else {})
    metadata = {"namespace": "team", "name": name, "labels": labels, "creationTimestamp": text(made)}
    world.api.create(PERSISTENT_VOLUME_CLAIM, {"metadata": {**metadata, "annotations": annotations}})


def claims(world: World) -> dict[str, Body]:
    """The annotations of all claims, by name."""
    return {
        body["metadata"]["name"]: body["metadata"].get("annotations") or {}
        for body in world.all(PERSISTENT_VOLUME_CLAIM)
    }


async def look(world: World) -> list[str]:
    """Reconcile the deployment once, with all claims and captures in sight; return what was written."""
    for resource in (PERSISTENT_VOLUME_CLAIM, SPECDECODE_CAPTURE):
        bodies = world.all(resource)
        for body in bodies:
            if resource is SPECDECODE_CAPTURE:
                world.cache.put_parent(capture.KIND, body)
            else:
                world.cache.put(resource.kind, body)
    claims_there = [body["metadata"]["uid"] for body in world.all(PERSISTENT_VOLUME_CLAIM)]
    world.cache.retain(PERSISTENT_VOLUME_CLAIM.kind, claims_there, 10**9)
    return await world.look()


async def looks(world: World, clock: DrivenServerTime, seconds: float) -> None:
    """Look every five minutes for a time."""
    for _ in range(round(seconds / 300)):
        clock.advance(300)
        await look(world)


def told(world: World) -> list[str]:
    """Messages of the Events about times in the future."""
    return [body["message"] for body in world.all(EVENT) if body["reason"] == TIME_IN_FUTURE]


def status(world: World) -> Body:
    (found,) = world.object["status"]["captures"]
    return dict(found)


class TestStatuses:
    @pytest.mark.parametrize("zone", ["Z", "+00:00", ""])
    def test_status_time_in_the_future_counts_as_now_for_any_zone_format(self, zone: str) -> None:
        status = {"startedAt": f"2031-01-01T00:00:00{zone}"}
        read = read_capture(capture_with(status=status), NOON)
        assert read.status.started_at == text(NOON)
        assert len(read.times_ahead) == 1

    def test_each_future_time_in_a_list_counts_as_now(self) -> None:
        earlier, ahead = text(NOON - timedelta(hours=1)), text(NOON + timedelta(days=2))
        policy: Body = {"mode": "Enforce", "action": "Keep", "outcome": "Kept", "reason": "Best", "message": ""}
        policy["restarts"] = [earlier, ahead]
        read = parse_deployment(parent(pair_70b(), status={"policy": policy}), now=NOON)
        assert read.status.policy is not None
        assert read.status.policy.restarts == [earlier, text(NOON)]
        assert read.times_ahead[0].startswith("status.policy.restarts[1]: ")


class TestSchedules:
    async def test_api_server_clock_set_back_stops_no_schedule(self, world: World) -> None:
        clock = scheduled(world, concurrencyPolicy="Allow")
        await looks(world, clock, 2 * HOUR_S)
        clock.jump(-30 * DAY_S)
        set_back = clock.now()
        await looks(world, clock, 2 * HOUR_S)
        at = sorted(
            body["metadata"]["annotations"]["specdecode.io/scheduled-at"] for body in world.all(SPECDECODE_CAPTURE)
        )
        assert len(at) == 4
        assert [text(set_back) < each < text(clock.now()) for each in at] == [True, True, False, False]

    async def test_future_transition_times_are_corrected_and_reported_once(self, world: World) -> None:
        """Captures that keep their engines wait for engines that are not ready since such a time."""
        clock = scheduled(world)
        await look(world)
        ahead = text(NOON + timedelta(days=2))
        conditions = [{**each, "lastTransitionTime": ahead} for each in world.object["status"]["conditions"]]
        world.api.change(SPECDECODE_DEPLOYMENT, "llama", status={**world.object["status"], "conditions": conditions})
        for _ in range(3):
            clock.advance(60)
            await look(world)
        assert {each["lastTransitionTime"] for each in world.object["status"]["conditions"]} == {
            text(NOON + timedelta(minutes=31))
        }
        assert len(told(world)) == len(conditions)


class TestRetention:
    async def test_api_server_clock_jump_deletes_no_claim(self, world: World) -> None:
        clock = scheduled(world, line="0 0 1 1 *", retention={"days": 30})
        for day in range(1, 6):
            add_claim(world, f"claim-{day}", NOON - timedelta(days=day))
        await looks(world, clock, 2 * HOUR_S)
        clock.jump(40 * DAY_S)
        await looks(world, clock, HOUR_S - 600)
        assert len(claims(world)) == 5
        clock.jump(-40 * DAY_S)
        await looks(world, clock, 4 * HOUR_S)
        assert claims(world) == {f"claim-{day}": {} for day in range(1, 6)}

    async def test_disagreeing_api_server_clocks_delete_no_claim(self, world: World) -> None:
        clock = scheduled(world, line="0 0 1 1 *", retention={"days": 30})
        add_claim(world, "old", NOON - timedelta(days=31), **{OVER_AGE: text(NOON - timedelta(hours=2))})
        add_claim(world, "new", NOON - timedelta(days=1))
        for _ in range(60):
            right = clock.now()
            clock.answer(right + timedelta(days=40))
            clock.answer(right)
            await looks(world, clock, 300)
        assert claims(world).keys() == {"old", "new"}, "while they disagree nothing is deleted for its age"
        await looks(world, clock, 2 * HOUR_S)
        assert claims(world) == {"new": {}}

    @pytest.mark.parametrize("restarts", [False, True])
    async def test_claim_is_deleted_only_after_being_over_age_for_an_hour(
        self, world: World, *, restarts: bool
    ) -> None:
        clock = scheduled(world, line="0 0 1 1 *", retention={"days": 30})
        add_claim(world, "old", NOON - timedelta(days=31))
        add_claim(world, "new", NOON - timedelta(days=29))
        await look(world)
        first = clock.now()
        assert claims(world) == {"old": {OVER_AGE: text(first)}, "new": {}}
        await looks(world, clock, HOUR_S / 2)
        if restarts:
            clock = world.clock = DrivenServerTime(first + timedelta(minutes=30))
            world.restart()
        await looks(world, clock, HOUR_S / 2 - 300)
        assert claims(world)["old"] == {OVER_AGE: text(first)}
        await looks(world, clock, 300)
        assert claims(world) == {"new": {}}

    @pytest.mark.parametrize(
        "noted",
        [
            text(NOON - timedelta(days=400)),
            text(NOON - timedelta(days=2)),
            text(NOON + timedelta(days=2)),
            "yesterday",
            "",
        ],
        ids=["before the claim", "before it was over age", "to come", "no time", "empty"],
    )
    async def test_impossible_over_age_annotation_is_replaced(self, world: World, noted: str) -> None:
        clock = scheduled(world, line="0 0 1 1 *", retention={"days": 30})
        add_claim(world, "old", NOON - timedelta(days=31), **{OVER_AGE: noted})
        await look(world)
        assert claims(world) == {"old": {OVER_AGE: text(clock.now())}}
        await looks(world, clock, HOUR_S)
        assert claims(world) == {}

    async def test_restored_claim_loses_its_over_age_annotation(self, world: World) -> None:
        scheduled(world, line="0 0 1 1 *", retention={"days": 30})
        add_claim(world, "restored", NOON, **{OVER_AGE: text(NOON - timedelta(days=90))})
        await look(world)
        assert claims(world) == {"restored": {}}

    async def test_no_claim_is_deleted_for_age_without_server_time(self, world: World) -> None:
        scheduled(world, line="0 0 1 1 *", retention={"days": 30})
        world.clock = ServerTime(local=(NOON + timedelta(days=90)).timestamp)
        world.restart()
        add_claim(world, "claim", NOON, **{OVER_AGE: text(NOON + timedelta(days=60))})
        await look(world)
        assert claims(world).keys() == {"claim"}

    async def test_claims_with_future_creation_times_do_not_evict_later_claims(self, world: World) -> None:
        clock = scheduled(world, line="0 0 1 1 *", retention={"count": 2, "days": 30})
        for day in (1, 2):
            add_claim(world, f"ahead-{day}", NOON + timedelta(days=400 + day))
        await look(world)
        assert [each[COUNTED_FROM] for each in claims(world).values()] == [text(clock.now())] * 2
        clock.advance(DAY_S)
        add_claim(world, "later", clock.now())
        await looks(world, clock, 3600)
        assert claims(world).keys() == {"ahead-2", "later"}
        assert len(told(world)) == 2, "once for each, though they are looked at all the time"
        clock.advance(31 * DAY_S)
        await looks(world, clock, 2 * HOUR_S)
        assert claims(world) == {}


def ended(world: World, finished: datetime, *, noticed: datetime | None = None, **spec: Any) -> Key:
    """Add a capture that has succeeded."""
    condition = {
        "type": "Succeeded",
        "status": "True",
        "reason": "Captured",
        "message": "",
        "observedGeneration": 1,
        "lastTransitionTime": text(noticed or finished),
    }
    body = {
        "metadata": {
            "namespace": "team",
            "name": "once",
            "labels": {},
            "ownerReferences": [owner_reference(KEY, "uid-0")],
        },
        "spec": capture_spec(**spec),
        "status": {"phase": "Succeeded", "conditions": [condition], "finishedAt": text(finished)},
    }
    world.api.create(SPECDECODE_CAPTURE, body)
    return Key("team", "once", capture.KIND)


Looks = Callable[[], Any]


def looking(world: World, clock: ServerTime, key: Key) -> Looks:
    """Return what reconciles a capture once, and returns its object."""
    world._cluster.clock = clock
    metrics, settings = OperatorMetrics(Cache()), Settings(operator_image="operator:1")
    servings = Servings(world.cache)
    reconciler = CaptureReconciler(Shared(world._cluster, world.cache, world.reconciler, metrics, settings, servings))

    async def look() -> Body | None:
        if (body := world.api.find(SPECDECODE_CAPTURE, key.name)) is not None:
            world.cache.put_parent(capture.KIND, body)
            await reconciler.reconcile(key)
            await world._cluster.events_posted()
        return world.api.find(SPECDECODE_CAPTURE, key.name)

    return look


class TestTimeToLive:
    @pytest.mark.parametrize(("ttl_s", "rests_s"), [(DAY_S, HOUR_S), (600, 600)])
    async def test_clock_jump_does_not_delete_a_capture_at_once(
        self, world: World, ttl_s: float, rests_s: float
    ) -> None:
        """With storage.retain: false its claim and its files would go with it."""
        clock = DrivenServerTime(NOON)
        look = looking(world, clock, ended(world, NOON, ttlSecondsAfterFinished=int(ttl_s)))
        clock.advance(300)
        clock.jump(10 * DAY_S)
        clock.advance(rests_s - 60)
        assert await look()
        clock.advance(60)
        assert not await look()

    async def test_ttl_counts_from_when_the_end_was_noticed(self, world: World) -> None:
        """What its Job says may be of a clock that was behind."""
        clock = DrivenServerTime(NOON - timedelta(days=1))
        clock.advance(DAY_S)
        key = ended(world, NOON - timedelta(days=30), noticed=NOON, ttlSecondsAfterFinished=3600)
        look = looking(world, clock, key)
        clock.advance(3540)
        assert await look()
        clock.advance(60)
        assert not await look()

    async def test_future_finish_time_counts_as_now(self, world: World) -> None:
        clock = DrivenServerTime(NOON)
        look = looking(world, clock, ended(world, NOON + timedelta(days=30), ttlSecondsAfterFinished=7200))
        body = await look()
        assert body is not None
        assert body["status"]["finishedAt"] == text(NOON)
        assert len(told(world)) == 2, "its end, and its condition"
        for _ in range(7):
            clock.advance(1000)
            assert await look()
        assert len(told(world)) == 2
        clock.advance(200)
        assert not await look()
