"""The latest decision for one object, for as long as nothing that it depends on changes.

Sizing every precision on every place and rendering the children take tens of
milliseconds; hundreds of objects are looked at several times a minute.
"""

import zlib
from dataclasses import replace
from typing import Any

import msgspec

from specdecode_operator.api.speculation import Speculation
from specdecode_operator.deployment.cluster_state import ClusterState
from specdecode_operator.deployment.decision import decide
from specdecode_operator.deployment.desired_state import DesiredState
from specdecode_operator.deployment.spec.parent import Parent
from specdecode_operator.problems import InvalidSpecError


def _speculation(parent: Parent) -> Speculation | None:
    """Return how engines speculate: what a policy put in force is no part of the spec, whose generation stays."""
    return None if isinstance(parent.spec, InvalidSpecError) else parent.spec.speculation


class DecisionCache:
    """The latest desired state of one object."""

    def __init__(self) -> None:
        self._asked: tuple[Any, ...] | None = None
        self._latest: DesiredState | None = None
        self._children = b""
        """Packed: the plan alone is tens of kilobytes of text, and it is written once."""

    def decide(self, parent: Parent, cluster: ClusterState) -> DesiredState:
        """Return what `decision.decide` returns."""
        asked = (
            *(parent.uid, parent.generation, parent.raw_spec, parent.suspended_for, parent.status.plan),
            *(_speculation(parent), parent.by_policy, cluster),
        )
        if self._latest is not None and self._asked == asked:
            return replace(self._latest, children=msgspec.json.decode(zlib.decompress(self._children)))
        desired = decide(parent, cluster)
        self._children = zlib.compress(msgspec.json.encode(desired.children))
        self._asked, self._latest = asked, replace(desired, children=[])
        return desired
