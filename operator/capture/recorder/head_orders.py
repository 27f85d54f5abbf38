"""Order the recorder of this pod to replace the draft head, and judge the answers with the new head.

A thread of the recorder's sidecar: python3 of the engine's image, standard library only. The operator names the head
of each pod in a file of a mounted ConfigMap. An engine that starts later has the head of its command line, and gets the
same order.
"""

import json
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .canary import (
    FAILED,
    LONGEST_REASON,
    UNSUPPORTED,
    WRONG,
    BadSettingsError,
    Engine,
    FailedError,
    Settings,
    judge,
    keep_stepping,
    read_settings,
)

NEW_HEAD = "new"  # result while the answers with the new head are judged (head_loader.NEW)
MOST_HEADS = 4
_LARGEST_FILE_BYTES = 2**19
_LARGEST_ANSWER_BYTES = 2**16
_TIMEOUT_S = 2 * 3600.0  # longer than the recorder waits for the workers
_REST_S = 10.0
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class HeadOrder:
    """Head that some pods must load."""

    root: str  # mount of the claim
    path: str
    sha256: str
    pods: frozenset[str] | None  # None: all
    canaries: Settings

    @property
    def line(self) -> dict[str, Any]:
        """Order for the recorder."""
        return {"head": {"root": self.root, "path": self.path, "sha256": self.sha256}}


def read_orders(text: bytes) -> list[HeadOrder]:
    """Return the orders of a file; the first one for a pod applies. Raises BadSettingsError."""
    if len(text) > _LARGEST_FILE_BYTES:
        raise BadSettingsError(f"more than {_LARGEST_FILE_BYTES} bytes")
    try:
        document = json.loads(text)
        canaries = read_settings(json.dumps(document["canaries"]).encode())
        heads = document["heads"]
        if not isinstance(heads, list) or len(heads) > MOST_HEADS:
            raise BadSettingsError(f"heads: must be a list of at most {MOST_HEADS} entries")
        return [_order(each, canaries) for each in heads]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadSettingsError(f"invalid order: {error}") from error


def _order(head: Any, canaries: Settings) -> HeadOrder:
    root, path, sha256, pods = head["root"], head["path"], head["sha256"], head["pods"]
    if not all(isinstance(each, str) for each in (root, path, sha256)) or not _SHA256.fullmatch(sha256):
        raise BadSettingsError("heads: root, path and sha256 are invalid")
    if pods is not None and not (isinstance(pods, list) and all(isinstance(each, str) for each in pods)):
        raise BadSettingsError("heads: pods is not a list of names")
    return HeadOrder(root, path, sha256, None if pods is None else frozenset(pods), canaries)


class HeadOrders:
    """Follows the orders for one pod."""

    def __init__(self, engine: Engine, file: Path, sockets: Path, pod: str) -> None:
        self._engine, self._file, self._sockets, self._pod = engine, file, sockets, pod
        self._done: tuple[Any, ...] | None = None
        self._begun: dict[str, Any] | None = None  # order without a result, which may have ended the engine
        self._due_s = 0.0
        self._said: str | None = None

    def run(self, stopped: threading.Event) -> None:
        """Follow orders until ``stopped`` is set."""
        keep_stepping(self.step, stopped, self._say)

    def step(self, now_s: float) -> None:
        """Follow the order for this pod, once for each start of the engine."""
        order = self._read()
        if order is None or now_s < self._due_s or order.line == self._begun:
            return
        self._due_s = now_s + _REST_S
        try:
            path, started = self._socket()
            if (started, order.line) == self._done or not self._engine.is_healthy():
                return
            result, reason = self._follow(order, path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._say(f"no update: {error}")
            return
        self._done = (started, order.line)
        self._say(f"{order.sha256[:12]}: {result} {reason}")

    def _read(self) -> HeadOrder | None:
        try:
            orders = read_orders(self._file.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, BadSettingsError) as error:
            self._say(f"{self._file.name} is ignored: {error}")
            return None
        return next((each for each in orders if each.pods is None or self._pod in each.pods), None)

    def _socket(self) -> tuple[Path, tuple[int, int]]:
        """Return the socket of an API server of the engine, and an identity of its process."""
        for path in sorted(self._sockets.glob("*.sock")):
            with socket.socket(socket.AF_UNIX) as trial:
                try:
                    trial.connect(str(path))
                except OSError:  # of a process that has ended
                    continue
            found = path.stat()
            return path, (found.st_ino, found.st_ctime_ns)
        raise FileNotFoundError(f"no recorder has a socket in {self._sockets}")

    def _follow(self, order: HeadOrder, path: Path) -> tuple[str, str]:
        with _connected(path) as exchange:
            self._begun = order.line
            answer = exchange(order.line)
            if answer.get("result") == NEW_HEAD:
                verdict, reason = self._judge(order.canaries)
                answer = exchange({"judged": {"verdict": verdict, "reason": reason[:LONGEST_REASON]}})
            self._begun = None
        return str(answer["result"]), str(answer["reason"])

    def _judge(self, canaries: Settings) -> tuple[str, str]:
        try:
            before = self._engine.drafts()
            verdict = self._judge_answers(canaries)
            if verdict[0] == "right" and self._engine.drafts() <= before:
                return "wrong", "the engine does not speculate with this head"
        except FailedError as error:
            return "unchecked", f"the engine's drafts cannot be counted: {error}"
        return verdict

    def _judge_answers(self, canaries: Settings) -> tuple[str, str]:
        for prompt in canaries.prompts:
            verdict = judge(self._engine, canaries, prompt)
            if verdict.word == WRONG:
                return "wrong", f"wrong answer to a canary prompt: {verdict.details}"
            if verdict.word in {FAILED, UNSUPPORTED}:
                return "unchecked", f"the answers cannot be checked: {verdict.details}"
        return "right", ""

    def _say(self, words: str) -> None:
        if words != self._said:
            sys.stderr.write(f"head: {words}\n")
            sys.stderr.flush()
            self._said = words


@contextmanager
def _connected(path: Path) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """Connect to a recorder; yield a function that sends it a line and returns its answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(str(path))
        with connection.makefile("rb") as stream:

            def exchange(line: dict[str, Any]) -> dict[str, Any]:
                connection.sendall(json.dumps(line).encode() + b"\n")
                answer = json.loads(stream.readline(_LARGEST_ANSWER_BYTES) or b"null")
                if not isinstance(answer, dict):
                    raise ConnectionError("the recorder closed the connection")
                # If the recorder rejects an order, its answer has only a reason.
                return answer if "result" in answer else {"result": "refused", **answer}

            yield exchange
