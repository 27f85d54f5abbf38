"""What a spec comes to in a cluster: engines of it, engines of an earlier one, or what is in the way."""

from dataclasses import dataclass, field

from specdecode_operator.api.base import Body
from specdecode_operator.api.status import PlanStatus
from specdecode_operator.deployment.conditions import Finding
from specdecode_operator.deployment.objects.workload import STARTERS
from specdecode_operator.deployment.pods.readiness import Summary, working
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
class Obstacle:
    """A spec that is not launched, and why. Engines of an earlier spec stay meanwhile."""

    summary: Summary
    told: PlanStatus | None = None


@dataclass(frozen=True)
class Intent:
    """What a spec comes to in this cluster."""

    course: Launch | RolledBack | Obstacle
    findings: list[Finding]
    children: list[Body] = field(default_factory=list)

    @property
    def starter(self) -> Body | None:
        """What is to start the engines."""
        return next((child for child in self.children if child["kind"] in STARTERS), None)


def blocked(intent: Intent, summary: Summary) -> Intent:
    """Return the same intent with something in its way that only the cluster showed."""
    return Intent(Obstacle(summary, intent.course.told), intent.findings)


def broken(parent: Parent, error: Exception) -> Intent:
    """Return the intent for an object that the operator itself stumbles over."""
    message = f"the operator failed on this object ({type(error).__name__}); its log tells more, please report it"
    return Intent(Obstacle(working("InternalError", message), parent.status.plan), [])
