"""Users of running engines whose requests can be found again in a live capture, by their lengths."""

import json
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import httpx

_TIMEOUT_S = 300
_BETWEEN_S = 0.1
_PROMPTS = 97  # different lengths of prompts
_SHORTEST_PROMPT, _SHORTEST_ANSWER = 20, 8


@dataclass(frozen=True)
class Asked:
    """A request that was answered in full.

    Attributes
    ----------
    lengths
        Tokens of the prompt and of the answer; no two requests have the same.
    began_s, ended_s
        Seconds since 1970.
    """

    lengths: tuple[int, int]
    began_s: float
    ended_s: float


@dataclass
class LiveUsers:
    """Threads that each ask one question after the other, over a new connection each time.

    Attributes
    ----------
    urls
        Of the completions, one for each thread.
    failed
        What went wrong, by URL.
    """

    urls: Sequence[str]
    model: str = "target"
    answered: list[Asked] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)
    _asked: int = 0

    def __enter__(self) -> Self:
        """Begin to ask."""
        self._threads = [threading.Thread(target=self._go_on, args=[url], daemon=True) for url in self.urls]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        """Ask no more, and wait for the answers that are under way."""
        self._stop.set()
        for thread in self._threads:
            thread.join(_TIMEOUT_S)
        self.failed += [("", "a user still waits for an answer") for each in self._threads if each.is_alive()]

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(answer for _, answer in self.lengths_of(self.answered))

    @staticmethod
    def lengths_of(asked: Iterable[Asked]) -> set[tuple[int, int]]:
        """Return the lengths of some requests."""
        return {each.lengths for each in asked}

    def within(self, began_s: float, ended_s: float) -> set[tuple[int, int]]:
        """Return the lengths of the requests that began and ended in a time."""
        return self.lengths_of(each for each in self.answered if began_s <= each.began_s and each.ended_s <= ended_s)

    def touching(self, began_s: float, ended_s: float) -> set[tuple[int, int]]:
        """Return the lengths of the requests that may have begun in a time."""
        return self.lengths_of(each for each in self.answered if each.began_s <= ended_s and each.ended_s >= began_s)

    def _next_lengths(self) -> tuple[int, int]:
        with self._lock:
            number, self._asked = self._asked, self._asked + 1
        return _SHORTEST_PROMPT + number % _PROMPTS, _SHORTEST_ANSWER + number // _PROMPTS

    def _go_on(self, url: str) -> None:
        while not self._stop.wait(_BETWEEN_S):
            lengths, began_s = self._next_lengths(), time.time()
            try:
                problem = self._ask(url, *lengths)
            except Exception as error:  # noqa: BLE001  a thread that ends unseen would count nothing any more
                problem = f"{type(error).__name__}: {error}"
            with self._lock:
                if problem is None:
                    self.answered.append(Asked(lengths, began_s, time.time()))
                else:
                    self.failed.append((url, problem))

    def _ask(self, url: str, prompt_tokens: int, answer_tokens: int) -> str | None:
        """Ask once; return what is wrong with the answer."""
        body = {
            "model": self.model,
            "prompt": [3 + (prompt_tokens * 31 + place * place) % 900 for place in range(prompt_tokens)],
            "max_tokens": answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        # The environment's proxies know nothing of the cluster.
        with (
            httpx.Client(trust_env=False, timeout=_TIMEOUT_S) as client,
            client.stream("POST", url, json=body) as response,
        ):
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
            if response.status_code != httpx.codes.OK:
                return f"HTTP {response.status_code}: {' '.join(lines)[:200]}"
        if not lines or lines[-1] != "[DONE]":
            return f"cut after {len(lines)} lines"
        usage = json.loads(lines[-2]).get("usage")
        counted = usage and (usage["prompt_tokens"], usage["completion_tokens"])
        return None if counted == (prompt_tokens, answer_tokens) else f"{lines[-2][:200]}"
