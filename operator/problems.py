"""What is wrong with an input, said once for every place that reports it, and how what others wrote is shown."""

import json
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

_SHOWN_CHARACTERS: Final = 120
_SHORT_CHARACTERS: Final = 256
_SHORT_TEXTS_KEPT: Final = 16_384
"""Of a thousand objects, each of which has some ten texts that no other has: if these do not all fit, none is found."""
_READS_AS_NO_TEXT: Final = re.compile(
    r"|~|null|true|false|[-+]?[0-9][0-9_]*(\.[0-9]*)?([eE][-+]?[0-9]+)?", re.IGNORECASE
)
_SECRETS: Final = re.compile(
    # What hubs, forges, clouds and model providers give out; JSON Web Tokens, such as those of service accounts.
    r"(?<![A-Za-z0-9])(?:hf_|gh[opsu]_|AKIA|ASIA)[A-Za-z0-9]{16,}"  # no more: hf_overrides.num_hidden_layers is a field
    r"|(?<![A-Za-z0-9])(?:sk-|github_pat_|glpat-|xox[abprs]-|nvapi-|gsk_|dckr_pat_|AIza|ya29\.|eyJ)[A-Za-z0-9_.-]{16,}"
    r"|(?<=(?i:bearer) )[A-Za-z0-9._~+/=-]{8,}"
    r"|(?<=(?i:basic) )[A-Za-z0-9+/=]{16,}"
    r"|(?<=://)[^\s/:@]*:[^\s/]+(?=@)|(?<=://)[^\s/:@]{16,}(?=@)"
    # By which a URL is good for a while, such as those that hubs send downloads to.
    r"|(?i:(?<=signature=)|(?<=security-token=)|(?<=[?&]sig=)|(?<=[?&]token=)|(?<=access_token=))[A-Za-z0-9%+/_~.=-]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[A-Za-z0-9+/=\\\s]*(?:-----END [A-Z ]*PRIVATE KEY-----)?"
)
_HIDDEN: Final = "(a secret)"
MISSING: Final = "is missing"
"""What stands in the place of a value that is not there."""


@dataclass(frozen=True)
class Problem:
    """One thing that the user must change.

    Attributes
    ----------
    field
        Path in the object, such as ``spec.parallelism.tensor``.
    value
        What stands there, as text.
    message
        What is wrong with it and what to write instead.
    """

    field: str
    value: str
    message: str

    def __str__(self) -> str:
        """One sentence that names field, value and fix."""
        return printable(sentence(self.field, self.value, self.message))


class InvalidSpecError(Exception):
    """A spec that cannot run anywhere, whatever the cluster."""

    def __init__(self, problems: list[Problem], reason: str = "Invalid") -> None:
        self.problems = problems
        self.reason = reason
        super().__init__("; ".join(map(str, problems)))


def printable(text: str) -> str:
    """Return a text that others wrote as it may stand in a message, a log, an Event or a terminal: on one line.

    Line ends, NUL, escape sequences and marks that turn the direction of writing are shown, not done. What has the form
    of a token, a key or a password in a URL is not shown: last words of a program may hold what it was given.
    """
    # Names, numbers and settled messages come again at every look at every object.
    return _short_printable(text) if len(text) <= _SHORT_CHARACTERS else _printable(text)


def _printable(text: str) -> str:
    text = _SECRETS.sub(_HIDDEN, text)
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


_short_printable = lru_cache(maxsize=_SHORT_TEXTS_KEPT)(_printable)


def shown(value: object, limit: int = _SHOWN_CHARACTERS) -> str:
    """Return a value in the words of YAML and JSON, short enough for a message.

    Text has no quotes but where it would read as something else: "4096" is text, 4096 is not.
    """
    if isinstance(value, float) and not math.isfinite(value):
        text = str(value)
    elif not isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False, default=str)
    else:
        # An enumeration's member stands for its value.
        text = str.__str__(value)
        if text != text.strip() or _READS_AS_NO_TEXT.fullmatch(text):
            text = json.dumps(text, ensure_ascii=False)
    text = printable(text[: limit + 1])
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def shown_or_missing(value: object, limit: int = _SHOWN_CHARACTERS) -> str:
    """Return the value of a field that need not be there, as `shown`."""
    return MISSING if value is None else shown(value, limit)


def sentence(field: str, value: str, message: str) -> str:
    """Return field, value and what to do; what is missing is said once, whoever says it."""
    return f"{field}: {message}" if message.startswith(value) and value == MISSING else f"{field}: {value}: {message}"
