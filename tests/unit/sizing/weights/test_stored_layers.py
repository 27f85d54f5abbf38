"""How checkpoints and kernels store single layers: zero points, padding, and layers that are left alone."""

from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.enums import Precision
from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.families.architectures import geometry_from_config
from specdecode_operator.sizing.geometry import (
    DEFAULT_FORMATS,
    LatentAttention,
    Layer,
    ModelGeometry,
    SelectiveScan,
    StoredWeights,
)
from specdecode_operator.sizing.memory.activation import on_product
from specdecode_operator.sizing.memory.budget import EngineLimits, Pair, Parallelism
from specdecode_operator.sizing.memory.kv_cache import stage_weights
from specdecode_operator.sizing.rank_layers import LinearLayer, Split, rank_layer
from specdecode_operator.sizing.tensor_parallel import tensor_problems
from specdecode_operator.sizing.weights import checkpoint_disagreement, layer_bytes, takes_marlin, weight_bytes
from tests.support.objects import TINY_CONFIG
from tests.unit.sizing.weights.test_quantized_checkpoints import compressed

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def tiny(quantization: dict[str, Any], **changes: Any) -> ModelGeometry:
    """Four layers: hidden size 256, four heads of 64 and two for keys and values, 512 wide between."""
    return geometry_from_config("tiny", {**TINY_CONFIG, **changes, "quantization_config": quantization})


def stored(geometry: ModelGeometry) -> int:
    assert geometry.checkpoint_precision is not None
    return weight_bytes(geometry, geometry.checkpoint_precision, Split(1))


@pytest.mark.parametrize("bits", [4, 8])
def test_an_asymmetric_checkpoint_has_a_zero_point_for_each_group(bits: int) -> None:
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
def test_a_glob_names_whole_parts_of_modules(left_out: str, as_if: list[str]) -> None:
    assert stored(tiny(BLOCKS | {"modules_to_not_convert": [left_out]})) == stored(
        tiny(BLOCKS | {"modules_to_not_convert": as_if})
    )


def test_layers_that_are_left_out_take_more() -> None:
    assert stored(tiny(BLOCKS | {"modules_to_not_convert": ["mlp.down_proj"]})) > stored(tiny(BLOCKS))


def test_files_are_compared_in_the_checkpoints_own_precision() -> None:
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
def test_experts_in_mxfp4_are_padded(tensor: int, hidden: tuple[int, int], width: int) -> None:
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
def test_the_kernel_of_a_product_decides_what_experts_of_gpt_oss_take(
    model: str, product: str, version: str, logged_gib: float, limits: EngineLimits
) -> None:
    geometry = find_geometry(model)
    assert geometry is not None
    limited = replace(limits, engine_version=version)
    pair = on_product(Pair(geometry, Precision.MXFP4, None, None, "none", 0, limited), product)
    stage = stage_weights(pair, Parallelism())[0]
    assert stage.target_bytes / 2**30 == pytest.approx(logged_gib, rel=0.01)


def test_scales_of_triton_are_swizzled_in_tiles(limits: EngineLimits) -> None:
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


def test_a_state_of_mamba_1_stays_in_16_bits(llama_8b: ModelGeometry) -> None:
    layer = Layer(SelectiveScan(width=8192, state_size=16, step_rank=256, conv_kernel=4), None)
    eight, sixteen = (
        layer_bytes(layer, llama_8b, DEFAULT_FORMATS[each], Split(2)).mixer_bytes
        for each in (Precision.FP8, Precision.BF16)
    )
    # In, what goes into and out of the state, the time step with its bias, out.
    assert sixteen == 2 * (4096 * 8192 + 4096 * (256 + 32) + (256 + 1) * 4096 + 4096 * 4096)
    assert eight == sixteen


def test_the_compressions_of_latent_attention_are_two_layers_in_checkpoints() -> None:
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
def test_experts_that_marlin_takes(group_size: int, part: int, hidden: int, *, taken: bool, widens: bool) -> None:
    up = LinearLayer("mlp.experts.up", hidden, 2 * part, widens=True, merged=(part, part))
    down = LinearLayer("mlp.experts.down", part, hidden)
    assert takes_marlin(group_size, up if widens else down) is taken


def test_keys_and_values_that_cannot_be_copied_evenly_are_told() -> None:
    geometry = geometry_from_config("tiny", {**TINY_CONFIG, "num_attention_heads": 12, "num_key_value_heads": 4})
    (problem,) = [each for each in tensor_problems(geometry, 6) if each.field == "num_key_value_heads"]
    assert problem.value == "4"
    assert "num_key_value_heads 4" in problem.message
    assert not [each for each in tensor_problems(geometry, 12) if each.field == "num_key_value_heads"]
