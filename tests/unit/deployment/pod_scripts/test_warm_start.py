"""Engines share compiled graphs: each has a copy, and an engine that serves publishes its own."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
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
        self._groups = 0

    def start(self, name: str, env: dict[str, str] | None = None) -> tuple[subprocess.Popen[str], str]:
        """Start one; return it and what it says of its cache."""
        engine = self.begin(name, env=env)
        return engine, _first_line(engine)

    def start_group(self, *names: str) -> list[str]:
        """Start the pods of one engine; return what they say of their caches, by rank."""
        self._groups += 1
        flags = [f"--pods={len(names)}", f"--leader={_address(self._groups)}"]
        pods = [self.begin(name, *flags, f"--rank={rank}") for rank, name in enumerate(names)]
        return [_first_line(pod) for pod in pods]

    def begin(self, name: str, *flags: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Start one without waiting for what it says."""
        url = f"http://127.0.0.1:{self.health.server_port}/health"
        command = [sys.executable, "-c", SCRIPT, f"--folder={self.folder}", f"--cache={self.cache(name)}", *flags]
        engine = subprocess.Popen(
            [*command, f"--health={url}", "--", sys.executable, "-c", ENGINE, name],
            env=env or {},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._running.append(engine)
        return engine

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

    @property
    def published_of_group(self) -> list[str]:
        """What each pod of a group published, by rank."""
        return [path.read_text() for path in sorted((self.folder / warm_start.PUBLISHED).glob("*/graph"))]


def _address(group: int) -> str:
    """Return the leader's address of a group; all leaders listen at the same port."""
    return f"127.{group}.{os.getpid() // 256 % 256}.{os.getpid() % 256}"


def _reported(leader: str, words: bytes) -> bytes | None:
    """Report as a worker does; return the answer, None if no leader listens."""
    with suppress(ConnectionRefusedError), socket.create_connection((leader, warm_start.PORT), 60) as connection:
        connection.sendall(words)
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(64)
    return None


def _first_line(engine: subprocess.Popen[str]) -> str:
    assert engine.stdout is not None
    return engine.stdout.readline().strip()


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


def test_each_pod_of_a_group_reuses_the_cache_of_its_rank(pods: Pods) -> None:
    assert pods.start_group("leader", "first", "second") == ["nothing"] * 3
    assert pods.published_of_group == [], "it does not serve yet"
    pods.health.serves = True
    written = ["leader", "first", "second"]
    eventually(lambda: pods.published_of_group == written, "the leader publishes all folders")
    assert [each.name for each in pods.folder.iterdir()] == [warm_start.PUBLISHED]
    assert pods.start_group("next-leader", "next-first", "next-second") == written


def test_group_compiles_if_one_of_its_pods_cannot_copy_the_cache(pods: Pods) -> None:
    pods.start_group("leader", "worker")
    pods.health.serves = True
    eventually(lambda: pods.published_of_group == ["leader", "worker"], "all folders are published")
    shutil.rmtree(pods.folder / warm_start.PUBLISHED / "1")
    assert pods.start_group("next-leader", "next-worker") == ["nothing", "nothing"]


def test_group_does_not_reuse_what_a_failed_start_left_in_one_pod(pods: Pods) -> None:
    pods.cache("leader").mkdir()
    (pods.cache("leader") / "graph").write_text("of the failed start")
    assert pods.start_group("leader", "worker") == ["nothing", "nothing"]


def test_only_folders_of_one_start_are_published(pods: Pods) -> None:
    pods.start_group("leader", "worker")
    (pods.folder / "part-of-another-start" / "1").mkdir(parents=True)
    pods.start_group("other-leader", "other-worker")
    pods.health.serves = True
    eventually(lambda: pods.published_of_group != [], "one of the two engines is first")
    assert pods.published_of_group in (["leader", "worker"], ["other-leader", "other-worker"])


def test_leader_answers_after_all_workers_have_reported(pods: Pods) -> None:
    leader = _address(200)
    engine = pods.begin("leader", "--pods=2", "--rank=0", f"--leader={leader}")
    eventually(lambda: _reported(leader, b"") == b"", "the leader listens")
    for nonsense in (b"\xff\n", b"0 1\n", b"7 1\n", b"1\n"):
        assert _reported(leader, nonsense) == b""
    assert engine.poll() is None
    assert (_reported(leader, b"1 1\n") or b"").startswith(b"part-")


def test_waiting_pod_ends_on_request(pods: Pods) -> None:
    leader = _address(201)
    worker = pods.begin("worker", "--pods=2", "--rank=1", f"--leader={leader}")
    with socket.create_server((leader, warm_start.PORT)) as server:
        connection, _ = server.accept()
        with connection:
            assert connection.makefile().readline() == "1 0\n"
            worker.terminate()
            assert worker.wait(60) == 128 + signal.SIGTERM
