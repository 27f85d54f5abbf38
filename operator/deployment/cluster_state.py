"""All of the cluster that a decision depends on, besides the object itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specdecode_operator.api.base import Body
from specdecode_operator.deployment.models.model_facts import SiteFacts
from specdecode_operator.deployment.pods.gate import UNGATED, GateState
from specdecode_operator.deployment.pods.rollback import LastGood
from specdecode_operator.deployment.spec.model_sources import ModelSource
from specdecode_operator.kube.nodes import NodeFacts, NodesFrom
from specdecode_operator.kube.pod_policy import NONE_ALLOWED
from specdecode_operator.sizing.pair.calibration import UNCALIBRATED, Calibration


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
    """What podTemplate may ask for beyond `kube/pod_policy.py`, by name."""

    nodes_from: NodesFrom = NodesFrom.CLUSTER
    has_leader_worker_sets: bool = False
    operator_image: str | None = None
    """The image that this operator runs from, for replays; None where it cannot tell."""
