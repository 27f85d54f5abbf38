"""Specs of replays that the API server refuses."""

from tests.component.admission.bad_spec import Bad

_REPLAY = "spec.engine.replay"


def replay(fields: str = "", trace: str = "configMap: {name: recording}, path: trace.jsonl", more: str = "") -> str:
    """Spec of a replay."""
    return f"engine: {{replay: {{trace: {{{trace}}}{fields and f', {fields}'}}}}}\n{more}"


REPLAYS = {
    "replay of nothing": Bad("engine: {replay: {}}", f"{_REPLAY}.trace", "Required"),
    "replay that claims GPUs": Bad(
        replay(more="accelerator: {resourceClaim: {deviceClassName: a}}"),
        "spec.accelerator.resourceClaim",
        "claims no GPUs: remove one of the two",
    ),
    "replay without a path": Bad(
        replay(trace="persistentVolumeClaim: {claimName: captures}"), f"{_REPLAY}.trace.path", "Required"
    ),
    "replay from nowhere": Bad(
        replay(trace="path: trace.jsonl"),
        f"{_REPLAY}.trace.configMap",
        "has one source: set one of configMap and persistentVolumeClaim",
    ),
    "replay from two places": Bad(
        replay(trace="configMap: {name: a}, persistentVolumeClaim: {claimName: b}, path: trace.jsonl"),
        f"{_REPLAY}.trace.configMap",
        "has one source: set one of configMap and persistentVolumeClaim",
    ),
    "replay from outside": Bad(
        replay(trace="persistentVolumeClaim: {claimName: captures}, path: a/../../b"),
        f"{_REPLAY}.trace.path",
        "is not a path inside the volume: write it without leading / and without ..",
    ),
    "replay with an acceptance that begins late": Bad(
        replay("acceptance: [{fromSeconds: 5, percent: 50}]"), f"{_REPLAY}.acceptance", "begin with fromSeconds 0"
    ),
    "replay with an acceptance out of order": Bad(
        replay("acceptance: [{percent: 50}, {fromSeconds: 60, percent: 20}, {fromSeconds: 30, percent: 40}]"),
        f"{_REPLAY}.acceptance",
        "begin with fromSeconds 0, and sort by it",
    ),
    "replay with two acceptances at once": Bad(
        replay("acceptance: [{percent: 50}, {percent: 20}]"), f"{_REPLAY}.acceptance[1]", "Duplicate"
    ),
    "replay with more than all accepted": Bad(
        replay("acceptance: [{percent: 101}]"), f"{_REPLAY}.acceptance[0].percent", "less than or equal to 100"
    ),
    "replay without time": Bad(
        replay("timeScalePercent: 0"), f"{_REPLAY}.timeScalePercent", "greater than or equal to 1"
    ),
    "replay with another match": Bad(replay("match: Best"), f"{_REPLAY}.match", '"Arrival", "RequestId", "Prefix"'),
    "replay that draws and matches": Bad(
        replay("mode: Modelled, match: Prefix"),
        f"{_REPLAY}.match",
        "is Prefix, but mode Modelled does not match records: remove it, or use mode: Steps",
    ),
    "replay that draws and refuses": Bad(
        replay("mode: Modelled, unmatched: Refuse"),
        f"{_REPLAY}.unmatched",
        "is Refuse, but mode Modelled does not match records: remove it, or use mode: Steps",
    ),
    **{
        f"emulated engine with {field.partition(':')[0]}": Bad(
            replay(f"mode: Emulated, {field}", trace="configMap: {name: models}, path: model.json"),
            f"{_REPLAY}.{field.partition(':')[0]}",
            "is not for mode Emulated, which runs vLLM itself: remove it, or use another mode",
        )
        for field in (
            "acceptance: [{percent: 50}]",
            "timeScalePercent: 50",
            "loadFactor: 2",
            "failures: {crashAfterSeconds: 60}",
        )
    },
    "replay over HTTPS": Bad(
        replay(more="serving: {tlsSecret: {name: certificate}}"),
        "spec.serving.tlsSecret",
        "a replay (engine.replay) only serves plain HTTP: remove one of the two",
    ),
    "replay that is captured": Bad(
        replay(more="captures: [{name: nightly, schedule: 0 3 * * *}]"),
        "spec.captures",
        "a capture of a replay (engine.replay) measures no engine: remove one of the two",
    ),
}
