"""Compare requested speculation settings with counters and reports of the engines."""

from typing import Any

import pytest

from specdecode_operator.api.deployment_status import Condition, ObservedStatus, SpecDecodeDeploymentStatus
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.deployment.observed.engine_reports import steady
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.status import _CHANGES, compose_status
from specdecode_operator.stats.engine_window import NOTHING_RECENT, Recent, update_recent
from specdecode_operator.vllm.engine_metrics import (
    EngineReading,
    Reading,
    SpeculationReading,
    Unreachable,
    read_metrics,
)
from specdecode_operator.vllm.logging_config import CHANGED_SETTINGS
from specdecode_operator.vllm.profiles import find_profile
from tests.support.decisions import H200_NODE, NOW, decide, desired_state
from tests.support.objects import H200, Body, deployment, pair_70b, parent, tiny_cpu
from tests.support.replay_field_cases import replaying
from tests.unit.deployment.test_status import SERVING, drafted, reading
from tests.unit.vllm.test_engine_metrics import SCRAPE


def asking(**speculation: Any) -> Body:
    spec = tiny_cpu()
    return {**spec, "speculation": {**spec["speculation"], **speculation}}


def by_requests(*lengths: int) -> list[dict[str, int]]:
    return [{"from": 4 * at + 1, "to": 4 * at + 4, "numSpeculativeTokens": length} for at, length in enumerate(lengths)]


def status(spec: Body, *engines: EngineReading | Unreachable, **observation: Any) -> SpecDecodeDeploymentStatus:
    owner = parse_deployment(parent(spec, status=observation.pop("before", {})))
    readings = {f"llama-{number}": each for number, each in enumerate(engines)}
    seen = Observation(SERVING, [], readings, **observation)
    return compose_status(owner, desired_state(owner, (H200_NODE,)), seen, NOW)


def features(spec: Body, *engines: EngineReading | Unreachable) -> dict[str, tuple[str, str, str]]:
    """Return what is asked for, whether it is in force and why, by its field."""
    return {each.feature: (each.asked, each.in_force, each.message) for each in status(spec, *engines).speculation}


def active(spec: Body, *engines: EngineReading) -> tuple[str, str, str]:
    told = status(spec, *engines)
    (found,) = (each for each in told.conditions if each.type == "SpeculationActive")
    return found.status, found.reason, found.message


def test_counters_of_a_real_engine_prove_method_and_draft_length() -> None:
    said = features(tiny_cpu(), read_metrics(SCRAPE, find_profile("0.32")))
    assert said == {
        "method": ("draft_model", "True", "acceptance 50%, mean acceptance length 2.49 with K=3"),
        "numSpeculativeTokens": ("3", "True", "drafts have 3.00 tokens on average"),
    }


def test_shorter_drafts_than_requested_are_reported_with_the_field() -> None:
    status_, reason, message = active(asking(numSpeculativeTokens=5), reading(speculation=drafted(100, 213)))
    assert (status_, reason) == ("False", "OtherDraftLength")
    assert message.startswith("numSpeculativeTokens 5 is not in force: llama-0 drafts up to 3 tokens; ")
    assert "set spec.speculation.numSpeculativeTokens to 3" in message
    assert all(part in message for part in ("71%", "3.13", "K=5"))


@pytest.mark.parametrize(
    ("drafts", "tokens", "in_force"),
    [
        (100, 500, "True"),
        (100, 450, "True"),
        (100, 440, "Unknown"),
        (100, 300, "False"),
        (100, 301, "False"),
        (100, 310, "Unknown"),
        (100, 340, "Unknown"),
        (32, 64, "False"),
        (21, 63, "Unknown"),
    ],
    ids=[
        "whole",
        "some at the end",
        "more at the end",
        "each shorter",
        "each but one shorter",
        "some longer",
        "now this, now that",
        "just enough",
        "too few",
    ],
)
def test_mean_draft_length_decides_whether_k_is_in_force(drafts: int, tokens: int, in_force: str) -> None:
    seen = SpeculationReading(drafts, tokens, 90, (90, 0, 0, 0, 0))
    assert features(asking(numSpeculativeTokens=5), reading(speculation=seen))["numSpeculativeTokens"][1] == in_force


