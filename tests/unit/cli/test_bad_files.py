"""What is no file, no folder, no YAML, or no object of ours: one line, at once, and nothing is overwritten."""

import json
import os
from pathlib import Path

import pytest
import yaml

from specdecode_operator.cli import input_files
from tests.unit.cli.conftest import Specdecode, WriteObject, manifest
from tests.unit.cli.test_bad_input import INVALID, told


def test_one_name_is_one_object(specdecode: Specdecode, write: WriteObject, tmp_path: Path) -> None:
    elsewhere = manifest("a")
    elsewhere["metadata"]["namespace"] = "other"
    first = write("a/one.yaml", manifest("a"), manifest("b"), elsewhere)
    write("a/two.yaml", manifest("a"))
    answer = told(specdecode, tmp_path / "a")
    assert (
        f"two.yaml, document 1: metadata.name: a: SpecDecodeDeployment a is there already ({first}, document 1):"
        " remove one, or give it another name" in answer
    )
    assert answer.count("already") == 1
    assert "already" in told(specdecode, first, "-f", first)
    twice = specdecode("plan", "-f", first, "-f", "-", stdin=(tmp_path / "a/two.yaml").read_text())
    assert twice.exit_code == INVALID
    assert "standard input, document 1: metadata.name: a:" in twice.stderr
    kinds = write("c.yaml", manifest("a"), {**manifest("a"), "kind": "SpecDecodeCapture"})
    assert specdecode("plan", kinds).exit_code == 0


def test_the_errors_of_a_file_are_told_as_far_as_anybody_reads(specdecode: Specdecode, write: WriteObject) -> None:
    path = write("twins.yaml", *[manifest("a")] * 60)
    for command in ("plan", "lint"):
        result = specdecode(command, path)
        assert result.exit_code == 2
        told = [
            line for line in (result.stdout + result.stderr).splitlines() if "twins.yaml" in line and "rror" in line
        ]
        assert len(told) == 51, command
        assert "has 59 errors: the first 50 are told: mend them first" in told[-1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no SpecDecodeDeployment: name another file or folder"),
        ("# nothing yet\n", "holds no SpecDecodeDeployment: name another"),
        ("- 1\n- 2\n", "holds no SpecDecodeDeployment but a list: name another"),
        ("hello", "holds no SpecDecodeDeployment but plain text: name another"),
        ("target: {model: x}", "but an object without kind: name another"),
        ("{apiVersion: apps/v1, kind: Deployment}\n---\n[]", "but Deployment (apps/v1), a list: name another"),
        (
            "{apiVersion: specdecode.io/v1alpha1}",
            "document 1: kind: is missing: specdecode.io has no such kind: use SpecDec",
        ),
        ("{apiVersion: specdecode.io/v1alpha1, kind: SpecDecode}", "kind: SpecDecode: specdecode.io has no such kind"),
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
def test_what_is_no_object_of_ours_says_what_it_is(
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
def test_a_key_that_is_there_twice_is_told(
    specdecode: Specdecode, write: WriteObject, content: str, key: str, place: str | None
) -> None:
    """A forgotten --- makes two objects one, of which only the last would be read."""
    objects = {name: yaml.safe_dump(manifest(name)).strip() for name in "ab"}
    if place is None:
        place = f"line {len(objects['a'].splitlines()) + 1}, column 1"
        content = "\n".join(objects.values())
    result = specdecode("plan", "-f", write("two.yaml", content))
    assert result.exit_code == 2
    assert f"two.yaml, document 1: is no YAML at {place}: the key {key} is there twice" in result.stderr


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


def test_an_empty_folder_is_an_error(specdecode: Specdecode, tmp_path: Path) -> None:
    assert "no .yaml, .yml, .json file is in this folder: name another" in told(specdecode, tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [("", "the name of a file is empty"), ("/", "is the root of all files"), ("/dev/zero", "is a device")],
)
def test_what_is_no_file_is_refused_at_once(specdecode: Specdecode, name: str, words: str) -> None:
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
        ("estimate", "--in", "FIFO", "--out", "-"),
        ("verdict", "--in", "FIFO", "--out", "-"),
        ("calibrate", "-o", "OUT", "--product", "NVIDIA-H200", "--from-log", "FIFO"),
        ("calibrate", "-o", "OUT", "--from-deployment", "FIFO"),
    ],
)
def test_a_fifo_that_nobody_writes_into_hangs_no_command(
    specdecode: Specdecode, write: WriteObject, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    fifo, file = tmp_path / "fifo", write("a.yaml", manifest("a", target={"model": "my/model"}, speculation=None))
    os.mkfifo(fifo)
    places = {"FIFO": str(fifo), "FILE": str(file), "OUT": str(tmp_path / "out.json")}
    words = [each.replace("FIFO", str(fifo)) if "=" in each else places.get(each, each) for each in arguments]
    result = specdecode(*words)
    assert f"{fifo}: is a FIFO" in result.stderr
    assert result.exit_code == INVALID


def test_what_a_shell_makes_of_a_command_is_read(specdecode: Specdecode) -> None:
    reading, writing = os.pipe()
    os.write(writing, json.dumps(manifest("a")).encode())
    os.close(writing)
    try:
        assert specdecode("plan", f"/dev/fd/{reading}").exit_code == 0
    finally:
        os.close(reading)


def test_a_folder_with_more_files_than_any_repository_is_refused(
    specdecode: Specdecode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_files, "_MOST_FILES", 3)
    for number in range(4):
        (tmp_path / f"{number}.txt").touch()
    result = specdecode("plan", tmp_path)
    assert "holds more than 3 files: name a folder in it" in result.stderr


def test_json_is_read_and_found_wrong_as_json(specdecode: Specdecode, write: WriteObject) -> None:
    text = json.dumps(manifest("a")).replace("/", "\\/")
    assert specdecode("plan", write("a.json", text)).exit_code == 0
    broken = told(specdecode, write("b.json", '{"a":\n }'))
    assert "b.json, document 1: is no JSON at line 2, column 2: expecting value" in broken


def test_results_are_never_written_into_the_cases(specdecode: Specdecode, tmp_path: Path) -> None:
    cases, link = tmp_path / "cases", tmp_path / "link"
    cases.write_text("{}\n")
    link.symlink_to(cases)
    os.link(cases, tmp_path / "hard")
    for out in (cases, link, tmp_path / "hard"):
        result = specdecode("estimate", "--in", cases, "--out", out)
        assert "is the file of --in: name another" in result.stderr
        assert cases.read_text() == "{}\n"


def test_results_that_cannot_be_written_whole_leave_what_was_there(specdecode: Specdecode, tmp_path: Path) -> None:
    cases, out = tmp_path / "cases", tmp_path / "folder" / "out"
    cases.write_text("{}\n")
    result = specdecode("estimate", "--in", cases, "--out", out)
    assert f"--out: {out}: No such file or directory" in result.stderr
    out.parent.mkdir()
    out.write_text("old")
    out.chmod(0o640)
    assert specdecode("estimate", "--in", cases, "--out", out).exit_code == 0
    assert out.stat().st_mode & 0o777 == 0o640
    assert [file.name for file in out.parent.iterdir()] == ["out"]


def test_crds_need_a_folder_that_is_there(specdecode: Specdecode, tmp_path: Path) -> None:
    result = specdecode("crds", "--folder", tmp_path / "none")
    assert f"{tmp_path / 'none'}: is no folder: make it first" in result.stderr
    assert result.exit_code == INVALID
