"""Rules for serving and speculation."""

import dataclasses
import json
from typing import Any

import pytest

from specdecode_operator.api.speculation import Draft, Ngram, Suffix
from specdecode_operator.enums import (
    METHODS_WITH_DRAFT,
    METHODS_WITH_LAYERS,
    METHODS_WITH_LOOKUP,
    METHODS_WITH_SAMPLING,
    CudagraphMode,
    DraftHeadQuantization,
    DraftSampling,
    Dtype,
    Method,
    Platform,
    RejectionSampling,
)
from specdecode_operator.problems import Problem
from specdecode_operator.vllm.arguments import command_line
from specdecode_operator.vllm.model_runner import runs_on_v1
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, EngineProfile, find_profile
from specdecode_operator.vllm.serving_rules import combination_problems, image_problems, serving_problems
from specdecode_operator.vllm.settings import (
    EngineSettings,
    ScheduleRange,
    SpeculationSettings,
)
from specdecode_operator.vllm.speculation_rules import speculation_problems
from specdecode_operator.vllm.speculative_config import speculative_config
from specdecode_operator.vllm.versions import release
from tests.support.engine_settings import replace, speculating_with
from tests.unit.vllm.engine_cases import CPU, DRAFT_MODEL, NGRAM, PLAIN, SCHEDULED

PROFILE = find_profile(KNOWN_VERSIONS[-1])
SPECULATION = "spec.speculation"
SCHEDULE = "spec.speculation.numSpeculativeTokensByBatchSize"


@pytest.mark.parametrize(
    "speculation",
    [
        None,
        DRAFT_MODEL,
        NGRAM,
        SCHEDULED,
        replace(NGRAM, ngram=Ngram(prompt_lookup_min=2)),
        replace(DRAFT_MODEL, draft=Draft(model="org/draft", max_model_len=PLAIN.max_model_len)),
        replace(NGRAM, ngram=Ngram(prompt_lookup_min=4, prompt_lookup_max=4)),
        replace(NGRAM, schedule=(ScheduleRange(1, 1, 4), ScheduleRange(2, 2, 3), ScheduleRange(3, 8, 0))),
    ],
)
def test_valid_speculation_has_no_problem(speculation: SpeculationSettings | None) -> None:
    assert speculation_problems(replace(PLAIN, speculation=speculation), PROFILE) == []


def schedule(*ranges: tuple[int, int, int]) -> dict[str, Any]:
    """Return the change that sets a schedule."""
    return {"schedule": tuple(ScheduleRange(*part) for part in ranges)}


BAD_SPECULATION = [
    (DRAFT_MODEL, {"num_speculative_tokens": 0}, f"{SPECULATION}.numSpeculativeTokens", "0", "at least 1"),
    (NGRAM, {"num_speculative_tokens": 0}, f"{SPECULATION}.numSpeculativeTokens", "0", "use method none"),
    (DRAFT_MODEL, {"draft_model": None}, f"{SPECULATION}.draft", "absent", "needs draft.model"),
    (NGRAM, {"draft_model": "/m"}, f"{SPECULATION}.draft", "/m", "has no draft model"),
    (
        DRAFT_MODEL,
        {"draft": Draft(model="org/draft", max_model_len=8193)},
        f"{SPECULATION}.draft.maxModelLen",
        "8193",
        "8192",
    ),
    (
        NGRAM,
        {"ngram": Ngram(prompt_lookup_min=5, prompt_lookup_max=4)},
        f"{SPECULATION}.ngram.promptLookupMin",
        "5",
        "promptLookupMax, 4",
    ),
    (DRAFT_MODEL, {"ngram": Ngram(prompt_lookup_min=5)}, f"{SPECULATION}.ngram", "5 to None", "does not "),
    (NGRAM, schedule((1, 8, 5)), f"{SCHEDULE}[0].numSpeculativeTokens", "5", "exceeds numSpeculativeTokens, 4"),
    (NGRAM, schedule((1, 8, -1)), f"{SCHEDULE}[0]", "1 to 8", "not be negative"),
    (NGRAM, schedule((8, 1, 1)), f"{SCHEDULE}[0]", "8 to 1", "at most to"),
    (NGRAM, schedule((0, 1, 1)), f"{SCHEDULE}[0]", "0 to 1", "at least 1"),
    (NGRAM, schedule((1, 8, 1), (8, 9, 0)), f"{SCHEDULE}[1].from", "8", "after the range before it, 1 to 8"),
    (NGRAM, schedule((9, 12, 1), (1, 8, 0)), f"{SCHEDULE}[1].from", "1", "sorted"),
    (NGRAM, {"method": Method.NONE}, f"{SPECULATION}.method", "none", "draft_model, dspark"),
]


