"""The methods beyond a draft model and n-grams: what is rendered, and what the engine would refuse of them."""

import json
from typing import Any

import pytest

from specdecode_operator.api.speculation import Ngram, Suffix
from specdecode_operator.enums import (
    METHODS_WITH_DRAFT,
    METHODS_WITH_LAYERS,
    METHODS_WITH_LOOKUP,
    DraftHeadQuantization,
    DraftSampling,
    Dtype,
    Method,
    RejectionSampling,
)
from specdecode_operator.vllm.arguments import command_line
from specdecode_operator.vllm.model_runner import runs_on_v1
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, find_profile
from specdecode_operator.vllm.serving_rules import combination_problems
from specdecode_operator.vllm.settings import EngineSettings, ScheduleRange, SpeculationSettings
from specdecode_operator.vllm.speculation_rules import speculation_problems
from specdecode_operator.vllm.speculative_config import speculative_config
from specdecode_operator.vllm.versions import release
from tests.support.engine_settings import replace, speculating_with
from tests.unit.vllm.engine_cases import CPU, DRAFT_MODEL, NGRAM, PLAIN

PROFILE = find_profile("0.32")
HEADS = [method for method in METHODS_WITH_DRAFT if method is not Method.DRAFT_MODEL]
METHODS = [method for method in Method if method is not Method.NONE]
MEDUSA_ENDED = (
    "spec.speculation.method: vLLM {} has it no more; use method eagle3 with a head that was trained for this target, "
    "or write spec.engine.version: 0.32, the last that has it"
)
FULL_SUFFIX = Suffix(
    max_tree_depth=16, max_cached_requests=0, max_spec_factor_percent=150, min_token_probability_percent=5
)


def speculating(method: Method, **more: Any) -> SpeculationSettings:
    """Return the least that a method needs, and more."""
    draft = {"draft_model": "/models/head"} if method in METHODS_WITH_DRAFT else {}
    return speculating_with(method, 3, **{**draft, **more})


def config_of(speculation: SpeculationSettings, **more: Any) -> dict[str, Any]:
    """Return the speculative config that settings with this speculation become."""
    text = speculative_config(replace(PLAIN, speculation=speculation, **more), PROFILE)
    assert text is not None
    config: dict[str, Any] = json.loads(text)
    return config


@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_rendered_with_what_it_needs_and_no_more(method: Method) -> None:
    wanted: dict[str, Any] = {"method": method.value, "num_speculative_tokens": 3}
    if method in METHODS_WITH_DRAFT:
        wanted["model"] = "/models/head"
    if method in METHODS_WITH_LAYERS:
        wanted["draft_tensor_parallel_size"] = 2
    assert config_of(speculating(method)) == wanted
    assert set(wanted) <= PROFILE.speculative_keys


@pytest.mark.parametrize("method", METHODS_WITH_LOOKUP)
def test_lookup_bounds_are_those_of_both_lookups(method: Method) -> None:
    config = config_of(speculating(method, ngram=Ngram(prompt_lookup_min=2, prompt_lookup_max=4)))
    assert (config["prompt_lookup_min"], config["prompt_lookup_max"]) == (2, 4)


def test_shares_of_suffix_become_fractions() -> None:
    config = config_of(speculating(Method.SUFFIX, suffix=FULL_SUFFIX))
    assert {key: value for key, value in config.items() if key.startswith("suffix")} == {
        "suffix_decoding_max_tree_depth": 16,
        "suffix_decoding_max_cached_requests": 0,
        "suffix_decoding_max_spec_factor": 1.5,
        "suffix_decoding_min_token_prob": 0.05,
    }
    assert set(config) <= PROFILE.speculative_keys


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_known_to_every_version_until_it_ends(version: str, method: Method) -> None:
    profile = find_profile(version)
    settings = replace(PLAIN, speculation=speculating(method))
    problems = [f"{problem.field}: {problem.message}" for problem in speculation_problems(settings, profile)]
    assert problems == ([MEDUSA_ENDED.format(version)] if method == "medusa" and release(version) >= (0, 33) else [])
    assert profile.extra_draft_slots[method].at(3) >= 0


@pytest.mark.parametrize(("method", "slots"), [(Method.DFLASH, 5), (Method.DSPARK, 4), (Method.EAGLE3, 0)])
def test_a_step_must_have_room_for_a_whole_draft(method: Method, slots: int) -> None:
    speculation = replace(speculating(method), num_speculative_tokens=5)
    enough = replace(PLAIN, speculation=speculation, max_num_seqs=1, max_num_batched_tokens=5 + 1 + slots)
    assert speculation_problems(enough, PROFILE) == []
    (problem,) = speculation_problems(replace(enough, max_num_batched_tokens=5 + slots), PROFILE)
    assert f"at least {6 + slots}" in problem.message


