"""Quantized checkpoints: bytes as vLLM 0.32 has them, the KV cache they ask for, splits they do not allow."""

from typing import Any

import pytest

from specdecode_operator.enums import Precision
from specdecode_operator.sizing.catalogue import find_entry, find_geometry
from specdecode_operator.sizing.families.architectures import geometry_from_config
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.memory.kv_cache import cached_layers
from specdecode_operator.sizing.rank_layers import Split
from specdecode_operator.sizing.tensor_parallel import supported_tensors, tensor_problems
from specdecode_operator.sizing.weights import weight_bytes

Config = dict[str, Any]

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MODELOPT_FP8 = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
FP8_CACHE = {"num_bits": 8, "type": "float", "dynamic": False}


def compressed(bits: int, kind: str, strategy: str, *, inputs: Config | None = None, **weights: Any) -> Config:
    scheme = {"num_bits": bits, "type": kind, "strategy": strategy, **weights}
    groups = {"group_0": {"weights": scheme, "input_activations": inputs}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}


def gptq(bits: int, group_size: int, **more: Any) -> Config:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, **more}


def modelopt_file(cache: str | None) -> Config:
    return {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": cache, "exclude_modules": ["lm_head"]}}


def shortened(model: str, num_layers: int, quantization: Config) -> ModelGeometry:
    entry = find_entry(model)
    assert entry is not None
    config = {**entry.config, "num_hidden_layers": num_layers, "quantization_config": quantization}
    return geometry_from_config("short", config)


def qwen3_moe(quantization: Config) -> ModelGeometry:
    return shortened("Qwen/Qwen3-30B-A3B", 2, quantization)


@pytest.mark.parametrize(
    ("quantization", "tensor", "expected_bytes"),
    [
        (BLOCKS, 2, 1_245_882_000),
        # A part of 192 is no multiple of 128: blocks of 64.
        (BLOCKS, 4, 623_435_152),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, 4, 623_140_920),
        ({"quant_method": "fp8", "activation_scheme": "static"}, 4, 623_143_008),
        (MODELOPT_FP8, 4, 623_143_008),
        ({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}, 4, 623_143_008),
        (compressed(8, "float", "tensor", inputs={"dynamic": False}), 4, 623_143_028),
        (compressed(8, "float", "channel", inputs={"dynamic": True}), 4, 625_655_844),
        (compressed(8, "int", "channel", inputs={"dynamic": True}), 4, 625_655_844),
        (compressed(8, "int", "channel"), 4, 624_398_980),
        (compressed(4, "int", "group", group_size=64), 4, 476_912_772),
        (compressed(4, "float", "tensor_group", group_size=16), 4, 486_665_292),
        (compressed(4, "float", "tensor_group", group_size=16, inputs={"dynamic": "local"}), 4, 486_665_332),
        (MODELOPT_FP8 | {"quant_algo": "NVFP4", "config_groups": {}}, 4, 486_665_312),
    ],
)
def test_bytes_of_experts_attention_and_router(quantization: Config, tensor: int, expected_bytes: int) -> None:
    geometry = qwen3_moe(quantization)
    assert geometry.checkpoint_precision is not None
    assert weight_bytes(geometry, geometry.checkpoint_precision, Split(tensor)) == expected_bytes


def test_a_router_that_the_checkpoint_leaves_out_keeps_16_bits() -> None:
    left_out = BLOCKS | {"modules_to_not_convert": ["model.layers.0.mlp.gate"]}
    more = weight_bytes(qwen3_moe(left_out), Precision.FP8, Split(2)) - weight_bytes(
        qwen3_moe(BLOCKS), Precision.FP8, Split(2)
    )
    assert more == 128 * 2048 - 4 * 2048 // 128


@pytest.mark.parametrize("quantization", [gptq(4, 128), {"quant_method": "awq", "bits": 4, "group_size": 128}])
def test_routers_of_awq_and_gptq_keep_16_bits(quantization: Config) -> None:
    left_out = quantization | {"modules_to_not_convert": ["mlp.gate"]}
    bytes_of = [weight_bytes(qwen3_moe(section), Precision.INT4, Split(2)) for section in (quantization, left_out)]
    assert bytes_of[0] == bytes_of[1]


