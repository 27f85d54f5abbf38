"""Check of a trained head, whose files are untrusted."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.api.training import TrainingMethod
from specdecode_operator.capture.files.formats import CaptureError
from specdecode_operator.training.files.head_check import CheckedHead, check_head
from specdecode_operator.training.files.pod_settings import Target
from tests.support.trained_heads import (
    HIDDEN,
    LAYERS,
    VOCABULARY,
    head_config,
    head_tensors,
    safetensors,
    vocabulary_map,
    write_checkpoint,
    zeros,
)

TARGET = Target("org/target", LAYERS, HIDDEN, VOCABULARY)


def check(folder: Path, method: TrainingMethod = TrainingMethod.EAGLE3) -> CheckedHead:
    return check_head(folder, method, TARGET, "0.32")


def rejected(folder: Path) -> str:
    with pytest.raises(CaptureError) as caught:
        check(folder)
    assert caught.value.reason == "InvalidHead"
    assert len(caught.value.message) < 500
    assert caught.value.message.isprintable()
    return caught.value.message


def with_layers(**changes: Any) -> dict[str, Any]:
    config = head_config()
    return {**config, "transformer_layer_config": {**config["transformer_layer_config"], **changes}}


def test_config_is_published_without_code_and_paths(tmp_path: Path) -> None:
    given = with_layers(auto_map={"AutoConfig": "config.py"}, _name_or_path="/models/of/the/pod")
    config = check(write_checkpoint(tmp_path / "0", given)).config
    assert "auto_map" not in config
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert config["transformer_layer_config"] == head_config()["transformer_layer_config"]


def test_smaller_vocabulary(tmp_path: Path) -> None:
    weights = safetensors(head_tensors(4) | vocabulary_map([0, 3, 7, 15]))
    assert (
        check(write_checkpoint(tmp_path / "0", head_config(draft_vocab_size=4), weights)).config["draft_vocab_size"]
        == 4
    )


class TestConfig:
    @pytest.mark.parametrize(
        ("config", "named"),
        [
            ([], "not an object"),
            (head_config(speculators_model_type="dflash"), "speculators_model_type"),
            (head_config(architectures=["DFlashDraftModel"]), "architectures"),
            (head_config(architectures="Eagle3DraftModel"), "architectures"),
            (head_config(architectures=["Eagle3DraftModel", "Evil"]), "architectures"),
            (with_layers(vocab_size=VOCABULARY + 1), "vocab_size"),
            (with_layers(vocab_size=str(VOCABULARY)), "vocab_size"),
            (with_layers(vocab_size=float(VOCABULARY)), "vocab_size"),
            (with_layers(hidden_size=2 * HIDDEN), "target_hidden_size"),
            (head_config(target_hidden_size=2 * HIDDEN), "target_hidden_size"),
            (head_config(target_hidden_size=float(HIDDEN)), "target_hidden_size"),
            (with_layers(num_hidden_layers=2**60), "num_hidden_layers"),
            (with_layers(num_hidden_layers=True), "num_hidden_layers"),
            (head_config(transformer_layer_config=None), "vocab_size"),
            (head_config(draft_vocab_size=VOCABULARY + 1), "draft_vocab_size"),
            (head_config(draft_vocab_size=0), "draft_vocab_size"),
            (head_config(draft_vocab_size=1.0), "draft_vocab_size"),
            (head_config(eagle_aux_hidden_state_layer_ids=[1, 3, LAYERS]), "layers of the target"),
            (head_config(eagle_aux_hidden_state_layer_ids=[-1, 3, 5]), "layers of the target"),
            (head_config(eagle_aux_hidden_state_layer_ids=[1, 1, 5]), "twice"),
            (head_config(eagle_aux_hidden_state_layer_ids=[1, 5]), "number of layers"),
            (head_config(eagle_aux_hidden_state_layer_ids=[]), "eagle_aux_hidden_state_layer_ids"),
            (head_config(eagle_aux_hidden_state_layer_ids={"a": 1}), "eagle_aux_hidden_state_layer_ids"),
            (with_layers(num_attention_heads=-1), "num_attention_heads"),
        ],
    )
    def test_that_lies(self, tmp_path: Path, config: Any, named: str) -> None:
        assert named in rejected(write_checkpoint(tmp_path / "0", config))

    @pytest.mark.parametrize(
        "text",
        [b"", b"\xff\xfe", b"{", b"[" * 100_000, b'{"a": 1, "a": 2}', b'{"a": NaN}', b" " * 300_000],
        ids=["empty", "binary", "cut", "deep", "twice", "nan", "large"],
    )
    def test_that_is_not_json(self, tmp_path: Path, text: bytes) -> None:
        folder = write_checkpoint(tmp_path / "0")
        (folder / "config.json").write_bytes(text)
        rejected(folder)

    def test_message_quotes_no_control_characters(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path / "0", head_config(speculators_model_type="\x1b[31m\n" * 500))
        rejected(folder)


ENTRY = {"dtype": "BF16", "shape": [VOCABULARY, HIDDEN], "data_offsets": [0, 2 * VOCABULARY * HIDDEN]}


class TestWeights:
    @pytest.mark.parametrize(
        ("header", "named"),
        [
            ({"lm_head.weight": {**ENTRY, "shape": [2**60]}}, "lm_head.weight"),
            ({"lm_head.weight": {**ENTRY, "shape": [2**31, 2**31, 2**31, 2**31]}}, "lm_head.weight"),
            ({"lm_head.weight": {**ENTRY, "shape": [-16, -8]}}, "lm_head.weight"),
            ({"lm_head.weight": {**ENTRY, "shape": [1] * 64 + [VOCABULARY, HIDDEN]}}, "lm_head.weight"),
            ({"lm_head.weight": {**ENTRY, "data_offsets": [0, 2**60]}}, "lm_head.weight"),
            ({"lm_head.weight": {**ENTRY, "data_offsets": [10, 0]}}, "lm_head.weight"),
            ({"lm_head.weight": {**ENTRY, "data_offsets": [True, 256]}}, "lm_head.weight"),
            ({"lm_head.weight": {**ENTRY, "dtype": "F4"}}, "lm_head.weight"),
            ({"lm_head.weight": "weights"}, "lm_head.weight"),
            ({"lm_head.weight": ENTRY}, "begins at byte"),  # overlaps another one
            ({"../../etc/passwd": ENTRY}, "not the name of a tensor"),
            ({"\x1b[31m": ENTRY}, "not the name of a tensor"),
            ({f"t{number}": ENTRY for number in range(5000)}, "at most"),
        ],
    )
    def test_hostile_header(self, tmp_path: Path, header: dict[str, Any], named: str) -> None:
        assert named in rejected(write_checkpoint(tmp_path / "0", weights=safetensors(head_tensors(), header)))

    @pytest.mark.parametrize(
        "weights",
        [
            b"",
            b"\x01",
            struct.pack("<Q", 2**63) + b"{}",
            struct.pack("<Q", 0),
            struct.pack("<Q", 2) + b"[]",
            struct.pack("<Q", 2) + b"{}",
            struct.pack("<Q", 5) + b'{"a":',
            safetensors(head_tensors())[:-1],
            safetensors(head_tensors()) + b"more",
            b"\x80\x04\x95pickle",
        ],
        ids=["empty", "one byte", "2^63", "no header", "list", "nothing", "cut header", "cut", "longer", "pickle"],
    )
    def test_broken_file(self, tmp_path: Path, weights: bytes) -> None:
        rejected(write_checkpoint(tmp_path / "0", weights=weights))

    @pytest.mark.parametrize(
        ("dtype", "value"),
        [
            ("BF16", b"\x80\x7f"),
            ("BF16", b"\x80\xff"),
            ("BF16", b"\xc0\x7f"),
            ("F16", b"\x00\x7c"),
            ("F32", b"\x00\x00\xc0\x7f"),
        ],
    )
    def test_not_finite(self, tmp_path: Path, dtype: str, value: bytes) -> None:
        name, shape, content = zeros(dtype, HIDDEN)
        tensors = head_tensors() | {"norm.weight": (name, shape, content[: -len(value)] + value)}
        assert "norm.weight" in rejected(write_checkpoint(tmp_path / "0", weights=safetensors(tensors)))

    def test_finite_values_of_any_size(self, tmp_path: Path) -> None:
        tensors = head_tensors() | {"norm.weight": ("BF16", [HIDDEN], b"\x7f\x7f" * HIDDEN)}
        check(write_checkpoint(tmp_path / "0", weights=safetensors(tensors)))

    @pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
    def test_other_vocabulary(self, tmp_path: Path, name: str) -> None:
        tensors = head_tensors() | {name: zeros("BF16", VOCABULARY - 1, HIDDEN)}
        assert name in rejected(write_checkpoint(tmp_path / "0", weights=safetensors(tensors)))

    def test_without_output(self, tmp_path: Path) -> None:
        tensors = {name: each for name, each in head_tensors().items() if name != "lm_head.weight"}
        assert "lm_head.weight" in rejected(write_checkpoint(tmp_path / "0", weights=safetensors(tensors)))

    @pytest.mark.parametrize(
        "tokens",
        [[0, 3, 7, VOCABULARY], [-1, 3, 7, 8], [3, 3, 7, 8], [2**62, 3, 7, 8]],
        ids=["beyond", "negative", "twice", "overflow"],
    )
    def test_vocabulary_map_that_lies(self, tmp_path: Path, tokens: list[int]) -> None:
        weights = safetensors(head_tensors(4) | vocabulary_map(tokens))
        assert "d2t" in rejected(write_checkpoint(tmp_path / "0", head_config(draft_vocab_size=4), weights))

    def test_vocabulary_map_does_not_count_from_the_end(self, tmp_path: Path) -> None:
        maps = vocabulary_map([-1, 3, 7, 8]) | {"t2d": vocabulary_map([3, 7, 8, VOCABULARY - 1])["t2d"]}
        weights = safetensors(head_tensors(4) | maps)
        assert "d2t" in rejected(write_checkpoint(tmp_path / "0", head_config(draft_vocab_size=4), weights))

    def test_gap_between_tensors(self, tmp_path: Path) -> None:
        tensors = head_tensors()
        place = sum(len(content) for _, _, content in tensors.values())
        header = {"hidden.weight": {"dtype": "BF16", "shape": [1], "data_offsets": [place + 2, place + 4]}}
        weights = safetensors(tensors, header) + bytes(4)
        assert "hidden.weight" in rejected(write_checkpoint(tmp_path / "0", weights=weights))

    def test_vocabulary_maps_that_differ(self, tmp_path: Path) -> None:
        maps = vocabulary_map([0, 3, 7, 15]) | {"t2d": vocabulary_map([0, 3, 7, 14])["t2d"]}
        weights = safetensors(head_tensors(4) | maps)
        assert "t2d" in rejected(write_checkpoint(tmp_path / "0", head_config(draft_vocab_size=4), weights))

    @pytest.mark.parametrize("missing", ["d2t", "t2d"])
    def test_vocabulary_map_that_is_missing(self, tmp_path: Path, missing: str) -> None:
        maps = {name: each for name, each in vocabulary_map([0, 3, 7, 15]).items() if name != missing}
        weights = safetensors(head_tensors(4) | maps)
        assert missing in rejected(write_checkpoint(tmp_path / "0", head_config(draft_vocab_size=4), weights))


class TestPlaces:
    @pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
    def test_link_is_not_followed(self, tmp_path: Path, name: str) -> None:
        folder = write_checkpoint(tmp_path / "0")
        elsewhere = tmp_path / name
        (folder / name).rename(elsewhere)
        (folder / name).symlink_to(elsewhere)
        assert "link" in rejected(folder)

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
    def test_pipe_is_not_read(self, tmp_path: Path, name: str) -> None:
        folder = write_checkpoint(tmp_path / "0")
        (folder / name).unlink()
        os.mkfifo(folder / name)
        assert "regular file" in rejected(folder)

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
    def test_missing(self, tmp_path: Path, name: str) -> None:
        folder = write_checkpoint(tmp_path / "0")
        (folder / name).unlink()
        assert name in rejected(folder)


def test_parallel_eagle(tmp_path: Path) -> None:
    config = head_config(architectures=["PEagleDraftModel"], speculators_model_type="peagle", mask_token_id=1)
    check(write_checkpoint(tmp_path / "0", config), TrainingMethod.PEAGLE)
    assert json.loads((tmp_path / "0" / "config.json").read_text())["mask_token_id"] == 1
