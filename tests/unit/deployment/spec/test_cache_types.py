"""KV cache types that vLLM refuses: bfloat16 beside a float16 model from 0.33 on, fp8_e4m3 of sparse attention."""

from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.validation import valid_facts
from specdecode_operator.problems import InvalidSpecError, Problem
from specdecode_operator.sizing import kernel_support
from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.geometry import LatentAttention, ModelGeometry
from tests.support.small_models import small

FLOAT16 = small("LlamaForCausalLM", torch_dtype="float16")


def problems(config: dict[str, Any], version: str = "0.33", **serving: str) -> list[Problem]:
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
def test_the_checkpoint_says_which_type_the_cache_has(config: dict[str, Any]) -> None:
    (problem,) = problems(config)
    assert (problem.field, problem.value) == ("spec.serving.kvCacheDtype", "bfloat16")
    assert "some/model is in float16: write auto, or serving.dtype: bfloat16" in problem.message


def test_what_vllm_takes_passes() -> None:
    assert problems(FLOAT16, version="0.32") == []
    assert problems(FLOAT16, dtype="bfloat16") == []
    assert problems(FLOAT16, kvCacheDtype="auto") == []
    assert problems(small("LlamaForCausalLM")) == []
    # vLLM loads it in bfloat16.
    assert problems(small("LlamaForCausalLM", torch_dtype="float32")) == []


@pytest.mark.parametrize("wanted", ["auto", "fp8_e4m3"])
def test_sparse_attention_takes_fp8_e4m3_on_blackwell(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    # vllm/v1/attention/backends/mla/flashinfer_mla_sparse.py, supported_kv_cache_dtypes, on compute capability 10.
    generations = {"NVIDIA-B200": "Blackwell", "NVIDIA-H200": "Hopper"}
    monkeypatch.setattr(kernel_support, "generation_of", generations.get)
    sparse = find_geometry("deepseek-ai/DeepSeek-V3.2")
    assert sparse is not None
    scaled = replace(sparse, cache_element_bytes=1)
    refused = kernel_support.cache_dtype_problem
    assert refused(scaled, wanted, "0.29", ["NVIDIA-B200"]) is None
    for products in ([], ["NVIDIA-H200"], ["NVIDIA-B200", "NVIDIA-H200"], ["made-up"]):
        assert refused(scaled, wanted, "0.29", products)


@pytest.mark.parametrize("wanted", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("version", ["0.30", "0.33.0", "0.40"])
def test_sparse_attention_takes_fp8_e4m3_on_hopper_from_0_30_on(version: str, wanted: str) -> None:
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
