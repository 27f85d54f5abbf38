"""Problems that one object shows by itself: all at once, each with its field, value and fix."""

import re
from typing import Any

import pytest

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.validation import facts_problems, gather_facts, valid_facts
from specdecode_operator.deployment.warnings import plan_warnings
from specdecode_operator.enums import Method
from specdecode_operator.problems import InvalidSpecError, Problem, shown
from specdecode_operator.sizing import kernel_support
from specdecode_operator.sizing.catalogue import find_entry, find_geometry, known_models
from specdecode_operator.sizing.errors import GeometryError
from specdecode_operator.sizing.estimate import size_case
from specdecode_operator.sizing.estimate_fields import CaseError
from specdecode_operator.sizing.families.draft_heads import method_of_head
from specdecode_operator.sizing.geometry import LatentAttention, ModelGeometry
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, find_profile
from specdecode_operator.vllm.speculation_rules import speculation_problems
from tests.support.engine_settings import replace
from tests.support.objects import TINY_CONFIG, pair_70b
from tests.support.small_models import small
from tests.unit.deployment.broken_rules import BROKEN
from tests.unit.deployment.broken_rules import problems as broken_rules
from tests.unit.deployment.test_model_checks import BAD
from tests.unit.deployment.test_model_checks import problems as pairing_problems
from tests.unit.vllm.engine_cases import DRAFT_MODEL, PLAIN
from tests.unit.vllm.test_arguments import RULES, rows


def problems(**changes: Any) -> list[str]:
    with pytest.raises(InvalidSpecError) as error:
        valid_facts(SpecDecodeDeploymentSpec.model_validate(pair_70b(**changes)))
    return [str(problem) for problem in error.value.problems]


def test_indivisible_tensor_parallel_size_names_every_dimension() -> None:
    target, draft = problems(parallelism={"tensor": 11})
    for said, role, sizes in ((target, "target", (64, 28672, 8)), (draft, "draft", (32, 14336, 8))):
        heads, inner, kv_heads = sizes
        assert said.startswith(f"spec.parallelism.tensor: 11: {role}: ")
        for size in (
            f"num_attention_heads {heads}",
            f"num_key_value_heads {kv_heads}",
            f"intermediate_size {inner}",
            "vocab_size 128256",
        ):
            assert size in said
        assert said.endswith("; use 1, 2, 4, 8, 16 or 32")


def test_target_and_draft_of_one_model_need_one_revision_or_a_cache() -> None:
    target = {"model": "meta-llama/Llama-3.1-8B-Instruct", "revision": "v2"}
    draft = {"model": "meta-llama/Llama-3.1-8B-Instruct", "revision": "main"}
    speculation = {"method": "draft_model", "numSpeculativeTokens": 3, "draft": draft}
    (problem,) = problems(target=target, speculation=speculation, models={})
    assert problem.startswith("spec.speculation.draft.revision: main: the target is the same model at v2")
    cached = {"cache": {"persistentVolumeClaim": {"claimName": "hub"}}}
    for fine in (
        {"models": cached, "speculation": speculation},
        {"models": {}, "speculation": speculation | {"draft": target}},
    ):
        valid_facts(SpecDecodeDeploymentSpec.model_validate(pair_70b(**{"target": target, **fine})))


OLDER = 'spec.engine.version: 0.11: is a vLLM version that this operator does not know; write "0.28" or newer'
NEWER = (
    "spec.engine.image: absent: no GPU image of vLLM 0.99 is known; set it, or write spec.engine.version: "
    f'"{KNOWN_VERSIONS[-1]}", the newest that this operator knows'
)


@pytest.mark.parametrize(("version", "said"), [("0.11", OLDER), ("0.99", NEWER)])
def test_unknown_engine_version_is_refused_with_known_versions(version: str, said: str) -> None:
    assert problems(engine={"version": version}) == [said]


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_unsupported_method_is_refused_with_supported_methods(version: str) -> None:
    known = find_profile(version)
    lacking = replace(known, runners={Method.NGRAM: known.runners[Method.NGRAM]})
    (problem,) = speculation_problems(replace(PLAIN, speculation=DRAFT_MODEL), lacking)
    assert str(problem) == (
        f"spec.speculation.method: draft_model: vLLM {version} does not support it; use one of ngram"
    )