@pytest.mark.parametrize("method", [Method.DSPARK, Method.MTP])
def test_a_draft_inside_the_targets_checkpoint_is_not_named(method: Method) -> None:
    settings = replace(PLAIN, speculation=replace(speculating(method), draft_model=None))
    assert speculation_problems(settings, PROFILE) == []
    assert "model" not in json.loads(speculative_config(settings, PROFILE) or "")


def test_mtp_drafts_with_a_checkpoint_that_is_named() -> None:
    settings = replace(PLAIN, speculation=speculating(Method.MTP, draft_model="org/assistant"))
    assert speculation_problems(settings, PROFILE) == []
    assert json.loads(speculative_config(settings, PROFILE) or "")["model"] == "org/assistant"


def test_a_path_that_turns_mtp_into_another_method_is_refused() -> None:
    settings = replace(PLAIN, speculation=speculating(Method.MTP, draft_model="org/eagle3-layers"))
    (problem,) = speculation_problems(settings, PROFILE)
    assert problem.field == "spec.speculation.draft.model"


@pytest.mark.parametrize("method", [method for method in HEADS if method is not Method.DSPARK])
def test_a_head_must_be_named(method: Method) -> None:
    settings = replace(PLAIN, speculation=replace(speculating(method), draft_model=None))
    (problem,) = speculation_problems(settings, PROFILE)
    assert problem.field == "spec.speculation.draft"
    assert f"method {method} needs draft.model" in problem.message


@pytest.mark.parametrize("method", [Method.EAGLE, Method.EAGLE3, Method.DFLASH, Method.DSPARK])
def test_a_path_changes_nothing_where_the_method_is_a_head(method: Method) -> None:
    settings = replace(PLAIN, speculation=speculating(method, draft_model="/models/EAGLE3-dflash"))
    assert speculation_problems(settings, PROFILE) == []


def test_a_path_flips_medusa_and_the_target_flips_mtp() -> None:
    medusa = replace(PLAIN, speculation=speculating(Method.MEDUSA, draft_model="/models/eagle-x"))
    (problem,) = speculation_problems(medusa, PROFILE)
    assert (problem.field, problem.value) == ("spec.speculation.draft.model", "/models/eagle-x")
    mtp = replace(PLAIN, model="/models/dspark/target", speculation=speculating(Method.MTP))
    (problem,) = speculation_problems(mtp, PROFILE)
    assert (problem.field, problem.value) == ("spec.target.model", "/models/dspark/target")
    assert "turns method mtp into dspark" in problem.message


def test_sampling_is_said_in_the_engines_words() -> None:
    speculation = replace(
        DRAFT_MODEL, rejection_sampling=RejectionSampling.BLOCK, draft_sampling=DraftSampling.PROBABILISTIC
    )
    config = config_of(speculation)
    assert (config["rejection_sample_method"], config["draft_sample_method"]) == ("block", "probabilistic")
    assert speculation_problems(replace(PLAIN, speculation=speculation), PROFILE) == []
    assert not {"rejection_sample_method", "draft_sample_method"} & set(config_of(DRAFT_MODEL))


def test_a_lossy_check_is_said_by_its_name_alone() -> None:
    speculation = replace(DRAFT_MODEL, rejection_sampling=RejectionSampling.FLY, lossy=True)
    config = config_of(speculation)
    assert config["rejection_sample_method"] == "fly"
    assert [key for key in config if key.startswith("fly_")] == [], "vLLM's own parameters"
    assert speculation_problems(replace(PLAIN, speculation=speculation), find_profile("0.33")) == []


@pytest.mark.parametrize(
    ("version", "changes", "sentence"),
    [
        ("0.32", {}, "set engine.version 0.33 or later"),
        ("0.33", {"cpu": CPU}, "on GPUs alone"),
        ("0.33", {"speculation": replace(DRAFT_MODEL, num_speculative_tokens=1)}, "2 or more"),
    ],
)
def test_a_lossy_check_is_refused_where_there_is_none(version: str, changes: dict[str, Any], sentence: str) -> None:
    asked = changes.get("speculation", DRAFT_MODEL)
    speculation = replace(asked, rejection_sampling=RejectionSampling.FLY, lossy=True)
    settings = replace(PLAIN, **{**changes, "speculation": speculation})
    (problem,) = speculation_problems(settings, find_profile(version))
    assert (problem.field, problem.value) == ("spec.speculation.rejectionSampling", "fly")
    assert sentence in problem.message


