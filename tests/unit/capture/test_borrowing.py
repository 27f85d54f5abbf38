"""Captures that borrow the GPUs of engines."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from specdecode_operator.api.capture_status import BorrowStatus
from specdecode_operator.capture.borrowing import serves
from specdecode_operator.capture.gpu_sharing import MOST_ATTEMPTS, preempting_capture
from specdecode_operator.capture.observation import CaptureObservation, MountedObjects
from specdecode_operator.capture.status import Decision
from specdecode_operator.cluster.storage_classes import StorageClasses
from tests.support.capture_decisions import NOW, decided
from tests.support.captures import (
    capture,
    capture_pod,
    capture_spec,
    claim,
    job,
    observed_deployment,
    running,
    surroundings,
)
from tests.support.captures import ended as container_ended
from tests.support.objects import Body, waiting
from tests.support.scheduler_words import NO_ROOM

ENDING_S = 40
STARTING_S = 200
LOOK_S = 15
"""How often the operator looks at a capture that has not ended."""

TIMEOUT_S = 120
LONGEST_S = ENDING_S + TIMEOUT_S + LOOK_S
"""How long the engines may be away for a capture that does not start, until they are started again. It may take two
looks to see that they are gone."""

PodStatus = Mapping[str, Any] | None
Pod = Callable[[int], PodStatus]
"""The status of a capture's pod by its age in seconds; None while there is no pod."""

FAST = StorageClasses({"fast": "WaitForFirstConsumer", "at-once": "Immediate"}, ("fast",))


def scheduled(**status: Any) -> Body:
    """The status of a pod that has a node."""
    return {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "True"}], **status}


def unscheduled(message: str) -> Body:
    """The status of a pod that no node takes, in the scheduler's words."""
    return {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "message": message}]}


def engine(state: Body, restarts: int = 0, **more: Any) -> Body:
    """The status of a pod whose engine is in a state."""
    status = {"name": "engine", "ready": False, "restartCount": restarts, "image": "i:1", "state": state, **more}
    return scheduled(initContainerStatuses=[status])


