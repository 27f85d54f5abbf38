"""Desired state of a SpecDecodeDeployment, and the cluster state it is computed from.

`DesiredState` is immutable. `EngineChildren` derives the objects to apply from it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment_status import PlanStatus
from specdecode_operator.cluster.nodes import NodeFacts, NodesFrom
from specdecode_operator.deployment.conditions import ConditionUpdate
from specdecode_operator.deployment.models.model_facts import SiteFacts
from specdecode_operator.deployment.models.model_locations import ModelSource
from specdecode_operator.deployment.pod_security import NONE_ALLOWED
from specdecode_operator.deployment.rollout.engine_workload import WORKLOAD_KINDS
from specdecode_operator.deployment.rollout.readiness import Readiness
from specdecode_operator.deployment.rollout.rollback import Failure, LastGood
from specdecode_operator.deployment.rollout.rollout_gate import UNGATED, GateState, Held
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.sizing.calibration import UNCALIBRATED, Calibration
from specdecode_operator.sizing.plan import Plan


@dataclass(frozen=True)
class ClusterState:
    """What one SpecDecodeDeployment finds in its cluster. Two that are equal lead to the same decision."""

    nodes: tuple[NodeFacts, ...] = ()
    model_facts: Mapping[str, str] = field(default_factory=dict)
    """What Jobs have read of models in the object's namespace, by the key of their source."""

    model_pods: Sequence[Body] = ()
    """Pods of the object that read a model or download one."""

    site_facts: Mapping[ModelSource, SiteFacts] = field(default_factory=dict)
    """What the operator's facts files say of the object's models. They come before what Jobs have read."""

    downloads: Mapping[str, str] = field(default_factory=dict)
    """Commits in the object's cache of models, by the key of their source."""

    last_good: LastGood | None = None
    gate: GateState = UNGATED
    calibration: Calibration = UNCALIBRATED
    host_paths: tuple[str, ...] = ()
    """Directories of nodes that specs may mount."""

    pod_template: frozenset[str] = NONE_ALLOWED
    """What podTemplate may ask for beyond `deployment/pod_security.py`, by name."""

    nodes_from: NodesFrom = NodesFrom.CLUSTER
    has_leader_worker_sets: bool = False
    operator_image: str | None = None
    """The image that this operator runs from, for replays; None where it cannot tell."""


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
