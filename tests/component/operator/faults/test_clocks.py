"""Schedules and retention of an operator whose node has a wrong clock, against a real API server."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
import yaml

from tests.component.operator.faults.conftest import Faulty
from tests.component.operator.faults.test_disturbed_lives import DAY_S, HURRY, under
from tests.component.operator.test_schedules import NOT_TODAY, deploy, leave_claim, often
from tests.support.kubectl import Kubectl
from tests.support.objects import tiny_cpu
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import eventually

DAYS = 30


@pytest.fixture
def hurried(faulty: Faulty, operator_process: OperatorProcess, kubectl: Kubectl) -> Iterator[Faulty]:
    """An operator that looks often and has not started. The test's objects are removed after it."""
    assert operator_process.stop() == 0
    faulty.proxy.faults = ()
    with under(faulty, hurry=HURRY):
        try:
            yield faulty
        finally:
            # Captures of later tests would wait for these engines.
            kubectl.remove("sdc,sdd")
            faulty.operator.kill()
            faulty.operator.set_clock(0)


def text(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


@pytest.mark.parametrize("ahead_s", [60 * DAY_S, -60 * DAY_S])
def test_wrong_node_clock_deletes_no_claim_and_does_not_shift_schedules(
    kubectl: Kubectl, hurried: Faulty, ahead_s: int
) -> None:
    # Half a day away, so that none is due while the test runs.
    hour = (datetime.now(UTC) + timedelta(hours=12)).hour
    hurried.operator.start()
    deploy(kubectl, schedule=f"0 {hour} * * *", retention={"days": DAYS})
    for number in range(5):
        leave_claim(kubectl, f"good-{number}", published="true")
    eventually(lambda: kubectl.object("sdd", "tiny")["status"]["captures"], "the schedule is known")
    hurried.operator.set_clock(ahead_s)
    for name in ("one", "two", "three"):  # each is a look at the deployment, after the clock was set
        kubectl.must("annotate", "sdd", "tiny", f"example.com/{name}=look")
        leave_claim(kubectl, f"{name}-more", published="true")
    changed = f"0 {hour} * * 1-6"
    deploy(kubectl, schedule=changed, retention={"days": DAYS})

    def planned() -> str:
        (status,) = kubectl.object("sdd", "tiny")["status"]["captures"]
        return str(status["nextScheduleTime"]) if status["schedule"] == f"{changed} UTC" else ""

    at = eventually(planned, "the changed schedule is planned")
    kept = kubectl.objects("pvc", "--selector=specdecode.io/capture")
    assert len(kept) == 8
    assert not any("deletionTimestamp" in each["metadata"] for each in kept)
    assert not any("specdecode.io/over-age-since" in (each["metadata"].get("annotations") or {}) for each in kept)
    now = datetime.now(UTC)
    assert text(now) < at < text(now + timedelta(days=3))


def test_schedule_times_in_the_future_are_reported_and_corrected(kubectl: Kubectl, hurried: Faulty) -> None:
    deployment = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "metadata": {"name": "tiny"}}
    spec = tiny_cpu(captures=[often(schedule=NOT_TODAY), {**often(), "name": "each-minute"}])
    kubectl.must("create", "--filename=-", stdin=yaml.safe_dump({**deployment, "spec": spec}))
    ahead = text(datetime.now(UTC) + timedelta(days=60))
    told = {"since": ahead, "lastScheduleTime": ahead, "nextScheduleTime": ahead}
    schedules = {"often": f"{NOT_TODAY} UTC", "each-minute": "* * * * * UTC"}
    captures = [{"name": name, "schedule": line, **told} for name, line in schedules.items()]
    patch = yaml.safe_dump({"status": {"captures": captures}})
    kubectl.must("patch", "sdd", "tiny", "--subresource=status", "--type=merge", f"--patch={patch}")
    hurried.operator.start()

    def made() -> list[dict[str, object]]:
        return kubectl.objects("sdc", "--selector=specdecode.io/schedule=each-minute")

    def told_of() -> list[str]:
        found = kubectl.objects("events", "--field-selector=reason=TimeInFuture")
        return [each["message"] for each in found]

    def corrected() -> bool:
        found = {each["name"]: each for each in kubectl.object("sdd", "tiny")["status"]["captures"]}
        return (
            len(found) == 2
            and all(each["since"] < ahead for each in found.values())
            and found["each-minute"]["nextScheduleTime"] < ahead
        )

    eventually(made, "a capture starts within the minute")
    # Events and the status are written beside the capture, in no order.
    eventually(lambda: len(told_of()) == 4, "each time in the future is told of once")
    eventually(corrected, "no time of the status lies in the future")
