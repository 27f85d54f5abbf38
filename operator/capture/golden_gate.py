"""Compare captures with a golden capture, and create the captures that judge a rollout at its gate.

``spec.against`` of a capture names the golden capture; its volume is mounted into the pod.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import ValidationError

from specdecode_operator.api import base
from specdecode_operator.api import capture as capture_api
from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import Regressed, SpecDecodeCaptureSpec
from specdecode_operator.api.deployment import Gate, Key
from specdecode_operator.capture.comparison.regression import AGAINST_MOUNT, AGAINST_VARIABLE
from specdecode_operator.capture.observation import Capture, read_capture
from specdecode_operator.capture.volumes import claim_of
from specdecode_operator.cluster.drift import is_owned
from specdecode_operator.cluster.manifests import owner_reference, with_new_hash
from specdecode_operator.cluster.resources import MANAGED_BY_LABEL, MANAGER
from specdecode_operator.deployment.conditions import TRUE, Blocked
from specdecode_operator.deployment.desired_state import DesiredState, Gated, NotLaunched
from specdecode_operator.deployment.rollout.rollout_gate import GateCapture, GateState

_NAME: Final = re.compile(r".+-gate-[0-9a-f]{10}")
_OF_THE_GOLDEN: Final = ("workload", "seed", "record", "deploymentDuringCapture", "deadlineSeconds", "backoffLimit")


def golden_blocked(spec: SpecDecodeCaptureSpec, golden: Body | None) -> Blocked | None:
    """Return what blocks a comparison with the golden capture, before a GPU is allocated."""
    if spec.against is None:
        return None
    field = f"spec.against.capture: {spec.against.capture}"
    if golden is None:
        message = (
            f"{field}: there is no SpecDecodeCapture of this name in the namespace; continues when it has succeeded"
        )
        return Blocked("GoldenNotFound", message)
    known = read_capture(golden)
    ended = known.ended
    if ended is None:
        return Blocked("GoldenNotReady", f"{field}: it has not ended; continues when it has succeeded")
    if ended.status is not TRUE or known.status.claim is None:
        message = f"{field}: it failed ({ended.reason}): take another golden capture"
        return Blocked("GoldenFailed", message, permanent=True)
    if difference := _difference(spec, known):
        message = f"{field}: {difference}: take another golden capture, or use its workload and seed here"
        return Blocked("GoldenDiffers", message, permanent=True)
    return None


def _difference(spec: SpecDecodeCaptureSpec, golden: Capture) -> str | None:
    try:
        other = SpecDecodeCaptureSpec.parse(golden.spec, newer=True)
    except ValidationError:
        return "this operator cannot read its spec"
    if golden.is_live:
        return "it recorded users' requests, which cannot be sent again"
    if len(golden.spec.get("arms") or ()) > 1:
        return "it has several arms"
    if other.workload != spec.workload:
        return "it has another workload"
    return f"its seed is {other.seed}, not {spec.seed}" if other.seed != spec.seed else None


def with_golden(job: Body, capture: Capture, spec: SpecDecodeCaptureSpec, golden: Body | None) -> Body:
    """Return the Job of a capture with the golden files mounted read-only in its load generator."""
    if spec.against is None or golden is None:
        return job
    known = read_capture(golden)
    told: dict[str, Any] = {
        "capture": known.key.name,
        "folder": f"{known.key.namespace}/{known.key.name}",
        "limits": spec.against.max_loss_percent.model_dump(mode="json"),
    }
    pod = job["spec"]["template"]["spec"]
    load, volumes, name = pod["containers"][0], pod["volumes"], "specdecode-capture"
    # A pod that mounts one claim as two volumes may wait for the second one forever.
    if known.status.claim != claim_of(capture, spec.storage):
        name, claim = "specdecode-against", {"claimName": known.status.claim, "readOnly": True}
        volumes = [*volumes, {"name": name, "persistentVolumeClaim": claim}]
    with_files = {
        **load,
        "env": [*load["env"], {"name": AGAINST_VARIABLE, "value": json.dumps(told, sort_keys=True)}],
        "volumeMounts": [*load["volumeMounts"], {"name": name, "mountPath": AGAINST_MOUNT, "readOnly": True}],
    }
    changed = {**pod, "containers": [with_files, *pod["containers"][1:]], "volumes": volumes}
    template = {**job["spec"]["template"], "spec": changed}
    return with_new_hash({**job, "spec": {**job["spec"], "template": template}})


@dataclass(frozen=True)
class GateObjects:
    """Cached objects for the gate of one deployment."""

    captures: Sequence[Body] = ()  # all of the deployment, and foreign ones with the name of a gate capture
    golden: Body | None = None


@dataclass(frozen=True)
class GateWrites:
    """Writes for the gate of one deployment."""

    create: Body | None = None
    delete: list[Body] = field(default_factory=list)


def is_of_gate(capture: Capture) -> bool:
    """Return whether a capture has the name of one that judges at a gate."""
    return _NAME.fullmatch(capture.key.name) is not None and capture.spec.get("against") is not None


def gate_state(key: Key, uid: str, gate: Gate | None, seen: GateObjects) -> GateState:
    """Return the verdicts of a deployment's gate captures; foreign captures in their place are not trusted."""
    if gate is None:
        return GateState()
    judging = {
        body["metadata"]["name"]: _judgement(key, gate, read_capture(body), is_own=is_owned(body, uid))
        for body in seen.captures
        if _NAME.fullmatch(body["metadata"]["name"])
    }
    return GateState(judging, _golden_missing(seen.golden))


