"""Parse and check `spec.engine.extraArgs` the way vLLM's own parser reads it.

vLLM's parser is Python's argparse with the extensions of vllm/utils/argparse_utils.py: `--flag value`,
`--flag=value`, `--no-flag`, unique prefixes, underscores for dashes, short names with the value attached, and
dotted paths into JSON values.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from specdecode_operator.problems import Problem, some_of
from specdecode_operator.vllm.arguments import reserved_flag_problem
from specdecode_operator.vllm.profiles import EngineProfile, Flag

_NEGATIVE_NUMBER = re.compile(r"-\d+")
"""argparse takes -0.5 for a number as well, but vLLM sees a dotted path first: only --flag=-0.5 works."""

_MOST_PARTS = 32
"""Of a dotted path: vLLM's own have three at most, and each is an object in the one before."""

_MOST_HINTS = 8
"""Problems of which the first are told which flag was meant: to look for one takes 20 ms, and the operator has one
thread for all objects."""

_OPTIMIZATION_LEVEL = "-O"
_OPTIMIZATION_LEVELS = frozenset("0123")


@dataclass(frozen=True)
class Option:
    """One flag as it was given, with its value."""

    index: int
    flag: Flag
    spelled: str
    """Its name as written, with dashes."""
    path: str
    value: str
    """Its first value; empty without."""

    @property
    def shown(self) -> str:
        """Name and path. The value may be a secret."""
        return f"{self.spelled}.{self.path}" if self.path else self.spelled

    @property
    def name(self) -> str:
        """The name in full, of which a beginning may be written."""
        return next((known for known in self.flag.names if known.startswith(self.spelled)), self.flag.name)

    @property
    def negated(self) -> bool:
        """Whether it turns its flag off."""
        return self.flag.is_undone_by(self.name)


def extra_args_problems(extra_args: Sequence[str], profile: EngineProfile) -> list[Problem]:
    """Return the arguments that the engine would reject, or that would undo a field of the spec."""
    problems: list[Problem] = []
    index = 0
    while index < len(extra_args):
        message, shown, taken = _read(extra_args, index, profile, hints=len(problems) < _MOST_HINTS)
        if message is not None:
            problems.append(Problem(f"spec.engine.extraArgs[{index}]", shown, message))
        index += taken
    return problems


def options(extra_args: Sequence[str], profile: EngineProfile) -> Iterator[Option]:
    """Return the flags that are given, in their order; what has problems may be left out."""
    index = 0
    while index < len(extra_args):
        argument, following = extra_args[index], _count_values(extra_args[index + 1 :])
        _, equals, glued = argument.partition("=")
        value = glued if equals else "".join(extra_args[index + 1 : index + 2])
        if argument.startswith(_OPTIMIZATION_LEVEL):
            level, taken = argument.removeprefix(_OPTIMIZATION_LEVEL).removeprefix("="), 1
            if not level:
                level, taken = value, 2
            yield Option(index, profile.flags["--optimization-level"], _OPTIMIZATION_LEVEL, "", level)
        else:
            name, path, has_value = _split(argument, profile)
            found = _find(name, profile) if _is_option(argument) else None
            taken = 1
            if found is not None:
                _, taken = _take_values(found, following, len(extra_args) - index - 1, path=path, has_value=has_value)
                yield Option(index, found, name, path, value if equals or taken > 1 else "")
        index += taken


def unknown_flags(extra_args: Sequence[str], profile: EngineProfile) -> list[str]:
    """Return the flags that no known version has, and that are passed on to an untested version."""
    names = [_split(each, profile)[0] for each in extra_args if _is_option(each) and not profile.tested]
    named = [name for name in names if not name.startswith(_OPTIMIZATION_LEVEL)]
    return [name for name in named if _find(name, profile) is None and _why_unknown(name, profile, hints=False) is None]


def last_option(name: str, extra_args: Sequence[str], profile: EngineProfile) -> Option | None:
    """Return the last option that sets a flag, which is the one that counts; None where it is not given."""
    given = [option for option in options(extra_args, profile) if option.flag == profile.flags.get(name)]
    return given[-1] if given else None


def json_value(given: Sequence[Option]) -> Mapping[str, Any] | None:
    """Merge options of one JSON value as utils/argparse_utils.py, which prefers dotted paths; None if not an object."""
    dotted: dict[str, Any] = {}
    whole: Any = {}
    for option in given:
        if not option.path:
            whole = json_or_text(option.value)
            continue
        place = dotted
        *parents, last = option.path.split(".")[:_MOST_PARTS]
        for parent in parents:
            inner = place.setdefault(parent, {})
            place = inner if isinstance(inner, dict) else {}
        place[last] = json_or_text(option.value)
    found = dotted or whole
    return found if isinstance(found, dict) else None


