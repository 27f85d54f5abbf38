"""Which head is in force, the condition Promoted of a training, and Events about heads."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from specdecode_operator.api.deployment_status import TrainedDraftStatus
from specdecode_operator.deployment.conditions import FALSE, ConditionUpdate
from specdecode_operator.deployment.desired_state import DesiredState, Gated, Launch, NotLaunched, Outcome, RolledBack
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.rollout.readiness import stalled
from specdecode_operator.deployment.rollout.rollback import Failure
from specdecode_operator.deployment.rollout.rollout_gate import Held
from specdecode_operator.training.in_place import TIME_PER_ENGINE_S, update_of
from specdecode_operator.training.observation import read_training
from specdecode_operator.training.offers import offers_of
from specdecode_operator.training.promotion import Rollouts, choose, is_news, promoted_condition
from specdecode_operator.vllm.engine_metrics import EngineReading, HeadUpdate
from tests.support.better_trainings import SHA256, asking, better_training, head
from tests.support.decisions import desired_state
from tests.support.objects import Body, parent, tiny_cpu
from tests.support.objects import deployment as workload

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


def rollouts(outcome: Outcome | None = None, *, serving: int = 1, **changes: Any) -> Rollouts:
    """Return the state of a deployment, whose engines serve by default."""
    spec = asking(**({} if serving else {"suspend": True}))
    desired = desired_state(parse_deployment(deployment(spec)))
    assert isinstance(desired.outcome, Launch)
    desired = replace(desired, outcome=outcome or desired.outcome)
    seen = Observation(workload(replicas=serving, updated=serving, available=serving))
    return replace(Rollouts(desired, seen, lambda _: ""), **changes)


def launch() -> Launch:
    found = rollouts().desired.outcome
    assert isinstance(found, Launch)
    return found


def gated(*, failed: bool) -> Gated:
    facts = launch()
    return Gated(facts.facts, facts.plan_status, facts, Held("gate", "GateCapturing", "m", failed=failed))


def rolled_back() -> RolledBack:
    facts = launch()
    return RolledBack(facts.facts, facts.plan_status, Failure("attempt", "EngineExited", "m"))


def refused() -> DesiredState:
    """A spec that is not accepted."""
    told = [ConditionUpdate("Accepted", FALSE, "Invalid", "m")]
    return DesiredState(NotLaunched(stalled("Invalid", "m")), told)


def chosen(state: Rollouts, *trainings: Body, served: Body | None = None) -> TrainedDraftStatus:
    """Return the next status of a deployment whose status has ``served`` as the head in force."""
    owner = deployment(**(served or {}))
    before = TrainedDraftStatus.parse(served) if served else None
    found = choose(offers_of(owner, trainings), state, before, datetime(2026, 3, 1, tzinfo=UTC))
    assert found is not None
    return found


def told(status: TrainedDraftStatus) -> tuple[str | None, str | None]:
    return status.training, status.reason


class TestChoice:
    def test_head_waits_until_engines_of_the_spec_serve(self) -> None:
        assert told(chosen(rollouts(), better_training())) == ("chat", "RolloutInProgress")
        assert told(chosen(rollouts(serving=0), better_training())) == (None, "RolloutInProgress")

    @pytest.mark.parametrize(
        ("state", "expected", "is_remembered"),
        [
            (rollouts(), ("chat", "Promoted"), False),
            (rollouts(gated(failed=False)), ("chat", "RolloutInProgress"), False),
            (rollouts(gated(failed=True)), (None, "GateFailed"), True),
            (rollouts(rolled_back()), (None, "RolledBack"), True),
            (rollouts(rolled_back(), by_policy=True), ("chat", "RolloutInProgress"), False),
            # It may fit again, when the calibration or the GPUs change.
            (rollouts(desired=refused()), (None, "HeadRefused"), False),
        ],
    )
    def test_failed_head_is_withdrawn(
        self, state: Rollouts, expected: tuple[str | None, str], is_remembered: bool
    ) -> None:
        found = chosen(state, better_training(), served=SERVED)
        assert told(found) == expected
        assert found.failed == (failed(better_training()) if is_remembered else [])

    def test_failed_head_is_not_offered_again(self) -> None:
        for reason in ("GateFailed", "RolledBack"):
            before = {"failed": failed(better_training()), "reason": reason, "message": "m"}
            assert told(chosen(rollouts(), better_training(), served=before)) == (None, reason)

    def test_head_in_force_stays_if_a_newer_one_does_not_fit(self) -> None:
        state = rollouts(refused=lambda head: "TooLarge" if head.training == "newer" else "")
        assert told(chosen(state, better_training(), NEWER, served=SERVED)) == ("chat", "Promoted")
        assert told(chosen(rollouts(), better_training(), NEWER, served=SERVED)) == ("newer", "RolloutInProgress")

    def test_newest_failures_are_remembered(self) -> None:
        earlier = [f"{number:016x}" for number in range(16)]
        before = {**SERVED, "failed": earlier}
        found = chosen(rollouts(rolled_back()), better_training(), served=before)
        assert found.failed == [*failed(better_training()), *earlier[:-1]]
        replaced = chosen(rollouts(), better_training(), NEWER, served=before)
        assert (replaced.training, replaced.failed) == ("newer", earlier)


class TestInPlace:
    def after(self, reading: EngineReading, waits_s: float) -> TrainedDraftStatus:
        """Return the next status if the only engine started with head old and has to load head newer."""
        spec = asking()
        spec["speculation"]["draftUpdate"] = "InPlace"
        served = {
            **SERVED,
            "training": "newer",
            "startTraining": "old",
            "startSha256": "0a" * 32,
            "update": "InPlace",
            "reason": "RolloutInProgress",
            "failed": ["0" * 16],
        }
        old = better_training("old", status={"head": head("old", sha256="0a" * 32)})
        offers = offers_of(deployment(spec, **served), [old, NEWER])
        assert offers is not None
        assert offers.present is not None
        assert offers.start is not None
        update = update_of(offers.present, offers.start, 1, {"llama-1": reading})
        state = rollouts(update=update, update_waits_s=waits_s)
        found = choose(offers, state, TrainedDraftStatus.parse(served), datetime(2026, 3, 1, tzinfo=UTC))
        assert found is not None
        return found

    @pytest.mark.parametrize(("waits_s", "how"), [(TIME_PER_ENGINE_S, "InPlace"), (TIME_PER_ENGINE_S + 1, "Restart")])
    def test_engine_has_some_time_to_report(self, waits_s: float, how: str) -> None:
        found = self.after(reading(), waits_s)
        assert (found.training, found.update) == ("newer", how)

    def test_earlier_failures_are_remembered_if_answers_are_wrong(self) -> None:
        found = self.after(reading(HeadUpdate(SHA256, "reverted", "why", 0.1)), 0)
        assert (found.training, found.reason) == ("old", "RolledBack")
        assert found.failed[1:] == ["0" * 16]


def reading(update: HeadUpdate | None = None) -> EngineReading:
    return EngineReading(*(None,) * 5, 0, 0, 0, head_update=update)


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
