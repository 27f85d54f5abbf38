"""Compares what running engines report with what was asked for and promised."""

from collections.abc import Mapping

from specdecode_operator.api.status import ConditionStatus, ObservedStatus
from specdecode_operator.api.values import METHODS_WITH_LOOKUP, Method
from specdecode_operator.deployment.conditions import FALSE, TRUE, UNKNOWN, ConditionUpdate
from specdecode_operator.deployment.proof.residual import BudgetResidual
from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.engine.metrics import EngineReading, Reading, SpeculationReading, Unreachable
from specdecode_operator.sizing.base.units import format_gib
from specdecode_operator.sizing.choice.plan import CPU_PRODUCT, Plan

_ENOUGH_GENERATED_TOKENS = 64
"""Output after which a drafter that proposed nothing is called idle: short requests may end before a first draft."""

_ACCEPTANCE_STEP_PERCENT = 2
"""Observed figures are written anew when acceptance moved by this much."""


def speculation_condition(
    facts: Facts, readings: Mapping[str, Reading], observed: ObservedStatus | None
) -> ConditionUpdate:
    """Whether the engines really draft, in the figures that the status shows."""

    def finding(status: ConditionStatus, reason: str, message: str) -> ConditionUpdate:
        return ConditionUpdate("SpeculationActive", status, reason, message)

    if facts.method is Method.NONE:
        return finding(FALSE, "Disabled", "not asked for: spec.speculation is absent or its method is none")
    engines, silent = _split(readings)
    if not engines:
        return _no_engine("SpeculationActive", silent)
    without = [name for name, engine in engines.items() if engine.speculation is None]
    if without:
        message = (
            f"{without[0]} publishes no speculation counters: it serves without spec.speculation.method {facts.method};"
            " look for what turned it off in its log, in spec.engine.extraArgs and in spec.podTemplate"
        )
        return finding(FALSE, "NotDrafting", message)
    if observed is not None and observed.draft_tokens:
        return finding(
            TRUE,
            "Drafting",
            f"acceptance {observed.acceptance}, mean acceptance length {observed.mean_acceptance_length}"
            f" with K={facts.pair.num_speculative_tokens}{_fewer(facts)}",
        )
    return finding(*_nothing_drafted(facts, sum(engine.generation_tokens for engine in engines.values())))


def _fewer(facts: Facts) -> str:
    """Remark that K changes: the engine's counters leave out steps without a draft (v1/core/sched/scheduler.py)."""
    return ", or what numSpeculativeTokensByBatchSize says" if facts.pair.other_draft_lengths else ""


def _nothing_drafted(facts: Facts, generated_tokens: int) -> tuple[ConditionStatus, str, str]:
    """What it means that no engine has proposed a token yet."""
    if generated_tokens < _ENOUGH_GENERATED_TOKENS:
        return UNKNOWN, "NoTraffic", "ready to draft; too little has been asked of the engines to see it"
    if facts.method in METHODS_WITH_LOOKUP:
        return UNKNOWN, "NoMatches", "the engines generate, but no n-gram of a prompt came up again yet"
    if facts.method is Method.SUFFIX:
        return UNKNOWN, "NoMatches", "the engines generate, but nothing of an earlier answer came up again yet"
    message = (
        f"the engines generated {generated_tokens} tokens, but drafted none with spec.speculation.method {facts.method}"
    )
    ranges = facts.spec.speculation.num_speculative_tokens_by_batch_size if facts.spec.speculation else []
    if any(part.num_speculative_tokens == 0 for part in ranges):
        message += "; spec.speculation.numSpeculativeTokensByBatchSize says so for some numbers of requests"
    else:
        message += ": look for what turned it off in the engine's log and in spec.engine.extraArgs"
    return FALSE, "NotDrafting", message


