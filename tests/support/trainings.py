"""SpecDecodeTrainings, their Jobs and pods as the API server has them."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.training_status import SpecDecodeTrainingStatus
from specdecode_operator.enums import Method
from specdecode_operator.training.decision import decide
from specdecode_operator.training.observation import TrainingObservation, read_training
from specdecode_operator.training.status import Decision, compose_status
from tests.support.captures import OPERATOR_IMAGE, capture, claim, ended, observed_deployment, running
from tests.support.objects import Body, tiny_cpu

NOW = datetime(2026, 1, 1, 2, tzinfo=UTC)
JOB = "head-training"
JOB_UID = "job-uid"
TRAINER = {"image": "localhost/trainer:1"}
STEPS = ("export", "hidden-states", "train", "publish")
ROWS = {"training": 540, "holdout": 60, "duplicates": 3, "tokens": 60_000}
HEAD = {"path": "elsewhere/head", "sha256": "ab" * 32, "bytes": 4096, "config": {"architectures": ["LlamaEagle3"]}}
PROMPTS = {"dataset": {"configMap": {"name": "prompts"}, "path": "a.jsonl", "format": "JSONL"}}


def training_spec(**changes: Any) -> Body:
    """Spec of a training of the deployment `llama` with one capture."""
    return {"deployment": "llama", "captures": ["evening"], "trainer": TRAINER, **changes}


def training(spec: Body | None = None, *, labels: Body | None = None, status: Body | None = None, **meta: Any) -> Body:
    """A SpecDecodeTraining."""
    metadata = {"namespace": "default", "name": "head", "uid": "training-uid", "generation": 1, "resourceVersion": "1"}
    return {
        "metadata": {**metadata, "labels": labels or {}, **meta},
        "spec": training_spec() if spec is None else spec,
        "status": status or {},
    }


def source(name: str = "evening", *, succeeded: str = "True", record: Body | None = None, **spec: Any) -> Body:
    """A capture to train on."""
    outcome = {
        "type": "Succeeded",
        "status": succeeded,
        "reason": "Captured" if succeeded == "True" else "EngineExited",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
        "observedGeneration": 1,
    }
    summary = {"requests": {"sent": 600, "completed": 600}}
    return capture(
        {
            "deployment": "llama",
            "record": {"tokenIds": True} if record is None else record,
            "workload": {"prompts": PROMPTS},
            **spec,
        },
        status={"conditions": [outcome], "claim": f"{name}-capture", "summary": summary},
        name=name,
        uid=f"{name}-uid",
    )


def surroundings(**changes: Any) -> TrainingObservation:
    """What lets a training start."""
    seen: dict[str, Any] = {
        "deployment": observed_deployment(),
        "captures": {"evening": source()},
        "capture_claims": {"evening-capture": claim("evening-capture")},
        "operator_image": OPERATOR_IMAGE,
        "written": SpecDecodeDeploymentSpec.parse(tiny_cpu()),
        "served": Method.DRAFT_MODEL,
    }
    return TrainingObservation(**{**seen, **changes})


def job(*conditions: str, suspend: bool = False) -> Body:
    """The training's Job with some conditions that are true."""
    stamped = [
        {"type": each, "status": "True", "lastTransitionTime": "2026-01-01T01:00:00Z", "reason": each, "message": "m"}
        for each in conditions
    ]
    metadata = {"namespace": "default", "name": JOB, "uid": JOB_UID}
    return {"metadata": metadata, "spec": {"suspend": suspend}, "status": {"conditions": stamped}}


def pod(
    *statuses: Body, phase: str = "Running", name: str = "head-training-x", created: str = "1", **status: Any
) -> Body:
    """A pod of the training's Job with the statuses of its containers."""
    containers = {each["name"]: each for each in statuses}
    last = [containers.pop("publish")] if "publish" in containers else []
    return {
        "metadata": {
            "namespace": "default",
            "name": name,
            "uid": f"{name}-uid",
            "creationTimestamp": created,
            "labels": {"specdecode.io/training": "head"},
            "ownerReferences": [{"kind": "Job", "name": JOB, "uid": JOB_UID}],
        },
        "status": {
            "phase": phase,
            "startTime": "2026-01-01T00:10:00Z",
            "initContainerStatuses": [*containers.values()],
            "containerStatuses": last,
            **status,
        },
    }


def at_step(step: str, *, said: Sequence[Body] = ()) -> Body:
    """A pod whose earlier steps have ended and whose step runs; ``said`` are messages of the first steps."""
    before = STEPS[: STEPS.index(step)]
    messages = [*said, *([""] * len(before))]
    done = [ended(name, 0, message) for name, message in zip(before, messages, strict=False)]
    return pod(*done, running(step), phase="Running" if step == "publish" else "Pending")


def published(**result: Any) -> Body:
    """A pod whose last step has published a head."""
    steps = [ended(name, 0) for name in STEPS[:-1]]
    return pod(*steps, ended("publish", 0, {"rows": ROWS, "head": HEAD, **result}), phase="Succeeded")


def decided(body: Body, seen: TrainingObservation | None = None) -> tuple[Decision, SpecDecodeTrainingStatus]:
    """Return what is decided of a training and its status; where nothing is given, nothing hinders it."""
    subject = read_training(body)
    decision = decide(subject, seen or surroundings(), NOW)
    return decision, compose_status(subject, decision, NOW)


def after(body: Body, seen: TrainingObservation) -> Body:
    """The same training with the status that it then has."""
    _, status = decided(body, seen)
    return {**body, "status": status.model_dump(by_alias=True, mode="json", exclude_none=True)}


def words(status: SpecDecodeTrainingStatus) -> dict[str, tuple[str, str]]:
    """Return status and reason of each condition."""
    return {each.type: (each.status.value, each.reason) for each in status.conditions}
