"""The capture that measures a head, and its verdict."""

import json
import re
from typing import Any

import pytest

from specdecode_operator.api.capture import SpecDecodeCaptureSpec
from specdecode_operator.api.crd_validation import broken_rules
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.training import SpecDecodeTrainingSpec
from specdecode_operator.api.training_status import TrainedHead
from specdecode_operator.capture.decision import decide
from specdecode_operator.capture.observation import read_capture
from specdecode_operator.enums import Method
from specdecode_operator.training.judge import better, is_forged, judge_name, judging_capture
from specdecode_operator.training.observation import read_training
from specdecode_operator.training.offers import target_digest
from tests.support.better_trainings import asking, better_training, condition, head
from tests.support.capture_decisions import NOW
from tests.support.captures import capture, claim, observed_deployment, surroundings
from tests.support.objects import Body


def judging(served: Method = Method.DRAFT_MODEL, of: Body | None = None, **spec: Any) -> Body:
    training = read_training(better_training(spec=spec))
    asked = SpecDecodeTrainingSpec.parse(training.spec)
    written = SpecDecodeDeploymentSpec.parse(of or asking())
    return judging_capture(training, asked, TrainedHead.parse(head()), written, served)


def arms(made: Body) -> dict[str, Body]:
    return {each["name"]: each.get("speculation", {}) for each in made["spec"]["arms"]}


def test_capture_is_valid_and_owned_by_the_training() -> None:
    made = judging()
    spec = SpecDecodeCaptureSpec.parse(made["spec"])
    assert [*broken_rules(spec, "spec")] == []
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("SpecDecodeTraining", "uid-chat")


def test_present_draft_is_the_baseline_of_the_head_and_the_controls() -> None:
    found = arms(judging())
    assert list(found) == ["current", "trained", "none", "ngram"]
    assert found["current"] == {}, "as deployed"
    assert found["trained"]["draft"]["persistentVolumeClaim"] == {"claimName": "chat-training"}
    assert found["none"] == {"method": "none"}
    assert found["ngram"] == {"method": "ngram", "numSpeculativeTokens": 3}


@pytest.mark.parametrize(
    ("served", "names", "baseline"),
    [
        (Method.NONE, ["current", "trained", "ngram"], {"method": "none"}),
        (Method.NGRAM, ["current", "trained", "none"], {}),
        (Method.NGRAM_GPU, ["current", "trained", "none"], {}),
    ],
)
def test_arms_that_equal_the_baseline_are_left_out(served: Method, names: list[str], baseline: Body) -> None:
    found = arms(judging(served))
    assert (list(found), found["current"]) == (names, baseline)


def test_held_out_prompts_are_sent_greedily_from_the_trainings_claim() -> None:
    slo, judgement = {"ttftMs": 500}, {"requests": 80, "concurrency": 2, "outputTokens": 64, "repetitions": 4}
    spec = judging(judgement={**judgement, "slo": slo, "deploymentDuringCapture": "Suspend"}, seed=7)["spec"]
    claim = {"persistentVolumeClaim": {"claimName": "chat-training"}}
    dataset = {"path": "team/chat/rows/holdout.jsonl", "format": "JSONL", "outputTokens": 64}
    assert spec["workload"]["prompts"]["dataset"] == {**claim, **dataset}
    (phase,) = spec["workload"]["phases"]
    assert (phase["pattern"], phase["concurrency"], phase["requests"]) == ("Closed", 2, 80)
    assert spec["workload"]["temperatures"] == [{"temperature": "0.0", "sharePercent": 100}]
    assert spec["storage"] == claim
    assert (spec["seed"], spec["repetitions"], spec["slo"]) == (7, 4, slo)
    assert spec["deploymentDuringCapture"] == "Suspend"


@pytest.mark.parametrize("name", ["a" * 46, "a" * 47, f"{'a' * 62}b", "team.chat", f"{'a.' * 60}z"])
def test_capture_has_a_valid_name_of_its_own(name: str) -> None:
    names = {judge_name(read_training(better_training(name=each))) for each in (name, f"{name}x", "chat")}
    assert len(names) == 3
    assert all(re.fullmatch("[a-z0-9][-a-z0-9]{0,45}-judge", each) for each in names), names


def test_no_more_requests_than_prompts_were_held_out() -> None:
    (phase,) = judging(judgement={"requests": 5000})["spec"]["workload"]["phases"]
    assert phase["requests"] == 100


