"""What running engines report, summed up for `status.observed`: KV cache, acceptance, K."""

import math
from collections.abc import Iterable, Mapping
from typing import Final

from specdecode_operator.api.status.deployment import ObservedStatus
from specdecode_operator.deployment.conditions import UNKNOWN, ConditionUpdate
from specdecode_operator.deployment.proof.engine_version import said_versions
from specdecode_operator.deployment.proof.residual import BudgetResidual
from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.engine.metrics import EngineReading, Reading, SpeculationReading, Unreachable

_STEP_PERCENT: Final = 2
"""Observed figures are written anew when a share moved by this much."""

_DRAFT_LENGTH_STEP: Final = 0.1
_MUCH_MORE: Final = 2
"""Times the tokens that were drafted before: what too few of them could not prove, these may."""


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
    percent, length, drafted = total.acceptance_percent, total.mean_acceptance_length, total.mean_draft_length
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
        mean_draft_length=f"{drafted:.2f}" if drafted is not None else None,
        drafted_steps_percent=_drafted_steps_percent(engines.values(), total),
    )


def _drafted_steps_percent(engines: Iterable[EngineReading], total: SpeculationReading) -> int | None:
    """Return the share of steps with a draft; None where an engine does not say its steps, or has none."""
    steps = [engine.decode_steps for engine in engines]
    told = sum(each for each in steps if each is not None)
    # Counted by the API server, drafts by the engine: a step may be in one of them already.
    return None if None in steps or not told else min(100, round(100 * total.drafts / told))


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
    if (new.draft_tokens or 0) >= _MUCH_MORE * (old.draft_tokens or 0):
        return True
    shares = ((new.acceptance_percent, old.acceptance_percent), (new.drafted_steps_percent, old.drafted_steps_percent))
    if any(_differ(*each, _STEP_PERCENT) for each in shares):
        return True
    return _differ(decimal(new.mean_draft_length), decimal(old.mean_draft_length), _DRAFT_LENGTH_STEP)


def _differ(new: float | None, old: float | None, step: float) -> bool:
    return new != old if new is None or old is None else abs(new - old) >= step


def decimal(text: str | None) -> float | None:
    """Return a number of a status; None where none stands there, as somebody else may have written it."""
    try:
        value = math.nan if text is None else float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def answering_engines(readings: Mapping[str, Reading]) -> dict[str, EngineReading]:
    """Return the readings of engines that answered, by pod."""
    return {name: reading for name, reading in readings.items() if isinstance(reading, EngineReading)}


def no_engine_condition(condition: str, readings: Mapping[str, Reading]) -> ConditionUpdate:
    """Return a condition that no engine tells anything of, with what the first that was asked failed with."""
    for name, reading in readings.items():
        if isinstance(reading, Unreachable):
            return ConditionUpdate(condition, UNKNOWN, "Unreachable", f"{name}: {reading.reason}")
    return ConditionUpdate(condition, UNKNOWN, "EngineNotReady", "no engine serves yet")