REFUSED = [
    (
        {"speculation": replace(DRAFT_MODEL, rejection_sampling=RejectionSampling.BLOCK, lossy=True)},
        "spec.speculation.lossy",
        "only applies to rejectionSampling fly",
    ),
    ({"speculation": DRAFT_MODEL, "pipeline_parallel_size": 2}, "spec.parallelism.pipeline", "of one stage"),
    (
        {"speculation": replace(NGRAM, schedule=(ScheduleRange(1, 8, 2),)), "data_parallel_size": 2},
        "spec.speculation.numSpeculativeTokensByBatchSize",
        "use replicas instead of data",
    ),
    (
        {"speculation": speculating(Method.SUFFIX, schedule=(ScheduleRange(1, 8, 2),))},
        "spec.speculation.numSpeculativeTokensByBatchSize",
        "cannot shorten its drafts",
    ),
    ({"speculation": replace(NGRAM, suffix=FULL_SUFFIX)}, "spec.speculation.suffix", "use method suffix"),
    ({"speculation": replace(DRAFT_MODEL, draft_tensor_parallel_size=4)}, "spec.parallelism.draftTensor", "1 or the"),
    (
        {"speculation": replace(DRAFT_MODEL, rejection_sampling=RejectionSampling.BLOCK), "cpu": CPU},
        "spec.speculation.rejectionSampling",
        "model runner V1",
    ),
    (
        {"speculation": speculating(Method.MEDUSA, rejection_sampling=RejectionSampling.BLOCK)},
        "spec.speculation.rejectionSampling",
        "runs method medusa",
    ),
    (
        {"speculation": replace(NGRAM, draft_sampling=DraftSampling.PROBABILISTIC)},
        "spec.speculation.draftSampling",
        "no draft that could sample",
    ),
    ({"speculation": speculating(Method.DSPARK), "cpu": CPU}, "spec.speculation.method", "model runner V2"),
    ({"speculation": speculating(Method.NGRAM_GPU), "cpu": CPU}, "spec.speculation.method", "use method ngram"),
]


@pytest.mark.parametrize(("change", "field", "words"), REFUSED)
def test_what_does_not_go_together_is_refused(change: dict[str, Any], field: str, words: str) -> None:
    (problem,) = speculation_problems(replace(PLAIN, **change), PROFILE)
    assert problem.field == field
    assert words in problem.message


@pytest.mark.parametrize("method", METHODS_WITH_LAYERS)
@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_another_split_of_the_draft_is_refused_only_where_the_engine_fails(method: Method, version: str) -> None:
    """vllm/v1/spec_decode/draft_model.py: only a draft model, and only on model runner V1."""
    profile = find_profile(version)
    speculation = speculating(method, draft_tensor_parallel_size=1)
    fields = [each.field for each in speculation_problems(replace(PLAIN, speculation=speculation), profile)]
    if method not in profile.runners:
        return
    fails = method is Method.DRAFT_MODEL and profile.runners[method] == "V1"
    assert fields == (["spec.parallelism.draftTensor"] if fails else [])
    assert config_of(speculation)["draft_tensor_parallel_size"] == 1
    alone = replace(PLAIN, speculation=speculation, tensor_parallel_size=1)
    assert speculation_problems(alone, profile) == []


EAGLE3 = speculating(Method.EAGLE3)
FEATURES = [
    (DRAFT_MODEL, ("--enable-lora",), {"max_num_batched_tokens": 1535}, "spec.serving.maxNumBatchedTokens", "= 1536"),
    (EAGLE3, ("--seed", "1", "--kv-sharing-fast-prefill"), {}, "spec.engine.extraArgs[2]", "remove it"),
    (speculating(Method.MEDUSA), ("--logits-processors", "a.B"), {}, "spec.engine.extraArgs[0]", "remove it"),
    (NGRAM, ("--override-generation-config", '{"min_p": 0.1}'), {}, "spec.engine.extraArgs[0]", "leave min_p out"),
    (NGRAM, ("--override-generation-config.min_p=0.1",), {}, "spec.engine.extraArgs[0]", "leave min_p out"),
    (None, ("--per-request-spec-decode-metrics=summary",), {}, "spec.engine.extraArgs[0]", "no speculation"),
    (None, ("--enable-auto-tool-choice",), {}, "spec.engine.extraArgs[0]", "needs --tool-call-parser NAME"),
]