@pytest.mark.parametrize("change", ["schedule_with_data_parallel", "schedule_on_v1"])
def test_schedule_dropped_by_the_engine_is_reported(change: str) -> None:
    engine = reading(speculation=drafted(100, 90), changed_settings=frozenset({change}))
    spec = asking(numSpeculativeTokensByBatchSize=by_requests(3, 1))
    assert features(spec, engine)["numSpeculativeTokensByBatchSize"][:2] == ("1-4: 3, 5-8: 1, 9-256: 3", "False")
    assert active(spec, engine)[:2] == ("False", "ScheduleDropped")


@pytest.mark.parametrize(
    ("lengths", "seen", "in_force"),
    [
        ((3, 1), SpeculationReading(100, 240, 90, (90, 0, 0)), "True"),
        ((3, 1), SpeculationReading(100, 300, 90, (90, 0, 0)), "Unknown"),
        ((3, 3), SpeculationReading(100, 300, 90, (90, 0, 0)), "True"),
        ((3, 1), SpeculationReading(2, 4, 1, (1, 0, 0)), "Unknown"),
    ],
    ids=["both lengths", "one length", "asks for one", "too few"],
)
def test_schedule_is_in_force_if_draft_lengths_vary_as_requested(
    lengths: tuple[int, int], seen: SpeculationReading, in_force: str
) -> None:
    spec = asking(numSpeculativeTokensByBatchSize=by_requests(*lengths))
    found = features(spec, reading(speculation=seen))
    assert found["numSpeculativeTokensByBatchSize"][1] == in_force
    assert found["numSpeculativeTokens"][1] != "False"
    assert active(spec, reading(speculation=seen))[0] == "True"


def test_steps_without_drafts_prove_a_schedule_with_k_zero() -> None:
    spec = asking(numSpeculativeTokensByBatchSize=by_requests(3, 0))
    engine = reading(speculation=drafted(100, 90), decode_steps=400, generation_tokens=500)
    told = status(spec, engine)
    assert told.observed is not None
    assert told.observed.drafted_steps_percent == 25
    found = features(spec, engine)["numSpeculativeTokensByBatchSize"]
    assert found[1] == "True"
    assert found[2].startswith("75 %")


def test_other_method_is_reported_alone_and_before_traffic() -> None:
    engine = reading(speculation_settings={"method": "ngram"})
    status_, reason, message = active(tiny_cpu(), engine)
    assert (status_, reason) == ("False", "OtherMethod")
    assert "ready to draft" not in message


SETTINGS = {
    "adaptiveVerification": (True, "enable_adaptive_verification", "True", "False", "NotAdaptive"),
    "rejectionSampling": ("block", "rejection_sample_method", "block", "standard", "OtherRejectionSampling"),
    "draftSampling": ("probabilistic", "draft_sample_method", "probabilistic", "greedy", "OtherDraftSampling"),
    "useHeterogeneousVocab": (True, "use_heterogeneous_vocab", "True", "False", "OtherSetting"),
}


@pytest.mark.parametrize("field", SETTINGS)
def test_settings_without_counters_are_proved_by_the_engine_log(field: str) -> None:
    value, key, same, other, reason = SETTINGS[field]
    spec = pair_70b()
    spec["speculation"] |= {field: value}

    def engine(**said: str) -> EngineReading:
        return reading(speculation=drafted(100, 90, 5), speculation_settings=said)

    asked = str(value).lower()
    assert features(spec, engine(**{key: same}))[field][:2] == (asked, "True")
    found = features(spec, engine(**{key: same}), engine())[field]
    assert found[:2] == (asked, "Unknown")
    assert "llama-1 does not log" in found[2]
    assert "VLLM_LOGGING_LEVEL" in found[2]
    status_, told, message = active(spec, engine(**{key: same}), engine(**{key: other}))
    assert (status_, told) == ("False", reason)
    assert message.startswith(f"{field} {asked} is not in force: llama-1 started with {key} {other}; check ")
    assert active(spec, engine())[:2] == ("True", "Drafting")


def test_other_draft_tensor_parallel_size_is_reported() -> None:
    spec = pair_70b()
    spec["parallelism"] = {"tensor": 2, "draftTensor": 1}
    engine = reading(speculation=drafted(100, 90, 5), speculation_settings={"draft_tensor_parallel_size": "1"})
    assert active(spec, engine)[1] == "OtherDraftTensor"
    assert "over 2 GPUs" in features(spec, engine)["parallelism.draftTensor"][2]
    spec["parallelism"]["draftTensor"] = 2
    assert features(spec, engine)["parallelism.draftTensor"][1] == "True"
    del spec["parallelism"]["draftTensor"]
    assert "parallelism.draftTensor" not in features(spec, engine)


