"""A config.json becomes a geometry, or one error that names key, value and fix."""

from typing import Any

import pytest

from specdecode_operator.enums import Knowledge, Precision
from specdecode_operator.sizing.catalogue import find_entry
from specdecode_operator.sizing.families.architectures import GeometryError, geometry_from_config
from specdecode_operator.sizing.geometry import SelfAttention

Config = dict[str, Any]


def _refused(config: Config) -> GeometryError:
    with pytest.raises(GeometryError) as caught:
        geometry_from_config("some/model", config)
    assert "some/model" in str(caught.value)
    return caught.value


def test_llama_geometry(llama_config: Config) -> None:
    geometry = geometry_from_config("some/model", llama_config)
    assert geometry.num_layers == 32
    assert geometry.attentions == (SelfAttention(32, 8, 128),)
    assert geometry.max_position_embeddings == 131_072
    assert geometry.checkpoint_precision is None


@pytest.mark.parametrize(
    "key",
    [
        "architectures",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("absent", [True, False])
def test_a_missing_key_is_named(llama_config: Config, key: str, absent: bool) -> None:
    if absent:
        del llama_config[key]
    else:
        llama_config[key] = None
    error = _refused(llama_config)
    assert error.field == key
    assert "missing" in error.message


SIZES = [
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
]


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", [0, -1, 2**63, True, 32.0, "32", float("nan"), [32], {}])
def test_a_size_must_be_a_whole_number_in_range(llama_config: Config, key: str, value: object) -> None:
    error = _refused(llama_config | {key: value})
    assert error.field == key
    assert error.value is value
    assert key in str(error)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_key_value_heads": 7}, "num_key_value_heads"),
        ({"num_key_value_heads": 64}, "num_key_value_heads"),
        ({"num_attention_heads": 48, "num_key_value_heads": 8}, "num_attention_heads"),
        ({"head_dim": 127}, "head_dim"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"torch_dtype": "float64"}, "torch_dtype"),
        ({"dtype": "int8"}, "dtype"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"sliding_window": -1}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"type": "spiral", "factor": 4}}, "rope_scaling.type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": float("inf")}}, "rope_scaling.factor"),
        ({"rope_scaling": "llama3"}, "rope_scaling"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"architectures": ["MistralForCausalLM"], "num_key_value_heads": None}, "num_key_value_heads"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "head_dim"),
        ({"architectures": ["Qwen2ForCausalLM"], "head_dim": 64}, "head_dim"),
    ],
)
def test_contradictions_and_wrong_types(llama_config: Config, changes: Config, field: str) -> None:
    assert _refused(llama_config | changes).field == field


@pytest.mark.parametrize("architecture", ["PhiMoEForCausalLM", "FalconMambaForCausalLM", "SomethingNewForCausalLM"])
def test_other_architectures_are_estimated(llama_config: Config, architecture: str) -> None:
    model = geometry_from_config("some/model", llama_config | {"architectures": [architecture]})
    assert (model.knowledge, model.estimated_because) == (Knowledge.ESTIMATED, "architectures")


def test_an_unknown_class_is_told_before_what_its_file_lacks(llama_config: Config) -> None:
    without = {key: value for key, value in llama_config.items() if key != "hidden_size"}
    assert _refused(without | {"architectures": ["SomethingNew"]}).field == "architectures"
    assert _refused(without | {"architectures": ["SomethingNewForCausalLM"]}).field == "hidden_size"


def test_old_llama_files_have_a_kv_head_for_each_head(llama_config: Config) -> None:
    del llama_config["num_key_value_heads"]
    assert geometry_from_config("old", llama_config).attentions == (SelfAttention(32, 32, 128),)


def test_a_window_that_qwen_switches_off_is_no_window(llama_config: Config) -> None:
    config = llama_config | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096}
    unlimited = (SelfAttention(32, 8, 128, qkv_bias=True),)
    assert geometry_from_config("qwen", config | {"use_sliding_window": False}).attentions == unlimited
    assert geometry_from_config("qwen", config).attentions == unlimited
    windowed = geometry_from_config("qwen", config | {"use_sliding_window": True})
    assert (windowed.knowledge, windowed.estimated_because) == (Knowledge.ESTIMATED, "use_sliding_window")


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        (None, 131_072),
        ({"rope_type": "default"}, 131_072),
        ({"type": "linear", "factor": 2.5}, 327_680),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}, 131_072),
        ({"rope_type": "yarn", "factor": 4.0}, 524_288),
    ],
)
def test_rows_of_the_rotary_table(llama_config: Config, scaling: Config | None, positions: int) -> None:
    rope = geometry_from_config("rope", llama_config | {"rope_scaling": scaling}).ropes[0]
    assert rope.size_bytes(2) == positions * 128 * 2


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_long_rope_keeps_a_table_of_the_original_length_too(llama_config: Config, kind: str) -> None:
    """phi3_long_rope_scaled_rope.py: the caches for short and for long requests, one behind the other."""
    config = llama_config | {"original_max_position_embeddings": 4096, "rope_scaling": {"type": kind}}
    rope = geometry_from_config("rope", config).ropes[0]
    assert rope.size_bytes(2) == (4096 + 131_072) * 128 * 2


