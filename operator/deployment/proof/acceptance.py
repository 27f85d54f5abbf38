"""The acceptance that is shown: what engines say, or what the last of them said and until when.

Engines forget their counters with their end, and a suspend, a capture or a rollout would leave nothing to compare with.
"""

from dataclasses import replace
from datetime import datetime
from typing import Final

from specdecode_operator.api.status.deployment import AcceptanceStatus, ObservedStatus
from specdecode_operator.deployment.conditions import UNKNOWN, ConditionUpdate
from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.redaction import clip
from specdecode_operator.vocabulary import Method

LOW_BY_DESIGN: Final = (
    "with adaptiveVerification drafted tokens that were left unverified count as not accepted, so go by the mean length"
)
"""vllm/v1/core/sched/scheduler.py counts what was scheduled; what of it is verified the GPU decides afterwards."""

_TIME: Final = "%Y-%m-%dT%H:%M:%SZ"
_LONGEST: Final = 256


def last_acceptance(
    before: AcceptanceStatus | None, figures: ObservedStatus | None, facts: Facts | None, now: datetime
) -> AcceptanceStatus | None:
    """Return the acceptance to show; that of other models, another method or another K is none of this spec.

    ``facts`` are those of engines that are launched; None where nothing is, and what was known stays.
    """
    with_ = None if facts is None else _measured_with(facts)
    if with_ is not None and figures is not None and figures.acceptance is not None:
        return AcceptanceStatus(
            text=figures.acceptance,
            percent=figures.acceptance_percent or 0,
            mean_length=figures.mean_acceptance_length,
            measured_with=with_,
        )
    if before is None or (facts is not None and before.measured_with != with_):
        return None
    if before.said_until is not None:
        return before
    return before.model_copy(update={"text": f"was {before.percent}%", "said_until": now.strftime(_TIME)})


def with_last_acceptance(condition: ConditionUpdate, acceptance: AcceptanceStatus | None) -> ConditionUpdate:
    """Return a condition that also says what was accepted, where it does not know what is."""
    is_unsure = condition.type == "SpeculationActive" and condition.status is UNKNOWN
    if not is_unsure or acceptance is None or acceptance.said_until is None:
        return condition
    known = f"; acceptance was {acceptance.percent}% until {acceptance.said_until}"
    # One that is kept as it stands says it already.
    return replace(condition, message=f"{condition.message.removesuffix(known)}{known}")


def _measured_with(facts: Facts) -> str | None:
    """Return what an acceptance is of; None without speculation."""
    if facts.method is Method.NONE:
        return None
    draft = facts.spec.speculation.draft if facts.spec.speculation else None
    models = [facts.spec.target.model, *([draft.model] if draft else [])]
    how = "" if facts.replay is None else "replayed, "
    adapting = ", adaptive verification" if facts.pair.adaptive_verification else ""
    lossy = ", fly" if facts.pair.checks_by_entropy else ""
    tokens = facts.pair.num_speculative_tokens
    return clip(f"{how}{facts.method}, K {tokens}{adapting}{lossy}, {', '.join(models)}", _LONGEST)
