"""Schedules of captures."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.api.deployment import CaptureSchedule, Key, ScheduleStatus
from specdecode_operator.capture.schedules import ObservedSchedules, SchedulingDecision, decide_schedules
from specdecode_operator.cluster.resources import (
    CAPTURE_LABEL,
    OVER_AGE_ANNOTATION,
    PUBLISHED_LABEL,
    SCHEDULE_LABEL,
    SCHEDULED_AT_ANNOTATION,
)
from specdecode_operator.deployment.parsed_deployment import schedule_problems

KEY = Key("team", "llama")
NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
FORMAT = "%Y-%m-%dT%H:%M:%SZ"


def text(moment: datetime) -> str:
    return moment.strftime(FORMAT)


def hourly(**fields: Any) -> CaptureSchedule:
    return CaptureSchedule.model_validate({"name": "hourly", "schedule": "0 * * * *", **fields})


def seen(
    since: datetime = NOON - timedelta(days=1), last: datetime | None = None, schedule: CaptureSchedule | None = None
) -> ScheduleStatus:
    clock = schedule or hourly()
    return ScheduleStatus(
        name="hourly",
        schedule=f"{clock.schedule} {clock.time_zone}",
        since=text(since),
        last_schedule_time=text(last) if last else None,
    )


def capture(at: datetime, phase: str | None) -> dict[str, Any]:
    """A capture with a name as they were before there was a digest in it."""
    return {
        "metadata": {
            "name": f"llama-hourly-{int(at.timestamp()) // 60}",
            "labels": {SCHEDULE_LABEL: "hourly"},
            "annotations": {SCHEDULED_AT_ANNOTATION: text(at)},
            "creationTimestamp": text(at),
        },
        "spec": {"deployment": "llama"},
        "status": {"phase": phase},
    }


def claim(name: str, made: datetime, of: str = "", *, published: bool = True) -> dict[str, Any]:
    labels = {SCHEDULE_LABEL: "hourly", CAPTURE_LABEL: of or name} | ({PUBLISHED_LABEL: "true"} if published else {})
    return {"metadata": {"name": name, "labels": labels, "creationTimestamp": text(made)}}


def over_age(body: dict[str, Any], since: datetime) -> dict[str, Any]:
    """A claim that an earlier look found over age."""
    return {**body, "metadata": {**body["metadata"], "annotations": {OVER_AGE_ANNOTATION: text(since)}}}


def decide(
    now: datetime, schedule: CaptureSchedule, *captures: dict[str, Any], status: ScheduleStatus | None = None, claims=()
) -> SchedulingDecision:
    statuses = [status] if status else []
    return decide_schedules(KEY, "uid-1", [schedule], ObservedSchedules(captures, claims, statuses), now)


def names(bodies: list[dict[str, Any]]) -> list[str]:
    return [body["metadata"]["name"] for body in bodies]


def created(decision: SchedulingDecision) -> list[dict[str, Any]]:
    return [due.body for due in decision.create]


class TestDue:
    def test_due_capture_is_created_with_time_in_its_name(self) -> None:
        decision = decide(NOON + timedelta(seconds=10), hourly(), status=seen())
        (body,) = created(decision)
        assert re.fullmatch(rf"llama-hourly-[0-9a-f]{{8}}-{int(NOON.timestamp()) // 60}", body["metadata"]["name"])
        assert body["metadata"]["annotations"][SCHEDULED_AT_ANNOTATION] == "2026-11-21T12:00:00Z"
        assert body["spec"]["deployment"] == "llama"
        assert body["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
        assert decision.statuses[0].last_schedule_time == "2026-11-21T12:00:00Z"
        assert decision.statuses[0].next_schedule_time == "2026-11-21T13:00:00Z"

    def test_capture_is_created_in_the_scheduled_second(self) -> None:
        assert decide(NOON, hourly(), status=seen()).create

    def test_new_schedule_ignores_earlier_times(self) -> None:
        decision = decide(NOON + timedelta(seconds=10), hourly())
        assert not decision.create
        assert decision.statuses[0].since == "2026-11-21T12:00:10Z"

    def test_created_capture_is_not_created_again(self) -> None:
        now = NOON + timedelta(seconds=10)
        assert not decide(now, hourly(), status=seen(last=NOON)).create

    def test_existing_capture_is_not_recreated_without_status(self) -> None:
        now = NOON + timedelta(seconds=10)
        assert not decide(now, hourly(), capture(NOON, "Loading"), status=seen()).create

    @pytest.mark.parametrize("annotations", [None, {}, {SCHEDULED_AT_ANNOTATION: "yesterday"}])
    def test_invalid_scheduled_at_annotation_does_not_block_schedule(self, annotations: dict[str, str] | None) -> None:
        now = NOON + timedelta(seconds=10)
        broken = capture(NOON, "Succeeded")
        (broken["metadata"]["name"],) = names(created(decide(now, hourly(), status=seen())))
        broken["metadata"]["annotations"] = annotations
        (again,) = created(decide(now, hourly(), broken, status=seen()))
        assert again["metadata"]["name"] == broken["metadata"]["name"]
        assert not decide(now, hourly(), broken, status=seen(last=NOON)).create

    def test_schedule_uses_its_time_zone(self) -> None:
        nightly = hourly(schedule="0 3 * * *", timeZone="Europe/Berlin")
        due = datetime(2026, 11, 21, 2, 0, tzinfo=UTC)
        assert decide(due + timedelta(seconds=5), nightly, status=seen(schedule=nightly)).create
        later = due + timedelta(hours=1, seconds=5)
        assert not decide(later, nightly, status=seen(last=due, schedule=nightly)).create

    @pytest.mark.parametrize(
        ("line", "runs"), [("30 * * * *", 4), ("*/30 * * * *", 7), ("0 */2 * * *", 2), ("0 3 * * *", 1)]
    )
    def test_repeated_hour_at_dst_end_has_its_captures(self, line: str, runs: int) -> None:
        """On 25 October 2026 Berlin has the hour from 2 to 3 twice: 00:00 to 02:00 UTC."""
        clock = hourly(schedule=line, timeZone="Europe/Berlin")
        now = datetime(2026, 10, 24, 23, 0, 5, tzinfo=UTC)
        status, started = seen(now, schedule=clock), 0
        while now < datetime(2026, 10, 25, 3, 0, 5, tzinfo=UTC):
            decision = decide(now, clock, status=status)
            (status,) = decision.statuses
            started += len(decision.create)
            assert not decision.events
            assert status.next_schedule_time is not None
            assert status.next_schedule_time > text(now)
            now += timedelta(seconds=60)
        assert started == runs

    def test_changed_schedule_neither_creates_nor_misses_captures(self) -> None:
        nightly = hourly(schedule="0 3 * * *")
        decision = decide(NOON + timedelta(minutes=20), nightly, status=seen(last=NOON - timedelta(days=1)))
        assert (decision.create, decision.events) == ([], [])

    def test_capture_is_created_up_to_its_starting_deadline(self) -> None:
        assert decide(NOON + timedelta(seconds=300), hourly(), status=seen()).create

    def test_capture_beyond_starting_deadline_is_skipped_with_event(self) -> None:
        decision = decide(NOON + timedelta(seconds=301), hourly(), status=seen())
        assert not decision.create
        assert [told.reason for told in decision.events] == ["MissedSchedule"]
        assert decision.statuses[0].last_schedule_time == "2026-11-21T12:00:00Z"

    def test_only_latest_of_many_missed_times_is_created(self) -> None:
        decision = decide(NOON + timedelta(seconds=5), hourly(), status=seen(NOON - timedelta(days=90)))
        assert len(decision.create) == 1

    def test_suspended_schedule_creates_nothing_and_does_not_catch_up(self) -> None:
        resting = decide(NOON + timedelta(seconds=5), hourly(suspend=True), status=seen())
        assert not resting.create
        assert resting.statuses[0].next_schedule_time is None
        awake = decide(NOON + timedelta(seconds=30), hourly(), status=resting.statuses[0])
        assert not awake.create


class TestConcurrency:
    def test_forbid_policy_starts_capture_once_earlier_one_has_ended(self) -> None:
        earlier = NOON - timedelta(hours=1)
        status = seen(last=earlier)
        waiting = decide(NOON + timedelta(seconds=5), hourly(), capture(earlier, "Loading"), status=status)
        assert not waiting.create
        later = decide(
            NOON + timedelta(seconds=200), hourly(), capture(earlier, "Succeeded"), status=waiting.statuses[0]
        )
        assert len(later.create) == 1

    def test_allow_policy_starts_concurrent_capture(self) -> None:
        schedule = hourly(concurrencyPolicy="Allow")
        assert decide(NOON, schedule, capture(NOON - timedelta(hours=1), "Loading"), status=seen()).create

    def test_replace_policy_replaces_running_capture(self) -> None:
        earlier = capture(NOON - timedelta(hours=1), "Loading")
        decision = decide(NOON, hourly(concurrencyPolicy="Replace"), earlier, status=seen())
        (due,) = decision.create
        assert due.replaces == [earlier]


class TestHistory:
    def test_newest_captures_of_each_outcome_are_kept(self) -> None:
        hours = [NOON - timedelta(hours=hour) for hour in range(1, 6)]
        good = [capture(at, "Succeeded") for at in hours]
        bad = [capture(at + timedelta(minutes=1), phase) for at, phase in zip(hours, ["Failed", "Cancelled"] * 3)]  # noqa: B905
        decision = decide(NOON - timedelta(minutes=30), hourly(), *good, *bad, status=seen())
        assert names(decision.delete_captures) == names([*good[3:], *bad[1:]])

    def test_claims_beyond_count_or_age_are_deleted_unless_in_use(self) -> None:
        claims = [claim(f"claim-{day}", NOON - timedelta(days=day)) for day in range(1, 6)]
        running = capture(NOON - timedelta(minutes=5), "Loading")
        claims[-1]["metadata"]["labels"][CAPTURE_LABEL] = running["metadata"]["name"]
        later = NOON + timedelta(minutes=30)
        by_count = decide(later, hourly(retention={"count": 2}), running, status=seen(last=NOON), claims=claims)
        assert names(by_count.delete_claims) == ["claim-3", "claim-4"]
        by_days = hourly(retention={"days": 3})
        first = decide(later, by_days, running, status=seen(last=NOON), claims=claims)
        assert not first.delete_claims
        assert names([note.body for note in first.notes]) == ["claim-3", "claim-4"]
        an_hour_later = later + timedelta(hours=1)
        noted = [over_age(each, later) if each["metadata"]["name"] > "claim-2" else each for each in claims]
        by_age = decide(an_hour_later, by_days, running, status=seen(last=NOON), claims=noted)
        assert names(by_age.delete_claims) == ["claim-3", "claim-4"]

    def test_failed_captures_do_not_displace_published_claims(self) -> None:
        good = [claim(f"good-{day}", NOON - timedelta(days=day)) for day in range(20, 25)]
        failed = [claim(f"failed-{day}", NOON - timedelta(days=day), published=False) for day in range(1, 8)]
        later = NOON + timedelta(minutes=90)

        def kept(**retention: int) -> list[str]:
            claims = [over_age(each, later - timedelta(hours=1)) for each in [*failed, *good]]
            decision = decide(
                later, hourly(retention=retention), status=seen(last=NOON + timedelta(hours=1)), claims=claims
            )
            return [name for name in names([*good, *failed]) if name not in names(decision.delete_claims)]

        assert kept(count=2) == ["good-20", "good-21", "failed-1", "failed-2"]
        assert kept(count=3, failedCount=1) == ["good-20", "good-21", "good-22", "failed-1"]
        assert kept(failedCount=0) == names(good)
        assert kept(count=2, days=2) == ["failed-1"], "age holds for all"

    def test_succeeded_capture_is_kept_until_its_claim_is_labelled(self) -> None:
        at = NOON - timedelta(hours=1)
        fresh, over = claim("fresh", at, published=False), capture(at, "Succeeded")
        fresh["metadata"]["labels"][CAPTURE_LABEL] = over["metadata"]["name"]
        schedule = hourly(retention={"failedCount": 0}, successfulHistoryLimit=0)
        early = decide(NOON + timedelta(minutes=30), schedule, over, status=seen(last=NOON), claims=[fresh])
        assert (early.delete_claims, early.delete_captures) == ([], []), "only the object knows of the good data"
        fresh["metadata"]["labels"][PUBLISHED_LABEL] = "true"
        told = decide(NOON + timedelta(minutes=30), schedule, over, status=seen(last=NOON), claims=[fresh])
        assert (told.delete_claims, told.delete_captures) == ([], [over])

    def test_terminating_claims_do_not_count_toward_retention(self) -> None:
        claims = [claim(f"claim-{day}", NOON - timedelta(days=day)) for day in range(1, 4)]
        claims[0]["metadata"]["deletionTimestamp"] = text(NOON)
        later, schedule = NOON + timedelta(minutes=30), hourly(retention={"count": 2})
        assert not decide(later, schedule, status=seen(last=NOON), claims=claims).delete_claims

    def test_all_claims_are_kept_without_retention(self) -> None:
        claims = [claim(f"claim-{day}", NOON - timedelta(days=day)) for day in range(1, 400)]
        assert not decide(NOON + timedelta(minutes=30), hourly(), status=seen(last=NOON), claims=claims).delete_claims


def test_capture_deleted_from_history_is_not_created_again() -> None:
    schedule, before = hourly(successfulHistoryLimit=0), seen(last=NOON - timedelta(hours=1))
    made = capture(NOON, "Succeeded")
    decision = decide_schedules(KEY, "uid", [schedule], ObservedSchedules([made], [], [before]), NOON)
    assert decision.delete_captures == [made]
    (told,) = decision.statuses
    assert told.last_schedule_time == text(NOON)
    assert not decide_schedules(KEY, "uid", [schedule], ObservedSchedules([], [], [told]), NOON).create


def test_future_scheduled_at_annotation_does_not_block_schedule() -> None:
    ahead = capture(NOON + timedelta(days=400), "Succeeded")
    (due,) = decide_schedules(KEY, "uid", [hourly()], ObservedSchedules([ahead], [], [seen()]), NOON).create
    assert due.body["metadata"]["annotations"][SCHEDULED_AT_ANNOTATION] == text(NOON)


@given(st.lists(st.integers(min_value=1, max_value=4000), min_size=1, max_size=60))
def test_each_scheduled_time_gets_at_most_one_capture(steps: list[int]) -> None:
    now, status, made = NOON, seen(since=NOON), []
    for step in steps:
        now += timedelta(seconds=step)
        decision = decide(now, hourly(startingDeadlineSeconds=86_400), *made, status=status)
        (status,) = decision.statuses
        made += [{**body, "status": {"phase": "Succeeded"}} for body in created(decision)]
        for body in made:
            body["metadata"].setdefault("creationTimestamp", text(now))
    times = [body["metadata"]["annotations"][SCHEDULED_AT_ANNOTATION] for body in made]
    assert len(times) == len(set(times))
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"schedule": "61 * * * *"}, "spec.captures[0].schedule"),
        ({"schedule": "* * 31 2 *"}, "spec.captures[0].schedule"),
        ({"timeZone": "Europe/Atlantis"}, "spec.captures[0].timeZone"),
    ],
)
def test_invalid_schedule_or_time_zone_is_refused_with_field(fields: dict[str, str], field: str) -> None:
    (problem,) = schedule_problems([hourly(**fields)])
    assert problem.field == field
    assert next(iter(fields.values())) in problem.value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("llama", "prod-hourly"), ("llama-prod", "hourly")),
        (("a" * 51 + "b", "hourly"), ("a" * 51 + "c", "hourly")),
        (("llama", "a" * 20), ("llama-" + "a" * 20, "a" * 20)),
    ],
)
def test_capture_names_of_different_schedules_are_unique(one: tuple[str, str], other: tuple[str, str]) -> None:
    """A deployment that is made anew has schedules of its own, too."""
    made = [
        name
        for (deployment, schedule), uid in ((one, "uid-1"), (other, "uid-2"), (one, "uid-3"))
        for at in (NOON, NOON + timedelta(hours=1))
        for name in names(created(decide_alone(Key("team", deployment), uid, schedule, at)))
    ]
    assert len(set(made)) == len(made) == 6
    assert max(map(len, made)) <= 52
    assert made[0] < made[1], "they are sorted by time"


def decide_alone(key: Key, uid: str, schedule: str, at: datetime) -> SchedulingDecision:
    status = seen().model_copy(update={"name": schedule})
    return decide_schedules(key, uid, [hourly(name=schedule)], ObservedSchedules([], [], [status]), at)
