"""Files that commands read, and what is wrong with them."""

import json
import math
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode_operator.cli import input_files
from tests.support.llama import SMALL_CONFIG
from tests.unit.cli.conftest import PAIR, Specdecode, WriteObject, manifest

INVALID = 2
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


def test_name_that_the_api_server_would_refuse_is_refused(specdecode: Specdecode, write: WriteObject) -> None:
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
def test_object_without_a_name_is_invalid(
    specdecode: Specdecode, write: WriteObject, metadata: Any, words: str
) -> None:
    path = write("a.yaml", {**manifest("a"), "metadata": metadata})
    answer = told(specdecode, path)
    assert words in answer
    assert "a.yaml" in answer
    assert specdecode("plan", "--explain", path).exit_code == INVALID
    assert specdecode("render", path).exit_code == INVALID


def test_all_problems_of_an_object_are_reported_in_one_run(specdecode: Specdecode, write: WriteObject) -> None:
    answer = told(specdecode, write("a.yaml", {**manifest("a"), "metadata": {}, "spec": {}}))
    assert "metadata.name: is missing" in answer
    assert "spec.target" in answer


def test_matrix_is_shown_for_several_objects(specdecode: Specdecode, write: WriteObject) -> None:
    free = {"parallelism": {}, "target": {"model": "meta-llama/Llama-3.1-8B-Instruct"}, "speculation": None}
    path = write("two.yaml", manifest("a", **free), manifest("b", **free))
    assert "8 x H100, TP 8" not in specdecode("plan", path).stdout
    text = specdecode("plan", path, "--matrix").stdout
    assert text.count("8 x H100, TP 8") == 2
    assert [line.split()[0] for line in text.splitlines() if "vLLM 0.33, length" in line] == ["a", "b"]


