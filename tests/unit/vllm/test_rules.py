"""What the engine would refuse or break, told before it starts."""

import dataclasses
from typing import Any

import pytest

from specdecode_operator.api.speculation import Draft, Ngram
from specdecode_operator.enums import CudagraphMode, Dtype, Method, Platform
from specdecode_operator.problems import Problem
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, find_profile
from specdecode_operator.vllm.serving_rules import combination_problems, image_problems, serving_problems
from specdecode_operator.vllm.settings import EngineSettings, ScheduleRange, SpeculationSettings
from specdecode_operator.vllm.speculation_rules import speculation_problems
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
def test_good_speculation_has_no_problem(speculation: SpeculationSettings | None) -> None:
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
    (DRAFT_MODEL, {"ngram": Ngram(prompt_lookup_min=5)}, f"{SPECULATION}.ngram", "5 to None", "looks nothing up"),
    (NGRAM, schedule((1, 8, 5)), f"{SCHEDULE}[0].numSpeculativeTokens", "5", "above numSpeculativeTokens, 4"),
    (NGRAM, schedule((1, 8, -1)), f"{SCHEDULE}[0]", "1 to 8", "not be negative"),
    (NGRAM, schedule((8, 1, 1)), f"{SCHEDULE}[0]", "8 to 1", "not above to"),
    (NGRAM, schedule((0, 1, 1)), f"{SCHEDULE}[0]", "0 to 1", "at least 1"),
    (NGRAM, schedule((1, 8, 1), (8, 9, 0)), f"{SCHEDULE}[1].from", "8", "after the range before it, 1 to 8"),
    (NGRAM, schedule((9, 12, 1), (1, 8, 0)), f"{SCHEDULE}[1].from", "1", "sorted"),
    (NGRAM, {"method": Method.NONE}, f"{SPECULATION}.method", "none", "draft_model, dspark"),
]


