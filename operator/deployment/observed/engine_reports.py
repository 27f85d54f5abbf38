"""Summarize engine metrics: `status.observed`, condition BudgetAccurate, versions of engines."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment_status import ObservedStatus
from specdecode_operator.deployment.conditions import FALSE, TRUE, UNKNOWN, ConditionUpdate
from specdecode_operator.deployment.observed.measured_startup import measured_startup
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.sizing.arithmetic import format_gib
from specdecode_operator.sizing.memory.budget import tightest_grouping
from specdecode_operator.sizing.plan import CPU_PRODUCT, Plan
from specdecode_operator.sizing.version_rules import Runner
from specdecode_operator.vllm.engine_metrics import (
    EngineReading,
    Reading,
    SpeculationReading,
    Unreachable,
    answering_engines,
)
from specdecode_operator.vllm.versions import version_of_engine

# Engine metrics are untrusted, and the API server rejects integers that are too large. This is far more than a GPU has.
_MOST_BYTES: Final = 2**60


@dataclass(frozen=True)
class BudgetResidual:
    """Predicted minus reported KV cache of the smallest engine: positive if the plan predicted too much."""

    product: str
    engine_version: str
    runner: str
    tensor: int
    predicted_tokens: int
    reported_tokens: int
    residual_bytes: int  # On one GPU

    @property
    def percent(self) -> str | None:
        """The residual as a share of the prediction; None if the prediction is zero."""
        return residual_share(self.predicted_tokens, self.reported_tokens)


def residual_share(predicted_tokens: int, reported_tokens: int) -> str | None:
    """Return predicted minus reported as a share of the prediction: ``+1.5%``; None if the prediction is zero."""
    if not predicted_tokens:
        return None
    return f"{(predicted_tokens - reported_tokens) / predicted_tokens:+.1%}"


def budget_residual(facts: Facts, plan: Plan, readings: Mapping[str, Reading]) -> BudgetResidual | None:
    """Return the residual of the smallest engine; None for a replay, or while no engine reports its KV cache."""
    if facts.replay is not None:
        return None
    engines = [reading for reading in readings.values() if isinstance(reading, EngineReading)]
    reported = [(engine.kv_cache_tokens, engine) for engine in engines if engine.kv_cache_tokens is not None]
    if not reported:
        return None
    smallest_tokens, smallest = min(reported, key=lambda engine: engine[0])
    budget = plan.chosen.budget
    grouping = tightest_grouping(facts.pair, plan.chosen.split, budget)
    predicted_size = min((group.block_size for group in grouping.groups if group.block_size), default=None)
    if smallest.num_gpu_blocks is None or smallest.block_size not in (None, predicted_size):
        # Blocks of another size hold another number of bytes. An engine reports the smallest size of all groups
        # (vllm/v1/engine/core.py).
        residual_bytes = (budget.kv_cache_tokens - smallest_tokens) * budget.kv_bytes_per_token
    else:
        # Layers with a window or a state do not use bytes per token, so compare blocks.
        residual_bytes = (budget.num_blocks - smallest.num_gpu_blocks) * grouping.bytes_per_block
    return BudgetResidual(
        product=plan.chosen.product,
        engine_version=facts.profile.version,
        # V2 needs Triton, so V1 serves on the CPU (vllm/config/vllm.py, use_v2_model_runner).
        runner=(Runner.V1 if facts.on_cpu else facts.pair.era.runner).value,
        tensor=plan.chosen.tensor,
        predicted_tokens=budget.kv_cache_tokens,
        reported_tokens=smallest_tokens,
        residual_bytes=max(residual_bytes, -_MOST_BYTES),
    )


_MOST_NAMED = 3  # During a rollout there are 2 versions; more come only from untrusted metrics


def said_versions(readings: Mapping[str, Reading]) -> list[str]:
    """Return the versions that engines report, most frequent first."""
    said = Counter(each.version for each in readings.values() if isinstance(each, EngineReading) and each.version)
    return [version for version, _ in said.most_common(_MOST_NAMED)]


def other_version(facts: Facts, readings: Mapping[str, Reading]) -> str | None:
    """Return a message if engines report another vLLM version than the planned one, or None."""
    planned = facts.profile.version
    others = {version: version_of_engine(version) for version in said_versions(readings)}
    differing = [version for version, minor in others.items() if minor not in (None, planned)]
    if not differing:
        return None
    return (
        f"the engines report vLLM {', '.join(differing)}, but spec.engine.version is {planned}: set it to"
        f" {others[differing[0]]}, or set spec.engine.image to an image of {planned}"
    )


_STEP_PERCENT: Final = 2  # Percentage points by which a share must change before the status is written
_DRAFT_LENGTH_STEP: Final = 0.1
_MUCH_MORE: Final = 2  # Factor of drafted tokens after which the status is written: there may be enough of them now


def observed_status(
    facts: Facts, residual: BudgetResidual | None, readings: Mapping[str, Reading], pods: Sequence[Body] = ()
) -> ObservedStatus | None:
    """Return `status.observed`: the sum of the engines' metrics; None while no engine answers."""
    engines = answering_engines(readings)
    if not engines:
        return None
    tokens = [engine.kv_cache_tokens for engine in engines.values() if engine.kv_cache_tokens is not None]
    concurrency = [e.kv_cache_max_concurrency for e in engines.values() if e.kv_cache_max_concurrency is not None]
    counters = [engine.speculation for engine in engines.values() if engine.speculation is not None]
    total = SpeculationReading.total(counters)
    percent, length, drafted = total.acceptance_percent, total.mean_acceptance_length, total.mean_draft_length
    steps = [engine.decode_steps for engine in engines.values()]
    told = sum(each for each in steps if each is not None)
    return ObservedStatus(
        engines=len(engines),
        engine_version=", ".join(said_versions(readings)) or None,
        kv_cache_tokens=min(tokens, default=None),
        kv_cache_residual_bytes=residual.residual_bytes if residual else None,
        kv_cache_residual=residual.percent if residual else None,
        max_concurrency=f"{min(concurrency):.2f}" if concurrency else None,
        startup=measured_startup(pods, readings) if facts.replay is None else None,
        num_speculative_tokens=_drafted_length(facts, total) if counters else None,
        draft_tokens=total.draft_tokens if counters else None,
        accepted_tokens=total.accepted_tokens if counters else None,
        acceptance=f"{percent}%" if percent is not None else None,
        acceptance_percent=percent,
        mean_acceptance_length=f"{length:.2f}" if length is not None else None,
        mean_draft_length=f"{drafted:.2f}" if drafted is not None else None,
        # vLLM's API server counts steps and its engine counts drafts, so a step may be missing in one of them.
        drafted_steps_percent=None if None in steps or not told else min(100, round(100 * total.drafts / told)),
    )


