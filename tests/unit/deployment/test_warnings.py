"""Notes and warnings in the condition Planned."""

from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.models.model_locations import NO_MODELS
from specdecode_operator.deployment.validation import valid_facts
from specdecode_operator.deployment.warnings import plan_notes, plan_warnings, size_doubts, spec_doubts, token_doubts
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, find_profile

LATENT = "deepseek-ai/DeepSeek-V2-Lite"
CPU = {"type": "CPU", "kvCacheGiB": 4, "memoryGiB": 64, "cpuCores": 8}


def told(model: str = LATENT, version: str = "0.33", accelerator: dict[str, Any] = CPU, **serving: Any) -> list[str]:
    body = {
        "target": {"model": model},
        "accelerator": accelerator,
        "engine": {"version": version, "image": "registry.local/vllm:1"},
        "serving": {"blockSize": 128, "maxModelLen": 4096, **serving},
    }
    notes = plan_notes(valid_facts(SpecDecodeDeploymentSpec.parse(body)))
    return [note for note in notes if "latent attention" in note]


@pytest.mark.parametrize(
    ("version", "where"), [("0.28", "on CPU:"), ("0.29", "on a CPU without AMX:"), ("0.33", "on a CPU without AMX:")]
)
def test_ignored_block_size_of_latent_attention_on_cpu_is_noted(version: str, where: str) -> None:
    (note,) = told(version=version)
    assert note.startswith(f"latent attention {where} vLLM {version} ignores serving.blockSize")
    assert "blocks of 16 tokens and steps of 4096," in note


def test_latent_attention_note_is_absent_for_other_models_and_gpus() -> None:
    assert told("Qwen/Qwen3-8B") == []
    assert told(accelerator={"products": ["NVIDIA-H200"]}, blockSize=64) == []


DELTA_NET = "Qwen/Qwen3.5-27B"
NGRAM = {"method": "ngram", "ngram": {"promptLookupMin": 2, "promptLookupMax": 5}}
SUFFIX = {"method": "suffix"}


def warned(target: str, speculation: dict[str, Any]) -> list[str]:
    body = {
        "target": {"model": target},
        "speculation": {"numSpeculativeTokens": 5, **speculation},
        "serving": {"maxModelLen": 32768},
        "engine": {"image": "registry.example/vllm:v0.33.0"},
    }
    facts = valid_facts(SpecDecodeDeploymentSpec.model_validate(body))
    return [warning for warning in plan_warnings(facts, NO_MODELS, 1) if "vllm#39273" in warning]


@pytest.mark.parametrize("speculation", [NGRAM, SUFFIX], ids=["ngram", "suffix"])
def test_ngram_and_suffix_with_delta_net_are_a_warning(speculation: dict[str, Any]) -> None:
    [warning] = warned(DELTA_NET, speculation)
    assert "mtp" in warning


def test_ngram_with_plain_attention_has_no_warning() -> None:
    assert warned("Qwen/Qwen3-8B", NGRAM) == []


LOOKUP = {"method": "ngram", "numSpeculativeTokens": 4}


def sampling_warnings(accelerator: dict[str, Any] = CPU, version: str = "0.33", **spec: Any) -> list[str]:
    body = {
        "target": {"model": "Qwen/Qwen3-0.6B"},
        "speculation": LOOKUP,
        "accelerator": accelerator,
        "serving": {"maxModelLen": 4096},
        **spec,
        "engine": {"version": version, "image": "registry.local/vllm:1", **spec.get("engine", {})},
    }
    facts = valid_facts(SpecDecodeDeploymentSpec.parse(body))
    return [warning for warning in plan_warnings(facts, NO_MODELS, 1) if "vllm#55005" in warning]


@pytest.mark.parametrize("version", [*KNOWN_VERSIONS, "0.99"])
def test_speculation_on_cpu_warns_of_lost_temperatures(version: str) -> None:
    (warning,) = sampling_warnings(version=version)
    assert f"vLLM {version}" in warning


