"""A canary serves a share of the traffic before the engines of a changed spec replace the others."""

import json
from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.api.deployment_status import Condition
from specdecode_operator.cluster.resources import POOL_LABEL, selector_labels
from specdecode_operator.deployment.desired_state import DesiredState, InCanary, Launch, RolledBack
from specdecode_operator.deployment.observed.observation import Observation, update_last_good
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.rollout.canary import (
    CanaryDecision,
    CanaryStep,
    CanaryTrial,
    after_canary,
    canary_settings,
    judge_canary,
)
from specdecode_operator.deployment.rollout.rollback import read_last_good, render_last_good
from specdecode_operator.deployment.rollout.rollout_progress import current_pods, read_rollout, serving_hash
from specdecode_operator.deployment.status import compose_status
from specdecode_operator.handlers.apply_children import objects_to_apply, objects_to_delete
from specdecode_operator.problems import InvalidSpecError
from specdecode_operator.stats.pool_comparison import BLOCK_S, Served
from tests.support.objects import Body, ended, parent, pod
from tests.unit.deployment.rollout.test_rollback import CRASHED, NOW, REFUSED, Story

OLD, NEW = {"maxModelLen": 1024}, {"maxModelLen": 512}
BLOCK = Served(
    requests=40, first_token_seconds=8.0, prompt_tokens=40_000, tokens=8_000, seconds=80.0, steps=4_000, finished=40,
    answered=40,
)  # fmt: skip
WORSE = replace(BLOCK, seconds=96.0)
FULL = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
PENDING = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": FULL}


class CanaryStory(Story):
    """One object with a canary, reconciled by an operator that was just started unless it compares."""

    def __init__(self, **canary: Any) -> None:
        super().__init__()
        self.canary = canary
        self.trial: CanaryTrial | None = None
        self.now_s = 1_000.0
        self.write(OLD)
        self.look()
        self.look(1)
        self.served = self.template_hash
        self.write(NEW)

    def write(self, serving: Body, strategy: str = "Canary", **fields: Any) -> None:
        """Write the spec."""
        rollout = {
            "strategy": strategy,
            **({"canary": self.canary} if self.canary else {}),
            **fields.pop("rollout", {}),
        }
        self.apply(serving=serving, rollout=rollout, **fields)

    def look(self, serving: int = 0, *pods: Body, replicas: int = 1, overdue: bool = False, **seen: Any) -> Any:
        """Reconcile; ``ready`` canary engines have ``canary_pods``, and both pools ``counters``."""
        owner = parse_deployment(parent(self.spec, generation=self.generation, status=self.status))
        kept = render_last_good(owner.key, owner.uid, self.memory) if self.memory else None
        memory = read_last_good(json.loads(json.dumps(kept)))
        self.desired = self.decide(owner, memory)
        observation = Observation(
            self._deployment(serving, replicas, overdue=overdue), list(pods), canary=self._canary(**seen)
        )
        status = compose_status(owner, self.desired, observation, NOW)
        self.memory = update_last_good(self.desired, observation, memory)
        if self.memory and observation.canary and isinstance(self.desired.outcome, InCanary):
            outcome = self.desired.outcome
            self.memory = after_canary(self.memory, observation.canary, outcome.promoted, outcome.attempt)
        self.status = status.model_dump(by_alias=True, mode="json", exclude_none=True)
        return {condition.type: condition for condition in status.conditions}

    def _canary(
        self, ready: int = 0, canary_pods: list[Body] | None = None, counters: tuple[Served, Served] | None = None,
        canary_overdue: bool = False, wrong_answers: str | None = None,
    ) -> CanaryDecision | None:  # fmt: skip
        live = self.deployment
        if live is None or not isinstance(self.desired.outcome, InCanary):
            return None
        settings = canary_settings(self.desired.outcome.facts.spec)
        self.trial = CanaryTrial.of(live, self.trial)
        rollout = read_rollout(
            {**live, "status": {"observedGeneration": 1, "availableReplicas": ready}},
            canary_pods or [],
            settings.replicas,
        )
        if ready and self.trial.since_s is None:
            self.trial.since_s = self.now_s
        if counters is not None:
            self.trial.comparison.observe({"stable": counters[0]}, {"canary": counters[1]}, self.now_s)
        rollout = replace(rollout, overdue=canary_overdue)
        return judge_canary(settings, self.trial, rollout, self.now_s, wrong_answers)

    def compare(self, *canary: Served, blocks: int) -> dict[str, Condition]:
        """Let both pools serve blocks, those of the canary in turn; return the conditions after the last one."""
        counters, said = (Served(), Served()), {}
        for block in range(blocks + 1):
            said = self.look(1, ready=1, counters=counters)
            counters = counters[0] + BLOCK, counters[1] + canary[block % len(canary)]
            self.now_s += BLOCK_S
        return said

    @property
    def deployment(self) -> Body | None:
        """The Deployment of the canary that should exist."""
        return next((each for each in self.desired.children if each["metadata"]["name"] == "llama-canary"), None)


