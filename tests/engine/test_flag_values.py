"""The real vLLM rejects what each row of `flag_checks.json` stands for, in its words, and takes the value beside it."""

from specdecode_operator.deployment.rollout.engine_errors import find_error
from specdecode_operator.enums import CudagraphMode, Method, OnlineQuantization
from specdecode_operator.vllm.arguments import command_line
from specdecode_operator.vllm.flag_values import FLAG_CHECKS, flag_value_problems
from specdecode_operator.vllm.settings import CpuSettings, EngineSettings
from specdecode_operator.vllm.versions import release
from tests.engine.contract_cases import (
    ANOTHER_VOCABULARY,
    CPU,
    GPU,
    IN_PARALLEL,
    METHODS,
    with_models_under,
)
from tests.engine.contract_checks import Vllm
from tests.engine.differences import assert_none
from tests.engine.refusal_cases import adapting
from tests.support import flag_value_cases as cases
from tests.support.engine_settings import replace
from tests.support.flag_value_cases import CASES, settings

EXPERTS = replace(GPU, model="own-layers", tensor_parallel_size=2, expert_parallel=True)
BASES = {
    cases.PLAIN: GPU,
    cases.STAGES: replace(GPU, tensor_parallel_size=2, pipeline_parallel_size=2),
    cases.EXPERTS: EXPERTS,
    cases.EXPERT_STAGES: replace(EXPERTS, pipeline_parallel_size=2),
    cases.ON_V1: IN_PARALLEL["gpu-parallel"],
    cases.ON_CPU: CPU,
    cases.EXPERTS_ON_CPU: replace(EXPERTS, cpu=CpuSettings(kv_cache_gib=2, cores=2), block_size=CPU.block_size),
    cases.FP8: replace(GPU, online_quantization=OnlineQuantization.FP8),
    cases.FLOAT16: replace(GPU, dtype="float16"),
    cases.FULL_GRAPHS: replace(GPU, cudagraph_mode=CudagraphMode.FULL),
    cases.COPIES: replace(EXPERTS, data_parallel_size=4),
    cases.EAGLE3: METHODS[Method.EAGLE3],
    cases.ADAPTING: adapting(Method.EAGLE3),
    cases.MAPPED: ANOTHER_VOCABULARY["gpu"],
    cases.MTP: METHODS[Method.MTP],
    cases.EAGER: replace(GPU, enforce_eager=True),
}


def error_of(vllm: Vllm, asked: EngineSettings, environment: dict[str, str]) -> str | None:
    """Return how vLLM's configuration fails."""
    line = command_line(with_models_under(vllm.models, asked), vllm.profile)[2:]
    return vllm.oracle(asked).ask("start", line, environment).error


def test_vllm_rejects_each_flag_check_with_the_listed_message(vllm: Vllm) -> None:
    departures, asked = [], 0
    for check in FLAG_CHECKS:
        case = CASES[f"{check.source} {check.name}"]
        bad = settings(BASES[case.base], case.bad)
        told = flag_value_problems(bad, vllm.profile, case.env)
        if not case.asked or check.fix not in [problem.message for problem in told]:
            continue
        asked += 1
        error = error_of(vllm, bad, dict(case.env)) or ""
        words = check.words or check.name.rpartition(".")[2]
        found = find_error(f"ValueError: {error}")
        if words not in error:
            departures.append(f"{check.source} {check.name}: {error or 'taken'}")
        elif found is None or (check.words and check.fix not in found[0].fix):
            departures.append(f"{check.source} {check.name}: not explained: {error}")
        if release(vllm.profile.version) < release(check.since):
            departures.append(f"{check.source} {check.name}: too early")
    assert asked
    assert_none(departures)


def test_vllm_accepts_the_valid_value_beside_each_flag_check(vllm: Vllm) -> None:
    departures = {}
    for name, case in CASES.items():
        good = settings(BASES[case.good_base or case.base], case.good)
        flags = {argument.partition("=")[0].partition(".")[0] for argument in good.extra_args}
        if case.asked and not flags & set(vllm.profile.later_flags):
            departures[name] = error_of(vllm, good, {}) or ""
    assert_none(f"{name}: {what}" for name, what in departures.items() if what)