def test_all_features_not_in_force_are_reported() -> None:
    spec = pair_70b()
    spec["speculation"] |= {"adaptiveVerification": True}
    engine = reading(speculation=drafted(100, 90), speculation_settings={"enable_adaptive_verification": "False"})
    status_, reason, message = active(spec, engine)
    assert (status_, reason) == ("False", "OtherDraftLength")
    assert "adaptiveVerification true is not in force" in message


def test_not_drafting_is_reported_before_other_settings() -> None:
    engine = reading(generation_tokens=500, speculation_settings={"draft_sample_method": "greedy"})
    assert active(asking(draftSampling="probabilistic"), engine)[1] == "NotDrafting"
    assert active(tiny_cpu(), reading(speculation=None))[1] == "NotDrafting"
    assert features(tiny_cpu(), reading(speculation=None))["method"][1] == "False"


def test_unreachable_engine_leaves_every_feature_unknown() -> None:
    found = features(asking(draftSampling="greedy"), Unreachable("/metrics did not answer"))
    assert {in_force for _, in_force, _ in found.values()} == {"Unknown"}
    assert list(found) == ["method", "numSpeculativeTokens", "draftSampling"]
    assert found["method"][2] == "llama-0: /metrics did not answer"


def test_no_features_are_listed_without_speculation_or_in_a_replay() -> None:
    assert features(tiny_cpu(speculation={"method": "none"}), reading(speculation=None)) == {}
    assert features(replaying(), reading(speculation=drafted(100, 90))) == {}


def test_engine_that_misses_one_scrape_keeps_its_proven_features() -> None:
    before = status(tiny_cpu(), reading(speculation=drafted(100, 90)))
    said = before.model_dump(by_alias=True, mode="json", exclude_none=True)
    missed = status(tiny_cpu(), Unreachable("busy"), silent_s=0.0, before=said)
    assert missed.speculation == before.speculation
    gone = status(tiny_cpu(), Unreachable("busy"), silent_s=30.0, before=said)
    assert gone.speculation[0].in_force == "Unknown"


@pytest.mark.parametrize("length", ["abc", "", "nan", "-inf", "1e999"])
@pytest.mark.parametrize("silent_s", [None, 0.0])
def test_forged_status_figures_do_not_break_reconciliation(length: str, silent_s: float | None) -> None:
    """Whoever may write a status writes any text there."""
    forged = {"engines": 1, "draftTokens": 300, "acceptancePercent": 71, "numSpeculativeTokens": 3}
    before = {"observed": {**forged, "meanDraftLength": length, "kvCacheTokens": 1}}
    engine = reading(speculation=drafted(100, 213))
    told = status(tiny_cpu(), engine, before=before, figures_due=True, silent_s=silent_s)
    assert [each.feature for each in told.speculation] == ["method", "numSpeculativeTokens"]
    for moved in (71, 75):
        old = ObservedStatus(engines=1, acceptance_percent=71, mean_draft_length=length)
        new = ObservedStatus(engines=1, acceptance_percent=moved, mean_draft_length="3.00")
        assert steady(new, old, figures_due=True) == new


NODES = (NodeFacts("h200-0", H200, 8),)


def engine(*changed: str, says: bool = True) -> EngineReading:
    return EngineReading(
        num_gpu_blocks=None,
        block_size=None,
        kv_cache_tokens=None,
        kv_cache_max_concurrency=None,
        speculation=None,
        generation_tokens=0,
        requests_running=0,
        requests_waiting=0,
        changed_settings=frozenset(changed) if says else None,
    )


def condition(*engines: Reading, spec: dict[str, Any] | None = None) -> Condition:
    owner = parse_deployment(parent(spec or pair_70b()))
    readings = {f"llama-{number}": each for number, each in enumerate(engines)}
    seen = Observation(deployment(replicas=1, updated=1, available=1), readings=readings)
    status = compose_status(owner, desired_state(owner, NODES), seen, NOW)
    return next(found for found in status.conditions if found.type == "SettingsInForce")


