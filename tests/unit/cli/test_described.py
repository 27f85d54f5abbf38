"""`specdecode plan` and `specdecode init` with options in the place of a file."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.objects import H200, TINY_CONFIG
from tests.unit.cli.conftest import Specdecode, WriteObject, manifest

TARGET, DRAFT = "meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"
PAIR = ("--model", TARGET, "--draft", DRAFT, "-K", 5, "--tp", 2, "--max-model-len", 8192)


def planned(specdecode: Specdecode, *arguments: object) -> dict[str, Any]:
    result = specdecode("plan", *arguments, "-o", "json")
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)["objects"]
    return dict(found)


def test_plan_of_options_is_that_of_a_file(specdecode: Specdecode, write: WriteObject) -> None:
    file = write("a.yaml", manifest("a", accelerator={"products": [H200]}))
    of_options, of_file = planned(specdecode, *PAIR, "--gpu", "H200"), planned(specdecode, file)
    assert of_options["candidates"] == of_file["candidates"]
    assert of_options["name"] == "llama-3-1-70b-instruct"


EVERY = {
    "method": ("--method", "ngram"),
    "pipeline": ("--pp", 2),
    "data": ("--dp", 2),
    "quantization": ("--quantization", "FP8"),
    "kv_cache_dtype": ("--kv-cache-dtype", "fp8"),
    "engine_version": ("--engine-version", "0.30"),
    "product": ("--gpu", "H100", "--gpu", "NVIDIA-H200"),
}


def test_every_option_reaches_the_manifest(specdecode: Specdecode) -> None:
    options = [word for words in EVERY.values() for word in words]
    result = specdecode("init", "--model", TARGET, "--num-speculative-tokens", 3, "--tp", 4, *options)
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(result.stdout) == {
        "apiVersion": "specdecode.io/v1alpha1",
        "kind": "SpecDecodeDeployment",
        "metadata": {"name": "llama-3-1-70b-instruct"},
        "spec": {
            "target": {"model": TARGET, "quantization": "FP8"},
            "speculation": {"method": "ngram", "numSpeculativeTokens": 3},
            "parallelism": {"tensor": 4, "pipeline": 2, "data": 2},
            "accelerator": {"products": ["NVIDIA-H100-80GB-HBM3", "NVIDIA-H200"]},
            "serving": {"kvCacheDtype": "fp8"},
            "engine": {"version": "0.30"},
        },
    }


def test_a_known_head_brings_its_method(specdecode: Specdecode) -> None:
    result = specdecode("init", "--model", "Qwen/Qwen3-8B", "--draft", "AngelSlim/Qwen3-8B_eagle3", "-K", 3)
    assert result.exit_code == 0, result.output
    speculation = yaml.safe_load(result.stdout)["spec"]["speculation"]
    assert speculation["method"] == "eagle3"
    result = specdecode("init", "--model", "Qwen/Qwen3-8B", "--draft", "Qwen/Qwen3-0.6B", "-K", 3)
    assert yaml.safe_load(result.stdout)["spec"]["speculation"]["method"] == "draft_model"


def test_the_manifest_is_what_plan_plans(specdecode: Specdecode, tmp_path: Path) -> None:
    file = tmp_path / "new.yaml"
    result = specdecode("init", *PAIR, "--gpu", "H200", "--name", "chat", "-n", "models", "--out", file)
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "237,168 tokens" in result.stderr
    again = planned(specdecode, file)
    assert (again["name"], again["namespace"]) == ("chat", "models")
    assert again["candidates"] == planned(specdecode, *PAIR, "--gpu", "H200")["candidates"]


def test_a_file_that_exists_is_kept(specdecode: Specdecode, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mine")
    result = specdecode("init", *PAIR, "--gpu", "H200", "--out", file)
    assert result.exit_code == 2
    assert f"--out: {file}: File exists" in result.stderr
    assert file.read_text() == "mine"


def test_what_does_not_fit_is_written_and_told(specdecode: Specdecode) -> None:
    result = specdecode("init", *PAIR, "--gpu", "H100")
    assert result.exit_code == 4
    assert "does not fit" in result.stderr
    assert yaml.safe_load(result.stdout)["spec"]["target"]["model"] == TARGET


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tp", 2), "error: --model: is missing"),
        (("--model", TARGET, "--gpu", "H3"), "error: --gpu: H3: no memory figures are known"),
        (
            ("--model", TARGET, "--draft", DRAFT),
            "spec.speculation.numSpeculativeTokens: is missing: method draft_model needs it",
        ),
        (("--model", TARGET, "--tp", 0), "spec.parallelism.tensor: 0: must be at least 1"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_written(
    specdecode: Specdecode, tmp_path: Path, arguments: tuple[object, ...], said: str
) -> None:
    result = specdecode("init", *arguments, "--out", tmp_path / "new.yaml")
    assert result.exit_code == 2
    assert said in result.stderr
    assert not list(tmp_path.iterdir())
    result = specdecode("plan", *arguments)
    assert result.exit_code == 2
    assert said in result.stdout + result.stderr


def test_a_file_and_a_description_are_one_too_many(specdecode: Specdecode, write: WriteObject) -> None:
    file = write("a.yaml", manifest("a"))
    result = specdecode("plan", file, "--model", TARGET)
    assert result.exit_code == 2
    assert f"--model: {TARGET}: {file} is named, too" in result.stderr


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("acme/7B_chat.v2-", "model-7b-chat-v2"),
        ("acme/" + "a" * 51 + "-b", "a" * 51),
    ],
)
def test_names_are_ones_that_a_service_may_have(specdecode: Specdecode, model: str, name: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY_CONFIG))
    result = specdecode("init", "--model", model, "--model-config", f"{model}={config}")
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(result.stdout)["metadata"]["name"] == name


def test_a_version_that_nobody_knows_is_described_with_an_image_to_look_for(
    specdecode: Specdecode, write: WriteObject
) -> None:
    options = (*PAIR, "--gpu", "H200", "--engine-version", "0.99")
    written = specdecode("init", *options)
    assert written.exit_code == 0, written.output
    image = "docker.io/vllm/vllm-openai:v0.99.0"
    assert yaml.safe_load(written.stdout)["spec"]["engine"] == {"version": "0.99", "image": image}
    assert f"warning: spec.engine.image: {image}: is vLLM's usual name for it" in written.stderr
    assert "is untested" in written.stderr
    assert planned(specdecode, write("a.yaml", written.stdout))["advice"] == planned(specdecode, *options)["advice"]
