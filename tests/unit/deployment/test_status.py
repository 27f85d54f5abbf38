"""Compose conditions and figures of the status."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from specdecode_operator.api.deployment import PolicyAction, PolicyMode, PolicyOutcome, PolicyStatus
from specdecode_operator.api.deployment_status import Condition, SpecDecodeDeploymentStatus
from specdecode_operator.deployment.conditions import SEE_READY, changed_conditions
from specdecode_operator.deployment.observed.decay import Decay
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.status import compose_status
from specdecode_operator.vllm.engine_metrics import EngineReading, SpeculationReading, Unreachable
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS
from tests.support.decisions import H200_NODE, NOW, decide, desired_state, summary
from tests.support.lives import State, states
from tests.support.objects import Body, deployment, pair_70b, parent, pod, tiny_cpu
from tests.support.scheduler_words import NO_ROOM, UNMOUNTABLE


def reading(**changes: Any) -> EngineReading:
    fields: dict[str, Any] = {
        "num_gpu_blocks": 3276,
        "block_size": 128,
        "kv_cache_tokens": 419_328,
        "kv_cache_max_concurrency": 409.5,
        "speculation": SpeculationReading(drafts=0, draft_tokens=0, accepted_tokens=0, accepted_per_position=(0, 0, 0)),
        "generation_tokens": 0,
        "requests_running": 0,
        "requests_waiting": 0,
    }
    return EngineReading(**{**fields, **changes})


def drafted(drafts: int, accepted: int, tokens: int = 3) -> SpeculationReading:
    return SpeculationReading(drafts, tokens * drafts, accepted, (accepted, *[0] * (tokens - 1)))


SERVING = deployment(replicas=1, updated=1, available=1)


def test_first_status_is_starting_with_the_observed_generation() -> None:
    _, status, conditions = decide(parent(tiny_cpu(), generation=7))
    assert status.observed_generation == 7
    assert all(condition.observed_generation == 7 for condition in status.conditions)
    assert summary(conditions) == ("Unknown", "Starting", "True", "False")


@pytest.mark.parametrize(
    ("fields", "preempted_by", "ready"),
    [
        ({"replicas": 2}, None, "1/2"),
        ({}, None, "1/1"),
        ({"replicas": 2, "serving": {"maxModelLen": 10**6}}, None, "1/2"),
        ({"replicas": 2, "suspend": True}, None, "1/0"),
        ({"replicas": 0}, None, "1/0"),
        ({"replicas": 2}, "demo", "1/2"),
    ],
    ids=["several", "default", "invalid spec", "suspended", "zero", "lent to a capture"],
)
def test_ready_field_is_available_out_of_requested_engines(
    fields: dict[str, Any], preempted_by: str | None, ready: str
) -> None:
    owner = parse_deployment(parent(tiny_cpu(**fields)), preempted_by=preempted_by)
    assert compose_status(owner, desired_state(owner), Observation(SERVING), NOW).ready == ready


@pytest.mark.parametrize(
    ("kind", "observed", "counts", "replicas"),
    [
        ("Deployment", 1, {"replicas": 0}, 3),
        ("Deployment", 2, {"replicas": 0, "unavailableReplicas": 3}, 3),
        ("Deployment", 2, {"replicas": 4, "availableReplicas": 1, "unavailableReplicas": 3}, 4),
        ("Deployment", 1, {"replicas": 5}, 5),
        ("Deployment", 2, {"replicas": 3, "unavailableReplicas": 1}, 3),
        ("Deployment", 2, {"replicas": 3, "availableReplicas": 3}, 3),
        ("Deployment", 2, {}, 0),
        ("LeaderWorkerSet", 1, {"replicas": 2}, 2),
    ],
    ids=[
        "not observed",
        "not created",
        "rollout",
        "scale-down not observed",
        "scale-down",
        "serving",
        "none",
        "LeaderWorkerSet",
    ],
)
def test_replicas_include_pods_that_are_about_to_be_created(
    kind: str, observed: int, counts: dict[str, int], replicas: int
) -> None:
    owner = parse_deployment(parent(tiny_cpu(replicas=3)))
    status = {"observedGeneration": observed, **counts}
    workload = {"kind": kind, "metadata": {"name": "llama", "generation": 2}, "spec": {"replicas": 3}, "status": status}
    found = compose_status(owner, desired_state(owner), Observation(workload), NOW)
    assert (found.replicas, found.ready_replicas) == (replicas, 0)


def test_ready_field_is_zero_before_the_first_engine() -> None:
    _, status, _ = decide(parent(tiny_cpu(replicas=3)))
    assert status.ready == "0/3"


def test_serving_engine_without_traffic_is_ready() -> None:
    seen = Observation(SERVING, [], {"llama-1": reading()})
    _, status, conditions = decide(parent(tiny_cpu()), seen)
    assert summary(conditions) == ("True", "Serving", "False", "False")
    assert (conditions["SpeculationActive"].status, conditions["SpeculationActive"].reason) == ("Unknown", "NoTraffic")
    assert conditions["BudgetAccurate"].status == "True"
    assert status.plan is not None
    assert status.observed is not None
    assert status.observed.kv_cache_tokens == status.plan.kv_cache_tokens == 419_328


def test_drafting_is_reported_with_acceptance_figures() -> None:
    seen = Observation(SERVING, [], {"llama-1": reading(speculation=drafted(100, 213), generation_tokens=313)})
    _, status, conditions = decide(parent(tiny_cpu()), seen)
    assert conditions["SpeculationActive"].status == "True"
    assert status.observed is not None
    assert (status.observed.acceptance, status.observed.mean_acceptance_length) == ("71%", "3.13")


def test_engine_that_misses_one_scrape_keeps_its_status() -> None:
    proven = {"llama-1": reading(speculation=drafted(100, 213), generation_tokens=313)}
    _, before, _ = decide(parent(tiny_cpu()), Observation(SERVING, [], proven))
    later = parent(tiny_cpu(), status=before.model_dump(by_alias=True, mode="json", exclude_none=True))
    silent = {"llama-1": Unreachable("/metrics did not answer (TimeoutError)")}
    _, missed, _ = decide(later, Observation(SERVING, [], silent, silent_s=15.0))
    assert missed == before
    _, _, conditions = decide(later, Observation(SERVING, [], silent, silent_s=30.0))
    assert conditions["SpeculationActive"].reason == "Unreachable"


@pytest.mark.parametrize(
    "engine",
    [reading(speculation=None), reading(generation_tokens=500)],
    ids=["no counters", "generates without drafts"],
)
def test_engine_that_does_not_draft_is_reported(engine: EngineReading) -> None:
    _, _, conditions = decide(parent(tiny_cpu()), Observation(SERVING, [], {"llama-1": engine}))
    assert conditions["SpeculationActive"].status == "False"
    assert conditions["SpeculationActive"].reason == "NotDrafting"
    assert "spec.speculation.method draft_model" in conditions["SpeculationActive"].message
    assert "spec.engine.extraArgs" in conditions["SpeculationActive"].message
    assert summary(conditions) == ("True", "SpeculationInactive", "False", "False")


def test_any_missing_kv_cache_token_is_reported_on_cpu() -> None:
    seen = Observation(SERVING, [], {"llama-1": reading(kv_cache_tokens=419_200)})
    _, _, conditions = decide(parent(tiny_cpu()), seen)
    assert conditions["BudgetAccurate"].reason == "LessThanPromised"
    assert "config" in conditions["BudgetAccurate"].message


def test_earlier_engines_behind_an_invalid_spec_are_available() -> None:
    bad = tiny_cpu(engine={"image": "localhost/engine:1", "extraArgs": ["--swap-space=4"]})
    _, _, conditions = decide(parent(bad), Observation(SERVING))
    assert (conditions["Available"].status, conditions["Available"].reason) == ("True", "EarlierEnginesServe")
    assert summary(conditions) == ("False", "Invalid", "False", "True")


@pytest.mark.parametrize(
    ("changes", "reason"), [({"suspend": True}, "Suspended"), ({"replicas": 0}, "ScaledToZero")], ids=str
)
def test_ready_is_true_if_suspended_or_scaled_to_zero(changes: dict[str, Any], reason: str) -> None:
    desired, _, conditions = decide(parent(tiny_cpu(**changes)))
    assert desired.children[-1]["spec"]["replicas"] == 0
    assert summary(conditions) == ("True", reason, "False", "False")


@pytest.mark.parametrize(
    ("message", "reason"),
    [*((each, "WaitingForVolume") for each in UNMOUNTABLE), *((each, "Unschedulable") for each in NO_ROOM)],
)
def test_unmountable_volume_is_distinguished_from_unschedulable(message: str, reason: str) -> None:
    unscheduled = pod(conditions=[{"type": "PodScheduled", "status": "False", "message": message}])
    _, _, conditions = decide(
        parent(tiny_cpu()), Observation(deployment(replicas=1, updated=1, available=0), [unscheduled])
    )
    assert summary(conditions)[:2] == ("Unknown", reason)


def status_with_acceptance(accepted: int, *, previous: SpecDecodeDeploymentStatus | None, figures_due: bool) -> str:
    body = parent(
        tiny_cpu(), status=previous.model_dump(by_alias=True, mode="json", exclude_none=True) if previous else None
    )
    readings = {"llama-1": reading(speculation=drafted(100, accepted), generation_tokens=300)}
    _, status, _ = decide(body, Observation(SERVING, [], readings, figures_due))
    assert status.observed is not None
    return status.observed.acceptance or ""


def test_status_figures_change_only_by_large_steps_when_due() -> None:
    _, first, _ = decide(
        parent(tiny_cpu()),
        Observation(SERVING, [], {"llama-1": reading(speculation=drafted(100, 150), generation_tokens=250)}),
    )
    assert status_with_acceptance(153, previous=first, figures_due=True) == "50%", "one point is noise"
    assert status_with_acceptance(180, previous=first, figures_due=False) == "50%", "not within a minute"
    assert status_with_acceptance(180, previous=first, figures_due=True) == "60%"


def test_transition_time_changes_only_with_the_condition_status() -> None:
    _, first, _ = decide(parent(tiny_cpu()), Observation(SERVING, [], {"llama-1": reading()}))
    owner = parse_deployment(parent(tiny_cpu(), status=first.model_dump(by_alias=True, mode="json", exclude_none=True)))
    lost = Observation(deployment(replicas=1, updated=1, available=0))
    later = compose_status(owner, desired_state(owner, ()), lost, NOW + timedelta(hours=1))
    times = {condition.type: condition.last_transition_time for condition in later.conditions}
    assert times["Ready"] == "2026-01-01T01:00:00Z"
    assert times["Planned"] == "2026-01-01T00:00:00Z"


def test_unchanged_observation_leaves_the_status_unchanged() -> None:
    seen = Observation(SERVING, [], {"llama-1": reading()})
    _, first, _ = decide(parent(tiny_cpu()), seen)
    again = parse_deployment(parent(tiny_cpu(), status=first.model_dump(by_alias=True, mode="json", exclude_none=True)))
    assert compose_status(again, desired_state(again, ()), seen, NOW + timedelta(hours=1)) == again.status
    assert changed_conditions(first.conditions, first.conditions) == []


def test_only_important_condition_changes_become_events() -> None:
    _, starting, _ = decide(parent(tiny_cpu()))
    _, serving, _ = decide(parent(tiny_cpu()), Observation(SERVING, [], {"llama-1": reading()}))
    assert [condition.type for condition in changed_conditions([], starting.conditions)] == ["Planned"]
    assert [c.type for c in changed_conditions(starting.conditions, serving.conditions)] == ["Ready", "BudgetAccurate"]


@pytest.mark.parametrize("state", [*states()], ids=lambda state: state.name)
def test_only_ready_and_its_event_have_the_cause(state: State) -> None:
    conditions = [Condition.parse(each) for each in state.body["status"].get("conditions", [])]
    cause = next((each.message for each in conditions if each.type == "Ready" and each.reason != "Serving"), "")
    having = [each.type for each in conditions if cause and cause in each.message]
    assert having == (["Ready"] if cause else [])
    announced = [each.type for each in changed_conditions([], conditions)]
    assert not {"Reconciling", "Stalled", "Available", "WaitingForGPUs"} & {*announced}
    assert all(each.message != SEE_READY for each in conditions if each.type in announced)


def test_unknown_version_is_reported_before_and_while_it_runs() -> None:
    owner = parent(tiny_cpu(engine={"image": "i:1", "version": "0.99"}))
    for seen in (Observation(), Observation(SERVING, [], {"llama-1": reading(version="0.99.1")})):
        _, status, conditions = decide(owner, seen)
        told = conditions["Accepted"]
        assert (told.status, told.reason) == ("True", "NewerThanKnown")
        assert (
            f"; spec.engine.version: 0.99: is untested, so it is launched and sized as {KNOWN_VERSIONS[-1]}"
            in told.message
        )
        assert conditions["SettingsInForce"].reason != "OtherVersion"
    assert status.observed is not None
    assert status.observed.engine_version == "0.99.1"
    assert decide(parent(tiny_cpu()), Observation(SERVING))[2]["Accepted"].reason == "Valid"


def test_accepted_reports_two_caveats_of_a_valid_spec() -> None:
    spec = pair_70b(engine={"image": "i:1", "version": "0.99"})
    spec["speculation"] |= {"rejectionSampling": "fly", "lossy": True}
    accepted = decide(parent(spec))[2]["Accepted"]
    assert (accepted.status, accepted.reason) == ("True", "NewerThanKnown")
    assert "0.99: is untested" in accepted.message
    assert "outputs differ from" in accepted.message


def test_decay_takes_precedence_over_the_policy_message() -> None:
    owner = parse_deployment(parent(tiny_cpu()))
    policy = PolicyStatus(
        mode=PolicyMode.ADVISE,
        action=PolicyAction.KEEP,
        outcome=PolicyOutcome.KEPT,
        reason="BestMeasured",
        message="nothing brings more",
    )
    declined = Decay(told={"StepsSlower": "a token takes 20 ms"})
    seen = Observation(SERVING, [], {"llama-1": reading()})

    def effective(observation: Observation, by_policy: PolicyStatus | None) -> tuple[str, str, str] | None:
        status = compose_status(owner, desired_state(owner), observation, NOW, policy=by_policy)
        found = [each for each in status.conditions if each.type == "SpeculationEffective"]
        return (found[0].status, found[0].reason, found[0].message) if found else None

    assert effective(seen, None) is None
    assert effective(seen, policy) == ("True", "BestMeasured", "nothing brings more")
    assert effective(replace(seen, decay=declined), None) == ("False", "StepsSlower", "a token takes 20 ms")
    both = "a token takes 20 ms. By the policy: nothing brings more"
    assert effective(replace(seen, decay=declined), policy) == ("False", "StepsSlower", both)


@pytest.mark.parametrize(
    ("said", "observed", "differing"),
    [
        (["0.32.0"], "0.32.0", None),
        (["0.32.1+cpu", None], "0.32.1+cpu", None),
        ([None], None, None),
        (["0.1.dev3+g12"], "0.1.dev3+g12", None),
        (["0.31.0", "0.32.0", "0.31.0"], "0.31.0, 0.32.0", "vLLM 0.31.0, but spec.engine.version is 0.32"),
        (["0.33.0", "1.0.0"], "0.33.0, 1.0.0", "vLLM 0.33.0, 1.0.0, but spec.engine.version is 0.32"),
        (["0.33.0", "a", "b", "c"], "0.33.0, a, b", "set it to 0.33, or set spec.engine.image"),
    ],
    ids=repr,
)
def test_engine_version_is_reported_and_compared_to_the_spec(
    said: list[str | None], observed: str | None, differing: str | None
) -> None:
    owner = parent(tiny_cpu(engine={"image": "i:1", "version": "0.32"}))
    readings = {f"llama-{number}": reading(version=version) for number, version in enumerate(said)}
    _, status, conditions = decide(owner, Observation(SERVING, [], readings))
    assert status.observed is not None
    assert status.observed.engine_version == observed
    told = conditions["SettingsInForce"]
    assert (told.reason == "OtherVersion") == (differing is not None)
    if differing is not None:
        assert told.status == "False"
        assert differing in told.message


def test_other_engine_version_is_reported_before_changed_settings() -> None:
    spec = tiny_cpu(engine={"image": "i:1", "version": "0.32"})
    engine = reading(version="0.31.0", changed_settings=frozenset({"max_model_len"}))
    told = decide(parent(spec), Observation(SERVING, [], {"llama-1": engine}))[2]["SettingsInForce"]
    assert (told.status, told.reason) == ("False", "OtherVersion")
    assert " an image of 0.32. llama-1: " in told.message


def test_conditions_of_an_earlier_operator_are_dropped() -> None:
    known = {"message": "m", "observedGeneration": 1, "lastTransitionTime": "2026-01-01T00:00:00Z"}
    types = ("EngineDiffers", "EngineUntested", "OutputsDiffer", "Decayed", "DriftContested", "BestInForce")
    old = [{"type": type_, "status": "True", "reason": "Old", **known} for type_ in types]
    _, status, conditions = decide(parent(tiny_cpu(), status={"conditions": old}), Observation(SERVING))
    assert len(conditions) == len(status.conditions)
    assert not set(types) & set(conditions)


def test_writer_that_undoes_repairs_is_reported() -> None:
    what = "Deployment llama: spec.template.spec.hostNetwork (written by reloader)"
    _, _, conditions = decide(parent(tiny_cpu()), Observation(SERVING, contested=(what,)))
    told = conditions["ChildrenInSync"]
    assert (told.status, told.reason) == ("False", "RepairsUndone")
    assert told.message.startswith(f"{what}: changed again after each repair")
    assert "specdecode.io/keep-fields-of" in told.message
    assert "ChildrenInSync" not in decide(parent(tiny_cpu()), Observation(SERVING))[2]


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


def test_acceptance_of_running_engines_is_reported(proven: SpecDecodeDeploymentStatus) -> None:
    assert proven.acceptance is not None
    assert proven.acceptance.model_dump(exclude_none=True) == {
        "text": "71%",
        "percent": 71,
        "mean_length": "3.13",
        "measured_with": "draft_model, K 3, pair/target, pair/draft",
    }


def test_acceptance_of_ended_engines_is_kept_with_its_time(proven: SpecDecodeDeploymentStatus) -> None:
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
def test_acceptance_is_dropped_if_target_or_speculation_changes(
    proven: SpecDecodeDeploymentStatus, change: str
) -> None:
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


def test_low_acceptance_is_explained_by_adaptive_verification() -> None:
    low = {"llama-1": reading(speculation=drafted(1000, 172, 5), generation_tokens=1172)}
    told = after(None, adapting(wanted=True), Observation(SERVING, [], low))
    assert {each.type: each.reason for each in told.conditions}["SpeculationActive"] == "Drafting"
    assert "adaptiveVerification" in active(told)
    fixed = after(None, adapting(wanted=False), Observation(SERVING, [], low))
    assert "adaptiveVerification" not in active(fixed)


def test_acceptance_of_lossy_sampling_is_labelled_and_kept_apart() -> None:
    lossy = pair_70b()
    lossy["speculation"] |= {"rejectionSampling": "fly", "lossy": True}
    serving = Observation(SERVING, [], {"llama-1": reading(speculation=drafted(100, 213, 5), generation_tokens=313)})
    exact, told = after(None, pair_70b(), serving), after(None, lossy, serving)
    assert told.acceptance is not None
    assert told.acceptance.measured_with.startswith("draft_model, K 5, fly, ")
    assert "rejectionSampling" in active(told)
    assert "rejectionSampling" not in active(exact)
    assert after(exact, lossy, Observation(SERVING, [], IDLE)).acceptance is None
    condition, of_exact = (
        next(each for each in status.conditions if each.type == "Accepted") for status in (told, exact)
    )
    assert (condition.status, condition.reason) == ("True", "LossyRejectionSampling")
    assert "outputs differ from meta-llama/Llama-3.1-70B-Instruct" in condition.message
    assert of_exact.reason == "Valid"
