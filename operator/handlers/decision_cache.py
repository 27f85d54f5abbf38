"""Cache of the last decision about each object; an entry is valid while its inputs are unchanged.

Planning and rendering an object takes tens of milliseconds, and hundreds of objects are reconciled several times a
minute. The rendered children are stored compressed.
"""

from dataclasses import replace
from typing import Any, Final

from specdecode_operator.api.deployment_status import PlanStatus
from specdecode_operator.deployment.decision import decide
from specdecode_operator.deployment.desired_state import ClusterState, DesiredState, PackedChildren
from specdecode_operator.deployment.parsed_deployment import ParsedDeployment
from specdecode_operator.problems import InvalidSpecError

_NO_CHILDREN: Final = PackedChildren.of([])


class DecisionCache:
    """The latest desired state of one object."""

    def __init__(self) -> None:
        self._asked: tuple[Any, ...] | None = None
        self._previous: PlanStatus | None = None
        """Plan in the status when the decision was made."""
        self._latest: DesiredState | None = None
        self._packed = _NO_CHILDREN

    def decide(self, parent: ParsedDeployment, cluster: ClusterState) -> DesiredState:
        """Return what `decision.decide` returns."""
        # A policy may change the speculation in force, and the generation of the object stays the same.
        spec = parent.spec
        speculation = spec.speculation if parent.by_policy and not isinstance(spec, InvalidSpecError) else None
        asked = (
            *(parent.uid, parent.generation, parent.raw_spec, parent.suspended_for),
            *(speculation, parent.by_policy, parent.trained_draft, cluster),
        )
        # A decision stays the same once its own plan is in the status.
        latest = self._latest
        plans = (self._previous, latest.outcome.plan_status if latest else None)
        if latest is not None and self._asked == asked and parent.status.plan in plans:
            return replace(latest, children=self._packed.unread())
        desired = decide(parent, cluster)
        self._packed = PackedChildren.of(desired.children)
        plan = desired.outcome.plan_status
        # An equal copy from the status would take several kB more.
        self._previous = plan if parent.status.plan == plan else parent.status.plan
        self._asked, self._latest = asked, replace(desired, children=[])
        return desired