def test_all_problems_are_reported_at_once() -> None:
    said = problems(
        parallelism={"tensor": 3},
        serving={"maxNumBatchedTokens": 5, "maxNumSeqs": 4, "blockSize": 24},
        engine={"extraArgs": ["--tensor-parallel-size", "2", "--nonsense"]},
        podTemplate={"spec": {"containers": [{"name": "engine", "command": ["sh"]}]}},
    )
    fields = [
        "spec.parallelism.tensor: 3: target:",
        "spec.parallelism.tensor: 3: draft:",
        "spec.serving.blockSize: 24: must be a multiple of 16",
        "spec.serving.maxNumBatchedTokens: 5: must be at least",
        "spec.engine.extraArgs[0]: --tensor-parallel-size: is not allowed in extraArgs; use spec.parallelism.tensor",
        "spec.engine.extraArgs[2]: --nonsense: vLLM 0.33 has no such flag",
        "spec.podTemplate.spec.containers[0].command: set: is set by the operator; use spec.engine.extraArgs",
    ]
    assert [field for field in fields if not any(each.startswith(field) for each in said)] == []


def test_every_documented_rule_has_a_broken_example() -> None:
    assert {row[1] for row in rows("field", RULES)} == set(BROKEN)


@pytest.mark.parametrize(
    "told_of_and_rule",
    [(row[0], row[1]) for row in rows("field", RULES)],
    # An id with an escaped character cannot be asked for by itself.
    ids=lambda row: row[1].replace("…", "..."),
)
def test_broken_rule_is_reported_with_its_field(told_of_and_rule: tuple[str, str]) -> None:
    told_of, rule = told_of_and_rule
    for broken, words in BROKEN[rule]:
        found = broken_rules(broken)
        assert [p for p in found if told_of.strip("`") in p.field and words in p.message], found


SPECS = [spec for spec, _, _ in BAD.values()]
SPECS += [spec for cases in BROKEN.values() for spec, _ in cases if isinstance(spec, dict)]


def given(spec: Body, field: str) -> object:
    """What a spec has at a field's path; None where it has nothing."""
    value: object = {"spec": spec}
    for name in field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


@pytest.mark.parametrize("spec", SPECS)
def test_problem_shows_the_value_of_its_field(spec: Body) -> None:
    told = [(found.value, given(spec, found.field)) for found in pairing_problems(spec)]
    plain = [(str(value), shown(written)) for value, written in told if isinstance(written, str | int)]
    # Two models whose vocabularies differ: the sizes tell more than the names.
    assert [each for each in plain if each[0] != each[1] and not each[0].startswith("vocabulary of ")] == []


@pytest.mark.parametrize("rule", BROKEN)
def test_every_problem_has_a_value_and_a_fix(rule: str) -> None:
    found = [problem for broken, _ in BROKEN[rule] for problem in broken_rules(broken)]
    assert found
    assert {type(text) for problem in found for text in (problem.field, problem.message)} == {str}
    assert not [problem for problem in found if str(problem.value) in {"", "None"} or len(problem.message) < 20]


HEAD = find_entry("sgl-project/SpecForge:configs/qwen3-8b-dflash.json")
EXPERTS = "Qwen/Qwen3-30B-A3B"
FIELD = "spec.parallelism.data"


