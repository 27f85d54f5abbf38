"""Weights equal what vLLM 0.32's own classes allocate on the meta device."""

# ruff: noqa: PLR0913, PLR0917 - one argument a column of the table

from typing import Any

import pytest

from specdecode_operator.enums import FLOAT32_BYTES, Precision
from specdecode_operator.sizing.catalogue import find_geometry, known_models
from specdecode_operator.sizing.errors import GeometryError
from specdecode_operator.sizing.families.architectures import geometry_from_config
from specdecode_operator.sizing.geometry import ModelGeometry, computed_in
from specdecode_operator.sizing.rank_layers import Split
from specdecode_operator.sizing.weights import allocation_bytes, parameter_count, weight_bytes

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}

QWEN25_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
}

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}


@pytest.mark.parametrize(
    ("model_id", "parameters"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", 70_553_706_496),
        ("meta-llama/Llama-3.3-70B-Instruct", 70_553_706_496),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
    ],
)
def test_parameters_of_catalogued_models(model_id: str, parameters: int) -> None:
    geometry = find_geometry(model_id)
    assert geometry is not None
    assert parameter_count(geometry) == parameters


@pytest.mark.parametrize(
    ("name", "config", "parameters"),
    [("Qwen3-8B", QWEN3_8B, 8_190_735_360), ("Qwen2.5-7B", QWEN25_7B, 7_615_616_512)],
)
def test_parameters_of_qwen(name: str, config: dict[str, Any], parameters: int) -> None:
    assert parameter_count(geometry_from_config(name, config)) == parameters


@pytest.mark.parametrize(
    ("model", "tensor", "bf16", "eight_bit", "w4a16", "awq"),
    [
        ("70b", 1, 141_107_412_992, 72_683_242_912, 39_500_405_152, 39_767_785_472),
        ("70b", 2, 70_555_025_408, 36_345_562_528, 19_751_524_768, 19_885_211_648),
        ("8b", 1, 16_060_522_496, 9_086_706_240, 5_700_594_240, 5_727_854_592),
        ("8b", 2, 8_030_527_488, 4_544_143_936, 2_850_564_672, 2_864_193_536),
    ],
)
def test_rank_bytes_in_every_precision(
    llama_70b: ModelGeometry,
    llama_8b: ModelGeometry,
    llama_config: dict[str, Any],
    model: str,
    tensor: int,
    bf16: int,
    eight_bit: int,
    w4a16: int,
    awq: int,
) -> None:
    geometry = llama_70b if model == "70b" else llama_8b
    assert weight_bytes(geometry, Precision.BF16, Split(tensor)) == bf16
    assert weight_bytes(geometry, Precision.FP8, Split(tensor)) == eight_bit
    assert weight_bytes(geometry, Precision.INT8, Split(tensor)) == eight_bit
    assert weight_bytes(geometry, Precision.INT4, Split(tensor)) == w4a16
    big = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    config = llama_config | (big if model == "70b" else {}) | {"quantization_config": AWQ}
    assert weight_bytes(geometry_from_config("awq", config), Precision.INT4, Split(tensor)) == awq


def test_kv_heads_are_replicated_beyond_their_number(llama_8b: ModelGeometry) -> None:
    # At 16 ranks each holds one whole KV head of the 8: two ranks share one.
    per_rank = weight_bytes(llama_8b, Precision.BF16, Split(16))
    replicated = 32 * 4096 * 2 * 8 * 128 * 2  # layers x hidden x (k, v) x surplus heads x head x bytes
    norms = 65 * 4096 * 2
    whole = weight_bytes(llama_8b, Precision.BF16, Split(1))
    assert 16 * (per_rank - norms) == whole - norms + replicated


def test_what_the_allocator_rounds_counts_four_bytes_a_parameter_in_float32(llama_config: dict[str, Any]) -> None:
    """Gate and up, 2 x 1984 x 1024, take 15.5 MiB of 16 in float32, and 7.75 in 16 bits, which nothing rounds."""
    small = {"hidden_size": 1024, "intermediate_size": 1984, "num_hidden_layers": 4, "vocab_size": 1024}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    geometry = geometry_from_config("small", llama_config | small | heads)
    in_float32 = computed_in(geometry, FLOAT32_BYTES)
    whole = Split(1)
    assert weight_bytes(in_float32, Precision.BF16, whole) == 2 * weight_bytes(geometry, Precision.BF16, whole)
    assert allocation_bytes(geometry, Precision.BF16, whole) == 0
    assert allocation_bytes(in_float32, Precision.BF16, whole) == 4 * 2**19


def test_vocabulary_is_padded_to_64(llama_config: dict[str, Any]) -> None:
    padded = parameter_count(geometry_from_config("padded", llama_config | {"vocab_size": 128_193}))
    assert padded == parameter_count(geometry_from_config("full", llama_config | {"vocab_size": 128_256}))


def test_biases_count_in_full_and_stay_16_bit(llama_config: dict[str, Any]) -> None:
    plain = geometry_from_config("plain", llama_config)
    biased = geometry_from_config("biased", llama_config | {"attention_bias": True, "mlp_bias": True})
    biases = 32 * ((32 + 2 * 8) * 128 + 4096 + 2 * 14336 + 4096)
    assert parameter_count(biased) - parameter_count(plain) == biases
    for precision in Precision:
        assert weight_bytes(biased, precision, Split(1)) - weight_bytes(plain, precision, Split(1)) == 2 * biases


def test_block_fp8_checkpoint_has_a_scale_a_block(llama_config: dict[str, Any]) -> None:
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    geometry = geometry_from_config("block", llama_config | {"quantization_config": block})
    linears = 32 * (4096 * 6144 + 4096 * 4096 + 4096 * 28672 + 14336 * 4096)
    sixteen_bit = 2 * (2 * 128_256 * 4096 + 65 * 4096)
    kv_scales = 32 * 8
    assert weight_bytes(geometry, Precision.FP8, Split(1)) == linears + linears * 4 // 128**2 + sixteen_bit + kv_scales


def _is_sized(model_id: str) -> bool:
    try:
        return find_geometry(model_id) is not None
    except GeometryError as error:
        # What is not known yet says so; nothing fails in another way.
        return not error.message


def test_most_catalogued_models_have_a_geometry_and_exact_names() -> None:
    sized = [model_id for model_id in known_models() if _is_sized(model_id)]
    assert len(sized) >= 100
    assert find_geometry("meta-llama/llama-3.1-8b") is None