def test_capture_starts_an_engine_for_each_arm_with_one_volume_for_the_claim() -> None:
    asked, bound = judging()["spec"], claim("chat-training")
    deployment = observed_deployment(asking(), capture=asked)
    seen = surroundings(deployment=deployment, dataset=bound, claim=bound)
    decision = decide(read_capture(capture(asked)), seen, NOW)
    assert decision.writes.job is not None, decision.readiness
    pod = decision.writes.job["spec"]["template"]["spec"]
    claims = [each["persistentVolumeClaim"] for each in pod["volumes"] if "persistentVolumeClaim" in each]
    assert [each for each in claims if each["claimName"] == "chat-training"] == [{"claimName": "chat-training"}]
    (load,) = (each for each in pod["containers"] if each["name"] == "load")
    (settings,) = (each["value"] for each in load["env"] if each["name"] == "SPECDECODE_CAPTURE")
    commands = {each["name"]: each["command"] for each in json.loads(settings.replace("$$", "$"))["arms"]}
    assert list(commands) == ["current", "trained", "none", "ngram"]
    assert any("/drafts/chat-training/team/chat/head" in each for each in commands["trained"])
    assert not any("/drafts/" in each for name in ("current", "none", "ngram") for each in commands[name])


def compared(name: str, verdict: str, ratio: tuple[float, float, float], outputs: str = "Equal") -> Body:
    estimate, low, high = (f"{each:.3f}" for each in ratio)
    load = {"phase": "held-out", "running": "4.0", "baselineGoodput": "100.0", "goodput": f"{100 * ratio[0]:.1f}"}
    load |= {"verdict": verdict if verdict != "Incorrect" else "Pays", "ratio": estimate, "low": low, "high": high}
    return {
        "name": name,
        "verdict": verdict,
        "message": f"goodput of {name}",
        "outputs": outputs,
        "acceptancePercent": 80,
        "loads": [load],
    }


def judged(*found: Body, **status: Any) -> Body:
    comparison = {"baseline": "current", "levelPercent": 95, "baselineAcceptancePercent": 20, "arms": list(found)}
    told = {"conditions": [condition("Succeeded", "True")], "comparison": comparison, **status}
    made = judging()
    return {**made, "metadata": {**made["metadata"], "uid": "u", "generation": 1}, "status": told}


PAYS = compared("trained", "Pays", (1.5, 1.3, 1.7))


@pytest.mark.parametrize(
    ("trained", "status", "reason"),
    [
        (PAYS, "True", "Better"),
        (compared("trained", "Pays", (1.5, 1.3, 1.7), "Explained"), "True", "Better"),
        (compared("trained", "DoesNotPay", (0.8, 0.7, 0.9)), "False", "NotBetter"),
        (compared("trained", "Inconclusive", (1.1, 0.9, 1.3)), "Unknown", "Inconclusive"),
        (compared("trained", "Incorrect", (1.5, 1.3, 1.7), "Different"), "False", "Incorrect"),
        (compared("trained", "Pays", (1.5, 1.3, 1.7), "NotChecked"), "Unknown", "Inconclusive"),
        (compared("trained", "Pays", (1.5, 1.3, 1.7), "Lossy"), "Unknown", "Inconclusive"),
        (compared("trained", "Pays", (1.5, 0.9, 1.7)), "Unknown", "Inconclusive"),
        (compared("trained", "Pays", (1.5, 1.0, 1.7)), "Unknown", "Inconclusive"),
        (compared("trained", "DoesNotPay", (0.8, 0.7, 1.1)), "Unknown", "Inconclusive"),
        (compared("trained", "DoesNotPay", (0.8, 0.7, 1.0)), "Unknown", "Inconclusive"),
        ({**PAYS, "loads": []}, "Unknown", "Inconclusive"),
        ({**PAYS, "loads": [{**PAYS["loads"][0], "low": "much"}]}, "Unknown", "Inconclusive"),
    ],
)
def test_head_is_better_if_its_interval_excludes_no_change_and_answers_are_equal(
    trained: Body, status: str, reason: str
) -> None:
    update, _ = better(judged(trained))
    assert (update.type, update.status, update.reason) == ("Better", status, reason)


def with_steps(arm: Body, low: str, high: str, cost: str = "Equal") -> Body:
    steps = {"arm": "3.0", "baseline": "1.5", "ratio": "2.000" if float(low) > 1 else "0.500", "low": low, "high": high}
    return {**arm, "tokensPerStep": {**steps, "requests": 80, "stepCost": cost}}


UNDECIDED = compared("trained", "Inconclusive", (1.5, 0.2, 9.0))


