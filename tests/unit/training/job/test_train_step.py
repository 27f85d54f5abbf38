"""The step `train` of the bundle, as a process like in the trainer's image, with a stand-in for speculators."""

import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.vllm.plugin_bundle import TRAINER
from tests.support.waiting import eventually

SECRET = "my password is swordfish"
# What speculators writes for an epoch, and prints.
TRAINER_SCRIPT = """\
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--save-path") + 1])
epochs = int(sys.argv[sys.argv.index("--epochs") + 1])
mode = {mode!r}
(folder / "arguments.json").write_text(json.dumps(sys.argv))
print("{secret}", flush=True)
begun = max([int(each.name) + 1 for each in folder.iterdir() if each.name.isdecimal()], default=0)
if mode == "hang":
    (folder / "hanging").touch()
    time.sleep(600)
if mode == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "full":
    raise OSError(28, "No space left on device")
if mode == "raise":
    raise RuntimeError("{secret}")
for epoch in range(begun, 0 if mode == "silent" else epochs):
    if mode != "no-loss":
        loss = "nan" if mode == "nan" and epoch == 1 else f"{{3.0 - epoch:.3f}}"
        print(f"INFO train/loss={{loss}}, epoch={{epoch}}, global_step={{epoch}} trainer.py:1", flush=True)
        if loss == "nan":
            time.sleep(600)
    each = folder / str(epoch)
    each.mkdir()
    for name in ("config.json", "model.safetensors", "optimizer_state_dict.pt"):
        (each / name).write_text("{{}}")
    if mode == "cut" and epoch == 1:
        sys.exit(1)
    (each / "training_state.json").write_text("{{}}")
    if mode == "overfits" and epoch == 0:
        (folder / "checkpoint_best").symlink_to("0")
    print(f"INFO Checkpoint saved to {{each}} trainer.py:2", flush=True)
    print(f"INFO Training epoch {{epoch + 1}}/{{epochs}} completed trainer.py:3", flush=True)
    if mode != "no-loss":
        (each / "val_metrics.json").write_text(json.dumps({{"loss_epoch": 2.0, "full_acc_0_epoch": 0.5}}))
"""


