"""Prompts of recorded lengths, which have in common what the recorded ones had: their blocks' hashes say it."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import shake_128
from itertools import islice
from typing import Protocol

from specdecode_operator.capture.load.prompts.prompt import TokenIds

_RANDOM_BYTES = 4
"""Of each token."""


class PromptShape(Protocol):
    """What is known of a prompt that nobody kept."""

    @property
    def prompt_tokens(self) -> int:
        """Its length."""

    @property
    def block_hashes(self) -> Sequence[int] | None:
        """Chained hashes of its full blocks, where they are known."""


@dataclass(frozen=True)
class Said:
    """Prompt and answer of a turn."""

    tokens: Sequence[int] = ()
    blocks: int = 0  # full ones of the prompt: their tokens follow from their hashes


@dataclass
class BlockPrompts:
    """Makes prompts block by block: equal hashes give equal tokens, and another seed gives others.

    Chained hashes say the whole prompt up to a block's end, so whatever stands for a block may depend on its hash
    alone. Blocks of answers are the answers' own tokens, as far as they were told.
    """

    token_ids: TokenIds
    block_size: int
    seed: int | str
    _answered: dict[int, Sequence[int]] = field(default_factory=dict)

    def make(self, shape: PromptShape, place: int, said: Said) -> list[int]:
        """Return a prompt of a shape for the request at a place, which goes on from what was said."""
        prompt = list(said.tokens[: shape.prompt_tokens])
        # What others wrote may name more blocks than there are tokens.
        blocks = shape.prompt_tokens // self.block_size
        for number, block in enumerate(islice(shape.block_hashes or (), blocks)):
            end = (number + 1) * self.block_size
            have = len(prompt) - (end - self.block_size)
            if have < self.block_size:
                prompt += self._block(block)[max(have, 0) :]
            if have > 0 and number >= said.blocks:
                self._answered.setdefault(block, array("I", prompt[end - self.block_size : end]))
        return prompt + self._drawn(f"end/{place}", shape.prompt_tokens - len(prompt))

    def _block(self, block: int) -> Sequence[int]:
        return self._answered.get(block) or self._drawn(f"block/{block}", self.block_size)

    def _drawn(self, purpose: str, tokens: int) -> list[int]:
        return self.token_ids.of(shake_128(f"{self.seed}/{purpose}".encode()).digest(_RANDOM_BYTES * max(tokens, 0)))
