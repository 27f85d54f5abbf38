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


def _of_records(field: str, default: str) -> Rule:
    """Return the rule that a field says how records are found, which only one mode does."""
    return Rule(
        field=field,
        holds=f"self.mode == 'Steps' || self.{field} == '{default}'",
        message="is %s, but mode %s looks for no record: remove it, or use mode: Steps",
        values=(f"self.{field}", "self.mode"),
        reason=Reason.FORBIDDEN,
    )


def _not_of_vllm(field: str, absent: str) -> Rule:
    """Return the rule that a field changes what is replayed, and not what vLLM does."""
    return Rule(
        field=field,
        holds=f"self.mode != 'Emulated' || {absent}",
        message="is not for mode Emulated, in which vLLM itself serves: remove it, or use another mode",
        reason=Reason.FORBIDDEN,
    )


REPLAY = (
    _of_records("match", "Arrival"),
    _of_records("unmatched", "Repeat"),
    _not_of_vllm("acceptance", "!has(self.acceptance) || self.acceptance.size() == 0"),
    _not_of_vllm("timeScalePercent", "self.timeScalePercent == 100"),
    _not_of_vllm("loadFactor", "self.loadFactor == 1"),
    _not_of_vllm(
        "failures",
        "self.failures.startSeconds == 0 && self.failures.errorPercent == 0"
        " && !has(self.failures.hangAfterSeconds) && !has(self.failures.crashAfterSeconds)",
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
        message="a capture of a replay (engine.replay) would measure nothing: remove one of the two",
        reason=Reason.FORBIDDEN,
    ),
)
"""Rules between engine.replay and the rest of a spec."""
