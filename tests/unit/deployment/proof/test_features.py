"""Whether what was asked of speculation is in force: by counters, by what engines changed, and by their own word."""

from typing import Any

import pytest

from specdecode_operator.api.deployment_status import ObservedStatus, SpecDecodeDeploymentStatus
from specdecode_operator.deployment.observed.engine_reports import steady
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.status import compose_status
from specdecode_operator.vllm.engine_metrics import EngineReading, SpeculationReading, Unreachable, read_metrics
from specdecode_operator.vllm.profiles import find_profile
from tests.support.decisions import H200_NODE, NOW, desired_state
from tests.support.objects import Body, pair_70b, parent, tiny_cpu
from tests.support.replay_field_cases import replaying
from tests.unit.deployment.test_deployment_status import SERVING, drafted, reading
from tests.unit.vllm.test_metrics import SCRAPE

NGRAM = {"method": "ngram", "numSpeculativeTokens": 3}


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


def test_a_real_engine_that_does_as_it_was_asked_is_believed_by_its_counters() -> None:
    said = features(tiny_cpu(), read_metrics(SCRAPE, find_profile("0.32")))
    assert said == {
        "method": ("draft_model", "True", "acceptance 50%, mean acceptance length 2.49 with K=3"),
        "numSpeculativeTokens": ("3", "True", "drafts have 3.00 tokens on average"),
    }


def test_fewer_places_than_were_asked_for_are_named_with_the_field_to_mend() -> None:
    status_, reason, message = active(asking(numSpeculativeTokens=5), reading(speculation=drafted(100, 213)))
    assert (status_, reason) == ("False", "OtherDraftLength")
    assert message.startswith("numSpeculativeTokens 5 is not in force: llama-0 drafts up to 3 tokens; ")
    assert "set spec.speculation.numSpeculativeTokens to 3" in message
    assert message.endswith("acceptance 71%, mean acceptance length 3.13 with K=5")


def test_engines_that_draft_otherwise_serve_and_say_what_they_lack() -> None:
    told = status(asking(numSpeculativeTokens=5), reading(speculation=drafted(100, 213)))
    ready = next(each for each in told.conditions if each.type == "Ready")
    assert (ready.status, ready.reason) == ("True", "SpeculationInactive")
    assert "not all of speculation is in force: numSpeculativeTokens 5" in ready.message


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
def test_the_length_of_drafts_tells_what_is_in_force(drafts: int, tokens: int, in_force: str) -> None:
    seen = SpeculationReading(drafts, tokens, 90, (90, 0, 0, 0, 0))
    assert features(asking(numSpeculativeTokens=5), reading(speculation=seen))["numSpeculativeTokens"][1] == in_force


def test_another_k_that_the_engine_started_with_is_named_though_its_places_are_as_asked() -> None:
    engine = reading(speculation=drafted(100, 213), speculation_settings={"num_speculative_tokens": "2"})
    found = features(tiny_cpu(), engine)["numSpeculativeTokens"]
    assert found[1] == "False"
    assert found[2].startswith("llama-0 started with num_speculative_tokens 2; ")


def test_a_lookup_proposes_what_it_finds() -> None:
    short = SpeculationReading(100, 120, 90, (90, 0, 0))
    schedule = {"numSpeculativeTokensByBatchSize": by_requests(3, 1)}
    found = features(tiny_cpu(speculation={**NGRAM, **schedule}), reading(speculation=short))
    assert found["numSpeculativeTokens"][1] == "True"
    assert found["numSpeculativeTokensByBatchSize"][1] == "Unknown", "a short draft need not be one of the schedule"


def test_one_engine_of_several_that_differs_is_named() -> None:
    same, other = reading(speculation=drafted(100, 90)), reading(speculation=drafted(100, 90, 2))
    assert "llama-1 drafts up to 2 tokens" in active(tiny_cpu(), same, other)[2]


