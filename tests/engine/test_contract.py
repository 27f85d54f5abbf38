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


def test_flag_table_is_what_the_parser_says(vllm: Vllm) -> None:
    flags = {frozenset(flag.names): flag.values for flag in vllm.profile.flags.values()}
    dumped = {frozenset(row["names"]): row["values"] for row in vllm.cpu.ask("flags").value}
    assert flags == dumped, "renew it: .venv/bin/python -m tests.engine.flag_table"
    assert sorted(vllm.profile.speculative_keys) == vllm.cpu.ask("speculative_keys").value
    assert sorted(vllm.profile.variables) == vllm.cpu.ask("variables").value


@pytest.mark.parametrize("name", GOOD)
def test_rendered_line_is_taken_for_what_was_meant(vllm: Vllm, name: str) -> None:
    check_parsed(vllm, GOOD[name])
    check_started(vllm, GOOD[name])


def test_what_is_just_allowed_is_taken(vllm: Vllm) -> None:
    refused = {}
    for name, settings in ON_THE_EDGE.items():
        if not set(settings.extra_args) & set(vllm.profile.later_flags):
            ours = serving_problems(settings, vllm.profile) + speculation_problems(settings, vllm.profile)
            refused[name] = [*ours, *filter(None, [vllm.start(settings).error])]
    assert_none(f"{name}: {said}" for name, said in refused.items() if said)


@pytest.mark.parametrize("mode", CudagraphMode)
def test_every_mode_of_graphs_is_taken_for_what_was_meant(vllm: Vllm, mode: CudagraphMode) -> None:
    settings = replace(GPU, cudagraph_mode=mode, extra_args=("--compilation-config.mode", "3"))
    assert serving_problems(settings, vllm.profile) == []
    check_parsed(vllm, settings)
    check_started(vllm, settings)


@pytest.mark.parametrize("extra", [("-cc.mode=3",), ("-cc", '{"mode": 3}')])
def test_another_spelling_undoes_the_mode_of_graphs(vllm: Vllm, extra: tuple[str, ...]) -> None:
    settings = replace(GPU, cudagraph_mode=CudagraphMode.NONE, extra_args=extra)
    assert serving_problems(settings, vllm.profile)
    answer = vllm.start(settings)
    kept = answer.ok and answer.value["cudagraph_mode"] == CudagraphMode.NONE
    # A whole JSON value under the same flag comes before the dotted key, and is lost itself.
    assert kept == (extra[0] == "-cc"), answer.error


@pytest.mark.parametrize("mode", CudagraphMode)
@pytest.mark.parametrize("extra", [("-O0",), ("--compilation-config.mode", "none"), ("-O", "0", "-O2")])
def test_an_engine_that_compiles_nothing_has_no_pieces(vllm: Vllm, mode: CudagraphMode, extra: tuple[str, ...]) -> None:
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
def test_lengths_that_change_get_the_graphs_that_we_say(vllm: Vllm, mode: CudagraphMode) -> None:
    scheduled = replace(DRAFT_MODEL, schedule=SCHEDULED.schedule)
    settings = replace(GPU, cudagraph_mode=mode, speculation=scheduled)
    answer = vllm.start(settings)
    assert answer.ok, answer.error
    changed = answer.value["cudagraph_mode"] != mode.value
    assert changed == bool(serving_problems(settings, vllm.profile))
    assert not changed or answer.value["cudagraph_mode"] == CudagraphMode.PIECEWISE


@pytest.mark.parametrize("method", METHODS)
def test_line_of_every_method_is_taken_for_what_was_meant(vllm: Vllm, method: Method) -> None:
    check_parsed(vllm, METHODS[method])
    if method in vllm.profile.ended_methods:
        assert speculation_problems(METHODS[method], vllm.profile)
        return
    skip_without_package(vllm, method)
    check_started(vllm, METHODS[method])


@pytest.mark.parametrize("name", IN_PARALLEL)
def test_a_draft_in_one_pass_is_taken_for_what_was_meant(vllm: Vllm, name: str) -> None:
    settings = IN_PARALLEL[name]
    if name == "gpu-xpress" and XPRESS_KEY not in vllm.profile.speculative_keys:
        assert speculation_problems(settings, vllm.profile)
        assert vllm.start(settings).error
        return
    assert speculation_problems(settings, vllm.profile) == []
    check_parsed(vllm, settings)
    check_started(vllm, settings)


def test_methods_that_ended_are_really_gone(vllm: Vllm) -> None:
    for method in vllm.profile.ended_methods:
        told = json.dumps({"method": method, "num_speculative_tokens": 2})
        answer = vllm.h100.ask("start", [str(vllm.models / TARGET), "--speculative-config", told])
        assert "Input should be" in (answer.error or "accepted"), method
    assert set(vllm.profile.runners) == {*Method} - {Method.NONE, *vllm.profile.ended_methods}


