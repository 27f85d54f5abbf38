"""What a spec comes to in a cluster: engines of it, engines of an earlier one, or what is in the way."""

from dataclasses import dataclass, field

from specdecode_operator.api.base import Body
from specdecode_operator.api.status import PlanStatus
from specdecode_operator.deployment.conditions import ConditionUpdate
from specdecode_operator.deployment.objects.workload import WORKLOAD_KINDS
from specdecode_operator.deployment.pods.readiness import Readiness, working
from specdecode_operator.deployment.pods.rollback import Failure
from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.deployment.spec.parent import Parent
from specdecode_operator.sizing.choice.plan import Plan


@dataclass(frozen=True)
class Launch:
    """A spec whose plan is in force, and what the status says of the plan."""

    facts: Facts
    plan: Plan
    told: PlanStatus


@dataclass(frozen=True)
class RolledBack:
    """A spec whose engines never served: those that served last are put back."""

    facts: Facts
    told: PlanStatus
    failure: Failure


@dataclass(frozen=True)
class NotLaunched:
    """A spec that is not launched, and why. Engines of an earlier spec stay meanwhile."""

    summary: Readiness
    told: PlanStatus | None = None


@dataclass(frozen=True)
class DesiredState:
    """What a spec comes to in this cluster."""

    outcome: Launch | RolledBack | NotLaunched
    conditions: list[ConditionUpdate]
    children: list[Body] = field(default_factory=list)

    @property
    def workload(self) -> Body | None:
        """What is to start the engines."""
        return next((child for child in self.children if child["kind"] in WORKLOAD_KINDS), None)


def blocked(desired: DesiredState, summary: Readiness) -> DesiredState:
    """Return the same desired with something in its way that only the cluster showed."""
    return DesiredState(NotLaunched(summary, desired.outcome.told), desired.conditions)


def broken(parent: Parent, error: Exception) -> DesiredState:
    """Return the desired for an object that the operator itself stumbles over."""
    message = f"the operator failed on this object ({type(error).__name__}); its log tells more, please report it"
    return DesiredState(NotLaunched(working("InternalError", message), parent.status.plan), [])
