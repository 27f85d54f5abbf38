"""Whether another speculation can be had where the engines are: it is planned before it is taken."""

from dataclasses import replace
from typing import Final

from specdecode_operator.api.crd.admission import broken_rules
from specdecode_operator.api.speculation import Speculation
from specdecode_operator.api.status.deployment import PlanStatus
from specdecode_operator.deployment.conditions import FALSE
from specdecode_operator.deployment.desired_state import DesiredState, Launch
from specdecode_operator.deployment.spec.engine_fields import speculating
from specdecode_operator.deployment.spec.parent import Parent
from specdecode_operator.problems import InvalidSpecError

_PLACE: Final = (
    "product",
    "tensor",
    "pipeline",
    "data",
    "gpus_per_replica",
    "nodes_per_replica",
    "target_quantization",
)


def with_speculation(parent: Parent, speculation: Speculation) -> Parent | str:
    """Return an object as if its spec said so, or why no API server would take that."""
    written = parent.written_spec or parent.spec
    if isinstance(written, InvalidSpecError):
        return str(written)
    spec = speculating(written, speculation)
    if broken := "; ".join(map(str, broken_rules(spec, "spec"))):
        return broken
    raw = {**parent.raw_spec, "speculation": speculation.model_dump(mode="json", by_alias=True, exclude_unset=True)}
    return replace(parent, raw_spec=raw, spec=spec, written_spec=written, by_policy=True)


def not_had(desired: DesiredState, in_force: PlanStatus | None) -> str:
    """Return why a speculation cannot take the place of the one in force; an empty text where it can."""
    if not isinstance(desired.outcome, Launch):
        return refusal(desired) or "it cannot be launched now"
    plan = desired.outcome.plan_status
    others = [name for name in _PLACE if in_force is None or getattr(plan, name) != getattr(in_force, name)]
    if not others:
        return ""
    words = ", ".join(f"{name.replace('_', ' ')} {getattr(plan, name)}" for name in others)
    return f"it would not run where it was measured, but with {words}"


def refusal(desired: DesiredState) -> str:
    """Return why a spec is not accepted or fits nowhere; an empty text where it may only wait."""
    named = {each.type: each for each in desired.conditions}
    told = [named[each] for each in ("Accepted", "Planned") if each in named]
    refused = next((each for each in told if each.status is FALSE), None)
    return f"{refused.reason}: {refused.message}" if refused else ""
