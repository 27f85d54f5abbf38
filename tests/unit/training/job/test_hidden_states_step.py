"""The step `hidden-states` of the bundle, as a process, with stand-ins for vLLM and speculators."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.training.job.hidden_states import engine_command, layer_ids
from specdecode_operator.training.job.settings import Settings, StepError, read_settings
from specdecode_operator.vllm.plugin_bundle import TRAINER

SECRET = "my password is swordfish"
# Answers /health, or ends at once.
ENGINE_SCRIPT = """\
import http.server, pathlib, sys
pathlib.Path({noted!r}).write_text(repr(sys.argv))
if {mode!r} == "dead engine":
    raise RuntimeError("{secret}")
port = int(next(each for each in sys.argv if each.startswith("--port=")).partition("=")[2])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if {mode!r} == "slow engine" else 200)
        self.end_headers()
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
# prepare-data prints a row; generate-offline-data writes a file for each row.
PROGRAM_SCRIPT = """\
import json, pathlib, sys
step, arguments = sys.argv[3], sys.argv[4:]
value = lambda flag: arguments[arguments.index(flag) + 1]
print("{secret}")
mode = {mode!r}
if step == "prepare-data":
    rows = pathlib.Path(value("--data")).read_text().splitlines()
    if mode == "prepare fails":
        raise ValueError("{secret}")
    folder = pathlib.Path(value("--output"))
    folder.mkdir(parents=True)
    (folder / "data.arrow").write_text(str(len(rows)))
else:
    if mode == "generate fails":
        raise OSError(28, "No space left on device")
    folder = pathlib.Path(value("--output"))
    folder.mkdir(exist_ok=True)
    count = int((pathlib.Path(value("--preprocessed-data")) / "data.arrow").read_text())
    for number in range(count - (mode == "one skipped")):
        (folder / f"hs_{{number}}.safetensors").write_text("")
"""


def settings(**changes: Any) -> Settings:
    given: dict[str, Any] = {
        "root": "/training",
        "folder": "ns/t",
        "uid": "uid-1",
        "method": "eagle3",
        "seed": 3,
        "epochs": 3,
        "learning_rate": None,
        "sequence_length": 16,
        "args": [],
        "gpus": 1,
        "target": "/models/target",
        "target_layers": 32,
        "hidden_size": 64,
        "command": ["vllm", "serve", "/models/target"],
        "start_seconds": 60,
        **changes,
    }
    return read_settings({"SPECDECODE_TRAINING": json.dumps(given)})


class Pod:
    """Folders and settings of a pod's container."""

    def __init__(self, folder: Path) -> None:
        self.bundle = folder / "training.zip"
        self.bundle.write_bytes(TRAINER.zipped())
        self.programs = folder / "bin"
        self.programs.mkdir()
        self.noted = folder / "engine-arguments"
        self.message = folder / "termination-log"
        self.folder = folder / "claim" / "ns" / "t"
        self.states = self.folder / "hidden-states"
        self.settings: dict[str, Any] = {"root": str(folder / "claim")}
        self.write_rows(*([1, 2, 3, number] for number in range(10)))

    def write_rows(self, *rows: list[int], mask: tuple[int, ...] = (0, 0, 1, 1)) -> None:
        (self.folder / "rows").mkdir(parents=True, exist_ok=True)
        lines = (json.dumps({"input_ids": row, "loss_mask": [*mask, *[1] * (len(row) - len(mask))]}) for row in rows)
        (self.folder / "rows" / "training.jsonl").write_text("".join(f"{line}\n" for line in lines))

    def run(self, mode: str = "good", **changes: Any) -> tuple[int, str, Any]:
        self.noted.unlink(missing_ok=True)
        for name, script in (("vllm", ENGINE_SCRIPT), ("python3", PROGRAM_SCRIPT)):
            source = self.programs / f"{name}.py"
            source.write_text(script.format(mode=mode, secret=SECRET, noted=str(self.noted)))
            program = self.programs / name
            program.write_text(f'#!/bin/sh\nexec {sys.executable} {source} "$@"\n')
            program.chmod(0o755)
        given = vars(settings(**self.settings, **changes))
        environment = {"PATH": f"{self.programs}:{os.environ['PATH']}", "SPECDECODE_TRAINING": json.dumps(given)}
        command = [sys.executable, "-I", self.bundle, "hidden-states", self.message]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        output, told = done.stdout + done.stderr, self.message.read_text()
        assert SECRET not in output + told, "text of the programs is untrusted"
        return done.returncode, output, json.loads(told)


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod(tmp_path)


