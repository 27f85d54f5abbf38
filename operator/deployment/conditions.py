"""Status conditions, and the reason and message of a blocked object.

Generation and transition time are added when the status is written.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from specdecode_operator.api.deployment_status import Condition, ConditionStatus
from specdecode_operator.cluster.clock import rfc3339
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip


@dataclass(frozen=True)
class Blocked:
    """Why an engine, a Job or a capture does not run; reason and message go into a condition."""

    reason: str
    message: str
    permanent: bool = False  # Needs a user, so the object is Stalled; otherwise it may resolve without one
    waits: bool = False


OPERATOR_IMAGE_UNKNOWN: Final = Blocked(
    "OperatorImageUnknown",
    "The operator does not know its own image, which load generators, replays and model readers use. Set the"
    " environment variable SPECDECODE_OPERATOR_IMAGE of the operator, or POD_NAME and POD_NAMESPACE as in its"
    " manifests",
)
TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN
MESSAGE_LIMIT = 4096  # Characters of a message, which may include untrusted output of pods
_REASON_LIMIT = 64
_BEGINS = (UNKNOWN, "Starting")
SUSPENDED_FOR_CAPTURE = "SuspendedForCapture"
SEE_READY: Final = "See condition Ready"
"""Message of a condition that would repeat the message of Ready."""

EFFECTIVE: Final = "SpeculationEffective"
CRASH_LOOP: Final = "CrashLoop"
WRONG_ANSWERS: Final = "WrongAnswers"


@dataclass(frozen=True)
class ConditionUpdate:
    """A condition before it gets its generation and time."""

    type: str
    status: ConditionStatus
    reason: str
    message: str


def kept(condition: Condition | None, generation: int) -> ConditionUpdate | None:
    """Return a condition unchanged if it belongs to the current generation of the spec."""
    if condition is None or condition.observed_generation != generation:
        return None
    return ConditionUpdate(condition.type, condition.status, condition.reason, condition.message)


def full_message(condition: Condition, conditions: Sequence[Condition]) -> str:
    """Return the message of a condition, or the message of Ready if it refers to Ready."""
    if condition.message != SEE_READY:
        return condition.message
    return next((each.message for each in conditions if each.type == "Ready"), condition.message)


def stamp(
    conditions: list[ConditionUpdate], previous: list[Condition], generation: int, now: datetime
) -> list[Condition]:
    """Return the conditions with generation and transition time, which changes with the status.

    The time of ``Ready`` also changes when a capture takes or returns the GPUs: from the return on, captures of other
    deployments wait for the engines for a limited time.
    """
    before = {condition.type: condition for condition in previous}
    stamped = []
    for update in conditions:
        old = before.get(update.type)
        time = rfc3339(now)
        if old is not None and old.status is update.status:
            lent = {each.reason == SUSPENDED_FOR_CAPTURE for each in (old, update)}
            time = old.last_transition_time if update.type != "Ready" or len(lent) == 1 else time
        stamped.append(
            Condition(
                type=update.type,
                status=update.status,
                reason=re.sub(r"[^A-Za-z0-9_,:]", "", update.reason)[:_REASON_LIMIT] or update.type,
                message=clip(printable(update.message), MESSAGE_LIMIT),
                observed_generation=generation,
                last_transition_time=time,
            )
        )
    return stamped


def changed_conditions(old: list[Condition], new: list[Condition]) -> list[Condition]:
    """Return the conditions that get an Event: status or reason changed, and the change matters to a user."""
    before = {condition.type: (condition.status, condition.reason) for condition in old} or {"Ready": _BEGINS}
    # Ready already covers Reconciling, Stalled, Available and WaitingForGPUs.
    told: dict[str, tuple[ConditionStatus, ...]] = {
        **dict.fromkeys(("Reconciling", "Stalled", "Available", "WaitingForGPUs"), ()),
        "Accepted": (FALSE,),
        "Ready": (TRUE, FALSE, UNKNOWN),
    }
    own = [each for each in new if each.message != SEE_READY]
    changed = [each for each in own if before.get(each.type) != (each.status, each.reason)]
    return [each for each in changed if each.status in told.get(each.type, (TRUE, FALSE)) or each.reason in CAVEATS]


LOSSY_REJECTION_SAMPLING: Final = "LossyRejectionSampling"
NEWER_THAN_KNOWN: Final = "NewerThanKnown"
CAVEATS: Final = frozenset({LOSSY_REJECTION_SAMPLING, NEWER_THAN_KNOWN})
"""Reasons of Accepted=True that get an Event: the spec is valid, but has a consequence that a user should know."""

REASONS: Final[Mapping[str, str]] = {
    "method": "OtherMethod",
    "numSpeculativeTokens": "OtherDraftLength",
    "numSpeculativeTokensByBatchSize": "ScheduleDropped",
    "parallelism.draftTensor": "OtherDraftTensor",
    "adaptiveVerification": "NotAdaptive",
    "rejectionSampling": "OtherRejectionSampling",
    "draftSampling": "OtherDraftSampling",
    "draftLmHeadQuantization": "OtherDraftHead",
}
OTHER_SETTING: Final = "OtherSetting"
OTHERWISE: Final = frozenset({*REASONS.values(), OTHER_SETTING})
