"""Decide which trained head replaces the draft of a deployment's spec, and report it on both objects.

The spec of the deployment stays as written. Its status names the head in force, and the training provides it again at
each reconcile.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from pydantic import ValidationError

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.deployment_status import SpecDecodeDeploymentStatus, TrainedDraftStatus
from specdecode_operator.deployment.conditions import FALSE, TRUE, UNKNOWN, ConditionUpdate
from specdecode_operator.deployment.desired_state import DesiredState, Gated, Launch, RolledBack
from specdecode_operator.deployment.observed.observation import Observation, rollout_of
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.rollout.readiness import ROLLED_BACK
from specdecode_operator.deployment.rollout.rollout_gate import GATE_FAILED
from specdecode_operator.deployment.speculation_policy import refusal
from specdecode_operator.training.observation import Training
from specdecode_operator.training.offers import NotOffered, OfferedHead, Offers, offer_of, offers_of

TRAINED_DRAFT: Final = "TrainedDraft"
PROMOTED: Final = "Promoted"
ROLLOUT_IN_PROGRESS: Final = "RolloutInProgress"
HEAD_REFUSED: Final = "HeadRefused"
_NOT_AGAIN: Final = frozenset({ROLLED_BACK, GATE_FAILED})
_MOST_FAILED: Final = 16
_TIME: Final = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True)
class Choice:
    """What a deployment's status says about trained drafts."""

    status: TrainedDraftStatus | None = None
    condition: ConditionUpdate | None = None


NOTHING_CHOSEN: Final = Choice()


@dataclass(frozen=True)
class Rollouts:
    """State of a deployment with the head in force."""

    desired: DesiredState
    observation: Observation
    refused: Callable[[OfferedHead], str]
    """Returns why another head cannot be planned; an empty text if it can."""

    by_policy: bool = False
    """Whether a policy replaced the speculation, so that its failures are not the head's."""

    @property
    def settled(self) -> bool:
        """Whether the engines of the present spec serve, and no rollout runs."""
        if self.observation.blocked is not None or not isinstance(self.desired.outcome, Launch):
            return False
        rollout = rollout_of(self.desired.outcome, self.observation)
        return rollout.complete and rollout.wanted > 0

    @property
    def failure(self) -> NotOffered | None:
        """Why the head in force must be withdrawn: its engines failed, or they can no longer be planned."""
        outcome = self.desired.outcome
        if self.by_policy:
            return None
        if isinstance(outcome, RolledBack):
            return NotOffered(ROLLED_BACK, str(outcome.failure))
        if isinstance(outcome, Gated) and outcome.held.failed:
            return NotOffered(GATE_FAILED, outcome.held.message)
        why = refusal(self.desired)
        return NotOffered(HEAD_REFUSED, why) if why else None


def choose(offers: Offers | None, rollouts: Rollouts, before: SpecDecodeDeploymentStatus, now: datetime) -> Choice:
    """Return the head that is in force from the next reconcile on.

    The status names it before anything is rolled out, so that captures that judge the new engines see the same spec.
    """
    if offers is None:
        return NOTHING_CHOSEN
    present, status = offers.present, before.trained_draft or TrainedDraftStatus()
    if present is None:
        status = TrainedDraftStatus(failed=status.failed)
    elif why := rollouts.failure:
        return _withdrawn(offers.body, present, status, why)
    best = next((each for each in offers.heads if each.engine_of(offers.body) not in status.failed), None)
    if best is None:
        return Choice(status, _none_offered(offers, before))
    if best == present:
        return Choice(status, _in_force(best, rollouts))
    refused = rollouts.refused(best) if rollouts.settled else ""
    if not rollouts.settled or refused:
        return Choice(status, _waits(best, refused) if present is None else _in_force(present, rollouts))
    place = {name: getattr(best, name) for name in ("training", "claim", "path", "sha256")}
    message = f"{best} replaces the draft of the spec; its rollout begins"
    begins = ConditionUpdate(TRAINED_DRAFT, UNKNOWN, ROLLOUT_IN_PROGRESS, message)
    return Choice(TrainedDraftStatus(**place, since=now.strftime(_TIME), failed=status.failed), begins)