@pytest.mark.parametrize("change", ["schedule_with_data_parallel", "schedule_on_v1"])
def test_a_schedule_that_the_engine_noted_as_dropped_is_named(change: str) -> None:
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
def test_a_schedule_is_seen_in_the_length_of_drafts(
    lengths: tuple[int, int], seen: SpeculationReading, in_force: str
) -> None:
    spec = asking(numSpeculativeTokensByBatchSize=by_requests(*lengths))
    found = features(spec, reading(speculation=seen))
    assert found["numSpeculativeTokensByBatchSize"][1] == in_force
    assert found["numSpeculativeTokens"][1] != "False"
    assert active(spec, reading(speculation=seen))[0] == "True"


def test_steps_without_a_draft_prove_a_schedule_with_none_and_what_that_costs() -> None:
    spec = asking(numSpeculativeTokensByBatchSize=by_requests(3, 0))
    engine = reading(speculation=drafted(100, 90), decode_steps=400, generation_tokens=500)
    told = status(spec, engine)
    assert told.observed is not None
    assert told.observed.drafted_steps_percent == 25
    found = features(spec, engine)["numSpeculativeTokensByBatchSize"]
    assert found[1] == "True"
    assert found[2].startswith("75 % of decoding steps had no draft; 0 tokens are not the same as none: ")
    assert "collapsed acceptance: use 1 in place of 0" in found[2]


def test_what_is_not_in_force_is_told_before_there_is_traffic_and_alone() -> None:
    engine = reading(speculation_settings={"method": "ngram"})
    status_, reason, message = active(tiny_cpu(), engine)
    assert (status_, reason) == ("False", "OtherMethod")
    assert "ready to draft" not in message


def test_requests_of_one_token_have_no_step_that_could_draft() -> None:
    assert active(tiny_cpu(), reading(generation_tokens=500, decode_steps=0))[1] == "NoTraffic"
    assert active(tiny_cpu(), reading(generation_tokens=500, decode_steps=63))[1] == "NoTraffic"
    assert active(tiny_cpu(), reading(generation_tokens=500, decode_steps=64))[1] == "NotDrafting"


SETTINGS = {
    "adaptiveVerification": (True, "enable_adaptive_verification", "True", "False", "NotAdaptive"),
    "rejectionSampling": ("block", "rejection_sample_method", "block", "standard", "OtherRejectionSampling"),
    "draftSampling": ("probabilistic", "draft_sample_method", "probabilistic", "greedy", "OtherDraftSampling"),
    "useHeterogeneousVocab": (True, "use_heterogeneous_vocab", "True", "False", "OtherSetting"),
}


@pytest.mark.parametrize("field", SETTINGS)
def test_what_no_counter_shows_is_known_by_the_engines_own_word(field: str) -> None:
    value, key, same, other, reason = SETTINGS[field]
    spec = pair_70b()
    spec["speculation"] |= {field: value}

    def engine(**said: str) -> EngineReading:
        return reading(speculation=drafted(100, 90, 5), speculation_settings=said)

    asked = str(value).lower()
    assert features(spec, engine(**{key: same}))[field][:2] == (asked, "True")
    found = features(spec, engine(**{key: same}), engine())[field]
    assert found[:2] == (asked, "Unknown")
    assert "llama-1 does not say" in found[2]
    assert "VLLM_LOGGING_LEVEL" in found[2]
    status_, told, message = active(spec, engine(**{key: same}), engine(**{key: other}))
    assert (status_, told) == ("False", reason)
    assert message.startswith(f"{field} {asked} is not in force: llama-1 started with {key} {other}; look for ")
    assert active(spec, engine())[:2] == ("True", "Drafting")


