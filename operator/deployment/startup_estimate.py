"""Estimate the start-up time of a deployment's engines, and compare it with the deadlines of their pods."""

from specdecode_operator.deployment.models import model_locations
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.sizing.placement import Row
from specdecode_operator.sizing.startup_time import (
    UNKNOWN_RATES,
    Rates,
    StartConditions,
    StartupTime,
    estimate_startup,
)


def planned_startup(facts: Facts, chosen: Row, rates: Rates = UNKNOWN_RATES) -> StartupTime | None:
    """Return the estimate for a row, or None on CPU and for a replay; ``facts`` are at the row's precisions."""
    if facts.on_cpu or facts.replay is not None:
        return None
    spec = facts.spec
    fetched = model_locations.fetched_models(spec) if spec.models.volume is None else {}
    conditions = StartConditions(
        downloads_target=model_locations.TARGET in fetched,
        downloads_draft=model_locations.DRAFT in fetched,
        downloads_once=model_locations.downloads_to_cache(spec),
        keeps_compiled=spec.models.cache is not None,
        rates=rates,
    )
    return estimate_startup(facts.pair, chosen.budget, chosen.split, conditions)
