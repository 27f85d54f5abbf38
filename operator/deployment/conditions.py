"""Status conditions, and the reason and message of a blocked object.

Generation and transition time are added when the status is written.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from specdecode_operator.api.deployment_status import Condition, ConditionStatus
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip


@dataclass(frozen=True)
class Blocked:
    """What keeps an engine, a Job or a capture from running; reason and message go into a condition."""

    reason: str
    message: str
    permanent: bool = False  # True where only a person can help: the object is Stalled. Otherwise it may pass by itself
    waits: bool = False


OPERATOR_IMAGE_UNKNOWN: Final = Blocked(
    "OperatorImageUnknown",
    "the operator does not know its own image, which load generators, replays and readers of models run from: set"
    " SPECDECODE_OPERATOR_IMAGE in its environment, or POD_NAME and POD_NAMESPACE as its manifests do",
)
TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN
MESSAGE_LIMIT = 4096  # Characters of a message: pods, which anybody may run, have a say in some
_REASON_LIMIT = 64
_BEGINS = (UNKNOWN, "Starting")
SUSPENDED_FOR_CAPTURE = "SuspendedForCapture"


@dataclass(frozen=True)
class ConditionUpdate:
    """A condition before it gets its generation and time."""

    type: str
    status: ConditionStatus
    reason: str
    message: str


def kept(condition: Condition | None, generation: int) -> ConditionUpdate | None:
    """Return a condition again as it stands, if it is one of the present spec."""
    if condition is None or condition.observed_generation != generation:
        return None
    return ConditionUpdate(condition.type, condition.status, condition.reason, condition.message)


def stamp(
    conditions: list[ConditionUpdate], previous: list[Condition], generation: int, now: datetime
) -> list[Condition]:
    """Return the conditions with generation and time.

    The time changes with the status. For ``Ready`` it also changes when a capture takes the GPUs and when it returns
    them, even if the status is False before and after. Captures of other deployments wait for the engines for a limited
    time from the return on.
    """
    before = {condition.type: condition for condition in previous}
    stamped = []
    for update in conditions:
        old = before.get(update.type)
        unchanged = old is not None and old.status is update.status and not _changes_hands(old, update)
        stamped.append(
            Condition(
                type=update.type,
                status=update.status,
                reason=re.sub(r"[^A-Za-z0-9_,:]", "", update.reason)[:_REASON_LIMIT] or update.type,
                message=clip(printable(update.message), MESSAGE_LIMIT),
                observed_generation=generation,
                last_transition_time=old.last_transition_time
                if old is not None and unchanged
                else now.strftime("%Y-%m-%dT%H:%M:%SZ"),
            )
        )
    return stamped


def _changes_hands(old: Condition, update: ConditionUpdate) -> bool:
    return update.type == "Ready" and (old.reason == SUSPENDED_FOR_CAPTURE) != (update.reason == SUSPENDED_FOR_CAPTURE)


def changed_conditions(old: list[Condition], new: list[Condition]) -> list[Condition]:
    """Return the conditions worth an Event: status or reason differ from before, and a person would want to know.

    An object begins with engines that start, of which Planned and the Deployment's own Events tell.
    """
    before = {condition.type: (condition.status, condition.reason) for condition in old} or {"Ready": _BEGINS}
    return [
        condition
        for condition in new
        if before.get(condition.type) != (condition.status, condition.reason) and _is_worth_an_event(condition)
    ]


def _is_worth_an_event(condition: Condition) -> bool:
    if condition.type in {"Reconciling", "Stalled", "Available"}:
        return False  # Ready says the same
    if condition.type == "WaitingForGPUs":
        return condition.status is TRUE
    if condition.type == "Accepted":
        return condition.status is FALSE
    return condition.type == "Ready" or condition.status is not UNKNOWN


METHOD: Final = "method"
_LENGTH: Final = "numSpeculativeTokens"
_SCHEDULE_FIELD: Final = "numSpeculativeTokensByBatchSize"
_DRAFT_TENSOR: Final = "parallelism.draftTensor"
REASONS: Final[Mapping[str, str]] = {
    METHOD: "OtherMethod",
    _LENGTH: "OtherDraftLength",
    _SCHEDULE_FIELD: "ScheduleDropped",
    _DRAFT_TENSOR: "OtherDraftTensor",
    "adaptiveVerification": "NotAdaptive",
    "rejectionSampling": "OtherRejectionSampling",
    "draftSampling": "OtherDraftSampling",
    "draftLmHeadQuantization": "OtherDraftHead",
}
OTHER_SETTING: Final = "OtherSetting"
OTHERWISE: Final = frozenset({*REASONS.values(), OTHER_SETTING})
