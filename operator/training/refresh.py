"""Decide when a schedule trains a draft on its newest capture, and account for the GPU hours.

The status reserves the GPU hours of a training before the training is created. If the operator is killed in between,
the next reconcile decides again and creates it. Its use is added to the used hours in the write that removes the
reservation. Because a schedule has at most one unfinished training, no list of trainings needs to be kept.

A training counts in full in each calendar month in which it runs, so no month exceeds the limit.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from pydantic import ValidationError

from specdecode_operator.api import base
from specdecode_operator.api import training as training_api
from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import Source
from specdecode_operator.api.capture_status import CapturePhase, SpecDecodeCaptureStatus
from specdecode_operator.api.deployment import (
    CaptureSchedule,
    Key,
    RunningTraining,
    ScheduledTraining,
    ScheduledTrainingStatus,
    TrainWhen,
)
from specdecode_operator.api.speculation import Speculation
from specdecode_operator.api.training import SpecDecodeTrainingSpec, TrainingRun
from specdecode_operator.api.training_status import TrainingPhase
from specdecode_operator.capture.observation import CapturedDeployment
from specdecode_operator.capture.schedules import ScheduleEvent, run_name, schedule_labels, scheduled_at
from specdecode_operator.cluster.clock import RFC3339, rfc3339
from specdecode_operator.cluster.drift import is_owned
from specdecode_operator.cluster.manifests import owner_reference
from specdecode_operator.cluster.resources import SCHEDULE_LABEL
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.observed.decay import LESS_ACCEPTED, Decay, drafts_declined, has_baseline
from specdecode_operator.enums import METHODS_OF_FREE_LENGTH
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip
from specdecode_operator.training.job_manifest import GRACE_S
from specdecode_operator.training.judge import judge_name
from specdecode_operator.training.observation import Training, read_training
from specdecode_operator.training.offers import head_folder
from specdecode_operator.training.preconditions import run_blocked
from specdecode_operator.training.refresh_cost import (
    BUDGET_TOO_SMALL,
    HOUR_S,
    OF_TEMPLATE,
    Cost,
    budget_problem,
    hours,
    largest_cost,
)
from specdecode_operator.untrusted import mapping

OTHER_LENGTH: Final = 0.5
"""Change of the mean length of prompts or answers that counts as other traffic, as a share of the earlier length."""

FEWEST_REQUESTS: Final = 100
"""Number of complete requests below which the mean lengths of a capture are not compared."""

WAITING_FOR_CAPTURE: Final = "WaitingForCapture"
TRAINING: Final = "TrainingRunning"
NOT_DECAYED: Final = "NotDecayed"
NO_BASELINE: Final = "NoBaseline"
BUDGET_SPENT: Final = "BudgetSpent"
NAME_TAKEN: Final = "TrainingNameTaken"
SUSPENDED: Final = "ScheduleSuspended"
_SILENT: Final = frozenset({WAITING_FOR_CAPTURE, TRAINING, SUSPENDED})
_NOT_DECAYED: Final[Mapping[str, object]] = {"decayed": None, "decayed_engine": None}
_LONGEST_NAME: Final = 46
"""Longest name of a training. The name of the capture that measures its head has six more characters."""

_MOST_CHARACTERS: Final = 1024

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ObservedRefresh:
    """State of the cluster on which the trainings of a deployment's schedules depend."""

    key: Key
    uid: str
    captures: Sequence[Body]  # owned by the deployment
    trainings: Sequence[Body]  # of the deployment
    training: Callable[[str], Body | None]  # by name, with any owner
    capture: Callable[[str], Body | None]  # by name
    source: CapturedDeployment | Blocked  # the deployment, if its plan is in force
    decay: Decay
    speculation: Speculation | None  # in force, with the trained head
    engine: str  # hash of the engines' spec
    served: frozenset[str] = frozenset()  # trainings whose head is served or offered


@dataclass
class RefreshDecision:
    """Status of a schedule's trainings, and what to delete."""

    status: ScheduledTrainingStatus | None
    delete: list[Body] = field(default_factory=list)
    events: list[ScheduleEvent] = field(default_factory=list)
    in_use: frozenset[str] = frozenset()
    """Captures that a training reads, or will read."""


