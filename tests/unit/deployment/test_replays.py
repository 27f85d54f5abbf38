"""What becomes of an object whose engines replay a recording: planned as a rehearsal, and told as one."""

from typing import Any

import pytest

from specdecode_operator.api.deployment_status import SpecDecodeDeploymentStatus
from specdecode_operator.deployment.desired_state import Launch, NotLaunched
from specdecode_operator.deployment.observed.observation import Observation, observed_residual
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.status import compose_status
from tests.support.decisions import H100_NODE, H200_NODE, NOW, decide, desired_state
from tests.support.objects import H200, Body, pair_70b, parent
from tests.support.replay_field_cases import replaying
from tests.unit.deployment.test_deployment_status import SERVING, drafted, reading

FLEET = (H100_NODE, H200_NODE)
DRAFTING = {"llama-1": reading(speculation=drafted(100, 213), generation_tokens=313)}


def said(spec: Body, seen: Observation | None = None, nodes: Any = ()) -> dict[str, tuple[str, str, str]]:
    """Conditions by type, in a cluster without GPUs."""
    _, _, conditions = decide(parent(spec), seen, nodes)
    return {type_: (each.status, each.reason, each.message) for type_, each in conditions.items()}


def test_it_is_planned_without_a_node() -> None:
    spec = replaying() | {"accelerator": {"products": [H200], "perNode": 2}}
    desired = desired_state(parse_deployment(parent(spec)))
    assert isinstance(desired.outcome, Launch)
    chosen = desired.outcome.plan.chosen
    assert (chosen.product, chosen.gpus) == (H200, 2)
    status, reason, message = said(spec)["Planned"]
    assert (status, reason) == ("True", "Fits")
    assert "a recording is replayed (spec.engine.replay): the plan is a rehearsal" in message


def test_what_would_not_fit_is_not_rehearsed() -> None:
    spec = replaying() | {"accelerator": {"products": ["NVIDIA-H100-80GB-HBM3"]}}
    outcome = desired_state(parse_deployment(parent(spec))).outcome
    assert isinstance(outcome, NotLaunched)
    assert said(spec)["Planned"][:2] == ("False", "DoesNotFit")


def test_nothing_is_downloaded() -> None:
    spec = replaying() | {"models": {"cache": {"persistentVolumeClaim": {"claimName": "cache"}}}}
    kinds = {child["kind"] for child in desired_state(parse_deployment(parent(spec))).children}
    assert kinds == {"ConfigMap", "Service", "Deployment"}


def test_an_operator_that_does_not_know_its_image_says_so() -> None:
    desired = desired_state(parse_deployment(parent(replaying())), operator_image=None)
    assert isinstance(desired.outcome, NotLaunched)
    assert desired.outcome.readiness.reason == "OperatorImageUnknown"
    assert "SPECDECODE_OPERATOR_IMAGE" in desired.outcome.readiness.message
    assert isinstance(desired_state(parse_deployment(parent(pair_70b())), FLEET, operator_image=None).outcome, Launch)


def test_whoever_reads_the_status_cannot_take_it_for_a_model() -> None:
    conditions = said(replaying(), Observation(SERVING, [], DRAFTING))
    assert conditions["Ready"][:2] == ("True", "Serving")
    assert conditions["Available"][:2] == ("True", "EnginesServe")
    for each in ("Ready", "Available"):
        assert conditions[each][2].endswith("they replay a recording (spec.engine.replay), no model runs")
    assert conditions["SpeculationActive"][:2] == ("True", "Replayed")
    assert "acceptance 71%" in conditions["SpeculationActive"][2]
    assert "with K=3, of the recording" in conditions["SpeculationActive"][2]
    assert conditions["BudgetAccurate"][:2] == ("Unknown", "Replayed")


def test_what_it_reports_proves_no_budget_and_calibrates_nothing() -> None:
    owner = parse_deployment(parent(replaying()))
    desired, seen = desired_state(owner), Observation(SERVING, [], DRAFTING)
    assert observed_residual(desired, seen) is None
    status = compose_status(owner, desired, seen, NOW)
    assert status.observed is not None
    assert status.observed.kv_cache_residual_bytes is None
    assert status.observed.num_speculative_tokens == 3


def test_a_recording_without_speculation_is_told() -> None:
    conditions = said(replaying(), Observation(SERVING, [], {"llama-1": reading(speculation=None)}))
    assert conditions["SpeculationActive"][:2] == ("False", "NotDrafting")
    assert "the recording that is replayed is of an engine without speculation" in conditions["SpeculationActive"][2]
    assert conditions["Ready"][:2] == ("True", "SpeculationInactive")


def test_its_acceptance_is_not_taken_for_that_of_the_models() -> None:
    owner = parse_deployment(parent(replaying()))
    replayed = compose_status(owner, desired_state(owner), Observation(SERVING, [], DRAFTING), NOW)
    assert replayed.acceptance is not None
    later = parse_deployment(parent(pair_70b(), generation=2, status=_dumped(replayed)))
    assert compose_status(later, desired_state(later, FLEET), Observation(SERVING), NOW).acceptance is None


def test_what_only_vllm_takes_is_told() -> None:
    spec = replaying()
    spec["engine"] |= {"extraArgs": ["--enable-prefix-caching"], "env": [{"name": "A", "value": "b"}]}
    assert "engine.extraArgs and engine.env are vLLM's, and a replay does without them" in said(spec)["Planned"][2]


@pytest.mark.parametrize("suspended", [False, True])
def test_one_that_wants_no_engine_replays_nothing(suspended: bool) -> None:
    spec = replaying() | ({"suspend": True} if suspended else {"replicas": 0})
    assert "replay" not in said(spec)["Ready"][2]


def _dumped(status: SpecDecodeDeploymentStatus) -> Body:
    return dict(status.model_dump(by_alias=True, mode="json", exclude_none=True))