@pytest.mark.parametrize("change", CHANGED_SETTINGS)
def test_changed_setting_is_reported_with_engine_and_spec_field(change: str) -> None:
    found = condition(engine(), engine(change))
    assert (found.status, found.reason) == ("False", _CHANGES[change][0])
    assert found.message.startswith("llama-1: ")
    assert "spec." in found.message


def test_settings_are_in_force_if_the_engine_reports_no_changes() -> None:
    assert (condition(engine()).status, condition(engine()).reason) == ("True", "AsAsked")


def test_settings_in_force_is_unknown_without_an_engine_report() -> None:
    assert condition(engine(), engine(says=False)).reason == "NotSaid"
    assert condition().reason == "EngineNotReady"
    assert condition(Unreachable("no")).reason == "Unreachable"


def test_changes_that_the_plan_expects_are_not_reported() -> None:
    ngram = tiny_cpu(speculation={"method": "ngram", "numSpeculativeTokens": 3})
    planned = engine("async_scheduling", "model_runner", "cudagraph_mode_with_schedule")
    assert condition(planned, spec=ngram).status == "True"
    short = pair_70b(serving={"maxModelLen": 8192, "maxNumSeqs": 512, "maxNumBatchedTokens": 2048})
    assert condition(engine("max_num_seqs"), spec=short).status == "True"
    stages = {
        "target": {"model": "Qwen/Qwen3-30B-A3B"},
        "speculation": {"method": "none"},
        "parallelism": {"tensor": 1, "pipeline": 2},
        "engine": {"version": "0.28"},
    }
    assert condition(engine("async_scheduling"), spec=stages).status == "True"
    assert condition(engine("async_scheduling")).reason == "NotAsynchronous"
    assert condition(engine("model_runner")).reason == "RunnerChanged"


def counting(steps: int, drafts: int, acceptance: float = 0.5) -> EngineReading:
    tokens = 3 * drafts
    seen = SpeculationReading(drafts, tokens, round(tokens * acceptance), (drafts // 2, 0, 0))
    return reading(speculation=seen, decode_steps=steps, generation_tokens=steps + 1)


def after(*rounds: dict[str, EngineReading | Unreachable]) -> Recent:
    recent = NOTHING_RECENT
    for readings in rounds:
        recent = update_recent(recent, readings)
    return recent


def told(spec: Body, *rounds: dict[str, EngineReading]) -> SpecDecodeDeploymentStatus:
    return decide(parent(spec), Observation(SERVING, [], rounds[-1], recent=after(*rounds)))[1]


def active_after(spec: Body, *rounds: dict[str, EngineReading]) -> tuple[str, str]:
    (found,) = (each for each in told(spec, *rounds).conditions if each.type == "SpeculationActive")
    return found.status, found.reason


DRAFTED = {"a": counting(1000, 1000)}


def test_stopped_drafting_is_reported_after_512_steps() -> None:
    assert active_after(tiny_cpu(), DRAFTED) == ("True", "Drafting")
    assert active_after(tiny_cpu(), DRAFTED, {"a": counting(1511, 1000)}) == ("True", "Drafting")
    assert active_after(tiny_cpu(), DRAFTED, {"a": counting(1512, 1000)}) == ("False", "NotDrafting")


def test_resumed_drafting_is_reported_as_active() -> None:
    assert active_after(tiny_cpu(), DRAFTED, {"a": counting(1600, 1000)}, {"a": counting(2200, 1600)}) == (
        "True",
        "Drafting",
    )


@pytest.mark.parametrize(
    "speculation",
    [
        {"method": "ngram", "numSpeculativeTokens": 3},
        {"method": "suffix", "numSpeculativeTokens": 3},
        {
            **tiny_cpu()["speculation"],
            "numSpeculativeTokensByBatchSize": [{"from": 1, "to": 4, "numSpeculativeTokens": 0}],
        },
    ],
    ids=["a lookup that finds nothing", "answers that were never given before", "a schedule that says so"],
)
def test_steps_without_drafts_are_expected_of_lookups_and_schedules(speculation: dict[str, Any]) -> None:
    assert active_after(tiny_cpu(speculation=speculation), DRAFTED, {"a": counting(2000, 1000)}) == (
        "True",
        "Drafting",
    )