def test_lost_temperatures_are_no_warning_without_the_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version with the fix says so in its file of operator/vllm/data."""
    fixed = replace(find_profile("0.33"), loses_sampling_on_cpu=False)
    monkeypatch.setattr("specdecode_operator.deployment.spec_facts.find_profile", lambda _: fixed)
    assert sampling_warnings() == []


@pytest.mark.parametrize(
    "spec",
    [
        {"accelerator": {"products": ["NVIDIA-H200"]}},
        {"speculation": {"method": "none"}},
        {"speculation": None},
        {"engine": {"replay": {"trace": {"configMap": {"name": "captures"}, "path": "trace.jsonl"}}}},
    ],
    ids=["gpu", "none", "plain", "replay"],
)
def test_lost_temperatures_do_not_concern_other_engines(spec: dict[str, Any]) -> None:
    assert sampling_warnings(**spec) == []


def doubts(spec: dict[str, Any]) -> dict[str, str]:
    """Return the warnings about fields of a spec, by field."""
    facts = valid_facts(SpecDecodeDeploymentSpec.parse(spec))
    found = [*spec_doubts(facts.spec, facts.profile), *token_doubts(facts.spec), *size_doubts(facts)]
    assert {str(each) for each in size_doubts(facts)} <= set(plan_warnings(facts, NO_MODELS, 1))
    return {each.field: each.message for each in found}


OPEN = {"target": {"model": "Qwen/Qwen3-8B"}}
GATED = {"target": {"model": "meta-llama/Llama-3.1-8B-Instruct"}}
DRAFT = {"method": "draft_model", "numSpeculativeTokens": 3}
SHARE = "gpuMemoryUtilizationPercent"
FIX = "spec.models.hubTokenSecret"


@pytest.mark.parametrize(
    ("spec", "field", "words"),
    [
        (GATED, "spec.target.model", FIX),
        ({"target": {"model": "google/gemma-3-4b-it"}}, "spec.target.model", FIX),
        (OPEN | {"engine": {"image": "vllm/vllm-openai:latest"}}, "spec.engine.image", "the tag latest may"),
        (OPEN | {"engine": {"image": "example.org/engine:dev"}}, "spec.engine.image", "the tag dev may"),
        (
            OPEN | {"serving": {"gpuMemoryUtilizationPercent": 1}},
            "spec.serving.gpuMemoryUtilizationPercent",
            "write 92",
        ),
        (
            OPEN | {"speculation": DRAFT | {"draft": {"model": "Qwen/Qwen3-32B"}}},
            "spec.speculation.draft.model",
            "has 61.0 GiB of weights, and its target Qwen/Qwen3-8B has 15.3 GiB",
        ),
    ],
    ids=str,
)
def test_doubtful_field_has_a_warning(spec: dict[str, Any], field: str, words: str) -> None:
    (found,) = doubts(spec).items()
    assert (found[0], words in found[1]) == (field, True)


@pytest.mark.parametrize(
    "spec",
    [
        OPEN,
        {"target": {"model": "google/gemma-4-E2B-it"}},
        GATED | {"models": {"hubTokenSecret": {"name": "hf", "key": "token"}}},
        GATED | {"models": {"volume": {"persistentVolumeClaim": {"claimName": "models"}}}},
        GATED | {"engine": {"env": [{"name": "HF_ENDPOINT", "value": "https://mirror.example"}]}},
        OPEN | {"engine": {"image": "vllm/vllm-openai:v0.33.0"}},
        OPEN | {"engine": {"image": f"example.org/engine:dev@sha256:{'0' * 64}"}},
        OPEN | {"serving": {SHARE: 2}},
        OPEN | {"speculation": DRAFT | {"draft": {"model": "Qwen/Qwen3-0.6B"}}},
    ],
    ids=str,
)
def test_valid_fields_have_no_warning(spec: dict[str, Any]) -> None:
    assert doubts(spec) == {}