class Borrowed:
    """A deployment that serves and a capture that is to borrow its GPUs."""

    def __init__(self, pod: Pod, *, spec: Body | None = None, **observed: Any) -> None:
        self.now = NOW
        self.body = capture(capture_spec(**{"deploymentDuringCapture": "Suspend", **(spec or {})}))
        self.job: Body | None = None
        self.claims: dict[str, Body] = {}
        self.classes: StorageClasses | None = FAST
        self.refusal: Callable[[Decision], bool] = lambda _: False
        """Whether the API server refuses what a decision would write."""
        self.observed = observed
        self.reasons: list[str] = []
        """Reasons of the condition Ready, as they follow each other."""
        self.away_s = 0
        """Seconds in which no engine served."""
        self.longest_away_s = 0
        """The longest of them in one piece, until engines were asked for again."""
        self.pod = pod
        self._deployment = observed_deployment()
        self._engines_since: datetime | None = NOW - timedelta(days=1)
        self._gone_at: datetime | None = None
        self._pod_since: datetime | None = None
        self._number = 0
        self._next_look = NOW
        self._lent_s = 0

    @property
    def lends(self) -> bool:
        return preempting_capture([self.body]) is not None

    @property
    def serves(self) -> bool:
        since = self._engines_since
        return since is not None and self.now >= since + timedelta(seconds=STARTING_S)

    @property
    def record(self) -> BorrowStatus:
        return BorrowStatus.parse(self.body["status"].get("borrow") or {})

    def pass_s(self, seconds: int) -> None:
        """Let time pass without a look of the operator, second by second."""
        for _ in range(seconds):
            self.now += timedelta(seconds=1)
            self._play()

    def run(self, seconds: int) -> None:
        """Let time pass, with a look each `LOOK_S` seconds, and after each look that changed something."""
        for _ in range(seconds):
            if self.now >= self._next_look:
                while self.look():
                    pass
                self._next_look = self.now + timedelta(seconds=LOOK_S)
            self.pass_s(1)

    def until(self, holds: Callable[[], bool], within_s: int) -> None:
        """Let time pass until something holds."""
        for _ in range(within_s):
            if holds():
                return
            self.run(1)
        raise AssertionError(f"not within {within_s} s: {self.body['status']}")

    def seen(self) -> CaptureObservation:
        """What the operator sees now."""
        deployment = replace(
            self._deployment,
            engines_wanted=0 if self.lends else 1,
            pods=[] if self._engines_since is None and self._gone_at is None else [{"metadata": {}}],
            serves=self.serves,
        )
        mounted = {name: self.claims.get(name) for name in self._mounted_names()}
        return surroundings(
            deployment=deployment,
            job=self.job,
            pods=self._pods(),
            claim=self.claims.get("demo-capture"),
            mounted=MountedObjects(mounted if self.job else {k: v for k, v in mounted.items() if v}, {}, self.classes),
            **self.observed,
        )

    def look(self, *, writes: bool = True, status: bool = True) -> bool:
        """Have the operator look once; return whether anything changed.

        Without ``writes`` it is killed before them, without ``status`` after them.
        """
        before = (self.body["status"], self.job)
        decision, said = decided(self.body, self.seen(), self.now)
        if writes and self.refusal(decision):
            self.reasons.append("refused")
            return False
        if writes:
            self._carry_out(decision)
        if writes and status:
            self.body = {**self.body, "status": said.model_dump(by_alias=True, mode="json", exclude_none=True)}
            ready = next(each.reason for each in said.conditions if each.type == "Ready")
            self.reasons += [ready] if self.reasons[-1:] != [ready] else []
        return (self.body["status"], self.job) != before

    def condition(self, type_: str) -> tuple[str, str, str]:
        """Status, reason and message of a condition."""
        found = next(each for each in self.body["status"]["conditions"] if each["type"] == type_)
        return found["status"], found["reason"], found["message"]

    def _mounted_names(self) -> list[str]:
        return ["demo-capture", *(name for name in self.claims if name != "demo-capture")]

    def _pods(self) -> list[Body]:
        if self._pod_since is None:
            return []
        status = self.pod(int((self.now - self._pod_since).total_seconds()))
        if status is None:
            return []
        deleted = status.get("deletionTimestamp")
        pod = capture_pod(
            name=f"demo-capture-{self._number}", **{k: v for k, v in status.items() if k != "deletionTimestamp"}
        )
        pod["metadata"] |= {"deletionTimestamp": deleted} if deleted else {}
        return [pod]

    def _carry_out(self, decision: Decision) -> None:
        writes = decision.writes
        if writes.claim is not None:
            pending = claim(status={"phase": "Pending"})
            pending["spec"] = {
                **pending["spec"],
                "storageClassName": writes.claim["spec"].get("storageClassName", "fast"),
            }
            pending["metadata"]["labels"] = writes.claim["metadata"]["labels"]
            self.claims["demo-capture"] = pending
        if writes.job is not None:
            self.job = job(suspend=writes.job["spec"]["suspend"])
            self.job["spec"]["template"] = writes.job["spec"]["template"]
        if self.job is not None and writes.job_suspended is not None:
            self.job = {**self.job, "spec": {**self.job["spec"], "suspend": writes.job_suspended}}
        if writes.remove_job:
            self.job = None

    def _play(self) -> None:
        """What Deployment and Job controller and kubelets do in a second."""
        if self.lends and self._engines_since is not None:
            self._engines_since, self._gone_at = None, self.now + timedelta(seconds=ENDING_S)
        if self._gone_at is not None and self.now >= self._gone_at:
            self._gone_at = None
        runs = self.job is not None and not self.job["spec"]["suspend"]
        if runs and self._pod_since is None:
            self._pod_since, self._number = self.now, self._number + 1
        if not runs:
            self._pod_since = None
        if not self.lends and self._engines_since is None and self._gone_at is None:
            self._engines_since = self.now
        self.away_s += not self.serves
        self._lent_s = self._lent_s + 1 if self._engines_since is None else 0
        self.longest_away_s = max(self.longest_away_s, self._lent_s)


# Captures that borrow the GPUs of engines.

