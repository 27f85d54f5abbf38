"""A schedule that trains drafts, its captures and trainings, and an operator that may be killed at any point."""

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from specdecode_operator.api.deployment import CaptureSchedule, Key, ScheduledTrainingStatus
from specdecode_operator.api.speculation import Speculation
from specdecode_operator.capture.observation import CapturedDeployment
from specdecode_operator.capture.preconditions import captured_deployment
from specdecode_operator.capture.schedules import ScheduleEvent, run_name
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.cluster.resources import SCHEDULE_LABEL, SCHEDULED_AT_ANNOTATION
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.observed.decay import NOTHING_DECAYED
from specdecode_operator.training.refresh import (
    ObservedRefresh,
    RefreshDecision,
    decide_refresh,
    render_training,
    reserved,
)
from tests.support.captures import observed_deployment
from tests.support.objects import Body

START: Final = datetime(2026, 11, 2, 3, tzinfo=UTC)
GPUS: Final = 2
LLAMA_SPEC: Final[Body] = {
    "target": {"model": "meta-llama/Llama-3.1-8B-Instruct"},
    "speculation": {"method": "ngram", "numSpeculativeTokens": 3},
    "parallelism": {"tensor": GPUS},
    "serving": {"maxModelLen": 8192},
}
TEMPLATE: Final[Body] = {
    "trainer": {"image": "localhost/trainer:1"},
    "judgement": {"enabled": False},
    "deadlineSeconds": 3600,
    "backoffLimit": 0,
}
LIVE: Final[Body] = {
    "source": "Live",
    "live": {"durationSeconds": 600},
    "record": {"tokenIds": True, "promptTokenIds": True},
}
SERVED_HEAD: Final[Body] = {
    "method": "eagle3",
    "numSpeculativeTokens": 3,
    "draft": {
        "model": "default/earlier/head",
        "persistentVolumeClaim": {"claimName": "heads"},
        "config": {"speculators_model_type": "eagle3"},
    },
}
"""Speculation of a deployment that serves a trained head."""

OWNER: Final[Body] = {"uid": "uid-1", "kind": "SpecDecodeDeployment", "name": "llama"}


