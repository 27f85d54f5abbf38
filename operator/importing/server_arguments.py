"""Parse vLLM arguments as its parser does, and map flags and variables of older versions.

Covers aliases, prefixes, underscores, `=` and dotted paths.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from specdecode_operator.importing.server_command import ServerCommand
from specdecode_operator.importing.spec_builder import HOLDS_ANYWAY, SpecBuilder
from specdecode_operator.problems import shown, some_of
from specdecode_operator.untrusted import UnreadableTextError, parse_json
from specdecode_operator.vllm.extra_args_parser import OPTIMIZATION_LEVEL, find_flag, split_argument
from specdecode_operator.vllm.profiles import EngineProfile, Flag


@dataclass(frozen=True)
class OlderSetting:
    """Successor of a setting of older versions: ``now``, or ``gone``; without both, the user decides."""

    now: str = ""
    """Flag, key of its JSON value, or variable with the same meaning."""
    gone: str = ""
    """Reason why the setting can be dropped."""
    ask: str = ""
    """Settings that the user can use instead."""
    now_of_one: str = ""
    """Flag with the same meaning for a single value; ``now`` if this is empty."""
    value: str | None = None
    """The value of its successor; its own value if this is None."""
    takes: str = "1"
    """Number of values that follow a flag: 0, 1, ? (0 or 1) or +."""
    default: Sequence[str] = ()
    """Values that mean the same as leaving it out."""
    allowed: Sequence[str] = ()
    """Values that its successor takes; any if this is empty."""

    def said_now(self, values: Sequence[str]) -> list[str]:
        """Return the arguments of the successor with these values; empty if it has no successor for them."""
        given = list(values) if self.value is None else [self.value]
        if not self.now or (self.allowed and (not given or given[0] not in self.allowed)):
            return []
        return [self.now_of_one if self.now_of_one and len(given) == 1 else self.now, *given]


OLDER_SETTINGS: Final = json.loads(Path(__file__).with_name("older_settings.json").read_text(encoding="utf-8"))
FLAGS: Final[Mapping[str, OlderSetting]] = {name: OlderSetting(**row) for name, row in OLDER_SETTINGS["flags"].items()}
"""Flags by their long names; flags that became a key of --speculative-config are in speculation.py."""
VARIABLES: Final[Mapping[str, OlderSetting]] = {
    name: OlderSetting(**row) for name, row in OLDER_SETTINGS["variables"].items()
}

_OF_OTHERS: Final = ("VLLM_ROCM_", "VLLM_XPU_", "VLLM_TPU_", "VLLM_XLA_", "VLLM_HPU_", "VLLM_NEURON_")
_READ_UNLISTED: Final = frozenset({"VLLM_CUSTOM_ALLREDUCE_ALGO", "VLLM_SNAPSHOT_TIMEOUT_S"})
"""Variables that vLLM reads although its own list lacks them."""


def older_variable(name: str, version: str, known: frozenset[str]) -> OlderSetting | None:
    """Return the successor of a variable of vLLM; None if the version reads it, or if it is not vLLM's."""
    if not name.startswith("VLLM_") or name in known or name in _READ_UNLISTED:
        return None
    if name.startswith(_OF_OTHERS):
        return OlderSetting(gone="is for hardware that the operator does not support")
    ask = f"vLLM {version} does not support it: use its replacement, or remove it"
    return VARIABLES.get(name) or OlderSetting(ask=ask)


SECRET_FLAGS: Final = frozenset({"--api-key", "--hf-token"})

_SEVERAL: Final = frozenset({"", "--model", "--middleware"})
"""Flags that may be repeated, and the model, for which vLLM has its own order."""

_OF_GROUPS: Final = frozenset({"--node-rank", "--master-addr", "--master-port"})
_WORDS_OF_SWITCHES: Final = {"true": True, "false": False}