def said(conditions: dict[str, Condition], kind: str = "Canary") -> tuple[str, str]:
    return conditions[kind].status.value, conditions[kind].reason


def test_first_rollout_has_no_canary() -> None:
    story = CanaryStory()
    story.write(OLD)
    assert said(story.look(1)) == ("True", "NothingToCompare")
    assert story.deployment is None


def test_changed_spec_starts_a_canary_beside_serving_engines() -> None:
    story = CanaryStory(replicas=2)
    conditions = story.look(1, ready=0)
    assert said(conditions) == said(conditions, "Ready") == ("Unknown", "CanaryStarting")
    assert said(conditions, "Available")[0] == "True"
    assert story.template_hash == story.served
    canary, outcome = story.deployment, story.desired.outcome
    assert canary is not None
    assert isinstance(outcome, InCanary)
    assert canary["spec"]["replicas"] == 2
    template = canary["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert labels.items() >= {**selector_labels("llama"), POOL_LABEL: "canary"}.items(), "the Service selects them"
    assert canary["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert template["spec"] == outcome.promoted["spec"]["template"]["spec"]
    assert story.desired.workload is not canary


def test_canary_pods_belong_to_no_other_workload() -> None:
    story = CanaryStory()
    story.look(1)
    canary, outcome = story.deployment, story.desired.outcome
    assert canary is not None
    assert isinstance(outcome, InCanary)
    hashes = {serving_hash(each) for each in (canary, outcome.promoted, story.desired.workload) if each}
    assert len(hashes) == 3
    its_pod = {"metadata": {**canary["spec"]["template"]["metadata"], "name": "llama-canary-1"}}
    assert current_pods([its_pod], canary) == [its_pod]
    assert not current_pods([its_pod], outcome.promoted)
    assert not current_pods([its_pod], story.desired.workload)


def test_a_canary_that_is_not_worse_is_promoted_and_stays_promoted() -> None:
    story = CanaryStory()
    story.look(1, ready=1)
    compared = story.compare(BLOCK, blocks=9)
    assert said(compared) == ("True", "Promoted")
    assert "TPOT +0.0 % (95 %: +0.0 % to +0.0 %)" in compared["Canary"].message
    assert story.status["canary"]["figures"][0] == {
        "name": "tpot", "verdict": "Holds", "ratio": "1.000", "low": "1.000", "high": "1.000"
    }  # fmt: skip
    for serving in (0, 1, 1):
        conditions = story.look(serving)
        assert isinstance(story.desired.outcome, Launch)
        assert story.deployment is None
        assert story.template_hash != story.served
        assert said(conditions) == ("True", "Promoted")
        assert story.status["canary"]["blocks"] == 8
    assert said(story.look(1), "Ready") == ("True", "Serving")
    story.write({"maxModelLen": 768})
    assert said(story.look(1)) == ("Unknown", "CanaryStarting"), "another spec is compared again"


def test_promotion_rolls_out_with_max_surge_one() -> None:
    story = CanaryStory()
    story.look(1, ready=1)
    story.compare(BLOCK, blocks=9)
    story.look(0)
    assert story.desired.workload is not None
    assert story.desired.workload["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_worse_canary_is_rolled_back_and_not_retried() -> None:
    story = CanaryStory()
    story.look(1, ready=1)
    compared = story.compare(replace(WORSE, steps=5_000), blocks=9)
    assert said(compared) == ("False", "CanaryFailed")
    assert "TPOT +20.0 %" in compared["Canary"].message
    assert (story.status["canary"]["tokensPerStep"], story.status["canary"]["earlierTokensPerStep"]) == ("1.60", "2.00")
    for _ in range(3):
        conditions = story.look(1)
        assert isinstance(story.desired.outcome, RolledBack)
        assert story.deployment is None
        assert story.template_hash == story.served
        assert said(conditions) == ("False", "CanaryFailed")
        assert said(conditions, "Ready") == ("False", "RolledBack")
        assert "TPOT +20.0 %" in conditions["Ready"].message
        assert story.status["canary"]["figures"][0]["ratio"] == "1.200"


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"serving": {"maxModelLen": 768}}, InCanary),
        ({"serving": NEW, "rollout": {"canary": {"maxSeconds": 7200}}}, InCanary),
        ({"serving": NEW, "strategy": "Surge"}, Launch),
        ({"serving": NEW, "replicas": 2}, RolledBack),
        ({"serving": OLD}, Launch),
    ],
    ids=["another spec", "other settings of the canary", "another strategy", "other replicas", "the earlier spec"],
)
def test_spec_change_after_a_rollback_decides_the_next_outcome(change: dict[str, Any], outcome: type) -> None:
    story = CanaryStory()
    story.look(1, ready=1)
    story.compare(WORSE, blocks=9)
    story.write(**change)
    story.look(1)
    assert isinstance(story.desired.outcome, outcome)


