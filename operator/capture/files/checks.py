"""What an arm of a capture answered to requests that measure no speed: ``checks.json`` beside its first manifest.

Every arm is asked the same, one request after the other, so that no batch changes an answer. No text of a prompt or
an answer is kept, apart from the token ids of greedy answers.
"""

from typing import Annotated, Final

from msgspec import Meta, Struct

from specdecode_operator.capture.files.formats import Count, Word

MOST_PROMPTS: Final = 64
MOST_TOKENS: Final = 128
_LONGEST_REASON: Final = 512

Reason = Annotated[str, Meta(max_length=_LONGEST_REASON)]


class GreedyAnswer(Struct, kw_only=True, frozen=True):
    """What the likeliest tokens after a prompt were."""

    prompt_sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]  # of the prompt's JSON, by which arms are paired
    prompt_tokens: Count
    tokens: Annotated[list[Word], Meta(max_length=MOST_TOKENS)]
    # For each token the difference of log probability between the two likeliest: how close it was; null where the
    # engine did not say both. As long as ``tokens``.
    top2_margin: Annotated[list[float | None], Meta(max_length=MOST_TOKENS)]


class GreedyCheck(Struct, kw_only=True, frozen=True):
    """Answers at temperature 0, in the order in which they were asked for; the same prompts for every arm."""

    answers: Annotated[list[GreedyAnswer], Meta(max_length=MOST_PROMPTS)] = []
    not_measured: Reason | None = None  # why there are none


class ParsingCheck(Struct, kw_only=True, frozen=True):
    """Answers that must have a form."""

    asked: Count = 0
    parsed: Count = 0  # how many of them had it
    failures: Annotated[list[Reason], Meta(max_length=5)] = []  # why the first ones had not, without their content
    not_measured: Reason | None = None  # why nothing was asked


class Checks(Struct, kw_only=True, frozen=True):
    """Everything that one arm was asked."""

    greedy: GreedyCheck
    structured: ParsingCheck  # JSON of a given schema
    tool_calls: ParsingCheck  # calls of a named function
