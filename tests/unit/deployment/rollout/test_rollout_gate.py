"""A golden capture gates the rollout of a changed spec."""

import json

import pytest

from specdecode_operator.api.deployment_status import Condition
from specdecode_operator.capture.golden_gate import GateObjects, gate_state, gate_writes
from specdecode_operator.capture.observation import read_capture
from specdecode_operator.deployment.desired_state import DesiredState, Gated, Launch, RolledBack
from specdecode_operator.deployment.parsed_deployment import ParsedDeployment
from specdecode_operator.deployment.rollout.engine_workload import serving_template
from specdecode_operator.deployment.rollout.rollback import LastGood
from specdecode_operator.deployment.rollout.rollout_progress import template_hash
from specdecode_operator.problems import InvalidSpecError
from tests.support.capture_decisions import decided, words
from tests.support.captures import capture_spec, golden, observed_deployment, surroundings
from tests.support.decisions import desired_state
from tests.support.objects import Body, ended, pod
from tests.unit.deployment.rollout.test_rollback import Story

GATE = {"capture": "golden"}
OLD, NEW = {"maxModelLen": 1024}, {"maxModelLen": 896}
GOLDEN = golden(of=capture_spec(seed=7, record={"tokenIds": True}, deploymentDuringCapture="Suspend"))
REFUSED = ended(2, "vllm: error: unrecognized arguments: --nonsense")


class GatedStory(Story):
    """One object and its captures, each reconciled by an operator that was just started."""

    def __init__(self, golden_capture: Body | None = GOLDEN) -> None:
        super().__init__()
        self.golden = golden_capture
        self.captures: dict[str, Body] = {}
        self.write(OLD)
        self.look()
        self.look(serving=1)
        self.served = self.template

    def write(self, serving: Body, gate: Body | None = GATE) -> None:
        """Write the spec."""
        self.apply(serving=serving, rollout={"gate": gate} if gate else {})

    def decide(self, owner: ParsedDeployment, memory: LastGood | None) -> DesiredState:
        """Return what should exist, and create and delete the captures that judge."""
        assert not isinstance(owner.spec, InvalidSpecError)
        gate = owner.spec.rollout.gate
        seen = GateObjects(list(self.captures.values()), self.golden)
        state = gate_state(owner.key, owner.uid, gate, seen)
        desired = desired_state(owner, (), last_good=memory, gate=state)
        writes = gate_writes(owner.key, owner.uid, gate, desired, seen)
        for body in writes.delete:
            del self.captures[body["metadata"]["name"]]
        if writes.create is not None:
            body = json.loads(json.dumps(writes.create))
            body["metadata"] |= {"uid": "gate-uid", "generation": 1}
            self.captures[body["metadata"]["name"]] = body
        return desired

    @property
    def template(self) -> str | None:
        assert self.desired.workload is not None
        return template_hash(serving_template(self.desired.workload))

    @property
    def name(self) -> str:
        (name,) = self.captures
        return name

    def judged(self, verdict: str | None, succeeded: str = "True") -> None:
        """Let the capture that judges end."""
        body = golden(succeeded=succeeded)["status"]
        if verdict is not None:
            body["regression"] = {"against": "golden", "verdict": verdict, "message": "goodput 90 after 100 tokens/s"}
        self.captures[self.name]["status"] = body


def said(conditions: dict[str, Condition], kind: str) -> tuple[str, str]:
    return conditions[kind].status.value, conditions[kind].reason


def test_first_rollout_passes_the_gate() -> None:
    story = GatedStory()
    assert not story.captures
    assert said(story.look(serving=1), "Gate") == ("True", "NothingToJudge")


def test_rollout_waits_for_the_gate_capture_to_pass() -> None:
    story = GatedStory()
    story.write(NEW)
    waiting = story.look(serving=1)
    assert isinstance(story.desired.outcome, Gated)
    assert story.template == story.served
    assert said(waiting, "Gate") == said(waiting, "Ready") == ("Unknown", "GateCapturing")
    assert said(waiting, "Available")[0] == "True"
    body = story.captures[story.name]
    assert body["spec"] | {"workload": None} == {
        "deployment": "llama",
        "workload": None,
        "seed": 7,
        "record": {"tokenIds": True},
        "deploymentDuringCapture": "Suspend",
        "storage": {"retain": False},
        "against": {
            "capture": "golden",
            "maxLossPercent": {"goodput": 5, "acceptance": 10, "stepTime": 5, "latency": 20},
        },
    }
    assert body["spec"]["workload"] == GOLDEN["spec"]["workload"]
    before = json.dumps(story.captures)
    story.look(serving=1)
    assert json.dumps(story.captures) == before
    story.judged("Holds")
    passed = story.look()
    assert isinstance(story.desired.outcome, Launch)
    assert story.template != story.served
    assert said(passed, "Gate") == ("True", "Passed")
    assert passed["Gate"].message == "goodput 90 after 100 tokens/s"
    assert said(story.look(serving=1), "Gate") == ("True", "Passed")
    assert said(story.look(serving=1), "Ready")[0] == "True"


