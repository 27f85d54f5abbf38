"""Snapshots of the conditions Ready and Available: status, reason and message."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment_status import Condition
from specdecode_operator.deployment.conditions import FALSE, TRUE, UNKNOWN, Blocked, ConditionUpdate
from specdecode_operator.deployment.rollout.readiness import (
    EngineCounts,
    Lending,
    Readiness,
    available_condition,
    name_claim_users,
    readiness_of,
    rolled_back,
    summarize,
    suspended_for_capture,
)
from specdecode_operator.deployment.rollout.rollout_progress import Rollout

CRASHED = Blocked("EngineFailed", "engine ended with exit code 1")
PERMANENT = Blocked("OutOfKVCache", "no room for the cache", permanent=True)
NO_ROOM = Blocked("Unschedulable", "no node takes the pod", waits=True)
DRAFTS = ConditionUpdate("SpeculationActive", TRUE, "Drafting", "it drafts")


def rollout(available: int = 1, updated: int = 2, **changes: Any) -> Rollout:
    """Two engines are wanted."""
    fields: dict[str, Any] = {"wanted": 2, "replicas": 2, "settled": True, "blocked": None, **changes}
    return Rollout(available=available, updated=updated, **fields)


STARTING = Readiness(UNKNOWN, "Starting", "0 of 2 engines of this spec ready", reconciling=True)
TO_ZERO = Readiness(TRUE, "ScaledToZero", "spec.replicas is 0: no engine runs")


@pytest.mark.parametrize(
    ("rollout", "readiness", "said"),
    [
        (rollout(0, 0, wanted=0, replicas=0), TO_ZERO, (FALSE, "ScaledToZero", "See condition Ready")),
        (rollout(0, 0, wanted=0, blocked=CRASHED), TO_ZERO, (FALSE, "ScaledToZero", "See condition Ready")),
        (rollout(2), STARTING, (TRUE, "EnginesServe", "2 of 2 engines ready")),
        (rollout(2, updated=1), STARTING, (TRUE, "EnginesServe", "2 of 2 engines ready")),
        (rollout(3), STARTING, (TRUE, "EnginesServe", "3 of 2 engines ready")),
        (rollout(), STARTING, (TRUE, "SomeEnginesServe", "1 of 2 engines ready")),
        (
            rollout(blocked=CRASHED),
            STARTING,
            (TRUE, "SomeEnginesServe", "1 of 2 engines ready: engine ended with exit code 1"),
        ),
        (rollout(0), STARTING, (FALSE, "Starting", "See condition Ready")),
        (
            rollout(0, blocked=CRASHED),
            Readiness(FALSE, "ReplicasLost", "0 of 2 engines ready"),
            (FALSE, "EngineFailed", "0 of 2 engines ready: engine ended with exit code 1"),
        ),
        (
            rollout(blocked=CRASHED),
            readiness_of(CRASHED),
            (TRUE, "SomeEnginesServe", "1 of 2 engines ready; see condition Ready"),
        ),
        (
            rollout(0, blocked=CRASHED),
            readiness_of(CRASHED),
            (FALSE, "EngineFailed", "0 of 2 engines ready; see condition Ready"),
        ),
    ],
    ids=[
        "zero",
        "zero, crashed before",
        "all",
        "all, rolling out",
        "more",
        "some",
        "one crashed",
        "starting",
        "all crashed",
        "one crashed, as Ready reports",
        "all crashed, as Ready reports",
    ],
)
def test_available_is_true_if_any_engine_serves(
    rollout: Rollout, readiness: Readiness, said: tuple[Any, str, str]
) -> None:
    assert available_condition(EngineCounts.of_rollout(rollout), readiness) == ConditionUpdate("Available", *said)


@pytest.mark.parametrize(
    "status", [{"availableReplicas": 2, "readyReplicas": 3}, {"readyReplicas": 2}], ids=["deployment", "groups"]
)
def test_engines_of_an_earlier_spec_keep_available_true(status: Body) -> None:
    said = available_condition(EngineCounts.of_earlier({"status": status}), Readiness(FALSE, "Invalid", ""))
    assert (said.status, said.reason) == (TRUE, "EarlierEnginesServe")
    assert said.message.startswith("2 engines of an earlier spec ready")


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ({}, "the expected end is known when its Job starts"),
        ({"latest_end": NOON}, "ends 2026-01-01 12:00 UTC at the latest"),
        ({"latest_end": NOON + timedelta(seconds=1)}, "ends 2026-01-01 12:01 UTC at the latest"),
        ({"expected_end": NOON - timedelta(seconds=61)}, "expected end 2026-01-01 11:59 UTC"),
        (
            {"expected_end": NOON, "latest_end": NOON + timedelta(hours=1)},
            "expected end 2026-01-01 12:00 UTC, 2026-01-01 13:00 UTC at the latest",
        ),
        (
            {"expected_end": NOON, "latest_end": NOON + timedelta(hours=1), "overdue_from": NOON},
            "overdue, expected end was 2026-01-01 12:00 UTC, 2026-01-01 13:00 UTC at the latest",
        ),
        ({"latest_end": NOON, "overdue_from": NOON}, "overdue, expected end was 2026-01-01 12:00 UTC"),
        ({"overdue_from": NOON}, "overdue, its Job has not started"),
    ],
    ids=[
        "not started",
        "bound only",
        "a second more",
        "expected only",
        "both",
        "overdue",
        "past the bound",
        "never started",
    ],
)
def test_capture_that_uses_the_gpus_is_named_with_its_end_time(times: dict[str, datetime], words: str) -> None:
    said = suspended_for_capture(Lending("nightly", **times), None, NOON)
    assert (said.status, said.reason, said.reconciling, said.stalled) == (FALSE, "SuspendedForCapture", True, False)
    assert said.message == f"No engine runs: capture nightly uses the engines' GPUs; {words}"


GIVEN_UP = "no engine of this spec became ready within 600 s; "
SUMMARIES = {
    "serves": (rollout(2), Readiness(TRUE, "Serving", "2 of 2 engines ready")),
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
        Readiness(UNKNOWN, "Starting", "1 of 2 engines of this spec ready", reconciling=True),
    ),
    "earlier engines serve, one new one": (
        rollout(2, updated=1),
        Readiness(UNKNOWN, "Starting", "1 of 2 engines of this spec ready", reconciling=True),
    ),
    "given up, cause unknown": (
        rollout(overdue=True, deadline_s=600),
        Readiness(FALSE, "EngineReadyTimeout", GIVEN_UP + "see the logs of its pods", stalled=True),
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
def test_ready_summarizes_the_rollout_of_a_new_spec(rollout: Rollout, said: Readiness) -> None:
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
def test_replicas_are_lost_only_if_the_same_spec_was_serving(before: Condition, *, lost: bool) -> None:
    assert (summarize(rollout(), DRAFTS, before, 1).reason == "ReplicasLost") is lost


def test_engines_that_the_operator_replaces_are_not_lost() -> None:
    """A trained draft or a policy starts other engines for the same spec, and the earlier ones serve until then."""
    replacing = rollout(available=2, updated=1, replicas=3)
    assert summarize(replacing, DRAFTS, ready_before(), 1) == STARTING


def test_paused_rollout_reports_its_progress() -> None:
    message = (
        "spec.rollout.paused is true: 1 of 2 engines run this spec, 1 of 2 engines ready; set it to false to continue"
    )
    said = Readiness(UNKNOWN, "RolloutPaused", message, reconciling=True)
    assert summarize(rollout(updated=1), DRAFTS, None, 1, paused=True) == said
    assert summarize(rollout(updated=2), DRAFTS, None, 1, paused=True).reason == "Starting"


NEVER_SERVED = "the engines of this spec never served (EngineFailed); "


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        (
            rollout(2),
            Readiness(
                FALSE,
                "RolledBack",
                f"{NEVER_SERVED}rolled back to the previous engines: 2 of 2 engines ready;"
                " change the spec to try again",
                stalled=True,
            ),
        ),
        (
            rollout(),
            Readiness(FALSE, "RolledBack", f"{NEVER_SERVED}rolling back: 1 of 2 engines ready", reconciling=True),
        ),
        (
            rollout(blocked=NO_ROOM),
            Readiness(
                FALSE,
                "RolledBack",
                f"{NEVER_SERVED}rolling back: 1 of 2 engines ready: Unschedulable: no node takes the pod",
                reconciling=True,
            ),
        ),
    ],
    ids=["back", "on the way back", "held up"],
)
def test_rolled_back_spec_reports_cause_and_progress(rollout: Rollout, said: Readiness) -> None:
    assert rolled_back(rollout, "EngineFailed") == said


def test_users_of_a_claim_are_named_only_if_a_pod_waits_for_it() -> None:
    held, fix = (
        Readiness(UNKNOWN, "VolumeInUse", "the claim is taken", reconciling=True),
        "use a claim with ReadWriteMany",
    )
    shared = name_claim_users(held, ["a", "b"])
    assert shared.message == (
        "the claim is taken; SpecDecodeDeployment a and b also uses it; give each object its own claim, suspend one,"
        f" or {fix}"
    )
    assert (shared.reason, shared.reconciling) == ("VolumeInUse", True)
    alone = "the claim is taken; an earlier pod of this object may use it; suspend the object first, or " + fix
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
def test_ready_stays_true_if_the_engine_does_not_draft(speculation: ConditionUpdate, reason: str) -> None:
    said = summarize(rollout(2), speculation, None, 1)
    assert (said.status, said.reason) == (TRUE, reason)
    assert ("see condition SpeculationActive" in said.message) is (reason != "Serving")
