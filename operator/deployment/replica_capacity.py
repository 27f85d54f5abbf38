"""Predict how many replicas the present load needs, from the capture that measured the engines' settings.

The capacity of a replica is the number of running requests with the highest goodput: with more requests, more of them
miss their latency limits than are added. If engines accept fewer drafted tokens than measured, a step yields fewer
tokens and the limits are missed with fewer requests, so the capacity is discounted in proportion.
"""

from collections.abc import Mapping

from specdecode_operator.deployment.observed.replica_load import ReplicaLoad
from specdecode_operator.deployment.speculation_policy import Measured, NoEvidence
from specdecode_operator.vllm.engine_metrics import Reading, answering_engines


def replica_load(
    measured: Measured | NoEvidence, acceptance: float | None, readings: Mapping[str, Reading]
) -> ReplicaLoad:
    """Return capacity and load of the engines.

    Parameters
    ----------
    measured
        The newest measurement of the settings in force, or why there is none.
    acceptance
        Accepted share of the drafted tokens at present; None if too few were drafted.
    readings
        Metrics of the ready engines. Those that did not answer count as the mean of the others.
    """
    if isinstance(measured, NoEvidence):
        return ReplicaLoad(None, None, measured.message)
    evidence = measured.evidence
    setting = evidence.find(measured.in_force)
    if setting is None:
        return ReplicaLoad(None, None, f"Capture {evidence.name} has no interval for the settings in force")
    best = max(setting.points, key=lambda point: evidence.goodput_at(point.load) * point.ratio)
    factor = acceptance / setting.acceptance if acceptance is not None and setting.acceptance else 1.0
    # Better acceptance than measured does not raise the capacity: that was not measured.
    capacity = best.running * min(1.0, setting.tokens_per_step(factor))
    more = ", its highest load" if best is setting.points[-1] and len(setting.points) > 1 else ""
    message = f"Capacity of a replica: {capacity:.1f} requests (capture {evidence.name}{more})"
    engines = answering_engines(readings).values()
    if not engines:
        return ReplicaLoad(capacity, None, message)
    requests = sum(engine.requests_running + engine.requests_waiting for engine in engines)
    return ReplicaLoad(capacity, requests * len(readings) / len(engines) / capacity, message)
