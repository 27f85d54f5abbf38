"""Bytes of weights."""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.enums import FLOAT32_BYTES, Precision
from specdecode_operator.sizing.catalogue import find_entry, find_geometry, known_models
from specdecode_operator.sizing.errors import GeometryError
from specdecode_operator.sizing.families.architectures import geometry_from_config
from specdecode_operator.sizing.families.draft_heads import mtp_head
from specdecode_operator.sizing.geometry import (
    DEFAULT_FORMATS,
    LatentAttention,
    Layer,
    ModelGeometry,
    SelectiveScan,
    StoredWeights,
    computed_in,
)
from specdecode_operator.sizing.memory.activation import on_product
from specdecode_operator.sizing.memory.budget import EngineLimits, Pair, Parallelism
from specdecode_operator.sizing.memory.kv_cache import cached_layers, stage_weights
from specdecode_operator.sizing.quantization import Checkpoint, Exclusions
from specdecode_operator.sizing.rank_layers import LinearLayer, Split, rank_layer
from specdecode_operator.sizing.tensor_parallel import supported_tensors, tensor_problems
from specdecode_operator.sizing.weights import (
    allocation_bytes,
    checkpoint_disagreement,
    expected_file_bytes,
    layer_bytes,
    loaded_head_bytes,
    parameter_count,
    takes_marlin,
    weight_bytes,
)
from tests.support.objects import TINY_CONFIG

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
def test_parameter_count_of_catalogue_models(model_id: str, parameters: int) -> None:
    geometry = find_geometry(model_id)
    assert geometry is not None
    assert parameter_count(geometry) == parameters


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


def test_allocator_rounding_uses_four_bytes_per_float32_parameter(llama_config: dict[str, Any]) -> None:
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


def test_block_fp8_checkpoint_has_one_scale_per_block(llama_config: dict[str, Any]) -> None:
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


def test_most_catalogue_models_are_sized_and_found_by_exact_name() -> None:
    sized = [model_id for model_id in known_models() if _is_sized(model_id)]
    assert len(sized) >= 100
    assert find_geometry("meta-llama/llama-3.1-8b") is None


# Bytes of safetensors files against what a config.json describes.

TABLE = 1024 * 256 * 2
LAYER = 2 * (256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 512 + 2 * 256)
TINY = 2 * TABLE + 4 * LAYER + 2 * 256
"""The tiny target as examples/tiny_pair.py writes it, counted from the shapes there."""

LLAMA_8B = 16_060_522_496
"""metadata.total_size in model.safetensors.index.json of meta-llama/Llama-3.1-8B."""


def doubt(total: int, *, head: bool = True, by_dtype: dict[str, int] | None = None, **changes: Any) -> str | None:
    geometry = geometry_from_config("tiny", {**TINY_CONFIG, **changes})
    parts = {"model.layers": 4 * LAYER, "model.visual": 3 * 2**30}
    stored = StoredWeights.of(total, by_dtype or {"BF16": total}, parts, output_head=head)
    return checkpoint_disagreement(geometry, stored)


def in_bf16(total: int) -> StoredWeights:
    return StoredWeights.of(total, {"BF16": total}, {}, output_head=True)


def test_matching_file_sizes_raise_no_doubt() -> None:
    assert doubt(TINY) is None
    assert doubt(TINY - TABLE, head=False, tie_word_embeddings=True) is None
    assert doubt(TINY, tie_word_embeddings=True) is None, "a tied head that is stored all the same is not loaded"
    assert doubt(2 * TINY, by_dtype={"F32": 2 * TINY}) is None, "float32 is loaded as 16-bit"


def test_float32_in_a_quantized_checkpoint_keeps_its_size() -> None:
    fp8 = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    total, _ = expected_file_bytes(geometry_from_config("tiny", {**TINY_CONFIG, **fp8}), output_head=True)
    assert doubt(total, by_dtype={"F32": total}, **fp8) is None


