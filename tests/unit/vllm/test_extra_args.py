"""Arguments of vLLM that a user adds."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.enums import Method
from specdecode_operator.vllm.arguments import ARGUMENTS
from specdecode_operator.vllm.extra_args_parser import attention_backend, options
from specdecode_operator.vllm.extra_args_rules import extra_args_problems, unknown_flags
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, find_profile
from specdecode_operator.vllm.speculative_config import (
    SPECULATIVE_KEYS,
    extra_config_problems,
    reserved_key_problem,
    speculative_config,
    unknown_keys,
)
from tests.support.engine_settings import replace, speculating_with
from tests.unit.vllm.engine_cases import PLAIN

PROFILE = find_profile("0.32")

ALLOWED = [
    "",
    "--async-scheduling",
    "--async-sched",
    "--no-async-scheduling",
    "--no_async_scheduling",
    "--seed 7",
    "--seed=7",
    "--seed -1",
    "--ssl_ciphers TLSv1.2",
    "--ssl-ciph TLSv1.2",
    "--lora-modules a=b c=d --enable-lora",
    "--compilation-config.mode NONE",
    "--compilation-config.mode=NONE",
    "-cc.mode NONE",
    "--compilation-config.local_cache_dir -1",
    "-O3",
    "-O=3",
    "-O 3",
    "--trust-remote-code",
    "--chat-template -",
    "--watermark 0.5",
    "--watermark=-0.5",
    "--middleware a.b --middleware c.d",
    "--ssl-ciphers TLSv1.2",
]


def test_flags_of_vllm_without_a_spec_field_are_allowed() -> None:
    problems = {line: extra_args_problems(line.split(), PROFILE) for line in ALLOWED}
    assert {line: found for line, found in problems.items() if found} == {}


REFUSED = [
    # Typed fields, in every spelling that reaches them.
    ("--tensor-parallel-size 4", 0, "use spec.parallelism.tensor"),
    ("--tensor-parallel-size=4", 0, "use spec.parallelism.tensor"),
    ("--tensor_parallel_size 4", 0, "use spec.parallelism.tensor"),
    ("-tp 4", 0, "use spec.parallelism.tensor"),
    ("-tp=4", 0, "use spec.parallelism.tensor"),
    (
        "--tensor-par 4",
        0,
        "is short for --tensor-parallel-size, which is not allowed in extraArgs; use spec.parallelism.tensor",
    ),
    ("--speculative-config {}", 0, "use spec.speculation"),
    ("--speculative-config.method ngram", 0, "use spec.speculation"),
    ("-sc.method=ngram", 0, "use spec.speculation"),
    ("--spec-model x", 0, "use spec.speculation.draft.model"),
    ("--max-model-len 100", 0, "use spec.serving.maxModelLen"),
    ("--device-memory-utilization 0.5", 0, "use spec.serving.gpuMemoryUtilizationPercent"),
    ("--gpu-memory-utilization 0.5", 0, "use spec.serving.gpuMemoryUtilizationPercent"),
    ("--no-enforce-eager", 0, "use spec.serving.enforceEager"),
    ("--port 1", 0, "use spec.serving.port"),
    ("--served-model-name a b", 0, "use spec.serving.servedModelNames"),
    ("--model x", 0, "use spec.target.model"),
    ("-q fp8", 0, "use spec.target.quantization"),
    ("-qfp8", 0, "use spec.target.quantization"),
    ("--host ::", 0, "the operator sets it"),
    ("--shutdown-timeout 1", 0, "the operator sets it"),
    ("--api-key secret", 0, "use spec.serving.apiKeySecret"),
    ("--ssl-keyfile /tls/key", 0, "use spec.serving.tlsSecret"),
    ("--ssl-certfile=/tls/crt", 0, "use spec.serving.tlsSecret"),
    ("--ssl-cert-reqs 2", 0, "the kubelet's probes present no client certificate"),
    ("--hf-token", 0, "use spec.models.hubTokenSecret"),
    ("--kv-cache-memory 1", 0, "spec.serving.gpuMemoryUtilizationPercent"),
    ("-pp 2", 0, "use spec.parallelism.pipeline"),
    ("--data-parallel-size 2", 0, "use spec.parallelism.data"),
    ("-ep", 0, "use spec.parallelism.expert"),
    ("--distributed-executor-backend ray", 0, "the operator sets it"),
    ("-dpe", 0, "use spec.parallelism and spec.replicas"),
    ("-n2", 0, "use spec.parallelism"),
    ("--config f.yaml", 0, "spec.engine.extraArgs"),
    ("--disable-log-stats", 0, "remove it"),
    ("-h", 0, "remove it"),
    # What no parser takes.
    ("--seed 1 --enable-prefix-cachin0", 2, "did you mean --enable-prefix-caching?"),
    ("--xyzzy", 0, "vLLM 0.32 has no such flag; see"),
    ("--max-num", 0, "is short for several flags"),
    ("--seed", 0, "needs a value"),
    ("--watermark -0.5", 0, "needs a value"),
    ("--seed --async-scheduling", 0, "needs a value"),
    ("--lora-modules --enable-lora", 0, "needs a value"),
    ("--compilation-config.mode", 0, "needs a value"),
    ("-cc.cudagraph_mode=NONE", 0, "use spec.serving.cudagraphMode"),
    ("--compilation_config.cudagraph_mode NONE", 0, "use spec.serving.cudagraphMode"),
    ("-cc.max_cudagraph_capture_size 8", 0, "use spec.serving.maxCudagraphCaptureSize"),
    ("--async-scheduling=true", 0, "takes no value"),
    ("--async-scheduling true", 1, "belongs to no flag"),
    ("left over", 0, "belongs to no flag"),
    ("--seed 1 2", 2, "belongs to no flag"),
    ("--", 0, "ends the flags"),
    ("-O", 0, "needs a level"),
    ("-O fast", 0, "needs a level"),
    ("-tp2", 0, "no such flag"),
]


def first_problem(line: str) -> tuple[str, str]:
    """Where the first problem is, and what is said of it."""
    problems = extra_args_problems(line.split(), PROFILE)
    return (problems[0].field, problems[0].message) if problems else ("", "is allowed")


def test_refused_argument_names_index_and_fix() -> None:
    said = {line: first_problem(line) for line, _, _ in REFUSED}
    assert len(said) == len(REFUSED)
    assert {
        line: said[line]
        for line, index, fix in REFUSED
        if said[line][0] != f"spec.engine.extraArgs[{index}]" or fix not in said[line][1]
    } == {}


def test_words_joined_in_one_item_are_refused() -> None:
    (problem,) = extra_args_problems(["--enable-auto-tool-choice --tool-call-parser hermes"], PROFILE)
    assert (problem.field, "one list item per word" in problem.message) == ("spec.engine.extraArgs[0]", True)


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_removed_flag_names_its_replacement_once(version: str) -> None:
    profile = find_profile(version)
    assert profile.removed_flags
    lines = {
        line: flag
        for flag in profile.removed_flags
        for line in (f"{flag} x", f"{flag}=x", f"{flag.replace('-', '_').replace('__', '--', 1)} x", flag)
    }
    said = {line: [(each.value, each.message) for each in extra_args_problems(line.split(), profile)] for line in lines}
    told = {
        flag: [(flag, f"vLLM {version} no longer has this flag; {advice}")]
        for flag, advice in profile.removed_flags.items()
    }
    assert {line: said[line] for line, flag in lines.items() if said[line] != told[flag]} == {}


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_replacement_of_a_removed_flag_exists_in_the_version(version: str) -> None:
    profile = find_profile(version)
    for advice in profile.removed_flags.values():
        named = re.findall(r"(?<![\w-])--[a-z][a-z-]*", advice)
        assert named or "spec." in advice or advice.startswith("remove it")
        assert set(named) <= set(profile.flags), advice


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_every_operator_rendered_flag_is_refused(version: str) -> None:
    profile = find_profile(version)
    takes_none = {
        argument.flag: profile.flags[argument.flag.partition(".")[0]].values == "0"
        for argument in ARGUMENTS
        if not argument.says_more
    }
    said = {
        flag: [problem.message for problem in extra_args_problems([flag] if alone else [flag, "1"], profile)]
        for flag, alone in takes_none.items()
    }
    assert {
        flag: told for flag, told in said.items() if len(told) != 1 or "not allowed in extraArgs" not in told[0]
    } == {}


@pytest.mark.parametrize(
    ("line", "version", "message"),
    [
        ("--watermark-config {}", "0.29", "vLLM 0.29 does not have this flag yet; it came with 0.30"),
        ("--watermark_config={}", "0.29", "vLLM 0.29 does not have this flag yet; it came with 0.30"),
        ("--no-trust-request-mm-kwargs", "0.28", "vLLM 0.28 does not have this flag yet; it came with 0.31"),
    ],
)
def test_flag_of_a_later_version_names_that_version(line: str, version: str, message: str) -> None:
    (problem,) = extra_args_problems(line.split(), find_profile(version))
    assert problem.message == message
    assert extra_args_problems(line.split(), PROFILE) == []


def test_flag_is_accepted_only_by_the_versions_that_have_it() -> None:
    line = ["--enable-mamba-fine-grained-prefix-cache"]
    assert extra_args_problems(line, find_profile("0.30")) == []
    for version, message in (("0.29", "it came with 0.30"), ("0.31", "no longer has this flag")):
        (problem,) = extra_args_problems(line, find_profile(version))
        assert message in problem.message


def test_all_problems_are_reported_at_once() -> None:
    problems = extra_args_problems(["-tp", "2", "--swap-space", "4", "--seed", "1", "stray", "--xyzzy"], PROFILE)
    assert [problem.field for problem in problems] == [f"spec.engine.extraArgs[{i}]" for i in (0, 2, 6, 7)]


@pytest.mark.parametrize("line", [["--api-key", "s3cret"], ["--api-key=s3cret"], ["--hf-token=s3cret"]])
def test_secret_values_are_not_repeated_in_messages(line: list[str]) -> None:
    assert "s3cret" not in "".join(str(problem) for problem in extra_args_problems(line, PROFILE))


@given(st.lists(st.text(max_size=12) | st.sampled_from([*PROFILE.flags, "-O", "--", "-tp=1", "1"]), max_size=8))
def test_any_argument_list_is_checked_without_errors(extra_args: list[str]) -> None:
    for problem in extra_args_problems(extra_args, PROFILE):
        index = int(problem.field.removeprefix("spec.engine.extraArgs[").removesuffix("]"))
        assert 0 <= index < len(extra_args)
        assert problem.message


def test_dotted_path_of_too_many_parts_is_refused() -> None:
    (problem,) = extra_args_problems([f"--hf-overrides{'.a' * 2_000}=1"], PROFILE)
    assert problem.message == "has a dotted path of more than 32 parts, the maximum: shorten it"


def test_spelling_suggestions_are_limited_for_many_unknown_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look for what was meant takes 20 ms a flag, in the one thread that serves all objects."""
    looked_for: list[str] = []

    def counted(name: str, *_: object, **__: object) -> list[str]:
        looked_for.append(name)
        return []

    monkeypatch.setattr("specdecode_operator.vllm.extra_args_rules.get_close_matches", counted)
    flags = [f"--enable-prefix-cachin{number}" for number in range(256)]
    problems = extra_args_problems(flags, PROFILE)
    assert [problem.value for problem in problems] == flags
    assert all("no such flag" in problem.message for problem in problems)
    assert [*options(flags, PROFILE)] == []
    assert 0 < len(looked_for) < 10