def attention_backend(extra_args: Sequence[str], profile: EngineProfile) -> str | None:
    """Return the attention backend that is asked for, as vLLM calls it; None where the engine chooses."""
    named = last_option("--attention-backend", extra_args, profile)
    if named is not None:
        return named.value.upper()
    given = [option for option in options(extra_args, profile) if option.flag.name == "--attention-config"]
    backend = (json_value(given) or {}).get("backend")
    return backend.upper() if isinstance(backend, str) else None


def json_or_text(text: str) -> Any:
    """Return what a value says as JSON; the text itself where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _read(extra_args: Sequence[str], index: int, profile: EngineProfile, *, hints: bool) -> tuple[str | None, str, int]:
    if not _is_option(extra_args[index]):
        return "belongs to no flag; vLLM takes no further positional argument", extra_args[index], 1
    following = _count_values(extra_args[index + 1 :])
    if extra_args[index] == _OPTIMIZATION_LEVEL and not (following and extra_args[index + 1] in _OPTIMIZATION_LEVELS):
        return "needs a level: -O0, -O1, -O2 or -O3", extra_args[index], 1 + following
    if extra_args[index].startswith(_OPTIMIZATION_LEVEL):
        return None, extra_args[index], 2 if extra_args[index] == _OPTIMIZATION_LEVEL else 1
    name, path, has_value = _split(extra_args[index], profile)
    found = _find(name, profile)
    if found is None:
        return _why_unknown(name, profile, hints=hints), name, 1 + following
    if path.count(".") >= _MOST_PARTS:
        return f"has a dotted path of more than {_MOST_PARTS} parts, which nothing of use has: write fewer", name, 1
    advice = reserved_flag_problem(found.name) or reserved_flag_problem(f"{found.name}.{path}")
    problem, taken = _take_values(found, following, len(extra_args) - index - 1, path=path, has_value=has_value)
    if advice is not None:
        reads_as = "" if name in found.names else f"is short for {found.name}, which "
        problem = f"{reads_as}is not for extraArgs; {advice}"
    return problem, name, taken


def _is_option(argument: str) -> bool:
    """Decide as argparse does: a dash, but no lone dash, negative number or text with spaces."""
    if not argument.startswith("-") or argument == "-" or _NEGATIVE_NUMBER.fullmatch(argument):
        return False
    return "=" in argument or " " not in argument


def _count_values(arguments: Sequence[str]) -> int:
    return next((count for count, argument in enumerate(arguments) if _is_option(argument)), len(arguments))


def _split(argument: str, profile: EngineProfile) -> tuple[str, str, bool]:
    """Return name, dotted path and whether the argument holds a value. The value may be a secret."""
    full_name, equals, _ = argument.partition("=")
    name, _, path = full_name.partition(".")
    if name.startswith("--"):
        name = name.replace("_", "-")
    elif name[:2] in profile.flags and not any(known.startswith(name) for known in profile.flags):
        # A one-letter flag with its value glued on, such as -n2.
        return name[:2], "", True
    return name, path, bool(equals)


def _find(name: str, profile: EngineProfile) -> Flag | None:
    if name in profile.flags:
        return profile.flags[name]
    candidates = [known for known in profile.flags if known.startswith(name)]
    return profile.flags[candidates[0]] if len(candidates) == 1 and name not in profile.removed_flags else None


def _why_unknown(name: str, profile: EngineProfile, *, hints: bool) -> str | None:
    if name == "--":
        return "ends the flags, and vLLM takes no further positional argument; remove it"
    if name in profile.removed_flags:
        return f"vLLM {profile.version} no longer has this flag; {profile.removed_flags[name]}"
    if name in profile.later_flags:
        return f"vLLM {profile.version} does not have this flag yet; it came with {profile.later_flags[name]}"
    if candidates := [known for known in profile.flags if known.startswith(name)]:
        return f"is short for several flags: {some_of(sorted(candidates))}; write one in full"
    if not profile.tested and name.startswith("--"):
        return None
    nearest = get_close_matches(name, profile.flags, n=1) if hints else ()
    hint = f"did you mean {nearest[0]}?" if nearest else "see `vllm serve --help=all`"
    return f"vLLM {profile.version} has no such flag; {hint}"


def _take_values(flag: Flag, following: int, remaining: int, *, path: str, has_value: bool) -> tuple[str | None, int]:
    """Return the problem of a flag's values, and the number of arguments that flag and values take."""
    if path and not has_value:
        # vLLM takes the next argument as the value, whatever it looks like.
        return (None, 2) if remaining else ("needs a value", 1)
    if has_value:
        return ("takes no value" if flag.values == "0" else None), 1
    if flag.values in {"1", "+"} and following == 0:
        return "needs a value", 1
    at_most = {"0": 0, "1": 1, "?": 1}.get(flag.values, following)
    return None, 1 + min(following, at_most)