def told(version: str, target: str = EXPERTS, *, data: int = 2, method: str = "dflash") -> list[str]:
    assert HEAD is not None
    hidden = {"Qwen/Qwen3-30B-A3B": 2048, "Qwen/Qwen3-8B": 4096}[target]
    config: dict[str, Any] = {**HEAD.config, "hidden_size": hidden}
    speculation: dict[str, Any] = {"method": method, "numSpeculativeTokens": 7}
    if method == "dflash":
        speculation["draft"] = {"model": "org/head", "config": config}
    body = {
        "target": {"model": target},
        "speculation": speculation,
        "parallelism": {"tensor": 1, "data": data, "expert": target == EXPERTS},
        "serving": {"maxModelLen": 8192},
        "engine": {"version": version},
    }
    problems = facts_problems(gather_facts(SpecDecodeDeploymentSpec.model_validate(body)))
    return [problem.message for problem in problems if problem.field == FIELD]


@pytest.mark.parametrize(("version", "fails"), [("0.29", True), ("0.30", False), ("0.33", False)])
def test_dflash_with_data_parallel_is_refused_before_0_30(version: str, fails: bool) -> None:
    messages = told(version)
    assert bool(messages) is fails
    assert all("0.30 or newer" in message for message in messages)


FLOAT16 = small("LlamaForCausalLM", torch_dtype="float16")


def cache_problems(config: dict[str, Any], version: str = "0.33", **serving: str) -> list[Problem]:
    spec = {
        "engine": {"version": version},
        "target": {"model": "some/model", "config": config},
        "serving": {"kvCacheDtype": "bfloat16", **serving},
    }
    try:
        valid_facts(SpecDecodeDeploymentSpec.model_validate(spec))
    except InvalidSpecError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize("config", [FLOAT16, small("LlamaForCausalLM", torch_dtype=None, dtype="float16")])
def test_bfloat16_kv_cache_of_a_float16_checkpoint_is_refused(config: dict[str, Any]) -> None:
    (problem,) = cache_problems(config)
    assert (problem.field, problem.value) == ("spec.serving.kvCacheDtype", "bfloat16")
    assert "serving.dtype: bfloat16" in problem.message


def test_kv_cache_dtypes_that_vllm_accepts_are_accepted() -> None:
    assert cache_problems(FLOAT16, version="0.32") == []
    assert cache_problems(FLOAT16, dtype="bfloat16") == []
    assert cache_problems(FLOAT16, kvCacheDtype="auto") == []
    assert cache_problems(small("LlamaForCausalLM")) == []
    # vLLM loads it in bfloat16.
    assert cache_problems(small("LlamaForCausalLM", torch_dtype="float32")) == []


