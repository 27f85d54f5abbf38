"""The download of models with the engine's own huggingface_hub, against a hub on the loopback."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.deployment.pod_scripts import download_model
from tests.engine.engine_process import Engine
from tests.engine.hub_jobs import run_script
from tests.support.http_server import serving
from tests.support.loopback_hub import COMMIT, TOKEN, Hub

SCRIPT = Path(download_model.__file__)
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": os.urandom(3 * 2**20),
    "pytorch_model.bin": b"a pickle",
    "original/consolidated.00.pth": b"the same once more",
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub of the test's own."""
    with serving(Hub(FILES)) as server:
        yield server


def download(engine: Engine, hub_url: str, folder: Path, *arguments: str, token: str | None = None) -> dict[str, Any]:
    """Run the download as its Job does; return its answer."""
    answer: dict[str, Any] = json.loads(run_script(engine, hub_url, folder, SCRIPT, *arguments, token=token))
    return answer


def snapshot(cache: Path) -> dict[str, bytes]:
    """Files of the one snapshot in a cache."""
    root = cache / "models--acme--open" / "snapshots" / COMMIT
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


NEEDED = {name: FILES[name] for name in ("config.json", "model.safetensors")}


def test_concurrent_downloads_share_one_cache_and_later_ones_fetch_nothing(
    engine: Engine, hub: Hub, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    arguments = ("--model=acme/open", "--revision=v1", f"--cache={cache}")

    def run(name: str) -> dict[str, Any]:
        return download(engine, hub.url, tmp_path / name, *arguments)

    with ThreadPoolExecutor(2) as pool:
        answers = [*pool.map(run, ("one", "two"))]
    assert answers == [{"commit": COMMIT}, {"commit": COMMIT}]
    assert snapshot(cache) == NEEDED, "no pickle, and no second copy in another format"
    fetched = [*hub.sent]
    assert sorted(name for name, _ in fetched) == sorted(NEEDED), (
        "a lock kept the second from fetching what the first did"
    )
    assert run("three") == {"commit": COMMIT}
    assert hub.sent == fetched


def test_download_failures_have_their_reasons(engine: Engine, hub: Hub, tmp_path: Path) -> None:
    def reason(model: str, *more: str, at: str | None = None, token: str | None = None) -> str:
        arguments = (f"--model={model}", f"--cache={tmp_path / 'cache'}", *more)
        answer = download(engine, at or hub.url, tmp_path / "pod", *arguments, token=token)
        return str(answer["error"]["reason"] if "error" in answer else answer["commit"])

    assert reason("acme/gated") == "ModelGated"
    assert reason("acme/gated", token=TOKEN) == COMMIT
    assert reason("acme/missing") == "ModelNotFound"
    assert reason("acme/open", "--revision=v9") == "RevisionNotFound"
    assert reason("acme/open", at="http://127.0.0.1:9") == "HubUnreachable"