@pytest.mark.parametrize(
    ("trained", "status", "reason"),
    [
        (with_steps(UNDECIDED, "1.900", "2.100"), "True", "Better"),
        (with_steps({**UNDECIDED, "loads": []}, "1.900", "2.100"), "True", "Better"),
        (with_steps(UNDECIDED, "0.400", "0.600"), "False", "NotBetter"),
        (with_steps(UNDECIDED, "0.900", "1.100"), "Unknown", "Inconclusive"),
        (with_steps(UNDECIDED, "1.900", "2.100", "Lower"), "True", "Better"),
        (with_steps(UNDECIDED, "1.900", "2.100", "Higher"), "Unknown", "Inconclusive"),
        (with_steps(UNDECIDED, "1.900", "2.100", "Unknown"), "Unknown", "Inconclusive"),
        (with_steps(UNDECIDED, "0.400", "0.600", "Higher"), "False", "NotBetter"),
        (with_steps(UNDECIDED, "0.400", "0.600", "Lower"), "Unknown", "Inconclusive"),
        (with_steps(UNDECIDED, "0.400", "0.600", "Unknown"), "Unknown", "Inconclusive"),
        (with_steps({**UNDECIDED, "outputs": "NotChecked"}, "1.900", "2.100"), "Unknown", "Inconclusive"),
        (with_steps(compared("trained", "DoesNotPay", (0.8, 0.7, 0.9)), "1.900", "2.100"), "False", "NotBetter"),
        (with_steps(compared("trained", "Incorrect", (1.5, 1.3, 1.7)), "1.900", "2.100"), "False", "Incorrect"),
        (with_steps(PAYS, "0.400", "0.600"), "True", "Better"),
    ],
)
def test_tokens_per_step_decide_if_goodput_does_not_and_a_step_costs_no_more(
    trained: Body, status: str, reason: str
) -> None:
    update, verdict = better(judged(trained))
    assert (update.status, update.reason) == (status, reason)
    assert verdict.tokens_per_step is not None


def test_verdict_has_figures_of_all_arms_and_the_measured_target() -> None:
    none, ngram = compared("none", "DoesNotPay", (0.5, 0.4, 0.6)), compared("ngram", "Pays", (1.2, 1.1, 1.3))
    _, verdict = better(judged(PAYS, none, ngram))
    assert (verdict.ratio, verdict.low, verdict.high) == ("1.500", "1.300", "1.700")
    figures = {each.name: (each.goodput, each.acceptance_percent) for each in verdict.arms}
    assert figures == {"current": ("100.0", 20), "trained": ("150.0", 80), "none": ("50.0", 80), "ngram": ("120.0", 80)}
    assert verdict.target == target_digest(SpecDecodeDeploymentSpec.parse(asking()).target)


@pytest.mark.parametrize(("name", "word"), [("ngram", "repetitive"), ("none", "without speculation")])
def test_control_that_is_as_fast_as_the_head_is_noted(name: str, word: str) -> None:
    update, _ = better(judged(PAYS, compared(name, "Pays", (1.5, 1.3, 1.7))))
    assert word in update.message
    slower, _ = better(judged(PAYS, compared(name, "Pays", (1.4, 1.2, 1.6))))
    assert word not in slower.message


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({"conditions": []}, "NotJudged"),
        ({"conditions": [condition("Succeeded", "Unknown")]}, "NotJudged"),
        ({"conditions": [condition("Succeeded", "False", "EngineFailed")]}, "JudgementFailed"),
        ({"comparison": None}, "JudgementFailed"),
        ({"comparison": {"baseline": "none", "levelPercent": 95, "arms": [PAYS]}}, "JudgementFailed"),
        ({"comparison": {"baseline": "current", "levelPercent": 95, "arms": []}}, "JudgementFailed"),
        ({"comparison": "better"}, "NotJudged"),
    ],
)
def test_capture_without_a_verdict_leaves_it_open(status: Body, reason: str) -> None:
    update, verdict = better(judged(PAYS, **status))
    assert (update.status, update.reason) == ("Unknown", reason)
    assert verdict.capture == "chat-judge"


@pytest.mark.parametrize("served", [Method.DRAFT_MODEL, Method.NONE, Method.NGRAM])
def test_own_capture_is_not_forged(served: Method) -> None:
    training = read_training(better_training())
    assert not is_forged(judging(served), training, SpecDecodeTrainingSpec.parse(training.spec))


@pytest.mark.parametrize(
    ("arm", "change"),
    [
        (0, {"name": "trained"}),
        (0, {"speculation": {"method": "suffix"}}),
        (0, {"kvCacheDtype": "fp8"}),
        (0, {"targetQuantization": "FP8"}),
        (1, {"speculation": {"method": "suffix"}}),
        (1, {"speculation": {"method": "eagle3", "numSpeculativeTokens": 3, "draft": {"model": "default/chat/head"}}}),
        (1, {"kvCacheDtype": "fp8"}),
    ],
)
def test_capture_with_other_arms_is_forged(arm: int, change: Body) -> None:
    training, made = read_training(better_training()), judging()
    made["spec"]["arms"][arm] |= change
    assert is_forged(made, training, SpecDecodeTrainingSpec.parse(training.spec))


def test_capture_with_another_baseline_is_forged() -> None:
    training, made = read_training(better_training()), judging()
    made["spec"]["arms"].reverse()
    assert is_forged(made, training, SpecDecodeTrainingSpec.parse(training.spec))


@pytest.mark.parametrize("change", [{"deployment": "another"}, {"workload": {}}, {"arms": "none"}])
def test_capture_with_other_prompts_is_forged(change: Body) -> None:
    training, made = read_training(better_training()), judging()
    made["spec"] |= change
    assert is_forged(made, training, SpecDecodeTrainingSpec.parse(training.spec))