@pytest.mark.parametrize(("speculation", "change", "field", "value", "fix"), BAD_SPECULATION)
def test_invalid_speculation_names_field_value_and_fix(
    speculation: SpeculationSettings, change: dict[str, Any], field: str, value: str, fix: str
) -> None:
    settings = replace(PLAIN, speculation=replace(speculation, **change))
    (problem,) = speculation_problems(settings, PROFILE)
    assert (problem.field, problem.value) == (field, value)
    assert fix in problem.message


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/models/eagle-tests/llama-1b", "eagle"),
        ("/models/EAGLE3-llama", "eagle3"),
        ("org/model-dflash", "dflash"),
        ("/models/x-DSpark", "dspark"),
    ],
)
def test_draft_path_that_changes_the_method_is_refused(path: str, method: str) -> None:
    settings = replace(PLAIN, speculation=replace(DRAFT_MODEL, draft_model=path))
    (problem,) = speculation_problems(settings, PROFILE)
    assert (problem.field, problem.value) == (f"{SPECULATION}.draft.model", path)
    assert f"to {method} " in problem.message
    assert "folder" in problem.message


@pytest.mark.parametrize("path", ["/models/eagle/llama", "/models/beagle_1b", "meta-llama/Llama-3.1-8B"])
def test_harmless_draft_path_is_accepted(path: str) -> None:
    settings = replace(PLAIN, speculation=replace(DRAFT_MODEL, draft_model=path))
    assert speculation_problems(settings, PROFILE) == []


@pytest.mark.parametrize(("speculation", "needed"), [(DRAFT_MODEL, 7), (NGRAM, 5)])
def test_batched_tokens_must_hold_one_verification(speculation: SpeculationSettings, needed: int) -> None:
    settings = replace(PLAIN, speculation=speculation, max_num_seqs=1, max_num_batched_tokens=needed)
    assert speculation_problems(settings, PROFILE) == []
    (problem,) = speculation_problems(replace(settings, max_num_batched_tokens=needed - 1), PROFILE)
    assert problem.field == "spec.serving.maxNumBatchedTokens"
    assert f"at least {needed} " in problem.message


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
@pytest.mark.parametrize("line", ["--async-scheduling", "--async-sched", "--async_scheduling", "--seed=1 --async-s"])
def test_ngram_with_async_scheduling_is_refused_before_0_33(line: str, version: str) -> None:
    settings = replace(PLAIN, speculation=NGRAM, extra_args=tuple(line.split()))
    problems = speculation_problems(settings, find_profile(version))
    if release(version) >= (0, 33):  # which looks up on the GPU, and runs ahead
        assert problems == []
        return
    (problem,) = problems
    assert problem.field == f"spec.engine.extraArgs[{len(line.split()) - 1}]"
    assert problem.value == "--async-scheduling"
    assert "method ngram" in problem.message


def test_ngram_with_async_scheduling_is_refused_on_runner_v1() -> None:
    settings = replace(PLAIN, cpu=CPU, speculation=NGRAM, extra_args=("--async-scheduling",))
    (problem,) = speculation_problems(settings, PROFILE)
    assert problem.field == "spec.engine.extraArgs[0]"


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
@pytest.mark.parametrize("stages", [1, 2])
def test_v1_async_scheduling_with_stages_is_refused_since_0_31(version: str, stages: int) -> None:
    settings = replace(PLAIN, target_on_v1=True, pipeline_parallel_size=stages, extra_args=("--async-scheduling",))
    profile = find_profile(version)
    refused = stages == 2 and release(version) >= (0, 31)
    problems = serving_problems(settings, profile)
    assert [(problem.field, problem.value) for problem in problems] == [
        ("spec.engine.extraArgs[0]", "--async-scheduling")
    ] * refused
    assert serving_problems(replace(settings, extra_args=("--no-async-scheduling",)), profile) == []
    assert serving_problems(replace(settings, target_on_v1=False), profile) == []


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_ngram_gpu_schedule_is_refused_on_runner_v1(version: str) -> None:
    profile = find_profile(version)
    looked_up = replace(NGRAM, method=Method.NGRAM_GPU, schedule=(ScheduleRange(1, 8, 2),))
    problems = speculation_problems(replace(PLAIN, speculation=looked_up), profile)
    assert [problem.field for problem in problems] == [SCHEDULE] * (profile.runners[Method.NGRAM_GPU] == "V1")


@pytest.mark.parametrize(
    ("speculation", "line"),
    [
        (DRAFT_MODEL, "--async-scheduling"),
        (None, "--async-scheduling"),
        (NGRAM, "--no-async-scheduling"),
        (NGRAM, "--async-scheduling --no-async-s"),
    ],
)
def test_other_async_scheduling_settings_are_accepted(speculation: SpeculationSettings | None, line: str) -> None:
    settings = replace(PLAIN, speculation=speculation, extra_args=tuple(line.split()))
    assert speculation_problems(settings, PROFILE) == []


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
@pytest.mark.parametrize("method", [Method.EAGLE, Method.MEDUSA, Method.MTP])
def test_heads_with_pipeline_stages_are_accepted_since_0_30(method: Method, version: str) -> None:
    head = None if method is Method.MTP else "/models/head"
    settings = replace(PLAIN, pipeline_parallel_size=2, speculation=speculating_with(method, 3, draft_model=head))
    problems = speculation_problems(settings, find_profile(version))
    if method not in find_profile(version).runners:
        return
    message = f"vLLM {version} does not combine stages with method {method}; use 1"
    refused = [Problem("spec.parallelism.pipeline", "2", message)] if version in {"0.28", "0.29"} else []
    assert problems == refused


