"""Prompts of a workload: what each request of each phase asks, the same for the same seed."""

from collections.abc import Sequence
from random import Random
from typing import Protocol

from specdecode_operator.api.capture_workload import CaptureWorkload, SyntheticPrompts
from specdecode_operator.capture.load.prompts.prompt import Prompt, TokenIds
from specdecode_operator.capture.load.workload import WARMUP_PHASE


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
