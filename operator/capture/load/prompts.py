"""Prompts of a workload: what each request of each phase asks, the same for the same seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from random import Random
from typing import Protocol

from specdecode_operator.api.capture_workload import CaptureWorkload, SyntheticPrompts, TemperatureShare
from specdecode_operator.capture.load.workload import WARMUP_PHASE

_SPECIAL_PERCENT = 1
"""Share of the ids at either end of a vocabulary that no prompt uses, in percent.

Special tokens lie there: at most 1000 of 131072 at the beginning (Mistral's Tekken), and 1090 of 201088 at the end
(gpt-oss).
"""
_LEAST_SPECIAL = 8


class TokenIds:
    """The ids of a vocabulary that prompts are made of: no special ones."""

    def __init__(self, vocab_size: int) -> None:
        special = max(_LEAST_SPECIAL, vocab_size * _SPECIAL_PERCENT // 100)
        self._lowest, self._count = special, vocab_size - 2 * special

    def of(self, random_bytes: bytes) -> list[int]:
        """Return a token for each four bytes."""
        # 32 random bits a token and the rest of a division: several times faster than a choice for each token,
        # and the ids are still even to one in 10,000.
        lowest, count = self._lowest, self._count
        return [lowest + draw % count for draw in memoryview(random_bytes).cast("I")]


@dataclass(frozen=True)
class Prompt:
    """What a request asks: token ids, or text where it comes from a dataset."""

    content: list[int] | str

    @property
    def tokens(self) -> int | None:
        """How many tokens it has; None for text, which the engine's tokenizer splits."""
        return None if isinstance(self.content, str) else len(self.content)

    def followed_by(self, answer: "Prompt", message: "Prompt") -> "Prompt":
        """Return the prompt of a conversation's next turn: all that was said, then what is said now."""
        parts = [self.content, answer.content, message.content]
        texts = [part for part in parts if isinstance(part, str)]
        ids = [part for part in parts if not isinstance(part, str)]
        if texts and ids:
            raise TypeError("token ids and text cannot be joined")
        return Prompt("\n".join(texts) if texts else [token for part in ids for token in part])


class PromptSource(Protocol):
    """Where prompts come from; the same arguments always give the same prompt."""

    def first(self, phase: str, index: int) -> Prompt:
        """Return the prompt of a request, or of a conversation's first turn."""

    def message(self, phase: str, index: int) -> Prompt:
        """Return what the user of a conversation says in a later turn."""


class SyntheticSource:
    """Random token ids: every prompt of exact length, and nothing in common but the prefix that was asked for."""

    def __init__(self, settings: SyntheticPrompts, vocab_size: int, seed: int) -> None:
        self._settings = settings
        self._seed = seed
        self._ids = TokenIds(vocab_size)
        self._prefix = self._tokens("prefix", settings.shared_prefix_tokens)

    def first(self, phase: str, index: int) -> Prompt:
        """Return the shared prefix and fresh tokens, ``promptTokens`` in all."""
        return Prompt(self._prefix + self._fresh(phase, index))

    def message(self, phase: str, index: int) -> Prompt:
        """Return as many fresh tokens as a first turn has after the prefix."""
        return Prompt(self._fresh(phase, index))

    def _fresh(self, phase: str, index: int) -> list[int]:
        length = self._settings.prompt_tokens - self._settings.shared_prefix_tokens
        return self._tokens(f"{phase}/{index}", length)

    def _tokens(self, purpose: str, length: int) -> list[int]:
        random = Random(f"{self._seed}/{purpose}/prompt")  # noqa: S311 - not for secrets
        return self._ids.of(random.randbytes(4 * length))


class DatasetSource:
    """Prompts of a dataset in an order that the seed shuffles.

    Each phase begins at another place of that order, so that a phase meets
    prompts of an earlier one, which the engine's prefix cache may know, as
    late as possible. A phase with more requests than prompts begins again.
    """

    def __init__(self, texts: Sequence[str], workload: CaptureWorkload, seed: int) -> None:
        order = list(range(len(texts)))
        Random(f"{seed}/dataset").shuffle(order)  # noqa: S311 - not for secrets
        self._texts, self._order = texts, order
        self._starts = {
            phase.name: number * len(texts) // len(workload.phases) for number, phase in enumerate(workload.phases)
        }
        self._starts[WARMUP_PHASE] = -workload.warmup_requests

    def __len__(self) -> int:
        return len(self._order)

    def first(self, phase: str, index: int) -> Prompt:
        """Return the phase's next prompt."""
        return Prompt(self._texts[self._order[(self._starts[phase] + index) % len(self._order)]])

    def message(self, phase: str, index: int) -> Prompt:
        """Return the phase's next prompt."""
        return self.first(phase, index)


class TemperatureMix:
    """Which request is sampled at which temperature.

    The shares hold exactly in every block of requests, not only on average:
    a block is as short as the shares allow, and shuffled by the seed.
    """

    def __init__(self, shares: Sequence[TemperatureShare], seed: int) -> None:
        unit = gcd(*(share.share_percent for share in shares))
        self._block = [float(share.temperature) for share in shares for _ in range(share.share_percent // unit)]
        self._seed = seed
        self._shuffled = lru_cache(maxsize=64)(self._shuffle)

    def at(self, phase: str, index: int) -> float:
        """Return the temperature of a request."""
        number, place = divmod(index, len(self._block))
        return self._shuffled(phase, number)[place]

    def _shuffle(self, phase: str, number: int) -> list[float]:
        block = list(self._block)
        Random(f"{self._seed}/{phase}/{number}/temperatures").shuffle(block)  # noqa: S311 - not for secrets
        return block