@pytest.mark.parametrize(("speculation", "extra", "change", "field", "words"), FEATURES)
def test_features_that_do_not_go_with_speculation_are_refused(
    speculation: SpeculationSettings | None, extra: tuple[str, ...], change: dict[str, Any], field: str, words: str
) -> None:
    settings = replace(PLAIN, speculation=speculation, extra_args=extra, **change)
    (problem,) = combination_problems(settings, PROFILE)
    assert problem.field == field
    assert words in problem.message


SAMPLING = replace(EAGLE3, draft_sampling=DraftSampling.PROBABILISTIC)
DUAL_KEY = ("--watermark-config.key", "1", "--watermark-config.algorithm", "dual_key_gumbel")
UNMARKED = {
    "lookup": (NGRAM, DUAL_KEY, "marks no tokens of method ngram"),
    "one pass": (replace(SAMPLING, drafts_in_parallel=True), DUAL_KEY, "marks no tokens of /models/"),
    "likeliest tokens": (EAGLE3, DUAL_KEY, "draftSampling to probabilistic"),
    "blocks": (replace(SAMPLING, rejection_sampling=RejectionSampling.BLOCK), DUAL_KEY, "rejectionSampling block"),
    "fly": (
        replace(SAMPLING, rejection_sampling=RejectionSampling.FLY, lossy=True),
        DUAL_KEY,
        "rejectionSampling fly",
    ),
    "one key": (SAMPLING, ("--watermark-config", '{"key": 1}'), "algorithm dual_key_gumbel"),
}


@pytest.mark.parametrize("name", UNMARKED)
def test_a_watermark_that_drafted_tokens_would_not_carry_is_refused(name: str) -> None:
    speculation, extra, words = UNMARKED[name]
    (problem,) = combination_problems(replace(PLAIN, speculation=speculation, extra_args=extra), PROFILE)
    assert problem.field.startswith("spec.engine.extraArgs[")
    assert words in problem.message
    # The key is a secret.
    assert not problem.value.strip("-abcdefghijklmnopqrstuvwxyz.")


def test_dflash_carries_a_watermark_since_0_33() -> None:
    speculation = replace(speculating(Method.DFLASH), draft_sampling=DraftSampling.PROBABILISTIC)
    settings = replace(PLAIN, speculation=speculation, extra_args=DUAL_KEY)
    told = {version: combination_problems(settings, find_profile(version)) for version in ("0.32", "0.33")}
    assert "0.32 marks no tokens of method dflash" in told["0.32"][0].message
    assert told["0.33"] == []


@pytest.mark.parametrize(
    ("speculation", "extra"),
    [
        (SAMPLING, DUAL_KEY),
        (replace(SAMPLING, rejection_sampling=RejectionSampling.STANDARD), DUAL_KEY),
        (SAMPLING, ("--watermark-config", '{"key": 1, "allow_target_only_watermarking": true}')),
        (NGRAM, ("--watermark-config", "null")),
        (None, ("--watermark-config", '{"key": 1}')),
        (DRAFT_MODEL, ("--enable-lora",)),
        (DRAFT_MODEL, ("--kv-sharing-fast-prefill",)),
        (EAGLE3, ("--no-kv-sharing-fast-prefill",)),
        (EAGLE3, ("--logits-processors", "a.B")),
        (EAGLE3, ("--override-generation-config", '{"top_p": 0.1}')),
        (EAGLE3, ("--per-request-spec-decode-metrics", "summary")),
        (None, ("--per-request-spec-decode-metrics", "none")),
        (EAGLE3, ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")),
    ],
)
def test_features_that_go_with_it_pass(speculation: SpeculationSettings | None, extra: tuple[str, ...]) -> None:
    # As many tokens in a step as adapters want for 256 requests and K = 5.
    settings = replace(PLAIN, speculation=speculation, extra_args=extra, max_num_batched_tokens=1536)
    assert combination_problems(settings, PROFILE) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pipeline_parallel_size": 2}, ["--pipeline-parallel-size", "2", "--distributed-executor-backend", "mp"]),
        ({"data_parallel_size": 2, "tensor_parallel_size": 1}, ["--data-parallel-size", "2"]),
        ({"expert_parallel": True}, ["--enable-expert-parallel", "--distributed-executor-backend", "mp"]),
    ],
)
def test_parallelism_is_rendered(change: dict[str, Any], words: list[str]) -> None:
    settings: EngineSettings = replace(PLAIN, **change)
    line = command_line(settings, PROFILE)
    start = line.index(words[0])
    assert line[start : start + len(words)] == words
    assert ("--distributed-executor-backend" in line) == (settings.tensor_parallel_size > 1)


