"""Text without a tokenizer: four bytes are a token.

That holds for prompts, whose last token may be shorter, and for answers, whose words are four letters long with the
space before them, so that an answer counts in the next turn's prompt for as many tokens as it had.
"""

from array import array
from collections.abc import Sequence
from typing import Final

BYTES_PER_TOKEN: Final = 4

_WORDS: Final = tuple(
    f" {first}{vowel}{last}" for first in "bdfgklmnprstvz" for vowel in "aeiou" for last in "bdgklmnprst"
)[:512]
_ROUND: Final = len(_WORDS)
_LONGEST_SLICE: Final = 1024
_TEXT: Final = "".join(_WORDS).encode() * (_LONGEST_SLICE // _ROUND + 2)


def count_tokens(text: str) -> int:
    """Return how many tokens a text has."""
    return -(-len(text.encode(errors="replace")) // BYTES_PER_TOKEN)


def token_ids(text: str) -> "array[int]":
    """Return the ids of a text's tokens: equal beginnings have equal ids, which is what a prefix cache asks."""
    data = text.encode(errors="replace")
    return array("I", data + bytes(-len(data) % BYTES_PER_TOKEN))


def answer_text(begin: int, end: int) -> bytes:
    """Return the tokens of an answer from one place to another, in ASCII: nothing in it is escaped in JSON."""
    if end - begin > _LONGEST_SLICE:
        return "".join(_WORDS[place % _ROUND] for place in range(begin, end)).encode()
    start = begin % _ROUND
    return _TEXT[start * BYTES_PER_TOKEN : (start + end - begin) * BYTES_PER_TOKEN]


def text_of(ids: Sequence[int]) -> str:
    """Return a text for token ids that were recorded: a word for each."""
    return "".join([_WORDS[token_id % _ROUND] for token_id in ids])


def answer_ids(begin: int, end: int) -> Sequence[int]:
    """Return ids for the tokens of an answer whose ids were not recorded: those of its words."""
    return token_ids(answer_text(begin, end).decode())
