"""Over how many GPUs a model can be split, and why not."""

from typing import Any

import pytest

from specdecode_operator.enums import Precision
from specdecode_operator.sizing.families.architectures import geometry_from_config
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.tensor_parallel import supported_tensors, tensor_problems

QWEN25_72B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "max_position_embeddings": 32768,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
}


def test_all_problems_come_at_once(llama_70b: ModelGeometry) -> None:
    problems = tensor_problems(llama_70b, 3)
    assert {(problem.field, int(problem.value)) for problem in problems} == {
        ("num_attention_heads", 64),
        ("intermediate_size", 28672),
        ("num_key_value_heads", 8),
    }
    assert all("tensor 3" in problem.message and llama_70b.name in problem.message for problem in problems)


@pytest.mark.parametrize("tensor", [1, 2, 4, 8, 16])
def test_llama_splits_over_powers_of_two(llama_70b: ModelGeometry, tensor: int) -> None:
    assert tensor_problems(llama_70b, tensor) == ()


def test_vocabulary_divides_after_padding(llama_config: dict[str, Any]) -> None:
    # 128,193 is padded to 2004 x 64.
    geometry = geometry_from_config("odd", llama_config | {"vocab_size": 128_193})
    assert tensor_problems(geometry, 8) == ()
    thirds = llama_config | {"num_attention_heads": 36, "num_key_value_heads": 12, "head_dim": 128}
    problems = tensor_problems(geometry_from_config("x", thirds | {"intermediate_size": 1536, "vocab_size": 64}), 12)
    assert [problem.field for problem in problems] == ["vocab_size"]


def test_the_draft_limits_the_pair(llama_70b: ModelGeometry, llama_config: dict[str, Any]) -> None:
    assert supported_tensors([(llama_70b, None)]) == (1, 2, 4, 8, 16, 32, 64)
    draft = geometry_from_config("draft", llama_config | {"num_attention_heads": 4, "num_key_value_heads": 2})
    assert supported_tensors([(llama_70b, None), (draft, None)]) == (1, 2, 4)


def test_int4_groups_must_not_be_cut() -> None:
    geometry = geometry_from_config("Qwen2.5-72B", QWEN25_72B)
    assert tensor_problems(geometry, 4) == ()
    assert tensor_problems(geometry, 1, Precision.INT4) == ()
    problems = tensor_problems(geometry, 4, Precision.INT4)
    assert [problem.field for problem in problems] == ["intermediate_size"]
    assert "groups of 128" in problems[0].message
    assert supported_tensors([(geometry, Precision.INT4)]) == (1,)


def test_int4_kernel_tiles_must_be_full(llama_config: dict[str, Any]) -> None:
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    config = llama_config | {"intermediate_size": 64 * 3, "quantization_config": quantization}
    problems = tensor_problems(geometry_from_config("small", config), 1)
    assert [problem.field for problem in problems] == ["intermediate_size"]
    assert "tiles" in problems[0].message


def test_fp8_blocks_must_not_be_cut(llama_config: dict[str, Any]) -> None:
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    geometry = geometry_from_config("block", llama_config | {"quantization_config": block, "intermediate_size": 256})
    assert tensor_problems(geometry, 2) == ()
    assert [problem.field for problem in tensor_problems(geometry, 4)] == ["intermediate_size"]
    assert tensor_problems(geometry, 4, Precision.BF16) == ()