class Pod:
    """Folders and settings of a pod's container."""

    def __init__(self, folder: Path) -> None:
        self.bundle = folder / "training.zip"
        self.bundle.write_bytes(TRAINER.zipped())
        self.programs = folder / "bin"
        self.programs.mkdir()
        self.message = folder / "termination-log"
        self.root = folder / "claim"
        self.folder = self.root / "ns" / "t"
        self.checkpoints = self.folder / "checkpoints" / "uid-1"
        (self.folder / "hidden-states" / "dataset").mkdir(parents=True)
        (self.folder / "hidden-states" / "target_layers.json").write_text("[2, 16, 29]")
        self.settings: dict[str, Any] = {
            "root": str(self.root),
            "folder": "ns/t",
            "uid": "uid-1",
            "method": "eagle3",
            "seed": 3,
            "epochs": 3,
            "learning_rate": "1e-4",
            "sequence_length": 128,
            "args": ["--lr-decay", "x"],
            "gpus": 1,
            "target": "/models/target",
            "target_layers": 32,
            "hidden_size": 64,
            "command": [],
            "start_seconds": 5,
        }

    def begin(self, mode: str) -> subprocess.Popen[str]:
        script = self.programs / "trainer.py"
        script.write_text(TRAINER_SCRIPT.format(mode=mode, secret=SECRET))
        python = self.programs / "python3"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
        python.chmod(0o755)
        return subprocess.Popen(
            [sys.executable, "-I", self.bundle, "train", self.message],
            env={
                "PATH": f"{self.programs}:{os.environ['PATH']}",
                "SPECDECODE_TRAINING": json.dumps(self.settings),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, mode: str) -> tuple[int, str, Any]:
        process = self.begin(mode)
        output, _ = process.communicate(timeout=300)
        return process.returncode, output, json.loads(self.message.read_text())

    def arguments(self) -> list[str]:
        found: list[str] = json.loads((self.checkpoints / "arguments.json").read_text())
        return found

    def epochs(self) -> list[str]:
        return sorted(each.name for each in self.checkpoints.iterdir() if each.name.isdecimal())


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    pod = Pod(tmp_path)
    yield pod
    told = pod.message.read_text() if pod.message.exists() else ""
    assert SECRET not in told, "text of the trainer is untrusted"


def test_bundle_needs_only_the_standard_library(tmp_path: Path) -> None:
    bundle = tmp_path / "training.zip"
    bundle.write_bytes(TRAINER.zipped())
    names = zipfile.ZipFile(bundle).namelist()
    assert "specdecode_trainer/pending_rows.py" in names
    # -S: without site-packages.
    command = [sys.executable, "-I", "-S", bundle, "train", tmp_path / "m"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert json.loads((tmp_path / "m").read_text())["error"]["reason"] == "InternalError"
    assert "KeyError" in done.stderr, "it has no settings"
    assert TRAINER.zipped() == TRAINER.zipped()


class TestSuccess:
    def test_figures_of_the_best_checkpoint(self, pod: Pod) -> None:
        code, output, message = pod.run("good")
        assert code == 0, output
        assert message["train"]["checkpoint"] == "2"
        assert message["train"]["loss_epoch"] == 2.0

    def test_log_has_progress_and_no_text_of_the_trainer(self, pod: Pod) -> None:
        _, output, _ = pod.run("good")
        lines = [json.loads(line)["progress"] for line in output.splitlines()]
        assert [line["epochsDone"] for line in lines if "etaSeconds" in line] == [1, 2, 3]
        assert lines[-1]["etaSeconds"] == 0
        assert SECRET not in output

    def test_own_output_of_the_trainer_is_private(self, pod: Pod) -> None:
        pod.run("good")
        log = pod.folder / "hidden-states" / "logs" / "train.log"
        assert SECRET in log.read_text()
        assert log.stat().st_mode & 0o777 == 0o600

    def test_only_the_newest_and_the_best_checkpoint_are_kept(self, pod: Pod) -> None:
        pod.run("good")
        assert pod.epochs() == ["2"]

    def test_best_checkpoint_is_kept(self, pod: Pod) -> None:
        _, _, message = pod.run("overfits")
        assert message["train"]["checkpoint"] == "0"
        assert pod.epochs() == ["0", "2"]

    def test_arguments(self, pod: Pod) -> None:
        pod.run("good")
        given = pod.arguments()
        assert given[1:3] == ["-m", "speculators.train"]
        assert given[given.index("--full-attention-indices") + 1] == "0"
        assert given[given.index("--target-layer-ids") + 1 :][:3] == ["2", "16", "29"]
        assert given[given.index("--lr") + 1] == "1e-4"
        assert given[-2:] == ["--lr-decay", "x"]
        assert "--from-pretrained" not in given

    def test_several_gpus(self, pod: Pod) -> None:
        pod.settings["gpus"] = 4
        pod.run("good")
        assert "--nproc-per-node=4" in pod.arguments()

    def test_cpu(self, pod: Pod) -> None:
        pod.settings["gpus"] = 0
        pod.run("good")
        given = pod.arguments()
        assert given[1:3] == ["-m", "specdecode_trainer.train_on_cpu"]
        assert given[given.index("--draft-attn-impl") + 1] == "sdpa"

    @pytest.mark.parametrize(("gpus", "dtype"), [(0, "float32"), (1, "bfloat16")])
    def test_continues_from_a_head(self, pod: Pod, tmp_path: Path, gpus: int, dtype: str) -> None:
        head = tmp_path / "head"
        head.mkdir()
        config = {
            "speculators_model_type": "eagle3",
            "dtype": "bfloat16",
            "auto_map": {"AutoModel": "evil.Model"},
            "speculators_config": {"verifier": {"name_or_path": "org/target"}},
        }
        (head / "config.json").write_text(json.dumps(config))
        (head / "model.safetensors").write_bytes(b"weights")
        pod.settings |= {"gpus": gpus, "head": str(head)}
        pod.run("good")
        given = pod.arguments()
        copy = Path(given[given.index("--from-pretrained") + 1])
        assert json.loads((copy / "config.json").read_text()) == {
            "speculators_model_type": "eagle3",
            "dtype": dtype,
            "speculators_config": {"verifier": {"name_or_path": "/models/target"}},
        }
        assert (copy / "model.safetensors").read_bytes() == b"weights"
        assert "--num-layers" not in given


class TestRetry:
    def test_continues_from_the_newest_complete_checkpoint(self, pod: Pod) -> None:
        assert pod.run("cut")[0] == 1
        assert pod.epochs() == ["0", "1"]
        code, _, message = pod.run("good")
        assert code == 0
        assert message["train"]["steps"] == 2
        assert pod.epochs() == ["2"], "the incomplete one was trained again"
        assert not (pod.checkpoints / "interrupted").exists()

    def test_does_nothing_after_a_success(self, pod: Pod) -> None:
        pod.run("good")
        code, _, message = pod.run("good")
        assert code == 0
        assert message["train"]["checkpoint"] == "2"


class TestFailure:
    @pytest.mark.parametrize(
        ("mode", "reason", "told"),
        [
            ("nan", "TrainerDiverged", "step 1"),
            ("silent", "TrainerSilent", ""),
            ("no-loss", "TrainerSilent", ""),
            ("full", "DiskFull", ""),
            ("raise", "TrainerFailed", "RuntimeError at trainer.py:"),
            ("kill", "TrainerFailed", "SIGKILL"),
        ],
    )
    def test_reason(self, pod: Pod, mode: str, reason: str, told: str) -> None:
        code, output, message = pod.run(mode)
        assert code == 1
        assert message["error"]["reason"] == reason
        assert told in message["error"]["message"]
        assert SECRET not in output

    def test_diverged_checkpoints_are_not_continued(self, pod: Pod) -> None:
        pod.run("nan")
        assert not pod.checkpoints.exists()

    def test_head_in_another_format(self, pod: Pod, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
        pod.settings["head"] = str(tmp_path)
        _, _, message = pod.run("good")
        assert message["error"]["reason"] == "HeadUnreadable"

    def test_signal_stops_the_trainer(self, pod: Pod) -> None:
        process = pod.begin("hang")
        eventually((pod.checkpoints / "hanging").exists, "the trainer runs")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=300)
        assert process.returncode == 1
        assert json.loads(pod.message.read_text())["error"]["reason"] == "Cancelled"
