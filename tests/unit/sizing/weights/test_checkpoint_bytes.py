"""Bytes of safetensors files against what a config.json describes."""

from typing import Any

import pytest

from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.families.architectures import geometry_from_config
from specdecode_operator.sizing.geometry import StoredWeights
from specdecode_operator.sizing.weights import checkpoint_disagreement, expected_file_bytes
from tests.support.objects import TINY_CONFIG

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


def test_the_files_of_the_described_model_raise_no_doubt() -> None:
    assert doubt(TINY) is None
    assert doubt(TINY - TABLE, head=False, tie_word_embeddings=True) is None
    assert doubt(TINY, tie_word_embeddings=True) is None, "a tied head that is stored all the same is not loaded"
    assert doubt(2 * TINY, by_dtype={"F32": 2 * TINY}) is None, "float32 is loaded as 16-bit"


def test_float32_of_a_quantized_checkpoint_is_loaded_as_it_is() -> None:
    fp8 = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    total, _ = expected_file_bytes(geometry_from_config("tiny", {**TINY_CONFIG, **fp8}), output_head=True)
    assert doubt(total, by_dtype={"F32": total}, **fp8) is None


def test_a_published_size_is_met() -> None:
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
def test_another_model_is_told(total: int, changes: dict[str, Any], words: str) -> None:
    sentence = doubt(total, **changes)
    assert sentence is not None
    assert words in sentence
    assert "tiny" in sentence


def test_a_head_may_come_without_the_tables_that_it_shares() -> None:
    config = {**TINY_CONFIG, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    geometry = geometry_from_config("head", config)
    layer = LAYER + 2 * (256 * 256 + 2 * 256 * 128) + 2 * 256
    own = layer + 2 * 3 * 256 * 256 + TABLE + 2 * 256 + 8 * 1024
    assert checkpoint_disagreement(geometry, in_bf16(own)) is None
    assert checkpoint_disagreement(geometry, in_bf16(own + TABLE)) is None
    assert checkpoint_disagreement(geometry, in_bf16(own - LAYER // 2)) is not None