@pytest.mark.parametrize(
    ("verdict", "succeeded", "why"),
    [
        ("Regressed", "True", "Regressed: goodput 90 after 100 tokens/s"),
        ("Inconclusive", "True", "Inconclusive: goodput 90"),
        ("NotComparable", "True", "NotComparable: goodput 90"),
        (None, "True", "the capture ended without a verdict"),
        (None, "False", "the capture failed (EngineExited: )"),
    ],
)
def test_failed_gate_blocks_the_rollout_and_is_not_repeated(verdict: str | None, succeeded: str, why: str) -> None:
    story = GatedStory()
    story.write(NEW)
    story.look(serving=1)
    story.judged(verdict, succeeded)
    name = story.name
    for _ in range(3):
        refused = story.look(serving=1)
        assert story.template == story.served
        assert said(refused, "Gate") == said(refused, "Ready") == ("False", "GateFailed")
        assert said(refused, "Stalled")[0] == "True"
        assert why in refused["Gate"].message
        assert "1 of 1 engines of an earlier spec serve" in refused["Ready"].message
        assert story.name == name
    story.write({"maxModelLen": 768})
    assert said(story.look(serving=1), "Gate") == ("Unknown", "GateCapturing")
    assert story.name != name


@pytest.mark.parametrize(
    ("golden_capture", "why"),
    [
        (None, "there is no SpecDecodeCapture of this name"),
        ({**GOLDEN, "status": {}}, "it has not ended"),
        (golden(succeeded="False"), "it failed (EngineExited)"),
    ],
)
def test_rollout_waits_for_a_usable_golden_capture(golden_capture: Body | None, why: str) -> None:
    story = GatedStory(golden_capture)
    story.write(NEW)
    waiting = story.look(serving=1)
    assert story.template == story.served
    assert not story.captures
    assert said(waiting, "Gate") == said(waiting, "Ready") == ("Unknown", "GoldenNotReady")
    assert f"spec.rollout.gate.capture: golden: {why}" in waiting["Gate"].message
    story.golden = GOLDEN
    assert said(story.look(serving=1), "Gate") == ("Unknown", "GateCapturing")


def test_gate_override_rolls_out_and_is_reported() -> None:
    story = GatedStory()
    story.write(NEW)
    story.look(serving=1)
    story.write(NEW, gate={**GATE, "override": {"reason": "CVE-2026-1"}})
    conditions = story.look()
    assert story.template != story.served
    assert said(conditions, "Gate") == ("True", "Overridden")
    assert "golden" in conditions["Gate"].message
    assert conditions["Gate"].message.endswith("spec.rollout.gate.override: 'CVE-2026-1'")
    assert not story.captures


def test_reverted_spec_deletes_the_gate_capture() -> None:
    story = GatedStory()
    story.write(NEW)
    story.look(serving=1)
    story.write(OLD)
    assert said(story.look(serving=1), "Gate") == ("True", "NothingToJudge")
    assert not story.captures


def test_forged_gate_capture_is_rejected() -> None:
    story = GatedStory()
    story.write(NEW)
    story.look(serving=1)
    story.judged("Holds")
    mine = story.captures[story.name]
    changes: list[Body] = [
        {"arms": [{"name": "easy"}]},
        {"against": {"capture": "mine"}},
        {"deployment": "other"},
        {"repetitions": 2},
    ]
    others = [{**mine, "spec": {**mine["spec"], **spec}} for spec in changes]
    for other in (*others, {**mine, "metadata": {**mine["metadata"], "ownerReferences": []}}):
        story.captures[story.name] = other
        refused = story.look(serving=1)
        assert story.template == story.served
        assert said(refused, "Gate") == said(refused, "Ready") == ("False", "GateFailed")
        assert "not created by this deployment" in refused["Gate"].message
        assert story.captures[story.name] is other, "what others made is theirs to delete"
    story.captures[story.name] = mine
    story.look()
    assert story.template != story.served


def test_engines_that_pass_the_gate_but_fail_are_rolled_back() -> None:
    story = GatedStory()
    story.write(NEW)
    story.look(serving=1)
    story.judged("Holds")
    story.look(0, pod(containerStatuses=[ended_twice()]))
    story.look(serving=1)
    assert isinstance(story.desired.outcome, RolledBack)
    assert story.template == story.served


def ended_twice() -> Body:
    return {**REFUSED, "restartCount": 1}


def test_only_the_gate_capture_runs_the_new_engine() -> None:
    story = GatedStory()
    story.write(NEW)
    story.look(serving=1)
    seen = observed_deployment(story.spec)
    seen = type(seen)(seen.key, seen.uid, seen.generation, story.desired)
    judge = story.captures[story.name]
    decision, _ = decided(judge, surroundings(deployment=seen, golden=GOLDEN))
    assert decision.writes.job is not None
    assert "896" in json.dumps(decision.writes.job)
    other = {**judge, "metadata": {**judge["metadata"], "name": "other"}}
    _, status = decided(other, surroundings(deployment=seen, golden=GOLDEN))
    assert words(status)["Accepted"] == ("Unknown", "DeploymentGated")
    forged = {**judge, "metadata": {**judge["metadata"], "name": "llama-gate-0123456789"}}
    _, status = decided(forged, surroundings(deployment=seen, golden=GOLDEN))
    assert words(status)["Accepted"] == ("Unknown", "GateElsewhere")
    assert read_capture(forged).ended is None
