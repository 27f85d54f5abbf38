"""A deployment that lends its GPUs to a capture, second by second: the operator decides, the cluster is played.

Engines take `ENDING_S` to end and `STARTING_S` to serve. A capture's pod does what a test says of it.
"""

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from specdecode_operator.api.capture_status import BorrowStatus
from specdecode_operator.capture.gpu_sharing import preempting_capture
from specdecode_operator.capture.observation import CaptureObservation, MountedObjects
from specdecode_operator.capture.status import Decision
from specdecode_operator.cluster.storage_classes import StorageClasses
from tests.support.capture_decisions import NOW, decided
from tests.support.captures import capture, capture_pod, capture_spec, claim, job, observed_deployment, surroundings
from tests.support.objects import Body

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
        deployment = observed_deployment(
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
