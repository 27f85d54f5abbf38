"""The captures that judge engines at a gate: what they are, which are to be made, and what they have found."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from specdecode_operator.api import base
from specdecode_operator.api import capture as capture_api
from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Gate
from specdecode_operator.api.golden import Regressed
from specdecode_operator.api.key import Key
from specdecode_operator.api.status.deployment import ConditionStatus
from specdecode_operator.capture.control.capture import Capture, read_capture
from specdecode_operator.deployment.desired_state import DesiredState, Gated, NotLaunched
from specdecode_operator.deployment.pods.gate import GateCapture, GateState
from specdecode_operator.kube.drift import is_owned
from specdecode_operator.kube.labels import MANAGED_BY_LABEL, MANAGER
from specdecode_operator.kube.manifests import owner_reference

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