@dataclass(frozen=True)
class Argument:
    """One argument of a server, with its values."""

    name: str
    """Long name of the flag; as written if no known version has it, and empty for the model."""
    values: tuple[str, ...]
    words: tuple[str, ...]
    path: tuple[str, ...] = ()
    negated: bool = False
    known: bool = True

    @property
    def text(self) -> str:
        """The argument as written."""
        return " ".join(self.words)

    @property
    def value(self) -> str:
        """Its first value, or an empty text."""
        return self.values[0] if self.values else ""

    @property
    def shown(self) -> str:
        """The flag for messages, without its value, which may be a secret."""
        return ".".join((self.name, *self.path)) if self.name else self.words[0]


def read_arguments(words: Sequence[str], profile: EngineProfile) -> list[Argument]:
    """Return the arguments of a server one by one; the model, given by position, has no name."""
    given, rest = [], list(words)
    while rest:
        if rest[0].startswith("-"):
            found, taken = _read(rest, profile)
        else:
            found, taken = Argument("", (rest[0],), (rest[0],)), 1
        given.append(found)
        rest = rest[taken:]
    return given


def _read(words: Sequence[str], profile: EngineProfile) -> tuple[Argument, int]:
    if words[0].startswith(OPTIMIZATION_LEVEL):
        level = tuple(words[: 2 if words[0] == OPTIMIZATION_LEVEL else 1])
        return Argument(OPTIMIZATION_LEVEL, (), level), len(level)
    name, dotted, held = split_argument(words[0], profile)
    path = tuple(part.replace("-", "_") for part in dotted.split(".")) if dotted else ()
    flag = _flag(name, profile)
    if held is not None:
        values: tuple[str, ...] = (held,)
    else:
        values = tuple(words[1:2]) if path else _values(flag, name, words[1:], profile)
    written = tuple(words[: 1 if held is not None else 1 + len(values)])
    if flag is None:
        return Argument(name, values, written, path, known=False), len(written)
    given = Argument(flag.name, values, written, path, flag.is_undone_by(name))
    on = _WORDS_OF_SWITCHES.get(given.value.lower()) if flag.values == "0" and not path else None
    if on is not None:
        # A switch with a word for on or off. Without a name for off, off has no words.
        off = tuple(name for name in flag.aliases if flag.is_undone_by(name))[:1]
        said = (flag.name,) if on != given.negated else off
        given = replace(given, values=(), words=said, negated=on == given.negated)
    return given, len(written)


def _flag(name: str, profile: EngineProfile) -> Flag | None:
    found = profile.flags.get(name)
    # From 0.33 on, --disable-log-requests is a spelling of the default.
    if name in FLAGS and (found is None or found.is_undone_by(name)):
        return None
    return find_flag(name, profile)


def _values(flag: Flag | None, name: str, follows: Sequence[str], profile: EngineProfile) -> tuple[str, ...]:
    ends = (
        count
        for count, word in enumerate(follows)
        if word.startswith("-") and not word.lstrip("-").replace(".", "", 1).isdigit()
    )
    most = next(ends, len(follows))
    if flag is None:
        # An unknown flag takes all words after it: better no model than a wrong one.
        is_old = name in profile.removed_flags or name.startswith("--spec")
        takes = FLAGS[name].takes if name in FLAGS else "1" if is_old else "+"
        return tuple(follows[: {"0": 0, "1": min(most, 1), "?": min(most, 1)}.get(takes, most)])
    if flag.values == "1":
        # The parser takes JSON and numbers that begin with a dash, too.
        return tuple(follows[:1])
    if flag.values == "0":
        return tuple(follows[:1]) if follows and follows[0].lower() in _WORDS_OF_SWITCHES else ()
    return tuple(follows[: {"?": min(most, 1)}.get(flag.values, most)])


def ask_for_unknown(command: ServerCommand, arguments: Iterable[Argument], builder: SpecBuilder) -> list[Argument]:
    """Return the arguments whose values are in the source or in a Secret; ask for the others."""
    message = (
        "has its value only in the running container: write the value, or put its ConfigMap into the same file,"
        " then import again"
    )
    known = []
    for given in arguments:
        if command.unknown.isdisjoint(given.words) or given.name in SECRET_FLAGS:
            known.append(given)
        else:
            builder.unsaid.add(given.name)
            builder.decide("spec.engine.extraArgs", given.shown, message)
    for name in sorted(name for name, value in command.env.items() if value is None):
        builder.decide("spec.engine.env", name, message)
    return known


