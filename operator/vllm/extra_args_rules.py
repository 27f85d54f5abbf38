"""Check `spec.engine.extraArgs`: flags that vLLM's parser would reject, and flags that undo a field of the spec."""

from collections.abc import Sequence
from difflib import get_close_matches

from specdecode_operator.problems import Problem, some_of
from specdecode_operator.vllm.arguments import reserved_flag_problem
from specdecode_operator.vllm.extra_args_parser import (
    MOST_PARTS,
    OPTIMIZATION_LEVEL,
    count_values,
    find_flag,
    is_option,
    split_argument,
    take_values,
)
from specdecode_operator.vllm.profiles import EngineProfile

_MOST_HINTS = 8
"""Most problems with a "did you mean" hint. A search takes 20 ms, and the operator handles all objects in one thread.
"""

_OPTIMIZATION_LEVELS = frozenset("0123")


def extra_args_problems(extra_args: Sequence[str], profile: EngineProfile) -> list[Problem]:
    """Return a problem for each argument that the engine would reject, or that would override a field of the spec."""
    problems: list[Problem] = []
    index = 0
    while index < len(extra_args):
        message, shown, taken = _read(extra_args, index, profile, hints=len(problems) < _MOST_HINTS)
        if message is not None:
            problems.append(Problem(f"spec.engine.extraArgs[{index}]", shown, message))
        index += taken
    return problems


def unknown_flags(extra_args: Sequence[str], profile: EngineProfile) -> list[str]:
    """Return the flags that no known version has, and that are passed on to an untested version."""
    names = [split_argument(each, profile)[0] for each in extra_args if is_option(each) and not profile.tested]
    named = [name for name in names if not name.startswith(OPTIMIZATION_LEVEL)]
    return [
        name for name in named if find_flag(name, profile) is None and _why_unknown(name, profile, hints=False) is None
    ]


def _read(extra_args: Sequence[str], index: int, profile: EngineProfile, *, hints: bool) -> tuple[str | None, str, int]:
    if not is_option(extra_args[index]):
        split = extra_args[index].startswith("-")
        positional = "belongs to no flag; vLLM accepts no further positional argument"
        return "has spaces; write one list item per word" if split else positional, extra_args[index], 1
    following = count_values(extra_args[index + 1 :])
    if extra_args[index] == OPTIMIZATION_LEVEL and not (following and extra_args[index + 1] in _OPTIMIZATION_LEVELS):
        return "needs a level: -O0, -O1, -O2 or -O3", extra_args[index], 1 + following
    if extra_args[index].startswith(OPTIMIZATION_LEVEL):
        return None, extra_args[index], 2 if extra_args[index] == OPTIMIZATION_LEVEL else 1
    name, path, held = split_argument(extra_args[index], profile)
    found = find_flag(name, profile)
    if found is None:
        return _why_unknown(name, profile, hints=hints), name, 1 + following
    if path.count(".") >= MOST_PARTS:
        return f"has a dotted path of more than {MOST_PARTS} parts, the maximum: shorten it", name, 1
    advice = reserved_flag_problem(found.name) or reserved_flag_problem(f"{found.name}.{path}")
    problem, taken = take_values(found, following, len(extra_args) - index - 1, path=path, held=held)
    if advice is not None:
        reads_as = "" if name in found.names else f"is short for {found.name}, which "
        problem = f"{reads_as}is not allowed in extraArgs; {advice}"
    return problem, name, taken


def _why_unknown(name: str, profile: EngineProfile, *, hints: bool) -> str | None:
    if name == "--":
        return "ends the flags, and vLLM accepts no further positional argument; remove it"
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