class TestSuccess:
    def test_every_row_has_hidden_states(self, pod: Pod) -> None:
        code, output, message = pod.run()
        assert code == 0, output
        assert message["hidden-states"] == {"rows": 10, "tokens": 40, "cut": 0}

    def test_log_has_progress_only(self, pod: Pod) -> None:
        _, output, _ = pod.run()
        assert all(json.loads(line).keys() == {"progress"} for line in output.splitlines())

    def test_rows_stay_private(self, pod: Pod) -> None:
        pod.run()
        assert (pod.states / "data.jsonl").stat().st_mode & 0o777 == 0o600
        assert pod.states.stat().st_mode & 0o777 == 0o700
        assert not (pod.states / "logs" / "prepare.log").exists()

    def test_long_rows_are_cut(self, pod: Pod) -> None:
        pod.write_rows(list(range(40)), list(range(1, 9)))
        assert pod.run()[2]["hidden-states"] == {"rows": 2, "tokens": 24, "cut": 1}

    def test_rows_without_an_answer_in_the_sequence_are_left_out(self, pod: Pod) -> None:
        pod.write_rows(list(range(40)), mask=(0,) * 30)
        assert pod.run()[2]["error"]["reason"] == "TooFewRows"

    def test_engine_is_asked_for_layers_on_the_loopback_interface(self, pod: Pod) -> None:
        pod.run()
        assert "--host=127.0.0.1" in pod.noted.read_text()
        assert '"eagle_aux_hidden_state_layer_ids": [2, 16, 29, 32]' in pod.noted.read_text()


class TestRetry:
    def test_complete_hidden_states_are_used_again(self, pod: Pod) -> None:
        pod.run()
        code, _, message = pod.run("dead engine")
        assert code == 0
        assert message["hidden-states"]["reused"] is True
        assert not pod.noted.exists(), "no engine starts"

    def test_other_rows_need_other_hidden_states(self, pod: Pod) -> None:
        pod.run()
        pod.write_rows([5, 6, 7, 8])
        assert pod.run()[2]["hidden-states"]["rows"] == 1

    def test_missing_ones_are_written(self, pod: Pod) -> None:
        assert pod.run("one skipped")[0] == 1
        assert pod.run()[2]["hidden-states"]["rows"] == 10


class TestFailure:
    @pytest.mark.parametrize(
        ("mode", "reason", "told"),
        [
            ("dead engine", "HiddenStatesFailed", "RuntimeError at vllm.py:"),
            ("prepare fails", "HiddenStatesFailed", "ValueError at python3.py:"),
            ("generate fails", "DiskFull", ""),
            ("one skipped", "HiddenStatesFailed", "9 of 10 rows"),
        ],
    )
    def test_reason(self, pod: Pod, mode: str, reason: str, told: str) -> None:
        code, _, message = pod.run(mode)
        assert code == 1
        assert message["error"]["reason"] == reason
        assert told in message["error"]["message"]

    def test_engine_that_never_serves(self, pod: Pod) -> None:
        _, _, message = pod.run("slow engine", start_seconds=1)
        assert message["error"]["reason"] == "HiddenStatesFailed"

    def test_too_little_space(self, pod: Pod) -> None:
        _, _, message = pod.run(hidden_size=2**40)
        assert message["error"]["reason"] == "VolumeTooSmall"


class TestLayers:
    @pytest.mark.parametrize(
        ("layers", "ids"),
        [(4, [1, 2, 3]), (5, [1, 2, 4]), (6, [1, 3, 5]), (7, [2, 3, 4]), (32, [2, 16, 29]), (80, [2, 40, 77])],
    )
    def test_distinct_and_below_the_last(self, layers: int, ids: list[int]) -> None:
        assert layer_ids(settings(target_layers=layers)) == ids

    def test_too_few(self) -> None:
        with pytest.raises(StepError) as caught:
            layer_ids(settings(target_layers=3))
        assert caught.value.reason == "TargetTooSmall"

    def test_of_the_head_to_continue_from(self, tmp_path: Path) -> None:
        config = {"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": [3, 9, 27]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert layer_ids(settings(head=str(tmp_path))) == [3, 9, 27]

    @pytest.mark.parametrize("ids", [None, [], [1, 2, 32], [1, 1, 2], [True, 2, 3], "123"])
    def test_of_a_head_for_another_target(self, tmp_path: Path, ids: Any) -> None:
        config = {"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": ids}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(StepError) as caught:
            layer_ids(settings(head=str(tmp_path)))
        assert caught.value.reason == "HeadUnreadable"

    @pytest.mark.parametrize(("gpus", "connector"), [(0, "CpuHiddenStates"), (2, "ExampleHiddenStates")])
    def test_connector(self, gpus: int, connector: str) -> None:
        assert connector in engine_command(settings(gpus=gpus), [1, 2, 3], 80)[-1]
