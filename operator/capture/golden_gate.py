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
from specdecode_operator.api.capture import Regressed, RegressionStatus, SpecDecodeCaptureSpec
from specdecode_operator.api.deployment import Gate, Key
from specdecode_operator.api.deployment_status import ConditionStatus
from specdecode_operator.capture.comparison.regression import AGAINST_MOUNT, AGAINST_VARIABLE
from specdecode_operator.capture.observation import Capture, read_capture
from specdecode_operator.capture.volumes import claim_of
from specdecode_operator.cluster.drift import is_owned
from specdecode_operator.cluster.manifests import owner_reference, with_new_hash
from specdecode_operator.cluster.resources import MANAGED_BY_LABEL, MANAGER
from specdecode_operator.deployment.conditions import FALSE, TRUE, UNKNOWN, Blocked, ConditionUpdate
from specdecode_operator.deployment.desired_state import DesiredState, Gated, NotLaunched
from specdecode_operator.deployment.rollout.rollout_gate import GateCapture, GateState

HOLDS: Final = "Holds"
_VOLUME: Final = "specdecode-against"
OWN_VOLUME: Final = "specdecode-capture"


def golden_blocked(spec: SpecDecodeCaptureSpec, golden: Body | None) -> Blocked | None:
    """Return what blocks holding a capture against another one; its object tells where the files are.

    It is looked at before a GPU is taken.
    """
    if spec.against is None:
        return None
    field = f"spec.against.capture: {spec.against.capture}"
    if golden is None:
        message = f"{field}: there is no SpecDecodeCapture of this name in the namespace; goes on when it succeeded"
        return Blocked("GoldenNotFound", message)
    known = read_capture(golden)
    ended = known.ended
    if ended is None:
        return Blocked("GoldenNotReady", f"{field}: it has not ended; goes on when it succeeded")
    if ended.status is not ConditionStatus.TRUE or known.status.claim is None:
        message = f"{field}: it failed ({ended.reason}): take another golden capture"
        return Blocked("GoldenFailed", message, permanent=True)
    if other := _differences(spec, known):
        message = f"{field}: {other}: take another golden capture, or use its workload and seed here"
        return Blocked("GoldenDiffers", message, permanent=True)
    return None


def _differences(spec: SpecDecodeCaptureSpec, golden: Capture) -> str | None:
    """Return what of a golden capture is not as here; None where all is."""
    try:
        other = SpecDecodeCaptureSpec.parse(golden.spec, newer=True)
    except ValidationError:
        return "this operator cannot read its spec"
    if len(golden.spec.get("arms") or ()) > 1:
        return "it has several arms"
    if other.workload != spec.workload:
        return "it has another workload"
    return f"its seed is {other.seed}, not {spec.seed}" if other.seed != spec.seed else None


def with_golden(job: Body, capture: Capture, spec: SpecDecodeCaptureSpec, golden: Body | None) -> Body:
    """Return the Job of a capture with the golden files in its load generator, to be read alone."""
    if spec.against is None or golden is None:
        return job
    known = read_capture(golden)
    limits = spec.against.max_loss_percent
    told: dict[str, Any] = {
        "capture": known.key.name,
        "folder": f"{known.key.namespace}/{known.key.name}",
        "limits": limits.model_dump(mode="json"),
    }
    pod = job["spec"]["template"]["spec"]
    load = pod["containers"][0]
    # A pod that has one claim as two volumes may wait for the second one for good.
    is_own = known.status.claim == claim_of(capture, spec.storage)
    claim = {"claimName": known.status.claim, "readOnly": True}
    added = [] if is_own else [{"name": _VOLUME, "persistentVolumeClaim": claim}]
    name = OWN_VOLUME if is_own else _VOLUME
    with_files = {
        **load,
        "env": [*load["env"], {"name": AGAINST_VARIABLE, "value": json.dumps(told, sort_keys=True)}],
        "volumeMounts": [*load["volumeMounts"], {"name": name, "mountPath": AGAINST_MOUNT, "readOnly": True}],
    }
    changed = {
        **pod,
        "containers": [with_files, *pod["containers"][1:]],
        "volumes": [*pod["volumes"], *added],
    }
    template = {**job["spec"]["template"], "spec": changed}
    return with_new_hash({**job, "spec": {**job["spec"], "template": template}})


def holds_condition(regression: RegressionStatus | None, *, over: bool) -> ConditionUpdate:
    """Return whether a capture's engine serves as well as that of the golden one; unknown while nobody can tell."""
    if regression is None:
        message = "nothing was judged: the condition Succeeded tells more" if over else "it is judged at its end"
        return ConditionUpdate(HOLDS, UNKNOWN, "NotJudged", message)
    status = {Regressed.HOLDS: TRUE, Regressed.REGRESSED: FALSE}.get(regression.verdict, UNKNOWN)
    return ConditionUpdate(HOLDS, status, regression.verdict, f"against {regression.against}: {regression.message}")


