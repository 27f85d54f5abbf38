"""Remembers what each object's spec came to, for as long as nothing that it depends on changes.

Sizing every precision on every place and rendering the children take tens of
milliseconds; hundreds of objects are looked at several times a minute.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture_schedule import CaptureSchedule
from specdecode_operator.api.key import Key
from specdecode_operator.deployment.decision import intend
from specdecode_operator.deployment.desired_state import DesiredState
from specdecode_operator.deployment.models.reading import is_reader
from specdecode_operator.deployment.spec.parent import Parent, schedules_of
from specdecode_operator.kube.nodes import NodeFacts
from specdecode_operator.sizing.pair.calibration import Calibration


class _Remembered(NamedTuple):
    """An desired, and what it is the answer to.

    Its children are packed: the plan alone is tens of kilobytes of text, and it is written once.
    """

    asked: tuple[Any, ...]
    desired: DesiredState
    children: bytes
    schedules: list[CaptureSchedule] | None


class Intents:
    """The latest desired for each object."""

    def __init__(self, host_paths: tuple[str, ...] = ()) -> None:
        self._latest: dict[Key, _Remembered] = {}
        self._host_paths = host_paths

    def intend(  # noqa: PLR0913  all that a decision depends on
        self,
        parent: Parent,
        nodes: tuple[NodeFacts, ...],
        entries: Mapping[str, str],
        pods: Sequence[Body],
        calibration: Calibration,
        *,
        downloads: Mapping[str, str] = MappingProxyType({}),
        groups: bool = False,
    ) -> DesiredState:
        """Return what decision.intend makes of the same arguments."""
        readers = [pod for pod in pods if is_reader(pod)]
        asked = (
            (parent.uid, parent.generation, parent.suspended_for, parent.status.plan, nodes, dict(entries)),
            [(pod["metadata"]["uid"], pod["metadata"].get("resourceVersion")) for pod in readers],
            (calibration, dict(downloads), groups),
        )
        known = self._latest.get(parent.key)
        if known is not None and known.asked == asked:
            return replace(known.desired, children=json.loads(zlib.decompress(known.children)))
        desired = intend(
            parent,
            nodes,
            entries,
            readers,
            calibration,
            downloads=downloads,
            host_paths=self._host_paths,
            groups=groups,
        )
        packed = zlib.compress(json.dumps(desired.children).encode())
        self._latest[parent.key] = _Remembered(asked, replace(desired, children=[]), packed, schedules_of(parent))
        return desired

    def schedules(self, key: Key) -> list[CaptureSchedule] | None:
        """Return the schedules of the spec that was thought about last, as parent.schedules_of has them."""
        return self._latest[key].schedules

    def forget(self, key: Key) -> None:
        """Drop what is remembered of an object that is gone."""
        self._latest.pop(key, None)
