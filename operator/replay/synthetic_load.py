"""When requests come, as people write it on a command line: phases of a capture's load."""

import re
from typing import Any, Final

from pydantic import ValidationError

from specdecode_operator.api.capture_workload import Pattern, Phase
from specdecode_operator.problems import shown

FORMS: Final = (
    "constant:4 or poisson:4 (requests a second), burst:8x10 (so many every 10 s), staircase:1+1x30 (requests a "
    "second, 1 more every 30 s), closed:16 (clients), multiturn:8x4 (conversations at once, of 4 turns) or "
    "multiturn:8x4x2 (with 2 s between them)"
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


class InvalidArrivalsError(ValueError):
    """A text that says no arrivals: the text, and what to write."""


def parse_arrivals(text: str, requests: int | None, duration_s: int | None, name: str | None = None) -> Phase:
    """Return the phase that a text says, of so many requests or seconds.

    Raises
    ------
    InvalidArrivalsError
        It says none.
    """
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
            raise InvalidArrivalsError(f"{shown(text)}: {field}: {problem['msg']}: write {FORMS}") from error
    raise InvalidArrivalsError(f"{shown(text)}: write {FORMS}")
