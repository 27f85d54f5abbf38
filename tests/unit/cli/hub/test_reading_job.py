"""What the Job that reads a model runs, against a hub on the loopback."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from specdecode_operator.deployment.models.checkpoint_reader import Checkpoint, CheckpointError
from specdecode_operator.deployment.models.model_facts import unpack_facts
from tests.support.checkpoints import write_checkpoint
from tests.support.llama import SMALL_CONFIG
from tests.support.loopback_hub import COMMIT, TOKEN, Hub
from tests.unit.cli.conftest import Specdecode
from tests.unit.cli.hub.conftest import FILES, SHARDS


@pytest.fixture
def message(tmp_path: Path) -> Path:
    """The file that stands for the container's termination message."""
    return tmp_path / "message"


def read(specdecode: Specdecode, message: Path, *arguments: str) -> Checkpoint:
    """Run the command of the Job."""
    result = specdecode("read-model", "hub", *arguments, "--message", message)
    assert message.exists(), result.output
    return unpack_facts(message.read_text())


def test_headers_come_from_the_hub_and_weights_stay_there(specdecode: Specdecode, message: Path, hub: Hub) -> None:
    found = read(specdecode, message, "acme/open", "--revision=v1")
    assert (found.config, found.commit) == (SMALL_CONFIG, COMMIT)
    assert (found.weights.total_bytes, found.weights.tensors) == (2 * 4096 * 1024 * 2, 2)
    sent_bytes: Counter[str] = Counter()
    for name, size_bytes in hub.sent:
        sent_bytes[name] += size_bytes
    assert all(0 < sent_bytes[name] <= 64 * 1024 < len(SHARDS[name]) for name in SHARDS), "weights were not fetched"
    assert "pytorch_model.bin" not in sent_bytes
    assert not any("/resolve/v1/" in path for path in hub.asked), "all files are those of one commit"


@pytest.mark.usefixtures("hub")
def test_a_gated_model_needs_the_token(specdecode: Specdecode, message: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="is gated") as refused:
        read(specdecode, message, "acme/gated")
    assert refused.value.reason == "HubRefused"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert read(specdecode, message, "acme/gated").weights.tensors == 2


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    "arguments", [["acme/none"], ["acme/open", "--revision=v9"], ["a/b/c/d"]], ids=["model", "revision", "id"]
)
def test_what_the_hub_refuses_is_told(specdecode: Specdecode, message: Path, arguments: list[str]) -> None:
    with pytest.raises(CheckpointError) as refused:
        read(specdecode, message, *arguments)
    assert refused.value.reason == "HubRefused"


def test_a_hub_that_is_not_there_is_told(
    specdecode: Specdecode, message: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Hub(FILES) as gone:
        monkeypatch.setenv("HF_ENDPOINT", gone.url)  # its port is free again
    with pytest.raises(CheckpointError) as refused:
        read(specdecode, message, "acme/open")
    assert refused.value.reason == "HubUnreachable"


def test_a_folder_is_read_without_the_hub_and_without_an_engine(tmp_path: Path, message: Path) -> None:
    tensors = {"model.embed_tokens.weight": ("BF16", [64, 32])}
    folder = write_checkpoint(tmp_path / "model", SMALL_CONFIG, tensors)
    # What no engine brings along must not be needed: no module named vllm, torch or huggingface_hub.
    blocked = dict.fromkeys(("vllm", "torch", "huggingface_hub", "transformers"))
    start = f"import sys; sys.modules.update({blocked}); from specdecode_operator.cli.main import main; main()"
    command = [sys.executable, "-c", start, "read-model", "folder", "--message", str(message), "--", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert unpack_facts(message.read_text()).weights.total_bytes == 64 * 32 * 2