@pytest.mark.parametrize(("speculation", "change", "field", "value", "fix"), BAD_SPECULATION)
def test_bad_speculation_names_field_value_and_fix(
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
def test_draft_path_that_flips_the_method_is_refused(path: str, method: str) -> None:
    settings = replace(PLAIN, speculation=replace(DRAFT_MODEL, draft_model=path))
    (problem,) = speculation_problems(settings, PROFILE)
    assert (problem.field, problem.value) == (f"{SPECULATION}.draft.model", path)
    assert f"into {method} " in problem.message
    assert "folder" in problem.message


@pytest.mark.parametrize("path", ["/models/eagle/llama", "/models/beagle_1b", "meta-llama/Llama-3.1-8B"])
def test_harmless_draft_path_passes(path: str) -> None:
    settings = replace(PLAIN, speculation=replace(DRAFT_MODEL, draft_model=path))
    assert speculation_problems(settings, PROFILE) == []


@pytest.mark.parametrize(("speculation", "needed"), [(DRAFT_MODEL, 7), (NGRAM, 5)])
def test_a_step_must_hold_one_whole_verification(speculation: SpeculationSettings, needed: int) -> None:
    settings = replace(PLAIN, speculation=speculation, max_num_seqs=1, max_num_batched_tokens=needed)
    assert speculation_problems(settings, PROFILE) == []
    (problem,) = speculation_problems(replace(settings, max_num_batched_tokens=needed - 1), PROFILE)
    assert problem.field == "spec.serving.maxNumBatchedTokens"
    assert f"at least {needed} " in problem.message


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
@pytest.mark.parametrize("line", ["--async-scheduling", "--async-sched", "--async_scheduling", "--seed=1 --async-s"])
def test_lookup_on_the_host_cannot_be_scheduled_asynchronously(line: str, version: str) -> None:
    settings = replace(PLAIN, speculation=NGRAM, extra_args=tuple(line.split()))
    problems = speculation_problems(settings, find_profile(version))
    if release(version) >= (0, 33):  # which looks up on the GPU, and runs ahead
        assert problems == []
        return
    (problem,) = problems
    assert problem.field == f"spec.engine.extraArgs[{len(line.split()) - 1}]"
    assert problem.value == "--async-scheduling"
    assert "method ngram" in problem.message


def test_on_model_runner_v1_it_never_can() -> None:
    settings = replace(PLAIN, cpu=CPU, speculation=NGRAM, extra_args=("--async-scheduling",))
    (problem,) = speculation_problems(settings, PROFILE)
    assert problem.field == "spec.engine.extraArgs[0]"


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
@pytest.mark.parametrize("stages", [1, 2])
def test_from_0_31_on_model_runner_v1_is_not_ahead_of_stages(version: str, stages: int) -> None:
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
def test_drafts_that_cannot_be_shortened_take_no_schedule_where_model_runner_v1_serves(version: str) -> None:
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
def test_other_schedules_pass(speculation: SpeculationSettings | None, line: str) -> None:
    settings = replace(PLAIN, speculation=speculation, extra_args=tuple(line.split()))
    assert speculation_problems(settings, PROFILE) == []


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
@pytest.mark.parametrize("method", [Method.EAGLE, Method.MEDUSA, Method.MTP])
def test_a_head_goes_with_stages_from_0_30_on(method: Method, version: str) -> None:
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
def test_bad_serving_names_field_value_and_fix(settings: EngineSettings, field: str, value: str, fix: str) -> None:
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
def test_good_serving_has_no_problem(settings: EngineSettings) -> None:
    assert serving_problems(settings, PROFILE) == []


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
@pytest.mark.parametrize("mode", CudagraphMode)
def test_runner_v1_captures_no_whole_steps_whose_length_changes(mode: CudagraphMode, version: str) -> None:
    profile = find_profile(version)
    scheduled = replace(DRAFT_MODEL, schedule=(ScheduleRange(1, 8, 2),))
    problems = serving_problems(replace(PLAIN, cudagraph_mode=mode, speculation=scheduled), profile)
    refused = mode.startswith("FULL") and profile.runners[Method.DRAFT_MODEL] == "V1"
    assert [(problem.field, problem.value) for problem in problems] == [(MODE, mode.value)] * refused
    assert all("write PIECEWISE" in problem.message for problem in problems)


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_from_0_33_on_a_cache_in_bfloat16_wants_a_model_in_it(version: str, dtype: Dtype) -> None:
    settings = replace(PLAIN, dtype=dtype, kv_cache_dtype="bfloat16")
    problems = serving_problems(settings, find_profile(version))
    refused = release(version) >= (0, 33) and dtype in (Dtype.FLOAT16, Dtype.FLOAT32)
    assert [(problem.field, problem.value) for problem in problems] == [
        ("spec.serving.kvCacheDtype", "bfloat16")
    ] * refused
    assert all(dtype in problem.message and "write auto" in problem.message for problem in problems)
    assert serving_problems(replace(settings, kv_cache_dtype="fp8"), find_profile(version)) == []


def test_an_image_is_asked_for_where_none_is_known() -> None:
    assert image_problems(None, Platform.GPU, PROFILE) == []
    assert image_problems("registry.local/vllm:1", Platform.CPU, PROFILE) == []
    assert image_problems("registry.local/vllm:1", Platform.GPU, find_profile("0.99")) == []
    for platform, profile in ((Platform.CPU, PROFILE), (Platform.GPU, find_profile("0.99"))):
        (problem,) = image_problems(None, platform, profile)
        assert problem.field == "spec.engine.image"
        assert f"no {platform.upper()} image of vLLM {profile.version}" in problem.message
        assert (f"or write spec.engine.version: {KNOWN_VERSIONS[-1]}" in problem.message) == (profile.version == "0.99")


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
    "no text": (replace(PLAIN, extra_args=("--runner=pooling",)), ARG, "turns generation off"),
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
def test_arguments_that_go_with_the_spec_pass(settings: EngineSettings) -> None:
    assert serving_problems(settings, PROFILE) == []


@pytest.mark.parametrize(
    "line",
    [
        "--override-generation-config.min_p=0",
        '--override-generation-config={"min_p":0.0}',
        f"--override-generation-config={'[' * 4000}",
    ],
)
def test_a_min_p_of_nothing_is_none(line: str) -> None:
    assert combination_problems(replace(PLAIN, speculation=NGRAM, extra_args=(line,)), PROFILE) == []


@pytest.mark.parametrize(
    "line",
    [
        "--override-generation-config.min_p=0.1 --override-generation-config.temperature=0.5",
        "--override-generation-config.temperature=0.5 --override-generation-config.min_p 0.1",
        '--override-generation-config={"min_p":0.1}',
    ],
)
def test_min_p_is_found_wherever_it_is_given(line: str) -> None:
    settings = replace(PLAIN, speculation=NGRAM, extra_args=tuple(line.split()))
    (problem,) = combination_problems(settings, PROFILE)
    assert "min_p" in problem.message


@pytest.mark.parametrize(
    ("later", "fix"), [({"--block-size": "0.33"}, "remove it, or set engine.version 0.33 or later"), ({}, "remove it")]
)
def test_a_field_whose_flag_the_version_lacks_is_refused(later: dict[str, str], fix: str) -> None:
    flags = {name: flag for name, flag in PROFILE.flags.items() if name not in ("--block-size", "--enforce-eager")}
    profile = dataclasses.replace(PROFILE, flags=flags, later_flags=later)
    assert [str(problem) for problem in serving_problems(PLAIN, profile)] == [
        f"spec.serving.blockSize: 16: vLLM {PROFILE.version} does not have it; {fix}"
    ]
    eager = serving_problems(replace(PLAIN, enforce_eager=True), profile)
    assert ("spec.serving.enforceEager", "true") in [(problem.field, problem.value) for problem in eager]


def test_a_field_whose_key_the_version_lacks_is_refused() -> None:
    settings = replace(PLAIN, speculation=replace(DRAFT_MODEL, xpress_top_c=0))
    assert [str(problem) for problem in speculation_problems(settings, find_profile("0.32"))] == [
        "spec.speculation.xpressTopC: 0: vLLM 0.32 does not have it; remove it, or set engine.version 0.33 or later"
    ]