def test_unknown_flags_are_passed_on_for_unknown_versions() -> None:
    """They are handed on, with whatever follows them; all that is known is judged as ever."""
    newer = find_profile("0.99")
    flags = ["--new-flag", "3", "4", "--newer_flag=x", "--newest.path", "{}", "--seed", "1", "-O3"]
    assert extra_args_problems(flags, newer) == []
    assert unknown_flags(flags, newer) == ["--new-flag", "--newer-flag", "--newest"]
    assert unknown_flags(flags, PROFILE) == []
    assert [option.flag.name for option in options(flags, newer)] == ["--seed", "--optimization-level"]
    refused = ["--", "-tp2", "--max-num", "--swap-space", "--tensor-parallel-size", "left"]
    assert [problem.value for problem in extra_args_problems(refused, newer)] == [*refused[:4], refused[4]]


@pytest.mark.parametrize(
    ("extra_args", "backend"),
    [
        ([], None),
        (["--attention-backend", "FLASH_ATTN"], "FLASH_ATTN"),
        (["--attention-backend=flash_attn"], "FLASH_ATTN"),
        (["--attention-backend", "TRITON_ATTN", "--attention-backend", "FLASHINFER"], "FLASHINFER"),
        (["-ac.backend=FLASH_ATTN"], "FLASH_ATTN"),
        (["--attention-config", '{"backend": "FLASH_ATTN"}'], "FLASH_ATTN"),
        (["--attention-config.flash_attn_version=3"], None),
        (["--attention-config", '{"backend": ["FLASH_ATTN"]}'], None),
        (["--attention-config", "[1]"], None),
    ],
)
def test_the_attention_backend_is_read_in_every_spelling(extra_args: list[str], backend: str | None) -> None:
    assert attention_backend(extra_args, find_profile("0.32")) == backend