def test_rotary_tables_are_equal_however_the_file_writes_them(llama_config: Config) -> None:
    old = llama_config | {"rope_theta": 500_000.0, "rope_scaling": {"type": "linear", "factor": 8.0}}
    new = llama_config | {"rope_parameters": {"rope_type": "linear", "factor": 8, "rope_theta": 500_000}}
    assert geometry_from_config("old", old).ropes == geometry_from_config("new", new).ropes
    other = new["rope_parameters"] | {"rope_theta": 10_000}
    assert (
        geometry_from_config("x", llama_config | {"rope_parameters": other}).ropes
        != geometry_from_config("n", new).ropes
    )


def _compressed(weights: Config) -> Config:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


@pytest.mark.parametrize(
    ("quantization", "precision"),
    [
        ({"quant_method": "fp8"}, Precision.FP8),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, Precision.FP8),
        (_compressed({"num_bits": 8, "type": "float", "strategy": "channel"}), Precision.FP8),
        (_compressed({"num_bits": 8, "type": "int", "strategy": "channel"}), Precision.INT8),
        (_compressed({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}), Precision.INT4),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, Precision.INT4),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, Precision.INT4),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, Precision.INT4),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, Precision.INT4),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, Precision.INT8),
        (_compressed({"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": False}), Precision.INT4),
        ({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}, Precision.FP8),
    ],
)
def test_quantized_checkpoints(llama_config: Config, quantization: Config, precision: Precision) -> None:
    geometry = geometry_from_config("q", llama_config | {"quantization_config": quantization})
    assert geometry.checkpoint_precision is precision
    assert geometry.weight_format().precision is precision


MODELOPT_FP8 = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}


WEIGHTS = "config_groups.group_0.weights"


@pytest.mark.parametrize(
    ("quantization", "field"),
    [
        (MODELOPT_FP8 | {"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo"),
        (_compressed({"num_bits": 2, "type": "int", "strategy": "channel"}), f"{WEIGHTS}.num_bits"),
        (_compressed({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 16}), f"{WEIGHTS}.num_bits"),
        (_compressed({"num_bits": 8, "type": "float", "strategy": "block"}), f"{WEIGHTS}.block_structure"),
        ({"quant_method": "awq", "bits": 8, "group_size": 128}, "bits"),
        ({"quant_method": "bitsandbytes"}, "quant_method"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {}, "b": {}}}, "config_groups"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": True}, "lm_head"),
        ({"quantization": {"quant_algo": "FP8", "exclude_modules": ["model.norm"]}}, "quantization.exclude_modules"),
    ],
)  # fmt: skip
def test_checkpoints_that_are_estimated(llama_config: Config, quantization: object, field: str) -> None:
    model = geometry_from_config("some/model", llama_config | {"quantization_config": quantization})
    assert (model.knowledge, model.estimated_because) == (Knowledge.ESTIMATED, f"quantization_config.{field}")
    assert model.checkpoint_precision is not None


@pytest.mark.parametrize(
    ("quantization", "field"),
    [
        ({"quant_method": "mystery"}, "quant_method"),
        ({}, "quant_method"),
        ({"quant_algo": "FP8", "producer": {"name": "modelopt"}}, "quant_method"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -2}, "group_size"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False}, "sym"),
        (_compressed({"num_bits": 4, "type": "int", "strategy": "group", "symmetric": False}), f"{WEIGHTS}.group_size"),
        ("fp8", ""),
    ],
)  # fmt: skip
def test_checkpoints_that_cannot_be_counted(llama_config: Config, quantization: object, field: str) -> None:
    assert _refused(llama_config | {"quantization_config": quantization}).field == f"quantization_config.{field}".strip(
        "."
    )


@pytest.mark.parametrize(
    ("model", "changes", "field"),
    [
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", {"full_attention_interval": 128}, "num_hidden_layers"),
        ("XiaomiMiMo/MiMo-V2-Flash", {"hybrid_layer_pattern": [0] * 48}, "hybrid_layer_pattern"),
        ("XiaomiMiMo/MiMo-V2-Flash", {"moe_layer_freq": [1] * 48}, "moe_layer_freq"),
    ],
)
def test_layers_that_no_module_for_prediction_can_take_after(model: str, changes: Config, field: str) -> None:
    entry = find_entry(model)
    assert entry is not None
    assert _refused({**entry.config, **changes}).field == field
