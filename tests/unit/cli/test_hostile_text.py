"""What others wrote does nothing to a terminal: not on lines for people, nor in data, where it keeps its value."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.cli.conftest import Specdecode, WriteObject, manifest
from tests.unit.cli.test_bad_input import told

EVIL = "a\x1b[2J\u202eb\x07\x9b2Kc\x7f"
"""Escape sequences, new and old ones, could hide a verdict, and marks for the direction of writing turn it round."""

LINES = "x\nobjects: 1, errors: 0, warnings: 0"
"""A second line that looks like ours."""


def is_plain(text: str) -> bool:
    return text.replace("\n", "").isprintable()


def test_what_others_wrote_does_nothing_to_a_terminal(specdecode: Specdecode, write: WriteObject) -> None:
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
    def test_a_finding_is_one_line_whatever_the_values_say(self, specdecode: Specdecode, write: WriteObject) -> None:
        path = write("a.yaml", json.dumps(manifest("a", **{f"{EVIL}{LINES}": 1})))
        result = specdecode("lint", path)
        assert is_plain(result.output)
        finding, _ = result.stdout.splitlines()
        assert finding.startswith(f"{path}:1: error: ")
        assert r"a\x1b[2J\u202eb\x07\x9b2Kc\x7fx\nobjects: 1" in finding

    def test_a_finding_is_one_line_whatever_the_file_is_called(
        self, specdecode: Specdecode, write: WriteObject
    ) -> None:
        path = write(f"{EVIL}{LINES}.yaml", manifest("a", target={}))
        result = specdecode("lint", path.parent)
        assert is_plain(result.output)
        assert len(result.stdout.splitlines()) == 2

    def test_a_file_that_cannot_be_read_is_one_line(self, specdecode: Specdecode, write: WriteObject) -> None:
        path = write(f"{EVIL}{LINES}.yaml", "a: [")
        result = specdecode("lint", path.parent)
        assert is_plain(result.output)
        assert len(result.stdout.splitlines()) == 2


class TestData:
    """Data for programs is looked at by people, too."""

    @pytest.mark.parametrize(("output", "read"), [("json", json.loads), ("yaml", yaml.safe_load)])
    @pytest.mark.parametrize("command", ["plan", "explain"])
    def test_answers_keep_the_value(
        self, specdecode: Specdecode, write: WriteObject, command: str, output: str, read: Callable[[str], Any]
    ) -> None:
        body = {**manifest("a"), "metadata": {"name": "a", "namespace": EVIL}}
        result = specdecode(command, write("a.yaml", json.dumps(body)), "-o", output)
        assert is_plain(result.stdout)
        assert read(result.stdout)["objects"][0]["namespace"] == EVIL

    def test_findings_keep_the_value(self, specdecode: Specdecode, write: WriteObject) -> None:
        path = write(f"{EVIL}.yaml", manifest("a", target={}))
        result = specdecode("lint", path, "-o", "json")
        assert is_plain(result.stdout)
        assert json.loads(result.stdout)["findings"][0]["file"] == str(path)

    def test_sarif_keeps_the_value(self, specdecode: Specdecode, write: WriteObject) -> None:
        path = write("a.yaml", json.dumps(manifest("a", target={"model": "b/c", EVIL: 1})))
        result = specdecode("lint", path, "-o", "sarif")
        assert is_plain(result.stdout)
        json.loads(result.stdout)

    @pytest.mark.parametrize(("output", "read"), [("json", json.loads), ("yaml", yaml.safe_load_all)])
    def test_rendered_objects_keep_the_value(
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

    def test_text_of_other_languages_stays_as_it_is(self, specdecode: Specdecode, write: WriteObject) -> None:
        path = write("日本.yaml", manifest("a", target={}))
        assert "日本.yaml" in specdecode("plan", path, "-o", "json").stdout
        assert "日本.yaml" in specdecode("plan", path, "-o", "yaml").stdout

    def test_a_rendered_command_line_means_the_same_to_a_shell(
        self, specdecode: Specdecode, write: WriteObject
    ) -> None:
        value = f"{EVIL}'\\\n$HOME"
        path = write("a.yaml", json.dumps(manifest("a", engine={"env": [{"name": "MINE", "value": value}]})))
        result = specdecode("render", path, "-o", "command")
        assert (result.exit_code, is_plain(result.stdout)) == (0, True)
        (line,) = (each for each in result.stdout.splitlines() if each.strip().startswith("MINE="))
        word = line.strip().removesuffix("\\").strip().removeprefix("MINE=")
        said = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True).stdout
        assert said.decode() == value

    def test_results_of_a_batch_keep_the_id(self, specdecode: Specdecode) -> None:
        result = specdecode("estimate", "--in", "-", "--out", "-", stdin=json.dumps({"id": EVIL, "model": "b/c"}))
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

    def test_files_that_are_validated(self, specdecode: Specdecode, folder: Path) -> None:
        assert is_plain(specdecode("capture", "validate", folder).output)
        told = specdecode("capture", "validate", folder, "-o", "json").stdout
        assert is_plain(told)
        assert json.loads(told)["validated"][0]["path"] == os.fspath(folder)

    def test_a_file_that_is_not_there(self, specdecode: Specdecode, tmp_path: Path) -> None:
        for command in (["validate"], ["up"]):
            told = specdecode("capture", *command, tmp_path / f"{EVIL}{LINES}").stderr
            assert is_plain(told)
            assert len(told.splitlines()) == 1


class TestModels:
    @pytest.mark.parametrize("command", ["list", "show"])
    def test_a_model_that_is_not_there(self, specdecode: Specdecode, command: str) -> None:
        told = specdecode("models", command, f"{EVIL}{LINES}").stderr
        assert is_plain(told)
        assert len(told.splitlines()) == 1


@pytest.mark.parametrize("output", ["yaml", "json"])
def test_an_import_keeps_the_value_and_tells_it(specdecode: Specdecode, output: str) -> None:
    words = ("vllm", "serve", "Qwen/Qwen3-32B", "--chat-template", f"{EVIL}{LINES}")
    result = specdecode("import", "-o", output, "--", *words)
    assert is_plain(result.output)
    assert yaml.safe_load(result.stdout)["spec"]["engine"]["extraArgs"][1] == words[-1]
    assert "\nobjects: 1" not in result.output