@pytest.mark.parametrize("wanted", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("version", ["0.30", "0.33.0", "0.40"])
def test_sparse_attention_supports_fp8_e4m3_on_hopper_since_0_30(version: str, wanted: str) -> None:
    # vllm/v1/attention/backends/mla/flashinfer_mla_sparse_sm90.py: supported_kv_cache_dtypes, supports_combination.
    sparse = find_geometry("deepseek-ai/DeepSeek-V3.2")
    assert sparse is not None
    scaled = replace(sparse, cache_element_bytes=1)
    refused = kernel_support.cache_dtype_problem
    assert refused(scaled, wanted, version, ["NVIDIA-H200"]) is None
    for change in ({"kv_rank": 256}, {"rope_head_dim": 32}):
        assert refused(with_mixer(scaled, **change), wanted, version, ["NVIDIA-H200"])
    assert refused(with_mixer(scaled, rope_head_dim=0), wanted, version, ["NVIDIA-H200"]) is None


def with_mixer(model: ModelGeometry, **change: Any) -> ModelGeometry:
    """Return a model with other latent attention in all layers."""
    layers = tuple(
        replace(layer, mixer=replace(layer.mixer, **change)) if isinstance(layer.mixer, LatentAttention) else layer
        for layer in model.layers
    )
    return replace(model, layers=layers)


NEW, RUNS_IN_TRANSFORMERS = "AliceAIForCausalLM", "MiniMaxForCausalLM"
"""Registered since 0.33; registered up to 0.23, and in transformers since."""


def class_findings(architecture: str, version: str, *extra_args: str) -> tuple[list[Problem], list[str]]:
    """Return problems and warnings about the class of a target."""
    target = {"model": "my/model", "config": TINY_CONFIG | {"architectures": [architecture]}}
    engine: dict[str, Any] = {"version": version, "extraArgs": list(extra_args)}
    body = {"target": target, "engine": engine, "serving": {"maxModelLen": 128}}
    facts = gather_facts(SpecDecodeDeploymentSpec.model_validate(body))
    problems = [problem for problem in facts_problems(facts) if problem.field == "spec.target.config.architectures"]
    return problems, [text for text in plan_warnings(facts, {}, 1) if text.startswith("spec.target.config.architect")]


@pytest.mark.parametrize(
    ("architecture", "version", "words"),
    [
        (NEW, "0.30", "needs vLLM 0.33 (registered since)"),
        ("ArcticForCausalLM", "0.30", "use vLLM 0.28, or another model"),
        ("BertModel", "0.33", "is unknown to vLLM"),
    ],
)
def test_model_class_that_the_version_lacks_is_refused(architecture: str, version: str, words: str) -> None:
    (problem,), warnings = class_findings(architecture, version)
    assert problem.value == architecture
    assert words in problem.message
    assert not warnings


@pytest.mark.parametrize(
    ("architecture", "version", "extra_args", "words"),
    [
        (RUNS_IN_TRANSFORMERS, "0.33", [], "up to 0.23"),
        (NEW, "0.30", ["--trust-remote-code"], "needs vLLM 0.33"),
        ("BertModel", "0.34", [], "unknown to vLLM 0.33"),
    ],
)
def test_model_class_that_vllm_may_still_run_is_a_warning(
    architecture: str, version: str, extra_args: list[str], words: str
) -> None:
    problems, (warning,) = class_findings(architecture, version, *extra_args)
    assert problems == []
    assert words in warning


def test_estimate_refuses_model_classes_that_the_version_lacks() -> None:
    case = {"model_config": TINY_CONFIG | {"architectures": [NEW]}, "gpu": "H100", "max_model_len": 128}
    assert size_case(case | {"vllm_version": "0.33"})["verdict"] == "Fits"
    with pytest.raises(CaseError) as caught:
        size_case(case | {"vllm_version": "0.32"})
    assert str(caught.value).startswith("model_config:")
    assert "needs vLLM 0.33" in str(caught.value)


GEMMA_4 = "google/gemma-4-26B-A4B"
LONGEST_VIDEO = 32 * 78
QWEN_VL = "Qwen/Qwen3-VL-8B-Instruct"
NOT_CUT = ["--disable-chunked-mm-input"]
ITEM_FIELD = "spec.serving.maxNumBatchedTokens"


def item_problems(model: str, tokens: int | None, *extra_args: str) -> list[Problem]:
    serving: dict[str, Any] = {"maxModelLen": 16384, "maxNumSeqs": 16}
    if tokens is not None:
        serving["maxNumBatchedTokens"] = tokens
    body = {"target": {"model": model}, "serving": serving, "engine": {"extraArgs": list(extra_args)}}
    problems = facts_problems(gather_facts(SpecDecodeDeploymentSpec.model_validate(body)))
    return [problem for problem in problems if problem.field == ITEM_FIELD]


@pytest.mark.parametrize("model", [GEMMA_4, "google/gemma-3-27b-it"])
def test_default_batched_tokens_hold_the_largest_multimodal_item(model: str) -> None:
    assert item_problems(model, None) == []


def test_batched_tokens_must_hold_the_longest_video() -> None:
    assert item_problems(GEMMA_4, LONGEST_VIDEO) == []
    problem = item_problems(GEMMA_4, LONGEST_VIDEO - 1)[0]
    assert problem.value == str(LONGEST_VIDEO - 1)
    assert f"use {LONGEST_VIDEO} or more" in problem.message


@pytest.mark.parametrize(
    "extra_args",
    [["--language-model-only"], ["--limit-mm-per-prompt.video=0"], ["--limit-mm-per-prompt", '{"video": 0}']],
    ids=str,
)
def test_user_multimodal_limits_skip_the_item_check(extra_args: list[str]) -> None:
    assert item_problems(GEMMA_4, 2048, *extra_args) == []


def test_item_check_applies_without_chunked_multimodal_input() -> None:
    assert item_problems(QWEN_VL, 2048) == []
    assert item_problems(QWEN_VL, 2048, *NOT_CUT)


LLAMA_8B, LLAMA_70B = "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-70B-Instruct"
EAGLE3_HEAD = "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"
SORTED = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True}


