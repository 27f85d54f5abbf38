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
from specdecode_operator.deployment.desired_state import DesiredState, Gated, Launch, NotLaunched, RolledBack
from specdecode_operator.deployment.observed.observation import Observation, rollout_of
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.rollout.readiness import ROLLED_BACK
from specdecode_operator.deployment.rollout.rollout_gate import GATE_FAILED
from specdecode_operator.deployment.speculation_policy import refusal
from specdecode_operator.enums import DraftUpdate
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip
from specdecode_operator.training.in_place import TIME_PER_ENGINE_S, Update, order, update_of, why_restart
from specdecode_operator.training.observation import Training
from specdecode_operator.training.offers import NotOffered, OfferedHead, Offers, is_in_place, offer_of, offers_of

PROMOTED: Final = "Promoted"
ROLLOUT_IN_PROGRESS: Final = "RolloutInProgress"
HEAD_REFUSED: Final = "HeadRefused"
NO_HEAD: Final = "NoHeadOffered"
_NOT_AGAIN: Final = frozenset({ROLLED_BACK, GATE_FAILED})
_MOST_FAILED: Final = 16
_TIME: Final = "%Y-%m-%dT%H:%M:%SZ"
_PAGE: Final = 'documentation: "Serve a head that you trained"'


@dataclass(frozen=True)
class Rollouts:
    """State of a deployment with the head in force."""

    desired: DesiredState
    observation: Observation
    refused: Callable[[OfferedHead], str]
    """Returns the reason why another head cannot be planned, or an empty string."""

    by_policy: bool = False
    """Whether a policy replaced the speculation, so that a failure is not a failure of the head."""

    update: Update | None = None
    """State of the engines that get the head in force without a restart; None if they start with it."""

    update_waits_s: float = 0.0
    """Time since an engine got the head, or since the update began."""

    @property
    def settled(self) -> bool:
        """Whether the engines of the current spec serve, and no rollout is in progress."""
        if self.observation.blocked is not None or not isinstance(self.desired.outcome, Launch):
            return False
        rollout = rollout_of(self.desired.outcome, self.observation)
        return rollout.complete and rollout.wanted > 0

    @property
    def is_updating(self) -> bool:
        """Whether some engines still have to load the head in force, without a restart."""
        return self.update is not None and not self.update.is_complete

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
    if present is not None and (failed := _failed(offers, present, before, rollouts, now)) is not None:
        return failed
    best = next((each for each in offers.heads if each.engine_of(offers.body) not in before.failed), None)
    if best is None:
        return _told(TrainedDraftStatus(failed=before.failed), *_none_offered(offers, before))
    refused = rollouts.refused(best) if rollouts.settled and best != present else ""
    if present is not None and (best == present or refused or not rollouts.settled or rollouts.is_updating):
        return _in_force(present, before, rollouts, offers)
    if refused:
        return _told(_waiting(offers, before), HEAD_REFUSED, f"{best} cannot be served: {refused}")
    return _replaced(best, before, rollouts, offers, now)


def update_state(offers: Offers | None, desired: DesiredState, observation: Observation) -> Update | None:
    """Return the state of the engines that get the head in force without a restart; None without such a head."""
    if offers is None or offers.start is None or offers.present is None:
        return None
    if observation.blocked is not None or not isinstance(desired.outcome, Launch):
        return None
    rollout = rollout_of(desired.outcome, observation)
    return update_of(offers.present, offers.start, rollout.wanted, observation.readings)


def _failed(
    offers: Offers, present: OfferedHead, before: TrainedDraftStatus, rollouts: Rollouts, now: datetime
) -> TrainedDraftStatus | None:
    """Return the status after a failed rollout or update; None without a failure.

    An update without a restart ends with the earlier head if answers were wrong, and otherwise with a rollout.
    """
    if why := rollouts.failure:
        return _withdrawn(offers.body, present, before, why)
    update, start = rollouts.update, offers.start
    if update is None or start is None or update.head == start:
        return None
    head = update.head
    if update.is_wrong:
        # Engines that already loaded the head load the one that they started with, without a restart.
        failed = list(dict.fromkeys([head.engine_of(offers.body), *before.failed]))[:_MOST_FAILED]
        status = _in_place(start, start, TrainedDraftStatus(failed=failed), now)
        message = f"{head} is withdrawn: {update.failure}; training {start.training}'s head replaces it ({_PAGE})"
        return _told(status, ROLLED_BACK, message)
    if update.failure:
        return _with_restart(head, before, update.failure, now)
    if update.waiting and rollouts.update_waits_s > TIME_PER_ENGINE_S:
        late = f"pod {update.waiting[0]} has not reported for {rollouts.update_waits_s:.0f} s"
        return _with_restart(head, before, late, now)
    return None