@pytest.mark.parametrize("command", ["plan", "render", "lint"])
def test_unused_model_config_is_refused(specdecode: Specdecode, write: WriteObject, command: str) -> None:
    config = write("config.json", json.dumps(SMALL_CONFIG))
    path = write("a.yaml", manifest("a"), with_config())
    path.write_text(path.read_text().replace("name: a\n", "name: b\n", 1))
    result = specdecode(command, path, "--model-config", f"my/modell={config}")
    assert result.exit_code == INVALID
    named = "meta-llama/Llama-3.1-70B-Instruct, meta-llama/Llama-3.1-8B-Instruct, my/model"
    assert f"--model-config: my/modell: not used in any object: use one of these ids: {named}" in result.stderr
    own = specdecode(command, path, "--model-config", f"my/model={config}")
    assert "--model-config: my/model: the object already has a config" in own.stderr
    twice = ["--model-config", f"my/model={config}"] * 2
    assert "my/model: set twice: remove one" in specdecode(command, path, *twice).stderr


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
def test_number_out_of_bounds_is_reported_with_its_bound(
    specdecode: Specdecode, write: WriteObject, value: object, words: str
) -> None:
    path = write("a.yaml", manifest("a", serving={"maxModelLen": value}))
    assert f"spec.serving.maxModelLen: {words}" in told(specdecode, path)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (speculation(numSpeculativeTokens=0), "numSpeculativeTokens: 0: proposes no tokens: use 1 to 32"),
        (speculation(numSpeculativeTokens=-3), "numSpeculativeTokens: -3: must be at least 0"),
        (speculation(numSpeculativeTokens=33), "numSpeculativeTokens: 33: is more than 32: method draft_model takes"),
        (speculation(numSpeculativeTokens=2**63), "numSpeculativeTokens: 9223372036854775808: must be at most 64"),
        (manifest("a", serving={"maxModelLength": 1}), "unknown field: did you mean maxModelLen?"),
        (
            speculation(num_speculative_tokens=3),
            "spec.speculation.num_speculative_tokens: 3: unknown field: did you mean numSp",
        ),
        (
            manifest("a", captures=[{"name": "nightly", "schedule": "@daily", "capture": {}}]),
            "@daily: must match the pattern of a cron line: write minute, hour, day, month and weekday",
        ),
        (
            manifest("a", podTemplate={"spec": {"containers": [{"name": "vllm", "resources": {}}]}}),
            "spec.podTemplate.spec.containers[0]: vllm: is an added container without an image; set one, or use",
        ),
        (speculation(drat={}), "spec.speculation.drat: {}: unknown field: did you mean draft?"),
        (manifest("a", zzz=1), "spec.zzz: 1: unknown field: use one of "),
        (manifest("a", target={}), "spec.target.model: is missing"),
        (
            manifest("a", speculation={"method": "draft_model"}),
            "spec.speculation.draft: is missing: method draft_model",
        ),
        (manifest("a", target="x"), "spec.target: x: must be an object"),
        (manifest("a", target={"model": 7}), "spec.target.model: 7: must be text: put it in quotes"),
        (manifest("a", target={"model": LLAMA_70B, "quantization": "INT3"}), "INT3: use one of 'AsCheckpoint', 'BF16'"),
        (manifest("a", parallelism={"tensor": 3}), "tensor: 3: target: num_attention_heads 64 of"),
        (
            speculation(draft={"model": "Qwen/Qwen3-8B"}),
            "128256, and without useHeterogeneousVocab vLLM wants the same: choose meta-llama/Llama-3.2-1B-Instruct",
        ),
    ],
)
def test_invalid_field_is_reported_with_its_fix(
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
def test_contradictory_model_config_is_reported_by_key(
    specdecode: Specdecode, write: WriteObject, changes: dict[str, Any], words: str
) -> None:
    assert f"spec.target.config.{words}" in told(specdecode, write("a.yaml", with_config(**changes)))


def test_unknown_model_suggests_fixes(specdecode: Specdecode, write: WriteObject) -> None:
    misspelt = write("a.yaml", manifest("a", target={"model": "meta-llama/Lama-3.1-70B-Instruct"}))
    assert f"did you mean {LLAMA_70B}?" in specdecode("plan", "-f", misspelt).stdout
    result = specdecode("plan", "-f", write("a.yaml", speculation(draft={"model": "my/own-draft"})))
    answer = result.stdout + result.stderr
    assert (result.exit_code, "spec.speculation.draft.model: my/own-draft: " in answer) == (5, True)
    for fix in (
        "--model-config my/own-draft=PATH",
        "spec.speculation.draft.config",
        "In a cluster, the operator reads",
    ):
        assert fix in answer


def test_bad_batch_lines_fail_the_command_only_with_strict(specdecode: Specdecode) -> None:
    good = json.dumps({"id": 1, "gpu": "H100", "model": LLAMA_8B})
    bad = json.dumps({"id": 2, "gpu": "H100", "model": LLAMA_8B, "max_model_len": 2**63})
    lines = f"{good}\n\n{bad}\nnot json\n{good}\n"
    for arguments, exit_code in (((), 0), (("--strict",), INVALID)):
        result = specdecode("plan", "--batch", "-", "--out", "-", *arguments, stdin=lines)
        assert result.exit_code == exit_code
        results = [json.loads(line) for line in result.stdout.splitlines()]
        assert [each["error"] is None for each in results] == [True, False, False, True]
        assert results[1]["error"].startswith("max_model_len: 9223372036854775808: must lie between 1 and")
        assert "2 of 4 cases have an error" in result.stderr
    assert specdecode("plan", "--batch", "-", "--out", "-", "--strict", stdin=good).exit_code == 0


def test_only_the_first_50_of_many_problems_are_shown(specdecode: Specdecode, write: WriteObject) -> None:
    answer = told(specdecode, write("a.yaml", manifest("a", **{f"k{index:05}": {} for index in range(20_000)})))
    assert answer.count("unknown field") == 50
    assert "spec: 20,000 problems: only the first 50 are shown" in answer


# What is no file, no folder, no YAML, or no object of ours: one line, at once, and nothing is overwritten.


def test_duplicate_object_name_is_an_error(specdecode: Specdecode, write: WriteObject, tmp_path: Path) -> None:
    elsewhere = manifest("a")
    elsewhere["metadata"]["namespace"] = "other"
    first = write("a/one.yaml", manifest("a"), manifest("b"), elsewhere)
    write("a/two.yaml", manifest("a"))
    answer = told(specdecode, tmp_path / "a")
    assert (
        f"two.yaml, document 1: metadata.name: a: SpecDecodeDeployment a is also in {first}, document 1:"
        " remove or rename one" in answer
    )
    assert answer.count("is also in") == 1
    assert "is also in" in told(specdecode, first, "-f", first)
    twice = specdecode("plan", "-f", first, "-f", "-", stdin=(tmp_path / "a/two.yaml").read_text())
    assert twice.exit_code == INVALID
    assert "standard input, document 1: metadata.name: a:" in twice.stderr
    kinds = write("c.yaml", manifest("a"), {**manifest("a"), "kind": "SpecDecodeCapture"})
    assert specdecode("plan", kinds).exit_code == 0


def test_only_the_first_50_errors_of_a_file_are_shown(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("twins.yaml", *[manifest("a")] * 60)
    for command in ("plan", "lint"):
        result = specdecode(command, path)
        assert result.exit_code == 2
        told = [
            line for line in (result.stdout + result.stderr).splitlines() if "twins.yaml" in line and "rror" in line
        ]
        assert len(told) == 51, command
        assert "has 59 errors, of which 50 are shown" in told[-1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "contains no SpecDecodeDeployment: use another file or folder"),
        ("# nothing yet\n", "contains no SpecDecodeDeployment: use another"),
        ("- 1\n- 2\n", "contains no SpecDecodeDeployment, only a list: use another"),
        ("hello", "contains no SpecDecodeDeployment, only plain text: use another"),
        ("target: {model: x}", ", only an object without kind: use another"),
        (
            "{apiVersion: apps/v1, kind: Deployment}\n---\n[]",
            ", only Deployment (apps/v1), a list: use a file with an object that runs vLLM",
        ),
        (
            "{apiVersion: specdecode.io/v1alpha1}",
            "document 1: kind: is missing: use SpecDec",
        ),
        ("{apiVersion: specdecode.io/v1alpha1, kind: SpecDecode}", "kind: SpecDecode: use SpecDecodeDeployment"),
        ("{kind: SpecDecodeDeployment}", "document 1: apiVersion: is missing: use specdecode.io/v1alpha1"),
        (
            "{apiVersion: example.org/v1, kind: SpecDecodeDeployment}",
            "apiVersion: example.org/v1: use specdecode.io/v1a",
        ),
        ("{apiVersion: specdecode.io/v1alpha1, kind: SpecDecodeDeployment, metadata: []}", "metadata: []: must be an"),
        ("{apiVersion: specdecode.io/v1alpha1, kind: SpecDecodeDeployment}", "spec: is missing: must be an object"),
        ("{apiVersion: specdecode.io/v1alpha1, kind: SpecDecodeDeployment, spec: []}", "spec: []: must be an object"),
    ],
)
@pytest.mark.parametrize("output", ["table", "json"])
def test_file_without_a_deployment_says_what_it_contains(
    specdecode: Specdecode, write: WriteObject, text: str, words: str, output: str
) -> None:
    answer = told(specdecode, write("a.yaml", text), "-o", output)
    assert words in answer
    assert "a.yaml" in answer