NO_CLAIM = 'persistentvolumeclaim "demo-capture" not found'
CRASHED: Body = {"terminated": {"exitCode": 1, "message": "RuntimeError: the recorder does not load"}}
LOST: Body = {
    "deletionTimestamp": "2026-01-01T00:05:00Z",
    "conditions": [
        {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager", "message": "node is gone"}
    ],
    "phase": "Running",
    "containerStatuses": [running("load")],
}


def loads(age_s: int) -> Body:
    """A pod as it should be."""
    return engine({"running": {}}) if age_s < 60 else scheduled(containerStatuses=[running("load")])


def crashes(age_s: int) -> Body:
    """An engine that ends after ten seconds, and again after each restart."""
    return (
        engine({"running": {}})
        if age_s < 10
        else engine({"waiting": {"reason": "CrashLoopBackOff"}}, 1, lastState=CRASHED)
    )


def restarts(age_s: int) -> Body:
    """An engine that crashed at once, and runs again without ever serving."""
    return engine({"running": {}}, restarts=1, lastState=CRASHED) if age_s > 15 else engine(CRASHED)


CAUSES: dict[str, tuple[Pod, str]] = {
    "missing claim": (lambda _: unscheduled(NO_CLAIM), "WaitingForVolume"),
    "missing class": (lambda _: unscheduled("pod has unbound immediate PersistentVolumeClaims"), "WaitingForVolume"),
    "unschedulable": (lambda _: unscheduled(NO_ROOM[0]), "WaitingForGPUs"),
    "no pod": (lambda _: None, "WaitingForPod"),
    "a volume that is not mounted": (
        lambda _: scheduled(initContainerStatuses=[waiting("PodInitializing", "") | {"name": "prepare"}]),
        "Starting",
    ),
    "image pull failure": (
        lambda _: scheduled(initContainerStatuses=[waiting("ImagePullBackOff", "not found") | {"name": "engine"}]),
        "ImagePullFailed",
    ),
    "missing Secret": (
        lambda _: engine({"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "hub" not found'}}),
        "WaitingForSecret",
    ),
    "crash in the first seconds": (crashes, "EngineFailed"),
    "crash and a restart": (restarts, "EngineFailed"),
    "node lost": (lambda age_s: loads(age_s) if age_s < 5 else LOST, "NodeLost"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_capture_pod_that_does_not_start_returns_gpus_in_time(cause: str) -> None:
    pod, reason = CAUSES[cause]
    gpus = Borrowed(pod)
    gpus.run(LONGEST_S + LOOK_S)
    assert not gpus.lends
    assert gpus.longest_away_s <= LONGEST_S
    assert (gpus.record.failed_attempts, gpus.condition("Ready")[1]) == (1, "BackingOff")
    assert str(gpus.record.last_failure).startswith(f"{reason}: ")
    assert gpus.job is not None
    assert gpus.job["spec"]["suspend"] is True
    gpus.run(STARTING_S)
    assert gpus.serves
    assert gpus.record.served_at is not None
    assert abs(gpus.record.seconds_without_serving - gpus.away_s) <= LOOK_S
    assert gpus.record.seconds_without_serving <= LONGEST_S + STARTING_S + LOOK_S


def test_started_capture_keeps_gpus_beyond_timeout() -> None:
    gpus = Borrowed(loads)
    gpus.run(3000)
    assert gpus.lends
    assert gpus.record.idle_since is None
    assert gpus.condition("Ready")[1] == "Loading"
    assert "BackingOff" not in gpus.reasons


def test_model_download_does_not_count_toward_borrow_timeout() -> None:
    """Where its deployment has no cache, each pod downloads the model before the engine starts."""
    downloading = scheduled(initContainerStatuses=[running("download-target")])
    gpus = Borrowed(lambda age_s: downloading if age_s < 1000 else crashes(age_s - 1000))
    gpus.run(30)
    assert gpus.job is not None
    containers = gpus.job["spec"]["template"]["spec"]["initContainers"]
    containers.insert(1, {"name": "download-target"})
    gpus.run(900)
    assert gpus.lends
    gpus.run(ENDING_S + 100 + TIMEOUT_S + 2 * LOOK_S)
    assert gpus.record.failed_attempts == 1, "what comes after it is bounded again"


def test_running_sidecar_does_not_count_as_start() -> None:
    meshed = scheduled(
        initContainerStatuses=[running("istio-proxy"), waiting("ImagePullBackOff", "") | {"name": "engine"}]
    )
    gpus = Borrowed(lambda _: meshed)
    gpus.run(LONGEST_S + LOOK_S)
    assert gpus.record.failed_attempts == 1


def test_borrow_timeout_comes_from_spec() -> None:
    gpus = Borrowed(lambda _: None, spec={"borrowTimeoutSeconds": 30})
    gpus.run(ENDING_S + 30 + 2 * LOOK_S)
    assert gpus.record.failed_attempts == 1
    assert gpus.longest_away_s <= ENDING_S + 30 + LOOK_S


class TestRetries:
    def test_retries_back_off_and_wait_until_deployment_serves(self) -> None:
        gpus = Borrowed(lambda _: None)
        begun = []
        for _ in range(4 * 3600):
            was_lent, served = gpus.lends, gpus.serves
            gpus.run(1)
            if gpus.lends and not was_lent:
                assert served
                begun.append(gpus.now)
        apart_s = [(later - earlier).total_seconds() for earlier, later in pairwise(begun)]
        assert len(begun) == MOST_ATTEMPTS
        assert all(apart >= TIMEOUT_S * 2.0**number for number, apart in enumerate(apart_s, 1)), (
            "each pause is twice as long as the one before"
        )
        assert apart_s == sorted(apart_s)

    def test_capture_fails_with_cause_after_last_attempt(self) -> None:
        gpus = Borrowed(lambda _: unscheduled(NO_ROOM[0]))
        gpus.run(4 * 3600)
        assert gpus.condition("Succeeded")[:2] == ("False", "NotStarted")
        status, reason, message = gpus.condition("Ready")
        assert (status, reason) == ("False", "NotStarted")
        assert NO_ROOM[0] in message
        assert gpus.serves
        assert gpus.job is None
        assert gpus.record.served_at is not None
        assert abs(gpus.record.seconds_without_serving - gpus.away_s) <= MOST_ATTEMPTS * LOOK_S

    def test_capture_loads_once_cause_is_gone(self) -> None:
        gpus = Borrowed(lambda _: None)
        gpus.run(LONGEST_S + LOOK_S)
        gpus.pod = loads
        gpus.run(STARTING_S + 2 * TIMEOUT_S + ENDING_S + 90)
        assert gpus.lends
        assert gpus.condition("Ready")[1] == "Loading"

    def test_gpus_are_not_borrowed_while_deployment_does_not_serve(self) -> None:
        gpus = Borrowed(lambda _: None)
        gpus.run(LONGEST_S + LOOK_S)
        gpus._engines_since = None
        for _ in range(100):
            gpus.now += timedelta(seconds=60)
            gpus.look()
            assert not gpus.lends

    def test_suspending_capture_resets_attempts(self) -> None:
        gpus = Borrowed(lambda _: None)
        gpus.run(LONGEST_S + LOOK_S)
        gpus.body["spec"] = {**gpus.body["spec"], "suspend": True}
        gpus.look()
        assert (gpus.record.failed_attempts, gpus.record.next_attempt_at) == (0, None)

    def test_timestamps_in_the_future_delay_nothing(self) -> None:
        gpus = Borrowed(lambda _: None)
        gpus.run(LONGEST_S + LOOK_S + STARTING_S)
        gpus.body["status"]["borrow"]["nextAttemptAt"] = "2031-01-01T00:00:00Z"
        gpus.run(LOOK_S)
        assert gpus.lends
        gpus.body["status"]["borrow"] |= {"since": "2031-01-01T00:00:00Z"}
        gpus.run(LONGEST_S + 2 * LOOK_S)
        assert not gpus.lends
        assert gpus.longest_away_s <= LONGEST_S


def test_gpus_are_returned_if_engines_do_not_terminate() -> None:
    gpus = Borrowed(loads)
    gpus.run(15)
    gpus._gone_at = gpus.now + timedelta(days=1)
    gpus.run(600)
    assert not gpus.lends
    assert str(gpus.record.last_failure).startswith("WaitingForDeployment: ")


def test_engines_may_take_five_minutes_to_terminate() -> None:
    """A node that does not answer keeps its pods for as long."""
    gpus = Borrowed(loads)
    gpus.run(15)
    gpus._gone_at = gpus.now + timedelta(seconds=300)
    gpus.run(300 + 2 * LOOK_S + 90)
    assert gpus.condition("Ready")[1] == "Loading"
    assert gpus.record.failed_attempts == 0


class TestBeforeBorrowing:
    """What is missing is waited for with the deployment untouched."""

    def waits(self, gpus: Borrowed, reason: str, *words: str) -> None:
        gpus.run(3600)
        assert gpus.away_s == 0
        assert gpus.condition("Accepted")[:2] == ("Unknown", reason)
        message = gpus.condition("Ready")[2]
        assert all(word in message for word in words), message

    def goes_on(self, gpus: Borrowed) -> None:
        gpus.run(ENDING_S + 2 * LOOK_S + 90)
        assert gpus.condition("Ready")[1] == "Loading"

    def test_missing_storage_class_is_awaited(self) -> None:
        gpus = Borrowed(loads, spec={"storage": {"storageClassName": "fats"}})
        self.waits(gpus, "StorageClassNotFound", "spec.storage.storageClassName", "fats", "at-once, fast")
        assert not gpus.claims, "nothing is made that nobody could use"
        gpus.classes = StorageClasses({"fats": "WaitForFirstConsumer"})
        self.goes_on(gpus)

    def test_missing_default_storage_class_is_awaited(self) -> None:
        gpus = Borrowed(loads)
        gpus.classes = StorageClasses({"fast": "WaitForFirstConsumer"})
        self.waits(gpus, "StorageClassNotFound", "no default StorageClass")
        gpus.classes = StorageClasses({"fast": "WaitForFirstConsumer"}, ("fast",))
        self.goes_on(gpus)

    def test_claim_with_immediate_binding_is_awaited_until_bound(self) -> None:
        gpus = Borrowed(loads, spec={"storage": {"storageClassName": "at-once"}})
        self.waits(gpus, "ClaimNotBound", "at-once")
        gpus.claims["demo-capture"]["status"] = {"phase": "Bound"}
        self.goes_on(gpus)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"status": {"phase": "Lost"}}, "ClaimLost"),
            ({"spec": {"storageClassName": "at-once"}, "status": {"phase": "Pending"}}, "ClaimNotBound"),
            ({"spec": {"storageClassName": ""}, "status": {"phase": "Pending"}}, "ClaimNotBound"),
            ({"spec": {"storageClassName": "fats"}, "status": {"phase": "Pending"}}, "StorageClassNotFound"),
        ],
    )
    def test_unusable_models_claim_is_awaited(self, change: Body, reason: str) -> None:
        gpus = Borrowed(loads)
        gpus.claims["models"] = claim("models", **change)
        self.waits(gpus, reason, "claim models", "a volume of its deployment")
        gpus.claims["models"] = claim("models")
        self.goes_on(gpus)

    @pytest.mark.parametrize("gone", [None, {"deletionTimestamp": "2026-01-01T00:00:00Z"}])
    def test_deleted_capture_claim_is_awaited(self, gone: Body | None) -> None:
        gpus = Borrowed(loads)
        gpus.look()
        kept = gpus.claims["demo-capture"]
        if gone is None:
            del gpus.claims["demo-capture"]
        else:
            gpus.claims["demo-capture"] = {**kept, "metadata": {**kept["metadata"], **gone}}
        self.waits(gpus, "ClaimIsLeaving" if gone else "ClaimNotFound", "demo-capture")
        gpus.claims["demo-capture"] = kept
        self.goes_on(gpus)

    def test_storage_class_is_not_checked_if_classes_are_unknown(self) -> None:
        gpus = Borrowed(loads, spec={"storage": {"storageClassName": "fats"}})
        gpus.classes = None
        self.goes_on(gpus)

    def test_trial_pod_is_written_before_gpus_are_borrowed(self) -> None:
        gpus = Borrowed(loads)
        shown: list[Body] = []

        def refuses(decision: Decision) -> bool:
            if decision.writes.trial_pod is not None:
                shown.append(decision.writes.trial_pod)
            return decision.borrows_now

        gpus.refusal = refuses
        gpus.run(60)
        assert gpus.away_s == 0
        assert len(shown) > 2
        assert shown[0]["spec"]["containers"][0]["name"] == "load"
        assert shown[0]["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "specdecode-operator"


def test_claim_deleted_while_engines_terminate_returns_gpus() -> None:
    gpus = Borrowed(loads)
    gpus.run(20)
    assert gpus.lends
    del gpus.claims["demo-capture"]
    gpus.run(LOOK_S)
    assert not gpus.lends
    assert gpus.longest_away_s <= ENDING_S
    assert str(gpus.record.last_failure).startswith("ClaimNotFound: ")


class TestOperatorKilled:
    """At any step, for a while, it costs no more than that while."""

    DOWN_S = 50

    @pytest.mark.parametrize("look", range(8))
    @pytest.mark.parametrize("moment", [{"writes": False}, {"status": False}])
    @pytest.mark.parametrize("pod", [lambda _: None, crashes])
    def test_operator_killed_at_any_reconcile_still_returns_gpus(
        self, look: int, moment: dict[str, bool], pod: Pod
    ) -> None:
        gpus = Borrowed(pod)
        for _ in range(look):
            gpus.look()
            gpus.pass_s(LOOK_S)
        gpus.look(**moment)
        gpus.pass_s(self.DOWN_S)
        gpus.until(lambda: gpus.record.returned_at is not None, LONGEST_S + LOOK_S)
        gpus.until(lambda: gpus.record.served_at is not None, STARTING_S + 2 * LOOK_S)
        assert gpus.longest_away_s <= LONGEST_S + self.DOWN_S
        assert gpus.record.failed_attempts == 1

    def test_operator_killed_while_returning_gpus_returns_them_later(self) -> None:
        gpus = Borrowed(lambda _: None)
        gpus.until(lambda: gpus.record.idle_since is not None, LONGEST_S)
        gpus.pass_s(TIMEOUT_S)
        gpus.look(status=False)
        assert gpus.lends, "the engines come back when the status is written"
        gpus.look()
        assert not gpus.lends
        assert gpus.record.failed_attempts == 1


def test_seconds_without_serving_are_reported_after_success() -> None:
    gpus = Borrowed(loads)
    gpus.run(600)
    assert gpus.job is not None
    gpus.job["status"] = {
        "conditions": [{"type": "Complete", "status": "True", "lastTransitionTime": "2026-01-01T00:10:00Z"}]
    }
    gpus.pod = lambda _: {"phase": "Succeeded", "containerStatuses": [container_ended("load", 0, {"requests": {}})]}
    gpus.run(LOOK_S)
    assert not gpus.lends
    assert gpus.record.served_at is None
    gpus.run(STARTING_S + 2 * LOOK_S)
    assert gpus.condition("Succeeded")[0] == "True"
    assert abs(gpus.record.seconds_without_serving - gpus.away_s) <= LOOK_S


def test_seconds_without_serving_add_up_over_repeated_borrowing() -> None:
    gpus = Borrowed(loads)
    gpus.run(600)
    for suspend in (True, False, True):
        gpus.body["spec"] = {**gpus.body["spec"], "suspend": suspend}
        gpus.look()
        gpus.run(STARTING_S // 2)
        assert gpus.lends is not suspend
        assert not gpus.serves
    gpus.run(STARTING_S + 2 * LOOK_S)
    assert gpus.serves
    assert abs(gpus.record.seconds_without_serving - gpus.away_s) <= 3 * LOOK_S


@pytest.mark.parametrize("deployment", [{"wants_engines": False}, {"lent_to": "other"}])
def test_deployment_without_wanted_engines_or_lent_elsewhere_counts_as_serving(deployment: dict[str, Any]) -> None:
    assert not serves(observed_deployment())
    assert serves(replace(observed_deployment(), **deployment))
