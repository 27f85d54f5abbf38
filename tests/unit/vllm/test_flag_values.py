"""Values of flags, variables and extraConfig that vLLM rejects, told before it starts."""

import json

import pytest

from specdecode_operator.enums import CudagraphMode, Dtype, Method, OnlineQuantization
from specdecode_operator.problems import Problem
from specdecode_operator.vllm.flag_values import FLAG_CHECKS, FlagCheck, flag_value_problems
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, find_profile
from tests.support import flag_value_cases as cases
from tests.support.engine_settings import replace, speculating_with
from tests.support.flag_value_cases import CASES, Case, settings
from tests.unit.vllm.engine_cases import CPU, DRAFT_MODEL, PLAIN

NEWEST = find_profile(KNOWN_VERSIONS[-1])
EAGLE3 = speculating_with(Method.EAGLE3, 4, draft_model="/models/head", draft_is_head=True)
ONE_PASS = replace(DRAFT_MODEL, drafts_in_parallel=True)
BASES = {
    cases.PLAIN: PLAIN,
    cases.STAGES: replace(PLAIN, pipeline_parallel_size=2),
    cases.EXPERTS: replace(PLAIN, expert_parallel=True),
    cases.EXPERT_STAGES: replace(PLAIN, expert_parallel=True, pipeline_parallel_size=2),
    cases.ON_V1: replace(PLAIN, speculation=ONE_PASS),
    cases.ON_CPU: replace(PLAIN, cpu=CPU),
    cases.EXPERTS_ON_CPU: replace(PLAIN, cpu=CPU, expert_parallel=True),
    cases.FP8: replace(PLAIN, online_quantization=OnlineQuantization.FP8),
    cases.FLOAT16: replace(PLAIN, dtype=Dtype.FLOAT16),
    cases.FULL_GRAPHS: replace(PLAIN, cudagraph_mode=CudagraphMode.FULL),
    cases.COPIES: replace(PLAIN, expert_parallel=True, data_parallel_size=4),
    cases.EAGLE3: replace(PLAIN, speculation=EAGLE3),
    cases.ADAPTING: replace(PLAIN, speculation=replace(EAGLE3, adaptive_verification=True)),
    cases.MAPPED: replace(PLAIN, speculation=replace(DRAFT_MODEL, maps_vocabulary=True)),
    cases.MTP: replace(PLAIN, speculation=speculating_with(Method.MTP, 1)),
    cases.EAGER: replace(PLAIN, enforce_eager=True),
}


def key(check: FlagCheck) -> str:
    """Return the name of the case of a row."""
    return f"{check.source} {check.name}"


def problems_of(case: Case, version: str) -> list[Problem]:
    """Return what is said of the bad settings of a case."""
    return flag_value_problems(settings(BASES[case.base], case.bad), find_profile(version), case.env)


@pytest.mark.parametrize("check", FLAG_CHECKS, ids=key)
def test_flag_check_names_field_value_and_fix_since_its_version(check: FlagCheck) -> None:
    case = CASES[key(check)]
    for version in KNOWN_VERSIONS[KNOWN_VERSIONS.index(check.since) :]:
        told = problems_of(case, version)
        said = [problem for problem in told if problem.message == check.fix]
        if version != KNOWN_VERSIONS[-1] and not said:
            # An older version serves it on model runner V1, which is rejected first.
            assert [problem.value for problem in told] == [check.name], version
            continue
        assert len(said) == 1, version
        if check.name.startswith("speculation."):
            assert said[0].field == f"spec.speculation.extraConfig.{check.name.removeprefix('speculation.')}"
        elif check.name.startswith("env."):
            assert said[0].field == "spec.engine.env[0].value"
        else:
            assert said[0].field.startswith("spec.engine.extraArgs[")
    for version in KNOWN_VERSIONS[: KNOWN_VERSIONS.index(check.since)]:
        assert check.fix not in [problem.message for problem in problems_of(case, version)], version


@pytest.mark.parametrize("check", FLAG_CHECKS, ids=key)
def test_valid_value_of_each_flag_check_is_accepted(check: FlagCheck) -> None:
    case = CASES[key(check)]
    assert flag_value_problems(settings(BASES[case.good_base or case.base], case.good), NEWEST) == []


def test_flag_check_applies_since_the_version_of_its_flag() -> None:
    case = CASES["config/model.py:1551 --enable-hc-sp"]
    assert [problem.value for problem in problems_of(case, "0.32")] == ["--enable-hc-sp"]


def test_flag_checks_and_test_cases_match() -> None:
    assert {key(check) for check in FLAG_CHECKS} == set(CASES)
    assert len({key(check) for check in FLAG_CHECKS}) == len(FLAG_CHECKS)


def said_of(*arguments: str) -> list[tuple[str, str]]:
    """Return field and value of what is said of further arguments."""
    found = flag_value_problems(replace(PLAIN, extra_args=arguments), NEWEST)
    return [(problem.field, problem.value) for problem in found]


def test_value_is_checked_in_every_flag_spelling() -> None:
    whole = ("--seed", "1", "--kv_transfer_config", '{"kv_connector": "OffloadingConnector"}')
    assert said_of(*whole) == [("spec.engine.extraArgs[2]", "--kv-transfer-config.kv_connector")]
    assert said_of("-cc.mode=FAST") == [("spec.engine.extraArgs[0]", "--compilation-config.mode")]
    assert said_of("--mamba-back", "Cuda") == [("spec.engine.extraArgs[0]", "--mamba-back")]