ON_V1 = speculating_with(Method.SUFFIX, 4)
MODE, ARG = "spec.serving.cudagraphMode", "spec.engine.extraArgs[0]"
NONE, FULL, BOTH = CudagraphMode.NONE, CudagraphMode.FULL, CudagraphMode.FULL_AND_PIECEWISE
BAD_SERVING = [
    (replace(PLAIN, max_num_seqs=9000), "spec.serving.maxNumBatchedTokens", "8192", "9000"),
    (replace(PLAIN, cpu=CPU), "spec.serving.blockSize", "16", "multiple of 32"),
    (
        replace(PLAIN, cpu=CPU, block_size=128, max_cudagraph_capture_size=64),
        "spec.serving.maxCudagraphCaptureSize",
        "64",
        "on the CPU",
    ),
    (
        replace(PLAIN, speculation=ON_V1, max_cudagraph_capture_size=7),
        "spec.serving.maxCudagraphCaptureSize",
        "7",
        "at least 8",
    ),
    (replace(PLAIN, cpu=CPU, block_size=128, cudagraph_mode=FULL), MODE, "FULL", "on the CPU; remove it"),
    (replace(PLAIN, enforce_eager=True, cudagraph_mode=NONE), MODE, "NONE", "serving.enforceEager; remove one"),
    (
        replace(PLAIN, cudagraph_mode=NONE, max_cudagraph_capture_size=64),
        "spec.serving.maxCudagraphCaptureSize",
        "64",
        "serving.cudagraphMode NONE; remove one",
    ),
    (
        replace(PLAIN, extra_args=("--compilation-config", '{"mode": 3, "cudagraph_mode": "FULL"}')),
        ARG,
        "--compilation-config",
        f"use {MODE}",
    ),
    (
        replace(PLAIN, extra_args=('-cc={"max_cudagraph_capture_size": 8}',)),
        ARG,
        "-cc",
        "use spec.serving.maxCudagraphCaptureSize",
    ),
    (replace(PLAIN, cudagraph_mode=FULL, extra_args=("-cc.mode=3",)), ARG, "-cc.mode", "--compilation-config.KEY"),
    (
        replace(PLAIN, cudagraph_mode=FULL, extra_args=('--compilation-config={"mode": 3}',)),
        ARG,
        "--compilation-config",
        "vLLM keeps only one of this and serving.cudagraphMode",
    ),
    (
        replace(PLAIN, cudagraph_mode=CudagraphMode.PIECEWISE, extra_args=("-O0",)),
        MODE,
        "PIECEWISE",
        "write NONE, or leave it on",
    ),
    (
        replace(PLAIN, cudagraph_mode=BOTH, extra_args=("--optimization-level", "0", "-O", "3", "-O=0")),
        MODE,
        "FULL_AND_PIECEWISE",
        "write FULL_DECODE_ONLY",
    ),
    (
        replace(PLAIN, cudagraph_mode=BOTH, extra_args=("--compilation-config.mode=none", "-O3")),
        MODE,
        "FULL_AND_PIECEWISE",
        "extraArgs turn off the compilation",
    ),
    (replace(PLAIN, model="--middleware=x"), "spec.target.model", "--middleware=x", "dash"),
    (replace(PLAIN, served_model_names=("a", "-b")), "spec.serving.servedModelNames[1]", "-b", "dash"),
]


@pytest.mark.parametrize(("settings", "field", "value", "fix"), BAD_SERVING)
def test_invalid_serving_names_field_value_and_fix(settings: EngineSettings, field: str, value: str, fix: str) -> None:
    (problem,) = serving_problems(settings, PROFILE)
    assert (problem.field, problem.value) == (field, value)
    assert fix in problem.message


@pytest.mark.parametrize(
    "settings",
    [
        PLAIN,
        replace(PLAIN, cpu=CPU, block_size=128),
        replace(PLAIN, max_num_seqs=PLAIN.max_num_batched_tokens),
        *(replace(PLAIN, cudagraph_mode=mode, speculation=DRAFT_MODEL) for mode in CudagraphMode),
        replace(PLAIN, cudagraph_mode=FULL, extra_args=("--seed=1", "--compilation-config.mode", "3")),
        replace(PLAIN, cudagraph_mode=BOTH, extra_args=("-O0", "--compilation-config.mode=VLLM_COMPILE")),
        replace(PLAIN, cudagraph_mode=BOTH, extra_args=("-O0", "--compilation-config.mode=3")),
        replace(PLAIN, cudagraph_mode=FULL, extra_args=("-O0",)),
        replace(PLAIN, extra_args=("-cc.mode=3", "--compilation-config", '{"mode": 3}')),
        replace(PLAIN, speculation=ON_V1, max_cudagraph_capture_size=8),
        replace(PLAIN, speculation=replace(ON_V1, num_speculative_tokens=3), max_cudagraph_capture_size=4),
        replace(PLAIN, speculation=ON_V1, max_cudagraph_capture_size=1, cudagraph_mode=CudagraphMode.PIECEWISE),
        replace(PLAIN, speculation=DRAFT_MODEL, max_cudagraph_capture_size=1),
    ],
)
def test_valid_serving_has_no_problem(settings: EngineSettings) -> None:
    assert serving_problems(settings, PROFILE) == []


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
@pytest.mark.parametrize("mode", CudagraphMode)
def test_v1_full_cudagraph_mode_with_a_schedule_is_refused(mode: CudagraphMode, version: str) -> None:
    profile = find_profile(version)
    scheduled = replace(DRAFT_MODEL, schedule=(ScheduleRange(1, 8, 2),))
    problems = serving_problems(replace(PLAIN, cudagraph_mode=mode, speculation=scheduled), profile)
    refused = mode.startswith("FULL") and profile.runners[Method.DRAFT_MODEL] == "V1"
    assert [(problem.field, problem.value) for problem in problems] == [(MODE, mode.value)] * refused
    assert all("write PIECEWISE" in problem.message for problem in problems)


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_bfloat16_kv_cache_needs_a_bfloat16_model_since_0_33(version: str, dtype: Dtype) -> None:
    settings = replace(PLAIN, dtype=dtype, kv_cache_dtype="bfloat16")
    problems = serving_problems(settings, find_profile(version))
    refused = release(version) >= (0, 33) and dtype in (Dtype.FLOAT16, Dtype.FLOAT32)
    assert [(problem.field, problem.value) for problem in problems] == [
        ("spec.serving.kvCacheDtype", "bfloat16")
    ] * refused
    assert all(dtype in problem.message and "write auto" in problem.message for problem in problems)
    assert serving_problems(replace(settings, kv_cache_dtype="fp8"), find_profile(version)) == []


