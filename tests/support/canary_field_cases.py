"""For every field of a SpecDecodeDeployment's canary, a value that makes a difference: see field_cases.py."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.rollout.canary import CanaryDecision, CanaryTrial, canary_settings, judge_canary
from specdecode_operator.deployment.rollout.rollout_progress import Rollout
from specdecode_operator.stats.pool_comparison import BLOCK_S, PoolComparison, Served
from tests.support.field_cases import FieldCase, at
from tests.support.objects import Body, pair_70b

BLOCK: Final = Served(
    requests=1_000, first_token_seconds=200.0, prompt_tokens=1_000_000, tokens=200_000, seconds=2_000.0, steps=100_000,
    finished=1_000, answered=1_000,
)  # fmt: skip
"""What an engine of the stable pool does in each block."""


@cache
def comparison(*canary: Served, blocks: int = 9) -> PoolComparison:
    """Return a comparison over ``blocks`` blocks; those of the canary cycle through ``canary``. Do not modify it."""
    found, counters = PoolComparison(), [Served(), Served()]
    for block in range(blocks + 1):
        found.observe({"stable": counters[0]}, {"canary": counters[1]}, BLOCK_S * block)
        counters = [counters[0] + BLOCK, counters[1] + canary[block % len(canary)]]
    return found


def canary_outcome(spec: SpecDecodeDeploymentSpec) -> tuple[int, Sequence[CanaryDecision]]:
    """Return the engines of the canary, and what becomes of a slightly worse one and of an undecided one."""
    settings = canary_settings(spec)
    rollout = Rollout(settings.replicas, settings.replicas, settings.replicas, settings.replicas, True, None)
    worse = replace(BLOCK, seconds=2_060.0, first_token_seconds=212.0, answered=992)
    noisy = replace(BLOCK, seconds=1_600.0), replace(BLOCK, seconds=2_500.0)
    trials = [CanaryTrial(None, comparison(*each), since_s=0.0) for each in ((worse,), noisy)]
    return settings.replicas, [judge_canary(settings, trial, rollout, 5_000.0) for trial in trials]


def _canary(**fields: Any) -> Body:
    return pair_70b(rollout={"strategy": "Canary", "canary": fields})


CANARY_FIELDS: Final[Mapping[str, FieldCase]] = {
    "rollout.canary.replicas": at(2, on=_canary()),
    "rollout.canary.maxLossPercent.tpot": at(5, on=_canary(maxLossPercent={})),
    "rollout.canary.maxLossPercent.ttft": at(10, on=_canary(maxLossPercent={})),
    "rollout.canary.maxLossPercent.errors": at(3, on=_canary(maxLossPercent={})),
    "rollout.canary.maxSeconds": at(7200, on=_canary()),
    "rollout.canary.onUndecided": at("Promote", on=_canary()),
}
