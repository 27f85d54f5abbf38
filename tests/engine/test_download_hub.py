"""The download of models with the engine's own huggingface_hub, against a hub on the loopback."""

import hashlib
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.resolver import download_model
from tests.engine.engine_process import Engine

SCRIPT = Path(download_model.__file__)
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of_the_test"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": os.urandom(3 * 2**20),
    "pytorch_model.bin": b"a pickle",
    "original/consolidated.00.pth": b"the same once more",
}


class Hub(ThreadingHTTPServer):
    """As much of a hub as a download asks of it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.sent: list[str] = []


class HubHandler(BaseHTTPRequestHandler):
    """Answers for acme/open (anybody), acme/gated (the token's owner) and nothing else."""

    server: Hub

    def do_GET(self) -> None:
        self._answer(with_content=True)

    def do_HEAD(self) -> None:
        self._answer(with_content=False)

    def _answer(self, *, with_content: bool) -> None:
        path = self.path.partition("?")[0]
        gated = "acme/gated" in path
        if "acme/open" not in path and not gated:
            self._refuse(404, "RepoNotFound")
        elif "/resolve/" in path and gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(403, "GatedRepo")
        elif "/resolve/" in path:
            self._send_file(path.partition(f"/resolve/{COMMIT}/")[2], with_content=with_content)
        elif "/revision/" in path and not path.endswith(("/revision/v1", f"/revision/{COMMIT}")):
            self._refuse(404, "RevisionNotFound")
        elif "/tree/" in path:
            self._send(json.dumps([self._entry(name) for name in FILES]).encode())
        else:
            siblings = [{"rfilename": name, "size": len(content)} for name, content in FILES.items()]
            body = {"_id": "1", "id": "acme/open", "sha": COMMIT, "siblings": siblings, "private": False}
            self._send(json.dumps(body).encode())

    @staticmethod
    def _entry(name: str) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(FILES[name]), "oid": hashlib.sha1(FILES[name]).hexdigest()}

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, name: str, *, with_content: bool) -> None:
        content = FILES[name]
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_content:
            self.server.sent.append(name)
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub of the test's own."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def download(engine: Engine, hub_url: str, folder: Path, *arguments: str, token: str | None = None) -> dict[str, Any]:
    """Run the download as its Job does; return its answer."""
    folder.mkdir(parents=True, exist_ok=True)
    message = folder / "message"
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "PYTHONPATH": str(engine.packages or ""),
        "HF_ENDPOINT": hub_url,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **({"HF_TOKEN": token} if token else {}),
    }
    command = [str(engine.python), "-c", SCRIPT.read_text(), *arguments, f"--message={message}"]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert message.exists(), done.stderr
    answer: dict[str, Any] = json.loads(message.read_text())
    return answer


def url(hub: Hub) -> str:
    return f"http://127.0.0.1:{hub.server_port}"


def snapshot(cache: Path) -> dict[str, bytes]:
    """Files of the one snapshot in a cache."""
    root = cache / "models--acme--open" / "snapshots" / COMMIT
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


NEEDED = {name: FILES[name] for name in ("config.json", "model.safetensors")}


def test_two_at_once_fill_one_cache_and_a_third_fetches_nothing(engine: Engine, hub: Hub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    arguments = ("--model=acme/open", "--revision=v1", f"--cache={cache}")

    def run(name: str) -> dict[str, Any]:
        return download(engine, url(hub), tmp_path / name, *arguments)

    with ThreadPoolExecutor(2) as pool:
        answers = [*pool.map(run, ("one", "two"))]
    assert answers == [{"commit": COMMIT}, {"commit": COMMIT}]
    assert snapshot(cache) == NEEDED, "no pickle, and no second copy in another format"
    fetched = [*hub.sent]
    assert sorted(fetched) == sorted(NEEDED), "a lock kept the second from fetching what the first did"
    assert run("three") == {"commit": COMMIT}
    assert hub.sent == fetched


def test_what_goes_wrong_is_told(engine: Engine, hub: Hub, tmp_path: Path) -> None:
    def reason(model: str, *more: str, at: str | None = None, token: str | None = None) -> str:
        arguments = (f"--model={model}", f"--cache={tmp_path / 'cache'}", *more)
        answer = download(engine, at or url(hub), tmp_path / "pod", *arguments, token=token)
        return str(answer["error"]["reason"] if "error" in answer else answer["commit"])

    assert reason("acme/gated") == "ModelGated"
    assert reason("acme/gated", token=TOKEN) == COMMIT
    assert reason("acme/missing") == "ModelNotFound"
    assert reason("acme/open", "--revision=v9") == "RevisionNotFound"
    assert reason("acme/open", at="http://127.0.0.1:9") == "HubUnreachable"
