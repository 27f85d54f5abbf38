"""What Ready and Available say to people and to GitOps tools, whole: status, reason and message."""

from typing import Any

import pytest

from specdecode_operator.api.base import Body
from specdecode_operator.api.status.deployment import Condition
from specdecode_operator.deployment.blocked import Blocked
from specdecode_operator.deployment.conditions import FALSE, TRUE, UNKNOWN, ConditionUpdate
from specdecode_operator.deployment.pods.readiness import (
    Readiness,
    available_condition,
    earlier_engines_condition,
    name_claim_users,
    rolled_back,
    summarize,
)
from specdecode_operator.deployment.pods.rollout import Rollout
from tests.support.objects import deployment

CRASHED = Blocked("EngineFailed", "engine ended with exit code 1")
PERMANENT = Blocked("OutOfKVCache", "no room for the cache", permanent=True)
NO_ROOM = Blocked("Unschedulable", "no node takes the pod", waits=True)
DRAFTS = ConditionUpdate("SpeculationActive", TRUE, "Drafting", "it drafts")


def rollout(available: int = 1, updated: int = 2, **changes: Any) -> Rollout:
    """Two engines are wanted."""
    fields: dict[str, Any] = {"wanted": 2, "replicas": 2, "settled": True, "blocked": None, **changes}
    return Rollout(available=available, updated=updated, **fields)


@pytest.mark.parametrize(
    ("rollout", "status", "reason", "message"),
    [
        (rollout(0, 0, wanted=0, replicas=0), TRUE, "NoEngineWanted", "no engine is asked for"),
        (rollout(2), TRUE, "EnginesServe", "2 of 2 engines serve"),
        (rollout(blocked=CRASHED), FALSE, "EngineFailed", "1 of 2 engines serve: engine ended with exit code 1"),
        (rollout(), FALSE, "Starting", "1 of 2 engines serve"),
    ],
    ids=["none wanted", "all", "one crashed", "one starts"],
)
def test_available_is_whether_all_engines_serve(rollout: Rollout, status: Any, reason: str, message: str) -> None:
    assert available_condition(rollout) == ConditionUpdate("Available", status, reason, message)


@pytest.mark.parametrize("workload", [None, {}, deployment(replicas=1, updated=1, available=0)], ids=str)
def test_where_nothing_is_launched_and_nothing_serves_availability_is_unknown(workload: Body | None) -> None:
    said = ConditionUpdate("Available", UNKNOWN, "NotLaunched", "nothing is launched for this spec")
    assert earlier_engines_condition(workload) == said


@pytest.mark.parametrize(
    "status", [{"availableReplicas": 2, "readyReplicas": 3}, {"readyReplicas": 2}], ids=["deployment", "groups"]
)
def test_earlier_engines_that_serve_are_counted(status: Body) -> None:
    message = "2 engines that were launched earlier go on serving; nothing is launched for this spec"
    assert earlier_engines_condition({"status": status}) == ConditionUpdate(
        "Available", TRUE, "EarlierEnginesServe", message
    )


GIVEN_UP = "no engine of this spec was ready within the 600 s given to it; "
SUMMARIES = {
    "serves": (rollout(2), Readiness(TRUE, "Serving", "2 of 2 engines serve")),
    "permanent trouble": (
        rollout(blocked=PERMANENT),
        Readiness(FALSE, "OutOfKVCache", "no room for the cache", stalled=True),
    ),
    "blocked": (
        rollout(blocked=CRASHED),
        Readiness(UNKNOWN, "EngineFailed", "engine ended with exit code 1", reconciling=True),
    ),
    "starting": (
        rollout(),
        Readiness(UNKNOWN, "Starting", "1 of 2 engines serve this spec, 1 to come", reconciling=True),
    ),
    "given up, cause unknown": (
        rollout(overdue=True, deadline_s=600),
        Readiness(FALSE, "EngineReadyTimeout", GIVEN_UP + "the logs of its pods tell how far it got", stalled=True),
    ),
    "given up, cause known": (
        rollout(overdue=True, deadline_s=600, blocked=CRASHED),
        Readiness(FALSE, "EngineReadyTimeout", GIVEN_UP + "EngineFailed: engine ended with exit code 1", stalled=True),
    ),
    "overdue, but it waits": (
        rollout(overdue=True, deadline_s=600, blocked=NO_ROOM),
        Readiness(UNKNOWN, "Unschedulable", "no node takes the pod", reconciling=True),
    ),
}


@pytest.mark.parametrize(("rollout", "said"), SUMMARIES.values(), ids=SUMMARIES)
def test_a_new_spec_is_summed_up(rollout: Rollout, said: Readiness) -> None:
    assert summarize(rollout, DRAFTS, None, 1) == said