def decide_refresh(
    schedule: CaptureSchedule,
    training: ScheduledTraining,
    seen: ObservedRefresh,
    before: ScheduledTrainingStatus | None,
    now: datetime,
) -> RefreshDecision:
    """Return the status of a schedule's trainings. A training that it reserves is created after the status is written.

    ``before`` is the written status, without times in the future.
    """
    own = [each for each in seen.trainings if is_owned(each, seen.uid) and _label(each) == schedule.name]
    ledger = _Ledger(training, seen, own)
    if before is None and isinstance(seen.source, Blocked):
        return RefreshDecision(None)  # The use of trainings from before the status was lost is unknown.
    start = before if before is not None else ledger.rebuilt(schedule, now)
    status = ledger.brought_up_to_date(start, now)
    candidate = None
    if status.running is None:
        candidate = _newest(schedule, seen.captures, status, now)
        status = _next_training(schedule, training, seen, status, candidate)
    used = {status.running.capture} if status.running else set()
    if candidate is not None:
        used.add(candidate["metadata"]["name"])
    # The use of a training is written before the training is deleted.
    not_counted = {each.running.name for each in (before, status) if each is not None and each.running is not None}
    return RefreshDecision(
        status,
        [] if before is None else list(_too_old(schedule, own, seen, not_counted)),
        [*_told(schedule, before, status)],
        frozenset(used),
    )


def reserved(status: ScheduledTrainingStatus | None) -> RunningTraining | None:
    """Return the training that is reserved in a written status and was not found yet."""
    running = status.running if status is not None else None
    return running if running is not None and running.created_at is None else None


def render_training(
    schedule: CaptureSchedule, training: ScheduledTraining, seen: ObservedRefresh, running: RunningTraining
) -> Body:
    """Return the SpecDecodeTraining of a reservation. The deployment owns it."""
    # Unset fields stay unset, because rules distinguish an empty list from a missing one.
    template = training.template.model_dump(by_alias=True, mode="json", exclude_unset=True)
    head = _served_head(seen.speculation, training.template) if training.from_served_head else None
    if head is not None:
        template["from"] = head
    return {
        "apiVersion": base.API_VERSION,
        "kind": training_api.KIND,
        "metadata": {
            "namespace": seen.key.namespace,
            "name": running.name,
            "labels": schedule_labels(schedule),
            "ownerReferences": [owner_reference(seen.key, seen.uid)],
        },
        "spec": {"deployment": seen.key.name, "captures": [running.capture], **template},
    }


def _served_head(speculation: Speculation | None, run: TrainingRun) -> Body | None:
    """Return the trained head that engines serve from a claim, if its kind is the method to train."""
    draft = speculation.draft if speculation else None
    if draft is None or draft.persistent_volume_claim is None:
        return None
    if (draft.config or {}).get("speculators_model_type") != run.method.value:
        return None
    return {
        "model": draft.model,
        "persistentVolumeClaim": {"claimName": draft.persistent_volume_claim.claim_name},
    }