@pytest.mark.parametrize(
    ("content", "key", "place"),
    [
        ("{a}\n{b}", "apiVersion", None),
        ("kind: A\nspec:\n  a: {x: 1, x: 2}", "x", "line 3, column 13"),
        ('{"kind": "A",\n "kind": "B"}', "kind", "line 2, column 2"),
        ("a: &all [{x: 1}]\nb: [*all, *all]\na: 2", "a", "line 3, column 1"),
    ],
)
def test_duplicate_yaml_key_is_reported_with_its_line(
    specdecode: Specdecode, write: WriteObject, content: str, key: str, place: str | None
) -> None:
    """A forgotten --- makes two objects one, of which only the last would be read."""
    objects = {name: yaml.safe_dump(manifest(name)).strip() for name in "ab"}
    if place is None:
        place = f"line {len(objects['a'].splitlines()) + 1}, column 1"
        content = "\n".join(objects.values())
    result = specdecode("plan", "-f", write("two.yaml", content))
    assert result.exit_code == 2
    assert f"two.yaml, document 1: is not valid YAML at {place}: the key {key} is there twice" in result.stderr


def test_merged_keys_may_be_overridden(specdecode: Specdecode, write: WriteObject) -> None:
    base = "x: &base {maxModelLen: 4096, maxNumSeqs: 16}\ny: &more {<<: *base, maxNumSeqs: 32}\n---\n"
    spec = manifest("a")
    del spec["spec"]["serving"]
    text = (
        yaml.safe_dump(spec)
        + "  serving: &own\n    <<: &defaults {maxModelLen: 4096, maxNumSeqs: 16}\n    maxNumSeqs: 32\n"
    )
    result = specdecode("plan", "-f", write("a.yaml", base + text), "-o", "json")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("name", "words"),
    [("", "empty file name"), ("/", "is the root folder"), ("/dev/zero", "is a device")],
)
def test_path_that_is_no_file_is_refused(specdecode: Specdecode, name: str, words: str) -> None:
    assert words in specdecode("plan", "-f", name).stderr
    assert specdecode("plan", "-f", name).exit_code == INVALID


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "FIFO"),
        ("import", "-f", "FIFO"),
        ("plan", "FILE", "--nodes", "FIFO"),
        ("plan", "FILE", "--model-config", "my/model=FIFO"),
        ("plan", "FILE", "--calibration", "FIFO"),
        ("plan", "--batch", "FIFO", "--out", "-"),
        ("verdict", "--in", "FIFO", "--out", "-"),
        ("calibrate", "--append-to", "OUT", "--gpu", "NVIDIA-H200", "--from-log", "FIFO"),
        ("calibrate", "--append-to", "OUT", "--from-deployment", "FIFO"),
    ],
)
def test_fifo_is_refused_instead_of_blocking(
    specdecode: Specdecode, write: WriteObject, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    fifo, file = tmp_path / "fifo", write("a.yaml", manifest("a", target={"model": "my/model"}, speculation=None))
    os.mkfifo(fifo)
    places = {"FIFO": str(fifo), "FILE": str(file), "OUT": str(tmp_path / "out.json")}
    words = [each.replace("FIFO", str(fifo)) if "=" in each else places.get(each, each) for each in arguments]
    result = specdecode(*words)
    assert f"{fifo}: is a FIFO" in result.stderr
    assert result.exit_code == INVALID


def test_process_substitution_is_read(specdecode: Specdecode) -> None:
    reading, writing = os.pipe()
    os.write(writing, json.dumps(manifest("a")).encode())
    os.close(writing)
    try:
        assert specdecode("plan", f"/dev/fd/{reading}").exit_code == 0
    finally:
        os.close(reading)


def test_folder_with_too_many_files_is_refused(
    specdecode: Specdecode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_files, "_MOST_FILES", 3)
    for number in range(4):
        (tmp_path / f"{number}.txt").touch()
    result = specdecode("plan", tmp_path)
    assert "contains more than 3 files" in result.stderr


def test_batch_output_is_never_written_to_the_input_file(specdecode: Specdecode, tmp_path: Path) -> None:
    cases, link = tmp_path / "cases", tmp_path / "link"
    cases.write_text("{}\n")
    link.symlink_to(cases)
    os.link(cases, tmp_path / "hard")
    for out in (cases, link, tmp_path / "hard"):
        result = specdecode("plan", "--batch", cases, "--out", out)
        assert "is also the file of --batch" in result.stderr
        assert cases.read_text() == "{}\n"


def test_batch_output_replaces_a_file_and_keeps_its_mode(specdecode: Specdecode, tmp_path: Path) -> None:
    cases, out = tmp_path / "cases", tmp_path / "folder" / "out"
    cases.write_text("{}\n")
    result = specdecode("plan", "--batch", cases, "--out", out)
    assert f"--out: {out}: No such file or directory" in result.stderr
    out.parent.mkdir()
    out.write_text("old")
    out.chmod(0o640)
    assert specdecode("plan", "--batch", cases, "--out", out).exit_code == 0
    assert out.stat().st_mode & 0o777 == 0o640
    assert [file.name for file in out.parent.iterdir()] == ["out"]


def test_crds_needs_an_existing_folder(specdecode: Specdecode, tmp_path: Path) -> None:
    result = specdecode("crds", "--out", tmp_path / "none")
    assert f"{tmp_path / 'none'}: is not a folder: create it first" in result.stderr
    assert result.exit_code == INVALID


# What others wrote does nothing to a terminal: not on lines for people, nor in data, where it keeps its value.

EVIL = "a\x1b[2J\u202eb\x07\x9b2Kc\x7f"
"""Escape sequences, new and old ones, could hide a verdict, and marks for the direction of writing turn it round."""

LINES = "x\nobjects: 1, errors: 0, warnings: 0"
"""A second line that looks like ours."""


def is_plain(text: str) -> bool:
    return text.replace("\n", "").isprintable()


def test_terminal_escapes_in_input_are_escaped(specdecode: Specdecode, write: WriteObject) -> None:
    """Escape sequences could hide a verdict, and marks for the direction of writing turn it round."""
    evil = "a\x1b[2J\u202eb\x07"
    path = write("a.yaml", json.dumps(manifest(evil, target={"model": evil}, speculation=None)))
    for words in (
        told(specdecode, path),
        told(specdecode, write("b.yaml", f'kind: "{evil}"'.replace("\x1b", "\\e").replace("\x07", "\\a"))),
        told(specdecode, Path(f"{evil}.yaml")),
        told(specdecode, write("c.yaml", json.dumps(manifest("c", **{evil: 1})))),
    ):
        assert words.replace("\n", "").isprintable()
        assert r"a\x1b[2J\u202eb" in words or r"a\x1b[2J\u202e" in words


class TestLint:
    def test_finding_is_one_line_for_any_value(self, specdecode: Specdecode, write: WriteObject) -> None:
        path = write("a.yaml", json.dumps(manifest("a", **{f"{EVIL}{LINES}": 1})))
        result = specdecode("lint", path)
        assert is_plain(result.output)
        finding, _ = result.stdout.splitlines()
        assert finding.startswith(f"{path}:1: error: ")
        assert r"a\x1b[2J\u202eb\x07\x9b2Kc\x7fx\nobjects: 1" in finding

    def test_finding_is_one_line_for_any_file_name(self, specdecode: Specdecode, write: WriteObject) -> None:
        path = write(f"{EVIL}{LINES}.yaml", manifest("a", target={}))
        result = specdecode("lint", path.parent)
        assert is_plain(result.output)
        assert len(result.stdout.splitlines()) == 2


class TestData:
    """Data for programs is looked at by people, too."""

    @pytest.mark.parametrize(("output", "read"), [("json", json.loads), ("yaml", yaml.safe_load)])
    @pytest.mark.parametrize("command", ["plan", "plan --explain"])
    def test_plan_data_keeps_control_characters_of_values(
        self, specdecode: Specdecode, write: WriteObject, command: str, output: str, read: Callable[[str], Any]
    ) -> None:
        body = {**manifest("a"), "metadata": {"name": "a", "namespace": EVIL}}
        result = specdecode(*command.split(), write("a.yaml", json.dumps(body)), "-o", output)
        assert is_plain(result.stdout)
        assert read(result.stdout)["objects"][0]["namespace"] == EVIL

    def test_lint_data_keeps_control_characters_of_file_names(self, specdecode: Specdecode, write: WriteObject) -> None:
        path = write(f"{EVIL}.yaml", manifest("a", target={}))
        result = specdecode("lint", path, "-o", "json")
        assert is_plain(result.stdout)
        assert json.loads(result.stdout)["findings"][0]["file"] == str(path)

    def test_sarif_with_control_characters_is_printable_and_valid_json(
        self, specdecode: Specdecode, write: WriteObject
    ) -> None:
        path = write("a.yaml", json.dumps(manifest("a", target={"model": "b/c", EVIL: 1})))
        result = specdecode("lint", path, "-o", "sarif")
        assert is_plain(result.stdout)
        json.loads(result.stdout)

    @pytest.mark.parametrize(("output", "read"), [("json", json.loads), ("yaml", yaml.safe_load_all)])
    def test_rendered_objects_keep_control_characters_of_values(
        self, specdecode: Specdecode, write: WriteObject, output: str, read: Callable[[str], Any]
    ) -> None:
        path = write("a.yaml", json.dumps(manifest("a", engine={"env": [{"name": "MINE", "value": EVIL}]})))
        result = specdecode("render", path, "-o", output)
        assert (result.exit_code, is_plain(result.stdout)) == (0, True)
        found = read(result.stdout)
        objects = found["items"] if output == "json" else list(found)
        (workload,) = (each for each in objects if each["kind"] == "Deployment")
        (engine,) = workload["spec"]["template"]["spec"]["containers"]
        assert {"name": "MINE", "value": EVIL} in engine["env"]

    def test_non_latin_text_is_unchanged(self, specdecode: Specdecode, write: WriteObject) -> None:
        path = write("日本.yaml", manifest("a", target={}))
        assert "日本.yaml" in specdecode("plan", path, "-o", "json").stdout
        assert "日本.yaml" in specdecode("plan", path, "-o", "yaml").stdout

    def test_rendered_command_line_keeps_the_value_in_a_shell(self, specdecode: Specdecode, write: WriteObject) -> None:
        value = f"{EVIL}'\\\n$HOME"
        path = write("a.yaml", json.dumps(manifest("a", engine={"env": [{"name": "MINE", "value": value}]})))
        result = specdecode("render", path, "-o", "command")
        assert (result.exit_code, is_plain(result.stdout)) == (0, True)
        (line,) = (each for each in result.stdout.splitlines() if each.strip().startswith("MINE="))
        word = line.strip().removesuffix("\\").strip().removeprefix("MINE=")
        said = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True).stdout
        assert said.decode() == value

    def test_batch_results_keep_the_id(self, specdecode: Specdecode) -> None:
        result = specdecode("plan", "--batch", "-", "--out", "-", stdin=json.dumps({"id": EVIL, "model": "b/c"}))
        assert is_plain(result.stdout)
        assert json.loads(result.stdout)["id"] == EVIL

    def test_verdicts_keep_the_series(self, specdecode: Specdecode) -> None:
        block = {"series": EVIL, "block": 1, "baseline": 1, "candidate": 1}
        result = specdecode("verdict", "--in", "-", "--out", "-", stdin=json.dumps(block))
        assert is_plain(result.stdout)
        assert is_plain(result.stderr)
        assert json.loads(result.stdout)["series"] == EVIL


class TestCapture:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / f"{EVIL}{LINES}"
        folder.mkdir()
        (folder / "trace.jsonl").write_text("{")
        return folder

    def test_validate_escapes_the_path_and_keeps_it_in_json(self, specdecode: Specdecode, folder: Path) -> None:
        assert is_plain(specdecode("capture", "validate", folder).output)
        told = specdecode("capture", "validate", folder, "-o", "json").stdout
        assert is_plain(told)
        assert json.loads(told)["validated"][0]["path"] == os.fspath(folder)


@pytest.mark.parametrize("output", ["yaml", "json"])
def test_import_keeps_control_characters_of_arguments(specdecode: Specdecode, output: str) -> None:
    words = ("vllm", "serve", "Qwen/Qwen3-32B", "--chat-template", f"{EVIL}{LINES}")
    result = specdecode("import", "-o", output, "--", *words)
    assert is_plain(result.output)
    assert yaml.safe_load(result.stdout)["spec"]["engine"]["extraArgs"][1] == words[-1]
    assert "\nobjects: 1" not in result.output
