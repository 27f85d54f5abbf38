"""A constant stream of requests to an engine, and what came of each."""

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx

from tests.support import plain_http

_TIMEOUT_S = 120
_BETWEEN_S = 0.2
"""Pause of a client, so that engines that start beside those that serve get some of the machine."""


class Repeating:
    """Threads that each make one call after the other with an argument of their own, from entering to leaving.

    `hangs` is the number of threads that did not end.
    """

    def __init__(
        self, call: Callable[[Any], None], arguments: Iterable[Any], pause_s: float, timeout_s: float = _TIMEOUT_S
    ) -> None:
        self._call, self._pause_s, self._timeout_s = call, pause_s, timeout_s
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._repeat, args=[each], daemon=True) for each in arguments]
        self.hangs = 0

    def __enter__(self) -> Self:
        """Start the threads."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        """Make no further calls, and wait for those that run."""
        self._stop.set()
        for thread in self._threads:
            thread.join(self._timeout_s)
        self.hangs = sum(thread.is_alive() for thread in self._threads)

    def _repeat(self, argument: Any) -> None:
        while not self._stop.wait(self._pause_s):
            self._call(argument)


def streamed_usage(url: str, body: dict[str, Any], timeout_s: float = _TIMEOUT_S) -> dict[str, Any] | str:
    """Stream a completion; return the usage that the engine reports, or the problem."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        with plain_http.stream("POST", url, json=body, timeout=timeout_s) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
            if response.status_code != httpx.codes.OK:
                return f"HTTP {response.status_code}: {' '.join(lines)[:200]}"
        if not lines or lines[-1] != "[DONE]":
            return f"cut after {len(lines)} lines"
        # An engine that fails in the middle of a stream writes an error as an event, and [DONE] after it.
        last = json.loads(lines[-2])
        return f"error in the stream: {last['error']}" if "error" in last else dict(last["usage"])
    except Exception as error:  # noqa: BLE001  a thread that ends unseen would count nothing any more
        return f"{type(error).__name__}: {error}"


@dataclass
class Traffic:
    """Clients that each ask one question after the other, over a new connection each time, and read the stream.

    Attributes
    ----------
    url
        Where the completions are asked for.
    questions
        What is asked, by a client each; `max_tokens` of it must come back.
    complete
        Answers that came in full.
    failures
        What went wrong: a status, a broken connection, or an answer that was cut.
    """

    url: str
    questions: list[dict[str, Any]]
    complete: int = 0
    failures: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Prepare the clients."""
        self._clients = Repeating(self._ask, self.questions, _BETWEEN_S)

    def __enter__(self) -> Self:
        """Begin to ask."""
        self._clients.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        """Ask no more, and wait for the answers that are on the way."""
        self._clients.__exit__(kind, value, tb)
        self.failures += ["a client waits for its answer still"] * self._clients.hangs

    def _ask(self, question: dict[str, Any]) -> None:
        usage, wanted = streamed_usage(self.url, question), question["max_tokens"]
        tokens = None if isinstance(usage, str) else usage["completion_tokens"]
        with self._lock:
            if tokens == wanted:
                self.complete += 1
            else:
                self.failures.append(usage if isinstance(usage, str) else f"{tokens} of {wanted} tokens")
