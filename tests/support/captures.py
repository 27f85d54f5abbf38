"""SpecDecodeCaptures, their Jobs and pods as the API server has them."""

import json
from dataclasses import replace
from typing import Any

from specdecode_operator.api import capture as capture_api
from specdecode_operator.api.capture import SpecDecodeCaptureSpec
from specdecode_operator.api.deployment import Key
from specdecode_operator.capture.arms import arm_states
from specdecode_operator.capture.observation import CaptureObservation, ObservedDeployment
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.cluster.resources import DEPLOYMENT_LABEL, TEMPLATE_HASH_ANNOTATION
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.rollout.rollout_progress import serving_hash
from specdecode_operator.enums import LiveTokenIds
from tests.support.decisions import desired_state
from tests.support.objects import Body, parent, tiny_cpu

OPERATOR_IMAGE = "registry.example/operator:1"
JOB_UID = "job-uid"
TOKEN = 32 * "a1"
SHORT = {"phases": [{"name": "short", "pattern": "Closed", "concurrency": 2, "requests": 8}]}


def capture_spec(**changes: Any) -> Body:
    """Spec of a short capture of the deployment `llama`."""
    return {"deployment": "llama", "workload": SHORT, **changes}


def capture(spec: Body | None = None, *, labels: Body | None = None, status: Body | None = None, **meta: Any) -> Body:
    """A SpecDecodeCapture."""
    metadata = {"namespace": "default", "name": "demo", "uid": "capture-uid", "generation": 1, "resourceVersion": "1"}
    return {
        "metadata": {**metadata, "labels": labels or {}, **meta},
        "spec": capture_spec() if spec is None else spec,
        "status": status or {},
    }


def golden(name: str = "golden", *, of: Body | None = None, succeeded: str = "True", **status: Any) -> Body:
    """A capture that ended, by which one of a spec can be judged."""
    ended = {
        "type": "Succeeded",
        "status": succeeded,
        "reason": "Captured" if succeeded == "True" else "EngineExited",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
        "observedGeneration": 1,
    }
    same = {key: value for key, value in (of or capture_spec()).items() if key != "against"}
    done = {"conditions": [ended], "claim": f"{name}-capture", "path": f"default/{name}/as-deployed/1", **status}
    return capture(same, status=done, name=name, uid=f"{name}-uid")


def observed_deployment(
    spec: Body | None = None, nodes: tuple[NodeFacts, ...] = (), capture: Body | None = None, **seen: Any
) -> ObservedDeployment:
    """The deployment `llama`, on CPU unless a spec says otherwise, with the arms of the spec of a capture."""
    body = parent(spec or tiny_cpu())
    owner = parse_deployment(body)
    desired = desired_state(owner, nodes)
    arms = arm_states(
        SpecDecodeCaptureSpec.parse(capture or capture_spec()),
        body,
        desired.outcome,
        lambda _, changed: desired_state(parse_deployment(changed), nodes),
    )
    return ObservedDeployment(owner.key, owner.uid, owner.generation, desired, arms, **seen)


def engine_pod(name: str, of: ObservedDeployment, *, ready: bool = True, **meta: Any) -> Body:
    """An engine pod of a deployment's current template."""
    workload = of.desired.workload
    assert workload is not None
    annotations = {TEMPLATE_HASH_ANNOTATION: serving_hash(workload)}
    labels = {DEPLOYMENT_LABEL: of.key.name}
    return {
        "metadata": {"name": name, "namespace": "default", "labels": labels, "annotations": annotations, **meta},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": str(ready)}]},
    }


def serving(of: ObservedDeployment | None = None, *names: str) -> ObservedDeployment:
    """A deployment with ready engine pods."""
    of = of or observed_deployment()
    return replace(of, pods=[engine_pod(name, of) for name in names or ("llama-a", "llama-b")], serves=True)


def live_spec(**changes: Any) -> Body:
    """Spec of a capture that records the engines of the deployment `llama` for ten minutes."""
    return {"deployment": "llama", "source": "Live", "live": {"durationSeconds": 600}, **changes}


def surroundings(**changes: Any) -> CaptureObservation:
    """What lets a capture start."""
    seen: dict[str, Any] = {
        "deployment": changes["deployment"] if "deployment" in changes else observed_deployment(),
        "operator_image": OPERATOR_IMAGE,
        "token": TOKEN,
        "token_ids_allowed": LiveTokenIds.PROMPTS,
    }
    return CaptureObservation(**{**seen, **changes})


def claim(name: str = "demo-capture", *, labels: Body | None = None, **changes: Any) -> Body:
    """A PersistentVolumeClaim."""
    body = {
        "metadata": {"namespace": "default", "name": name, "uid": "claim-uid", "labels": labels or {}},
        "spec": {"accessModes": ["ReadWriteOnce"]},
        "status": {"phase": "Bound"},
    }
    return {**body, **changes}


def job(*conditions: str, suspend: bool = False) -> Body:
    """The capture's Job with some conditions that are true."""
    stamped = [
        {"type": type_, "status": "True", "lastTransitionTime": "2026-01-01T00:10:00Z", "reason": type_, "message": "m"}
        for type_ in conditions
    ]
    metadata = {"namespace": "default", "name": "demo-capture", "uid": JOB_UID}
    return {"metadata": metadata, "spec": {"suspend": suspend}, "status": {"conditions": stamped}}


def capture_pod(*, phase: str = "Running", name: str = "demo-capture-x", created: str = "1", **status: Any) -> Body:
    """A pod of the capture's Job."""
    owner = {"kind": "Job", "name": "demo-capture", "uid": JOB_UID}
    return {
        "metadata": {
            "namespace": "default",
            "name": name,
            "uid": f"{name}-uid",
            "creationTimestamp": created,
            "ownerReferences": [owner],
        },
        "status": {"phase": phase, "startTime": "2026-01-01T00:00:00Z", **status},
    }


def ended(container: str, exit_code: int, message: Any = "", **more: Any) -> Body:
    """Status of a container that ended."""
    text = message if isinstance(message, str) else json.dumps(message)
    return {"name": container, "state": {"terminated": {"exitCode": exit_code, "message": text, **more}}}


def running(container: str) -> Body:
    """Status of a container that runs."""
    return {"name": container, "ready": True, "state": {"running": {}}}


KEY = Key("default", "demo", capture_api.KIND)