@dataclass(frozen=True)
class _Ledger:
    """Used and reserved GPU seconds of a schedule."""

    training: ScheduledTraining
    seen: ObservedRefresh
    own: Sequence[Body]  # trainings that the schedule created

    def rebuilt(self, schedule: CaptureSchedule, now: datetime) -> ScheduledTrainingStatus:
        """Return the first status. If it was lost, restore it from the trainings that still exist."""
        trained = [read_training(each) for each in self.own]
        used = sum(self._use(each, self._cost(each)) for each in trained if _ended_in_month(each, now))
        captures = {name for each in trained for name in each.spec.get("captures") or ()}
        times = (scheduled_at(each) for each in self.seen.captures if each["metadata"]["name"] in captures)
        newest = max((time for time in times if time is not None and time <= now), default=None)
        return ScheduledTrainingStatus(
            month=_month(now),
            used_gpu_seconds=used,
            last_capture_time=rfc3339(now),
            trained_capture_time=rfc3339(newest) if newest else None,
            reason=WAITING_FOR_CAPTURE,
            message=f"Waiting for a capture of schedule {schedule.name}",
        )

    def brought_up_to_date(self, status: ScheduledTrainingStatus, now: datetime) -> ScheduledTrainingStatus:
        """Return the status for the current month, with the end of the running training and new signs of decay."""
        limit = self.training.gpu_hours_per_month * HOUR_S
        update: dict[str, object] = {"limit_gpu_seconds": limit}
        if status.month != _month(now):
            update |= {"month": _month(now), "used_gpu_seconds": 0}
        is_same = status.decayed_engine == self.seen.engine
        if found := drafts_declined(self.seen.decay):
            told = status.decayed if is_same and status.decayed else clip(printable(found), _MOST_CHARACTERS)
            update |= {"decayed": told, "decayed_engine": self.seen.engine}
        elif not is_same:
            update |= _NOT_DECAYED
        return self._with_running(status.model_copy(update=update), now)

    def _with_running(self, status: ScheduledTrainingStatus, now: datetime) -> ScheduledTrainingStatus:
        running = self._found(status.running)
        if running is None:
            # A reservation without a training is decided again, because the spec may have changed.
            return status.model_copy(update={"running": None})
        body = self.seen.training(running.name)
        if body is not None and not is_owned(body, self.seen.uid):
            body = None
        if body is not None and running.created_at is None:
            status = self._created(status, running, body, now)
            assert status.running is not None  # noqa: S101  set by _created
            running = status.running
        used: int | None = None
        if body is None:
            since = _time(running.created_at) or now
            used = min(running.reserved_gpu_seconds, running.gpus * _seconds(since, now, GRACE_S))
        elif (training := read_training(body)).has_ended:
            used = self._use(training, Cost(running.gpus, running.reserved_gpu_seconds))
        if used is None and status.reason == TRAINING:
            return status
        if used is None:
            return _with(status, TRAINING, f"Training {running.name} has not ended")
        when = "" if body is not None else " before it was deleted"
        ended = _with(status, WAITING_FOR_CAPTURE, f"Training {running.name} used {hours(used)} GPU hours{when}")
        spent = status.used_gpu_seconds + used
        return ended.model_copy(update={"running": None, "used_gpu_seconds": spent})

    def _found(self, running: RunningTraining | None) -> RunningTraining | None:
        """Return the training that runs, even if the status was lost; None if no training runs."""
        if running is not None and running.created_at is not None:
            return running
        for body in self.own:
            training = read_training(body)
            if running is not None and training.key.name == running.name:
                return running
            if not training.has_ended and isinstance(self.seen.source, CapturedDeployment):
                cost, sources = self._cost(training), training.spec.get("captures") or [training.key.name]
                return RunningTraining(
                    name=training.key.name,
                    capture=str(sources[0]),
                    gpus=cost.gpus,
                    reserved_gpu_seconds=cost.gpu_seconds,
                )
        return None

    def _created(
        self, status: ScheduledTrainingStatus, running: RunningTraining, body: Body, now: datetime
    ) -> ScheduledTrainingStatus:
        """Return the status after the reserved training was found."""
        made = min(_time(body["metadata"].get("creationTimestamp")) or now, now)
        capture = self.seen.capture(running.capture)
        at = scheduled_at(capture) if capture is not None else None
        last = max(filter(None, (_time(status.last_capture_time), at)), default=now)
        return status.model_copy(
            update={
                "running": running.model_copy(update={"created_at": rfc3339(made)}),
                "last_capture_time": rfc3339(min(last, now)),
                "trained_capture_time": rfc3339(at) if at is not None and at <= now else status.trained_capture_time,
                **_NOT_DECAYED,
            }
        )

    def _cost(self, training: Training) -> Cost:
        """Return the largest cost of a training that exists; the cost of the template if its spec is invalid."""
        assert isinstance(self.seen.source, CapturedDeployment)  # noqa: S101  checked by the callers
        run: TrainingRun = self.training.template
        try:
            run = SpecDecodeTrainingSpec.parse(training.spec, newer=True)
        except ValidationError:
            _logger.warning("%s: its spec is invalid; the GPU hours of the template are counted instead", training.key)
        return largest_cost(run, self.seen.source)

    def _use(self, training: Training, cost: Cost) -> int:
        """Return the GPU seconds of a training that has ended: those of its Job, and of its measurement."""
        started, trained = _time(training.status.started_at), training.condition("Succeeded")
        if started is None:
            return 0
        finished = _time(trained.last_transition_time) if trained is not None else None
        ended = _time(training.status.finished_at)
        if finished is None or ended is None:
            return cost.gpu_seconds
        used_s = _seconds(started, finished, GRACE_S)
        judging = self.seen.capture(judge_name(training))
        if judging is not None and is_owned(judging, training.uid):
            status = mapping(judging, "status")
            began = _time(status.get("startedAt"))
            used_s += 0 if began is None else _seconds(began, _time(status.get("finishedAt")) or ended, GRACE_S)
        elif training.status.verdict is not None:
            used_s += _seconds(finished, ended, GRACE_S)
        return min(cost.gpu_seconds, cost.gpus * used_s)