def test_file_size_two_percent_off_is_reported() -> None:
    geometry = find_geometry("meta-llama/Llama-3.1-8B-Instruct")
    assert geometry is not None
    assert checkpoint_disagreement(geometry, in_bf16(LLAMA_8B)) is None
    assert checkpoint_disagreement(geometry, in_bf16(LLAMA_8B * 102 // 100)) is not None
    assert checkpoint_disagreement(geometry, in_bf16(LLAMA_8B * 98 // 100)) is not None


@pytest.mark.parametrize(
    ("total", "changes", "words"),
    [
        (TINY + 3 * 2**30, {}, "more than the 0.0 GiB"),
        (TINY + 3 * 2**30, {}, "model.visual 3.0"),
        (TINY - LAYER, {}, "less than"),
        (TINY, {"num_hidden_layers": 3}, "more than"),
        (TINY - TABLE, {}, "less than"),
    ],
)
def test_file_size_of_another_model_is_reported(total: int, changes: dict[str, Any], words: str) -> None:
    sentence = doubt(total, **changes)
    assert sentence is not None
    assert words in sentence
    assert "tiny" in sentence


def test_head_files_may_lack_the_shared_tables() -> None:
    config = {**TINY_CONFIG, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    geometry = geometry_from_config("head", config)
    layer = LAYER + 2 * (256 * 256 + 2 * 256 * 128) + 2 * 256
    own = layer + 2 * 3 * 256 * 256 + TABLE + 2 * 256 + 8 * 1024
    assert checkpoint_disagreement(geometry, in_bf16(own)) is None
    assert checkpoint_disagreement(geometry, in_bf16(own + TABLE)) is None
    assert checkpoint_disagreement(geometry, in_bf16(own - LAYER // 2)) is not None


# How checkpoints and kernels store single layers: zero points, padding, and layers that are left alone.

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def tiny(quantization: dict[str, Any], **changes: Any) -> ModelGeometry:
    """Four layers: hidden size 256, four heads of 64 and two for keys and values, 512 wide between."""
    return geometry_from_config("tiny", {**TINY_CONFIG, **changes, "quantization_config": quantization})


def stored(geometry: ModelGeometry) -> int:
    assert geometry.checkpoint_precision is not None
    return weight_bytes(geometry, geometry.checkpoint_precision, Split(1))


@pytest.mark.parametrize("bits", [4, 8])
def test_asymmetric_checkpoint_has_a_zero_point_per_group(bits: int) -> None:
    plain, zeros = (
        stored(tiny(compressed(bits, "int", "group", group_size=64, symmetric=symmetric)))
        for symmetric in (True, False)
    )
    # Groups of inputs times outputs: queries, keys and values; output; gate and up; down.
    points = 4 * (256 + 2 * 128) + 4 * 256 + 4 * 2 * 512 + 8 * 256
    assert zeros - plain == 4 * points * bits // 8


@pytest.mark.parametrize(
    ("left_out", "as_if"),
    [
        ("model.layers.1*", ["model.layers.1.self_attn", "model.layers.1.mlp"]),
        ("*.mlp.down_proj", ["mlp.down_proj"]),
        ("*layers.?.mlp", []),
        ("*.down", []),
        ("*own_proj", ["mlp.down_proj"]),
    ],
)
def test_exclusion_globs_match_whole_module_names(left_out: str, as_if: list[str]) -> None:
    assert stored(tiny(BLOCKS | {"modules_to_not_convert": [left_out]})) == stored(
        tiny(BLOCKS | {"modules_to_not_convert": as_if})
    )


def test_excluded_layers_take_more_bytes() -> None:
    assert stored(tiny(BLOCKS | {"modules_to_not_convert": ["mlp.down_proj"]})) > stored(tiny(BLOCKS))


def test_file_size_is_compared_in_the_checkpoint_precision() -> None:
    geometry = tiny(BLOCKS, hidden_size=2048, intermediate_size=8192, vocab_size=2048)
    eight_bits = stored(geometry)
    assert checkpoint_disagreement(geometry, StoredWeights.of(eight_bits, {}, {}, output_head=True)) is None
    sixteen_bits = weight_bytes(geometry, Precision.BF16, Split(1))
    assert "more than" in str(
        checkpoint_disagreement(geometry, StoredWeights.of(sixteen_bits, {}, {}, output_head=True))
    )


@pytest.mark.parametrize(
    ("tensor", "hidden", "width"), [(1, (3072, 3072), 2944), (8, (3072, 3072), 384)], ids=["one GPU", "eight"]
)
def test_mxfp4_experts_are_padded(tensor: int, hidden: tuple[int, int], width: int) -> None:
    """gpt-oss: 128 experts of 2880, hidden size 2880; the hidden size to 256, a rank's part to 128."""
    geometry = find_geometry("openai/gpt-oss-120b")
    assert geometry is not None
    weights = (hidden[0] * 2 * width + width * hidden[1]) * 17 // 32
    biases = (2 * width + hidden[1]) * 2
    router = (2880 * 128 + 128) * 2
    found = layer_bytes(geometry.layers[0], geometry, DEFAULT_FORMATS[Precision.MXFP4], Split(tensor))
    assert found.feed_forward_bytes == 128 * (weights + biases) + router


@pytest.mark.parametrize(
    ("model", "product", "version", "logged_gib"),
    [
        ("openai/gpt-oss-20b", "NVIDIA-H100-80GB-HBM3", "0.26.0", 13.03),
        # The checkpoint's scales stay beside Triton's; 64.38 GiB is of a log of 0.11.
        ("openai/gpt-oss-120b", "NVIDIA-H100-80GB-HBM3", "0.19.0", 64.38),
        # Marlin pads the hidden size to 256, an expert's width to 128.
        ("openai/gpt-oss-20b", "NVIDIA-A100-SXM4-80GB", "0.19.0", 13.72),
    ],
)
def test_gpt_oss_weights_depend_on_the_kernel_of_the_gpu(
    model: str, product: str, version: str, logged_gib: float, limits: EngineLimits
) -> None:
    geometry = find_geometry(model)
    assert geometry is not None
    limited = replace(limits, engine_version=version)
    pair = on_product(Pair(geometry, Precision.MXFP4, None, None, "none", 0, limited), product)
    stage = stage_weights(pair, Parallelism())[0]
    assert stage.target_bytes / 2**30 == pytest.approx(logged_gib, rel=0.01)


def test_triton_mxfp4_scales_are_padded_to_tiles(limits: EngineLimits) -> None:
    geometry = find_geometry("openai/gpt-oss-20b")
    assert geometry is not None
    loaded = {}
    for version in ("0.24.0", "0.25.0"):
        limited = replace(limits, engine_version=version)
        pair = on_product(Pair(geometry, Precision.MXFP4, None, None, "none", 0, limited), "NVIDIA-H100-80GB-HBM3")
        loaded[version] = layer_bytes(
            pair.target.layers[0], pair.target, pair.target.weight_format(Precision.MXFP4), Split(1)
        ).feed_forward_bytes
    weights, biases = 3 * 2880 * 2880 // 2, 3 * 2880 * 4
    swizzled = (5888 + 3072) * 92
    router = (2880 * 32 + 32) * 2
    assert loaded["0.25.0"] == 32 * (weights + swizzled + biases) + router
    assert loaded["0.24.0"] - loaded["0.25.0"] == 32 * 3 * 2880 * 90


def test_mamba_1_mixer_stays_in_16_bits(llama_8b: ModelGeometry) -> None:
    layer = Layer(SelectiveScan(width=8192, state_size=16, step_rank=256, conv_kernel=4), None)
    eight, sixteen = (
        layer_bytes(layer, llama_8b, DEFAULT_FORMATS[each], Split(2)).mixer_bytes
        for each in (Precision.FP8, Precision.BF16)
    )
    # In, what goes into and out of the state, the time step with its bias, out.
    assert sixteen == 2 * (4096 * 8192 + 4096 * (256 + 32) + (256 + 1) * 4096 + 4096 * 4096)
    assert eight == sixteen


def test_latent_attention_compressions_are_two_parts_of_one_linear() -> None:
    latent = LatentAttention(16, 1536, 512, 128, 64, 128)
    parts = {linear.parts for linear in rank_layer(Layer(latent, None), 2048, Split(2)).linears}
    assert (1536, 512 + 64) in parts


@pytest.mark.parametrize(
    ("group_size", "part", "hidden", "taken"),
    [
        (128, 256, 256, True),
        (128, 192, 256, False),
        (64, 192, 256, True),
        (32, 96, 128, True),
        (16, 96, 128, False),
        (0, 100, 128, True),
        (128, 256, 192, False),
    ],
)
@pytest.mark.parametrize("widens", [True, False])
def test_marlin_supports_experts_of_divisible_sizes(
    group_size: int, part: int, hidden: int, *, taken: bool, widens: bool
) -> None:
    up = LinearLayer("mlp.experts.up", hidden, 2 * part, widens=True, merged=(part, part))
    down = LinearLayer("mlp.experts.down", part, hidden)
    assert takes_marlin(group_size, up if widens else down) is taken


def test_kv_heads_that_cannot_be_replicated_evenly_are_reported() -> None:
    geometry = geometry_from_config("tiny", {**TINY_CONFIG, "num_attention_heads": 12, "num_key_value_heads": 4})
    (problem,) = [each for each in tensor_problems(geometry, 6) if each.field == "num_key_value_heads"]
    assert problem.value == "4"
    assert "num_key_value_heads 4" in problem.message
    assert not [each for each in tensor_problems(geometry, 12) if each.field == "num_key_value_heads"]


# Quantized checkpoints: bytes as vLLM 0.32 has them, the KV cache they ask for, splits they do not allow.

Config = dict[str, Any]

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
def test_weight_bytes_of_quantized_expert_models(quantization: Config, tensor: int, expected_bytes: int) -> None:
    geometry = qwen3_moe(quantization)
    assert geometry.checkpoint_precision is not None
    assert weight_bytes(geometry, geometry.checkpoint_precision, Split(tensor)) == expected_bytes


def test_excluded_router_stays_in_16_bits() -> None:
    left_out = BLOCKS | {"modules_to_not_convert": ["model.layers.0.mlp.gate"]}
    more = weight_bytes(qwen3_moe(left_out), Precision.FP8, Split(2)) - weight_bytes(
        qwen3_moe(BLOCKS), Precision.FP8, Split(2)
    )
    assert more == 128 * 2048 - 4 * 2048 // 128


@pytest.mark.parametrize("quantization", [gptq(4, 128), {"quant_method": "awq", "bits": 4, "group_size": 128}])
def test_awq_and_gptq_routers_stay_in_16_bits(quantization: Config) -> None:
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
def test_checkpoint_decides_the_kv_cache_dtype(quantization: Config, token_bytes: int) -> None:
    geometry = qwen3_moe(quantization)
    draft = find_geometry("meta-llama/Llama-3.2-1B")
    assert draft is not None
    own, its_drafts = cached_layers(geometry, draft, 1, 1, None)[0]
    # Four heads of 128 for keys and values, eight of 64 in the draft, which follows the target.
    assert own.layer.token_bytes == 2 * 4 * 128 * token_bytes
    assert its_drafts.layer.token_bytes == 2 * 8 * 64 * token_bytes
    assert cached_layers(geometry, None, 1, 1, 2)[0][0].layer.token_bytes == 2 * 4 * 128 * 2


def test_latent_attention_ignores_the_compressed_tensors_cache_scheme() -> None:
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
def test_kernels_limit_the_tensor_parallel_size(
    quantization: Config, tensor: int, version: str | None, allowed: bool
) -> None:
    problems = tensor_problems(qwen3_moe(quantization), tensor, engine_version=version)
    assert (problems == ()) is allowed, problems


def test_supported_tensor_sizes_depend_on_the_version() -> None:
    assert supported_tensors([(qwen3_moe(BLOCKS), None)]) == (1, 2)
    assert supported_tensors([(qwen3_moe(BLOCKS), None)], engine_version="0.32.0") == (1, 2, 4, 8)


def test_invalid_engine_version_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.32\.0"):
        tensor_problems(qwen3_moe(BLOCKS), 2, engine_version="newest")


@pytest.mark.parametrize("tensor", [1, 2])
def test_dense_widths_may_end_in_half_a_block(tensor: int) -> None:
    # 10,944 wide: one GPU merges gate and up all the same, two cut the inputs of the projection down.
    problems = tensor_problems(shortened("deepseek-ai/DeepSeek-V2-Lite", 3, BLOCKS), tensor)
    # So do its experts, 1,408 wide.
    told = ["intermediate_size", "moe_intermediate_size"] if tensor > 1 else []
    assert [problem.field for problem in problems] == told


def test_nvfp4_groups_must_not_be_split() -> None:
    modelopt = MODELOPT_FP8 | {"quant_algo": "NVFP4", "config_groups": {}}
    # 10,944 / 8 is 85 groups of 16 and a half.
    assert tensor_problems(shortened("deepseek-ai/DeepSeek-V2-Lite", 3, modelopt), 4) == ()
    problems = tensor_problems(shortened("deepseek-ai/DeepSeek-V2-Lite", 3, modelopt), 8)
    assert [problem.field for problem in problems] == ["intermediate_size"]


# What checkpoints exclude from quantization is anybody's text: to read it leaves nothing behind in the operator.

MIB = 2**20
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1024,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}


def left_behind_bytes(work: Callable[[], None]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_many_layers_keep_little_memory() -> None:
    """Every part of every name of 1024 layers would take 300 MB."""
    checkpoint = Checkpoint(None, (Exclusions.of(("gate", "lm_head")),))

    def read_layers() -> None:
        for index in range(64):
            checkpoint.unquantized_modules(index)

    assert left_behind_bytes(read_layers) < MIB


def test_many_different_configs_keep_little_memory() -> None:
    def read_configs() -> None:
        for number in range(256):
            names = tuple(f"model.layers.{index}.{number}" for index in range(200))
            Checkpoint(None, (Exclusions.of(names),)).unquantized_modules(0)

    assert left_behind_bytes(read_configs) < 4 * MIB


def test_more_than_1024_layers_are_refused() -> None:
    assert geometry_from_config("x", LLAMA).num_layers == 1024
    with pytest.raises(GeometryError, match="between 1 and 1,024"):
        geometry_from_config("x", LLAMA | {"num_hidden_layers": 1025})


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True}


def test_modules_that_gptqmodel_skips_stay_in_16_bits() -> None:
    """As in the GPTQ builds of Qwen3.5: keys without settings say nothing, those with ``-:`` leave modules out."""
    skips: dict[str, Any] = {"dynamic": {"lm_head": {}, "-:.*attn.*": {}, "-:.*mtp.*": {}}}
    listed = {"modules_to_not_convert": ["self_attn.q_proj", "self_attn.o_proj"]}
    made = [geometry_from_config("gptq", LLAMA | {"quantization_config": GPTQ | more}) for more in (skips, listed, {})]
    skipped, left_out, whole = (weight_bytes(each, Precision.INT4, Split(1)) for each in made)
    assert skipped == left_out > whole


def test_gptq_dynamic_module_settings_are_estimated() -> None:
    mixed = GPTQ | {"dynamic": {"+:.*down_proj.*": {"bits": 8}}}
    model = geometry_from_config("gptq", LLAMA | {"quantization_config": mixed})
    assert model.estimated_because == "quantization_config.dynamic"


def test_excluded_mtp_layers_of_nemotron_stay_in_16_bits() -> None:
    """As nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4, which excludes ``mtp*``."""
    entry = find_entry("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4")
    assert entry is not None
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "mtp*"]}
    quantized, excluded = (
        mtp_head(geometry_from_config("nemotron", {**entry.config, "quantization_config": each}))
        for each in (quantization | {"ignore": ["lm_head"]}, quantization)
    )
    sizes = [loaded_head_bytes(draft, Precision.NVFP4, Split(1)) for draft in (quantized, excluded)]
    assert sizes[1] > 3 * sizes[0]
