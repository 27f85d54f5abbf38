"""What the engine would refuse or break, told before it starts."""

from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.api.values import Method
from specdecode_operator.engine.profiles import KNOWN_VERSIONS, find_profile
from specdecode_operator.engine.serving_rules import image_problems, serving_problems
from specdecode_operator.engine.settings import EngineSettings, Platform, ScheduleRange, SpeculationSettings
from specdecode_operator.engine.speculation_rules import speculation_problems, vocabulary_problems
from tests.unit.engine.engine_cases import CPU, DRAFT_MODEL, NGRAM, PLAIN, SCHEDULED

PROFILE = find_profile("0.32")
SPECULATION = "spec.speculation"
SCHEDULE = "spec.speculation.numSpeculativeTokensByBatchSize"


@pytest.mark.parametrize("speculation", [None, DRAFT_MODEL, NGRAM, SCHEDULED, replace(NGRAM, prompt_lookup_max=None)])
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
    (DRAFT_MODEL, {"draft_max_model_len": 8193}, f"{SPECULATION}.draft.maxModelLen", "8193", "8192"),
    (NGRAM, {"prompt_lookup_min": 5}, f"{SPECULATION}.ngram.promptLookupMin", "5", "promptLookupMax, 4"),
    (DRAFT_MODEL, {"prompt_lookup_min": 5}, f"{SPECULATION}.ngram", "5 to None", "looks nothing up"),
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
    assert "rename" in problem.message


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
    (problem,) = speculation_problems(settings, find_profile(version))
    assert problem.field == f"spec.engine.extraArgs[{len(line.split()) - 1}]"
    assert problem.value == "--async-scheduling"
    assert "method ngram" in problem.message


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
    settings = replace(PLAIN, pipeline_parallel_size=2, speculation=SpeculationSettings(method, 3, draft_model=head))
    problems = speculation_problems(settings, find_profile(version))
    assert [problem.field for problem in problems] == ["spec.parallelism.pipeline"] * (version in {"0.28", "0.29"})


def test_vocabularies_must_be_equal() -> None:
    assert vocabulary_problems(128256, 128256) == []
    (problem,) = vocabulary_problems(128256, 32000)
    assert problem.field == f"{SPECULATION}.draft.model"
    assert "32000" in problem.value
    assert "128256" in problem.message


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
        replace(PLAIN, speculation=DRAFT_MODEL, max_cudagraph_capture_size=5),
        "spec.serving.maxCudagraphCaptureSize",
        "5",
        "at least 6",
    ),
    (replace(PLAIN, model="--middleware=x"), "spec.target.model", "--middleware=x", "dash"),
    (replace(PLAIN, served_model_names=("a", "-b")), "spec.serving.servedModelNames[1]", "-b", "dash"),
]


@pytest.mark.parametrize(("settings", "field", "value", "fix"), BAD_SERVING)
def test_bad_serving_names_field_value_and_fix(settings: EngineSettings, field: str, value: str, fix: str) -> None:
    (problem,) = serving_problems(settings, PROFILE)
    assert (problem.field, problem.value) == (field, value)
    assert fix in problem.message


@pytest.mark.parametrize("settings", [PLAIN, replace(PLAIN, cpu=CPU, block_size=128)], ids=["gpu", "cpu"])
def test_good_serving_has_no_problem(settings: EngineSettings) -> None:
    assert serving_problems(settings, PROFILE) == []


def test_an_image_is_asked_for_where_none_is_known() -> None:
    assert image_problems(None, Platform.GPU, PROFILE) == []
    assert image_problems("registry.local/vllm:1", Platform.CPU, PROFILE) == []
    assert image_problems("registry.local/vllm:1", Platform.GPU, find_profile("0.99")) == []
    for platform, profile in ((Platform.CPU, PROFILE), (Platform.GPU, find_profile("0.99"))):
        (problem,) = image_problems(None, platform, profile)
        assert problem.field == "spec.engine.image"
        assert f"no {platform.upper()} image of vLLM {profile.version}" in problem.message
