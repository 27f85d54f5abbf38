"""For every field of a SpecDecodeDeployment's schedules, a value that makes a difference: see field_cases.py."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from specdecode_operator.api.deployment import CaptureSchedule, Key, ScheduleStatus
from specdecode_operator.api.speculation import Speculation
from specdecode_operator.capture.schedules import ObservedSchedules, SchedulingDecision, decide_schedules
from specdecode_operator.cluster.resources import (
    CAPTURE_LABEL,
    PUBLISHED_LABEL,
    SCHEDULE_LABEL,
    SCHEDULED_AT_ANNOTATION,
)
from tests.support.capture_field_cases import CAPTURE_FIELDS
from tests.support.field_cases import FieldCase, at
from tests.support.objects import Body, pair_70b
from tests.support.refreshes import LIVE, SERVED_HEAD, TEMPLATE, Refreshes, h100_source
from tests.support.training_field_cases import TRAINING_FIELDS

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
_NOT_IN_TEMPLATES = ("deployment", "suspend", "ttlSecondsAfterFinished")
_NOT_IN_TRAINING_TEMPLATES = ("deployment", "captures[]", "captures", "dataset", "suspend")
_LATE = timedelta(seconds=90)


def _scheduled(**fields: object) -> Body:
    return pair_70b(captures=[{"name": "hourly", "schedule": "0 * * * *", **fields}])


def _of_template(field: str, case: FieldCase) -> tuple[str, FieldCase]:
    """The same case for the captures that a schedule creates; whether they can run is told of each of them."""
    template = {name: value for name, value in case.on.items() if name not in _NOT_IN_TEMPLATES}
    return f"captures[].template.{field}", replace(case, on=_scheduled(template=template), refusal="")


def _training(**fields: object) -> Body:
    training = {"when": "Always", "gpuHoursPerMonth": 1000, "template": TEMPLATE, **fields}
    return _scheduled(template=LIVE, training=training)


def _of_training_template(field: str, case: FieldCase) -> tuple[str, FieldCase]:
    """The same case for the trainings that a schedule creates."""
    template = {name: value for name, value in case.on.items() if name not in _NOT_IN_TRAINING_TEMPLATES}
    on = _training(fromServedHead=False, template=template)
    return f"captures[].training.template.{field}", replace(case, on=on, refusal="", deployment=None)


SCHEDULE_FIELDS: Mapping[str, FieldCase] = {
    "captures[].name": at("nightly", on=_scheduled()),
    "captures[].schedule": at("30 * * * *", on=_scheduled()),
    "captures[].timeZone": at("Asia/Kolkata", on=_scheduled()),
    "captures[].concurrencyPolicy": at("Replace", on=_scheduled()),
    "captures[].startingDeadlineSeconds": at(60, on=_scheduled()),
    "captures[].successfulHistoryLimit": at(1, on=_scheduled()),
    "captures[].failedHistoryLimit": at(2, on=_scheduled()),
    "captures[].retention.count": at(1, on=_scheduled()),
    "captures[].retention.failedCount": at(0, on=_scheduled()),
    "captures[].retention.days": at(1, on=_scheduled()),
    "captures[].queue.name": at("gpus", on=_scheduled()),
    "captures[].queue.priorityClass": at("measurements", on=_scheduled(queue={"name": "gpus"})),
    "captures[].suspend": at(value=True, on=_scheduled()),
    "captures[].training.when": at("Decayed", on=_training()),
    "captures[].training.gpuHoursPerMonth": at(2000, on=_training()),
    "captures[].training.fromServedHead": at(value=False, on=_training()),
    **dict(
        _of_training_template(*each)
        for each in TRAINING_FIELDS.items()
        if each[0].partition(".")[0] not in _NOT_IN_TRAINING_TEMPLATES
    ),
    **dict(
        _of_template(*each) for each in CAPTURE_FIELDS.items() if each[0].partition(".")[0] not in _NOT_IN_TEMPLATES
    ),
}
"""Fields of a SpecDecodeDeployment's schedules."""


def schedule_outcomes(captures: Iterable[Body]) -> list[SchedulingDecision]:
    """Return what schedules come to a little after noon: at first, beside a running one, after many that ended."""
    schedules = [CaptureSchedule.model_validate(each) for each in captures]
    since = (NOON - timedelta(minutes=10)).strftime("%Y-%m-%dT%H:%M:%SZ")
    statuses = [
        ScheduleStatus(name=each.name, schedule=f"{each.schedule} {each.time_zone}", since=since) for each in schedules
    ]
    names = [each.name for each in schedules]
    running = [_capture(name, 1, "Running") for name in names]
    over = [
        _capture(name, hours, phase) for name in names for phase in ("Succeeded", "Failed") for hours in (48, 49, 50)
    ]
    pasts = (
        ObservedSchedules((), (), statuses),
        ObservedSchedules(running, (), statuses),
        ObservedSchedules(over, over, statuses),
    )
    return [decide_schedules(Key("team", "llama"), "uid-1", schedules, past, NOON + _LATE) for past in pasts]


def refresh_outcomes(captures: Iterable[Body]) -> list[object]:
    """Return what comes of a capture of each schedule that trains: the status, and the training."""
    outcomes: list[object] = []
    for each in captures:
        if "training" not in each:
            continue
        world = Refreshes(each, h100_source())
        world.see(speculation=Speculation.parse(SERVED_HEAD))
        world.reconcile()
        world.advance(timedelta(hours=1))
        world.capture()
        world.reconcile()
        outcomes += [world.status, [body["spec"] for body in world.trainings.values()]]
    return outcomes


def _capture(schedule: str, hours_ago: int, phase: str) -> Body:
    made = (NOON - timedelta(hours=hours_ago)).strftime("%Y-%m-%dT%H:%M:%SZ")
    name = f"llama-{schedule}-{hours_ago}-{phase.lower()}"
    published = {PUBLISHED_LABEL: "true"} if phase == "Succeeded" else {}
    metadata = {"name": name, "labels": {SCHEDULE_LABEL: schedule, CAPTURE_LABEL: name, **published}}
    metadata |= {"annotations": {SCHEDULED_AT_ANNOTATION: made}, "creationTimestamp": made}
    return {"metadata": metadata, "spec": {"deployment": "llama"}, "status": {"phase": phase}}