@pytest.mark.parametrize(
    ("canary_pod", "overdue"),
    [
        (pod(containerStatuses=[REFUSED]), False),
        (pod(containerStatuses=[{**CRASHED, "restartCount": 3}]), False),
        (pod(), True),
    ],
    ids=["a permanent error", "three crashes", "not ready in time"],
)
def test_canary_that_never_serves_is_rolled_back(canary_pod: Body, *, overdue: bool) -> None:
    story = CanaryStory()
    story.look(1)
    conditions = story.look(1, canary_pods=[canary_pod], canary_overdue=overdue)
    assert said(conditions) == ("False", "CanaryFailed")
    conditions = story.look(1)
    assert isinstance(story.desired.outcome, RolledBack)
    assert said(conditions, "Ready") == ("False", "RolledBack")
    assert said(conditions, "Available")[0] == "True"


def test_a_canary_with_wrong_answers_is_rolled_back_before_any_block_ends() -> None:
    story = CanaryStory()
    story.look(1, ready=1)
    conditions = story.look(1, ready=1, wrong_answers="canary-1 gave 4 wrong answers")
    assert said(conditions) == ("False", "CanaryFailed")
    assert "WrongAnswers: canary-1 gave 4 wrong answers" in conditions["Canary"].message
    story.look(1)
    assert isinstance(story.desired.outcome, RolledBack)


def test_a_canary_is_no_replica_for_drains_and_autoscalers() -> None:
    story = CanaryStory()
    story.write(NEW, replicas=2)
    story.look(1)
    canary = story.deployment
    assert canary is not None
    labels = canary["spec"]["template"]["metadata"]["labels"]
    budget = next(each for each in story.desired.children if each["kind"] == "PodDisruptionBudget")
    selector = budget["spec"]["selector"]
    assert selector["matchLabels"].items() <= labels.items()
    assert selector["matchExpressions"] == [{"key": POOL_LABEL, "operator": "NotIn", "values": [labels[POOL_LABEL]]}]
    assert story.status["selector"].endswith(f",{POOL_LABEL} notin ({labels[POOL_LABEL]})")
    story.write(OLD)
    story.look(1)
    assert POOL_LABEL not in story.status["selector"]


def test_canary_that_crashes_after_serving_is_rolled_back() -> None:
    story = CanaryStory()
    story.look(1, ready=1)
    story.compare(BLOCK, blocks=3)
    crashing = pod(containerStatuses=[{**ended(1, "boom"), "restartCount": 3}])
    assert said(story.look(1, canary_pods=[crashing])) == ("False", "CanaryFailed")


@pytest.mark.parametrize("overdue", [False, True])
def test_unschedulable_canary_names_a_fix_and_engines_stay(*, overdue: bool) -> None:
    story = CanaryStory()
    story.look(1)
    for _ in range(3):
        conditions = story.look(1, canary_pods=[pod(conditions=[PENDING])], canary_overdue=overdue)
        assert said(conditions) == said(conditions, "Ready") == ("Unknown", "CanaryBlocked")
        assert FULL in conditions["Canary"].message
        assert "add a node, lower spec.replicas" in conditions["Canary"].message
        assert story.template_hash == story.served
    assert story.memory is not None
    assert story.memory.failure is None