def test_a_draft_that_is_split_otherwise_than_asked_for_is_told() -> None:
    spec = pair_70b()
    spec["parallelism"] = {"tensor": 2, "draftTensor": 1}
    engine = reading(speculation=drafted(100, 90, 5), speculation_settings={"draft_tensor_parallel_size": "1"})
    assert active(spec, engine)[1] == "OtherDraftTensor"
    assert "over 2 GPUs" in features(spec, engine)["parallelism.draftTensor"][2]
    spec["parallelism"]["draftTensor"] = 2
    assert features(spec, engine)["parallelism.draftTensor"][1] == "True"
    del spec["parallelism"]["draftTensor"]
    assert "parallelism.draftTensor" not in features(spec, engine)


def test_several_features_that_are_not_in_force_are_all_named() -> None:
    spec = pair_70b()
    spec["speculation"] |= {"adaptiveVerification": True}
    engine = reading(speculation=drafted(100, 90), speculation_settings={"enable_adaptive_verification": "False"})
    status_, reason, message = active(spec, engine)
    assert (status_, reason) == ("False", "OtherDraftLength")
    assert "adaptiveVerification true is not in force" in message


def test_engines_that_do_not_draft_at_all_are_told_so_first() -> None:
    engine = reading(generation_tokens=500, speculation_settings={"draft_sample_method": "greedy"})
    assert active(asking(draftSampling="probabilistic"), engine)[1] == "NotDrafting"
    assert active(tiny_cpu(), reading(speculation=None))[1] == "NotDrafting"
    assert features(tiny_cpu(), reading(speculation=None))["method"][1] == "False"


def test_without_an_answer_nothing_is_known_and_all_is_listed() -> None:
    found = features(asking(draftSampling="greedy"), Unreachable("/metrics did not answer"))
    assert {in_force for _, in_force, _ in found.values()} == {"Unknown"}
    assert list(found) == ["method", "numSpeculativeTokens", "draftSampling"]
    assert found["method"][2] == "llama-0: /metrics did not answer"


def test_a_schedule_of_many_ranges_and_the_words_of_a_pod_are_cut() -> None:
    ranges = [{"from": n, "to": n, "numSpeculativeTokens": 1 + n % 3} for n in range(1, 257)]
    asked = features(asking(numSpeculativeTokensByBatchSize=ranges), reading())["numSpeculativeTokensByBatchSize"][0]
    assert len(asked) <= 256
    assert asked.endswith(",…")
    hostile = features(tiny_cpu(), Unreachable("\x07" * 100_000))
    assert len(hostile["method"][2]) == 4096
    assert "\x07" not in hostile["method"][2]


def test_without_speculation_and_of_a_replay_nothing_is_listed() -> None:
    assert features(tiny_cpu(speculation={"method": "none"}), reading(speculation=None)) == {}
    assert features(replaying(), reading(speculation=drafted(100, 90))) == {}


def test_an_engine_that_misses_a_question_keeps_what_it_proved() -> None:
    before = status(tiny_cpu(), reading(speculation=drafted(100, 90)))
    said = before.model_dump(by_alias=True, mode="json", exclude_none=True)
    missed = status(tiny_cpu(), Unreachable("busy"), silent_s=0.0, before=said)
    assert missed.speculation == before.speculation
    gone = status(tiny_cpu(), Unreachable("busy"), silent_s=30.0, before=said)
    assert gone.speculation[0].in_force == "Unknown"


@pytest.mark.parametrize(("drafts", "accepted", "told"), [(100, 0, True), (80, 0, False), (400, 1, False)])
def test_drafts_of_which_nothing_is_accepted_are_told(drafts: int, accepted: int, told: bool) -> None:
    status_, reason, message = active(tiny_cpu(), reading(speculation=drafted(drafts, accepted)))
    assert (status_, reason) == ("True", "Drafting"), "they are drafted, and that is what was asked for"
    assert ("--kv-transfer-config" in message) is told


@pytest.mark.parametrize("length", ["abc", "", "nan", "-inf", "1e999"])
@pytest.mark.parametrize("silent_s", [None, 0.0])
def test_figures_that_somebody_else_wrote_into_the_status_stop_nothing(length: str, silent_s: float | None) -> None:
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
