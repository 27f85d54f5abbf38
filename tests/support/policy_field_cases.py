"""For every field of a SpecDecodeDeployment's policy, a value that makes a difference: see field_cases.py."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from specdecode_operator.api.deployment import Policy, PolicyStatus
from specdecode_operator.api.speculation import Speculation
from specdecode_operator.deployment.canaries import hourly_cost, prompts_of
from specdecode_operator.deployment.parsed_deployment import distrusts, serves_without
from specdecode_operator.deployment.speculation_policy import (
    PolicyInputs,
    Remembered,
    Seen,
    judge,
    policy_status,
    read_measured,
    turned_off,
)
from specdecode_operator.enums import PolicyAction, PolicyOutcome
from specdecode_operator.stats.engine_window import Sample, Window, Work
from tests.support.field_cases import FieldCase, at
from tests.support.objects import Body, pair_70b

NOW: Final = datetime(2026, 1, 1, 12, tzinfo=UTC)
ENGINE: Final = "engine"
K3: Final = Speculation.parse({"method": "ngram", "numSpeculativeTokens": 3})
OFF_ARM: Final[Body] = {"name": "off", "speculation": {"method": "none"}}


def measured_capture(
    name: str = "nightly",
    ratio: float = 1.1,
    *,
    arms: Sequence[Body] = ({"name": "as-deployed"}, OFF_ARM),
    loads: Sequence[tuple[float, float]] = ((8, 1.0),),
    **status: object,
) -> Body:
    """Return a capture that compared arms with the first one: each load with a factor of the ratio."""
    compared = [
        {
            "name": arm["name"],
            "verdict": "Pays",
            "message": "m",
            "outputs": "Equal",
            "loads": [
                {"phase": f"p{running}", "running": str(running), "baselineGoodput": str(running * 50), "goodput": "1"}
                | {"verdict": "Pays", "ratio": str(ratio * factor)}
                | {"low": str(ratio * factor - 0.01), "high": str(ratio * factor + 0.01)}
                for running, factor in loads
            ],
        }
        for arm in arms[1:]
    ]
    comparison = {"baseline": arms[0]["name"], "levelPercent": 95, "arms": compared}
    return {
        "metadata": {"name": name, "namespace": "team"},
        "spec": {"deployment": "llama", "arms": list(arms)},
        "status": {"engine": ENGINE, "comparison": comparison, "finishedAt": "2026-01-01T00:00:00Z", **status},
    }


def _with_policy(**fields: object) -> Body:
    return pair_70b(policy={"mode": "Enforce", **fields})


POLICY_FIELDS: Mapping[str, FieldCase] = {
    "policy.mode": at("Advise", on=_with_policy()),
    "policy.paused": at(value=True, on=_with_policy()),
    "policy.onCrashLoop": at("Report", on=_with_policy()),
    "policy.canaries.intervalSeconds": at(60, on=_with_policy(canaries={})),
    "policy.canaries.maxTokens": at(8, on=_with_policy(canaries={})),
    "policy.canaries.prompts[]": at("Once upon a time", on=_with_policy(canaries={})),
    "policy.evidence": at("older", on=_with_policy()),
    "policy.minGainPercent": at(50, on=_with_policy()),
    "policy.windowSeconds": at(1800, on=_with_policy()),
    "policy.cooldownSeconds": at(7200, on=_with_policy()),
    "policy.maxRestartsPerDay": at(1, on=_with_policy()),
    "policy.acceptanceRule": at("Below50Percent", on=_with_policy()),
}
"""Fields of a SpecDecodeDeployment's policy."""


def policy_outcomes(policy: Body | None) -> list[Body]:
    """Return what a policy does with and without evidence, an hour after its last act and a day after it."""
    if policy is None:
        return []
    parsed = Policy.model_validate(policy)
    captures = [measured_capture("older", 0.8, finishedAt="2025-12-01T00:00:00Z"), measured_capture("newer")]
    return [
        _outcome(parsed, found, restarted) for found in (captures, []) for restarted in ([], ["2026-01-01T11:00:00Z"])
    ]


def _outcome(policy: Policy, captures: Sequence[Body], restarted: list[str]) -> Body:
    measured = read_measured(captures, policy.evidence, ENGINE, K3, K3)
    before = PolicyStatus(
        mode=policy.mode,
        action=PolicyAction.KEEP,
        outcome=PolicyOutcome.KEPT,
        reason="Idle",
        message="",
        restarts=restarted,
    )
    case = PolicyInputs(policy, "asked", before, measured)
    end_s = NOW.timestamp()
    looks = [
        Sample(end_s - 900 + passed, 8.0, {"engine": Work(0, passed * 10, passed * 30, passed * 6)})
        for passed in range(0, 901, 30)
    ]
    seen = Seen(end_s, Window(float(policy.window_seconds), looks), start_s=10.0)
    decision, memory = judge(case, seen, Remembered(seen.window, ahead_s={"off": 100.0}), lambda _: "")
    status = policy_status(case, decision, memory, NOW).model_dump(
        mode="json", by_alias=True, exclude={"mode", "message"}
    )
    crashed = turned_off(case, "CrashLoop", "loop", "", NOW).speculation if serves_without(policy) else None
    canaries = policy.canaries
    return {
        **status,
        "decisions": len(status["decisions"]),
        "after crashes": crashed and crashed.method,
        "canaries": canaries and [prompts_of(canaries), hourly_cost(canaries), distrusts(policy)],
    }