@pytest.mark.parametrize(
    ("canary", "blocks", "served", "step"),
    [
        ({}, 9, replace(BLOCK, seconds=83.2), CanaryStep.PROMOTE),
        ({"maxLossPercent": {"tpot": 3}}, 9, replace(BLOCK, seconds=83.2), CanaryStep.ROLL_BACK),
        ({"maxSeconds": 300}, 3, BLOCK, CanaryStep.ROLL_BACK),
        ({"maxSeconds": 300, "onUndecided": "Promote"}, 3, BLOCK, CanaryStep.ROLL_BACK),
    ],
    ids=["within the default limit", "beyond a lower limit", "too few requests", "too few requests to promote"],
)
def test_loss_limits_and_max_seconds_decide_the_canary_result(
    canary: Body, blocks: int, served: Served, step: CanaryStep
) -> None:
    story = CanaryStory(**canary)
    story.look(1, ready=1)
    story.compare(served, blocks=blocks)
    story.now_s += 3_600
    conditions = story.look(1, ready=1)
    expected = ("True", "Promoted") if step is CanaryStep.PROMOTE else ("False", "CanaryFailed")
    assert said(conditions) == expected


@pytest.mark.parametrize(
    ("on_undecided", "expected"), [("RollBack", ("False", "CanaryFailed")), ("Promote", ("True", "Promoted"))]
)
def test_undecided_canary_follows_on_undecided(on_undecided: str, expected: tuple[str, str]) -> None:
    story = CanaryStory(maxSeconds=600, onUndecided=on_undecided)
    story.look(1, ready=1)
    noisy = replace(BLOCK, seconds=60.0), replace(BLOCK, seconds=106.0)
    assert said(story.compare(*noisy, blocks=9)) == ("Unknown", "CanaryComparing")
    story.now_s += 600
    conditions = story.look(1, ready=1)
    assert said(conditions) == expected
    assert "maxSeconds: 600" in conditions["Canary"].message


def test_canary_with_a_different_load_is_never_promoted() -> None:
    story = CanaryStory(maxSeconds=600, onUndecided="Promote")
    story.look(1, ready=1)
    assert said(story.compare(replace(BLOCK, requests=80), blocks=9)) == ("Unknown", "CanaryComparing")
    story.now_s += 600
    conditions = story.look(1, ready=1)
    assert said(conditions) == ("False", "CanaryFailed")
    assert "2.00 times the requests" in conditions["Canary"].message


@pytest.mark.parametrize(
    ("fields", "ready"),
    [
        ({"suspend": True}, ("True", "Suspended")),
        ({"replicas": 0}, ("True", "ScaledToZero")),
        ({"rollout": {"paused": True}}, ("Unknown", "CanaryWaits")),
    ],
)
def test_no_canary_starts_without_engines_or_while_paused(fields: Body, ready: tuple[str, str]) -> None:
    story = CanaryStory()
    story.write(NEW, **fields)
    conditions = story.look()
    assert story.deployment is None
    assert said(conditions) == ("Unknown", "CanaryWaits")
    assert said(conditions, "Ready") == ready
    assert story.template_hash == story.served
    story.write(NEW)
    assert said(story.look(1)) == ("Unknown", "CanaryStarting")
    assert story.deployment is not None


def test_gate_runs_before_the_canary() -> None:
    story = CanaryStory()
    story.write(NEW, rollout={"gate": {"capture": "golden"}})
    conditions = story.look(1)
    assert said(conditions, "Ready")[1] == "GateCapturing"
    assert story.deployment is None


def live(*bodies: Body | None) -> list[Body]:
    return [{**each, "metadata": {**each["metadata"], "uid": "u"}} for each in bodies if each]


def deleted(desired: DesiredState, *bodies: Body | None) -> list[str]:
    return [each["metadata"]["name"] for each in objects_to_delete(desired, live(*bodies), None, [])]


def test_canary_is_deleted_after_its_verdict() -> None:
    story = CanaryStory()
    story.look(1, ready=1)
    canary, earlier = story.deployment, story.desired.workload
    assert not deleted(story.desired, canary, earlier)
    assert canary in objects_to_apply(story.desired, live(canary, earlier))
    story.compare(WORSE, blocks=9)
    story.look(1)
    assert deleted(story.desired, canary, earlier) == ["llama-canary"]
    story.write({"maxModelLen": 512, "kvCacheDtype": "fp8_e4m3"}, target={"model": "x/y"})
    owner = parse_deployment(parent(story.spec, generation=story.generation, status=story.status))
    refused = replace(story.decide(owner, story.memory), children=[])
    if isinstance(owner.spec, InvalidSpecError) or not refused.outcome.readiness.reconciling:  # type: ignore[union-attr]
        assert deleted(refused, canary, earlier) == ["llama-canary"]