def _drafted_length(facts: Facts, total: SpeculationReading) -> int:
    """Return K: from the spec or, for a replay, from the recording."""
    return facts.pair.num_speculative_tokens if facts.replay is None else len(total.accepted_per_position)


def steady(new: ObservedStatus | None, old: ObservedStatus | None, *, figures_due: bool) -> ObservedStatus | None:
    """Return the figures to write: the old ones until they changed enough and a write is due.

    Counters change with every token, and each write of a status triggers all watches of the object.
    """
    if old is None or new is None or old.acceptance_percent is None:
        return new
    # The residual must match the plan in the same status.
    named = (
        *("engines", "engine_version", "kv_cache_tokens", "kv_cache_residual_bytes", "num_speculative_tokens"),
        "startup",
    )
    moved = (
        any(getattr(new, field) != getattr(old, field) for field in named)
        or (new.draft_tokens or 0) >= _MUCH_MORE * (old.draft_tokens or 0)
        or _differ(new.acceptance_percent, old.acceptance_percent, _STEP_PERCENT)
        or _differ(new.drafted_steps_percent, old.drafted_steps_percent, _STEP_PERCENT)
        or _differ(decimal(new.mean_draft_length), decimal(old.mean_draft_length), _DRAFT_LENGTH_STEP)
    )
    return new if figures_due and moved else old


def _differ(new: float | None, old: float | None, step: float) -> bool:
    return new != old if new is None or old is None else abs(new - old) >= step


def decimal(text: str | None) -> float | None:
    """Parse a finite number from a status, which other clients may have written; None if it is not one."""
    try:
        value = math.nan if text is None else float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def no_engine_condition(condition: str, readings: Mapping[str, Reading]) -> ConditionUpdate:
    """Return a condition with status Unknown while no engine answers, with the first scrape error."""
    for name, reading in readings.items():
        if isinstance(reading, Unreachable):
            return ConditionUpdate(condition, UNKNOWN, "Unreachable", f"{name}: {reading.reason}")
    return ConditionUpdate(condition, UNKNOWN, "EngineNotReady", "No engine is ready yet")


def budget_condition(
    facts: Facts, plan: Plan, residual: BudgetResidual | None, readings: Mapping[str, Reading]
) -> ConditionUpdate:
    """Return the condition BudgetAccurate: whether the engines' KV cache is within the margin of the prediction."""
    if facts.replay is not None:
        message = "Not checked for a replay: it takes the size of the KV cache from the plan"
        return ConditionUpdate("BudgetAccurate", UNKNOWN, "Replayed", message)
    if residual is None:
        return no_engine_condition("BudgetAccurate", readings)
    budget = plan.chosen.budget
    predicted, smallest = residual.predicted_tokens, residual.reported_tokens
    # On CPU the spec sets the size of the KV cache, so no margin for estimates applies.
    margin_bytes = 0 if plan.chosen.product == CPU_PRODUCT else budget.margin_bytes
    difference = "exactly" if predicted else "none predicted"
    if predicted and residual.residual_bytes:
        direction = "less" if residual.residual_bytes > 0 else "more"
        size = format_gib(abs(residual.residual_bytes))
        difference = f"{(smallest - predicted) / predicted:+.1%}, {size} GiB {direction} on each GPU"
    message = f"{smallest:,} KV cache tokens reported, {predicted:,} predicted ({difference})"
    # By share, because with windows and states tokens differ in size.
    margin_tokens = predicted * margin_bytes // max(1, budget.available_kv_bytes)
    if smallest >= predicted - margin_tokens:
        return ConditionUpdate("BudgetAccurate", TRUE, "AsPromised", message)
    message += f", margin {margin_tokens:,}; check that the config in the spec belongs to these models"
    return ConditionUpdate("BudgetAccurate", FALSE, "LessThanPromised", message)