@dataclass(frozen=True)
class _Obstacle:
    """Reason why no training starts on a capture."""

    reason: str
    message: str
    is_final: bool = False  # The capture is not considered again.


@dataclass(frozen=True)
class _Candidate:
    """Newest successful capture of a schedule that was not considered yet."""

    schedule: CaptureSchedule
    training: ScheduledTraining
    seen: ObservedRefresh
    status: ScheduledTrainingStatus
    capture: Body
    at: datetime  # its scheduled time

    @property
    def name(self) -> str:
        """Name of the capture."""
        return str(self.capture["metadata"]["name"])

    @property
    def training_name(self) -> str:
        """Name of the training on it."""
        return run_name(self.seen.key, self.seen.uid, self.schedule.name, self.at, _LONGEST_NAME)

    def decided(self) -> ScheduledTrainingStatus:
        """Return the status with a reservation for a training, or with the reason why no training starts."""
        obstacle = next(self._obstacles(), None)
        if obstacle is not None and obstacle.is_final:
            considered = {"last_capture_time": rfc3339(self.at), **_NOT_DECAYED}
            return _with(self.status.model_copy(update=considered), obstacle.reason, obstacle.message)
        if obstacle is not None:
            return _with(self.status, obstacle.reason, obstacle.message)
        cost = self._cost
        running = RunningTraining(
            name=self.training_name, capture=self.name, gpus=cost.gpus, reserved_gpu_seconds=cost.gpu_seconds
        )
        why = "training.when is Always" if self.training.when is TrainWhen.ALWAYS else self._change()
        message = f"Training {running.name} reserves {cost}: {why}"
        return _with(self.status, TRAINING, message).model_copy(update={"running": running})

    @property
    def _cost(self) -> Cost:
        assert isinstance(self.seen.source, CapturedDeployment)  # noqa: S101  else an obstacle
        return largest_cost(self.training.template, self.seen.source)

    def _obstacles(self) -> Iterator[_Obstacle]:
        source = self.seen.source
        blocked = source if isinstance(source, Blocked) else run_blocked(self.training.template, source)
        if blocked is not None:
            told = OF_TEMPLATE.sub(r"training.template.\1", blocked.message)
            yield _Obstacle(blocked.reason, f"Capture {self.name}: {told}")
        yield from self._unchanged()
        yield from self._taken()
        yield from self._over_budget()

    def _unchanged(self) -> Iterator[_Obstacle]:
        if self.training.when is TrainWhen.ALWAYS or self._change() is not None:
            return
        if not _earlier(self.capture, self.seen, self.status) and not has_baseline(self.seen.decay):
            told = "there is no earlier capture or baseline of acceptance to compare with yet"
            yield _Obstacle(NO_BASELINE, f"Capture {self.name}: {told}")
        told = "acceptance and lengths have not changed enough to train"
        yield _Obstacle(NOT_DECAYED, f"Capture {self.name}: {told}", is_final=True)

    def _change(self) -> str | None:
        return self.status.decayed or _moved(self.capture, self.seen, self.status)

    def _taken(self) -> Iterator[_Obstacle]:
        name = self.training_name
        live = self.seen.training(name)
        if live is not None and is_owned(live, self.seen.uid):  # The status that recorded its end was lost.
            yield _Obstacle(WAITING_FOR_CAPTURE, f"Training {name} has ended", is_final=True)
        elif live is not None:
            told = f"SpecDecodeTraining {name} exists and does not belong to this object; delete or rename it"
            yield _Obstacle(NAME_TAKEN, f"Capture {self.name}: {told}", is_final=True)

    def _over_budget(self) -> Iterator[_Obstacle]:
        cost, status, limit = self._cost, self.status, self.training.gpu_hours_per_month
        if problem := budget_problem(self.training, cost):
            yield _Obstacle(BUDGET_TOO_SMALL, f"training.gpuHoursPerMonth: {limit}: {problem}")
        if status.used_gpu_seconds + cost.gpu_seconds > status.limit_gpu_seconds:
            used = f"{hours(status.used_gpu_seconds)} of {limit} GPU hours are used in {status.month}"
            why = f"and a training can use {cost}; it starts next month, or when you raise gpuHoursPerMonth"
            yield _Obstacle(BUDGET_SPENT, f"Capture {self.name}: {used}, {why}")