def pair(target: str, draft: str, method: str = "draft_model", **spec: Any) -> dict[str, Any]:
    speculation = {"method": method, "numSpeculativeTokens": 3, "draft": {"model": draft}}
    return {"target": {"model": target}, "speculation": speculation, **spec}


def refusals(spec: dict[str, Any]) -> list[str]:
    try:
        valid_facts(SpecDecodeDeploymentSpec.model_validate(spec))
    except InvalidSpecError as error:
        return [str(problem) for problem in error.problems]
    return []


def at_tensor(spec: dict[str, Any], remedy: re.Match[str]) -> dict[str, Any]:
    return {**spec, "parallelism": {"tensor": int(remedy[1])}}


def with_draft(spec: dict[str, Any], remedy: re.Match[str]) -> dict[str, Any]:
    return {**spec, "speculation": {**spec["speculation"], "draft": {"model": remedy[1]}}}


def with_method(spec: dict[str, Any], remedy: re.Match[str]) -> dict[str, Any]:
    return {**spec, "speculation": {**spec["speculation"], "method": remedy[1]}}


def without_draft(spec: dict[str, Any], remedy: re.Match[str]) -> dict[str, Any]:
    return {**spec, "speculation": {"method": remedy[1], "numSpeculativeTokens": 3}}


def at_version(spec: dict[str, Any], remedy: re.Match[str]) -> dict[str, Any]:
    return {**spec, "engine": {"version": remedy[1]}}


GPTQ = {"target": {"model": "acme/gptq", "config": {**TINY_CONFIG, "quantization_config": SORTED}}}
OTHER_VOCABULARY = {"model": "acme/own", "config": {**TINY_CONFIG, "vocab_size": 1000}}