def test_image_is_required_if_none_is_known() -> None:
    assert image_problems(None, Platform.GPU, PROFILE) == []
    assert image_problems("registry.local/vllm:1", Platform.CPU, PROFILE) == []
    assert image_problems("registry.local/vllm:1", Platform.GPU, find_profile("0.99")) == []
    for platform, profile in ((Platform.CPU, PROFILE), (Platform.GPU, find_profile("0.99"))):
        (problem,) = image_problems(None, platform, profile)
        assert problem.field == "spec.engine.image"
        assert f"no {platform.upper()} image of vLLM {profile.version}" in problem.message
        assert (f'or write spec.engine.version: "{KNOWN_VERSIONS[-1]}"' in problem.message) == (
            profile.version == "0.99"
        )


CONTRADICTIONS = {
    "sizes beside a largest": (
        replace(PLAIN, max_cudagraph_capture_size=64, extra_args=("--cudagraph-capture-sizes", "8", "16")),
        ARG,
        "remove one of the two",
    ),
    "sizes of a key beside a largest": (
        replace(PLAIN, max_cudagraph_capture_size=64, extra_args=("-cc.cudagraph_capture_sizes=[8]",)),
        ARG,
        "remove one of the two",
    ),
    "experts that move without any": (replace(PLAIN, extra_args=("--enable-eplb",)), ARG, "set parallelism.expert"),
    "whole prompts in a short step": (
        replace(PLAIN, max_model_len=8192, max_num_batched_tokens=4096, extra_args=("--no-enable-chunked-prefill",)),
        "spec.serving.maxNumBatchedTokens",
        "at least serving.maxModelLen, 8192",
    ),
    "two microbatches": (replace(PLAIN, extra_args=("--enable-dbo",)), ARG, "--all2all-backend"),
    "shards of one GPU": (
        replace(PLAIN, tensor_parallel_size=1, extra_args=("--enable-batch-sharded-sampling",)),
        ARG,
        "parallelism.tensor above 1",
    ),
    "more GPUs than requests": (
        replace(PLAIN, tensor_parallel_size=4, max_num_seqs=2, extra_args=("--enable-batch-sharded-sampling",)),
        ARG,
        "maxNumSeqs of 4",
    ),
    "shards on V1": (
        replace(
            PLAIN, speculation=replace(NGRAM, method=Method.SUFFIX), extra_args=("--enable-batch-sharded-sampling",)
        ),
        ARG,
        "model runner V2",
    ),
    "a replay on V1": (
        replace(PLAIN, speculation=replace(NGRAM, method=Method.SUFFIX), extra_args=("--enable-trace-replay",)),
        ARG,
        "model runner V2",
    ),
    "no text": (replace(PLAIN, extra_args=("--runner=pooling",)), ARG, "turns off generation"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_arguments_that_contradict_the_spec_are_refused(name: str) -> None:
    settings, field, complaint = CONTRADICTIONS[name]
    (problem,) = serving_problems(settings, PROFILE)
    assert problem.field == field
    assert complaint in problem.message


@pytest.mark.parametrize(
    "settings",
    [
        replace(PLAIN, extra_args=("--cudagraph-capture-sizes", "8", "16")),
        replace(PLAIN, expert_parallel=True, extra_args=("--enable-eplb",)),
        replace(PLAIN, extra_args=("--enable-eplb", "--no-enable-eplb")),
        replace(PLAIN, max_model_len=4096, max_num_batched_tokens=4096, extra_args=("--no-enable-chunked-prefill",)),
        replace(PLAIN, extra_args=("--enable-dbo", "--all2all-backend", "deepep_low_latency")),
        replace(PLAIN, tensor_parallel_size=2, max_num_seqs=2, extra_args=("--enable-batch-sharded-sampling",)),
        replace(PLAIN, speculation=NGRAM, extra_args=("--enable-trace-replay",)),
        replace(PLAIN, extra_args=("--runner", "generate")),
    ],
)
def test_arguments_that_agree_with_the_spec_are_accepted(settings: EngineSettings) -> None:
    assert serving_problems(settings, PROFILE) == []


@pytest.mark.parametrize(
    "line",
    [
        "--override-generation-config.min_p=0",
        '--override-generation-config={"min_p":0.0}',
        f"--override-generation-config={'[' * 4000}",
    ],
)
def test_zero_or_unreadable_min_p_is_ignored(line: str) -> None:
    assert combination_problems(replace(PLAIN, speculation=NGRAM, extra_args=(line,)), PROFILE) == []


@pytest.mark.parametrize(
    "line",
    [
        "--override-generation-config.min_p=0.1 --override-generation-config.temperature=0.5",
        "--override-generation-config.temperature=0.5 --override-generation-config.min_p 0.1",
        '--override-generation-config={"min_p":0.1}',
    ],
)
def test_min_p_is_found_in_every_spelling(line: str) -> None:
    settings = replace(PLAIN, speculation=NGRAM, extra_args=tuple(line.split()))
    (problem,) = combination_problems(settings, PROFILE)
    assert "min_p" in problem.message


@pytest.mark.parametrize(
    ("later", "fix"),
    [({"--block-size": "0.33"}, 'remove it, or set engine.version: "0.33" or later'), ({}, "remove it")],
)
def test_a_field_whose_flag_the_version_lacks_is_refused(later: dict[str, str], fix: str) -> None:
    flags = {name: flag for name, flag in PROFILE.flags.items() if name not in ("--block-size", "--enforce-eager")}
    profile = dataclasses.replace(PROFILE, flags=flags, later_flags=later)
    assert [str(problem) for problem in serving_problems(PLAIN, profile)] == [
        f"spec.serving.blockSize: 16: vLLM {PROFILE.version} does not have it; {fix}"
    ]
    eager = serving_problems(replace(PLAIN, enforce_eager=True), profile)
    assert ("spec.serving.enforceEager", "true") in [(problem.field, problem.value) for problem in eager]


def test_field_whose_speculative_key_the_version_lacks_is_refused() -> None:
    settings = replace(PLAIN, speculation=replace(DRAFT_MODEL, xpress_top_c=0))
    assert [str(problem) for problem in speculation_problems(settings, find_profile("0.32"))] == [
        'spec.speculation.xpressTopC: 0: vLLM 0.32 does not have it; remove it, or set engine.version: "0.33" or later'
    ]


# The methods beyond a draft model and n-grams: what is rendered, and what the engine would refuse of them.

PROFILE_METHODS = find_profile("0.32")
HEADS = [method for method in METHODS_WITH_DRAFT if method is not Method.DRAFT_MODEL]
METHODS = [method for method in Method if method is not Method.NONE]
MEDUSA_ENDED = (
    "spec.speculation.method: vLLM {} no longer supports it; use method eagle3 with a head trained for this"
    ' target, or write spec.engine.version: "0.32", the last that supports it'
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
    text = speculative_config(replace(PLAIN, speculation=speculation, **more), PROFILE_METHODS)
    assert text is not None
    config: dict[str, Any] = json.loads(text)
    return config


@pytest.mark.parametrize("method", METHODS)
def test_method_is_rendered_with_only_the_keys_it_needs(method: Method) -> None:
    wanted: dict[str, Any] = {"method": method.value, "num_speculative_tokens": 3}
    if method in METHODS_WITH_DRAFT:
        wanted["model"] = "/models/head"
    if method in METHODS_WITH_LAYERS:
        wanted["draft_tensor_parallel_size"] = 2
    assert config_of(speculating(method)) == wanted
    assert set(wanted) <= PROFILE_METHODS.speculative_keys


@pytest.mark.parametrize("method", METHODS_WITH_LOOKUP)
def test_prompt_lookup_bounds_are_rendered_for_each_ngram_method(method: Method) -> None:
    config = config_of(speculating(method, ngram=Ngram(prompt_lookup_min=2, prompt_lookup_max=4)))
    assert (config["prompt_lookup_min"], config["prompt_lookup_max"]) == (2, 4)


def test_suffix_percentages_become_fractions() -> None:
    config = config_of(speculating(Method.SUFFIX, suffix=FULL_SUFFIX))
    assert {key: value for key, value in config.items() if key.startswith("suffix")} == {
        "suffix_decoding_max_tree_depth": 16,
        "suffix_decoding_max_cached_requests": 0,
        "suffix_decoding_max_spec_factor": 1.5,
        "suffix_decoding_min_token_prob": 0.05,
    }
    assert set(config) <= PROFILE_METHODS.speculative_keys


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_supported_except_medusa_since_0_33(version: str, method: Method) -> None:
    profile = find_profile(version)
    settings = replace(PLAIN, speculation=speculating(method))
    problems = [f"{problem.field}: {problem.message}" for problem in speculation_problems(settings, profile)]
    assert problems == ([MEDUSA_ENDED.format(version)] if method == "medusa" and release(version) >= (0, 33) else [])
    assert profile.extra_draft_slots[method].at(3) >= 0


@pytest.mark.parametrize(("method", "slots"), [(Method.DFLASH, 5), (Method.DSPARK, 4), (Method.EAGLE3, 0)])
def test_batched_tokens_must_hold_one_block_of_drafts(method: Method, slots: int) -> None:
    speculation = replace(speculating(method), num_speculative_tokens=5)
    enough = replace(PLAIN, speculation=speculation, max_num_seqs=1, max_num_batched_tokens=5 + 1 + slots)
    assert speculation_problems(enough, PROFILE_METHODS) == []
    (problem,) = speculation_problems(replace(enough, max_num_batched_tokens=5 + slots), PROFILE_METHODS)
    assert f"at least {6 + slots}" in problem.message


@pytest.mark.parametrize("method", [Method.DSPARK, Method.MTP])
def test_draft_in_the_target_checkpoint_is_not_named(method: Method) -> None:
    settings = replace(PLAIN, speculation=replace(speculating(method), draft_model=None))
    assert speculation_problems(settings, PROFILE_METHODS) == []
    assert "model" not in json.loads(speculative_config(settings, PROFILE_METHODS) or "")


def test_mtp_renders_a_named_draft_checkpoint() -> None:
    settings = replace(PLAIN, speculation=speculating(Method.MTP, draft_model="org/assistant"))
    assert speculation_problems(settings, PROFILE_METHODS) == []
    assert json.loads(speculative_config(settings, PROFILE_METHODS) or "")["model"] == "org/assistant"


def test_draft_path_that_changes_mtp_is_refused() -> None:
    settings = replace(PLAIN, speculation=speculating(Method.MTP, draft_model="org/eagle3-layers"))
    (problem,) = speculation_problems(settings, PROFILE_METHODS)
    assert problem.field == "spec.speculation.draft.model"


@pytest.mark.parametrize("method", [method for method in HEADS if method is not Method.DSPARK])
def test_head_methods_need_a_draft_model(method: Method) -> None:
    settings = replace(PLAIN, speculation=replace(speculating(method), draft_model=None))
    (problem,) = speculation_problems(settings, PROFILE_METHODS)
    assert problem.field == "spec.speculation.draft"
    assert f"method {method} needs draft.model" in problem.message


@pytest.mark.parametrize("method", [Method.EAGLE, Method.EAGLE3, Method.DFLASH, Method.DSPARK])
def test_draft_path_does_not_change_head_methods(method: Method) -> None:
    settings = replace(PLAIN, speculation=speculating(method, draft_model="/models/EAGLE3-dflash"))
    assert speculation_problems(settings, PROFILE_METHODS) == []


def test_paths_that_change_medusa_or_mtp_are_refused() -> None:
    medusa = replace(PLAIN, speculation=speculating(Method.MEDUSA, draft_model="/models/eagle-x"))
    (problem,) = speculation_problems(medusa, PROFILE_METHODS)
    assert (problem.field, problem.value) == ("spec.speculation.draft.model", "/models/eagle-x")
    mtp = replace(PLAIN, model="/models/dspark/target", speculation=speculating(Method.MTP))
    (problem,) = speculation_problems(mtp, PROFILE_METHODS)
    assert (problem.field, problem.value) == ("spec.target.model", "/models/dspark/target")
    assert "changes method mtp to dspark" in problem.message


def test_sampling_fields_are_rendered_with_the_vllm_names() -> None:
    speculation = replace(
        DRAFT_MODEL, rejection_sampling=RejectionSampling.BLOCK, draft_sampling=DraftSampling.PROBABILISTIC
    )
    config = config_of(speculation)
    assert (config["rejection_sample_method"], config["draft_sample_method"]) == ("block", "probabilistic")
    assert speculation_problems(replace(PLAIN, speculation=speculation), PROFILE_METHODS) == []
    assert not {"rejection_sample_method", "draft_sample_method"} & set(config_of(DRAFT_MODEL))


def test_fly_rejection_sampling_is_rendered_without_parameters() -> None:
    speculation = replace(DRAFT_MODEL, rejection_sampling=RejectionSampling.FLY, lossy=True)
    config = config_of(speculation)
    assert config["rejection_sample_method"] == "fly"
    assert [key for key in config if key.startswith("fly_")] == [], "vLLM's own parameters"
    assert speculation_problems(replace(PLAIN, speculation=speculation), find_profile("0.33")) == []


@pytest.mark.parametrize(
    ("version", "changes", "sentence"),
    [
        ("0.32", {}, 'set engine.version: "0.33" or later'),
        ("0.33", {"cpu": CPU}, "only on GPUs"),
        ("0.33", {"speculation": replace(DRAFT_MODEL, num_speculative_tokens=1)}, "2 or more"),
    ],
)
def test_fly_rejection_sampling_is_refused_if_unsupported(version: str, changes: dict[str, Any], sentence: str) -> None:
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
        "no draft that samples",
    ),
    ({"speculation": speculating(Method.DSPARK), "cpu": CPU}, "spec.speculation.method", "model runner V2"),
    ({"speculation": speculating(Method.NGRAM_GPU), "cpu": CPU}, "spec.speculation.method", "use method ngram"),
]


@pytest.mark.parametrize(("change", "field", "words"), REFUSED)
def test_incompatible_speculation_settings_are_refused(change: dict[str, Any], field: str, words: str) -> None:
    (problem,) = speculation_problems(replace(PLAIN, **change), PROFILE_METHODS)
    assert problem.field == field
    assert words in problem.message


@pytest.mark.parametrize("method", METHODS_WITH_LAYERS)
@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_other_draft_tensor_is_refused_only_for_draft_models_on_v1(method: Method, version: str) -> None:
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
def test_features_incompatible_with_speculation_are_refused(
    speculation: SpeculationSettings | None, extra: tuple[str, ...], change: dict[str, Any], field: str, words: str
) -> None:
    settings = replace(PLAIN, speculation=speculation, extra_args=extra, **change)
    (problem,) = combination_problems(settings, PROFILE_METHODS)
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
def test_watermark_that_drafted_tokens_lack_is_refused(name: str) -> None:
    speculation, extra, words = UNMARKED[name]
    (problem,) = combination_problems(replace(PLAIN, speculation=speculation, extra_args=extra), PROFILE_METHODS)
    assert problem.field.startswith("spec.engine.extraArgs[")
    assert words in problem.message
    # The key is a secret.
    assert not problem.value.strip("-abcdefghijklmnopqrstuvwxyz.")


def test_watermark_with_dflash_is_accepted_since_0_33() -> None:
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
def test_features_compatible_with_speculation_are_accepted(
    speculation: SpeculationSettings | None, extra: tuple[str, ...]
) -> None:
    # As many tokens in a step as adapters want for 256 requests and K = 5.
    settings = replace(PLAIN, speculation=speculation, extra_args=extra, max_num_batched_tokens=1536)
    assert combination_problems(settings, PROFILE_METHODS) == []


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
    line = command_line(settings, PROFILE_METHODS)
    start = line.index(words[0])
    assert line[start : start + len(words)] == words
    assert ("--distributed-executor-backend" in line) == (settings.tensor_parallel_size > 1)


IN_PARALLEL = [
    replace(speculating(method), num_speculative_tokens=4, drafts_in_parallel=True)
    for method in (Method.DRAFT_MODEL, Method.EAGLE3)
]


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
@pytest.mark.parametrize("speculation", IN_PARALLEL, ids=lambda each: each.method.value)
def test_parallel_draft_is_rendered_and_runs_on_v1(version: str, speculation: SpeculationSettings) -> None:
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
def test_parallel_draft_schedule_allows_only_zero_or_all_tokens(tokens: int, taken: bool) -> None:
    scheduled = replace(IN_PARALLEL[0], schedule=(ScheduleRange(1, 8, 4), ScheduleRange(9, 16, tokens)))
    found = speculation_problems(replace(PLAIN, speculation=scheduled), PROFILE_METHODS)
    assert [problem.field for problem in found] == (
        [] if taken else ["spec.speculation.numSpeculativeTokensByBatchSize[1].numSpeculativeTokens"]
    )


def test_parallel_draft_model_needs_the_tensor_size_of_its_target() -> None:
    asked = replace(IN_PARALLEL[0], draft_tensor_parallel_size=1)
    (problem,) = speculation_problems(replace(PLAIN, speculation=asked), PROFILE_METHODS)
    assert (problem.field, problem.value) == ("spec.parallelism.draftTensor", "1")


MAPPED = replace(DRAFT_MODEL, maps_vocabulary=True)


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_heterogeneous_vocabulary_runs_on_v1_or_is_refused(version: str) -> None:
    profile = find_profile(version)
    assert config_of(MAPPED)["use_heterogeneous_vocab"] is True
    assert "use_heterogeneous_vocab" not in config_of(DRAFT_MODEL)
    settings = replace(PLAIN, speculation=MAPPED)
    assert runs_on_v1(settings, profile)
    fields = [problem.field for problem in speculation_problems(settings, profile)]
    # vLLM 0.31 takes it to model runner V2, which maps nothing.
    assert fields == (["spec.speculation.useHeterogeneousVocab"] if version == "0.31" else [])
    assert speculation_problems(replace(settings, cpu=CPU), profile) == []


def test_heterogeneous_vocabulary_with_draft_sampling_is_refused() -> None:
    sampled = replace(MAPPED, draft_sampling=DraftSampling.PROBABILISTIC)
    (problem,) = speculation_problems(replace(PLAIN, speculation=sampled), PROFILE_METHODS)
    assert problem.field == "spec.speculation.draftSampling"


@pytest.mark.parametrize("method", [Method.EAGLE, Method.MTP])
def test_draft_lm_head_quantization_needs_gpu_0_33_and_16_bits(method: Method) -> None:
    speculation = speculating(method, draft_lm_head_quantization=DraftHeadQuantization.FP8)
    assert config_of(speculation)["draft_lm_head_quantization"] == "fp8"
    settings = replace(PLAIN, speculation=speculation)
    assert speculation_problems(settings, find_profile("0.33")) == []
    wide = replace(settings, dtype=Dtype.FLOAT32)
    for asked, version in ((settings, "0.32"), (replace(settings, cpu=CPU), "0.33"), (wide, "0.33")):
        (problem,) = speculation_problems(asked, find_profile(version))
        assert (problem.field, problem.value) == ("spec.speculation.draftLmHeadQuantization", "fp8")


def test_xpress_top_c_is_rendered_and_needs_0_33() -> None:
    speculation = speculating(Method.DFLASH, xpress_top_c=0)
    assert config_of(speculation)["xpress_topc"] == 0
    assert "xpress_topc" not in config_of(speculating(Method.DFLASH))
    settings = replace(PLAIN, speculation=speculation)
    assert speculation_problems(settings, find_profile("0.33")) == []
    (problem,) = speculation_problems(settings, find_profile("0.32"))
    assert (problem.field, problem.value) == ("spec.speculation.xpressTopC", "0")


# Verifying only as many drafted tokens as pay: what the engine is told, and what is refused before it starts.

NEWEST = find_profile(KNOWN_VERSIONS[-1])
FIELD = "spec.speculation.adaptiveVerification"


def adapting(method: Method = Method.EAGLE3, **changes: Any) -> EngineSettings:
    draft = "/models/draft" if method in METHODS_WITH_DRAFT else None
    speculation = speculating_with(method, 4, draft_model=draft, adaptive_verification=True)
    return replace(PLAIN, speculation=speculation, **changes)


def said(settings: EngineSettings, profile: EngineProfile = NEWEST) -> str:
    return "\n".join(each.message for each in speculation_problems(settings, profile) if each.field == FIELD)


@pytest.mark.parametrize("wanted", [None, True, False])
def test_adaptive_verification_is_rendered_as_written(wanted: bool | None) -> None:
    settings = adapting()
    assert settings.speculation is not None
    told = replace(settings, speculation=replace(settings.speculation, adaptive_verification=wanted))
    config = json.loads(speculative_config(told, NEWEST) or "{}")
    assert config.get("enable_adaptive_verification") is wanted


@pytest.mark.parametrize(
    ("version", "methods"),
    [
        ("0.28", {"dspark"}),
        ("0.29", {"dspark"}),
        ("0.30", {"dspark", "eagle", "eagle3", "mtp", "dflash"}),
        ("0.31", set(METHODS_WITH_SAMPLING)),
        (NEWEST.version, set(METHODS_WITH_SAMPLING)),
    ],
)
def test_adaptive_verification_methods_per_version(version: str, methods: set[str]) -> None:
    profile = find_profile(version)
    assert {method for method in profile.runners if not said(adapting(method), profile)} == methods


def test_adaptive_verification_refusal_names_a_later_version() -> None:
    assert said(adapting(Method.EAGLE3), find_profile("0.29")) == (
        'vLLM 0.29 adapts only with dspark, not with eagle3; remove it, or set engine.version: "0.30" or later'
    )
    assert said(adapting(Method.DRAFT_MODEL), find_profile("0.30")).endswith('or set engine.version: "0.31" or later')
    assert "no draft with a confidence" in said(adapting(Method.NGRAM))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cpu": CPU}, "which the CPU does not have"),
        ({"target_on_v1": True}, "V1 serves method eagle3 here"),
        ({"pipeline_parallel_size": 2}, "parallelism.pipeline 2"),
        ({"enforce_eager": True}, "which serving.enforceEager turns off"),
        ({"cudagraph_mode": CudagraphMode.NONE}, "which serving.cudagraphMode NONE turns off"),
        ({"cudagraph_mode": CudagraphMode.PIECEWISE}, "which serving.cudagraphMode PIECEWISE turns off"),
        ({"extra_args": ("-O0",)}, "which engine.extraArgs -O0 turns off"),
        ({"extra_args": ("--optimization-level", "1")}, "which engine.extraArgs -O1 turns off"),
        ({"extra_args": ("--enable-lora",)}, "engine.extraArgs --enable-lora"),
        ({"extra_args": ("--return-sampling-mask",)}, "engine.extraArgs --return-sampling-mask"),
    ],
)
def test_setting_that_excludes_adaptive_verification_is_named(changes: dict[str, Any], words: str) -> None:
    assert words in said(adapting(**changes))
    assert "\n" not in said(adapting(**changes)), "told once"
    settings = adapting(**changes)
    assert settings.speculation is not None
    without = replace(settings, speculation=replace(settings.speculation, adaptive_verification=False))
    assert said(without) == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"cudagraph_mode": CudagraphMode.FULL_DECODE_ONLY},
        {"cudagraph_mode": CudagraphMode.FULL, "extra_args": ("-O1",)},
        {"extra_args": ("-O2",)},
        {"extra_args": ("--enable-lora", "--no-enable-lora")},
    ],
)
def test_full_cuda_graph_settings_allow_adaptive_verification(changes: dict[str, Any]) -> None:
    assert said(adapting(**changes)) == ""


def test_routed_experts_flag_excludes_adaptive_verification_since_0_31() -> None:
    routed = adapting(Method.DSPARK, extra_args=("--enable-return-routed-experts",))
    assert said(routed, find_profile("0.30")) == ""
    assert "--enable-return-routed-experts" in said(routed, find_profile("0.31"))
