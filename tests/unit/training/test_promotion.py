"""The condition Promoted of a training, and the Events about the head in force."""

from typing import Any

import pytest

from specdecode_operator.api.deployment_status import TrainedDraftStatus
from specdecode_operator.training.observation import read_training
from specdecode_operator.training.offers import offers_of
from specdecode_operator.training.promotion import is_news, promoted_condition
from tests.support.better_trainings import SHA256, asking, better_training, head
from tests.support.objects import Body, parent, tiny_cpu

NEWER = better_training("newer", created="2026-02-01T00:00:00Z")
SERVED: Body = {"training": "chat", "sha256": SHA256, "since": "2026-01-02T00:00:00Z"}


def deployment(spec: Body | None = None, **trained_draft: Any) -> Body:
    body = parent(spec or asking(), status={"trainedDraft": trained_draft} if trained_draft else {})
    return {**body, "metadata": {**body["metadata"], "namespace": "team"}}


def promoted(owner: Body | None, *others: Body, **changes: Any) -> tuple[str, str]:
    subject = better_training(**changes)
    found = promoted_condition(read_training(subject), owner, [subject, *others])
    return found.status.value, found.reason


def failed(*trainings: Body) -> list[str]:
    """Internal names of heads in a deployment's list of failed rollouts."""
    offers = offers_of(deployment(), trainings)
    assert offers is not None
    return [each.engine_of(offers.body) for each in offers.heads]


@pytest.mark.parametrize(
    ("owner", "others", "expected"),
    [
        (None, [], ("False", "DeploymentNotFound")),
        (deployment({**asking(), "target": {}}), [], ("Unknown", "NotAccepted")),
        (deployment(tiny_cpu()), [], ("False", "NotEnabled")),
        (deployment(), [], ("Unknown", "RolloutInProgress")),
        (deployment(**SERVED, reason="RolloutInProgress"), [], ("Unknown", "RolloutInProgress")),
        (deployment(**SERVED, reason="Promoted"), [], ("True", "Promoted")),
        (deployment(**{**SERVED, "sha256": "cd" * 32}, reason="Promoted"), [], ("Unknown", "RolloutInProgress")),
        (deployment(**{**SERVED, "training": "newer"}, reason="Promoted"), [NEWER], ("False", "NewerHead")),
        (deployment(reason="HeadRefused", message="too large"), [], ("False", "HeadRefused")),
        (deployment(reason="HeadRefused", message="too large"), [NEWER], ("False", "NewerHead")),
        (deployment(failed=failed(better_training())), [], ("False", "RolledBack")),
        (deployment(failed=failed(better_training())), [NEWER], ("False", "RolledBack")),
    ],
)
def test_condition_follows_the_deployment(owner: Body | None, others: list[Body], expected: tuple[str, str]) -> None:
    assert promoted(owner, *others) == expected


def test_head_that_is_not_offered_has_the_reason_of_its_training() -> None:
    assert promoted(deployment(), spec={"promote": "Manual"}) == ("False", "Manual")
    assert promoted(deployment(), status={"head": head(path="/etc")}) == ("False", "HeadInvalid")
    assert promoted(deployment(), status={"verdict": {"capture": "chat-judge"}}) == ("False", "OtherTarget")


CHAT = TrainedDraftStatus.parse({**SERVED, "reason": "Promoted"})
ROLLING = CHAT.model_copy(update={"reason": "RolloutInProgress"})
NO_HEAD, REFUSED, ROLLED_BACK = (
    TrainedDraftStatus.parse({"reason": reason, "message": "m"})
    for reason in ("NoHeadOffered", "HeadRefused", "RolledBack")
)


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (None, None, False),
        (None, NO_HEAD, False),
        (NO_HEAD, ROLLING, False),
        (ROLLING, CHAT, True),
        (CHAT, CHAT, False),
        (CHAT, CHAT.model_copy(update={"training": "newer"}), True),
        (CHAT, NO_HEAD, True),
        (CHAT, None, True),
        (NO_HEAD, None, False),
        (ROLLING, ROLLED_BACK, True),
        (ROLLED_BACK, ROLLED_BACK, False),
        (NO_HEAD, REFUSED, True),
        (REFUSED, REFUSED, False),
        (REFUSED, ROLLED_BACK, True),
    ],
)
def test_event_only_for_another_head_or_a_failure(
    before: TrainedDraftStatus | None, now: TrainedDraftStatus | None, expected: bool
) -> None:
    assert is_news(before, now) is expected