_NAME: Final = re.compile(r".+-gate-[0-9a-f]{10}")
_OF_THE_GOLDEN: Final = ("workload", "seed", "record", "deploymentDuringCapture", "deadlineSeconds", "backoffLimit")
_FAILED: Final = "the capture failed"
_NOT_MADE: Final = GateCapture(
    holds=False,
    failed=True,
    message="it was not made by this deployment, or is not as its gate asks: delete it, and it is made anew",
)


@dataclass(frozen=True)
class GateObjects:
    """What the cache holds for the gate of one object."""

    captures: Sequence[Body] = ()
    """All of the object, and those of others that have the name of one which judges for it."""

    golden: Body | None = None


@dataclass(frozen=True)
class GateWrites:
    """What is to be done for the gate of one object."""

    create: Body | None = None
    delete: list[Body] = field(default_factory=list)


def is_of_gate(capture: Capture) -> bool:
    """Whether a capture has the name of one that judges at a gate."""
    return _NAME.fullmatch(capture.key.name) is not None and capture.spec.get("against") is not None


def gate_state(key: Key, uid: str, gate: Gate | None, seen: GateObjects) -> GateState:
    """Return what the captures of an object say to its gate; what others made in their place is not believed."""
    if gate is None:
        return GateState()
    named = [(body, read_capture(body)) for body in seen.captures if _NAME.fullmatch(body["metadata"]["name"])]
    judging = {
        each.key.name: _judgement(each) if is_owned(body, uid) and _is_as_made(key, gate, each) else _NOT_MADE
        for body, each in named
    }
    return GateState(judging, _golden_missing(seen.golden))


def _is_as_made(key: Key, gate: Gate, capture: Capture) -> bool:
    """Whether a capture asks for what the gate asks: its workload and seed are looked at before it starts."""
    asked = {"capture": gate.capture, "max_loss_percent": gate.max_loss_percent.model_dump()}
    spec = capture.spec
    try:
        against = Gate.parse(spec.get("against"), newer=True).model_dump(exclude={"override"})
    except ValueError:
        return False
    is_plain = not spec.get("arms") and (spec.get("repetitions") or 1) == 1
    return spec.get("deployment") == key.name and is_plain and against == asked


def _judgement(capture: Capture) -> GateCapture:
    said = {each.type: each for each in capture.status.conditions}
    ended, regression = capture.ended, capture.status.regression
    if ended is not None:
        if ended.status is not ConditionStatus.TRUE:
            return GateCapture(holds=False, failed=True, message=f"{_FAILED} ({ended.reason}: {ended.message})")
        if regression is None:
            return GateCapture(holds=False, failed=True, message="it ended and has judged nothing")
        holds = regression.verdict is Regressed.HOLDS
        message = regression.message if holds else f"{regression.verdict.value}: {regression.message}"
        return GateCapture(holds, not holds, message)
    ready, stalled = said.get("Ready"), said.get("Stalled")
    if stalled is not None and stalled.status is ConditionStatus.TRUE:
        return GateCapture(holds=False, failed=True, message=f"{stalled.reason}: {stalled.message}")
    # Its message counts requests, which is no news to the deployment.
    return GateCapture(holds=False, failed=False, message=ready.reason if ready is not None else "Pending")


def _golden_missing(golden: Body | None) -> str | None:
    if golden is None:
        return "there is no SpecDecodeCapture of this name in the namespace; goes on when it succeeded"
    ended = read_capture(golden).ended
    if ended is None:
        return "it has not ended; goes on when it succeeded"
    if ended.status is not ConditionStatus.TRUE:
        return f"it failed ({ended.reason}); goes on when another one is named"
    return None


def gate_writes(key: Key, uid: str, gate: Gate | None, desired: DesiredState, seen: GateObjects) -> GateWrites:
    """Return which capture is to be made, and which ones nobody waits for any more: those may have GPUs.

    It is safe to carry out twice: the second creation meets the first.
    """
    outcome = desired.outcome
    if isinstance(outcome, NotLaunched):
        return GateWrites()  # what is away for a while begins nothing anew
    mine = [body for body in seen.captures if _NAME.fullmatch(body["metadata"]["name"]) and is_owned(body, uid)]
    wanted = outcome.held.capture if isinstance(outcome, Gated) else None
    left = [body for body in mine if read_capture(body).ended is None and body["metadata"]["name"] != wanted]
    is_there = any(body["metadata"]["name"] == wanted for body in seen.captures)
    if wanted is None or gate is None or is_there or seen.golden is None or _golden_missing(seen.golden) is not None:
        return GateWrites(delete=left)
    return GateWrites(gate_capture(key, uid, wanted, gate, seen.golden), mine)


def gate_capture(key: Key, uid: str, name: str, gate: Gate, golden: Body) -> Body:
    """Return the capture that judges: the golden one's load, once more, of the engines that wait.

    It is owned, and goes with its deployment, with its files.
    """
    spec: dict[str, Any] = golden.get("spec") or {}
    storage = dict(spec.get("storage") or {})
    if "existingClaim" not in storage:
        storage["retain"] = False
    against = gate.model_dump(by_alias=True, mode="json", exclude={"override"})
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
            "against": against,
        },
    }
