"""Reads a server's arguments as vLLM's parser does: aliases, prefixes, underscores, ``=``, dotted paths."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from specdecode_operator.engine.profiles import EngineProfile, Flag
from specdecode_operator.migration.builder import SpecBuilder
from specdecode_operator.migration.server_command import ServerCommand

SECRET_FLAGS: Final = frozenset({"--api-key", "--hf-token"})
"""Flags whose value belongs into a Secret."""

_OLD_SWITCHES: Final = frozenset(
    {
        "--use-v2-block-manager",
        "--speculative-disable-mqa-scorer",
        "--worker-use-ray",
        "--engine-use-ray",
        "--enable-reasoning",
        "--disable-async-output-proc",
        "--disable-log-requests",
    }
)
"""Flags of older versions that take no value; the model may stand behind them."""

_OLD_LISTS: Final = frozenset({"--cuda-graph-sizes", "--prompt-adapters"})
"""Flags of older versions that take several."""


@dataclass(frozen=True)
class Argument:
    """One argument of a server, with its values."""

    name: str
    """Long name of the flag; as written where no version we know has it, and empty for the model."""

    values: tuple[str, ...]
    words: tuple[str, ...]
    """As it was written."""

    path: tuple[str, ...] = ()
    """Keys of a dotted path into a JSON value."""

    negated: bool = False
    """Whether it was written as ``--no-…``."""

    known: bool = True
    """Whether the profile's version has the flag."""

    @property
    def text(self) -> str:
        """The argument as it was written."""
        return " ".join(self.words)

    @property
    def value(self) -> str:
        """Its first value; empty where it has none."""
        return self.values[0] if self.values else ""

    @property
    def shown(self) -> str:
        """The flag as people know it, without its value, which may be a secret."""
        return ".".join((self.name, *self.path)) if self.name else self.words[0]


def read_arguments(words: Sequence[str], profile: EngineProfile) -> list[Argument]:
    """Return the arguments of a server one by one; the model, given by position, has no name."""
    given, index = [], 0
    while index < len(words):
        if not words[index].startswith("-"):
            given.append(Argument("", (words[index],), (words[index],)))
            index += 1
            continue
        found = _read(words[index:], profile)
        given.append(found)
        index += len(found.words)
    return given


def _read(words: Sequence[str], profile: EngineProfile) -> Argument:
    spelled, equals, value = words[0].partition("=")
    name, _, dotted = spelled.partition(".")
    if name.startswith("-O"):
        return Argument("-O", (), tuple(words[: 2 if words[0] == "-O" else 1]))
    if name.startswith("--"):
        name = name.replace("_", "-")
    path = tuple(part.replace("-", "_") for part in dotted.split(".")) if dotted else ()
    flag = _flag(name, profile)
    if equals:
        values: tuple[str, ...] = (value,)
    elif path:
        values = tuple(words[1:2])
    else:
        values = _values(flag, name, words[1:], profile)
    taken = 1 if equals else 1 + len(values)
    short = () if flag is None else (each for each in flag.names if not each.startswith("--"))
    negated = flag is not None and name.startswith("--no-") and name not in (flag.name, *short)
    return Argument(flag.name if flag else name, values, tuple(words[:taken]), path, negated, known=flag is not None)


def _flag(name: str, profile: EngineProfile) -> Flag | None:
    """Return the flag of a name or of its only completion; a flag of older versions is none of these."""
    if name in profile.flags:
        return profile.flags[name]
    if name in profile.removed_flags or not name.startswith("--"):
        return None
    candidates = {profile.flags[known].name for known in profile.flags if known.startswith(name)}
    return profile.flags[candidates.pop()] if len(candidates) == 1 else None


def _values(flag: Flag | None, name: str, follows: Sequence[str], profile: EngineProfile) -> tuple[str, ...]:
    most = next(
        (count for count, word in enumerate(follows) if word.startswith("-") and not _is_number(word)), len(follows)
    )
    if flag is None:
        if name in _OLD_SWITCHES:
            return ()
        # What stands behind a flag that nobody knows is all its own: better no model than a wrong one.
        is_old = name in profile.removed_flags or name.startswith("--spec")
        return tuple(follows[: min(most, 1) if is_old and name not in _OLD_LISTS else most])
    if flag.values == "1":
        # The parser takes JSON and numbers that begin with a dash, too.
        return tuple(follows[:1])
    return tuple(follows[: {"0": 0, "?": min(most, 1)}.get(flag.values, most)])


def _is_number(word: str) -> bool:
    return word.lstrip("-").replace(".", "", 1).isdigit()


def ask_for_unknown(command: ServerCommand, arguments: Iterable[Argument], builder: SpecBuilder) -> list[Argument]:
    """Return the arguments whose values are in the Deployment or in a Secret; ask for those of the others."""
    message = "has its value only in the running container: write the value out, then import again"
    known = []
    for given in arguments:
        if command.unknown.isdisjoint(given.words) or given.name in SECRET_FLAGS:
            known.append(given)
        else:
            builder.decide("spec.engine.extraArgs", given.shown, message)
    for name in sorted(name for name, value in command.env.items() if value is None):
        builder.decide("spec.engine.env", name, message)
    return known
