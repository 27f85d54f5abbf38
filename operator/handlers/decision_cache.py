"""Cache of the last decision about each object; an entry is valid while its inputs are unchanged.

Planning and rendering an object takes tens of milliseconds, and hundreds of objects are reconciled several times a
minute. The rendered children are stored compressed.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, overload

from specdecode_operator.api.base import Body
from specdecode_operator.deployment.decision import decide
from specdecode_operator.deployment.desired_state import ClusterState, DesiredState
from specdecode_operator.deployment.parsed_deployment import ParsedDeployment
from specdecode_operator.deployment.rollout.engine_workload import pack_object, unpack_object
from specdecode_operator.problems import InvalidSpecError


class PackedChildren(Sequence[Body]):
    """Compressed children, each unpacked when it is used. The ConfigMap of the plan alone has tens of kilobytes."""

    def __init__(self, packed: Sequence[bytes]) -> None:
        self._packed = packed
        self._read: dict[int, Body] = {}

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


class DecisionCache:
    """The latest desired state of one object."""

    def __init__(self) -> None:
        self._asked: tuple[Any, ...] | None = None
        self._latest: DesiredState | None = None
        self._packed: list[bytes] = []

    def decide(self, parent: ParsedDeployment, cluster: ClusterState) -> DesiredState:
        """Return what `decision.decide` returns."""
        # A policy may change the speculation in force, and the generation of the object stays the same.
        speculation = None if isinstance(parent.spec, InvalidSpecError) else parent.spec.speculation
        asked = (
            *(parent.uid, parent.generation, parent.raw_spec, parent.suspended_for, parent.status.plan),
            *(speculation, parent.by_policy, parent.trained_draft, cluster),
        )
        if self._latest is not None and self._asked == asked:
            return replace(self._latest, children=PackedChildren(self._packed))
        desired = decide(parent, cluster)
        self._packed = [pack_object(child) for child in desired.children]
        self._asked, self._latest = asked, replace(desired, children=[])
        return desired
