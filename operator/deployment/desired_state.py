"""Desired state of a SpecDecodeDeployment, and the cluster state it is computed from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment_status import PlanStatus
from specdecode_operator.cluster.device_slices import DeviceInventory
from specdecode_operator.cluster.nodes import NodeFacts, NodesFrom
from specdecode_operator.deployment.conditions import Blocked, ConditionUpdate
from specdecode_operator.deployment.models.model_facts import SiteFacts
from specdecode_operator.deployment.models.model_locations import ModelSource
from specdecode_operator.deployment.pod_security import NONE_ALLOWED
from specdecode_operator.deployment.rollout.engine_workload import WORKLOAD_KINDS, pack_object, unpack_object
from specdecode_operator.deployment.rollout.readiness import Readiness
from specdecode_operator.deployment.rollout.rollback import Failure, LastGood
from specdecode_operator.deployment.rollout.rollout_gate import UNGATED, GateState, Held
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.enums import LiveTokenIds
from specdecode_operator.sizing.calibration import UNCALIBRATED, Calibration
from specdecode_operator.sizing.plan import Plan


@dataclass(frozen=True)
class ClusterState:
    """Cluster state that a decision depends on; equal states lead to equal decisions."""

    nodes: tuple[NodeFacts, ...] = ()
    model_facts: Mapping[str, str] = field(default_factory=dict)
    model_pods: Sequence[Body] = ()
    # Facts about the object's models from the operator's facts files; they take precedence over `model_facts`.
    site_facts: Mapping[ModelSource, SiteFacts] = field(default_factory=dict)
    downloads: Mapping[str, str] = field(default_factory=dict)
    last_good: LastGood | None = None
    gate: GateState = UNGATED
    calibration: Calibration = UNCALIBRATED
    host_paths: tuple[str, ...] = ()
    pod_template: frozenset[str] = NONE_ALLOWED
    nodes_from: NodesFrom = NodesFrom.CLUSTER
    has_leader_worker_sets: bool = False
    has_resource_claims: bool = False
    devices: DeviceInventory | None = None  # For objects that claim their GPUs; None to use the GPUs of the nodes
    live_token_ids: LiveTokenIds = LiveTokenIds.NONE  # allowed in the object's namespace
    operator_image: str | None = None  # Image of this operator, for Jobs and replays; None if unknown


@dataclass(frozen=True)
class Launch:
    """Run the engines of this spec."""

    facts: Facts
    plan: Plan
    plan_status: PlanStatus


@dataclass(frozen=True)
class RolledBack:
    """Run the last workload that served, because the engines of this spec never did."""

    facts: Facts
    plan_status: PlanStatus
    failure: Failure


@dataclass(frozen=True)
class Gated:
    """Keep the workload that serves while the engines of this spec wait at the gate."""

    facts: Facts
    plan_status: PlanStatus
    launch: Launch
    held: Held


@dataclass(frozen=True)
class InCanary:
    """Keep the workload that serves while a canary of this spec's engines serves a share of the traffic."""

    facts: Facts
    plan_status: PlanStatus
    launch: Launch
    attempt: str
    promoted: Body  # The workload that replaces the earlier one if the canary passes
    waits: Blocked | None = None  # Why there is no canary at present


@dataclass(frozen=True)
class NotLaunched:
    """Launch no engines for this spec; a workload of an earlier spec stays."""

    readiness: Readiness
    plan_status: PlanStatus | None = None


Outcome = Launch | RolledBack | Gated | InCanary | NotLaunched


class PackedChildren(Sequence[Body]):
    """Compressed children, each unpacked when it is used. The ConfigMap of the plan alone has tens of kilobytes."""

    def __init__(self, packed: Sequence[bytes], kinds: frozenset[str]) -> None:
        self._packed = packed
        self.kinds = kinds
        self._read: dict[int, Body] = {}

    @classmethod
    def of(cls, children: Sequence[Body]) -> "PackedChildren":
        """Return packed children."""
        return cls([pack_object(child) for child in children], frozenset(child["kind"] for child in children))

    def unread(self) -> "PackedChildren":
        """Return the same children; the objects that were unpacked here are not shared."""
        return PackedChildren(self._packed, self.kinds)

    def __len__(self) -> int:
        """Return the number of children."""
        return len(self._packed)

    @overload
    def __getitem__(self, index: int) -> Body: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Body]: ...
    def __getitem__(self, index: int | slice) -> Body | Sequence[Body]:
        """Return one child, or the children of a slice; repeated calls return the same objects."""
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        if place not in self._read:
            self._read[place] = unpack_object(self._packed[place])
        return self._read[place]


@dataclass(frozen=True)
class DesiredState:
    """Objects that should exist for one SpecDecodeDeployment, and the conditions that follow from the spec."""

    outcome: Outcome
    conditions: list[ConditionUpdate]
    children: Sequence[Body] = field(default_factory=list)
    draft_order: str = ""  # draft.json for the ConfigMap with the plan; empty without one

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of the children."""
        children = self.children
        return children.kinds if isinstance(children, PackedChildren) else frozenset(each["kind"] for each in children)

    @property
    def workload(self) -> Body | None:
        """The Deployment or LeaderWorkerSet that should run the engines."""
        # The workload is the last child. Packed children are unpacked on access, so search from the end.
        return next((child for child in reversed(self.children) if child["kind"] in WORKLOAD_KINDS), None)