def _in_place(head: OfferedHead, start: OfferedHead, before: TrainedDraftStatus, now: datetime) -> TrainedDraftStatus:
    """Put a head in force that engines get without a restart."""
    status = _placed(head, before, now)
    return status.model_copy(
        update={"update": DraftUpdate.IN_PLACE, "start_training": start.training, "start_sha256": start.sha256}
    )


def _with_restart(head: OfferedHead, before: TrainedDraftStatus, why: str, now: datetime) -> TrainedDraftStatus:
    """Put a head in force with new engines, although draftUpdate is InPlace."""
    update = {"update": DraftUpdate.RESTART, "update_message": _clipped(f"Engines are restarted: {why}")}
    status = _placed(head, before, now).model_copy(update=update)
    return _told(status, ROLLOUT_IN_PROGRESS, f"{head} replaces the draft of the spec; rollout is starting")


def _placed(head: OfferedHead, before: TrainedDraftStatus, now: datetime) -> TrainedDraftStatus:
    place = {name: getattr(head, name) for name in ("training", "claim", "path", "sha256")}
    return TrainedDraftStatus(**place, since=now.strftime(_TIME), failed=before.failed)


def _waiting(offers: Offers, before: TrainedDraftStatus) -> TrainedDraftStatus:
    """Return a status without a head in force. Engines keep the head that they start with until another is chosen."""
    none = TrainedDraftStatus(failed=before.failed)
    if offers.start is None:
        return none
    return none.model_copy(update={"start_training": before.start_training, "start_sha256": before.start_sha256})


def _replaced(
    best: OfferedHead, before: TrainedDraftStatus, rollouts: Rollouts, offers: Offers, now: datetime
) -> TrainedDraftStatus:
    """Put another head in force, unless a rollout runs."""
    if not rollouts.settled:
        waits = f"{best} waits until all engines of the current spec are ready"
        return _told(_waiting(offers, before), ROLLOUT_IN_PROGRESS, waits)
    outcome = rollouts.desired.outcome
    if is_in_place(offers.body) and isinstance(outcome, Launch):
        start = offers.loaded
        why = "a policy chose other speculation settings" if rollouts.by_policy else why_restart(outcome, start, best)
        if why or start is None:
            return _with_restart(best, before, why, now)
        status = _in_place(best, start, before, now)
        return _told(status, ROLLOUT_IN_PROGRESS, f"{best} replaces {start} without a restart; no engine has it yet")
    chosen = _placed(best, before, now)
    return _told(chosen, ROLLOUT_IN_PROGRESS, f"{best} replaces the draft of the spec; rollout is starting")


def _told(status: TrainedDraftStatus, reason: str, message: str) -> TrainedDraftStatus:
    return status.model_copy(update={"reason": reason, "message": _clipped(message)})


def _clipped(message: str) -> str:
    return clip(printable(message), MESSAGE_LIMIT)


def _withdrawn(body: Body, head: OfferedHead, before: TrainedDraftStatus, why: NotOffered) -> TrainedDraftStatus:
    """Return to the draft of the spec. A head whose rollout failed is not offered again with these settings."""
    failed = [head.engine_of(body), *before.failed] if why.reason in _NOT_AGAIN else before.failed
    status = TrainedDraftStatus(failed=list(dict.fromkeys(failed))[:_MOST_FAILED])
    return _told(status, why.reason, f"{head} is withdrawn: {why.message}")


def _in_force(head: OfferedHead, before: TrainedDraftStatus, rollouts: Rollouts, offers: Offers) -> TrainedDraftStatus:
    if offers.start is None and before.start_training is not None:
        # The head that engines start with is no longer offered, or draftUpdate has changed.
        why = _clipped("Engines are restarted: the head that they start with is no longer offered")
        gone = {"start_training": None, "start_sha256": None, "update": DraftUpdate.RESTART, "update_message": why}
        before = before.model_copy(update=gone)
    if rollouts.update is not None:
        before = before.model_copy(update={"update_message": _clipped(str(rollouts.update))})
    if rollouts.is_updating and before.reason == ROLLED_BACK:
        return before
    if rollouts.is_updating and before.reason != PROMOTED:
        return _told(before, ROLLOUT_IN_PROGRESS, f"{head} replaces the earlier head without a restart")
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


def draft_order(update: Update | None, desired: DesiredState, chosen: TrainedDraftStatus | None) -> str:
    """Return the content of draft.json; empty without an update. ``chosen`` is the next status."""
    if isinstance(desired.outcome, NotLaunched):  # The engines of an earlier spec keep theirs.
        return desired.draft_order
    if update is None or chosen is None or not isinstance(desired.outcome, Launch):
        return ""
    if (chosen.training, chosen.sha256) != (update.head.training, update.head.sha256) or chosen.start_training is None:
        return ""
    return order(update, desired.outcome.facts, everywhere=chosen.reason == PROMOTED)