def ready_before(status: Any = TRUE, reason: str = "Serving", generation: int = 1) -> Condition:
    fields = {
        "type": "Ready",
        "message": "",
        "observed_generation": generation,
        "last_transition_time": "2026-01-01T00:00:00Z",
    }
    return Condition(status=status, reason=reason, **fields)


@pytest.mark.parametrize(
    ("before", "lost"),
    [
        (ready_before(), True),
        (ready_before(reason="SpeculationInactive"), True),
        (ready_before(FALSE, "ReplicasLost"), True),
        (ready_before(FALSE), False),
        (ready_before(reason="Suspended"), False),
        (ready_before(generation=2), False),
        (ready_before(FALSE, "ReplicasLost", generation=2), False),
    ],
    ids=["served", "served without drafting", "lost", "never ready", "suspended", "another spec", "another's loss"],
)
def test_engines_are_lost_where_this_very_spec_served(before: Condition, *, lost: bool) -> None:
    assert (summarize(rollout(), DRAFTS, before, 1).reason == "ReplicasLost") is lost


def test_a_loss_names_its_cause_where_it_is_known() -> None:
    counts = "1 of 2 engines serve"
    lost = Readiness(FALSE, "ReplicasLost", counts, reconciling=True)
    assert summarize(rollout(), DRAFTS, ready_before(), 1) == lost
    crashed = Readiness(FALSE, "ReplicasLost", f"{counts}: engine ended with exit code 1", reconciling=True)
    assert summarize(rollout(blocked=CRASHED), DRAFTS, ready_before(), 1) == crashed


def test_a_paused_rollout_says_how_far_it_is() -> None:
    message = (
        "spec.rollout.paused is true: 1 of 2 engines are of this spec, 1 serve in all; it goes on when paused is false"
    )
    said = Readiness(UNKNOWN, "RolloutPaused", message, reconciling=True)
    assert summarize(rollout(updated=1), DRAFTS, None, 1, paused=True) == said
    assert summarize(rollout(updated=2), DRAFTS, None, 1, paused=True).reason == "Starting"


BACK = "the engines of this spec never served (EngineFailed); those that served last are "


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        (
            rollout(2),
            Readiness(
                FALSE,
                "RolledBack",
                f"{BACK}back, 2 of 2 engines serve; this spec is not tried again before it changes",
                stalled=True,
            ),
        ),
        (rollout(), Readiness(FALSE, "RolledBack", f"{BACK}being put back, 1 of 2 engines serve", reconciling=True)),
        (
            rollout(blocked=NO_ROOM),
            Readiness(
                FALSE,
                "RolledBack",
                f"{BACK}being put back, 1 of 2 engines serve: Unschedulable: no node takes the pod",
                reconciling=True,
            ),
        ),
    ],
    ids=["back", "on the way back", "held up"],
)
def test_a_spec_that_was_rolled_back_says_so(rollout: Rollout, said: Readiness) -> None:
    assert rolled_back(rollout, "EngineFailed") == said


def test_who_shares_a_claim_is_named_only_where_a_pod_waits_for_it() -> None:
    held, fix = (
        Readiness(UNKNOWN, "VolumeInUse", "the claim is taken", reconciling=True),
        "use a claim with ReadWriteMany",
    )
    shared = name_claim_users(held, ["a", "b"])
    assert shared.message == (
        "the claim is taken; SpecDecodeDeployment a and b names it too: give each a claim of its own, suspend one,"
        f" or {fix}"
    )
    assert (shared.reason, shared.reconciling) == ("VolumeInUse", True)
    alone = "the claim is taken; an earlier pod of this object may be the one: suspend the object first, or " + fix
    assert name_claim_users(held, []).message == alone
    other = Readiness(UNKNOWN, "Starting", "it starts", reconciling=True)
    assert name_claim_users(other, ["a"]) is other


@pytest.mark.parametrize(
    ("speculation", "reason"),
    [
        (ConditionUpdate("SpeculationActive", FALSE, "NothingDrafted", "no drafts"), "SpeculationInactive"),
        (ConditionUpdate("SpeculationActive", FALSE, "Disabled", "off"), "Serving"),
        (ConditionUpdate("SpeculationActive", UNKNOWN, "NoTraffic", "nothing asked"), "Serving"),
    ],
    ids=["drafts nothing", "not asked for", "not known"],
)
def test_an_engine_that_does_not_draft_is_ready_and_says_so(speculation: ConditionUpdate, reason: str) -> None:
    said = summarize(rollout(2), speculation, None, 1)
    assert (said.status, said.reason) == (TRUE, reason)
    assert (said.message == "2 of 2 engines serve, but they do not draft: no drafts") is (reason != "Serving")
