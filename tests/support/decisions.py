"""What becomes of a SpecDecodeDeployment in a cluster with a node of H100s and one of H200s."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment_status import Condition, SpecDecodeDeploymentStatus
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.deployment import decision
from specdecode_operator.deployment.desired_state import ClusterState, DesiredState
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import ParsedDeployment, parse_deployment
from specdecode_operator.deployment.status import compose_status
from specdecode_operator.sizing.calibration import UNCALIBRATED, Calibration
from tests.support.objects import H100, H200

OPERATOR_IMAGE = "localhost/operator:1"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
H100_NODE, H200_NODE = NodeFacts("h100-0", H100, 8), NodeFacts("h200-0", H200, 8)


def desired_state(
    owner: ParsedDeployment,
    nodes: tuple[NodeFacts, ...] = (),
    entries: Mapping[str, str] = MappingProxyType({}),
    pods: Sequence[Body] = (),
    calibration: Calibration = UNCALIBRATED,
    **cluster: Any,
) -> DesiredState:
    """Return what should exist for an object in a cluster; the rest as ClusterState has it."""
    known: dict[str, Any] = {"operator_image": OPERATOR_IMAGE, "has_resource_claims": True, **cluster}
    given = ClusterState(nodes, entries, pods, calibration=calibration, **known)
    return decision.decide(owner, given)


def decide(
    body: dict[str, Any],
    observation: Observation | None = None,
    nodes: tuple[NodeFacts, ...] = (H100_NODE, H200_NODE),
    **cluster: Any,
) -> tuple[DesiredState, SpecDecodeDeploymentStatus, dict[str, Condition]]:
    """Return what an object comes to there, its status, and that one's conditions by type."""
    owner = parse_deployment(body)
    desired = desired_state(owner, nodes, **cluster)
    status = compose_status(owner, desired, observation or Observation(), NOW)
    return desired, status, {condition.type: condition for condition in status.conditions}


def summary(conditions: dict[str, Condition]) -> tuple[str, str, str, str]:
    """Return Ready with its reason, and the two helpers."""
    ready = conditions["Ready"]
    return ready.status, ready.reason, conditions["Reconciling"].status, conditions["Stalled"].status
