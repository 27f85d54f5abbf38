"""`specdecode replay serve --mode emulated`, with a script in the place of the python that has vLLM."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import Specdecode

EXAMPLE = Path(__file__).parents[3] / "examples" / "llama-70b.yaml"
MODEL: dict[str, Any] = {
    "schema": 1,
    "origin": {"gpu": "NVIDIA-H200", "tp": 2},
    "step_time": {"curve": [[1, 8.0]]},
    "acceptance": {
        "num_speculative_tokens": 5,
        "outcomes": [[5, 0], [5, 5]],
        "classes": [{"share": 1, "outcomes": [0.5, 0.5]}],
    },
}
VERDICT = "emulated: 5 steps, 0.0 % of them late, 0.1 % longer in all"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(MODEL))
    return path


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """A python that says that it has vLLM, keeps what it is started with, and ends with 7."""
    path = tmp_path / "python"
    path.write_text(
        f"""#!/bin/sh
if [ "$1" = -c ]; then echo 0.31.0; exit; fi
printf '%s\\n' "$@" > {tmp_path}/arguments
env > {tmp_path}/variables
echo "{VERDICT}" > {tmp_path}/kept/engine/told/lateness.txt
exit 7
"""
    )
    path.chmod(0o755)
    return path


def _emulate(specdecode: Specdecode, *arguments: object) -> Any:
    return specdecode("replay", "serve", "--mode", "emulated", *arguments)


def test_vllm_is_started_with_the_plugin_and_its_end_is_told(
    specdecode: Specdecode, model: Path, engine: Path, tmp_path: Path
) -> None:
    kept, record = tmp_path / "kept", tmp_path / "segments"
    options = ("--keep", kept, "--record", record, "--port", 8123, "--engine-arg=--disable-log-stats", "--seed", 5)
    done = _emulate(specdecode, model, "--plan", EXAMPLE, "--engine", engine, *options)
    assert done.exit_code == 7
    told = done.stderr.splitlines()
    assert told[0] == "emulated: 2 x NVIDIA-H200, 14823 KV blocks, 237168 tokens, vLLM 0.31.0"
    assert told[1] == "warning: the plan is for vLLM 0.33: name an engine of that version with --engine"
    assert told[-1] == VERDICT
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments[:4] == ["-m", "vllm.entrypoints.cli.main", "serve", str(kept / "engine" / "target")]
    assert arguments[-5:] == ["--host", "127.0.0.1", "--port", "8123", "--disable-log-stats"]
    variables = dict(line.split("=", 1) for line in (tmp_path / "variables").read_text().splitlines() if "=" in line)
    plugins = Path(variables["PYTHONPATH"].split(os.pathsep)[0])
    assert {path.name.split("-")[0] for path in plugins.iterdir()} == {"specdecode_emulated", "specdecode_recorder"}
    assert variables["SPECDECODE_RECORD_DIR"] == str(record)
    settings = json.loads((kept / "engine" / "settings.json").read_text())
    assert (settings["gpu"], settings["seed"], settings["tells_steps"]) == ("NVIDIA-H200", 5, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--plan", EXAMPLE, "--engine", "/bin/ls"), "--engine /bin/ls: has no vLLM: name the python"),
        (("--plan", EXAMPLE, "--engine", "/nowhere"), "--engine /nowhere: cannot be run: name the python"),
        (("--plan", EXAMPLE, "--tokenizer", "/nowhere"), "--tokenizer /nowhere: has no tokenizer: name a folder"),
        (("--plan", EXAMPLE.parent), "SpecDecodeDeployments: name a file with one"),
        (("--plan", EXAMPLE, EXAMPLE), "takes one fitted model, not 2"),
        ((), "--mode emulated needs --plan FILE"),
        (("--plan", EXAMPLE, "--time-scale", 2), "is not heeded with --mode emulated"),
    ],
)
def test_what_cannot_be_started_is_told_in_a_line(
    specdecode: Specdecode, model: Path, arguments: tuple[object, ...], words: str
) -> None:
    done = _emulate(specdecode, model, *arguments)
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.replace("│", "").split())


def test_its_options_are_no_others_of_a_recording(specdecode: Specdecode, tmp_path: Path) -> None:
    done = specdecode("replay", "serve", tmp_path, "--plan", EXAMPLE)
    assert done.exit_code == 2
    assert "is heeded with --mode emulated alone" in " ".join(done.stderr.replace("│", "").split())


def test_what_is_kept_stays_as_it_was(specdecode: Specdecode, model: Path, engine: Path, tmp_path: Path) -> None:
    (tmp_path / "kept" / "engine" / "told").mkdir(parents=True)
    done = _emulate(specdecode, model, "--plan", EXAMPLE, "--engine", engine, "--keep", tmp_path / "kept")
    assert done.exit_code == 2
    assert "is there already: name another folder" in done.stderr
    assert not (tmp_path / "arguments").exists()
