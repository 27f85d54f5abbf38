"""What checkpoints exclude from quantization is anybody's text: to read it leaves nothing behind in the operator."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from specdecode_operator.enums import Precision
from specdecode_operator.sizing.catalogue import find_entry
from specdecode_operator.sizing.errors import GeometryError
from specdecode_operator.sizing.families.architectures import geometry_from_config
from specdecode_operator.sizing.families.draft_heads import mtp_head
from specdecode_operator.sizing.quantization import Checkpoint, Exclusions
from specdecode_operator.sizing.rank_layers import Split
from specdecode_operator.sizing.weights import loaded_head_bytes, weight_bytes

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


def test_a_model_of_very_many_layers() -> None:
    """Every part of every name of 1024 layers would take 300 MB."""
    checkpoint = Checkpoint(None, (Exclusions.of(("gate", "lm_head")),))

    def read_layers() -> None:
        for index in range(64):
            checkpoint.unquantized_modules(index)

    assert left_behind_bytes(read_layers) < MIB


def test_a_config_that_is_changed_again_and_again() -> None:
    def read_configs() -> None:
        for number in range(256):
            names = tuple(f"model.layers.{index}.{number}" for index in range(200))
            Checkpoint(None, (Exclusions.of(names),)).unquantized_modules(0)

    assert left_behind_bytes(read_configs) < 4 * MIB


def test_more_layers_than_any_model_has_are_refused() -> None:
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


def test_modules_with_settings_of_their_own_are_estimated() -> None:
    mixed = GPTQ | {"dynamic": {"+:.*down_proj.*": {"bits": 8}}}
    model = geometry_from_config("gptq", LLAMA | {"quantization_config": mixed})
    assert model.estimated_because == "quantization_config.dynamic"


def test_layers_for_prediction_of_nemotron_stay_in_16_bits() -> None:
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
