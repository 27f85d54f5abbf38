"""What the tests of the hub share: one on the loopback device, and a cache of each test's own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import header, safetensors
from tests.support.http_server import serving
from tests.support.llama import SMALL_CONFIG
from tests.support.loopback_hub import Hub
from tests.unit.cli.conftest import manifest

SHARDS = {
    "model-00001-of-00002.safetensors": safetensors(*header({"model.embed_tokens.weight": ("BF16", [4096, 1024])})),
    "model-00002-of-00002.safetensors": safetensors(*header({"lm_head.weight": ("BF16", [4096, 1024])})),
}
INDEX = {"weight_map": dict(zip(["model.embed_tokens.weight", "lm_head.weight"], SHARDS, strict=True))}
FILES = {
    "config.json": json.dumps(SMALL_CONFIG).encode(),
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    **SHARDS,
    "pytorch_model.bin": b"a pickle",
}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache of the test's own, and no settings of whoever runs it."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub(FILES)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def alone(model: str, **target: Any) -> dict[str, Any]:
    """An object with one model and no draft."""
    return manifest("alone", target={"model": model, **target}, speculation=None, parallelism={"tensor": 1})
