"""Decide which trained head replaces the draft of a deployment's spec, and report it on both objects.

The spec of the deployment does not change. Its status names the head in force, and each reconcile reads the head from
the training again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from pydantic import ValidationError

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.deployment_status import TrainedDraftStatus
from specdecode_operator.deployment.conditions import FALSE, MESSAGE_LIMIT, TRUE, UNKNOWN, ConditionUpdate
from specdecode_operator.deployment.desired_state import DesiredState, Gated, Launch, RolledBack
from specdecode_operator.deployment.observed.observation import Observation, rollout_of
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.rollout.readiness import ROLLED_BACK
from specdecode_operator.deployment.rollout.rollout_gate import GATE_FAILED
from specdecode_operator.deployment.speculation_policy import refusal
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip
from specdecode_operator.training.observation import Training
from specdecode_operator.training.offers import NotOffered, OfferedHead, Offers, offer_of, offers_of

PROMOTED: Final = "Promoted"
ROLLOUT_IN_PROGRESS: Final = "RolloutInProgress"
HEAD_REFUSED: Final = "HeadRefused"
NO_HEAD: Final = "NoHeadOffered"
_NOT_AGAIN: Final = frozenset({ROLLED_BACK, GATE_FAILED})
_MOST_FAILED: Final = 16
_TIME: Final = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True)
class Rollouts:
    """State of a deployment with the head in force."""

    desired: DesiredState
    observation: Observation
    refused: Callable[[OfferedHead], str]
    """Returns the reason why another head cannot be planned, or an empty string."""

    by_policy: bool = False
    """Whether a policy replaced the speculation, so that a failure is not a failure of the head."""

    @property
    def settled(self) -> bool:
        """Whether the engines of the current spec serve, and no rollout is in progress."""
        if self.observation.blocked is not None or not isinstance(self.desired.outcome, Launch):
            return False
        rollout = rollout_of(self.desired.outcome, self.observation)
        return rollout.complete and rollout.wanted > 0

    @property
    def failure(self) -> NotOffered | None:
        """Reason to withdraw the head in force: its engines failed, or can no longer be planned."""
        outcome = self.desired.outcome
        if self.by_policy:
            return None
        if isinstance(outcome, RolledBack):
            return NotOffered(ROLLED_BACK, str(outcome.failure))
        if isinstance(outcome, Gated) and outcome.held.failed:
            return NotOffered(GATE_FAILED, outcome.held.message)
        why = refusal(self.desired)
        return NotOffered(HEAD_REFUSED, why) if why else None


def choose(
    offers: Offers | None, rollouts: Rollouts, before: TrainedDraftStatus | None, now: datetime
) -> TrainedDraftStatus | None:
    """Return the head that is in force from the next reconcile on; None without trainedDrafts.

    The status names the head before its rollout, so that captures that judge the new engines read the same spec.
    """
    if offers is None:
        return None
    present, before = offers.present, before or TrainedDraftStatus()
    if present is not None and (why := rollouts.failure):
        return _withdrawn(offers.body, present, before, why)
    best = next((each for each in offers.heads if each.engine_of(offers.body) not in before.failed), None)
    if best is None:
        return _told(TrainedDraftStatus(failed=before.failed), *_none_offered(offers, before))
    refused = rollouts.refused(best) if rollouts.settled and best != present else ""
    if present is not None and (best == present or refused or not rollouts.settled):
        return _in_force(present, before, rollouts)
    return _replaced(best, refused, before, rollouts, now)


def _replaced(
    best: OfferedHead, refused: str, before: TrainedDraftStatus, rollouts: Rollouts, now: datetime
) -> TrainedDraftStatus:
    """Put another head in force, unless it is refused or a rollout runs."""
    none = TrainedDraftStatus(failed=before.failed)
    if refused:
        return _told(none, HEAD_REFUSED, f"{best} cannot be served: {refused}")
    if not rollouts.settled:
        return _told(none, ROLLOUT_IN_PROGRESS, f"{best} waits until the engines of the spec serve")
    place = {name: getattr(best, name) for name in ("training", "claim", "path", "sha256")}
    chosen = TrainedDraftStatus(**place, since=now.strftime(_TIME), failed=before.failed)
    return _told(chosen, ROLLOUT_IN_PROGRESS, f"{best} replaces the draft of the spec; rollout is starting")


def _told(status: TrainedDraftStatus, reason: str, message: str) -> TrainedDraftStatus:
    return status.model_copy(update={"reason": reason, "message": clip(printable(message), MESSAGE_LIMIT)})


def _withdrawn(body: Body, head: OfferedHead, before: TrainedDraftStatus, why: NotOffered) -> TrainedDraftStatus:
    """Return to the draft of the spec. A head whose rollout failed is not offered again with these settings."""
    failed = [head.engine_of(body), *before.failed] if why.reason in _NOT_AGAIN else before.failed
    status = TrainedDraftStatus(failed=list(dict.fromkeys(failed))[:_MOST_FAILED])
    return _told(status, why.reason, f"{head} is withdrawn: {why.message}")


def _in_force(head: OfferedHead, before: TrainedDraftStatus, rollouts: Rollouts) -> TrainedDraftStatus:
    if rollouts.settled:
        return _told(before, PROMOTED, f"{head} replaces the draft of the spec")
    return _told(before, ROLLOUT_IN_PROGRESS, f"{head} replaces the draft of the spec; not all engines serve it yet")


def _none_offered(offers: Offers, before: TrainedDraftStatus) -> tuple[str, str]:
    if offers.heads and before.reason in _NOT_AGAIN and before.message is not None:
        # The message of the failure stays until another head is offered.
        return str(before.reason), before.message
    if offers.heads:
        return ROLLED_BACK, f"{offers.heads[0]} was rolled back"
    for name, each in offers.invalid.items():
        return each.reason, f"training {name}: {each.message}"
    return NO_HEAD, "No SpecDecodeTraining of this deployment has promote OnBetter and condition Better True"


def is_news(before: TrainedDraftStatus | None, now: TrainedDraftStatus | None) -> bool:
    """Whether a change needs an Event: another head serves, or a head cannot be served."""
    if now is None or now.reason in {None, NO_HEAD, ROLLOUT_IN_PROGRESS}:
        return before is not None and before.training is not None and (now is None or now.training is None)
    known = before or TrainedDraftStatus()
    return (known.training, known.reason) != (now.training, now.reason)


def promoted_condition(training: Training, deployment: Body | None, trainings: Sequence[Body]) -> ConditionUpdate:
    """Return the condition Promoted of a training, from the status of its deployment.

    ``trainings`` are all trainings of the deployment.
    """
    if deployment is None:
        message = f"spec.deployment: {training.spec.get('deployment')}: not found"
        return ConditionUpdate(PROMOTED, FALSE, "DeploymentNotFound", message)
    try:
        offer = offer_of(training, SpecDecodeDeploymentSpec.parse(deployment["spec"], newer=True))
    except ValidationError:
        return ConditionUpdate(PROMOTED, UNKNOWN, "NotAccepted", "The spec of the deployment is invalid")
    if isinstance(offer, NotOffered):
        return ConditionUpdate(PROMOTED, offer.status, offer.reason, offer.message)
    offers = offers_of(deployment, trainings)
    if offers is None:
        message = (
            "spec.speculation.trainedDrafts of the deployment is false: set it to true, or promote the head manually"
        )
        return ConditionUpdate(PROMOTED, FALSE, "NotEnabled", message)
    return _promoted(offer, offers)


def _promoted(offer: OfferedHead, offers: Offers) -> ConditionUpdate:
    draft = parse_deployment(offers.body).status.trained_draft or TrainedDraftStatus()
    if offer.is_named_by(draft) and draft.reason == PROMOTED:
        message = f"The deployment serves this head, in force since {draft.since}"
        return ConditionUpdate(PROMOTED, TRUE, PROMOTED, message)
    if offer.is_named_by(draft):
        message = "The deployment is rolling out engines with this head"
        return ConditionUpdate(PROMOTED, UNKNOWN, ROLLOUT_IN_PROGRESS, message)
    if offer.engine_of(offers.body) in draft.failed:
        message = "The rollout of this head failed; see status.trainedDraft of the deployment"
        return ConditionUpdate(PROMOTED, FALSE, ROLLED_BACK, message)
    newest = offers.heads[0] if offers.heads else offer
    if newest.training != offer.training:
        message = f"Training {newest.training} is newer and has a better head"
        return ConditionUpdate(PROMOTED, FALSE, "NewerHead", message)
    if draft.reason == HEAD_REFUSED:
        return ConditionUpdate(PROMOTED, FALSE, HEAD_REFUSED, draft.message or "")
    return ConditionUpdate(
        PROMOTED, UNKNOWN, ROLLOUT_IN_PROGRESS, "Waiting for a rollout; see status.trainedDraft of the deployment"
    )
