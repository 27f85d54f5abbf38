"""The top level of `specdecode`: its help, its version, and former names of commands."""

import json
import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml

from specdecode_operator.version import __version__
from tests.unit.cli.conftest import Specdecode


def test_without_arguments_prints_the_help_by_panels_and_succeeds(specdecode: Specdecode):
    result = specdecode()
    assert result.exit_code == 0
    assert result.stdout == specdecode("--help").stdout
    places = [result.stdout.index(f"─ {panel} ─") for panel in ("Plan", "Run", "Measure", "Simulate", "Other")]
    assert places == sorted(places)


@pytest.mark.parametrize("name", ["operator", "attestation-webhook", "webhook-certificate", "schema"])
def test_help_omits_internal_commands_that_still_work(specdecode: Specdecode, name: str):
    assert f"│ {name} " not in specdecode("--help").stdout
    assert specdecode(name, "--help").exit_code == 0


def test_version_command_matches_the_option_and_lists_vllm_versions(specdecode: Specdecode):
    assert specdecode("version").stdout == specdecode("--version").stdout
    data = json.loads(specdecode("version", "-o", "json").stdout)
    assert data["version"] == __version__
    assert "0.33" in data["vllm_versions"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("figures", "metrics"),
        ("verify", "attestation verify"),
        ("explain", "plan --explain"),
        ("schema figures", "schema metrics"),
        ("schema estimate", "schema batch"),
    ],
)
def test_former_command_name_works_and_prints_the_new_one_once(specdecode: Specdecode, old: str, new: str):
    result, renamed = specdecode(*old.split(), "--help"), specdecode(*new.split(), "--help")
    assert (result.exit_code, result.stdout) == (0, renamed.stdout)
    assert result.stderr.splitlines() == [f"specdecode {old}: renamed to specdecode {new}"]
    assert renamed.stderr == ""


def test_estimate_is_an_alias_of_plan_batch(specdecode: Specdecode) -> None:
    case = json.dumps({"gpu": "H100", "model": "meta-llama/Llama-3.1-8B-Instruct"})
    old, new = (
        specdecode(*words, stdin=case) for words in (["estimate", "--out", "-", "--in", "-"], ["plan", "--batch", "-"])
    )
    assert (old.exit_code, old.stdout) == (0, new.stdout)
    assert json.loads(new.stdout)["verdict"] == "Fits"
    assert old.stderr.splitlines() == ["specdecode estimate: renamed to specdecode plan --batch"]


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        (["--batch", "-", "--gpu", "H100"], "--gpu"),
        (["--batch", "-", "x.yaml"], "FILE"),
        (["--batch", "-", "--explain"], "--explain"),
        (["x.yaml", "--out", "x"], "--out"),
        (["x.yaml", "--explain", "--matrix"], "--matrix"),
        (["x.yaml", "--explain", "-o", "markdown"], "--output"),
    ],
)
def test_plan_refuses_options_without_effect(specdecode: Specdecode, options: list[str], refused: str) -> None:
    result = specdecode("plan", *options)
    assert result.exit_code == 2
    assert re.search(rf"(Invalid value for|error:) {refused}: ", result.stderr)


def test_kubectl_finds_the_command_as_a_plugin():
    commands = {each.name: each.value for each in entry_points(group="console_scripts")}
    assert commands["kubectl-specdecode"] == commands["specdecode"]


def test_plan_accepts_vllm_names_for_parallelism(specdecode: Specdecode):
    pair = ("plan", "--model", "meta-llama/Llama-3.1-70B-Instruct", "--gpu", "H200", "-o", "json")
    short = specdecode(*pair, "--tp", 2, "--pp", 1, "--dp", 2)
    assert short.exit_code == 0
    sizes = ("--tensor-parallel-size", 2, "--pipeline-parallel-size", 1, "--data-parallel-size", 2)
    assert specdecode(*pair, *sizes).stdout == short.stdout


@pytest.mark.parametrize(
    ("arguments", "old", "new"),
    [
        (("crds",), "--folder", "--out"),
        (("models", "add", "gone/model"), "--file", "--out"),
        (("capture", "report", "gone"), "--output", "--out"),
        (("capture", "report", "gone"), "-o", "--out"),
        (("calibrate",), "--output", "--append-to"),
        (("calibrate",), "-o", "--append-to"),
        (("replay", "fit", "gone"), "-o", "--out"),
        (("replay", "prepare", "gone", "--plan", "gone"), "-o", "--out"),
        (("replay", "forecast", "gone"), "-o", "--out"),
        (("replay", "synth", "--requests", "0"), "-o", "--out"),
        (("plan", "--model", "gone"), "-tp", "--tp"),
        (("init", "--model", "gone"), "--pipeline-parallel-size", "--pp"),
    ],
)
def test_help_omits_other_spellings_of_options_that_still_work(
    specdecode: Specdecode, tmp_path: Path, arguments: tuple[str, ...], old: str, new: str
):
    value = "2" if new in ("--tp", "--pp") else tmp_path / "gone" / "file"
    said, renamed = specdecode(*arguments, old, value), specdecode(*arguments, new, value)
    assert (said.exit_code, said.output) == (renamed.exit_code, renamed.output)
    assert f"No such option: {old}" not in said.output
    shown = specdecode(*(each for each in arguments if not each.startswith("--")), "--help").stdout
    names = {word for line in shown.splitlines() if line.startswith("│") for word in line[:28].split()}
    assert new in names
    assert old not in names


def test_plan_and_init_accept_vllm_names_of_engine_limits(specdecode: Specdecode):
    model = ("--model", "meta-llama/Llama-3.1-8B-Instruct", "--gpu", "H200", "--max-num-seqs", 64)
    serving = yaml.safe_load(specdecode("init", *model, "--gpu-memory-utilization", 0.29).stdout)["spec"]["serving"]
    assert serving == {"maxNumSeqs": 64, "gpuMemoryUtilizationPercent": 29}
    result = specdecode("plan", *model, "--gpu-memory-utilization", 0.855)
    assert (result.exit_code, "--gpu-memory-utilization: 0.855: must be a multiple of 0.01" in result.stderr) == (
        2,
        True,
    )


@pytest.mark.parametrize("command", ["plan", "init"])
def test_help_of_plan_and_init_groups_options_into_panels(specdecode: Specdecode, command: str):
    shown = specdecode(command, "--help").stdout
    found = [shown.index(f"─ {panel} ─") for panel in ("Model", "Speculation", "Hardware", "Engine", "Output")]
    assert found == sorted(found)
    assert found[1] < shown.index("│ --draft ") < found[2] < shown.index("│ --gpu ") < found[3]
    assert "─ Model ─" not in specdecode("render", "--help").stdout
