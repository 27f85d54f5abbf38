"""What should exist for one SpecDecodeDeployment, decided once and carried out as it is."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdecode_operator.api.base import Body
from specdecode_operator.api.status.deployment import PlanStatus
from specdecode_operator.deployment.conditions import ConditionUpdate
from specdecode_operator.deployment.objects.workload import WORKLOAD_KINDS
from specdecode_operator.deployment.pods.gate import Held
from specdecode_operator.deployment.pods.readiness import Readiness
from specdecode_operator.deployment.pods.rollback import Failure
from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.sizing.choice.plan import Plan


@dataclass(frozen=True)
class Launch:
    """The plan of this spec is in force."""

    facts: Facts
    plan: Plan
    plan_status: PlanStatus


@dataclass(frozen=True)
class RolledBack:
    """Engines of this spec never served: the workload that served last is put back."""

    facts: Facts
    plan_status: PlanStatus
    failure: Failure


@dataclass(frozen=True)
class Gated:
    """Engines of this spec wait at the gate: the workload that serves stays."""

    facts: Facts
    plan_status: PlanStatus
    launch: Launch
    """What would be launched, for the capture that judges."""

    held: Held


@dataclass(frozen=True)
class NotLaunched:
    """Nothing is launched for this spec; a workload of an earlier one stays meanwhile."""

    readiness: Readiness
    plan_status: PlanStatus | None = None


Outcome = Launch | RolledBack | Gated | NotLaunched


@dataclass(frozen=True)
class DesiredState:
    """What should exist for one SpecDecodeDeployment, and what its status says before anything runs."""

    outcome: Outcome
    conditions: list[ConditionUpdate]
    children: Sequence[Body] = field(default_factory=list)
    """Objects that must exist, in the order of their creation."""

    @property
    def workload(self) -> Body | None:
        """The Deployment or LeaderWorkerSet that is to run the engines."""
        # It is the last to be created, and of children that are packed only those are read that are looked at.
        return next((child for child in reversed(self.children) if child["kind"] in WORKLOAD_KINDS), None)