def budget_condition(plan: Plan, residual: BudgetResidual | None, readings: Mapping[str, Reading]) -> ConditionUpdate:
    """Whether the engines got the KV cache that was promised after the margin."""
    if residual is None:
        return _no_engine("BudgetAccurate", _split(readings)[1])
    budget = plan.chosen.budget
    predicted, smallest = residual.predicted_tokens, residual.reported_tokens
    # On CPU the KV cache is given, not left over: nothing about it is estimated.
    margin_bytes = 0 if plan.chosen.product == CPU_PRODUCT else budget.margin_bytes
    message = f"the engine reports {smallest:,} KV cache tokens, {predicted:,} were predicted ({_difference(residual)})"
    # By share: beside windows and states not every token takes the same bytes.
    margin_tokens = predicted * margin_bytes // max(1, budget.available_kv_bytes)
    if smallest >= predicted - margin_tokens:
        return ConditionUpdate("BudgetAccurate", TRUE, "AsPromised", message)
    message += f", with a margin of {margin_tokens:,}: is the config in the spec really that of these models?"
    return ConditionUpdate("BudgetAccurate", FALSE, "LessThanPromised", message)


def _difference(residual: BudgetResidual) -> str:
    if not residual.predicted_tokens:
        return "nothing predicted"
    if not residual.residual_bytes:
        return "exactly"
    share = (residual.reported_tokens - residual.predicted_tokens) / residual.predicted_tokens
    direction = "less" if residual.residual_bytes > 0 else "more"
    return f"{share:+.1%}, {format_gib(abs(residual.residual_bytes))} GiB {direction} on each GPU"


def observe(facts: Facts, residual: BudgetResidual | None, readings: Mapping[str, Reading]) -> ObservedStatus | None:
    """Sum up what the engines report; None while none answers."""
    engines, _ = _split(readings)
    if not engines:
        return None
    tokens = [engine.kv_cache_tokens for engine in engines.values() if engine.kv_cache_tokens is not None]
    concurrency = [e.kv_cache_max_concurrency for e in engines.values() if e.kv_cache_max_concurrency is not None]
    counters = [engine.speculation for engine in engines.values() if engine.speculation is not None]
    total = SpeculationReading.total(counters)
    percent, length = total.acceptance_percent, total.mean_acceptance_length
    return ObservedStatus(
        engines=len(engines),
        kv_cache_tokens=min(tokens, default=None),
        kv_cache_residual_bytes=residual.residual_bytes if residual else None,
        kv_cache_residual=residual.percent if residual else None,
        max_concurrency=f"{min(concurrency):.2f}" if concurrency else None,
        num_speculative_tokens=facts.pair.num_speculative_tokens if counters else None,
        draft_tokens=total.draft_tokens if counters else None,
        accepted_tokens=total.accepted_tokens if counters else None,
        acceptance=f"{percent}%" if percent is not None else None,
        acceptance_percent=percent,
        mean_acceptance_length=f"{length:.2f}" if length is not None else None,
    )


def settle(new: ObservedStatus | None, old: ObservedStatus | None, *, rested: bool) -> ObservedStatus | None:
    """Return the figures to show: the old ones until they moved enough and had stood long enough."""
    if old is None or new is None or old.acceptance_percent is None:
        return new
    return new if rested and _moved(new, old) else old


def _moved(new: ObservedStatus, old: ObservedStatus) -> bool:
    """Whether more changed than counters, which move with every token.

    The residual moves with the plan too: it must be that of the plan beside it.
    """
    if _settings(new) != _settings(old):
        return True
    if new.acceptance_percent is None or old.acceptance_percent is None:
        return new.acceptance_percent != old.acceptance_percent
    return abs(new.acceptance_percent - old.acceptance_percent) >= _ACCEPTANCE_STEP_PERCENT


def _settings(observed: ObservedStatus) -> tuple[int | None, ...]:
    return (
        observed.engines,
        observed.kv_cache_tokens,
        observed.kv_cache_residual_bytes,
        observed.num_speculative_tokens,
    )


def _split(readings: Mapping[str, Reading]) -> tuple[dict[str, EngineReading], dict[str, Unreachable]]:
    engines = {name: reading for name, reading in readings.items() if isinstance(reading, EngineReading)}
    silent = {name: reading for name, reading in readings.items() if isinstance(reading, Unreachable)}
    return engines, silent


def _no_engine(condition: str, silent: Mapping[str, Unreachable]) -> ConditionUpdate:
    for name, reading in silent.items():
        return ConditionUpdate(condition, UNKNOWN, "Unreachable", f"{name}: {reading.reason}")
    return ConditionUpdate(condition, UNKNOWN, "EngineNotReady", "no engine serves yet")
