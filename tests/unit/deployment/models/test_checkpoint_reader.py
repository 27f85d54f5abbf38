"""Read checkpoints, and reject hostile ones with a message."""

import ast
import base64
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.deployment.models import checkpoint_reader
from specdecode_operator.deployment.models.checkpoint_reader import (
    CONFIG_LIMIT_BYTES,
    MESSAGE_LIMIT_BYTES,
    Checkpoint,
    CheckpointError,
    Folder,
    Weights,
    leave_answer,
    pack_error,
    pack_facts,
    read_checkpoint,
)
from specdecode_operator.deployment.models.model_facts import unpack_facts
from tests.support.checkpoints import header, safetensors, write_checkpoint
from tests.support.objects import TINY_CONFIG

SCRIPT = Path(checkpoint_reader.__file__)
TENSORS: dict[str, tuple[str, list[int]]] = {
    "model.embed_tokens.weight": ("BF16", [1024, 256]),
    "model.layers.0.mlp.up_proj.weight": ("F8_E4M3", [512, 256]),
    "model.layers.0.mlp.up_proj.weight_scale": ("F32", [1]),
    "lm_head.weight": ("BF16", [1024, 256]),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good model in one file."""
    return write_checkpoint(tmp_path / "model", {**TINY_CONFIG, "id2label": {"0": "no"}, "eos_token_id": [1]}, TENSORS)


def refusal(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as refused:
        read_checkpoint(Folder(str(folder)))
    return refused.value


def test_single_file_checkpoint_bytes_are_summed_by_dtype_and_part(folder: Path) -> None:
    found = read_checkpoint(Folder(str(folder)))
    assert found.weights == Weights(
        total_bytes=2 * 1024 * 256 * 2 + 512 * 256 + 4,
        tensors=4,
        output_head=True,
        bytes_by_dtype={"BF16": 2 * 1024 * 256 * 2, "F8_E4M3": 512 * 256, "F32": 4},
        bytes_by_part={"model.embed_tokens": 524_288, "lm_head": 524_288, "model.layers": 512 * 256 + 4},
    )
    assert found.config == TINY_CONFIG, "what takes no memory is left out, the rest is there"


def test_shards_are_read_from_the_safetensors_index(folder: Path) -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    shapes = [{"a.weight": ("BF16", [4])}, {"b.weight": ("BF16", [6])}]
    for name, part in zip(names, shapes, strict=True):
        (folder / name).write_bytes(safetensors(*header(part)))
    index = {"weight_map": {"a.weight": names[0], "b.weight": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = read_checkpoint(Folder(str(folder))).weights
    assert (found.total_bytes, found.tensors, found.output_head) == (20, 2, False)
    (folder / names[1]).unlink()
    assert (refusal(folder).reason, names[1] in refusal(folder).message) == ("WeightsNotFound", True)


def test_safetensors_headers_of_any_length_are_read(folder: Path) -> None:
    shapes = {f"model.layers.{index}.mlp.experts.{index}.up_proj.weight": ("BF16", [2, 2]) for index in range(3000)}
    content = safetensors(*header(shapes))
    assert len(content) > 4 * 64 * 1024
    (folder / "model.safetensors").write_bytes(content)
    assert read_checkpoint(Folder(str(folder))).weights.total_bytes == 3000 * 8
    (folder / "model.safetensors").write_bytes(content[: 100 * 1024])
    assert "truncated" in refusal(folder).message


@pytest.mark.parametrize("elsewhere", ["../secret.safetensors", "/etc/passwd", "config.json"])
def test_index_cannot_name_files_outside_the_weights(folder: Path, elsewhere: str) -> None:
    (folder.parent / "secret.safetensors").write_bytes(safetensors(*header({"a.weight": ("BF16", [4])})))
    index = {"weight_map": {"a.weight": elsewhere}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert refusal(folder).reason == "WeightsNotFound"


def test_pickle_files_are_never_opened(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")  # would hang whoever opens it
    assert refusal(folder).reason == "WeightsNotFound"
    (folder / "training_args.bin").write_bytes(b"")
    assert refusal(folder).reason == "WeightsNotFound"
    os.mkfifo(folder / "pytorch_model.bin")
    assert refusal(folder).reason == "WeightsNotFound"


def test_pickle_only_model_is_described_by_its_config_alone(folder: Path) -> None:
    """As yuhuili/EAGLE3-LLaMA3.3-Instruct-70B, which vLLM serves."""
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 7'\ntR.")
    found = read_checkpoint(Folder(str(folder)))
    assert (found.config, found.weights) == (TINY_CONFIG, Weights(0, 0, False, {}, {}))
    assert unpack_facts(pack_facts(found)) == found


def test_config_with_per_expert_modules_fits_the_termination_message(folder: Path) -> None:
    """As those of nvidia/MiniMax-M3-NVFP4 (3.1 MB) and nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4."""
    modules = [
        f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj"
        for layer in range(60)
        for expert in range(128)
        for name in ("gate", "up", "down")
    ]
    quantization = {
        "quant_algo": "MIXED_PRECISION",
        "ignore": ["lm_head", *modules],
        "config_groups": {"group_0": {"weights": {"num_bits": 4}, "targets": modules}},
        "quantized_layers": {name: {"quant_algo": "FP8" if name in modules[:9] else "NVFP4"} for name in modules},
    }
    (folder / "config.json").write_text(json.dumps({**TINY_CONFIG, "quantization_config": quantization}))
    assert (folder / "config.json").stat().st_size > 2**21
    found = read_checkpoint(Folder(str(folder)))
    assert unpack_facts(pack_facts(found)) == found
    kept = found.config["quantization_config"]
    assert kept["ignore"] == ["lm_head", *(name for name in modules if ".experts.0." in name)]
    assert kept["config_groups"]["group_0"] == {"weights": {"num_bits": 4}, "targets": modules[:1]}
    assert [layer["quant_algo"] for layer in kept["quantized_layers"].values()] == ["NVFP4", "FP8"]


TENSOR = {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated"),
    "cut off in the length": (b"\x10\0\0", "truncated"),
    "cut off in the header": (safetensors({"a": TENSOR}, 0, length=500), "truncated"),
    "cut off in the data": (safetensors({"a": TENSOR}, 7), "truncated"),
    "header of 2^63": (safetensors({"a": TENSOR}, 8, length=2**63), "more than 100,000,000"),
    "not JSON": (safetensors(b"{'a'", 8), "not JSON"),
    "binary": (safetensors(bytes(range(128, 256)), 8), "not JSON"),
    "nested too deep": (safetensors(b"[" * 200_000, 8), "not JSON"),
    "numbers too long": (safetensors(b'{"a": ' + b"9" * 5000 + b"}", 8), "not JSON"),
    "a list": (safetensors(b"[]", 8), "not an object"),
    "tensor is a list": (safetensors({"a": []}, 8), "by dtype"),
    "offsets of text": (safetensors({"a": {**TENSOR, "data_offsets": ["0", "8"]}}, 8), "by dtype"),
    "negative offsets": (safetensors({"a": {**TENSOR, "data_offsets": [-8, 0]}}, 8), "by dtype"),
    "backward": (safetensors({"a": {**TENSOR, "data_offsets": [8, 0]}}, 8), "by dtype"),
    "negative shape": (safetensors({"a": {**TENSOR, "shape": [-2, -2]}}, 8), "by dtype"),
    "shape and bytes disagree": (safetensors({"a": {**TENSOR, "shape": [5]}}, 8), "8 bytes for 5 elements"),
    "a shape of many numbers": (safetensors({"a": {**TENSOR, "shape": [2**60] * 300}}, 8), "by dtype"),
    "overlap": (safetensors({"a": TENSOR, "b": TENSOR}, 8), "overlap"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_safetensors_headers_are_reported(folder: Path, case: str) -> None:
    content, words = HOSTILE[case]
    (folder / "model.safetensors").write_bytes(content)
    error = refusal(folder)
    assert error.reason == "WeightsUnreadable"
    assert words in error.message
    assert "model.safetensors" in error.message


@pytest.mark.parametrize(
    ("content", "reason", "words"),
    [
        (b"{", "ConfigUnreadable", "not JSON"),
        (b"[1]", "ConfigUnreadable", "not an object"),
        (b'{"text_config": ' * 400 + b"1" + b"}" * 400, "ConfigUnreadable", "nested more than 64 deep"),
        (b"\xff\xfe{}", "ConfigUnreadable", "not JSON"),
        (b'{"a":' * 300 + b"{}" + b"}" * 300, "ConfigUnreadable", "nested more than 64 deep"),
        (b'{"a":' + b"[" * 300 + b"]" * 300 + b"}", "ConfigUnreadable", "nested more than 64 deep"),
        (b'{"a":' * 5000 + b"{}" + b"}" * 5000, "ConfigUnreadable", "not JSON"),
        (b"{" + b" " * CONFIG_LIMIT_BYTES + b"}", "ConfigUnreadable", "more than 8 MiB"),
    ],
)
def test_invalid_config_json_is_reported(folder: Path, content: bytes, reason: str, words: str) -> None:
    (folder / "config.json").write_bytes(content)
    assert (refusal(folder).reason, words in refusal(folder).message) == (reason, True)


def test_missing_config_or_directory_is_reported(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(folder).message
    assert "no directory" in refusal(folder / "deeper").message
    assert refusal(folder).reason == refusal(folder / "deeper").reason == "ModelNotFound"


def checkpoint(config: dict[str, Any], parts: int = 3) -> Checkpoint:
    return Checkpoint(config, Weights(10, 2, True, {"BF16": 10}, {f"part{i}": i for i in range(parts)}))


def noise(length: int) -> str:
    return "".join(random.Random(7).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=length))


def test_packed_facts_survive_a_round_trip() -> None:
    sent = checkpoint({**TINY_CONFIG, "rope_theta": 1e6, "text_config": {"a": [1, 2.5, None]}})
    assert unpack_facts(pack_facts(sent)) == sent


def test_facts_too_long_for_the_message_drop_the_least_needed_first() -> None:
    with_parts = checkpoint({"hidden_size": 8, "layer_types": [noise(3000)]}, parts=900)
    got = unpack_facts(pack_facts(with_parts))
    assert (got.config, got.weights.bytes_by_part) == (with_parts.config, {})
    assert got.weights.total_bytes == 10
    with_list = checkpoint({"hidden_size": 8, "layer_types": ["full_attention"], "tokens": noise(6000)})
    assert unpack_facts(pack_facts(with_list)).config == {"hidden_size": 8, "layer_types": ["full_attention"]}


@pytest.mark.parametrize("text", ["x " * 4500, "\U0001f600 " * 4500, '" ' * 4500])
def test_error_messages_are_cut_to_the_termination_message_limit(text: str) -> None:
    message = pack_error(CheckpointError("ReaderFailed", text))
    assert len(message.encode()) <= MESSAGE_LIMIT_BYTES
    with pytest.raises(CheckpointError, match=text[:100]):
        unpack_facts(message)


def damaged_facts() -> str:
    """Return a message whose gzip header is intact, and whose compressed data is not."""
    packed = bytearray(base64.b64decode(json.loads(pack_facts(checkpoint({"hidden_size": 8})))["facts"]))
    packed[12:30] = b"\xff" * 18
    return json.dumps({"facts": base64.b64encode(packed).decode()})


@pytest.mark.parametrize(
    "message",
    [
        "", "null", "[]", "7", '{"facts": 3}', '{"facts": "%%%"}', '{"facts": "aGFsbG8="}', '{"error": []}', "[" * 4000,
        pack_facts(checkpoint({}))[:-30] + '"}', damaged_facts(), '{"error": {"reason": 1}}',
    ],
)  # fmt: skip
def test_invalid_reader_message_is_a_reader_failure(message: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        unpack_facts(message)
    assert refused.value.reason == "ReaderFailed"


def test_gzip_bomb_is_not_unpacked() -> None:
    with pytest.raises(CheckpointError, match="invalid"):
        unpack_facts(pack_facts(checkpoint({"layer_types": "a" * 2_000_000})))


def test_facts_and_errors_are_written_to_the_termination_message(folder: Path, tmp_path: Path) -> None:
    message = tmp_path / "message"
    assert leave_answer(message, lambda: Folder(str(folder))) == 0
    assert unpack_facts(message.read_text()) == read_checkpoint(Folder(str(folder)))
    assert leave_answer(message, lambda: Folder(f"{folder}/none")) == 1
    assert json.loads(message.read_text())["error"]["reason"] == "ModelNotFound"
    assert signal.alarm(0) == 0, "the deadline outlived the read, and would end whatever called it"


def test_checkpoint_reader_imports_only_the_standard_library() -> None:
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(SCRIPT.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= sys.stdlib_module_names
    assert not imported & {"pickle", "importlib", "runpy", "torch", "transformers"}
