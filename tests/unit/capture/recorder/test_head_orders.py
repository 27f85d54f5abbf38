"""The sidecar's part of an update: one order for each start of the engine, judged by its answers."""

import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.capture.recorder import head_orders
from specdecode_operator.capture.recorder.canary import (
    FAILED,
    RIGHT,
    UNCONFIRMED,
    UNSUPPORTED,
    WRONG,
    BadSettingsError,
    Engine,
    Verdict,
)
from specdecode_operator.capture.recorder.head_orders import HeadOrders, read_orders
from tests.support.waiting import Rounds

CANARIES = {"prompts": ["one"], "max_tokens": 4, "interval_s": 60, "model": "tiny", "margin_nats": 0.5}
HEAD = {"root": "/drafts/heads", "path": "team/new/head", "sha256": "ab" * 32}
LINE = {"head": HEAD}


def document(*heads: dict[str, Any], **changes: Any) -> bytes:
    return json.dumps({"heads": heads, "canaries": CANARIES, **changes}).encode()


def for_pods(*pods: str, **changes: Any) -> dict[str, Any]:
    return {**HEAD, "pods": list(pods) or None, **changes}


class Recorder(threading.Thread):
    """A recorder that takes an order and a verdict."""

    def __init__(self, sockets: Path, name: str, *, answer: dict[str, str]) -> None:
        super().__init__(daemon=True)
        self.answer = answer
        self.received: list[dict[str, Any]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(sockets / name))
        self._listener.listen()
        self.start()

    def run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rwb") as stream:
                for line in stream:
                    self.received.append(json.loads(line))
                    last = "judged" in self.received[-1]
                    answer = {"result": "kept", "reason": ""} if last else self.answer
                    if not answer["result"]:  # it ends
                        break
                    stream.write(json.dumps(answer).encode() + b"\n")
                    stream.flush()

    def end(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.join()


@contextmanager
def recording(folder: Path, name: str = "7.sock", **answer: str) -> Iterator[Recorder]:
    recorder = Recorder(folder, name, answer={"result": "new", "reason": "", **answer})
    try:
        yield recorder
    finally:
        recorder.end()
        (folder / name).unlink()


class World:
    """A sidecar, and the engine that it asks."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.file = folder, folder / "draft.json"
        self.verdict, self.is_healthy, self.now_s = RIGHT, True, 100.0
        self.drafts: Iterator[int] = itertools.count()
        monkeypatch.setattr(head_orders, "judge", lambda *_: Verdict(self.verdict, "told"))
        monkeypatch.setattr(Engine, "is_healthy", lambda _: self.is_healthy)
        monkeypatch.setattr(Engine, "drafts", lambda _: next(self.drafts))
        self.orders = HeadOrders(Engine("http://127.0.0.1:1"), self.file, folder, "pod-1")

    def step(self) -> None:
        self.now_s += 60
        self.orders.step(self.now_s)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_order_is_followed_once_for_each_start_of_the_engine(world: World) -> None:
    world.step()
    world.file.write_bytes(document(for_pods()))
    world.step()
    with recording(world.folder) as recorder:
        world.is_healthy = False
        world.step()
        assert recorder.received == []
        world.is_healthy = True
        for _ in range(3):
            world.step()
        assert recorder.received == [LINE, {"judged": {"verdict": "right", "reason": ""}}]
        world.file.write_bytes(document(for_pods(path="team/newest/head")))
        world.step()
        assert recorder.received[2]["head"]["path"] == "team/newest/head"
    with recording(world.folder, "8.sock") as restarted:
        world.step()
        assert len(restarted.received) == 2


@pytest.mark.parametrize(
    ("word", "verdict"),
    [(UNCONFIRMED, "right"), (WRONG, "wrong"), (FAILED, "unchecked"), (UNSUPPORTED, "unchecked")],
)
def test_verdict_follows_from_the_answers(world: World, word: str, verdict: str) -> None:
    world.verdict = word
    world.file.write_bytes(document(for_pods()))
    with recording(world.folder) as recorder:
        world.step()
        assert recorder.received[1]["judged"]["verdict"] == verdict


def test_engine_that_does_not_speculate_has_a_wrong_head(world: World) -> None:
    world.drafts = itertools.repeat(5)
    world.file.write_bytes(document(for_pods()))
    with recording(world.folder) as recorder:
        world.step()
        assert recorder.received[1]["judged"]["verdict"] == "wrong"


def test_order_after_which_the_engine_ended_is_not_repeated(world: World) -> None:
    world.file.write_bytes(document(for_pods()))
    with recording(world.folder, result="") as recorder:
        for _ in range(2):
            world.step()
        assert recorder.received == [LINE]
    world.file.write_bytes(document(for_pods(path="team/newest/head")))
    with recording(world.folder, "8.sock") as restarted:
        world.step()
        assert restarted.received[0]["head"]["path"] == "team/newest/head"


def test_unexpected_error_is_logged_and_does_not_end_the_thread(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world.file.write_bytes(document(for_pods()))

    def fail(_: Engine) -> bool:
        raise RuntimeError("of the engine")

    with recording(world.folder) as recorder:
        with monkeypatch.context() as broken:
            broken.setattr(Engine, "is_healthy", fail)
            world.orders.run(Rounds(1))
        assert recorder.received == []
        world.now_s = time.monotonic()
        world.step()
        assert recorder.received[0] == LINE
    assert "head: unexpected error: RuntimeError: of the engine" in capsys.readouterr().err


@pytest.mark.parametrize("answer", [{"result": "refused"}, {"result": "failed"}])
def test_refused_order_is_not_repeated(world: World, answer: dict[str, str]) -> None:
    world.file.write_bytes(document(for_pods()))
    with recording(world.folder, **answer) as recorder:
        for _ in range(3):
            world.step()
        assert recorder.received == [LINE]


def test_pod_follows_the_first_order_for_it(world: World) -> None:
    world.file.write_bytes(document(for_pods("pod-2", path="a/b"), for_pods(), for_pods(path="c/d")))
    with recording(world.folder) as recorder:
        world.step()
        assert recorder.received[0] == LINE
    world.file.write_bytes(document(for_pods("pod-2")))
    with recording(world.folder, "9.sock") as recorder:
        world.step()
        assert recorder.received == []


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b"x" * 2**20,
        document(*[for_pods()] * 5),
        document(for_pods(sha256="AB" * 32)),
        document(for_pods(root=1)),
        document({**HEAD, "pods": "pod-1"}),
        document({**HEAD, "pods": [1]}),
        document(for_pods(), canaries={}),
        document(*[["heads"]]),
    ],
)
def test_broken_file_is_ignored(world: World, text: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadSettingsError):
        read_orders(text)
    world.file.write_bytes(text)
    with recording(world.folder) as recorder:
        world.step()
        assert recorder.received == []
    assert "draft.json is ignored" in capsys.readouterr().err
