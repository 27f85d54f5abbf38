"""Train a head on a CPU with the unmodified speculators and vLLM, and serve what is published."""

import json
import os
import random
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from devcluster.host.errors import ClusterError
from devcluster.images.trainer_image import install_trainer_packages
from specdecode_operator.api.training import TrainingMethod
from specdecode_operator.api.training_status import TrainedHead
from specdecode_operator.training.files.pod_settings import PodSettings
from specdecode_operator.training.files.publish import publish_head
from specdecode_operator.training.job.settings import SETTINGS_VARIABLE
from specdecode_operator.vllm.plugin_bundle import TRAINER
from tests.engine.engine_process import HERE, QUIET, START_S, Engine
from tests.engine.recorder_server import serving
from tests.support import plain_http

pytestmark = pytest.mark.long

ROWS = 400
EPOCHS = 4
LAYERS, HIDDEN, VOCABULARY = 4, 256, 1024
K = 3
PROMPTS, ANSWER_TOKENS = 24, 10
SLOW = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
"""Beside other work, threads that wait for each other take up to 50 times as long."""


@dataclass(frozen=True)
class Pod:
    """The trainer's containers, without a cluster."""

    engine: Engine
    target: Path
    folder: Path  # of everything

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of all containers, as the operator renders them."""
        return {
            "namespace": "default",
            "training": "head",
            "uid": "uid-1",
            "root": str(self.folder / "claim"),
            "folder": "default/head",
            "method": "eagle3",
            "seed": 0,
            "epochs": EPOCHS,
            "learning_rate": "3e-3",
            "sequence_length": 160,
            "args": ["--ttt-steps", str(K)],
            "gpus": 0,
            "start_seconds": START_S,
            "target": str(self.target),
            "target_layers": LAYERS,
            "hidden_size": HIDDEN,
            "vocabulary": VOCABULARY,
            "command": [
                "vllm",
                "serve",
                str(self.target),
                "--max-model-len=168",
                "--max-num-seqs=16",
                "--enforce-eager",
            ],
            "sources": [],
            "target_model": "tests/walk",
            "target_quantization": "BF16",
            "engine_version": "0.32",
            "trainer_image": "trainer",
            "holdout_percent": 10,
            "max_tokens": 10**6,
            "min_rows": 1,
        }

    @property
    def claim(self) -> Path:
        """Folder of the training on its claim."""
        return self.folder / "claim" / "default" / "head"

    def export(self) -> None:
        """Write rows, and the programs of the image."""
        (self.claim / "rows").mkdir(parents=True)
        self.engine.run(
            str(HERE / "walk_rows.py"), str(self.target), str(self.claim / "rows/training.jsonl"), str(ROWS)
        )
        (self.folder / "training.zip").write_bytes(TRAINER.zipped())
        programs = {"python3": "", "vllm": "-m vllm.entrypoints.cli.main"}
        for name, arguments in programs.items():
            program = self.folder / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(f'#!/bin/sh\nexec {self.engine.python} {arguments} "$@"\n')
            program.chmod(0o755)

    def run(self, step: str, **changes: Any) -> tuple[str, Any]:
        """Run a step of the bundle; return its log and its termination message."""
        message = self.folder / f"{step}.json"
        environment = {
            **os.environ,
            **QUIET,
            **SLOW,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": self.engine.path,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            SETTINGS_VARIABLE: json.dumps(self.settings | changes),
        }
        command = [self.engine.python, "-I", self.folder / "training.zip", step, message]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        log = done.stdout + done.stderr
        logs = "\n".join(path.read_text()[-3000:] for path in self.claim.glob("hidden-states/logs/*.log"))
        assert done.returncode == 0, f"{log}\n{logs}"
        return log, json.loads(message.read_text())

    def publish(self) -> TrainedHead:
        """Run the container `publish`."""
        fields = {name: value for name, value in self.settings.items() if name in PodSettings.__struct_fields__}
        return publish_head(PodSettings(**fields | {"method": TrainingMethod.EAGLE3}))

    def untrained(self) -> Path:
        """Write a head with random weights."""
        out = self.folder / "untrained"
        self.engine.run(
            *("-m", "speculators.train", "--speculator-type", "eagle3", "--verifier-name-or-path", str(self.target)),
            *("--target-layer-ids", "1", "2", "3", "--num-layers", "1", "--full-attention-indices", "0"),
            *("--draft-attn-impl", "sdpa", "--dry-run", "--save-path", str(out), "--data-path", str(self.folder)),
        )
        return out


@pytest.fixture(scope="module")
def pod(engine: Engine, heads: Path, tmp_path_factory: pytest.TempPathFactory) -> Pod:
    """The containers after their target exists."""
    try:
        packages = install_trainer_packages()
    except ClusterError as error:
        pytest.skip(f"no speculators here ({error})")
    pod = Pod(engine.beside(packages), heads / "target", tmp_path_factory.mktemp("training"))
    pod.export()
    return pod


@dataclass(frozen=True)
class Served:
    """Answers of an engine, and the share of drafted tokens that it accepted."""

    answers: list[list[int]]
    acceptance: float


def serve(engine: Engine, heads: Path, folder: Path, head: Path) -> Served:
    """Ask an engine with a head, greedily."""
    speculation = {"method": "eagle3", "model": str(head), "num_speculative_tokens": K}
    chance = random.Random(5)
    prompts = [[chance.randrange(2, VOCABULARY) for _ in range(6)] for _ in range(PROMPTS)]
    with serving(engine, heads, folder, speculation=speculation, **SLOW) as server:
        answers = []
        for prompt in prompts:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
            more = {"ignore_eos": True, "return_token_ids": True}
            answer = plain_http.post(f"{server.url}/v1/completions", json=body | more, timeout=START_S)
            answers.append(answer.raise_for_status().json()["choices"][0]["token_ids"])
        counters = server.counters()
    drafted = counters["vllm:spec_decode_num_draft_tokens_total"]
    assert drafted
    return Served(answers, counters["vllm:spec_decode_num_accepted_tokens_total"] / drafted)


def test_trained_head_is_accepted_more_often_than_an_untrained_one(
    pod: Pod, engine: Engine, heads: Path, tmp_path: Path
) -> None:
    log, message = pod.run("hidden-states")
    assert message["hidden-states"]["rows"] == ROWS
    assert len(list(pod.claim.glob("hidden-states/dataset/hidden_states/hs_*.safetensors"))) == ROWS
    assert not list(pod.claim.glob("hidden-states/logs/prepare.log")), "it quotes rows"
    _, message = pod.run("train", epochs=EPOCHS - 1)
    steps_before = message["train"]["steps"]
    training_log, _ = pod.run("train")
    steps = [json.loads(line)["progress"]["step"] for line in training_log.splitlines()]
    assert min(steps) > steps_before, "it continues from its checkpoint"
    for line in (log + training_log).splitlines():
        assert json.loads(line).keys() == {"progress"}, "no other line of the programs is in the log"
    head = pod.publish()
    assert head.sha256
    assert head.accuracy_percent
    trained = serve(engine, heads, tmp_path / "trained", pod.claim / "head")
    untrained = serve(engine, heads, tmp_path / "untrained", pod.untrained())
    assert trained.answers == untrained.answers
    assert untrained.acceptance < 0.1
    assert trained.acceptance > untrained.acceptance + 0.1