def _judgement(key: Key, gate: Gate, capture: Capture, *, is_own: bool) -> GateCapture:
    if not is_own or not _is_as_made(key, gate, capture):
        message = "not created by this deployment, or not as its gate requires; delete it to have it created again"
        return GateCapture(holds=False, failed=True, message=message)
    ended, regression = capture.ended, capture.status.regression
    said = {each.type: each for each in capture.status.conditions}
    ready, stalled = said.get("Ready"), said.get("Stalled")
    holds, failed = False, True
    if ended is not None and ended.status is not TRUE:
        message = f"the capture failed ({ended.reason}: {ended.message})"
    elif ended is not None and regression is None:
        message = "the capture ended without a verdict"
    elif ended is not None and regression is not None:
        holds = regression.verdict is Regressed.HOLDS
        failed = not holds
        message = regression.message if holds else f"{regression.verdict.value}: {regression.message}"
    elif ready is not None and stalled is not None and stalled.status is TRUE:
        message = f"{ready.reason}: {ready.message}"
    else:
        # The message of Ready counts requests, which would update the deployment's status all the time.
        failed, message = False, ready.reason if ready is not None else "Pending"
    return GateCapture(holds, failed, message)


def _is_as_made(key: Key, gate: Gate, capture: Capture) -> bool:
    """Return whether a capture matches the gate; workload and seed are checked before it starts."""
    asked = {"capture": gate.capture, "max_loss_percent": gate.max_loss_percent.model_dump()}
    spec = capture.spec
    try:
        against = Gate.parse(spec.get("against"), newer=True).model_dump(exclude={"override"})
    except ValueError:
        return False
    is_plain = not spec.get("arms") and (spec.get("repetitions") or 1) == 1
    return spec.get("deployment") == key.name and is_plain and against == asked


def _golden_missing(golden: Body | None) -> str | None:
    if golden is None:
        return "there is no SpecDecodeCapture of this name in the namespace; continues when it has succeeded"
    ended = read_capture(golden).ended
    if ended is None:
        return "it has not ended; continues when it has succeeded"
    if ended.status is not TRUE:
        return f"it failed ({ended.reason}); name another capture"
    return None


def gate_writes(key: Key, uid: str, gate: Gate | None, desired: DesiredState, seen: GateObjects) -> GateWrites:
    """Return the gate capture to create, and those to delete because no gate waits for them and they may hold GPUs."""
    outcome = desired.outcome
    if isinstance(outcome, NotLaunched):
        return GateWrites()  # engines that are away temporarily start no new capture
    mine = [body for body in seen.captures if _NAME.fullmatch(body["metadata"]["name"]) and is_owned(body, uid)]
    wanted = outcome.held.capture if isinstance(outcome, Gated) else None
    left = [body for body in mine if read_capture(body).ended is None and body["metadata"]["name"] != wanted]
    is_there = any(body["metadata"]["name"] == wanted for body in seen.captures)
    if wanted is None or gate is None or is_there or seen.golden is None or _golden_missing(seen.golden) is not None:
        return GateWrites(delete=left)
    return GateWrites(gate_capture(key, uid, wanted, gate, seen.golden), mine)


def gate_capture(key: Key, uid: str, name: str, gate: Gate, golden: Body) -> Body:
    """Return the capture that judges the waiting engines under the golden capture's load; the deployment owns it."""
    spec: dict[str, Any] = golden.get("spec") or {}
    storage = dict(spec.get("storage") or {})
    if "persistentVolumeClaim" not in storage:
        storage["retain"] = False
    return {
        "apiVersion": base.API_VERSION,
        "kind": capture_api.KIND,
        "metadata": {
            "namespace": key.namespace,
            "name": name,
            "labels": {MANAGED_BY_LABEL: MANAGER},
            "ownerReferences": [owner_reference(key, uid)],
        },
        "spec": {
            "deployment": key.name,
            **{name: spec[name] for name in _OF_THE_GOLDEN if name in spec},
            "storage": storage,
            "against": gate.model_dump(by_alias=True, mode="json", exclude={"override"}),
        },
    }