def _next_training(
    schedule: CaptureSchedule,
    training: ScheduledTraining,
    seen: ObservedRefresh,
    status: ScheduledTrainingStatus,
    capture: Body | None,
) -> ScheduledTrainingStatus:
    """Return the status with a reservation for a training on a capture, or with the reason why no training starts."""
    if schedule.suspend:
        return _with(status, SUSPENDED, "suspend is true, so no training starts")
    at = scheduled_at(capture) if capture is not None else None
    if capture is not None and at is not None:
        return _Candidate(schedule, training, seen, status, capture, at).decided()
    if status.reason in (WAITING_FOR_CAPTURE, NOT_DECAYED, NAME_TAKEN):
        return status
    return _with(status, WAITING_FOR_CAPTURE, f"Waiting for a capture of schedule {schedule.name}")


def _with(status: ScheduledTrainingStatus, reason: str, message: str) -> ScheduledTrainingStatus:
    return status.model_copy(update={"reason": reason, "message": clip(printable(message), _MOST_CHARACTERS)})


def _told(
    schedule: CaptureSchedule, before: ScheduledTrainingStatus | None, status: ScheduledTrainingStatus
) -> Iterator[ScheduleEvent]:
    known = (before.reason, before.last_capture_time) if before else None
    if status.reason not in _SILENT and known != (status.reason, status.last_capture_time):
        warns = status.reason not in (NOT_DECAYED, NO_BASELINE)
        yield ScheduleEvent("RefreshSkipped", f"{schedule.name}: {status.reason}: {status.message}", warns)


def created_event(schedule: CaptureSchedule, running: RunningTraining) -> ScheduleEvent:
    """Return the Event of a training that was created."""
    message = f"{schedule.name}: training {running.name} trains on capture {running.capture}"
    return ScheduleEvent("RefreshStarted", message)


def _newest(
    schedule: CaptureSchedule, captures: Sequence[Body], status: ScheduledTrainingStatus, now: datetime
) -> Body | None:
    """Return the newest successful capture that was not considered yet."""
    last = _time(status.last_capture_time) or now
    found = [
        (at, each)
        for each in captures
        if _label(each) == schedule.name
        and mapping(each, "status").get("phase") == CapturePhase.SUCCEEDED
        and (at := scheduled_at(each)) is not None
        and last < at <= now
    ]
    return max(found, key=lambda each: each[0])[1] if found else None


@dataclass(frozen=True)
class _Figures:
    """Traffic of a capture; None for an unknown figure."""

    name: str
    engine: str | None
    acceptance_percent: int | None
    prompt_tokens: float | None
    output_tokens: float | None


