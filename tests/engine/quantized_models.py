"""Small models in every format of checkpoint that sizing knows, for questions to the real vLLM.

Each is a few layers of a published model, with a quantization_config as the
tools that make such checkpoints write it.
"""

from typing import Any

from specdecode_operator.sizing.catalogue import find_entry

Config = dict[str, Any]


def shortened(model: str, num_layers: int) -> Config:
    """Return the config.json of a model of the catalogue with fewer layers."""
    entry = find_entry(model)
    assert entry is not None
    return {**entry.config, "num_hidden_layers": num_layers}


SHAPES: dict[str, Config] = {
    "llama": shortened("meta-llama/Llama-3.1-8B", 2),
    "qwen3-moe": shortened("Qwen/Qwen3-30B-A3B", 2),
    "mixtral": shortened("mistralai/Mixtral-8x7B-v0.1", 2),
    # One dense layer and two of experts, latent attention, widths that no group or block divides.
    "deepseek": shortened("deepseek-ai/DeepSeek-V2-Lite", 3),
}

FP8_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
DYNAMIC_FP8 = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
DYNAMIC_INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
DYNAMIC_TENSOR_FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": True}
STATIC_FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
GROUPED_FP8 = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True}
LOCAL_FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}


def compressed(form: str, weights: Config, inputs: Config | None = None, **more: Any) -> Config:
    """Return a section of compressed-tensors with one scheme for all linear layers."""
    weights = {"symmetric": True, "dynamic": False, "group_size": None} | weights
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    } | more


def packed(bits: int, strategy: str, **more: Any) -> Config:
    """Return a section of compressed-tensors for packed integers."""
    return compressed("pack-quantized", {"num_bits": bits, "type": "int", "strategy": strategy, **more})


def gptq(bits: int, group_size: int, *, desc_act: bool = False) -> Config:
    """Return a section of GPTQ."""
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": desc_act, "sym": True}


def awq(group_size: int) -> Config:
    """Return a section of AWQ."""
    return {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}


def modelopt(algorithm: str, **more: Any) -> Config:
    """Return a section of ModelOpt as config.json holds it."""
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]} | more


def modelopt_file(algorithm: str, cache: str | None, excluded: list[str]) -> Config:
    """Return what ModelOpt's own file hf_quant_config.json holds."""
    inner = {"quant_algo": algorithm, "kv_cache_quant_algo": cache, "group_size": 16, "exclude_modules": excluded}
    return {"producer": {"name": "modelopt"}, "quantization": inner}


FP8_CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}
FP8_TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor"}
FP8_BLOCK = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
INT8_CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel"}
FP4_MICRO = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

FORMATS: dict[str, Config] = {
    "fp8 block": BLOCKS,
    "fp8 block, router left out": BLOCKS | {"modules_to_not_convert": ["model.layers.0.mlp.gate"]},
    "fp8 tensor": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8 tensor static": {"quant_method": "fp8", "activation_scheme": "static"},
    "compressed int8": compressed("int-quantized", INT8_CHANNEL, DYNAMIC_INT8),
    "compressed fp8": compressed("float-quantized", FP8_CHANNEL, DYNAMIC_FP8),
    "compressed fp8, cache fp8": compressed("float-quantized", FP8_CHANNEL, DYNAMIC_FP8, kv_cache_scheme=FP8_CACHE),
    "compressed fp8 tensor": compressed("float-quantized", FP8_TENSOR, DYNAMIC_TENSOR_FP8),
    "compressed fp8 tensor static": compressed("float-quantized", FP8_TENSOR, STATIC_FP8),
    "compressed fp8 block": compressed("float-quantized", FP8_BLOCK, GROUPED_FP8),
    "compressed w4a16 g128": packed(4, "group", group_size=128),
    "compressed w4a16 g64": packed(4, "group", group_size=64),
    "compressed w4a16 g32": packed(4, "group", group_size=32),
    "compressed w4a16 g128 asymmetric": packed(4, "group", group_size=128, symmetric=False),
    "compressed w4a16 channel": packed(4, "channel"),
    "compressed w8a16": packed(8, "channel"),
    "compressed w8a16 g128": packed(8, "group", group_size=128),
    "compressed nvfp4": compressed("nvfp4-pack-quantized", FP4_MICRO, LOCAL_FP4),
    "compressed nvfp4a16": compressed("nvfp4-pack-quantized", FP4_MICRO),
    "awq g128": awq(128),
    "awq g64": awq(64),
    "gptq g128": gptq(4, 128),
    "gptq g128 ordered": gptq(4, 128, desc_act=True),
    "gptq 8 bits": gptq(8, 128),
    "gptq channel": gptq(4, -1),
    "gptq channel ordered": gptq(4, -1, desc_act=True),
    "modelopt fp8": modelopt("FP8"),
    "modelopt fp8, cache fp8": modelopt("FP8", kv_cache_scheme=FP8_CACHE),
    "modelopt nvfp4": modelopt("NVFP4", group_size=16, kv_cache_quant_algo=None, exclude_modules=["lm_head"]),
    "modelopt file nvfp4, cache fp8": modelopt_file("NVFP4", "FP8", ["lm_head", "model.layers.*.mlp.gate"]),
    "modelopt file fp8": modelopt_file("FP8", None, ["lm_head", "model.layers.0.self_attn*"]),
}

QUANTIZED_MODELS: dict[str, Config] = {
    f"{shape}, {form}": config | {"quantization_config": quantization}
    for shape, config in SHAPES.items()
    for form, quantization in FORMATS.items()
}
"""By name: what of a published model, and its format."""
