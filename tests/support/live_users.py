"""Users of running engines whose requests can be found again in a live capture, by their lengths."""

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from tests.support.traffic import Repeating, streamed_usage

_TIMEOUT_S = 300
_BETWEEN_S = 0.5
"""Pause of a user between requests. Outside a recording, requests only keep the CPUs busy."""

_PROMPTS = 97  # different lengths of prompts
_SHORTEST_PROMPT, _SHORTEST_ANSWER = 20, 24  # enough to fit a model to the 40 requests of a capture


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
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _asked: int = 0

    def __post_init__(self) -> None:
        """Prepare the users."""
        self._users = Repeating(self._ask, self.urls, _BETWEEN_S, _TIMEOUT_S)

    def __enter__(self) -> Self:
        """Begin to ask."""
        self._users.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        """Ask no more, and wait for the answers that are under way."""
        self._users.__exit__(kind, value, tb)
        self.failed += [("", "a user still waits for an answer")] * self._users.hangs

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

    def _ask(self, url: str) -> None:
        (prompt_tokens, answer_tokens), began_s = self._next_lengths(), time.time()
        body = {
            "model": self.model,
            "prompt": [3 + (prompt_tokens * 31 + place * place) % 900 for place in range(prompt_tokens)],
            "max_tokens": answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        usage = streamed_usage(url, body, _TIMEOUT_S)
        counted = None if isinstance(usage, str) else (usage["prompt_tokens"], usage["completion_tokens"])
        with self._lock:
            if counted == (prompt_tokens, answer_tokens):
                self.answered.append(Asked((prompt_tokens, answer_tokens), began_s, time.time()))
            else:
                self.failed.append((url, str(usage)))
