"""Objects of our kinds as they are from their creation to their end, and what whoever waits for them must be told.

Each state is made by the code that decides: an object that one life goes through, after another look of the operator.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from specdecode_operator.api import capture as capture_api
from specdecode_operator.api import deployment as deployment_api
from specdecode_operator.api import training as training_api
from specdecode_operator.api.base import API_VERSION
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.rollout.readiness import readiness_of
from specdecode_operator.deployment.status import compose_status
from tests.support import trainings
from tests.support.capture_decisions import decided
from tests.support.captures import capture, capture_pod, capture_spec, golden, job, running, surroundings
from tests.support.captures import ended as container_ended
from tests.support.decisions import NOW, decide, desired_state
from tests.support.objects import Body, deployment, ended, pair_70b, parent, pod, tiny_cpu, waiting
from tests.support.scheduler_words import NO_ROOM
from tests.unit.deployment.rollout import test_rollback as rollbacks
from tests.unit.deployment.rollout import test_rollout_gate as gates

Told = Literal["wait", "good", "bad"]


@dataclass(frozen=True)
class State:
    """One object at one moment."""

    name: str
    body: Body
    told: Told
    reason: str
    """Of its condition Ready; empty before the operator has seen it."""


UNSEEN: Body = {"observedGeneration": -1}
"""The status that the CRD gives to an object that is created."""

_CONFLICT = Blocked("ChildNameConflict", "Service llama is not ours", permanent=True)
_UNSCHEDULED: Body = {"type": "PodScheduled", "status": "False", "message": NO_ROOM[0]}


def states() -> Iterator[State]:
    """Return every state, of all kinds."""
    for kind, found in (
        (deployment_api.KIND, [*_deployments(), *_rollbacks(), *_gates()]),
        (capture_api.KIND, [*_captures(), *_against_golden()]),
        (training_api.KIND, [*_trainings()]),
    ):
        yield _state(kind, "created", "wait", {**_blank(kind), "status": UNSEEN})
        for name, told, body in found:
            yield _state(kind, name, told, body)
        _, _, seen = found[-1]
        metadata = {**seen["metadata"], "generation": seen["metadata"]["generation"] + 1}
        yield _state(kind, "changed, not seen yet", "wait", {**seen, "metadata": metadata})


def _blank(kind: str) -> Body:
    return {deployment_api.KIND: parent(tiny_cpu()), capture_api.KIND: capture()}.get(kind) or trainings.training()


def _state(kind: str, name: str, told: Told, body: Body) -> State:
    conditions = {each["type"]: each for each in body["status"].get("conditions", [])}
    reason = conditions["Ready"]["reason"] if conditions else ""
    return State(f"{kind}: {name}", {"apiVersion": API_VERSION, "kind": kind, **body}, told, reason)


def _data(status: Any) -> Body:
    data: Body = json.loads(status.model_dump_json(by_alias=True, exclude_none=True))
    return data


_Found = Iterator[tuple[str, Told, Body]]


def _deployments() -> _Found:
    """States that one look makes."""
    rolling = Observation(deployment(replicas=1, updated=1, available=0))
    crashing = pod(containerStatuses=[ended(1, "RuntimeError: NCCL error")])
    refusing = pod(containerStatuses=[ended(2, "vllm: error: unrecognized arguments: --nonsense")])
    unscheduled = pod(conditions=[{"type": "PodScheduled", "status": "False", "message": NO_ROOM[0]}])
    no_image = pod(containerStatuses=[waiting("ErrImagePull", "not found")])
    overdue = deployment(replicas=1, updated=1, available=0)
    overdue["status"]["conditions"] = [
        {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": ""}
    ]
    paused = Observation(deployment(replicas=1, updated=0, available=1))
    serving = Observation(deployment(replicas=1, updated=1, available=1))
    first: list[tuple[str, Told, Body, Observation]] = [
        ("first look", "wait", tiny_cpu(), Observation()),
        ("starting", "wait", tiny_cpu(), rolling),
        ("an engine crashed", "wait", tiny_cpu(), Observation(rolling.workload, [crashing])),
        ("no room", "wait", tiny_cpu(), Observation(rolling.workload, [unscheduled])),
        ("no image", "wait", tiny_cpu(), Observation(rolling.workload, [no_image])),
        ("the engine refuses its arguments", "bad", tiny_cpu(), Observation(rolling.workload, [refusing])),
        ("never ready", "bad", tiny_cpu(), Observation(overdue)),
        ("paused on the way", "wait", tiny_cpu(rollout={"paused": True}), paused),
        ("serving", "good", tiny_cpu(), serving),
        ("suspended", "good", tiny_cpu(suspend=True), Observation()),
        ("no replica is asked for", "good", tiny_cpu(replicas=0), Observation()),
        ("invalid", "bad", tiny_cpu(serving={"maxModelLen": 10**6}), Observation()),
        (
            "does not fit",
            "bad",
            pair_70b(parallelism={"tensor": 1}, accelerator={"products": ["NVIDIA-H200"]}),
            serving,
        ),
        ("a model is unknown", "wait", pair_70b(target={"model": "nobody/knows"}), Observation()),
        ("another's child has the name", "bad", tiny_cpu(), Observation(blocked=readiness_of(_CONFLICT))),
    ]
    for name, told, spec, seen in first:
        _, status, _ = decide(parent(spec), seen)
        yield name, told, parent(spec, status=_data(status))
    _, nowhere, _ = decide(parent(pair_70b()), nodes=())
    yield "no node yet", "wait", parent(pair_70b(), status=_data(nowhere))
    _, before, _ = decide(parent(tiny_cpu()), serving)
    _, lost, _ = decide(parent(tiny_cpu(), status=_data(before)), rolling)
    yield "an engine is lost", "wait", parent(tiny_cpu(), status=_data(lost))
    lent = parse_deployment(parent(tiny_cpu()), preempted_by="nightly")
    status = compose_status(lent, desired_state(lent), Observation(), NOW)
    yield "its GPUs are lent to a capture", "wait", parent(tiny_cpu(), status=_data(status))


def _rollbacks() -> _Found:
    story = rollbacks.Story()
    story.apply()
    story.look(1)
    story.apply(**rollbacks.changed())
    story.look(0, rollbacks.crash_looping(0, rollbacks.REFUSED))
    story.look(0)
    yield "its last good engines are put back", "wait", _told(story)
    story.look(1)
    yield "rolled back", "bad", _told(story)


def _gates() -> _Found:
    story = gates.GatedStory(None)
    story.write(gates.NEW)
    story.look(serving=1)
    yield "waits for the golden capture", "wait", _told(story)
    story.golden = gates.GOLDEN
    story.look(serving=1)
    yield "judged at the gate", "wait", _told(story)
    story.judged("Regressed")
    story.look(serving=1)
    yield "refused at the gate", "bad", _told(story)


def _told(story: rollbacks.Story | gates.GatedStory) -> Body:
    return parent(story.spec, generation=story.generation, status=story.status)


def _captures() -> _Found:
    pending = capture_pod(phase="Pending", conditions=[_UNSCHEDULED])
    loading = capture_pod(containerStatuses=[running("load")])
    done = capture_pod(phase="Succeeded", containerStatuses=[container_ended("load", 0, {"requests": {}})])
    failure = {"error": {"reason": "DiskFull", "message": "use a larger one"}}
    failed = capture_pod(phase="Failed", containerStatuses=[container_ended("load", 1, failure)])
    queued = {"kueue.x-k8s.io/queue-name": "gpus"}
    cases: list[tuple[str, Told, Body, Any]] = [
        ("first look", "wait", capture(), surroundings()),
        ("no deployment", "wait", capture(), surroundings(deployment=None)),
        ("in a queue", "wait", capture(labels=queued), surroundings(job=job(suspend=True))),
        ("waits for GPUs", "wait", capture(), surroundings(job=job(), pods=[pending])),
        ("loading", "wait", capture(), surroundings(job=job(), pods=[loading])),
        ("succeeded", "good", capture(), surroundings(job=job("Complete"), pods=[done])),
        ("failed", "bad", capture(), surroundings(job=job("Failed"), pods=[failed])),
        ("suspended", "good", capture(capture_spec(suspend=True)), surroundings()),
        ("invalid", "bad", capture(capture_spec(workload={"phases": "many"})), surroundings()),
    ]
    for name, told, body, seen in cases:
        yield name, told, _after(body, seen)


def _trainings() -> _Found:
    seen, spec = trainings.surroundings, trainings.training_spec
    failed = trainings.pod(container_ended("export", 1, {"error": {"reason": "TooFewRows"}}), phase="Failed")
    done = {"job": trainings.job("Complete"), "pods": [trainings.published()]}
    unmeasured = trainings.training(spec(judgement={"enabled": False}))
    cases: list[tuple[str, Told, Body, Any]] = [
        ("first look", "wait", trainings.training(), seen()),
        ("no capture", "wait", trainings.training(), seen(captures={"evening": None})),
        ("no answers", "bad", trainings.training(), seen(captures={"evening": trainings.source(record={})})),
        ("training", "wait", trainings.training(), seen(job=trainings.job(), pods=[trainings.at_step("train")])),
        ("suspended", "good", trainings.training(spec(suspend=True)), seen()),
        ("failed", "bad", trainings.training(), seen(job=trainings.job("Failed"), pods=[failed])),
        ("measured", "wait", trainings.training(), seen(**done)),
        ("complete", "good", trainings.after(unmeasured, seen(**done)), seen(**done)),
    ]
    for name, told, body, observed in cases:
        yield name, told, trainings.after(body, observed)


def _against_golden() -> _Found:
    spec = capture_spec(against={"capture": "golden"})
    yield "its golden capture has not ended", "wait", _after(capture(spec), surroundings(golden=capture(name="golden")))
    bad = golden(succeeded="False")
    yield "its golden capture failed", "bad", _after(capture(spec), surroundings(golden=bad))


def _after(body: Body, seen: Any) -> Body:
    return {**body, "status": _data(decided(body, seen)[1])}


STATES = {each.name: each for each in states()}
"""The states by their names."""
