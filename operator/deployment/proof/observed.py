"""What running engines report, summed up for `status.observed`: KV cache, acceptance, K."""

from collections.abc import Mapping
from typing import Final

from specdecode_operator.api.status import ObservedStatus
from specdecode_operator.deployment.conditions import UNKNOWN, ConditionUpdate
from specdecode_operator.deployment.proof.engine_version import said_versions
from specdecode_operator.deployment.proof.residual import BudgetResidual
from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.engine.metrics import EngineReading, Reading, SpeculationReading, Unreachable

_ACCEPTANCE_STEP_PERCENT: Final = 2
"""Observed figures are written anew when acceptance moved by this much."""


def observed_status(
    facts: Facts, residual: BudgetResidual | None, readings: Mapping[str, Reading]
) -> ObservedStatus | None:
    """Return the sum of what the engines report; None while none answers."""
    engines = answering_engines(readings)
    if not engines:
        return None
    tokens = [engine.kv_cache_tokens for engine in engines.values() if engine.kv_cache_tokens is not None]
    concurrency = [e.kv_cache_max_concurrency for e in engines.values() if e.kv_cache_max_concurrency is not None]
    counters = [engine.speculation for engine in engines.values() if engine.speculation is not None]
    total = SpeculationReading.total(counters)
    percent, length = total.acceptance_percent, total.mean_acceptance_length
    return ObservedStatus(
        engines=len(engines),
        engine_version=", ".join(said_versions(readings)) or None,
        kv_cache_tokens=min(tokens, default=None),
        kv_cache_residual_bytes=residual.residual_bytes if residual else None,
        kv_cache_residual=residual.percent if residual else None,
        max_concurrency=f"{min(concurrency):.2f}" if concurrency else None,
        num_speculative_tokens=drafted_length(facts, total) if counters else None,
        draft_tokens=total.draft_tokens if counters else None,
        accepted_tokens=total.accepted_tokens if counters else None,
        acceptance=f"{percent}%" if percent is not None else None,
        acceptance_percent=percent,
        mean_acceptance_length=f"{length:.2f}" if length is not None else None,
    )


def drafted_length(facts: Facts, total: SpeculationReading) -> int:
    """Return K: what the spec asks for, or of a replay what was recorded."""
    return facts.pair.num_speculative_tokens if facts.replay is None else len(total.accepted_per_position)


def steady(new: ObservedStatus | None, old: ObservedStatus | None, *, figures_due: bool) -> ObservedStatus | None:
    """Return the figures to show: the old ones until they moved enough and had stood long enough.

    Counters move with every token, and each write of a status wakes whoever watches the object.
    """
    if old is None or new is None or old.acceptance_percent is None:
        return new
    return new if figures_due and _moved(new, old) else old


def _moved(new: ObservedStatus, old: ObservedStatus) -> bool:
    # The residual moves with the plan too: it must be that of the plan beside it.
    for field in ("engines", "engine_version", "kv_cache_tokens", "kv_cache_residual_bytes", "num_speculative_tokens"):
        if getattr(new, field) != getattr(old, field):
            return True
    if new.acceptance_percent is None or old.acceptance_percent is None:
        return new.acceptance_percent != old.acceptance_percent
    return abs(new.acceptance_percent - old.acceptance_percent) >= _ACCEPTANCE_STEP_PERCENT


def answering_engines(readings: Mapping[str, Reading]) -> dict[str, EngineReading]:
    """Return the readings of engines that answered, by pod."""
    return {name: reading for name, reading in readings.items() if isinstance(reading, EngineReading)}


def no_engine_condition(condition: str, readings: Mapping[str, Reading]) -> ConditionUpdate:
    """Return a condition that no engine tells anything of, with what the first that was asked failed with."""
    for name, reading in readings.items():
        if isinstance(reading, Unreachable):
            return ConditionUpdate(condition, UNKNOWN, "Unreachable", f"{name}: {reading.reason}")
    return ConditionUpdate(condition, UNKNOWN, "EngineNotReady", "no engine serves yet")
