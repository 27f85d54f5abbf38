"""A KV cache in bfloat16 beside a model that vLLM runs in float16 by itself: refused from 0.33 on."""

from typing import Any

import pytest

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.spec.validation import valid_facts
from specdecode_operator.problems import InvalidSpecError, Problem
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
