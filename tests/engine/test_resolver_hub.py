"""The reader of models with the engine's own huggingface_hub, against a hub on the loopback."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdecode_operator.resolver import read_model_facts
from specdecode_operator.resolver.answer import unpack
from specdecode_operator.resolver.read_model_facts import Checkpoint, CheckpointError
from tests.engine.engine_process import Engine
from tests.engine.hub_jobs import run_script
from tests.support.checkpoints import header, safetensors
from tests.support.http_server import serving
from tests.support.loopback_hub import COMMIT, TOKEN, Hub
from tests.support.objects import TINY_CONFIG

SCRIPT = Path(read_model_facts.__file__)
SHARDS = {
    "model-00001-of-00002.safetensors": safetensors(*header({"model.embed_tokens.weight": ("BF16", [4096, 1024])})),
    "model-00002-of-00002.safetensors": safetensors(*header({"lm_head.weight": ("BF16", [4096, 1024])})),
}
FILES = {
    "config.json": json.dumps(TINY_CONFIG).encode(),
    "model.safetensors.index.json": json.dumps(
        {"weight_map": dict(zip(["model.embed_tokens.weight", "lm_head.weight"], SHARDS, strict=True))}
    ).encode(),
    **SHARDS,
    "pytorch_model.bin": b"a pickle",
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub of the test's own."""
    with serving(Hub(FILES)) as server:
        yield server


def read(engine: Engine, hub: Hub, folder: Path, *arguments: str, token: str | None = None) -> Checkpoint:
    """Run the reader as its Job does."""
    return unpack(run_script(engine, hub.url, folder, SCRIPT, *arguments, token=token))


def test_headers_come_from_the_hub_and_weights_stay_there(engine: Engine, hub: Hub, tmp_path: Path) -> None:
    found = read(engine, hub, tmp_path, "--hub=acme/open", "--revision=v1")
    assert (found.config, found.commit) == (TINY_CONFIG, COMMIT)
    assert (found.weights.total_bytes, found.weights.tensors) == (2 * 4096 * 1024 * 2, 2)
    sent_bytes: Counter[str] = Counter()
    for name, size_bytes in hub.sent:
        sent_bytes[name] += size_bytes
    assert all(0 < sent_bytes[name] <= 64 * 1024 < len(SHARDS[name]) for name in SHARDS), "weights were not fetched"
    assert "pytorch_model.bin" not in sent_bytes
    assert not any("/resolve/v1/" in path for path in hub.asked), "all files are those of one commit"


def test_a_gated_model_needs_the_token(engine: Engine, hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is gated") as refused:
        read(engine, hub, tmp_path, "--hub=acme/gated")
    assert refused.value.reason == "HubRefused"
    assert read(engine, hub, tmp_path, "--hub=acme/gated", token=TOKEN).weights.tensors == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hub=acme/none"], "does not exist"),
        (["--hub=acme/open", "--revision=v9"], "no such revision"),
        (["--hub=a/b/c/d"], "no hub id"),
    ],
)
def test_what_the_hub_refuses_is_told(
    engine: Engine,
    hub: Hub,
    tmp_path: Path,
    arguments: list[str],
    words: str,
) -> None:
    with pytest.raises(CheckpointError, match=words) as refused:
        read(engine, hub, tmp_path, *arguments)
    assert refused.value.reason == "HubRefused"


def test_a_hub_that_is_not_there_is_told(engine: Engine, hub: Hub, tmp_path: Path) -> None:
    with Hub(FILES) as gone:
        pass  # its port is free again
    with pytest.raises(CheckpointError) as refused:
        read(engine, gone, tmp_path, "--hub=acme/open")
    assert refused.value.reason == "HubUnreachable"
