"""Hold back new engines until a capture finds them as good as a golden capture.

No state is stored: the name of the judging capture is derived from the engines and the gate, and its status holds
the verdict.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Gate, Key, SpecDecodeDeploymentSpec
from specdecode_operator.cluster.drift import content_hash
from specdecode_operator.deployment.conditions import FALSE, TRUE, UNKNOWN, ConditionUpdate
from specdecode_operator.deployment.rollout.readiness import Readiness, stalled, working
from specdecode_operator.deployment.rollout.rollback import LastGood, served_before
from specdecode_operator.deployment.rollout.rollout_progress import Rollout, serving_hash

GATE_FAILED: Final = "GateFailed"
_LONGEST_NAME: Final = 30


@dataclass(frozen=True)
class GateCapture:
    """Verdict of a gate's capture."""

    holds: bool
    failed: bool
    message: str


@dataclass(frozen=True)
class GateState:
    """Captures for the gate of one object, by name, and why the golden capture is missing."""

    captures: Mapping[str, GateCapture] = field(default_factory=dict)
    golden_missing: str | None = None


UNGATED: Final = GateState()


@dataclass(frozen=True)
class Held:
    """Engines that wait at the gate."""

    capture: str
    reason: str
    message: str
    failed: bool = False


def gate_capture_name(key: Key, gate: Gate, workload: Body) -> str:
    """Return the name of the capture for the engines of a workload; other engines or gates give another name."""
    asked = gate.model_dump(mode="json", exclude={"override"})
    return f"{_prefix(key)}{content_hash([key.name, serving_hash(workload), asked])[:10]}"


def may_be_of_gate(key: Key, name: str) -> bool:
    """Whether a name has the form of `gate_capture_name` for an object."""
    return re.fullmatch(rf"{re.escape(_prefix(key))}[0-9a-f]{{10}}", name) is not None


def _prefix(key: Key) -> str:
    return f"{key.name[:_LONGEST_NAME].rstrip('-')}-gate-"


def held_at_gate(
    key: Key, spec: SpecDecodeDeploymentSpec, workload: Body, last_good: LastGood | None, state: GateState
) -> Held | None:
    """Return why the engines of a workload must not replace the serving engines yet; None if they may."""
    gate = spec.rollout.gate
    if gate is None or gate.override is not None or last_good is None:
        return None
    if serving_hash(workload) == serving_hash(last_good.workload):
        return None
    name = gate_capture_name(key, gate, workload)
    judged = state.captures.get(name)
    if judged is None and state.golden_missing is not None:
        return Held(name, "GoldenNotReady", f"spec.rollout.gate.capture: {gate.capture}: {state.golden_missing}")
    if judged is None:
        return Held(name, "GateCapturing", f"capture {name} is created")
    reason = GATE_FAILED if judged.failed else "GateCapturing"
    return None if judged.holds else Held(name, reason, f"capture {name}: {judged.message}", failed=judged.failed)


def passed_condition(
    key: Key, spec: SpecDecodeDeploymentSpec, workload: Body, last_good: LastGood | None, state: GateState
) -> list[ConditionUpdate]:
    """Return the condition Gate of engines that need not wait; empty without a gate."""
    gate = spec.rollout.gate
    if gate is None:
        return []
    if gate.override is not None:
        why = f"spec.rollout.gate.override: {gate.override.reason!r}"
        message = f"Rolled out without a comparison with capture {gate.capture}; {why}"
        return [ConditionUpdate("Gate", TRUE, "Overridden", message)]
    judged = state.captures.get(gate_capture_name(key, gate, workload))
    if judged is not None and judged.holds:
        return [ConditionUpdate("Gate", TRUE, "Passed", judged.message)]
    message = f"No comparison with capture {gate.capture} needed: {served_before(last_good)}"
    return [ConditionUpdate("Gate", TRUE, "NothingToJudge", message)]


def held_condition(held: Held) -> ConditionUpdate:
    """Return the condition Gate of engines that wait or failed."""
    return ConditionUpdate("Gate", FALSE if held.failed else UNKNOWN, held.reason, held.message)


def held_readiness(held: Held, rollout: Rollout) -> Readiness:
    """Return the readiness of an object whose earlier engines serve while the new ones wait."""
    counts = rollout.earlier_engines
    if held.failed:
        fix = (
            "Rollout of this spec is stopped: change the spec, delete the capture to repeat it, or set"
            " spec.rollout.gate.override"
        )
        return stalled(held.reason, f"{counts}. {fix}; see condition Gate")
    return working(held.reason, f"{counts} until the gate decides; see condition Gate")