IN_PARALLEL = [
    replace(speculating(method), num_speculative_tokens=4, drafts_in_parallel=True)
    for method in (Method.DRAFT_MODEL, Method.EAGLE3)
]


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
@pytest.mark.parametrize("speculation", IN_PARALLEL, ids=lambda each: each.method.value)
def test_a_draft_in_one_pass_is_told_and_runs_on_v1(version: str, speculation: SpeculationSettings) -> None:
    profile = find_profile(version)
    settings = replace(PLAIN, speculation=speculation)
    assert speculation_problems(settings, profile) == []
    assert runs_on_v1(settings, profile)
    assert config_of(speculation)["parallel_drafting"] is True
    assert "parallel_drafting" not in config_of(replace(speculation, drafts_in_parallel=False))
    slots = 4 if speculation.method is Method.DRAFT_MODEL else 3
    short = replace(settings, max_num_seqs=1, max_num_batched_tokens=4 + slots)
    (problem,) = speculation_problems(short, profile)
    assert f"at least {5 + slots}" in problem.message


@pytest.mark.parametrize(("tokens", "taken"), [(0, True), (1, False), (3, False), (4, True)])
def test_a_draft_in_one_pass_proposes_all_tokens_or_none(tokens: int, taken: bool) -> None:
    scheduled = replace(IN_PARALLEL[0], schedule=(ScheduleRange(1, 8, 4), ScheduleRange(9, 16, tokens)))
    found = speculation_problems(replace(PLAIN, speculation=scheduled), PROFILE)
    assert [problem.field for problem in found] == (
        [] if taken else ["spec.speculation.numSpeculativeTokensByBatchSize[1].numSpeculativeTokens"]
    )


def test_a_draft_model_in_one_pass_is_split_as_its_target() -> None:
    asked = replace(IN_PARALLEL[0], draft_tensor_parallel_size=1)
    (problem,) = speculation_problems(replace(PLAIN, speculation=asked), PROFILE)
    assert (problem.field, problem.value) == ("spec.parallelism.draftTensor", "1")


MAPPED = replace(DRAFT_MODEL, maps_vocabulary=True)


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_a_draft_of_another_vocabulary_runs_on_v1_or_is_refused(version: str) -> None:
    profile = find_profile(version)
    assert config_of(MAPPED)["use_heterogeneous_vocab"] is True
    assert "use_heterogeneous_vocab" not in config_of(DRAFT_MODEL)
    settings = replace(PLAIN, speculation=MAPPED)
    assert runs_on_v1(settings, profile)
    fields = [problem.field for problem in speculation_problems(settings, profile)]
    # vLLM 0.31 takes it to model runner V2, which maps nothing.
    assert fields == (["spec.speculation.useHeterogeneousVocab"] if version == "0.31" else [])
    assert speculation_problems(replace(settings, cpu=CPU), profile) == []


def test_a_draft_of_another_vocabulary_does_not_sample() -> None:
    sampled = replace(MAPPED, draft_sampling=DraftSampling.PROBABILISTIC)
    (problem,) = speculation_problems(replace(PLAIN, speculation=sampled), PROFILE)
    assert problem.field == "spec.speculation.draftSampling"


@pytest.mark.parametrize("method", [Method.EAGLE, Method.MTP])
def test_a_quantized_copy_of_the_output_head_is_told_where_the_engine_has_it(method: Method) -> None:
    speculation = speculating(method, draft_lm_head_quantization=DraftHeadQuantization.FP8)
    assert config_of(speculation)["draft_lm_head_quantization"] == "fp8"
    settings = replace(PLAIN, speculation=speculation)
    assert speculation_problems(settings, find_profile("0.33")) == []
    wide = replace(settings, dtype=Dtype.FLOAT32)
    for asked, version in ((settings, "0.32"), (replace(settings, cpu=CPU), "0.33"), (wide, "0.33")):
        (problem,) = speculation_problems(asked, find_profile(version))
        assert (problem.field, problem.value) == ("spec.speculation.draftLmHeadQuantization", "fp8")


def test_the_candidates_of_a_refiner_are_told_where_the_engine_has_one() -> None:
    speculation = speculating(Method.DFLASH, xpress_top_c=0)
    assert config_of(speculation)["xpress_topc"] == 0
    assert "xpress_topc" not in config_of(speculating(Method.DFLASH))
    settings = replace(PLAIN, speculation=speculation)
    assert speculation_problems(settings, find_profile("0.33")) == []
    (problem,) = speculation_problems(settings, find_profile("0.32"))
    assert (problem.field, problem.value) == ("spec.speculation.xpressTopC", "0")
