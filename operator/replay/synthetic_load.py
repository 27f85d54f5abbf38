"""Parse a synthetic load: arrival phases, lengths of prompts and answers, shared prefixes."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from pydantic import ValidationError

from specdecode_operator.api.capture import Pattern, Phase
from specdecode_operator.capture.recorder.block_hashes import block_hashes
from specdecode_operator.problems import shown

ARRIVAL_FORMS: Final = (
    "constant:4 or poisson:4 (4 requests per second), burst:8x10 (8 requests every 10 s), staircase:1+1x30 (1 request "
    "per second, 1 more every 30 s), closed:16 (16 clients), multiturn:8x4 (8 concurrent conversations of 4 turns) or "
    "multiturn:8x4x2 (with 2 s between turns)"
)

_NUMBER: Final = r"\d+(?:\.\d+)?"
_PATTERNS: Final = {
    Pattern.CONSTANT: (rf"constant:({_NUMBER})", ("requests_per_second",)),
    Pattern.POISSON: (rf"poisson:({_NUMBER})", ("requests_per_second",)),
    Pattern.BURST: (r"burst:(\d+)x(\d+)", ("burst_size", "burst_interval_seconds")),
    Pattern.STAIRCASE: (
        rf"staircase:({_NUMBER})\+({_NUMBER})x(\d+)",
        ("requests_per_second", "step_requests_per_second", "step_seconds"),
    ),
    Pattern.CLOSED: (r"closed:(\d+)", ("concurrency",)),
    Pattern.MULTITURN: (r"multiturn:(\d+)x(\d+)(?:x(\d+))?", ("concurrency", "turns", "think_seconds")),
}
_TEXTS: Final = frozenset({"requests_per_second", "step_requests_per_second"})


class InvalidLoadError(ValueError):
    """Text that does not describe a load: the text, and the fix."""


def parse_arrivals(text: str, requests: int | None, duration_s: int | None, name: str | None = None) -> Phase:
    """Parse the arrivals of a phase with this many requests or seconds, or raise InvalidLoadError."""
    for pattern, (form, fields) in _PATTERNS.items():
        if (found := re.fullmatch(form, text)) is None:
            continue
        values: dict[str, Any] = {
            field: value if field in _TEXTS else int(value)
            for field, value in zip(fields, found.groups(), strict=True)
            if value is not None
        }
        ending = {"requests": requests} if requests is not None else {"duration_seconds": duration_s}
        try:
            return Phase(name=name or str(pattern).lower(), pattern=pattern, **values, **ending)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            field = ".".join(map(str, problem["loc"]))
            raise InvalidLoadError(f"{shown(text)}: {field}: {problem['msg']}: write {ARRIVAL_FORMS}") from error
    raise InvalidLoadError(f"{shown(text)}: write {ARRIVAL_FORMS}")


LONGEST: Final = 16_777_216  # tokens, as in a capture's load

LENGTH_FORMS: Final = "512, 100-900 (evenly spread) or lognormal:512:0.5 (median and sigma)"


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens."""

    least: int
    most: int
    sigma: float = 0.0  # of a lognormal distribution with its median in `least`

    def draw(self, random: Random) -> int:
        """Draw a length."""
        if self.sigma:
            return min(max(1, round(self.least * math.exp(random.gauss(0, self.sigma)))), self.most)
        return self.least if self.least == self.most else random.randint(self.least, self.most)


def parse_lengths(text: str) -> Lengths:
    """Parse a distribution of lengths, or raise InvalidLoadError."""
    try:
        if text.startswith("lognormal:"):
            median, sigma = text.removeprefix("lognormal:").split(":")
            found = Lengths(int(median), LONGEST, float(sigma))
            usable = 0 < found.sigma <= 3 and found.least <= LONGEST  # noqa: PLR2004  e^3: 20 times the median
        else:
            least, _, most = text.partition("-")
            found = Lengths(int(least), int(most or least))
            usable = found.least <= found.most <= LONGEST
    except ValueError:
        usable = False
    if not usable or found.least < 1:
        raise InvalidLoadError(f"{shown(text)}: write {LENGTH_FORMS}, of 1 to {LONGEST:,} tokens")
    return found


@dataclass(frozen=True)
class Prompts:
    """Prompts of requests, the same for the same seed."""

    prompt_tokens: Lengths
    output_tokens: Lengths
    shared_prefix_tokens: int
    block_size: int
    seed: int

    def lengths(self, name: str) -> tuple[int, int]:
        """Draw the lengths of a request's own prompt, without the shared prefix, and of its answer."""
        random = Random(f"{self.seed}/{name}/lengths")  # noqa: S311  not for secrets
        return self.prompt_tokens.draw(random), self.output_tokens.draw(random)

    def hashes(self, conversation: str, tokens: int) -> Sequence[int]:
        """Return the hashes of the full blocks of a conversation's first tokens, starting with the shared prefix.

        One number represents the content of a block: chained like hashes of tokens, and much faster.
        """
        shared = self.shared_prefix_tokens // self.block_size
        blocks = tokens // self.block_size
        ids = [*self._ids("prefix", min(shared, blocks)), *self._ids(conversation, blocks - min(shared, blocks))]
        return block_hashes(ids, 1, lambda: None)

    def _ids(self, purpose: str, count: int) -> list[int]:
        random = Random(f"{self.seed}/{purpose}/blocks")  # noqa: S311  not for secrets
        return [random.getrandbits(31) for _ in range(count)]
