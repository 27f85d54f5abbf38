"""Engines share compiled graphs: each has a copy, and an engine that serves publishes its own."""

import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from specdecode_operator.deployment.pod_scripts import warm_start
from tests.support.http_server import Quiet, serving
from tests.support.waiting import eventually

SCRIPT = Path(warm_start.__file__).read_text()
ENGINE = """
import os, pathlib, sys
graph = pathlib.Path(os.environ["VLLM_CACHE_ROOT"]) / "graph"
found = graph.read_text() if graph.exists() else "nothing"
graph.parent.mkdir(exist_ok=True)
graph.write_text(sys.argv[1])
print(found, flush=True)
sys.stdin.read()
"""
"""Says what its cache holds, compiles as vLLM does (into it, as if it were alone), and lives until its input ends."""


class Health(Quiet, BaseHTTPRequestHandler):
    """Answers as an engine does before and after its start."""

    server: "Engine"

    def do_GET(self) -> None:
        self.send_response(200 if self.server.serves and self.path == "/health" else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()


class Engine(HTTPServer):
    """The address at which an engine would serve."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Health)
        self.serves = False


@pytest.fixture
def health() -> Iterator[Engine]:
    with serving(Engine()) as server:
        yield server


class Pods:
    """Engines that are started with one folder, as their pods' commands do it, each with a cache of its own."""

    def __init__(self, root: Path, health: Engine) -> None:
        self.root = root
        self.folder = root / "compiled"
        self.folder.mkdir()
        self.health = health
        self._running: list[subprocess.Popen[str]] = []

    def start(self, name: str, env: dict[str, str] | None = None) -> tuple[subprocess.Popen[str], str]:
        """Start one; return it and what it says of its cache."""
        url = f"http://127.0.0.1:{self.health.server_port}/health"
        command = [sys.executable, "-c", SCRIPT, f"--folder={self.folder}", f"--cache={self.cache(name)}"]
        engine = subprocess.Popen(
            [*command, f"--health={url}", "--", sys.executable, "-c", ENGINE, name],
            env=env or {},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._running.append(engine)
        assert engine.stdout is not None
        return engine, engine.stdout.readline().strip()

    def cache(self, name: str) -> Path:
        """The cache of a pod, which in its container is at the same path as all others."""
        return self.root / name

    def stop(self, engine: subprocess.Popen[str]) -> None:
        """Kill one, as the kubelet does."""
        engine.kill()
        engine.communicate()
        self._running.remove(engine)

    def stop_all(self) -> None:
        for engine in [*self._running]:
            self.stop(engine)

    @property
    def published(self) -> str | None:
        graph = self.folder / warm_start.PUBLISHED / "graph"
        return graph.read_text() if graph.exists() else None


@pytest.fixture
def pods(tmp_path: Path, health: Engine) -> Iterator[Pods]:
    pods = Pods(tmp_path, health)
    yield pods
    pods.stop_all()


def test_later_engines_reuse_the_cache_of_the_first_ready_engine(pods: Pods) -> None:
    assert pods.start("one")[1] == "nothing"
    assert pods.published is None, "it does not serve yet"
    pods.health.serves = True
    eventually(lambda: pods.published == "one", "it is published once the engine serves")
    assert [pods.start(name)[1] for name in ("two", "three")] == ["one", "one"]


def test_engines_do_not_write_to_the_published_cache(pods: Pods) -> None:
    pods.start("one")
    pods.health.serves = True
    eventually(lambda: pods.published == "one", "it is published")
    pods.start("two")
    assert (pods.cache("two") / "graph").read_text() == "two", "it compiled anew"
    assert pods.published == "one"


def test_cache_of_an_engine_that_never_served_is_not_published(pods: Pods) -> None:
    engine, _ = pods.start("one")
    pods.stop(engine)
    assert pods.start("two")[1] == "nothing"
    pods.health.serves = True
    eventually(lambda: pods.published == "two", "the next one is published")


def test_node_and_rank_specific_files_are_not_published(pods: Pods) -> None:
    pods.start("one")
    (pods.cache("one") / "gpu_p2p_access_cache_for_0,1.json").touch()
    (pods.cache("one") / "model.17.tmp").touch()
    tuned = pods.cache("one") / "flashinfer_autotune_cache" / "0.6" / "90a"
    tuned.mkdir(parents=True)
    (tuned / "autotune_configs.json").touch()
    pods.health.serves = True
    eventually(lambda: pods.published == "one", "it is published")
    assert [each.name for each in (pods.folder / warm_start.PUBLISHED).iterdir()] == ["graph"]


def test_cache_root_set_by_the_user_is_kept(pods: Pods, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "graph").write_text("the user's")
    assert pods.start("one", {"VLLM_CACHE_ROOT": str(own)})[1] == "the user's"
    assert not pods.cache("one").exists()


def test_engine_starts_without_a_usable_cache_volume(pods: Pods) -> None:
    pods.folder.rmdir()
    pods.folder.write_text("no folder")
    pods.health.serves = True
    engine, said = pods.start("one")
    assert said == "nothing"
    assert engine.poll() is None


def test_script_replaces_itself_with_the_engine_process(pods: Pods) -> None:
    engine, _ = pods.start("one")
    assert "--health" not in Path(f"/proc/{engine.pid}/cmdline").read_text(), "signals reach the engine itself"
