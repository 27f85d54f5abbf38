"""A prompt, and the token ids that prompts are made of."""

from dataclasses import dataclass

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
