"""What people get wrong: one clear error that names the field, the value and the fix, and the documented exit code."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.llama import SMALL_CONFIG
from tests.unit.cli.conftest import PAIR, Specdecode, WriteObject, manifest

INVALID = 2
AWQ = {**SMALL_CONFIG, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
LLAMA_70B, LLAMA_8B = "meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"


def with_config(**changes: Any) -> dict[str, Any]:
    """An object with a model of its own, whose config.json has these changes; None takes a key out."""
    config = {key: value for key, value in {**SMALL_CONFIG, **changes}.items() if value is not None}
    return manifest("a", target={"model": "my/model", "config": config}, speculation=None, parallelism={})


def speculation(**changes: Any) -> dict[str, Any]:
    return manifest("a", speculation={**PAIR["speculation"], **changes})


def told(specdecode: Specdecode, path: Path, *arguments: object) -> str:
    """What plan says of invalid input, where it exits as documented."""
    result = specdecode("plan", "-f", path, *arguments)
    assert result.exit_code == INVALID, result.output
    assert not isinstance(result.exception, Exception), result.exception
    return result.stderr + result.stdout


def test_a_name_that_an_api_server_would_refuse_is_refused(specdecode: Specdecode, write: WriteObject) -> None:
    assert "metadata.name" in told(specdecode, write("d.yaml", manifest("8b")))


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (None, "metadata.name: is missing: name the object"),
        ({}, "metadata.name: is missing: name the object"),
        ({"name": ""}, "metadata.name: is missing: name the object"),
        ({"generateName": "chat-"}, "metadata.name: is missing: name the object"),
        ({"name": 7}, "metadata.name: 7: must be text: write it in quotes"),
        ({"name": ["a"]}, 'metadata.name: ["a"]: must be text'),
        ({"name": "a", "namespace": True}, "metadata.namespace: true: must be text: write it in quotes"),
    ],
)
def test_an_object_without_a_name_is_invalid(
    specdecode: Specdecode, write: WriteObject, metadata: Any, words: str
) -> None:
    path = write("a.yaml", {**manifest("a"), "metadata": metadata})
    answer = told(specdecode, path)
    assert words in answer
    assert "a.yaml" in answer
    assert specdecode("explain", path).exit_code == INVALID
    assert specdecode("render", path).exit_code == INVALID


def test_all_that_is_wrong_with_an_object_is_said_at_once(specdecode: Specdecode, write: WriteObject) -> None:
    answer = told(specdecode, write("a.yaml", {**manifest("a"), "metadata": {}, "spec": {}}))
    assert "metadata.name: is missing" in answer
    assert "spec.target" in answer


def test_the_matrix_of_several_objects_is_shown(specdecode: Specdecode, write: WriteObject) -> None:
    free = {"parallelism": {}, "target": {"model": "meta-llama/Llama-3.1-8B-Instruct"}, "speculation": None}
    path = write("two.yaml", manifest("a", **free), manifest("b", **free))
    assert "8 x H100, TP 8" not in specdecode("plan", path).stdout
    text = specdecode("plan", path, "--matrix").stdout
    assert text.count("8 x H100, TP 8") == 2
    assert [line.split()[0] for line in text.splitlines() if "vLLM 0.33, length" in line] == ["a", "b"]


@pytest.mark.parametrize("command", ["plan", "explain", "render", "lint"])
def test_a_config_that_goes_into_no_object_is_refused(specdecode: Specdecode, write: WriteObject, command: str) -> None:
    config = write("config.json", json.dumps(SMALL_CONFIG))
    path = write("a.yaml", manifest("a"), with_config())
    path.write_text(path.read_text().replace("name: a\n", "name: b\n", 1))
    result = specdecode(command, path, "--model-config", f"my/modell={config}")
    assert result.exit_code == INVALID
    named = "meta-llama/Llama-3.1-70B-Instruct, meta-llama/Llama-3.1-8B-Instruct, my/model"
    assert f"--model-config: my/modell: no object names this model: use one of those named ({named})" in result.stderr
    own = specdecode(command, path, "--model-config", f"my/model={config}")
    assert "--model-config: my/model: the object has a config of its own: remove one of the two" in own.stderr
    twice = ["--model-config", f"my/model={config}"] * 2
    assert "my/model: is given twice: remove one" in specdecode(command, path, *twice).stderr


def test_of_two_objects_the_invalid_one_does_not_hide_the_other(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", {**manifest("misnamed"), "kind": "SpecDecodeDeploymnt"}, manifest("good"))
    answer = told(specdecode, path)
    assert "document 1: kind: SpecDecodeDeploymnt" in answer
    assert "good" in answer


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0: must be at least 1"),
        (-1, "-1: must be at least 1"),
        (2**63, "9223372036854775808: must be at most 16,777,216"),
        (math.inf, "inf: must be a whole number"),
        (math.nan, "nan: must be a whole number"),
        (8192.5, "8192.5: must be a whole number"),
        ("8192", '"8192": must be a whole number, without quotes'),
        (True, "true: must be a whole number"),
        (200_000, "200000: meta-llama/Llama-3.1-70B-Instruct was made for at most 131072 tokens: use that or less"),
    ],
)
def test_a_bad_number_is_told_with_its_bound(
    specdecode: Specdecode, write: WriteObject, value: object, words: str
) -> None:
    path = write("a.yaml", manifest("a", serving={"maxModelLen": value}))
    assert f"spec.serving.maxModelLen: {words}" in told(specdecode, path)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (speculation(numSpeculativeTokens=0), "numSpeculativeTokens: 0: proposes nothing: use 1 to 32"),
        (speculation(numSpeculativeTokens=-3), "numSpeculativeTokens: -3: must be at least 0"),
        (speculation(numSpeculativeTokens=33), "numSpeculativeTokens: 33: is more than 32: method draft_model takes"),
        (speculation(numSpeculativeTokens=2**63), "numSpeculativeTokens: 9223372036854775808: must be at most 64"),
        (manifest("a", serving={"maxModelLength": 1}), "no field of spec.serving: did you mean maxModelLen?"),
        (
            speculation(num_speculative_tokens=3),
            "spec.speculation.num_speculative_tokens: 3: is no field of spec.speculation: did you mean numSp",
        ),
        (
            manifest("a", captures=[{"name": "nightly", "schedule": "@daily", "capture": {}}]),
            "@daily: must match the pattern of a cron line: write minute, hour, day, month and weekday",
        ),
        (
            manifest("a", podTemplate={"spec": {"containers": [{"name": "vllm", "resources": {}}]}}),
            "spec.podTemplate.spec.containers[0]: vllm: is a further container without an image: give it one, or name",
        ),
        (speculation(drat={}), "spec.speculation.drat: {}: is no field of spec.speculation: did you mean draft?"),
        (manifest("a", zzz=1), "spec.zzz: 1: is no field of spec: use one of "),
        (manifest("a", target={}), "spec.target.model: is missing"),
        (
            manifest("a", speculation={"method": "draft_model"}),
            "spec.speculation.draft: is missing: method draft_model",
        ),
        (manifest("a", target="x"), "spec.target: x: must be an object of fields"),
        (manifest("a", target={"model": 7}), "spec.target.model: 7: must be text: put it in quotes"),
        (manifest("a", target={"model": LLAMA_70B, "quantization": "INT3"}), "INT3: use one of 'AsCheckpoint', 'BF16'"),
        (manifest("a", parallelism={"tensor": 3}), "tensor: 3: target: num_attention_heads 64 of"),
        (
            speculation(draft={"model": "Qwen/Qwen3-8B"}),
            "128256, and without useHeterogeneousVocab vLLM wants the same: choose meta-llama/Llama-3.2-1B-Instruct",
        ),
    ],
)
def test_a_bad_field_is_told_with_its_fix(
    specdecode: Specdecode, write: WriteObject, body: dict[str, Any], words: str
) -> None:
    assert words in told(specdecode, write("a.yaml", body))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 0}, "hidden_size: 0: must lie between 1 and"),
        ({"num_hidden_layers": -1}, "num_hidden_layers: -1: must lie between 1 and"),
        ({"num_attention_heads": 30}, "num_key_value_heads: 8: must divide num_attention_heads, which is 30"),
        ({"num_key_value_heads": 64}, "num_key_value_heads: 64: must divide num_attention_heads, which is 32"),
        ({"hidden_size": 2**63}, "hidden_size: 9223372036854775808: must lie between 1 and"),
        ({"hidden_size": math.inf}, "hidden_size: inf: must be a whole number"),
        ({"hidden_size": math.nan}, "hidden_size: nan: must be a whole number"),
        ({"vocab_size": "32000"}, 'vocab_size: "32000": must be a whole number'),
        ({"num_hidden_layers": None}, "num_hidden_layers: is missing; copy it from the model's config.json"),
        ({"torch_dtype": "float8"}, "torch_dtype: float8: must be bfloat16, float16 or float32"),
        ({"architectures": ["Unheard"]}, "architectures: Unheard: is unknown to vLLM"),
        ({"architectures": None}, "architectures: is missing; copy it from the model's config.json"),
        (
            {"quantization_config": {"quant_method": "odd"}},
            "quantization_config.quant_method: odd: vLLM does not know this method",
        ),
    ],
)
def test_geometry_that_contradicts_itself_is_told_by_its_key(
    specdecode: Specdecode, write: WriteObject, changes: dict[str, Any], words: str
) -> None:
    assert f"spec.target.config.{words}" in told(specdecode, write("a.yaml", with_config(**changes)))


def test_a_config_beside_the_file_is_judged_in_the_same_way(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("a.yaml", manifest("a", target={"model": "my/model"}, speculation=None, parallelism={}))
    unknown = write("unknown.json", json.dumps({**SMALL_CONFIG, "architectures": ["Unheard"]}))
    assert "architectures: Unheard: is unknown to vLLM" in told(
        specdecode, path, "--model-config", f"my/model={unknown}"
    )
    huge = write(
        "huge.json", json.dumps({**SMALL_CONFIG, "hidden_size": 1}).replace('"hidden_size": 1', '"hidden_size": 1e400')
    )
    assert "huge.json, document 1: the number 1e400 is too large" in told(
        specdecode, path, "--model-config", f"my/model={huge}"
    )
    two = write("two.json", "{}", "{}")
    assert "must hold one object" in told(specdecode, path, "--model-config", f"my/model={two}")


def test_an_unknown_model_says_what_helps(specdecode: Specdecode, write: WriteObject) -> None:
    misspelt = write("a.yaml", manifest("a", target={"model": "meta-llama/Lama-3.1-70B-Instruct"}))
    assert f"did you mean {LLAMA_70B}?" in specdecode("plan", "-f", misspelt).stdout
    result = specdecode("plan", "-f", write("a.yaml", speculation(draft={"model": "my/own-draft"})))
    answer = result.stdout + result.stderr
    assert (result.exit_code, "spec.speculation.draft.model: my/own-draft: " in answer) == (5, True)
    for fix in (
        "--model-config my/own-draft=PATH",
        "spec.speculation.draft.config",
        "In a cluster the operator reads",
    ):
        assert fix in answer


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            {"model": LLAMA_70B, "quantization": "INT4"},
            "INT4: vLLM quantizes to INT4 only beforehand: name a checkpoint",
        ),
        ({"model": "my/awq", "config": AWQ, "quantization": "FP8"}, "FP8: the checkpoint is INT4: use AsCheckpoint"),
        ({"model": "my/awq", "config": AWQ, "quantization": "BF16"}, "BF16: the checkpoint is INT4: use AsCheckpoint"),
    ],
)
def test_a_precision_that_the_checkpoint_contradicts_is_refused(
    specdecode: Specdecode, write: WriteObject, target: dict[str, Any], words: str
) -> None:
    path = write("a.yaml", manifest("a", target=target, speculation=None, parallelism={}))
    assert f"spec.target.quantization: {words}" in told(specdecode, path)


def test_a_date_in_a_part_that_kubernetes_defines_is_text(specdecode: Specdecode, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    dated = manifest("a", podTemplate={"metadata": {"annotations": {"built": "DATE"}}})
    path.write_text(yaml.safe_dump(dated).replace("DATE", "2026-11-22"))
    assert specdecode("plan", "-f", path).exit_code == 0


def test_a_draft_larger_than_the_target_is_planned_and_told(specdecode: Specdecode, write: WriteObject) -> None:
    body = manifest("a", target={"model": LLAMA_8B}, accelerator={"products": ["NVIDIA-H200"]})
    body["spec"]["speculation"]["draft"] = {"model": LLAMA_70B}
    result = specdecode("plan", "-f", write("a.yaml", body))
    assert result.exit_code == 0, "vLLM would run it"
    assert "it is too large" in result.stdout
    assert "it is too large" not in specdecode("plan", "-f", write("b.yaml", manifest("b"))).stdout


def test_bad_lines_of_a_batch_decide_the_exit_code_only_when_strict(specdecode: Specdecode) -> None:
    good = json.dumps({"id": 1, "gpu": "H100", "model": LLAMA_8B})
    bad = json.dumps({"id": 2, "gpu": "H100", "model": LLAMA_8B, "max_model_len": 2**63})
    lines = f"{good}\n\n{bad}\nnot json\n{good}\n"
    for arguments, exit_code in (((), 0), (("--strict",), INVALID)):
        result = specdecode("estimate", "--in", "-", "--out", "-", *arguments, stdin=lines)
        assert result.exit_code == exit_code
        results = [json.loads(line) for line in result.stdout.splitlines()]
        assert [each["error"] is None for each in results] == [True, False, False, True]
        assert results[1]["error"].startswith("max_model_len: 9223372036854775808: must lie between 1 and")
        assert "2 of 4 cases have an error" in result.stderr
    assert specdecode("estimate", "--in", "-", "--out", "-", "--strict", stdin=good).exit_code == 0


def test_of_thousands_of_problems_the_first_are_told(specdecode: Specdecode, write: WriteObject) -> None:
    answer = told(specdecode, write("a.yaml", manifest("a", **{f"k{index:05}": {} for index in range(20_000)})))
    assert answer.count("is no field of spec") == 50
    assert "spec: 20,000 problems: the first 50 are told" in answer


def test_a_draft_whose_states_fit_no_block_of_the_target_is_named(specdecode: Specdecode, write: WriteObject) -> None:
    """Found while planning, where it ended the command with a traceback."""
    draft = {"method": "draft_model", "numSpeculativeTokens": 4, "draft": {"model": "Qwen/Qwen3.5-397B-A17B"}}
    body = manifest("a", target={"model": "Qwen/Qwen3.6-35B-A3B"}, speculation=draft)
    answer = told(specdecode, write("a.yaml", body))
    assert "spec.speculation.draft.model: Qwen/Qwen3.5-397B-A17B: its states do not fit the target's blocks" in answer


@pytest.mark.parametrize("config", [{"architectures": ["Unheard"]}, {"architectures": ["UnheardMoeForCausalLM"]}])
def test_what_is_said_of_an_unknown_class_is_short(
    specdecode: Specdecode, write: WriteObject, config: dict[str, Any]
) -> None:
    body = manifest("a", target={"model": "org/unheard", "config": config})
    assert len(told(specdecode, write("a.yaml", body))) < 1000
