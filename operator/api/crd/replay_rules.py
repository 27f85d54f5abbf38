"""What an engine that replays a recording can tell about itself."""

from typing import Final

from specdecode_operator.api.crd.cel import Reason, Rule
from specdecode_operator.api.crd.models_rules import INSIDE_A_VOLUME

RECORDING_SOURCE = (
    Rule(
        field="configMap",
        holds="has(self.configMap) != has(self.persistentVolumeClaim)",
        message="the recording is in one place: set one of configMap and persistentVolumeClaim",
    ),
    INSIDE_A_VOLUME,
)

REPLAY = (
    Rule(
        field="match",
        holds="self.mode != 'Modelled' || self.match == 'Arrival'",
        message="is %s, but mode Modelled looks for no record: remove it, or use mode: Steps",
        values=("self.match",),
        reason=Reason.FORBIDDEN,
    ),
    Rule(
        field="unmatched",
        holds="self.mode != 'Modelled' || self.unmatched == 'Repeat'",
        message="is %s, but mode Modelled looks for no record: remove it, or use mode: Steps",
        values=("self.unmatched",),
        reason=Reason.FORBIDDEN,
    ),
    Rule(
        field="acceptance",
        holds="!has(self.acceptance) || self.acceptance.size() == 0 || self.acceptance[0].fromSeconds == 0"
        " && self.acceptance.map(a, a.fromSeconds).isSorted()",
        message="is not in the order of time: begin with fromSeconds 0, and sort by it",
    ),
)

_REPLAYS: Final = "has(self.engine.replay)"

REPLAYING_SPEC = (
    Rule(
        field="serving.tlsSecret",
        holds=f"!{_REPLAYS} || !has(self.serving.tlsSecret)",
        message="a replay (engine.replay) speaks plain HTTP: remove one of the two",
        reason=Reason.FORBIDDEN,
    ),
    Rule(
        field="captures",
        holds=f"!{_REPLAYS} || !has(self.captures) || self.captures.size() == 0",
        message="no recorder can be in an engine that replays a recording: remove them, or engine.replay",
        reason=Reason.FORBIDDEN,
    ),
)
"""Rules between engine.replay and the rest of a spec."""