@pytest.mark.parametrize(
    ("quantization", "token_bytes"),
    [
        (BLOCKS, 2),
        (BLOCKS | {"kv_cache_scheme": FP8_CACHE}, 2),
        (compressed(8, "float", "channel", inputs={}) | {"kv_cache_scheme": FP8_CACHE}, 1),
        (MODELOPT_FP8 | {"kv_cache_scheme": FP8_CACHE}, 1),
        (MODELOPT_FP8 | {"kv_cache_scheme": FP8_CACHE | {"dynamic": True}}, 2),
        (modelopt_file("FP8"), 1),
        (modelopt_file(None), 2),
    ],
)
def test_the_checkpoint_decides_what_the_cache_holds(quantization: Config, token_bytes: int) -> None:
    geometry = qwen3_moe(quantization)
    draft = find_geometry("meta-llama/Llama-3.2-1B")
    assert draft is not None
    own, its_drafts = cached_layers(geometry, draft, 1, 1, None)[0]
    # Four heads of 128 for keys and values, eight of 64 in the draft, which follows the target.
    assert own.layer.token_bytes == 2 * 4 * 128 * token_bytes
    assert its_drafts.layer.token_bytes == 2 * 8 * 64 * token_bytes
    assert cached_layers(geometry, None, 1, 1, 2)[0][0].layer.token_bytes == 2 * 4 * 128 * 2


def test_latent_attention_does_not_follow_compressed_tensors() -> None:
    asked = compressed(8, "float", "channel", inputs={}) | {"kv_cache_scheme": FP8_CACHE}
    latent = shortened("deepseek-ai/DeepSeek-V2-Lite", 3, asked)
    assert cached_layers(latent, None, 1, 1, None)[0][0].layer.token_bytes == (512 + 64) * 2


@pytest.mark.parametrize(
    ("quantization", "tensor", "version", "allowed"),
    [
        # 192 and 96 are cut to blocks of 64 and 32 from 0.29 on; compressed-tensors never cuts.
        (BLOCKS, 2, None, True),
        (BLOCKS, 4, None, False),
        (BLOCKS, 4, "0.28.0", False),
        (BLOCKS, 4, "0.29.0", True),
        (BLOCKS, 8, "0.32.0", True),
        (compressed(8, "float", "block", block_structure=[128, 128], inputs={}), 4, "0.32.0", False),
        # The kernel of AWQ and GPTQ halves its groups, that of compressed-tensors does not.
        (gptq(4, 128), 4, "0.32.0", True),
        (compressed(4, "int", "group", group_size=128), 2, "0.32.0", True),
        (compressed(4, "int", "group", group_size=128), 4, "0.32.0", False),
        (gptq(4, 128, desc_act=True), 1, "0.29.0", True),
        (gptq(4, 128, desc_act=True), 1, "0.30.0", False),
        (gptq(4, 128, desc_act=True), 1, None, False),
        (gptq(4, -1, desc_act=True), 1, None, True),
    ],
)
def test_splits_that_kernels_take(quantization: Config, tensor: int, version: str | None, allowed: bool) -> None:
    problems = tensor_problems(qwen3_moe(quantization), tensor, engine_version=version)
    assert (problems == ()) is allowed, problems


def test_what_is_supported_depends_on_the_version() -> None:
    assert supported_tensors([(qwen3_moe(BLOCKS), None)]) == (1, 2)
    assert supported_tensors([(qwen3_moe(BLOCKS), None)], engine_version="0.32.0") == (1, 2, 4, 8)


def test_a_version_must_be_one() -> None:
    with pytest.raises(ValueError, match=r"0\.32\.0"):
        tensor_problems(qwen3_moe(BLOCKS), 2, engine_version="newest")


@pytest.mark.parametrize("tensor", [1, 2])
def test_dense_widths_may_end_in_half_a_block(tensor: int) -> None:
    # 10,944 wide: one GPU merges gate and up all the same, two cut the inputs of the projection down.
    problems = tensor_problems(shortened("deepseek-ai/DeepSeek-V2-Lite", 3, BLOCKS), tensor)
    # So do its experts, 1,408 wide.
    told = ["intermediate_size", "moe_intermediate_size"] if tensor > 1 else []
    assert [problem.field for problem in problems] == told


def test_nvfp4_groups_must_not_be_cut() -> None:
    modelopt = MODELOPT_FP8 | {"quant_algo": "NVFP4", "config_groups": {}}
    # 10,944 / 8 is 85 groups of 16 and a half.
    assert tensor_problems(shortened("deepseek-ai/DeepSeek-V2-Lite", 3, modelopt), 4) == ()
    problems = tensor_problems(shortened("deepseek-ai/DeepSeek-V2-Lite", 3, modelopt), 8)
    assert [problem.field for problem in problems] == ["intermediate_size"]
