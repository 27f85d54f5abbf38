"""The last known acceptance outlives the engines that said it, and says until when."""

from datetime import timedelta
from typing import Any

import pytest

from specdecode_operator.api.deployment_status import SpecDecodeDeploymentStatus
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.status import compose_status
from tests.support.decisions import H200_NODE, NOW, desired_state
from tests.support.objects import Body, deployment, pair_70b, parent, tiny_cpu
from tests.unit.deployment.test_deployment_status import SERVING, drafted, reading

PROVEN = {"llama-1": reading(speculation=drafted(100, 213), generation_tokens=313)}
IDLE = {"llama-1": reading()}
GONE = deployment(replicas=0, updated=0, available=0)


def after(
    before: SpecDecodeDeploymentStatus | None, spec: Body, seen: Observation, *, minutes: int = 0, **given: Any
) -> SpecDecodeDeploymentStatus:
    said = before.model_dump(by_alias=True, mode="json", exclude_none=True) if before else {}
    owner = parse_deployment(parent(spec, status=said), **given)
    return compose_status(owner, desired_state(owner, (H200_NODE,)), seen, NOW + timedelta(minutes=minutes))


def active(status: SpecDecodeDeploymentStatus) -> str:
    (found,) = (each.message for each in status.conditions if each.type == "SpeculationActive")
    return found


@pytest.fixture
def proven() -> SpecDecodeDeploymentStatus:
    return after(None, tiny_cpu(), Observation(SERVING, [], PROVEN))


def test_it_is_what_the_engines_say_while_they_do(proven: SpecDecodeDeploymentStatus) -> None:
    assert proven.acceptance is not None
    assert proven.acceptance.model_dump(exclude_none=True) == {
        "text": "71%",
        "percent": 71,
        "mean_length": "3.13",
        "measured_with": "draft_model, K 3, pair/target, pair/draft",
    }


def test_engines_that_end_leave_it_with_the_time(proven: SpecDecodeDeploymentStatus) -> None:
    suspended = after(proven, tiny_cpu(suspend=True), Observation(GONE), minutes=5)
    assert suspended.observed is None
    assert suspended.acceptance is not None
    assert (suspended.acceptance.text, suspended.acceptance.percent) == ("was 71%", 71)
    until = (NOW + timedelta(minutes=5)).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert suspended.acceptance.said_until == until
    again = after(suspended, tiny_cpu(), Observation(SERVING, [], IDLE), minutes=9)
    assert again.acceptance == suspended.acceptance, "engines that were asked nothing know no better"
    assert active(again).endswith(f"; acceptance was 71% until {until}")
    silent = Observation(SERVING, [], {}, silent_s=15.0)
    assert active(after(again, tiny_cpu(), silent)).count("acceptance was") == 1
    fresh = after(again, tiny_cpu(), Observation(SERVING, [], PROVEN), minutes=10)
    assert fresh.acceptance == proven.acceptance
    assert "was" not in active(fresh)


@pytest.mark.parametrize("change", ["K", "draft", "target", "none"])
def test_what_was_measured_with_something_else_says_nothing(proven: SpecDecodeDeploymentStatus, change: str) -> None:
    spec = tiny_cpu()
    if change == "K":
        spec["speculation"] = {**spec["speculation"], "numSpeculativeTokens": 2}
    elif change == "draft":
        spec["speculation"] = {**spec["speculation"], "draft": {**spec["speculation"]["draft"], "model": "pair/other"}}
    elif change == "target":
        spec["target"] = {**spec["target"], "model": "pair/other"}
    else:
        del spec["speculation"]
    assert after(proven, spec, Observation(GONE)).acceptance is None


def adapting(wanted: bool) -> Body:
    spec = pair_70b()
    spec["speculation"]["adaptiveVerification"] = wanted
    return spec


def test_low_acceptance_is_no_fault_where_the_engine_leaves_tokens_unverified() -> None:
    low = {"llama-1": reading(speculation=drafted(1000, 172, 5), generation_tokens=1172)}
    told = after(None, adapting(wanted=True), Observation(SERVING, [], low))
    assert {each.type: each.reason for each in told.conditions}["SpeculationActive"] == "Drafting"
    assert "with adaptiveVerification drafted tokens that were left unverified count as not accepted" in active(told)
    fixed = after(None, adapting(wanted=False), Observation(SERVING, [], low))
    assert "adaptiveVerification" not in active(fixed)


def test_acceptance_of_whole_drafts_is_none_of_drafts_that_are_verified_in_part() -> None:
    serving = Observation(SERVING, [], PROVEN)
    fixed = after(None, adapting(wanted=False), serving)
    assert fixed.acceptance is not None
    assert "adaptive" not in fixed.acceptance.measured_with
    adaptive = after(fixed, adapting(wanted=True), Observation(SERVING, [], IDLE))
    assert adaptive.acceptance is None
    known = after(None, adapting(wanted=True), serving)
    assert known.acceptance is not None
    assert known.acceptance.measured_with.startswith("draft_model, K 5, adaptive verification, ")


def test_acceptance_of_checks_that_lose_answers_is_told_apart() -> None:
    lossy = pair_70b()
    lossy["speculation"] |= {"rejectionSampling": "fly", "lossy": True}
    serving = Observation(SERVING, [], {"llama-1": reading(speculation=drafted(100, 213, 5), generation_tokens=313)})
    exact, told = after(None, pair_70b(), serving), after(None, lossy, serving)
    assert told.acceptance is not None
    assert told.acceptance.measured_with.startswith("draft_model, K 5, fly, ")
    assert "tokens count as accepted that the target would have rejected" in active(told)
    assert "rejectionSampling" not in active(exact)
    assert after(exact, lossy, Observation(SERVING, [], IDLE)).acceptance is None
    (condition,) = (each for each in told.conditions if each.type == "OutputsDiffer")
    assert (condition.status, condition.reason) == ("True", "LossyRejectionSampling")
    assert "outputs differ from those of meta-llama/Llama-3.1-70B-Instruct itself" in condition.message
    assert not [each for each in exact.conditions if each.type == "OutputsDiffer"]
