"""What we say about vLLM, against the real vLLM of every version: parser, configuration, scheduler, metrics.

The newest version is always asked; the older ones in `./just test-all`, where
`./just engine-versions` has installed them. Each answers twice: as one on
H100s, and as the CPU build that it is (see engine_oracle.py).
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode_operator.api.deployment import KIND, SpecDecodeDeploymentSpec
from specdecode_operator.deployment.engine_settings import engine_settings
from specdecode_operator.deployment.validation import valid_facts
from specdecode_operator.enums import METHODS_WITH_SAMPLING, CudagraphMode, Method, Platform
from specdecode_operator.sizing.families.architectures import READERS
from specdecode_operator.sizing.families.draft_heads import DRAFT_CLASSES
from specdecode_operator.sizing.version_rules import ModelTraits, find_version_rules
from specdecode_operator.vllm.engine_metrics import SpeculationReading, read_metrics
from specdecode_operator.vllm.environment import environment
from specdecode_operator.vllm.extra_args_rules import extra_args_problems
from specdecode_operator.vllm.model_runner import runs_on_v1
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS
from specdecode_operator.vllm.serving_rules import serving_problems
from specdecode_operator.vllm.settings import ScheduleRange
from specdecode_operator.vllm.speculation_rules import speculation_problems
from specdecode_operator.vllm.speculative_config import XPRESS_KEY, complete_schedule
from specdecode_operator.vllm.versions import version_facts
from tests.engine.contract_cases import (
    ANOTHER_VOCABULARY,
    CPU,
    DRAFT_MODEL,
    EAGLE_PATH,
    FAILING_EXTRA,
    GOOD,
    GPU,
    IN_PARALLEL,
    LEADER_ADDRESS,
    MEETING_TIMEOUT_S,
    METHODS,
    NGRAM,
    ON_THE_EDGE,
    OTHER_VOCABULARY,
    PARALLEL,
    PASSING_EXTRA,
    SCHEDULED,
    SCHEDULES,
    SEVERAL_NODES,
    TARGET,
    on_node,
)
from tests.engine.contract_checks import Vllm, check_parsed, check_started, skip_without_package
from tests.engine.differences import assert_none
from tests.engine.engine_versions import VERSIONS
from tests.engine.refusal_cases import drafting
from tests.support.engine_settings import replace, speculating_with

EXAMPLES = [
    pytest.param(body, id=path.stem)
    for path in sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
    for body in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    if body["kind"] == KIND
]


def test_every_known_version_can_be_asked() -> None:
    assert VERSIONS == KNOWN_VERSIONS


def test_flag_table_matches_the_vllm_parser(vllm: Vllm) -> None:
    flags = {frozenset(flag.names): flag.values for flag in vllm.profile.flags.values()}
    dumped = {frozenset(row["names"]): row["values"] for row in vllm.cpu.ask("flags").value}
    assert flags == dumped, "renew it: .venv/bin/python -m tests.engine.flag_table"
    assert sorted(vllm.profile.speculative_keys) == vllm.cpu.ask("speculative_keys").value
    assert sorted(vllm.profile.variables) == vllm.cpu.ask("variables").value


@pytest.mark.parametrize("name", GOOD)
def test_vllm_parses_rendered_command_as_intended(vllm: Vllm, name: str) -> None:
    check_parsed(vllm, GOOD[name])
    check_started(vllm, GOOD[name])


def test_vllm_accepts_values_at_the_limits_of_our_rules(vllm: Vllm) -> None:
    refused = {}
    for name, settings in ON_THE_EDGE.items():
        if not set(settings.extra_args) & set(vllm.profile.later_flags):
            ours = serving_problems(settings, vllm.profile) + speculation_problems(settings, vllm.profile)
            refused[name] = [*ours, *filter(None, [vllm.start(settings).error])]
    assert_none(f"{name}: {said}" for name, said in refused.items() if said)


@pytest.mark.parametrize("mode", CudagraphMode)
def test_vllm_applies_every_cudagraph_mode_as_intended(vllm: Vllm, mode: CudagraphMode) -> None:
    settings = replace(GPU, cudagraph_mode=mode, extra_args=("--compilation-config.mode", "3"))
    assert serving_problems(settings, vllm.profile) == []
    check_parsed(vllm, settings)
    check_started(vllm, settings)


@pytest.mark.parametrize("extra", [("-cc.mode=3",), ("-cc", '{"mode": 3}')])
def test_other_spelling_of_compilation_config_is_refused(vllm: Vllm, extra: tuple[str, ...]) -> None:
    settings = replace(GPU, cudagraph_mode=CudagraphMode.NONE, extra_args=extra)
    assert serving_problems(settings, vllm.profile)
    answer = vllm.start(settings)
    kept = answer.ok and answer.value["cudagraph_mode"] == CudagraphMode.NONE
    # A whole JSON value under the same flag comes before the dotted key, and is lost itself.
    assert kept == (extra[0] == "-cc"), answer.error


@pytest.mark.parametrize("mode", CudagraphMode)
@pytest.mark.parametrize("extra", [("-O0",), ("--compilation-config.mode", "none"), ("-O", "0", "-O2")])
def test_cudagraph_mode_changed_without_compilation_is_refused_with_advice(
    vllm: Vllm, mode: CudagraphMode, extra: tuple[str, ...]
) -> None:
    settings = replace(GPU, cudagraph_mode=mode, extra_args=extra)
    answer = vllm.start(settings)
    assert answer.ok, answer.error
    changed = answer.value["cudagraph_mode"] != mode.value
    problems = serving_problems(settings, vllm.profile)
    assert changed == bool(problems)
    if changed:
        advised = next(each for each in CudagraphMode if f"write {each}," in problems[0].message)
        taken = vllm.start(replace(settings, cudagraph_mode=advised))
        assert taken.value["cudagraph_mode"] == advised != mode


@pytest.mark.parametrize("mode", CudagraphMode)
def test_scheduled_draft_lengths_get_the_expected_cudagraph_mode(vllm: Vllm, mode: CudagraphMode) -> None:
    scheduled = replace(DRAFT_MODEL, schedule=SCHEDULED.schedule)
    settings = replace(GPU, cudagraph_mode=mode, speculation=scheduled)
    answer = vllm.start(settings)
    assert answer.ok, answer.error
    changed = answer.value["cudagraph_mode"] != mode.value
    assert changed == bool(serving_problems(settings, vllm.profile))
    assert not changed or answer.value["cudagraph_mode"] == CudagraphMode.PIECEWISE


@pytest.mark.parametrize("method", METHODS)
def test_vllm_parses_command_of_every_method_as_intended(vllm: Vllm, method: Method) -> None:
    check_parsed(vllm, METHODS[method])
    if method in vllm.profile.ended_methods:
        assert speculation_problems(METHODS[method], vllm.profile)
        return
    skip_without_package(vllm, method)
    check_started(vllm, METHODS[method])


@pytest.mark.parametrize("name", IN_PARALLEL)
def test_vllm_parses_parallel_drafting_as_intended(vllm: Vllm, name: str) -> None:
    settings = IN_PARALLEL[name]
    if name == "gpu-xpress" and XPRESS_KEY not in vllm.profile.speculative_keys:
        assert speculation_problems(settings, vllm.profile)
        assert vllm.start(settings).error
        return
    assert speculation_problems(settings, vllm.profile) == []
    check_parsed(vllm, settings)
    check_started(vllm, settings)


def test_removed_methods_are_refused_by_vllm(vllm: Vllm) -> None:
    for method in vllm.profile.ended_methods:
        told = json.dumps({"method": method, "num_speculative_tokens": 2})
        answer = vllm.h100.ask("start", [str(vllm.models / TARGET), "--speculative-config", told])
        assert "Input should be" in (answer.error or "accepted"), method
    assert set(vllm.profile.runners) == {*Method} - {Method.NONE, *vllm.profile.ended_methods}


@pytest.mark.parametrize("platform", ANOTHER_VOCABULARY)
def test_draft_of_other_vocabulary_is_allowed_only_where_vllm_maps_it(vllm: Vllm, platform: str) -> None:
    settings = ANOTHER_VOCABULARY[platform]
    answer = vllm.start(settings)
    assert answer.ok, answer.error
    assert answer.value["use_heterogeneous_vocab"]
    mapped = answer.value["runner"] == "V1"
    assert mapped == (speculation_problems(settings, vllm.profile) == [])
    if mapped:
        check_parsed(vllm, settings)
        check_started(vllm, settings)


def test_every_method_has_a_contract_case() -> None:
    assert {*METHODS, Method.NONE} == set(Method)


@pytest.mark.parametrize(("tokens", "taken"), [(1, True), (2, True), (3, False), (4, True)])
def test_mtp_draft_tokens_must_be_divisible_by_n_predict(vllm: Vllm, tokens: int, taken: bool) -> None:
    settings = replace(METHODS[Method.MTP], model="own-layers")
    answer = vllm.start(replace(settings, speculation=speculating_with(Method.MTP, tokens)))
    assert answer.ok == taken
    assert taken or "must be divisible by n_predict" in (answer.error or "")


@pytest.mark.parametrize("name", PARALLEL)
def test_vllm_parses_parallelism_as_intended(vllm: Vllm, name: str) -> None:
    settings = PARALLEL[name]
    check_parsed(vllm, settings)
    if any("pipeline" in problem.field for problem in speculation_problems(settings, vllm.profile)):
        assert "Pipeline parallelism is not supported" in (vllm.start(settings).error or "accepted")
        return
    if name == "stages of a head" and not vllm.profile.targets.with_hidden_states_over_stages:
        assert "Pipeline parallelism is not supported" in (vllm.start(settings).error or "accepted")
        return
    check_started(vllm, settings)


@pytest.mark.parametrize("name", SEVERAL_NODES)
def test_nodes_of_a_group_cover_all_ranks_without_overlap(vllm: Vllm, name: str) -> None:
    settings, nodes = SEVERAL_NODES[name]
    split = (settings.tensor_parallel_size, settings.pipeline_parallel_size, settings.data_parallel_size)
    taken = []
    for rank in range(nodes):
        here = on_node(settings, nodes, rank)
        check_parsed(vllm, here)
        answer = vllm.oracle(here).ask("place", vllm.line(here))
        assert answer.ok, answer.error
        found = answer.value
        assert found["serves"] == (rank == 0)
        assert found["backend"] == "mp"
        leader = "10.0.0.7" if rank == 0 else LEADER_ADDRESS
        assert found["leader"] == leader
        assert found["copies_meet_at"] == (leader if split[2] > 1 else "127.0.0.1")
        assert found["timeout_s"] == MEETING_TIMEOUT_S
        assert found["ranks"] * found["copies"] * nodes == math.prod(split), "an even share"
        copies = range(found["first_copy"], found["first_copy"] + found["copies"])
        ranks = range(found["first_rank"], found["first_rank"] + found["ranks"])
        taken += [(copy, rank_of_copy) for copy in copies for rank_of_copy in ranks]
        dense = settings.model == TARGET
        one_node = math.prod(split[:2]) * settings.data_parallel_size // nodes >= math.prod(split[:2])
        assert found["meets"] == (1 if dense and one_node else nodes), "who waits for whom"
    assert sorted(taken) == [(copy, each) for copy in range(split[2]) for each in range(math.prod(split[:2]))]


@pytest.mark.parametrize("method", [Method.NONE, Method.MTP, Method.NGRAM])
def test_mixture_of_experts_targets_get_the_expected_runner(vllm: Vllm, method: Method) -> None:
    speculation = None if method is Method.NONE else speculating_with(method, 2)
    answer = vllm.start(replace(GPU, model="own-layers", speculation=speculation))
    assert answer.ok, answer.error
    experts = ModelTraits("DeepseekV3ForCausalLM", has_experts=True)
    assert answer.value["runner"] == find_version_rules(vllm.profile.version, method.value, experts).runner.value


@pytest.mark.parametrize("method", [Method.EAGLE3, Method.DRAFT_MODEL])
def test_logits_processors_get_the_expected_runner(vllm: Vllm, method: Method) -> None:
    settings = replace(METHODS[method], extra_args=("--logits-processors", "a.b:C"))
    answer = vllm.start(settings)
    assert answer.ok, answer.error
    on_v1 = runs_on_v1(settings, vllm.profile)
    assert answer.value["runner"] == ("V1" if on_v1 else "V2")
    assert bool(serving_problems(settings, vllm.profile)) == on_v1


@pytest.mark.parametrize("method", METHODS_WITH_SAMPLING)
def test_adaptive_verification_is_accepted_for_the_listed_methods_only(vllm: Vllm, method: Method) -> None:
    settings = drafting(method, adaptive_verification=True)
    adapts = method in vllm.profile.adaptive_verification.methods
    assert vllm.start(settings).ok == adapts == (not speculation_problems(settings, vllm.profile))


def test_adaptive_verification_attention_backends_match_our_list(vllm: Vllm) -> None:
    adapting = drafting(Method.DSPARK, adaptive_verification=True)
    answer = vllm.h100.ask("adapting", vllm.line(adapting))
    assert answer.ok, answer.error
    said = version_facts(vllm.profile.version)["adaptive_verification"]
    # That of DeepSeek V4 is its own, and no catalogue of ours has it.
    assert {name for name in answer.value["backends"] if "DSV4" not in name} == said["attention"]["Hopper"].keys()
    assert set(answer.value["states"]) == said["states"].keys()


def test_expert_parallelism_of_dense_model_is_refused(vllm: Vllm) -> None:
    answer = vllm.start(replace(GPU, tensor_parallel_size=2, expert_parallel=True))
    assert "Number of experts in the model must be greater than 0" in (answer.error or "accepted")


def test_targets_can_do_what_we_say(vllm: Vllm) -> None:
    limits = vllm.profile.targets
    heads = ("Eagle", "Medusa", "DFlash", "DSpark", "XPress", "Assistant")
    known = [name for name in READERS if name not in DRAFT_CLASSES and not any(word in name for word in heads)]
    traits = vllm.cpu.ask("target_traits", known).value
    assert len(traits) > 40
    assert {name for name in traits if not traits[name]["hidden_states"]} == limits.without_hidden_states & set(traits)
    assert {name for name in traits if not traits[name]["stages"]} == limits.without_stages
    assert all(traits[name]["hidden_states"] for name in limits.with_hidden_states_over_stages)
    handing_on = {name for name in traits if traits[name]["hidden_states_over_stages"]}
    assert limits.with_hidden_states_over_stages <= handing_on | {"Phi3ForCausalLM"}  # a Llama in all but name


def test_draft_head_classes_match_our_list(vllm: Vllm) -> None:
    registered = vllm.cpu.ask("draft_classes").value
    said = version_facts(vllm.profile.version)["draft_classes"]
    assert said == {name: registered.get(name) for name in said}
    words = ("eagle", "dflash", "dspark", "draft", "medusa", "assistant")
    assert {name for name in registered if any(word in name.lower() for word in words)} <= said.keys()


@pytest.mark.parametrize("body", EXAMPLES)
def test_vllm_parses_commands_of_the_examples_as_intended(vllm: Vllm, body: Any) -> None:
    spec = SpecDecodeDeploymentSpec.model_validate(body["spec"])
    settings = engine_settings(spec, valid_facts(spec).pair, spec.parallelism.tensor or 2)
    speculation = settings.speculation
    other = METHODS.get(speculation.method) if speculation else None
    target, draft = (other.model, other.speculation) if other else (TARGET, DRAFT_MODEL)
    if speculation and speculation.draft_model and draft:
        settings = replace(settings, speculation=replace(speculation, draft_model=draft.draft_model))
    check_parsed(vllm, replace(settings, model=target))
    check_started(vllm, replace(settings, model=target))


def test_draft_with_another_vocabulary_size_is_refused(vllm: Vllm) -> None:
    answer = vllm.start(replace(GPU, speculation=replace(DRAFT_MODEL, draft_model=OTHER_VOCABULARY)))
    assert "same vocabulary size" in (answer.error or "accepted")


def test_vllm_changes_the_method_for_draft_paths_with_a_marker(vllm: Vllm) -> None:
    flipped = vllm.start(replace(GPU, speculation=replace(DRAFT_MODEL, draft_model=EAGLE_PATH)))
    assert flipped.value["method"] == vllm.profile.draft_path_markers["eagle-"] == "eagle"
    heads = speculating_with(Method.MEDUSA, 4, draft_model="eagle-house/several-heads")
    flipped = vllm.start(replace(GPU, speculation=heads))
    assert flipped.error or flipped.value["method"] == "eagle"


def test_profile_defaults_match_vllm_on_an_h100(vllm: Vllm) -> None:
    parsed = vllm.h100.ask("options_of", [TARGET]).value
    started = vllm.h100.ask("start", [str(vllm.models / TARGET)]).value
    assert vllm.profile.defaults["--dtype"] == parsed["dtype"]
    computed = {flag: value for flag, value in vllm.profile.defaults.items() if flag != "--dtype"}
    assert {flag: str(started[flag]) for flag in computed} == computed
    assert started["--block-size"] == vllm.profile.default_block_sizes[Platform.GPU]
    assert started["runner"] == "V2"
    on_cpu = vllm.cpu.ask("default_cpu_block_size", [str(vllm.models / TARGET)]).value
    assert on_cpu == vllm.profile.default_block_sizes[Platform.CPU]


def test_removed_flags_are_refused_by_vllm(vllm: Vllm) -> None:
    answers = {flag: vllm.cpu.ask("options_of", [TARGET, flag, "1"]) for flag in vllm.profile.removed_flags}
    assert {flag for flag, answer in answers.items() if not (answer.error or "").startswith("exit 2")} == set()


def test_later_flags_are_unknown_to_vllm(vllm: Vllm) -> None:
    answers = {flag: vllm.cpu.ask("options_of", [TARGET, flag]) for flag in vllm.profile.later_flags}
    assert {flag for flag, answer in answers.items() if "unrecognized arguments" not in (answer.error or "")} == set()


@pytest.mark.parametrize("line", PASSING_EXTRA + FAILING_EXTRA)
def test_extra_args_are_accepted_if_the_vllm_parser_accepts_them(vllm: Vllm, line: str) -> None:
    answer = vllm.cpu.ask("options_of", [TARGET, *line.split()])
    assert answer.ok == (extra_args_problems(line.split(), vllm.profile) == []), answer


@pytest.mark.parametrize("said", SCHEDULES)
def test_scheduler_uses_the_schedule_of_the_spec(vllm: Vllm, said: tuple[tuple[int, int, int], ...]) -> None:
    speculation = replace(NGRAM, num_speculative_tokens=5, schedule=tuple(ScheduleRange(*part) for part in said))
    rendered = complete_schedule(speculation, GPU.max_num_seqs)
    asked = [[part.first, part.last, part.num_speculative_tokens] for part in rendered]
    lookup = vllm.cpu.ask("schedule", asked, GPU.max_num_seqs, 5).value
    for running, tokens in enumerate(lookup, start=1):
        meant = [k for first, last, k in said if first <= running <= last] or [5]
        assert [tokens] == meant, f"with {running} running requests"


@pytest.mark.parametrize("size", [16, 32, 48, 128])
def test_cpu_block_size_multiple_matches_the_backend(vllm: Vllm, size: int) -> None:
    multiple = vllm.profile.block_size_multiples[Platform.CPU]
    assert vllm.cpu.ask("cpu_block_size", size).ok == (size % multiple == 0)


def test_speculation_on_a_cpu_loses_temperatures_where_we_warn(vllm: Vllm) -> None:
    answer = vllm.cpu.ask("temperatures_of_tokens", [0.7, 0.0, 1.3], [2, 1, 1])
    assert answer.ok, answer.error
    assert (answer.value != [0.7, 0.7, 1.0, 1.3]) == vllm.profile.loses_sampling_on_cpu


def test_vllm_reads_the_environment_variables_that_we_set(vllm: Vllm) -> None:
    ours = {name for name in environment(CPU) if name.startswith("VLLM_")}
    assert ours <= set(vllm.cpu.ask("variables").value)


def test_vllm_metrics_have_the_names_that_we_read(vllm: Vllm) -> None:
    speculating = read_metrics(vllm.h100.ask("metrics", vllm.line(GOOD["gpu-ngram"])).value, vllm.profile)
    assert speculating.num_gpu_blocks == 100
    assert speculating.block_size == GPU.block_size
    assert (speculating.kv_cache_tokens, speculating.kv_cache_max_concurrency) == (1600, 2.5)
    assert speculating.speculation == SpeculationReading(0, 0, 0, (0,) * NGRAM.num_speculative_tokens)
    plain = read_metrics(vllm.h100.ask("metrics", vllm.line(GOOD["gpu-none"])).value, vllm.profile)
    assert plain.speculation is None
