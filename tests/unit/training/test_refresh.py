"""Trainings of schedules: when one starts, how often, and for how many GPU hours."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_operator.api.deployment import CaptureSchedule, Key, ScheduledTraining
from specdecode_operator.api.speculation import Speculation
from specdecode_operator.api.training import SpecDecodeTrainingSpec
from specdecode_operator.capture.preconditions import captured_deployment
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.observed.decay import Decay
from specdecode_operator.stats.engine_window import Work
from specdecode_operator.training.refresh_cost import largest_cost
from tests.support.captures import observed_deployment
from tests.support.objects import Body
from tests.support.refreshes import GPUS, SERVED_HEAD, Refreshes, h100_source, schedule_of, text
from tests.support.trainings import TRAINER

H100 = h100_source()
HOUR, WEEK = timedelta(hours=1), timedelta(days=7)
LEARNED = Decay(learned={0: (Work(),) * 32})
DECLINED = Decay(learned=LEARNED.learned, told={"AcceptanceDecayed": "20% of drafted tokens accepted"})
SLOWER = Decay(learned=LEARNED.learned, told={"StepsSlower": "slower"})


def hours_of(template: Body) -> float:
    run = ScheduledTraining.parse(schedule_of(0, template=template)["training"]).template
    return largest_cost(run, H100).gpu_seconds / 3600


ONE = hours_of({})
"""Largest GPU hours of a training of these tests: a little more than 2 GPUs for an hour."""


def refreshes(limit: int = 100, source: Any = H100, **fields: Any) -> Refreshes:
    """A schedule that the operator has seen; its first capture is an hour away."""
    found = Refreshes(schedule_of(limit, **fields), source)
    found.reconcile()
    found.advance(HOUR)
    return found


def trained(world: Refreshes, used: timedelta = timedelta(minutes=30), phase: str = "Complete") -> str:
    """Let a capture succeed, and the training on it run and end; return the training."""
    world.capture()
    world.reconcile()
    name = world.running
    assert name is not None, world.status
    world.start(name)
    world.reconcile()
    world.advance(used)
    world.end(name, phase)
    world.reconcile()
    return name


class TestStart:
    def test_training_has_the_template_the_capture_and_the_owner(self) -> None:
        world = refreshes(queue={"name": "gpus"}, template={"promote": "OnBetter"})
        capture = world.capture()
        world.reconcile()
        (body,) = world.trainings.values()
        spec = SpecDecodeTrainingSpec.parse(body["spec"])
        assert (spec.deployment, spec.captures, spec.promote, spec.trainer.image) == (
            *("llama", [capture], "OnBetter", TRAINER["image"]),
        )
        assert body["metadata"]["labels"] == {
            "app.kubernetes.io/managed-by": "specdecode-operator",
            "specdecode.io/schedule": "weekly",
            "kueue.x-k8s.io/queue-name": "gpus",
        }
        assert body["metadata"]["ownerReferences"][0]["uid"] == "uid-1"

    def test_name_leaves_room_for_the_capture_that_measures_the_head(self) -> None:
        world = refreshes(name="a-name-of-20-letters")
        world.see(key=Key("default", "x" * 52))
        world.capture()
        world.reconcile()
        (name,) = world.trainings
        assert len(f"{name}-judge") <= 52

    def test_capture_from_before_the_schedule_trained_is_not_used(self) -> None:
        world = Refreshes(schedule_of(100), H100)
        world.capture()
        world.advance(HOUR)
        world.reconcile()
        assert (world.reason, world.trainings) == ("WaitingForCapture", {})

    def test_failed_capture_starts_none(self) -> None:
        world = refreshes()
        world.captures[world.capture()]["status"]["phase"] = "Failed"
        world.reconcile()
        assert (world.reason, world.trainings) == ("WaitingForCapture", {})

    def test_second_capture_waits_for_the_training_and_the_newest_is_next(self) -> None:
        world = refreshes()
        world.capture()
        world.reconcile()
        first = world.running
        assert first is not None
        world.reconcile()
        for _ in range(2):
            world.advance(WEEK)
            newest = world.capture()
            world.reconcile()
        assert (world.running, world.reason) == (first, "TrainingRunning")
        world.start(first)
        world.end(first)
        world.reconcile()
        assert world.status is not None
        assert world.status.running is not None
        assert world.status.running.capture == newest
        assert len(world.trainings) == 2

    def test_suspended_schedule_starts_none(self) -> None:
        world = refreshes(suspend=True)
        world.capture()
        world.reconcile()
        assert (world.reason, world.trainings) == ("ScheduleSuspended", {})
        world.change(suspend=False)
        world.reconcile()
        assert world.reason == "TrainingRunning"

    def test_deployment_without_a_plan_is_waited_for(self) -> None:
        world = refreshes()
        world.see(source=Blocked("DeploymentNotPlanned", "no plan"))
        world.capture()
        world.reconcile()
        assert (world.reason, world.trainings) == ("DeploymentNotPlanned", {})
        world.see(source=H100)
        world.reconcile()
        assert world.reason == "TrainingRunning"

    def test_template_that_cannot_train_is_told_with_its_field(self) -> None:
        world = refreshes(template={"trainer": {**TRAINER, "gpus": 1}})
        world.capture()
        world.reconcile()
        assert world.status is not None
        assert (world.reason, world.trainings) == ("TooFewGPUs", {})
        assert "training.template.trainer.gpus: 1" in world.status.message
        assert [event.warns for event in world.events] == [True]

    def test_object_of_another_owner_with_its_name_is_left(self) -> None:
        world = refreshes()
        world.capture()
        world.reconcile(killed="before the status")
        world.reconcile(killed="after the status")
        name = world.running
        assert name is not None
        theirs = {"metadata": {"namespace": "default", "name": name, "uid": "theirs"}, "spec": {}, "status": {}}
        world.trainings[name] = theirs
        world.reconcile()
        world.reconcile()
        assert (world.reason, world.running, world.trainings) == ("TrainingNameTaken", None, {name: theirs})
        assert len(world.events) == 1


class TestWhenDecayed:
    def decayed(self, **fields: Any) -> Refreshes:
        return refreshes(when="Decayed", **fields)

    def test_first_capture_waits_for_a_baseline(self) -> None:
        world = self.decayed()
        world.capture()
        world.reconcile()
        assert (world.reason, world.trainings) == ("NoBaseline", {})
        world.see(decay=LEARNED)
        world.reconcile()
        assert (world.reason, world.trainings) == ("NotDecayed", {})
        assert [event.warns for event in world.events] == [False, False]

    @pytest.mark.parametrize(("decay", "starts"), [(LEARNED, False), (SLOWER, False), (DECLINED, True)])
    def test_the_detector_decides(self, decay: Decay, *, starts: bool) -> None:
        world = self.decayed()
        world.see(decay=decay)
        world.capture()
        world.reconcile()
        assert bool(world.trainings) == starts

    def test_decline_counts_although_the_operator_was_restarted_before_the_capture(self) -> None:
        world = self.decayed()
        world.see(decay=DECLINED)
        world.reconcile()
        world.see(decay=LEARNED)
        world.capture()
        world.reconcile()
        assert world.trainings

    def test_decline_of_engines_that_no_longer_serve_does_not_count(self) -> None:
        world = self.decayed()
        world.see(decay=DECLINED)
        world.reconcile()
        world.see(decay=LEARNED, engine="e2")
        world.capture()
        world.reconcile()
        assert (world.reason, world.trainings) == ("NotDecayed", {})

    def test_decline_is_not_used_twice(self) -> None:
        world = self.decayed()
        world.see(decay=DECLINED)
        trained(world)
        world.see(decay=LEARNED, engine="e2")
        world.advance(WEEK)
        world.capture(engine="e2")
        world.reconcile()
        assert len(world.trainings) == 1

    @pytest.mark.parametrize(
        ("now", "starts"),
        [
            ({"acceptance": 55}, False),
            ({"acceptance": 53}, True),
            ({"acceptance": 20, "engine": "e2"}, False),
            ({"prompt": 590}, False),
            ({"prompt": 610}, True),
            ({"output": 49}, True),
            ({"acceptance": None}, False),
        ],
    )
    def test_captures_of_the_schedule_are_compared(self, now: dict[str, Any], *, starts: bool) -> None:
        world = self.decayed()
        world.see(speculation=Speculation.parse(SERVED_HEAD))
        world.capture()
        world.reconcile()
        world.advance(WEEK)
        world.capture(**now)
        world.reconcile()
        assert bool(world.trainings) == starts
        assert world.reason == ("TrainingRunning" if starts else "NotDecayed")

    @pytest.mark.parametrize(("completed", "reason"), [(99, "NotDecayed"), (100, "TrainingRunning")])
    def test_lengths_of_few_requests_are_not_compared(self, completed: int, reason: str) -> None:
        world = self.decayed()
        world.capture()
        world.reconcile()
        world.advance(WEEK)
        summary = world.captures[world.capture()]["status"]["summary"]
        summary |= {"requests": {"sent": 600, "completed": completed}, "promptTokens": 1000 * completed}
        world.reconcile()
        assert world.reason == reason

    def test_acceptance_of_lookups_is_not_compared(self) -> None:
        world = self.decayed()
        world.capture()
        world.reconcile()
        world.advance(WEEK)
        world.capture(20)
        world.reconcile()
        assert world.reason == "NotDecayed"

    def test_traffic_from_before_the_last_training_is_not_compared(self) -> None:
        world = self.decayed()
        for prompt in (400, 800, 800):
            world.capture(prompt=prompt)
            world.reconcile()
            if name := world.running:
                world.start(name)
                world.reconcile()
                world.end(name)
                world.reconcile()
            world.advance(WEEK)
        assert len(world.trainings) == 1
        assert world.reason == "NotDecayed"


class TestBudget:
    def test_training_reserves_all_attempts_and_its_measurement(self) -> None:
        judged = {"judgement": {"enabled": True, "repetitions": 2}}
        assert hours_of({}) == pytest.approx(GPUS, rel=0.2)
        assert hours_of({"backoffLimit": 2}) == pytest.approx(3 * ONE, rel=0.1)
        assert hours_of({"deadlineSeconds": 7200}) == pytest.approx(2 * ONE, rel=0.1)
        assert hours_of(judged) > ONE + 8 * GPUS, "8 starts of an engine with an hour each"
        assert hours_of({"trainer": {**TRAINER, "gpus": 4}}) == 2 * ONE

    def test_training_on_cpus_costs_nothing(self) -> None:
        source = captured_deployment("llama", observed_deployment())
        world = refreshes(0, source)
        trained(world)
        assert world.status is not None
        assert (len(world.trainings), world.status.used_gpu_seconds) == (1, 0)

    def test_training_that_can_never_fit_is_refused(self) -> None:
        world = refreshes(2)
        world.capture()
        world.reconcile()
        assert (world.reason, world.trainings) == ("BudgetTooSmall", {})
        training = world.schedule.training
        assert training is not None
        world.change(training=training.model_copy(update={"gpu_hours_per_month": 3}))
        world.reconcile()
        assert world.reason == "TrainingRunning"

    def test_ended_training_counts_what_it_used(self) -> None:
        world = refreshes()
        trained(world, timedelta(minutes=30))
        assert world.status is not None
        assert world.status.running is None
        assert world.status.used_gpu_seconds == pytest.approx(GPUS * 1800, abs=GPUS * 300)

    def test_training_counts_at_most_what_it_reserved(self) -> None:
        world = refreshes()
        trained(world, 10 * HOUR)
        assert world.status is not None
        assert world.status.used_gpu_seconds == pytest.approx(ONE * 3600)

    def test_measurement_counts_without_its_wait_for_gpus(self) -> None:
        world = refreshes(template={"judgement": {"enabled": True}})
        world.capture()
        world.reconcile()
        name = world.running
        assert name is not None
        world.start(name)
        world.advance(HOUR)
        world.end(name)
        body = world.trainings[name]
        world.advance(10 * HOUR)
        body["status"]["finishedAt"] = text(world.now)
        owner = {"uid": body["metadata"]["uid"]}
        times = {"startedAt": text(world.now - HOUR / 2), "finishedAt": text(world.now)}
        world.captures[f"{name}-judge"] = {
            "metadata": {"name": f"{name}-judge", "ownerReferences": [owner]},
            "status": times,
        }
        world.reconcile()
        assert world.status is not None
        assert world.status.used_gpu_seconds == pytest.approx(GPUS * 5400, abs=GPUS * 600)

    def test_training_that_does_not_fit_waits_for_the_next_month(self) -> None:
        world = refreshes(3)
        trained(world, timedelta(minutes=50))
        world.advance(WEEK)
        capture = world.capture()
        decision = world.reconcile()
        assert (world.reason, len(world.trainings)) == ("BudgetSpent", 1)
        assert decision.in_use == {capture}
        assert [event.warns for event in world.events] == [True]
        world.reconcile()
        assert len(world.events) == 1, "told once"
        world.advance(4 * WEEK)
        world.reconcile()
        assert len(world.trainings) == 2
        assert world.status is not None
        assert (world.status.month, world.status.used_gpu_seconds) == ("2026-12", 0)

    def test_deleted_training_counts_until_then(self) -> None:
        world = refreshes()
        world.capture()
        world.reconcile()
        name = world.running
        assert name is not None
        world.reconcile()
        world.start(name)
        world.advance(HOUR / 4)
        world.delete(name)
        world.reconcile()
        assert (world.reason, world.trainings) == ("WaitingForCapture", {})
        assert world.status is not None
        assert world.status.used_gpu_seconds == pytest.approx(GPUS * 900, abs=GPUS * 300)

    def test_lost_status_is_rebuilt_from_the_trainings(self) -> None:
        world = refreshes()
        trained(world)
        known = world.status
        world.status = None
        world.reconcile()
        assert known is not None
        assert world.status is not None
        assert world.status.used_gpu_seconds == known.used_gpu_seconds
        assert len(world.trainings) == 1

    def test_lost_status_finds_the_running_training_again(self) -> None:
        world = refreshes()
        world.capture()
        world.reconcile()
        world.reconcile()
        known = world.status
        world.status = None
        world.reconcile()
        assert known is not None
        assert world.status is not None
        assert (world.status.running, len(world.trainings)) == (known.running, 1)


class TestRetention:
    def ended(self, count: int = 4, phase: str = "Complete", *, limit: int = 2, **seen: Any) -> list[bool]:
        """Return whether each of some trainings, the oldest first, is kept."""
        world = refreshes(100, successfulHistoryLimit=limit, failedHistoryLimit=1)
        world.see(**seen)
        names = []
        for _ in range(count):
            names.append(trained(world, phase=phase))
            world.advance(WEEK / 2)
        world.reconcile()
        return [name in world.trainings for name in names]

    def test_the_newest_trainings_are_kept(self) -> None:
        assert self.ended() == [False, False, True, True]
        assert self.ended(phase="Failed") == [False, False, False, True]
        assert self.ended(2, limit=3) == [True, True], "fewer than the limit"

    def test_trainings_whose_head_is_served_or_offered_are_kept(self) -> None:
        world = refreshes(100, successfulHistoryLimit=1)
        names = [trained(world)]
        world.see(served=frozenset(names))
        for _ in range(3):
            world.advance(HOUR)
            names.append(trained(world))
        draft = {**SERVED_HEAD["draft"], "model": f"default/{names[2]}/head"}
        world.see(speculation=Speculation.parse({**SERVED_HEAD, "draft": draft}))
        world.reconcile()
        assert names[0] in world.trainings
        world.see(served=frozenset())
        world.reconcile()
        assert names[0] not in world.trainings

    def test_capture_of_a_running_training_is_in_use(self) -> None:
        world = refreshes()
        capture = world.capture()
        world.reconcile()
        assert world.reconcile().in_use == {capture}


class TestStartingHead:
    @pytest.mark.parametrize(
        ("changes", "template", "model"),
        [
            ({}, {}, "default/earlier/head"),
            ({"fromServedHead": False}, {"from": {"model": "org/head"}}, "org/head"),
            ({}, {"method": "dflash", "from": {"model": "org/head"}}, "org/head"),
            ({"fromServedHead": False}, {}, None),
        ],
    )
    def test_training_continues_from_the_served_head(self, changes: Body, template: Body, model: str | None) -> None:
        schedule = schedule_of(100, template=template)
        world = Refreshes({**schedule, "training": {**schedule["training"], **changes}}, H100)
        world.see(speculation=Speculation.parse(SERVED_HEAD))
        world.reconcile()
        world.advance(HOUR)
        world.capture()
        world.reconcile()
        (body,) = world.trainings.values()
        assert body["spec"].get("from", {}).get("model") == model


STEPS = st.sampled_from(
    [
        *("capture", "reconcile", "start", "an hour") * 4,
        *("end", "fail", "delete", "longer", "shorter", "killed before the status", "killed after the status"),
        *("a day", "two weeks"),
    ]
)
TIMES = {"an hour": HOUR, "a day": timedelta(days=1), "two weeks": 2 * WEEK}


def take(world: Refreshes, step: str) -> None:
    active = next((name for name, (_, ended) in world.runs.items() if ended is None), None)
    pending = [name for name in world.trainings if name not in world.runs]
    known = world.status.running if world.status else None
    match step:
        case "capture":
            world.advance(timedelta(minutes=1))
            world.capture()
        case "reconcile":
            world.reconcile()
        case "start" if pending and active is None:
            world.start(pending[0])
        case "end" | "fail" if active is not None:
            world.end(active, "Complete" if step == "end" else "Failed")
        case "delete" if known is not None and known.created_at is not None and known.name in world.trainings:
            world.delete(known.name)
        case "longer" | "shorter":
            training = world.schedule.training
            assert training is not None
            deadline_s = 7200 if step == "longer" else 3600
            template = training.template.model_copy(update={"deadline_seconds": deadline_s})
            world.change(training=training.model_copy(update={"template": template}))
        case _ if step.startswith("killed"):
            world.reconcile(killed=step.removeprefix("killed "))
        case _ if step in TIMES:
            pass_time(world, TIMES[step], active)


def pass_time(world: Refreshes, time: timedelta, active: str | None) -> None:
    """Let time pass. A training ends at its deadline."""
    until = world.now + time
    if active is not None:
        seconds = world.trainings[active]["spec"]["deadlineSeconds"] if active in world.trainings else 0
        world.now = max(world.now, min(until, world.runs[active][0] + timedelta(seconds=seconds)))
        if world.now < until:
            world.end(active, "Failed")
    world.now = until


@given(st.lists(STEPS, min_size=40, max_size=80), st.sampled_from([3, 5, 9]))
@settings(max_examples=200, deadline=None)
def test_no_month_exceeds_the_limit_and_no_capture_is_trained_on_twice(steps: list[str], limit: int) -> None:
    world = refreshes(limit, failedHistoryLimit=0)
    for step in steps:
        take(world, step)
    for month in range(11, 25):
        assert world.used_hours(month) <= limit
    assert all(count == 1 for count in world.created.values())


@pytest.mark.parametrize("killed", [(), ("before the status",), ("after the status",), ("after the status",) * 3])
def test_killed_operator_creates_the_training_once(killed: tuple[str, ...]) -> None:
    world = refreshes()
    capture = world.capture()
    for point in killed:
        world.reconcile(killed=point)
        assert not world.trainings
    for _ in range(3):
        world.reconcile()
    assert world.created == {capture: 1}


def test_operator_killed_before_it_has_seen_the_training_finds_it() -> None:
    world = refreshes()
    capture = world.capture()
    world.reconcile()
    before = world.status
    world.reconcile()
    world.status = before
    world.reconcile()
    assert world.created == {capture: 1}
    assert world.status is not None
    assert world.status.running is not None
    assert world.status.running.created_at is not None


def test_operator_killed_before_the_end_is_written_counts_the_use_once() -> None:
    world = refreshes()
    world.capture()
    world.reconcile()
    name = world.running
    assert name is not None
    world.start(name)
    world.reconcile()
    world.advance(HOUR / 2)
    world.end(name)
    world.reconcile(killed="before the status")
    world.reconcile()
    used = world.status.used_gpu_seconds if world.status else 0
    world.reconcile()
    assert world.status is not None
    assert world.status.used_gpu_seconds == used > 0


def test_ended_training_is_deleted_after_its_use_is_written() -> None:
    world = refreshes(failedHistoryLimit=0)
    world.capture()
    world.reconcile()
    name = world.running
    assert name is not None
    world.start(name)
    world.reconcile()
    world.advance(HOUR / 4)
    world.end(name, "Failed")
    world.advance(HOUR)
    world.reconcile(killed="before the status")
    world.reconcile()
    assert world.status is not None
    assert world.status.used_gpu_seconds == pytest.approx(GPUS * 900, abs=GPUS * 300)
    world.reconcile()
    assert world.trainings == {}


def test_reservation_follows_a_change_of_the_template_before_the_training_exists() -> None:
    world = refreshes()
    world.capture()
    world.reconcile(killed="after the status")
    training = world.schedule.training
    assert training is not None
    template = training.template.model_copy(update={"deadline_seconds": 7200})
    world.change(training=training.model_copy(update={"template": template}))
    world.reconcile()
    assert world.status is not None
    assert world.status.running is not None
    assert world.status.running.reserved_gpu_seconds == pytest.approx(7200 * GPUS, rel=0.1)


def test_schedule_without_training_has_none() -> None:
    plain = CaptureSchedule.parse({"name": "weekly", "schedule": "0 3 * * 1"})
    assert plain.training is None