# Keys of ``--speculative-config`` without a field: passed on as they are, or refused with what to write instead.

NEWEST = find_profile(KNOWN_VERSIONS[-1])
PASSED = {
    "attention_backend": "TRITON_ATTN",
    "moe_backend": "triton",
    "kv_cache_dtype": "auto",
    "enforce_eager": True,
    "draft_load_config": {"load_format": "safetensors"},
    "disable_padded_drafter_batch": True,
    "index_share_for_mtp_iteration": True,
    "dspark_draft_topk": 4,
}


def problems(config: dict[str, Any], version: str = KNOWN_VERSIONS[-1], **more: bool) -> dict[str, str]:
    """Return the messages by the last part of their field."""
    found = extra_config_problems(config, find_profile(version), **more)
    return {each.field.removeprefix("spec.speculation.extraConfig."): each.message for each in found}


def test_extra_config_keys_without_a_field_are_passed_on() -> None:
    assert problems(PASSED) == {}
    speculation = speculating_with(Method.MTP, 2, extra_config=json.dumps(PASSED))
    config = json.loads(speculative_config(replace(PLAIN, speculation=speculation), NEWEST) or "")
    assert config.items() >= PASSED.items()


@pytest.mark.parametrize("key", SPECULATIVE_KEYS, ids=lambda key: key.key)
def test_extra_config_key_of_a_spec_field_is_refused_with_the_field(key: Any) -> None:
    (message,) = problems({key.key: 1}).values()
    assert key.key == "parallel_drafting" or key.field in message