def say_as_now(arguments: Iterable[Argument], builder: SpecBuilder, profile: EngineProfile) -> list[Argument]:
    """Replace arguments of older versions with their successors; without one, report why it can be dropped, or ask."""
    current = []
    for given in arguments:
        older = None if given.known else FLAGS.get(given.name)
        if not given.words:
            builder.own(f"{given.name} false", HOLDS_ANYWAY)
        elif older is None:
            current.append(given)
        elif (successor := _successor(given, older, builder, profile)) is not None:
            current.append(successor)
    return current


def _successor(given: Argument, older: OlderSetting, builder: SpecBuilder, profile: EngineProfile) -> Argument | None:
    words = older.said_now(given.values)
    if words:
        words[0] = ".".join((words[0], *given.path))
    if given.values and given.value in older.default:
        builder.own(given.text, HOLDS_ANYWAY)
    elif older.gone:
        builder.drop(given.shown, older.gone)
    elif not words or words[0].partition(".")[0] not in profile.flags:
        known = ", ".join(older.allowed)
        message = older.ask or f"vLLM {profile.version} supports {known}: write one of them, and import again"
        builder.decide("spec.engine.extraArgs", given.shown, message)
    else:
        builder.own(given.shown, f"vLLM {profile.version} calls it {words[0]}")
        return _read(words, profile)[0]
    return None


def last_of_each(arguments: Sequence[Argument], builder: SpecBuilder) -> list[Argument]:
    """Return the arguments that count, and report those that do not.

    Of a repeated flag, vLLM's parser takes the last. It joins the dotted paths under one spelling of a flag into one
    JSON value and appends these values, in the order in which the spellings first appear. They replace a whole JSON
    value of that flag wherever it stands, and the paths under an earlier spelling (vllm/utils/argparse_utils.py,
    parse_args).
    """
    kept: list[Argument] = []
    spelling = dict(list(dict.fromkeys((given.name, _spelled(given)) for given in arguments if given.path)))
    later: set[tuple[str, tuple[str, ...]]] = set()
    for given in reversed(arguments):
        same = (given.name, given.path)
        in_force = spelling.get(given.name)
        if given.path and _spelled(given) != in_force:
            other = ".".join((_spelled(given), *given.path))
            builder.drop(other, f"vLLM uses the paths under one spelling of a flag, which is {in_force} here")
            continue
        if given.name not in _SEVERAL and same in later:
            builder.drop(given.shown, "is repeated later, and vLLM uses the last value")
        elif given.name not in _SEVERAL and not given.path and in_force is not None:
            builder.drop(given.shown, _replaced(given, in_force, arguments))
        else:
            kept.append(given)
        later.add(same)
    return kept[::-1]


def _spelled(given: Argument) -> str:
    spelled = given.words[0].partition("=")[0].partition(".")[0]
    return spelled.replace("_", "-") if spelled.startswith("--") else spelled


def _replaced(whole: Argument, spelled: str, arguments: Iterable[Argument]) -> str:
    why = f"vLLM uses {spelled}.… instead, regardless of the order"
    again = {given.path[0] for given in arguments if given.path and given.name == whole.name}
    try:
        value = parse_json(whole.value)
    except UnreadableTextError:
        return why
    lost = [shown(key) for key in value if key not in again] if isinstance(value, dict) else []
    return f"{why}; this also drops {some_of(lost)}" if lost else why


def without_group(arguments: Iterable[Argument], nodes: int, builder: SpecBuilder) -> list[Argument]:
    """Remove the arguments by which the pods of one server find each other."""
    kept = []
    for given in arguments:
        if nodes > 1 and (given.name in _OF_GROUPS or (given.name, given.value) == ("--nnodes", str(nodes))):
            builder.own(given.shown, "the operator sets it if a replica needs several nodes")
        else:
            kept.append(given)
    return kept
