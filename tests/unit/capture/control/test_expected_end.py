"""When a capture should give back the GPUs that it borrows, from its workload, Job and pod."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from specdecode_operator.capture.borrowing import lending_to
from specdecode_operator.capture.job_manifest import wrap_up_s
from specdecode_operator.deployment.desired_state import Launch
from specdecode_operator.deployment.engine_pod import engine_timeouts
from specdecode_operator.deployment.rollout.readiness import Lending
from tests.support.capture_decisions import decided
from tests.support.captures import capture, capture_pod, capture_spec, observed_deployment, surroundings
from tests.support.objects import Body

ONE_MINUTE: Body = {
    "phases": [{"name": "steady", "pattern": "Constant", "requestsPerSecond": "1", "durationSeconds": 60}]
}
DEADLINE_S, STARTUP_S = 3600, 300
POD_DEADLINE_S = STARTUP_S + DEADLINE_S + wrap_up_s(DEADLINE_S)
JOB_DEADLINE_S = POD_DEADLINE_S + 1800
JOB_START = datetime(2026, 1, 1, tzinfo=UTC)
POD_START = JOB_START + timedelta(seconds=20)
LOAD_START = JOB_START + timedelta(seconds=100)


def lent(body: Body, live: Body | None, pods: list[Body], since: datetime | None = None) -> Lending:
    return lending_to(body, live, pods, since)


def job(runs: int = 1, *, started: bool = True, **spec: Any) -> Body:
    pod_deadline_s = runs * POD_DEADLINE_S
    return {
        "metadata": {"namespace": "default", "name": "demo-capture", "uid": "job-uid"},
        "spec": {
            "suspend": not started,
            "activeDeadlineSeconds": pod_deadline_s + 1800,
            "backoffLimit": 0,
            "template": {"spec": {"activeDeadlineSeconds": pod_deadline_s}},
            **spec,
        },
        "status": {"startTime": JOB_START.isoformat()} if started else {},
    }


def borrower(workload: Body = ONE_MINUTE, **spec: Any) -> Body:
    return capture(capture_spec(workload=workload, deploymentDuringCapture="Suspend", **spec))


def pod(load: datetime | None = None, **status: Any) -> Body:
    state = {"waiting": {}} if load is None else {"running": {"startedAt": load.isoformat()}}
    return capture_pod(startTime=POD_START.isoformat(), containerStatuses=[{"name": "load", "state": state}], **status)


def test_it_is_not_known_before_its_job_starts() -> None:
    for lending in (lent(borrower(), None, []), lent(borrower(), job(started=False), [])):
        assert (lending.capture, lending.expected_end, lending.latest_end) == ("demo", None, None)
        assert not lending.is_overdue(JOB_START + timedelta(days=365))


def test_a_job_that_does_not_start_is_overdue_after_a_quarter_of_an_hour() -> None:
    for live in (None, job(started=False)):
        lending = lending_to(borrower(), live, [], JOB_START)
        assert lending.overdue_from == JOB_START + timedelta(minutes=15)
    assert lending_to(borrower(), job(), [], JOB_START - timedelta(days=1)) == lent(borrower(), job(), [])


@pytest.mark.parametrize(
    ("pods", "expected", "latest"),
    [
        ([], JOB_START + timedelta(seconds=STARTUP_S + 60), JOB_START + timedelta(seconds=JOB_DEADLINE_S)),
        ([pod()], POD_START + timedelta(seconds=STARTUP_S + 60), POD_START + timedelta(seconds=POD_DEADLINE_S)),
        ([pod(LOAD_START)], LOAD_START + timedelta(seconds=60), POD_START + timedelta(seconds=POD_DEADLINE_S)),
    ],
    ids=["no pod yet", "the engine starts", "the load runs"],
)
def test_it_is_expected_after_the_start_of_the_engine_and_the_load(
    pods: list[Body], expected: datetime, latest: datetime
) -> None:
    lending = lent(borrower(), job(), pods)
    assert (lending.expected_end, lending.latest_end) == (expected, latest)
    assert lending.overdue_from == expected + timedelta(seconds=wrap_up_s(60))
    assert not lending.is_overdue(expected)
    assert lending.is_overdue(expected + timedelta(seconds=wrap_up_s(60)))


def test_engines_that_are_started_by_turns_each_have_their_time() -> None:
    lending = lent(borrower(repetitions=3), job(runs=3), [pod(LOAD_START)])
    assert lending.expected_end == POD_START + timedelta(seconds=3 * (STARTUP_S + 60))
    assert lending.latest_end == POD_START + timedelta(seconds=3 * POD_DEADLINE_S)
    arms = [{"name": "as-deployed"}, {"name": "plain", "speculation": {"method": "none"}}]
    lending = lent(borrower(arms=arms), job(runs=4), [pod(LOAD_START)])
    assert lending.expected_end == POD_START + timedelta(seconds=4 * (STARTUP_S + 60)), "each arm is started twice"


@pytest.mark.parametrize(
    "phase",
    [
        {"name": "closed", "pattern": "Closed", "concurrency": 2, "requests": 8},
        {"name": "talk", "pattern": "Multiturn", "concurrency": 2, "requests": 8, "turns": 2},
    ],
    ids=lambda phase: phase["pattern"],
)
def test_a_load_that_the_engine_ends_has_only_a_bound(phase: Body) -> None:
    lending = lent(borrower({"phases": [*ONE_MINUTE["phases"], phase]}), job(), [pod(LOAD_START)])
    bound = POD_START + timedelta(seconds=POD_DEADLINE_S)
    assert (lending.expected_end, lending.latest_end, lending.overdue_from) == (None, bound, bound)
    timed = {**{key: each for key, each in phase.items() if key != "requests"}, "durationSeconds": 30}
    lending = lent(borrower({"phases": [*ONE_MINUTE["phases"], timed]}), job(), [pod(LOAD_START)])
    assert lending.expected_end == LOAD_START + timedelta(seconds=90)


def test_further_attempts_have_the_time_of_the_job() -> None:
    lending = lent(borrower(backoffLimit=1), job(backoffLimit=1), [pod(LOAD_START)])
    assert lending.latest_end == JOB_START + timedelta(seconds=JOB_DEADLINE_S)


def test_the_job_that_is_rendered_has_these_deadlines() -> None:
    seen = surroundings(deployment=observed_deployment(engines_wanted=0))
    rendered = decided(borrower(), seen)[0].writes.job
    assert rendered is not None
    launch = observed_deployment().desired.outcome
    assert isinstance(launch, Launch)
    startup_s = engine_timeouts(launch.facts, launch.plan).progress_deadline_s
    live = {**rendered, "status": {"startTime": JOB_START.isoformat()}}
    live["metadata"]["uid"], live["spec"]["suspend"] = job()["metadata"]["uid"], False
    lending = lent(borrower(), live, [pod()])
    assert lending.expected_end == POD_START + timedelta(seconds=startup_s + 60)
    assert lending.latest_end == POD_START + timedelta(seconds=startup_s + DEADLINE_S + wrap_up_s(DEADLINE_S))


def test_the_newest_attempt_counts() -> None:
    old = pod(JOB_START, name="old", created="2026-01-01T00:00:00Z")
    new = pod(LOAD_START, name="new", created="2026-01-01T00:01:00Z")
    expected = LOAD_START + timedelta(seconds=60)
    assert lent(borrower(backoffLimit=1), job(backoffLimit=1), [new, old]).expected_end == expected


def test_an_end_after_the_deadline_is_not_expected() -> None:
    late = JOB_START + timedelta(seconds=JOB_DEADLINE_S)
    lending = lent(borrower(), job(backoffLimit=1), [pod(late)])
    assert (lending.expected_end, lending.latest_end) == (None, late)


@pytest.mark.parametrize(
    ("body", "live"),
    [
        (capture({"deployment": 5}), job()),
        (borrower({"phases": [{"name": "burst", "pattern": "Burst", "requests": 8}]}), job()),
        (borrower(), job(activeDeadlineSeconds=2**62, template={"spec": {"activeDeadlineSeconds": 2**62}})),
        (borrower(), job(activeDeadlineSeconds=None, template={})),
    ],
    ids=["invalid spec", "a phase that lacks fields", "a deadline beyond the calendar", "no deadlines"],
)
def test_what_others_wrote_makes_it_unknown_and_nothing_worse(body: Body, live: Body) -> None:
    assert lent(body, live, [pod()]).expected_end is None
    assert lent(body, live, []).expected_end is None