CASES: dict[str, Any] = {
    "padding of Qwen2.5": (
        pair("Qwen/Qwen2.5-72B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"),
        r"one family, padded differently.*: choose (\S+), which has 152064$",
        with_draft,
    ),
    "padding of Gemma 3": (
        pair("google/gemma-3-27b-it", "google/gemma-3-1b-it"),
        r"one family, padded differently.*: choose (\S+), which has 262208$",
        with_draft,
    ),
    "padding, and a split that not each draft takes": (
        pair("google/gemma-3-27b-it", "google/gemma-3-1b-it", parallelism={"tensor": 16}),
        r"choose (\S+), which has 262208$",
        with_draft,
    ),
    "padding, and a version that drafts with one kind of layer": (
        pair("google/gemma-3-27b-it", "google/gemma-3-1b-it", engine={"version": "0.28"}),
        r"choose a draft whose vocab_size is 262208, or use method: (\w+), which needs no draft$",
        without_draft,
    ),
    "another family": (
        pair(LLAMA_70B, "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
        r"vLLM wants the same: choose (\S+), which has 128256$",
        with_draft,
    ),
    "a vocabulary of its own": (
        {**pair("acme/own", "Qwen/Qwen3-0.6B"), "target": OTHER_VOCABULARY},
        r"vocab_size is 1000, or use method: (\w+), which needs no draft$",
        without_draft,
    ),
    "a head as a draft model": (
        pair(LLAMA_8B, EAGLE3_HEAD),
        r"is a draft head: use method: (\w+), or name a complete model for method draft_model$",
        with_method,
    ),
    "a head that only its name tells": (
        pair("meta-llama/Meta-Llama-3.1-70B", "yuhuili/EAGLE-LLaMA3-Instruct-70B"),
        r"is a draft head: use method: (\w+), or name a complete model for method draft_model$",
        with_method,
    ),
    "a head of another method": (
        pair(LLAMA_8B, EAGLE3_HEAD, "eagle"),
        r"is a head for method (\w+): use that",
        with_method,
    ),
    "a model as a head": (
        pair(LLAMA_8B, "meta-llama/Llama-3.2-1B-Instruct", "eagle3"),
        r"such as (\S+), or use method: draft_model$",
        with_draft,
    ),
    "a model as a head, for good": (
        pair(LLAMA_8B, "meta-llama/Llama-3.2-1B-Instruct", "eagle3"),
        r"or use method: (draft_model)$",
        with_method,
    ),
    "a head for another target": (
        pair(LLAMA_8B, "AngelSlim/Qwen3-8B_eagle3", "eagle3"),
        rf"choose a head that was made for {LLAMA_8B}, such as (\S+)$",
        with_draft,
    ),
    "a head for a target whose heads are only listed": (
        pair("Qwen/Qwen3-32B", "AngelSlim/Qwen3-8B_eagle3", "eagle3"),
        r"choose a head that was made for Qwen/Qwen3-32B, such as (\S+)$",
        with_draft,
    ),
    "sorted inputs at tensor 1": (
        {**GPTQ, "parallelism": {"tensor": 1}},
        r"^spec.target.model: acme/gptq: .*or vLLM ([\d.]+), which still loads it$",
        at_version,
    ),
    "heads that 8 does not divide": (
        {"target": {"model": "Qwen/Qwen2.5-7B"}, "parallelism": {"tensor": 8}},
        r"28 of Qwen/Qwen2.5-7B does not divide over tensor 8; use 1, 2 or (\d+)$",
        at_tensor,
    ),
    "a draft that splits less far than its target": (
        pair("Qwen/Qwen2.5-72B-Instruct", "Qwen/Qwen2.5-7B-Instruct", parallelism={"tensor": 8}),
        r"draft: .*; use 1, 2 or (\d+)$",
        at_tensor,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_fix_in_a_refusal_is_accepted(case: str) -> None:
    spec, pattern, followed = CASES[case]
    found = [remedy for refusal in refusals(spec) if (remedy := re.search(pattern, refusal))]
    assert found, refusals(spec)
    assert refusals(followed(spec, found[0])) == []


def test_head_is_not_refused_because_of_its_folder() -> None:
    """The rule about folders is for models of their own."""
    assert not [each for each in refusals(pair(LLAMA_8B, EAGLE3_HEAD)) if "folder" in each]
    own = {"model": "eagle3-project/llama", "config": {**TINY_CONFIG, "vocab_size": 128_256}}
    body = pair(LLAMA_8B, "")
    body["speculation"]["draft"] = own
    (told,) = refusals(body)
    assert "use method eagle3" in told


def test_no_method_is_suggested_that_would_be_refused() -> None:
    (told,) = refusals(
        pair("google/gemma-3-27b-it", "google/gemma-3-1b-it", "medusa") | {"engine": {"version": "0.32"}}
    )
    assert told.endswith("google/gemma-3-27b-it")


def geometry_or_none(model: str) -> ModelGeometry | None:
    try:
        return find_geometry(model)
    except GeometryError:
        return None


def test_every_catalogue_head_maps_to_its_method() -> None:
    heads = {model: geometry for model in known_models() if (geometry := geometry_or_none(model)) and geometry.head}
    assert len(heads) > 30
    words = {
        "mistral": Method.EAGLE,
        "dflash": Method.DFLASH,
        "dspark": Method.DSPARK,
        "gemma-4": Method.MTP,
        "muse-glimmer-30b-assistant": Method.DFLASH,
    }
    by_name = {model: method for word, method in words.items() for model in heads if word in model.lower()}
    assert {model: method_of_head(geometry) for model, geometry in heads.items()} == dict.fromkeys(
        heads, Method.EAGLE3
    ) | by_name