def _withdrawn(body: Body, head: OfferedHead, status: TrainedDraftStatus, why: NotOffered) -> Choice:
    """Return to the draft of the spec. A head whose rollout failed is not offered again with these settings."""
    failed = [head.engine_of(body), *status.failed] if why.reason in _NOT_AGAIN else status.failed
    condition = ConditionUpdate(TRAINED_DRAFT, FALSE, why.reason, f"{head} is withdrawn: {why.message}")
    return Choice(TrainedDraftStatus(failed=list(dict.fromkeys(failed))[:_MOST_FAILED]), condition)


def _waits(head: OfferedHead, refused: str) -> ConditionUpdate:
    if refused:
        return ConditionUpdate(TRAINED_DRAFT, FALSE, HEAD_REFUSED, f"{head} cannot be served: {refused}")
    message = f"{head} is offered: it replaces the draft when the engines of the present spec serve"
    return ConditionUpdate(TRAINED_DRAFT, UNKNOWN, ROLLOUT_IN_PROGRESS, message)


def _in_force(head: OfferedHead, rollouts: Rollouts) -> ConditionUpdate:
    if rollouts.settled:
        return ConditionUpdate(TRAINED_DRAFT, TRUE, PROMOTED, f"{head} replaces the draft of the spec")
    message = f"{head} replaces the draft of the spec; its engines do not all serve yet"
    return ConditionUpdate(TRAINED_DRAFT, UNKNOWN, ROLLOUT_IN_PROGRESS, message)


def _none_offered(offers: Offers, before: SpecDecodeDeploymentStatus) -> ConditionUpdate:
    said = next((each for each in before.conditions if each.type == TRAINED_DRAFT), None)
    if offers.heads and said is not None and said.reason in _NOT_AGAIN:
        # The message of the failure stays until another head is offered.
        return ConditionUpdate(TRAINED_DRAFT, FALSE, said.reason, said.message)
    if offers.heads:
        return ConditionUpdate(TRAINED_DRAFT, FALSE, ROLLED_BACK, f"{offers.heads[0]} was rolled back")
    for name, each in offers.invalid.items():
        return ConditionUpdate(TRAINED_DRAFT, FALSE, each.reason, f"training {name}: {each.message}")
    message = "No SpecDecodeTraining of this deployment has promote OnBetter and condition Better True"
    return ConditionUpdate(TRAINED_DRAFT, FALSE, "NoHeadOffered", message)


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
        message = "spec.speculation.trainedDrafts of the deployment is not true: set it, or promote the head by hand"
        return ConditionUpdate(PROMOTED, FALSE, "NotEnabled", message)
    return _promoted(offer, offers)


def _promoted(offer: OfferedHead, offers: Offers) -> ConditionUpdate:
    status = parse_deployment(offers.body).status
    draft = status.trained_draft or TrainedDraftStatus()
    said = next((each for each in status.conditions if each.type == TRAINED_DRAFT), None)
    if offer.is_named_by(draft) and said is not None and said.status is TRUE:
        return ConditionUpdate(PROMOTED, TRUE, PROMOTED, f"The deployment serves this head since {draft.since}")
    if offer.is_named_by(draft):
        message = "The deployment rolls out engines with this head"
        return ConditionUpdate(PROMOTED, UNKNOWN, ROLLOUT_IN_PROGRESS, message)
    if offer.engine_of(offers.body) in draft.failed:
        message = "The rollout of this head failed; see condition TrainedDraft of the deployment"
        return ConditionUpdate(PROMOTED, FALSE, ROLLED_BACK, message)
    newest = offers.heads[0] if offers.heads else offer
    if newest.training != offer.training:
        message = f"Training {newest.training} is newer, and its head is better, too"
        return ConditionUpdate(PROMOTED, FALSE, "NewerHead", message)
    reason = said.reason if said is not None else ROLLOUT_IN_PROGRESS
    return ConditionUpdate(PROMOTED, UNKNOWN, reason, "See condition TrainedDraft of the deployment")