@pytest.mark.parametrize("platform", ANOTHER_VOCABULARY)
def test_a_draft_of_another_vocabulary_is_taken_where_it_is_mapped(vllm: Vllm, platform: str) -> None:
    settings = ANOTHER_VOCABULARY[platform]
    answer = vllm.start(settings)
    assert answer.ok, answer.error
    assert answer.value["use_heterogeneous_vocab"]
    mapped = answer.value["runner"] == "V1"
    assert mapped == (speculation_problems(settings, vllm.profile) == [])
    if mapped:
        check_parsed(vllm, settings)
        check_started(vllm, settings)


def test_no_method_is_left_out() -> None:
    assert {*METHODS, Method.NONE} == set(Method)


@pytest.mark.parametrize(("tokens", "taken"), [(1, True), (2, True), (3, False), (4, True)])
def test_layers_of_the_target_draft_a_multiple_of_themselves(vllm: Vllm, tokens: int, taken: bool) -> None:
    settings = replace(METHODS[Method.MTP], model="own-layers")
    answer = vllm.start(replace(settings, speculation=speculating_with(Method.MTP, tokens)))
    assert answer.ok == taken
    assert taken or "must be divisible by n_predict" in (answer.error or "")


@pytest.mark.parametrize("name", PARALLEL)
def test_parallelism_is_taken_for_what_was_meant(vllm: Vllm, name: str) -> None:
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
def test_every_node_takes_its_own_ranks_and_all_are_taken(vllm: Vllm, name: str) -> None:
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
def test_targets_with_experts_get_the_runner_that_we_say(vllm: Vllm, method: Method) -> None:
    speculation = None if method is Method.NONE else speculating_with(method, 2)
    answer = vllm.start(replace(GPU, model="own-layers", speculation=speculation))
    assert answer.ok, answer.error
    experts = ModelTraits("DeepseekV3ForCausalLM", has_experts=True)
    assert answer.value["runner"] == find_version_rules(vllm.profile.version, method.value, experts).runner.value


@pytest.mark.parametrize("method", [Method.EAGLE3, Method.DRAFT_MODEL])
def test_logits_processors_get_the_runner_that_we_say(vllm: Vllm, method: Method) -> None:
    settings = replace(METHODS[method], extra_args=("--logits-processors", "a.b:C"))
    answer = vllm.start(settings)
    assert answer.ok, answer.error
    on_v1 = runs_on_v1(settings, vllm.profile)
    assert answer.value["runner"] == ("V1" if on_v1 else "V2")
    assert bool(serving_problems(settings, vllm.profile)) == on_v1


@pytest.mark.parametrize("method", METHODS_WITH_SAMPLING)
def test_methods_that_adapt_are_those_that_we_say(vllm: Vllm, method: Method) -> None:
    settings = drafting(method, adaptive_verification=True)
    adapts = method in vllm.profile.adaptive_verification.methods
    assert vllm.start(settings).ok == adapts == (not speculation_problems(settings, vllm.profile))


def test_attention_that_takes_parts_of_drafts_is_what_we_say(vllm: Vllm) -> None:
    adapting = drafting(Method.DSPARK, adaptive_verification=True)
    answer = vllm.h100.ask("adapting", vllm.line(adapting))
    assert answer.ok, answer.error
    said = version_facts(vllm.profile.version)["adaptive_verification"]
    # That of DeepSeek V4 is its own, and no catalogue of ours has it.
    assert {name for name in answer.value["backends"] if "DSV4" not in name} == said["attention"]["Hopper"].keys()
    assert set(answer.value["states"]) == said["states"].keys()


def test_experts_of_a_dense_model_are_refused(vllm: Vllm) -> None:
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


def test_draft_heads_have_the_classes_that_we_say(vllm: Vllm) -> None:
    registered = vllm.cpu.ask("draft_classes").value
    said = version_facts(vllm.profile.version)["draft_classes"]
    assert said == {name: registered.get(name) for name in said}
    words = ("eagle", "dflash", "dspark", "draft", "medusa", "assistant")
    assert {name for name in registered if any(word in name.lower() for word in words)} <= said.keys()


@pytest.mark.parametrize("body", EXAMPLES)
def test_line_of_an_example_is_taken_for_what_was_meant(vllm: Vllm, body: Any) -> None:
    spec = SpecDecodeDeploymentSpec.model_validate(body["spec"])
    settings = engine_settings(spec, valid_facts(spec).pair, spec.parallelism.tensor or 2)
    speculation = settings.speculation
    other = METHODS.get(speculation.method) if speculation else None
    target, draft = (other.model, other.speculation) if other else (TARGET, DRAFT_MODEL)
    if speculation and speculation.draft_model and draft:
        settings = replace(settings, speculation=replace(speculation, draft_model=draft.draft_model))
    check_parsed(vllm, replace(settings, model=target))
    check_started(vllm, replace(settings, model=target))


