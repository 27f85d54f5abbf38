"""What checkpoints exclude from quantization is anybody's text: to read it leaves nothing behind in the operator."""

import tracemalloc
from collections.abc import Callable

import pytest

from specdecode_operator.sizing.base.errors import GeometryError
from specdecode_operator.sizing.families.config import geometry_from_config
from specdecode_operator.sizing.model.checkpoint import Checkpoint
from specdecode_operator.sizing.model.exclusions import Exclusions

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
