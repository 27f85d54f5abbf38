"""Models of classes that sizing does not implement, on the command line."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import Shapes, header, safetensors
from tests.unit.cli.conftest import Specdecode, WriteObject, manifest

CONFIG: dict[str, Any] = {
    "architectures": ["BrandNewForCausalLM"],
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 4096,
    "vocab_size": 32_000,
    "max_position_embeddings": 32_768,
}
SHAPES: Shapes = {
    "model.embed_tokens.weight": ("BF16", [32_000, 1024]),
    "lm_head.weight": ("BF16", [32_000, 1024]),
    **{f"model.layers.{index}.all.weight": ("BF16", [40_960, 1024]) for index in range(8)},
}


@pytest.fixture
def path(write: WriteObject) -> Path:
    return write("a.yaml", manifest("a", target={"model": "my/new"}, speculation=None, parallelism={}))


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    """A folder with config.json and a safetensors file that ends after its header."""
    folder = tmp_path / "headers"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(safetensors(header(SHAPES)[0], 0))
    return folder


def planned(specdecode: Specdecode, path: Path, given: Path) -> dict[str, Any]:
    result = specdecode("plan", path, "--model-config", f"my/new={given}", "-o", "json")
    assert "is estimated" in result.stderr
    found: dict[str, Any] = json.loads(result.stdout)["objects"][0]
    return found


def test_config_and_safetensors_headers_are_enough_for_an_estimate(
    specdecode: Specdecode, path: Path, headers: Path
) -> None:
    found = planned(specdecode, path, headers)
    assert found["models"] == [
        {"role": "target", "model": "my/new", "knowledge": "estimated", "estimated_because": "architectures"}
    ]
    in_files = (2 * 32_000 + 8 * 40_960) * 1024 * 2
    first = found["candidates"][0]
    assert first["per_gpu"]["target_weights"] == pytest.approx(in_files, rel=0.01)
    assert 0 < first["estimated_margin_bytes"] < first["margin_bytes"]


def test_estimate_without_headers_has_a_larger_margin(specdecode: Specdecode, path: Path, headers: Path) -> None:
    alone, with_headers = (
        planned(specdecode, path, given)["candidates"][0]["estimated_margin_bytes"]
        for given in (headers / "config.json", headers)
    )
    assert alone > with_headers


def test_plan_explain_and_lint_mark_estimates(specdecode: Specdecode, path: Path, headers: Path) -> None:
    given = ("--model-config", f"my/new={headers}")
    assert "(estimated)" in specdecode("plan", path, *given).stdout
    assert "of it for estimated models" in specdecode("plan", "--explain", path, *given, "-o", "json").stdout
    assert "is estimated" in specdecode("lint", path, *given).output


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (struct.pack("<Q", 400) + b"{", "is truncated within its header"),
        (
            safetensors({"a": {"dtype": "BF16", "shape": [2**60], "data_offsets": [0, 16]}}, 16),
            "for 1,152,921,504,606,846,976 elements",
        ),
        (struct.pack("<Q", 2**60), "has a header of"),
        (b"", "is truncated"),
    ],
)
def test_invalid_safetensors_header_is_an_error(
    specdecode: Specdecode, path: Path, headers: Path, content: bytes, why: str
) -> None:
    (headers / "model.safetensors").write_bytes(content)
    result = specdecode("plan", path, "--model-config", f"my/new={headers}")
    assert result.exit_code == 2
    assert why in result.output


def assuming(write: WriteObject, target: str, **assume: Any) -> Path:
    return write("b.yaml", manifest("b", target={"model": target, "assume": assume}, speculation=None, parallelism={}))


def test_assumed_sizes_need_no_file(specdecode: Specdecode, write: WriteObject) -> None:
    result = specdecode("plan", assuming(write, "my/new", weightsGiB="14.5", kvBytesPerToken=131_072), "-o", "json")
    (found,) = json.loads(result.stdout)["objects"]
    assert found["models"][0]["knowledge"] == "assumed"
    assert found["candidates"][0]["kv_bytes_per_token"] == 131_072
    assert "use unverified values" in result.stderr


def test_assumed_sizes_of_a_known_model_are_ignored_with_a_warning(specdecode: Specdecode, write: WriteObject) -> None:
    known = "meta-llama/Llama-3.1-8B-Instruct"
    path = assuming(write, known, weightsGiB="20", kvBytesPerToken=1000)
    result = specdecode("plan", path, "-o", "json")
    (found,) = json.loads(result.stdout)["objects"]
    assert found["models"][0]["knowledge"] == "exact"
    assert found["candidates"][0]["kv_bytes_per_token"] == 131_072
    assert "15.0 GiB instead of 20.0" in result.stderr
    assert "131,072 bytes per token instead of 1,000" in result.stderr


@pytest.mark.parametrize("method", ["eagle", "eagle3", "dflash", "dspark"])
def test_assumed_head_is_accepted_for_any_head_method(specdecode: Specdecode, write: WriteObject, method: str) -> None:
    """Its class is not known, so nothing speaks against the method."""
    draft = {"model": "my/head", "assume": {"weightsGiB": "1.5", "kvBytesPerToken": 8192}}
    speculation = {"method": method, "numSpeculativeTokens": 3, "draft": draft}
    path = write("d.yaml", manifest("d", target={"model": "Qwen/Qwen3-8B"}, speculation=speculation, parallelism={}))
    result = specdecode("plan", path, "-o", "json")
    (found,) = json.loads(result.stdout)["objects"]
    assert [each["knowledge"] for each in found["models"]] == ["exact", "assumed"], result.output


def test_plan_warns_that_assumed_sizes_must_include_stages_of_dspark(
    specdecode: Specdecode, write: WriteObject
) -> None:
    target = {"model": "my/new", "assume": {"weightsGiB": "14.5", "kvBytesPerToken": 131_072}}
    speculation, serving = {"method": "dspark", "numSpeculativeTokens": 3}, {"maxModelLen": 8192}
    path = write("s.yaml", manifest("s", target=target, speculation=speculation, serving=serving, parallelism={}))
    result = specdecode("plan", path)
    assert result.exit_code == 0
    assert "the plan counts the DSpark stages of my/new only if" in result.stderr


def test_assumed_weights_alone_do_not_size_an_unknown_model(specdecode: Specdecode, write: WriteObject) -> None:
    assert specdecode("plan", assuming(write, "my/new", weightsGiB="14.5")).exit_code == 5


def test_empty_assume_is_refused(specdecode: Specdecode, write: WriteObject) -> None:
    result = specdecode("plan", assuming(write, "my/new"))
    assert result.exit_code == 2
    assert "spec.target.assume.weightsGiB" in result.output


@pytest.fixture
def facts(specdecode: Specdecode, headers: Path, tmp_path: Path) -> Path:
    """A facts file of the model."""
    file = tmp_path / "facts.json"
    assert specdecode("models", "add", headers, "--id", "my/new", "--out", file).exit_code == 0
    return file


def changed(facts: Path, **values: Any) -> Path:
    body = json.loads(facts.read_text())
    for key, value in values.items():
        body[key] = {**body[key], **value} if isinstance(value, dict) else value
    facts.write_text(json.dumps(body))
    return facts


def test_facts_file_gives_the_same_plan_as_the_folder(
    specdecode: Specdecode, path: Path, headers: Path, facts: Path, tmp_path: Path
) -> None:
    of_folder = planned(specdecode, path, headers)
    (of_facts,) = json.loads(specdecode("plan", path, "--facts", facts, "-o", "json").stdout)["objects"]
    assert of_facts["candidates"] == of_folder["candidates"]
    assert specdecode("lint", path, "--facts", facts).exit_code == 0
    printed = tmp_path / "printed.json"
    printed.write_text(specdecode("models", "add", headers, "--id", "my/new").stdout)
    assert json.loads(printed.read_text()) == json.loads(facts.read_text())
    assert (
        "of it for estimated models" in specdecode("plan", "--explain", path, "--facts", printed, "-o", "json").stdout
    )
    assert specdecode("render", path, "--facts", printed).exit_code == 0


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"kind": "Other"}, "is not a facts file"),
        ({"weights": {"tensors": -1}}, "write the file again"),
        ({"weights": {"total_bytes": 5}}, "weights.total_bytes: 5"),
        ({"weights": {"total_bytes": 2**60, "bytes_by_dtype": {"BF16": 2**60}}}, "exceeds 1,125,899,906,842,624"),
        (
            {"weights": {"total_bytes": 2**40, "bytes_by_dtype": {"BF16": 2**40}, "bytes_by_part": {"a": 2**40}}},
            "use config.json and weights of the same model",
        ),
        ({"weights": {"bytes_by_part": {"mtp": 9 * 2**30}}}, "contradicts the 9,663,676,416 bytes in bytes_by_part"),
        ({"config": {"num_hidden_layers": 2**60}}, "config.num_hidden_layers"),
    ],
)
def test_invalid_facts_file_is_a_single_error(
    specdecode: Specdecode, path: Path, facts: Path, values: dict[str, Any], why: str
) -> None:
    result = specdecode("plan", path, "--facts", changed(facts, **values))
    assert result.exit_code == 2
    assert why in result.output
    assert result.output.count("error:") == 1


def test_facts_with_a_class_unknown_to_vllm_are_an_error_of_the_model(
    specdecode: Specdecode, path: Path, facts: Path
) -> None:
    result = specdecode("plan", path, "--facts", changed(facts, config={"architectures": ["Strange"]}))
    assert result.exit_code == 2
    assert "spec.target.model: my/new: its class Strange is unknown to vLLM" in result.output


@pytest.mark.parametrize(
    ("layers_bytes", "warns"), [(0.5, True), (0.79, True), (0.82, False), (1.24, False), (1.3, True)]
)
def test_weights_far_from_the_config_give_a_warning(
    specdecode: Specdecode, path: Path, facts: Path, layers_bytes: float, warns: bool
) -> None:
    """Its config.json describes 8 layers of 15,206,400 elements, and tables."""
    tables = 2 * 32_000 * 1024 * 2
    layers = int(8 * 15_206_400 * 2 * layers_bytes)
    total = {"total_bytes": tables + layers, "bytes_by_dtype": {"BF16": tables + layers}}
    parts = {"model.embed_tokens": tables // 2, "lm_head": tables // 2, "model.layers": layers}
    given = changed(facts, weights={**total, "bytes_by_part": parts})
    plan, lint = specdecode("plan", path, "--facts", given), specdecode("lint", path, "--facts", given)
    assert (plan.exit_code, lint.exit_code) == (0, 0)
    assert ("by its config.json, more than 25 % apart" in plan.stderr, "more than 25 %" in lint.output) == (
        warns,
        warns,
    )


def test_facts_that_contradict_spec_or_catalogue_are_an_error(
    specdecode: Specdecode, write: WriteObject, facts: Path
) -> None:
    other = {"model": "my/new", "config": CONFIG | {"num_hidden_layers": 9}}
    spec = write("spec.yaml", manifest("a", target=other, speculation=None, parallelism={}))
    result = specdecode("plan", spec, "--facts", facts)
    assert (result.exit_code, "spec.target.config.num_hidden_layers" in result.output) == (2, True)
    known = "meta-llama/Llama-3.1-8B-Instruct"
    spec = write("known.yaml", manifest("a", target={"model": known}, speculation=None, parallelism={}))
    result = specdecode("plan", spec, "--facts", changed(facts, model=known))
    assert (result.exit_code, "hidden_size 1024" in result.output) == (2, True)
    other = write("other.yaml", manifest("b", target={"model": known}, serving={"maxModelLen": "x"}))
    lint = json.loads(specdecode("lint", spec, other, "--facts", facts, "-o", "json").stdout)
    found = {each["field"] for each in lint["findings"] if each["level"] == "error"}
    assert {"spec.target.model", "spec.serving.maxModelLen"} <= found


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"n_routed_experts": 64, "moe_intermediate_size": 512}, "n_routed_experts"),
        ({"text_config": {"num_hidden_layers": 40}, "rope_theta": 5.0}, "text_config"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_key_value_heads": 16, "initializer_range": 1}, "num_key_value_heads"),
    ],
)
def test_facts_that_contradict_the_model_config_are_an_error(
    specdecode: Specdecode, path: Path, facts: Path, changes: dict[str, Any], key: str
) -> None:
    (config := facts.with_name("config.json")).write_text(json.dumps(CONFIG | changes))
    result = specdecode("plan", path, "--facts", facts, "--model-config", f"my/new={config}")
    assert result.exit_code == 2
    assert f"spec.target.config.{key}" in result.output
    assert result.output.count("contradicts the model's facts") == 1


def test_facts_that_contradict_the_model_folder_are_an_error(
    specdecode: Specdecode, path: Path, facts: Path, headers: Path
) -> None:
    given = ("--facts", facts, "--model-config", f"my/new={headers}")
    assert specdecode("plan", path, *given).exit_code == 0
    shapes = SHAPES | {"model.layers.8.all.weight": ("BF16", [40_960, 1024])}
    (headers / "model.safetensors").write_bytes(safetensors(header(shapes)[0], 0))
    result = specdecode("plan", path, *given)
    assert (result.exit_code, "in the folder of --model-config" in result.output) == (2, True)


def test_assumed_model_needs_max_model_len(specdecode: Specdecode, write: WriteObject) -> None:
    target = {"model": "my/new", "assume": {"weightsGiB": "14.5", "kvBytesPerToken": 131_072}}
    asked = {"target": target, "speculation": None, "parallelism": {}}
    path = write("d.yaml", manifest("d", **asked, serving={}))
    result = specdecode("plan", path)
    assert result.exit_code == 2
    assert "spec.serving.maxModelLen: is missing" in result.output
    path = write("d.yaml", manifest("d", **asked, serving={"maxModelLen": 8192}))
    assert specdecode("plan", path).exit_code == 0


def test_failed_write_keeps_the_old_facts_file(
    specdecode: Specdecode, headers: Path, facts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = facts.read_text()

    def fails(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fails)
    result = specdecode("models", "add", headers, "--id", "my/other", "--out", facts)
    assert (result.exit_code, "No space left on device" in result.output) == (2, True)
    assert facts.read_text() == before
    assert [each.name for each in facts.parent.iterdir() if each.name.startswith(".")] == []


def test_second_facts_file_of_a_model_is_refused(specdecode: Specdecode, path: Path, facts: Path) -> None:
    result = specdecode("plan", path, "--facts", facts, "--facts", facts)
    assert (result.exit_code, "has facts already" in result.output) == (2, True)


def test_folder_without_a_config_is_refused(specdecode: Specdecode, tmp_path: Path) -> None:
    result = specdecode("models", "add", tmp_path)
    assert (result.exit_code, "there is no config.json" in result.output) == (5, True)


def test_folder_without_weights_suggests_model_config(
    specdecode: Specdecode, path: Path, tmp_path: Path, headers: Path
) -> None:
    (headers / "model.safetensors").unlink()
    result = specdecode("models", "add", headers, "--id", "my/new")
    assert (result.exit_code, "there are no weights" in result.output) == (5, True)
    assert f"--model-config my/new={headers}/config.json" in result.output
    assert f"--model-config ID={headers}/config.json" in specdecode("models", "add", headers).output
    assert specdecode("plan", path, "--model-config", f"my/new={headers}/config.json").exit_code == 0
    result = specdecode("plan", path, "--model-config", f"my/new={headers}")
    assert (result.exit_code, "use the path of that file" in result.output.replace("\n", " ")) == (2, True)


def test_models_show_reads_a_facts_file(specdecode: Specdecode, facts: Path) -> None:
    shown = json.loads(specdecode("models", "show", "my/new", "--facts", facts, "-o", "json").stdout)
    assert (shown["knowledge"], shown["source"]) == ("estimated", "a facts file")
    assert shown["weights"]["bytes"] == pytest.approx((2 * 32_000 + 8 * 40_960) * 1024 * 2, rel=0.01), "of its files"
    other = specdecode("models", "show", "my/other", "--facts", facts)
    assert (other.exit_code, "or the facts files" in other.stderr) == (5, True)
    broken = specdecode("models", "show", "my/new", "--facts", changed(facts, weights={"tensors": -1}))
    assert (broken.exit_code, "write the file again" in broken.stderr) == (2, True)