def test_one_microbatch_needs_no_dbo_threshold() -> None:
    small = ("--dbo-decode-token-threshold", "0", "--ubatch-size")
    assert said_of(*small, "1") == []
    assert said_of(*small, "2") == [("spec.engine.extraArgs", "--enable-dbo")]


def test_offload_prefetch_step_is_checked_for_groups_of_one_layer() -> None:
    step = ("--offload-prefetch-step", "0", "--offload-group-size")
    assert said_of(*step, "0") == []
    assert said_of(*step, "1") == [("spec.engine.extraArgs[0]", "--offload-prefetch-step")]


def test_enable_hc_sp_is_checked_only_with_tensor_parallelism() -> None:
    asked = replace(PLAIN, pipeline_parallel_size=2, extra_args=("--enable-hc-sp",))
    assert [each.value for each in flag_value_problems(asked, NEWEST)] == ["--enable-hc-sp"]
    assert flag_value_problems(replace(asked, tensor_parallel_size=1), NEWEST) == []


@pytest.mark.parametrize("operation", ["", "+", "-", "rms_norm"])
def test_custom_op_needs_a_sign_and_a_name(operation: str) -> None:
    line = ("--compilation-config", json.dumps({"custom_ops": ["none", operation]}))
    assert said_of(*line) == [("spec.engine.extraArgs[0]", "--compilation-config.custom_ops")]


def test_last_of_several_flag_values_is_checked() -> None:
    bad, good = ("--scheduling-policy", "lifo"), ("--scheduling-policy", "fcfs")
    assert said_of(*good, *bad) == [("spec.engine.extraArgs[2]", "--scheduling-policy")]
    assert said_of(*bad, *good) == []
    bad, good = ("--compilation-config", '{"mode": "FAST"}'), ("--compilation-config", '{"backend": "eager"}')
    assert said_of(*good, *bad) == [("spec.engine.extraArgs[2]", "--compilation-config.mode")]
    assert said_of(*bad, *good) == []


def test_flag_has_one_problem_at_a_time() -> None:
    line = ("--enable-return-routed-experts", "--no-enable-prefix-caching")
    staged = replace(BASES[cases.STAGES], extra_args=line)
    (problem,) = flag_value_problems(staged, NEWEST)
    assert problem.field == "spec.engine.extraArgs[0]"
    assert "prefix caching" in problem.message
    (problem,) = flag_value_problems(replace(staged, extra_args=line[:1]), NEWEST)
    assert "spec.parallelism.pipeline" in problem.message


def test_connector_inside_a_multi_connector_is_checked() -> None:
    inner = '{"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": '
    line = ("--enable-return-routed-experts", "--kv-transfer-config", inner + '[{"kv_connector": "NixlConnector"}]}}')
    assert said_of(*line) == [("spec.engine.extraArgs[0]", "--enable-return-routed-experts")]
    odd = ("--enable-return-routed-experts", "--kv-transfer-config", inner + "[1, {}]}}")
    assert said_of(*odd) == []
    other = (*line[:2], line[2].replace("MultiConnector", "OffloadingConnector"))
    assert said_of(*other) == [], "no other connector reads the key"


def test_absent_flags_use_the_vllm_defaults() -> None:
    assert said_of("--offload-backend", "prefetch") == [("spec.engine.extraArgs", "--offload-num-in-group")]
    small = ("--dbo-decode-token-threshold", "3", "--ubatch-size")
    assert said_of(*small, "3") == []
    assert said_of(*small, "4") == [("spec.engine.extraArgs", "--enable-dbo")]


@pytest.mark.parametrize(
    "line",
    [
        # Two spellings, of which vLLM keeps one.
        "-cc.mode=FAST --compilation-config.backend=eager",
        '--compilation-config.mode=FAST --compilation-config {"backend":"eager"}',
        # Types that pydantic may convert or refuse.
        "--compilation-config.mode=2",
        "--compilation-config.custom_ops=3",
        "--eplb-config.num_redundant_experts=true",
        "--eplb-config.log_balancedness_interval=many",
        "--dbo-decode-token-threshold x --enable-dbo",
        "--compilation-config",
    ],
)
def test_ambiguous_values_are_not_checked(line: str) -> None:
    assert said_of(*line.split()) == []


@pytest.mark.parametrize("allowed", ["--enable-sleep-mode", "--enable-cumem-allocator"])
def test_expandable_segments_are_accepted_with_a_fixed_allocator(allowed: str) -> None:
    case = CASES["config/vllm.py:1291 env.PYTORCH_CUDA_ALLOC_CONF"]
    asked = settings(BASES[case.base], f"{case.bad} {allowed}")
    assert flag_value_problems(asked, NEWEST, case.env) == []
    assert flag_value_problems(asked, NEWEST, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}) == []


@pytest.mark.parametrize(
    "line",
    [
        '--kv-transfer-config {"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_role":"kv_both"}',
        '--kv-transfer-config {"kv_role":"kv_both","kv_connector_extra_config":{"a":1e400}}',
        "--kv-transfer-config None",
        "--moe-backend flashinfer_moe_ep_cutedsl --all2all-backend naive",
        "--moe-backend flashinfer_moe_ep_cutedsl --all2all-backend pplx",
    ],
)
def test_values_accepted_by_vllm_0_33_have_no_problem(line: str) -> None:
    """The real vLLM 0.33 built its configuration from each of these."""
    assert flag_value_problems(settings(BASES[cases.EXPERTS], line), NEWEST) == []