def text(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def schedule_of(limit: int, *, when: str = "Always", template: Body | None = None, **fields: Any) -> Body:
    training = {"when": when, "gpuHoursPerMonth": limit, "template": {**TEMPLATE, **(template or {})}}
    return {"name": "weekly", "schedule": "0 3 * * 1", "template": LIVE, "training": training, **fields}


def h100_source() -> CapturedDeployment:
    """A deployment with GPUs, whose plan is in force."""
    found = captured_deployment("llama", observed_deployment(LLAMA_SPEC, (NodeFacts("n", "NVIDIA-H100-80GB-HBM3", 8),)))
    assert isinstance(found, CapturedDeployment), found
    return found


class Refreshes:
    """One schedule of the deployment `llama`; times are those of the API server."""

    def __init__(self, schedule: Body, source: CapturedDeployment | Blocked) -> None:
        self.schedule = CaptureSchedule.parse(schedule)
        self.now = START
        self.captures: dict[str, Body] = {}
        self.trainings: dict[str, Body] = {}
        self.status: ScheduledTrainingStatus | None = None
        self.events: list[ScheduleEvent] = []
        self.created: Counter[str] = Counter()
        """Number of creations by capture."""
        self.runs: dict[str, tuple[datetime, datetime | None]] = {}
        """Time during which a training really held its GPUs."""
        self.seen = ObservedRefresh(
            Key("default", "llama"),
            "uid-1",
            captures=(),
            trainings=(),
            training=self.trainings.get,
            capture=self.captures.get,
            source=source,
            decay=NOTHING_DECAYED,
            speculation=Speculation.parse(LLAMA_SPEC["speculation"]),
            engine="e1",
        )

    def change(self, **fields: Any) -> None:
        """Change the schedule."""
        self.schedule = self.schedule.model_copy(update=fields)

    def see(self, **fields: Any) -> None:
        """Change what the operator observes."""
        self.seen = replace(self.seen, **fields)

    def advance(self, time: timedelta) -> None:
        self.now += time

    def capture(
        self, acceptance: int | None = 60, *, prompt: int = 400, output: int = 100, engine: str = "e1", **spec: Any
    ) -> str:
        """Add a capture that has just succeeded; return its name."""
        name = run_name(self.seen.key, "uid-1", self.schedule.name, self.now)
        summary = {"requests": {"sent": 600, "completed": 600}, "acceptancePercent": acceptance}
        lengths = {"promptTokens": 600 * prompt, "outputTokens": 600 * output}
        self.captures[name] = {
            "metadata": {
                "namespace": "default",
                "name": name,
                "uid": name,
                "labels": {SCHEDULE_LABEL: self.schedule.name},
                "annotations": {SCHEDULED_AT_ANNOTATION: text(self.now)},
                "ownerReferences": [OWNER],
            },
            "spec": {"deployment": "llama", **LIVE, **spec},
            "status": {"phase": "Succeeded", "engine": engine, "summary": {**summary, **lengths}},
        }
        return name

    def reconcile(self, *, killed: str = "") -> RefreshDecision:
        """Reconcile once; the operator may be killed ``before the status`` or ``after the status`` is written."""
        training = self.schedule.training
        assert training is not None
        self.see(captures=[*self.captures.values()], trainings=[*self.trainings.values()])
        decision = decide_refresh(self.schedule, training, self.seen, self.status, self.now)
        for body in decision.delete:
            del self.trainings[body["metadata"]["name"]]
        if killed == "before the status" or decision.status is None:
            return decision
        self.events += decision.events
        self.status = ScheduledTrainingStatus.parse(decision.status.model_dump(mode="json", by_alias=True))
        running = reserved(self.status)
        if running is None or killed == "after the status" or running.name in self.trainings:
            return decision
        body = render_training(self.schedule, training, self.seen, running)
        metadata = {"uid": running.name, "generation": 1, "resourceVersion": "1", "creationTimestamp": text(self.now)}
        self.trainings[running.name] = {**body, "metadata": {**body["metadata"], **metadata}, "status": {}}
        self.created[running.capture] += 1
        return decision

    def start(self, name: str) -> None:
        """Let the pod of a training start."""
        self.runs[name] = (self.now, None)
        self.trainings[name]["status"] = {"phase": "Training", "startedAt": text(self.now)}

    def end(self, name: str, phase: str = "Complete") -> None:
        """Let a training end."""
        succeeded = {
            "type": "Succeeded",
            "status": "True" if phase == "Complete" else "False",
            "reason": "HeadPublished",
            "message": "",
            "lastTransitionTime": text(self.now),
            "observedGeneration": 1,
        }
        self.trainings[name]["status"] |= {"phase": phase, "finishedAt": text(self.now), "conditions": [succeeded]}
        self._stop(name)

    def delete(self, name: str) -> None:
        """Let a user delete a training."""
        del self.trainings[name]
        self._stop(name)

    def _stop(self, name: str) -> None:
        started, ended = self.runs.get(name, (None, None))
        if started is not None and ended is None:
            self.runs[name] = (started, self.now)

    @property
    def running(self) -> str | None:
        """Name of the training in the written status."""
        return self.status.running.name if self.status and self.status.running else None

    @property
    def reason(self) -> str:
        assert self.status is not None
        return self.status.reason

    def used_hours(self, month: int) -> float:
        """GPU hours that trainings really used in a month of 2026 or 2027, counted from January 2026."""
        first = datetime(2026 + (month - 1) // 12, (month - 1) % 12 + 1, 1, tzinfo=UTC)
        last = datetime(2026 + month // 12, month % 12 + 1, 1, tzinfo=UTC)
        held = (min(ended or self.now, last) - max(started, first) for started, ended in self.runs.values())
        return sum(max(0.0, each.total_seconds()) for each in held) * GPUS / 3600
