"""A constant stream of requests to an engine, and what came of each."""

import json
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx

_TIMEOUT_S = 120
_BETWEEN_S = 0.2
"""Pause of a client, so that engines that start beside those that serve get some of the machine."""


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
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        """Begin to ask."""
        self._threads = [threading.Thread(target=self._ask_on, args=[each], daemon=True) for each in self.questions]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        """Ask no more, and wait for the answers that are on the way."""
        self._stop.set()
        for thread in self._threads:
            thread.join(_TIMEOUT_S)
        self.failures += ["a client waits for its answer still" for each in self._threads if each.is_alive()]

    def _ask_on(self, question: dict[str, Any]) -> None:
        while not self._stop.wait(_BETWEEN_S):
            try:
                problem = self._ask(question)
            except Exception as error:  # noqa: BLE001  a client that dies unseen would count nothing any more
                problem = f"{type(error).__name__}: {error}"
            with self._lock:
                if problem is None:
                    self.complete += 1
                else:
                    self.failures.append(problem)

    def _ask(self, question: dict[str, Any]) -> str | None:
        """Ask once; return what is wrong with the answer."""
        question = {**question, "stream": True, "stream_options": {"include_usage": True}}
        lines: list[str] = []
        try:
            # The environment's proxies know nothing of the cluster.
            with (
                httpx.Client(trust_env=False, timeout=_TIMEOUT_S) as client,
                client.stream("POST", self.url, json=question) as response,
            ):
                lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
                if response.status_code != httpx.codes.OK:
                    return f"HTTP {response.status_code}: {' '.join(lines)[:200]}"
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        if not lines or lines[-1] != "[DONE]":
            return f"cut after {len(lines)} lines"
        # An engine that fails in the middle of a stream writes an error as an event, and [DONE] after it.
        last = json.loads(lines[-2])
        if "error" in last:
            return f"error in the stream: {last['error']}"
        tokens = last["usage"]["completion_tokens"]
        wanted = question["max_tokens"]
        return None if tokens == wanted else f"{tokens} of {wanted} tokens"
