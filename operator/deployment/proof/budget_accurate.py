"""The condition BudgetAccurate: whether the engines got the KV cache that the plan promised."""

from collections.abc import Mapping

from specdecode_operator.deployment.conditions import FALSE, TRUE, UNKNOWN, ConditionUpdate
from specdecode_operator.deployment.proof.observed import no_engine_condition
from specdecode_operator.deployment.proof.residual import BudgetResidual
from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.engine.metrics import Reading
from specdecode_operator.sizing.base.units import format_gib
from specdecode_operator.sizing.choice.plan import CPU_PRODUCT, Plan


def budget_condition(
    facts: Facts, plan: Plan, residual: BudgetResidual | None, readings: Mapping[str, Reading]
) -> ConditionUpdate:
    """Return whether the engines got the KV cache that was promised after the margin."""
    if facts.replay is not None:
        message = "a replay has the KV cache that the plan tells it: only vLLM can prove the plan"
        return ConditionUpdate("BudgetAccurate", UNKNOWN, "Replayed", message)
    if residual is None:
        return no_engine_condition("BudgetAccurate", readings)
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
