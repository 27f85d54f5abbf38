"""Folders of models without weights."""

import json
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.replay.emulation import (
    BEGIN,
    END,
    text_config,
    text_tokens,
    tokenizer_files,
    tokenizer_json,
    write_model_folder,
)

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "eos_token_id": [128001, 128009],
    "quantization_config": {"quant_method": "fp8"},
    "num_hidden_layers": 32,
}


def _read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def test_it_has_a_config_without_kernels_and_a_tokenizer_whose_end_it_names(tmp_path: Path) -> None:
    first, last = write_model_folder(tmp_path / "m", CONFIG, None)
    config = _read(tmp_path / "m", "config.json")
    assert config["num_hidden_layers"] == 32
    assert "quantization_config" not in config
    assert (config["bos_token_id"], config["eos_token_id"]) == (BEGIN, END)
    assert _read(tmp_path / "m", "generation_config.json")["eos_token_id"] == END
    vocabulary = _read(tmp_path / "m", "tokenizer.json")["model"]["vocab"]
    text = {token for token, number in vocabulary.items() if first <= number <= last}
    assert {"th", "\u0120a"} <= text
    assert text.isdisjoint({"<s>", "</s>", '"', "a"})


def test_a_models_own_tokenizer_is_taken_with_what_it_says_of_ends(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"):
        (own / name).write_text('{"own": true}')
    assert write_model_folder(tmp_path / "m", CONFIG, own) == (300, 1000)
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert _read(tmp_path / "m", "tokenizer.json") == {"own": True}
    assert _read(tmp_path / "m", "config.json")["eos_token_id"] == CONFIG["eos_token_id"]


@pytest.mark.parametrize(("vocabulary", "tokens"), [(128256, 960), (960, 960), (400, 400), (258, 258), (64, 258)])
def test_the_tokenizer_fits_into_the_vocabulary(vocabulary: int, tokens: int) -> None:
    made = tokenizer_json(vocabulary)
    assert sorted(made["model"]["vocab"].values()) == list(range(tokens))
    first, last = text_tokens(made)
    assert END < first < last < tokens


def test_of_a_model_that_sees_the_part_that_writes_is_taken() -> None:
    seeing = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "dtype": "bfloat16",
        "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 48},
        "vision_config": {"num_hidden_layers": 27},
    }
    assert text_config(seeing) == {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "dtype": "bfloat16",
        "num_hidden_layers": 48,
    }
    assert text_config(CONFIG) == CONFIG
    named = seeing | {"text_config": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"}}
    assert text_config(named)["architectures"] == ["DeepseekV3ForCausalLM"]


def test_a_folder_without_a_tokenizer_has_no_files_of_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert tokenizer_files(tmp_path) == []
    assert tokenizer_files(tmp_path / "nowhere") == []
    (tmp_path / "tekken.json").write_text("{}")
    assert {path.name for path in tokenizer_files(tmp_path)} == {"tokenizer_config.json", "tekken.json"}