def _figures(capture: Body) -> _Figures | None:
    try:
        status = SpecDecodeCaptureStatus.parse(mapping(capture, "status"), newer=True)
    except ValidationError:
        return None
    summary, spec = status.summary, mapping(capture, "spec")
    if summary is None or len(spec.get("arms") or ()) > 1:
        return None
    requests = summary.requests.completed
    lengths = [
        tokens / requests if tokens is not None and requests >= FEWEST_REQUESTS else None
        for tokens in (summary.prompt_tokens, summary.output_tokens)
    ]
    is_live = spec.get("source") == Source.LIVE
    name = printable(capture["metadata"]["name"])
    return _Figures(name, status.engine, summary.acceptance_percent, *(lengths if is_live else (None, None)))


def _earlier(capture: Body, seen: ObservedRefresh, status: ScheduledTrainingStatus) -> list[_Figures]:
    """Return the captures to compare one with: the earlier captures of its schedule since the last training."""
    at, since = scheduled_at(capture), _time(status.trained_capture_time)
    found = []
    for each in seen.captures:
        time = scheduled_at(each)
        is_earlier = time is not None and at is not None and time < at and (since is None or time >= since)
        is_over = mapping(each, "status").get("phase") == CapturePhase.SUCCEEDED
        if is_earlier and is_over and _label(each) == _label(capture) and (figures := _figures(each)):
            found.append(figures)
    return found


def _moved(capture: Body, seen: ObservedRefresh, status: ScheduledTrainingStatus) -> str | None:
    """Return how the traffic of a capture differs from an earlier one; None if it does not."""
    own = _figures(capture)
    if own is None:
        return None
    speculation = seen.speculation
    judges = speculation is not None and speculation.method not in METHODS_OF_FREE_LENGTH
    for each in _earlier(capture, seen, status):
        before, now = each.acceptance_percent, own.acceptance_percent
        if judges and own.engine == each.engine and before and now is not None and now < (1 - LESS_ACCEPTED) * before:
            return f"{now} % of drafted tokens were accepted, down from {before} % in capture {each.name}"
        for what in ("prompt", "output"):
            long, now_long = getattr(each, f"{what}_tokens"), getattr(own, f"{what}_tokens")
            if long and now_long is not None and abs(now_long - long) > OTHER_LENGTH * long:
                return f"mean {what} length is {now_long:.0f} tokens, {long:.0f} in capture {each.name}"
    return None


def _too_old(
    schedule: CaptureSchedule, own: Sequence[Body], seen: ObservedRefresh, not_counted: Collection[str]
) -> Iterator[Body]:
    """Yield the ended trainings beyond the history limits, except those whose head is served or offered."""
    kept = {*seen.served, *not_counted}
    draft = seen.speculation.draft if seen.speculation else None
    own = [each for each in own if draft is None or draft.model != head_folder(read_training(each).key)]
    limits: Mapping[TrainingPhase, int] = {
        TrainingPhase.COMPLETE: schedule.successful_history_limit,
        TrainingPhase.FAILED: schedule.failed_history_limit,
    }
    for phase, limit in limits.items():
        ended = [each for each in own if mapping(each, "status").get("phase") == phase]
        ended.sort(key=lambda each: (each["metadata"].get("creationTimestamp", ""), each["metadata"]["name"]))
        ended = ended[: max(0, len(ended) - limit)]
        yield from (each for each in ended if each["metadata"]["name"] not in kept)


def _ended_in_month(training: Training, now: datetime) -> bool:
    ended = _time(training.status.finished_at)
    return training.has_ended and ended is not None and _month(ended) == _month(now)


def _label(body: Body) -> str | None:
    label: str | None = mapping(body["metadata"], "labels").get(SCHEDULE_LABEL)
    return label


def _seconds(start: datetime, end: datetime, more: int) -> int:
    return max(0, int((end - start).total_seconds())) + more


def _time(text: object) -> datetime | None:
    """Return an RFC 3339 time; None if it is missing or malformed."""
    try:
        return datetime.strptime(str(text), RFC3339).replace(tzinfo=UTC)
    except ValueError:
        return None


def _month(now: datetime) -> str:
    return f"{now.astimezone(UTC):%Y-%m}"
