"""Read arguments the way vLLM's own parser does.

vLLM's parser is Python's argparse with the extensions of vllm/utils/argparse_utils.py: `--flag value`,
`--flag=value`, `--no-flag`, unique prefixes, underscores for dashes, short names with the value attached, and
dotted paths into JSON values.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdecode_operator.vllm.profiles import EngineProfile, Flag

_NEGATIVE_NUMBER = re.compile(r"-\d+")
"""Negative numbers. argparse also accepts -0.5, but vLLM parses it as a dotted path first: only --flag=-0.5 works."""

MOST_PARTS = 32
"""Most parts of a dotted path. vLLM's own paths have at most three; each part nests an object."""

OPTIMIZATION_LEVEL = "-O"


@dataclass(frozen=True)
class Option:
    """One flag with its value, as the user wrote it."""

    index: int
    flag: Flag
    spelled: str
    """Name as written, with dashes."""
    path: str
    value: str
    """First value; empty without a value."""

    @property
    def shown(self) -> str:
        """Name and path without the value, which may be a secret."""
        return f"{self.spelled}.{self.path}" if self.path else self.spelled

    @property
    def name(self) -> str:
        """Full name, also if the user wrote a unique prefix."""
        return next((known for known in self.flag.names if known.startswith(self.spelled)), self.flag.name)

    @property
    def negated(self) -> bool:
        """Whether the option turns its flag off."""
        return self.flag.is_undone_by(self.name)


def options(extra_args: Sequence[str], profile: EngineProfile) -> Iterator[Option]:
    """Return the flags in their order; arguments that cannot be parsed may be missing."""
    index = 0
    while index < len(extra_args):
        argument, following = extra_args[index], count_values(extra_args[index + 1 :])
        value = "".join(extra_args[index + 1 : index + 2])
        if argument.startswith(OPTIMIZATION_LEVEL):
            level, taken = argument.removeprefix(OPTIMIZATION_LEVEL).removeprefix("="), 1
            if not level:
                level, taken = value, 2
            yield Option(index, profile.flags["--optimization-level"], OPTIMIZATION_LEVEL, "", level)
        else:
            name, path, held = split_argument(argument, profile)
            found = find_flag(name, profile) if is_option(argument) else None
            taken = 1
            if found is not None:
                _, taken = take_values(found, following, len(extra_args) - index - 1, path=path, held=held)
                yield Option(index, found, name, path, held if held is not None else value if taken > 1 else "")
        index += taken


def last_option(name: str, extra_args: Sequence[str], profile: EngineProfile) -> Option | None:
    """Return the last option that sets a flag, which vLLM uses; None if the flag is not set."""
    given = [option for option in options(extra_args, profile) if option.flag == profile.flags.get(name)]
    return given[-1] if given else None


def json_value(given: Sequence[Option]) -> Mapping[str, Any] | None:
    """Merge options of one JSON value as utils/argparse_utils.py does: dotted paths win. None if it is no object."""
    dotted: dict[str, Any] = {}
    whole: Any = {}
    for option in given:
        if not option.path:
            whole = json_or_text(option.value)
            continue
        place = dotted
        *parents, last = option.path.split(".")[:MOST_PARTS]
        for parent in parents:
            inner = place.setdefault(parent, {})
            place = inner if isinstance(inner, dict) else {}
        place[last] = json_or_text(option.value)
    found = dotted or whole
    return found if isinstance(found, dict) else None


def attention_backend(extra_args: Sequence[str], profile: EngineProfile) -> str | None:
    """Return the requested attention backend by vLLM's name; None if the engine chooses it."""
    named = last_option("--attention-backend", extra_args, profile)
    if named is not None:
        return named.value.upper()
    given = [option for option in options(extra_args, profile) if option.flag.name == "--attention-config"]
    backend = (json_value(given) or {}).get("backend")
    return backend.upper() if isinstance(backend, str) else None


def json_or_text(text: str) -> Any:
    """Parse a value as JSON; return the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def is_option(argument: str) -> bool:
    """Test for an option as argparse does: a dash, but not a lone dash, a negative number or text with spaces."""
    if not argument.startswith("-") or argument == "-" or _NEGATIVE_NUMBER.fullmatch(argument):
        return False
    return "=" in argument or " " not in argument


def count_values(arguments: Sequence[str]) -> int:
    """Return the number of arguments before the next option."""
    return next((count for count, argument in enumerate(arguments) if is_option(argument)), len(arguments))


def split_argument(argument: str, profile: EngineProfile) -> tuple[str, str, str | None]:
    """Return name, dotted path and attached value of an argument, which may be a secret; None without a value."""
    full_name, equals, value = argument.partition("=")
    name, _, path = full_name.partition(".")
    if name.startswith("--"):
        name = name.replace("_", "-")
    elif name[:2] in profile.flags and not any(known.startswith(name) for known in profile.flags):
        # A one-letter flag with its value attached, such as -n2.
        return name[:2], "", argument[2:]
    return name, path, value if equals else None


def find_flag(name: str, profile: EngineProfile) -> Flag | None:
    """Return the flag with this name, or the only flag with this prefix; None if there is no such flag."""
    if name in profile.flags:
        return profile.flags[name]
    candidates = [known for known in profile.flags if known.startswith(name)]
    return profile.flags[candidates[0]] if len(candidates) == 1 and name not in profile.removed_flags else None


def take_values(flag: Flag, following: int, remaining: int, *, path: str, held: str | None) -> tuple[str | None, int]:
    """Return the problem of a flag's values, and the number of arguments of the flag with its values."""
    if path and held is None:
        # vLLM takes the next argument as the value, whatever it looks like.
        return (None, 2) if remaining else ("needs a value", 1)
    if held is not None:
        return ("takes no value" if flag.values == "0" else None), 1
    if flag.values in {"1", "+"} and following == 0:
        return "needs a value", 1
    at_most = {"0": 0, "1": 1, "?": 1}.get(flag.values, following)
    return None, 1 + min(following, at_most)
