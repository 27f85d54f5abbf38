"""What a refusal tells to write instead helps: each remedy is followed, and nothing is refused any more."""

import re
from typing import Any

import pytest

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.validation import valid_facts
from specdecode_operator.enums import Method
from specdecode_operator.problems import InvalidSpecError
from specdecode_operator.sizing.catalogue import find_geometry, known_models
from specdecode_operator.sizing.errors import GeometryError
from specdecode_operator.sizing.families.draft_heads import method_of_head
from specdecode_operator.sizing.geometry import ModelGeometry
from tests.support.objects import TINY_CONFIG

LLAMA_8B, LLAMA_70B = "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-70B-Instruct"
HEAD = "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"
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
        r"choose a draft whose vocab_size is 262208, or use method: (\w+), which needs none$",
        without_draft,
    ),
    "another family": (
        pair(LLAMA_70B, "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
        r"vLLM wants the same: choose (\S+), which has 128256$",
        with_draft,
    ),
    "a vocabulary of its own": (
        {**pair("acme/own", "Qwen/Qwen3-0.6B"), "target": OTHER_VOCABULARY},
        r"vocab_size is 1000, or use method: (\w+), which needs none$",
        without_draft,
    ),
    "a head as a draft model": (
        pair(LLAMA_8B, HEAD),
        r"is a draft head.*: use method: (\w+), or name one$",
        with_method,
    ),
    "a head that only its name tells": (
        pair("meta-llama/Meta-Llama-3.1-70B", "yuhuili/EAGLE-LLaMA3-Instruct-70B"),
        r"is a draft head.*: use method: (\w+), or name one$",
        with_method,
    ),
    "a head of another method": (pair(LLAMA_8B, HEAD, "eagle"), r"is a head for method (\w+): use that", with_method),
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
def test_what_a_refusal_tells_to_write_is_taken(case: str) -> None:
    spec, pattern, followed = CASES[case]
    found = [remedy for refusal in refusals(spec) if (remedy := re.search(pattern, refusal))]
    assert found, refusals(spec)
    assert refusals(followed(spec, found[0])) == []


def test_a_head_is_not_told_to_move_to_another_folder() -> None:
    """The rule about folders is for models of their own."""
    assert not [each for each in refusals(pair(LLAMA_8B, HEAD)) if "folder" in each]
    own = {"model": "eagle3-project/llama", "config": {**TINY_CONFIG, "vocab_size": 128_256}}
    body = pair(LLAMA_8B, "")
    body["speculation"]["draft"] = own
    (told,) = refusals(body)
    assert "if it is such a head, use method eagle3, else serve it from a folder" in told


def test_no_method_is_named_that_would_be_refused_too() -> None:
    (told,) = refusals(
        pair("google/gemma-3-27b-it", "google/gemma-3-1b-it", "medusa") | {"engine": {"version": "0.32"}}
    )
    assert told.endswith("needs a head: choose a head that was made for google/gemma-3-27b-it")


def test_a_head_that_only_its_name_tells_is_no_target() -> None:
    (told,) = refusals({"target": {"model": "yuhuili/EAGLE-LLaMA3-Instruct-8B"}})
    assert "is a draft head" in told


def geometry_or_none(model: str) -> ModelGeometry | None:
    try:
        return find_geometry(model)
    except GeometryError:
        return None


def test_every_head_of_the_catalogue_is_known_by_its_method() -> None:
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