def test_a_draft_of_another_vocabulary_is_refused(vllm: Vllm) -> None:
    answer = vllm.start(replace(GPU, speculation=replace(DRAFT_MODEL, draft_model=OTHER_VOCABULARY)))
    assert "same vocabulary size" in (answer.error or "accepted")


def test_a_path_really_flips_the_method(vllm: Vllm) -> None:
    flipped = vllm.start(replace(GPU, speculation=replace(DRAFT_MODEL, draft_model=EAGLE_PATH)))
    assert flipped.value["method"] == vllm.profile.draft_path_markers["eagle-"] == "eagle"
    heads = speculating_with(Method.MEDUSA, 4, draft_model="eagle-house/several-heads")
    flipped = vllm.start(replace(GPU, speculation=heads))
    assert flipped.error or flipped.value["method"] == "eagle"


def test_defaults_are_those_on_an_h100(vllm: Vllm) -> None:
    parsed = vllm.h100.ask("options_of", [TARGET]).value
    started = vllm.h100.ask("start", [str(vllm.models / TARGET)]).value
    assert vllm.profile.defaults["--dtype"] == parsed["dtype"]
    computed = {flag: value for flag, value in vllm.profile.defaults.items() if flag != "--dtype"}
    assert {flag: str(started[flag]) for flag in computed} == computed
    assert started["--block-size"] == vllm.profile.default_block_sizes[Platform.GPU]
    assert started["runner"] == "V2"
    on_cpu = vllm.cpu.ask("default_cpu_block_size", [str(vllm.models / TARGET)]).value
    assert on_cpu == vllm.profile.default_block_sizes[Platform.CPU]


def test_removed_flags_are_really_gone(vllm: Vllm) -> None:
    answers = {flag: vllm.cpu.ask("options_of", [TARGET, flag, "1"]) for flag in vllm.profile.removed_flags}
    assert {flag for flag, answer in answers.items() if not (answer.error or "").startswith("exit 2")} == set()


def test_later_flags_are_not_there_yet(vllm: Vllm) -> None:
    answers = {flag: vllm.cpu.ask("options_of", [TARGET, flag]) for flag in vllm.profile.later_flags}
    assert {flag for flag, answer in answers.items() if "unrecognized arguments" not in (answer.error or "")} == set()


@pytest.mark.parametrize("line", PASSING_EXTRA + FAILING_EXTRA)
def test_extra_args_are_read_as_the_parser_reads_them(vllm: Vllm, line: str) -> None:
    answer = vllm.cpu.ask("options_of", [TARGET, *line.split()])
    assert answer.ok == (extra_args_problems(line.split(), vllm.profile) == []), answer


@pytest.mark.parametrize("said", SCHEDULES)
def test_scheduler_uses_the_schedule_that_the_user_wrote(vllm: Vllm, said: tuple[tuple[int, int, int], ...]) -> None:
    speculation = replace(NGRAM, num_speculative_tokens=5, schedule=tuple(ScheduleRange(*part) for part in said))
    rendered = complete_schedule(speculation, GPU.max_num_seqs)
    asked = [[part.first, part.last, part.num_speculative_tokens] for part in rendered]
    lookup = vllm.cpu.ask("schedule", asked, GPU.max_num_seqs, 5).value
    for running, tokens in enumerate(lookup, start=1):
        meant = [k for first, last, k in said if first <= running <= last] or [5]
        assert [tokens] == meant, f"with {running} running requests"


@pytest.mark.parametrize("size", [16, 32, 48, 128])
def test_cpu_block_sizes_are_those_that_the_backend_takes(vllm: Vllm, size: int) -> None:
    multiple = vllm.profile.block_size_multiples[Platform.CPU]
    assert vllm.cpu.ask("cpu_block_size", size).ok == (size % multiple == 0)


def test_variables_are_ones_that_the_engine_reads(vllm: Vllm) -> None:
    ours = {name for name in environment(CPU) if name.startswith("VLLM_")}
    assert ours <= set(vllm.cpu.ask("variables").value)


def test_metrics_have_the_names_that_we_read(vllm: Vllm) -> None:
    speculating = read_metrics(vllm.h100.ask("metrics", vllm.line(GOOD["gpu-ngram"])).value, vllm.profile)
    assert speculating.num_gpu_blocks == 100
    assert speculating.block_size == GPU.block_size
    assert (speculating.kv_cache_tokens, speculating.kv_cache_max_concurrency) == (1600, 2.5)
    assert speculating.speculation == SpeculationReading(0, 0, 0, (0,) * NGRAM.num_speculative_tokens)
    plain = read_metrics(vllm.h100.ask("metrics", vllm.line(GOOD["gpu-none"])).value, vllm.profile)
    assert plain.speculation is None