def test_only_reserved_extra_config_keys_are_refused() -> None:
    """A key that a new vLLM brings is passed on, unless a field or a refusal names it."""
    for version in KNOWN_VERSIONS:
        for key in find_profile(version).speculative_keys:
            assert (key in problems({key: None}, version, checks_by_entropy=True)) == (
                reserved_key_problem(key) is not None
            )


def test_extra_config_key_of_another_version_is_refused_with_a_fix() -> None:
    assert "came with 0.30" in problems({"disable_eagle_block_drop": True}, "0.28")["disable_eagle_block_drop"]
    assert "attention_backend?" in problems({"atention_backend": "x"})["atention_backend"]
    assert problems({"magic": 1}, "0.99") == {}
    assert unknown_keys({"magic": 1, "moe_backend": "triton"}, find_profile("0.99")) == ["magic"]
    assert unknown_keys({"magic": 1}, NEWEST) == []


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("enforce_eager", "perhaps", "true or false"),
        ("enforce_eager", 2, "true or false"),
        ("attention_backend", 3, "a text"),
        ("dspark_draft_topk", True, "a whole number"),
        ("draft_load_config", "dummy", "an object"),
    ],
)
def test_extra_config_value_of_another_type_is_refused(key: str, value: object, wanted: str) -> None:
    assert wanted in problems({key: value})[key]


@pytest.mark.parametrize(("key", "value"), [("enforce_eager", "yes"), ("enforce_eager", 0), ("dspark_draft_topk", "3")])
def test_extra_config_value_that_vllm_converts_is_passed_on(key: str, value: object) -> None:
    assert problems({key: value}) == {}


def test_fly_keys_need_rejection_sampling_fly() -> None:
    assert "rejectionSampling: fly" in problems({"fly_window_size": 2})["fly_window_size"]
    assert problems({"fly_window_size": 2}, checks_by_entropy=True) == {}


def test_synthetic_acceptance_keys_are_refused() -> None:
    assert problems({"synthetic_acceptance_length": 2.5}).keys() == {"synthetic_acceptance_length"}
