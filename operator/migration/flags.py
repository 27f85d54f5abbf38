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
class Given:
    """One argument with its values.

    Attributes
    ----------
    name
        Long name of the flag; as written where no version we know has it, and empty for the model.
    values
        What was given to it.
    words
        The arguments as they were written.
    path
        Keys of a dotted path into a JSON value.
    negated
        Whether it was written as ``--no-…``.
    known
        Whether the profile's version has the flag.
    """

    name: str
    values: tuple[str, ...]
    words: tuple[str, ...]
    path: tuple[str, ...] = ()
    negated: bool = False
    known: bool = True

    @property
    def shown(self) -> str:
        """The flag as people know it, without its value, which may be a secret."""
        return ".".join((self.name, *self.path)) if self.name else self.words[0]


def read_flags(words: Sequence[str], profile: EngineProfile) -> list[Given]:
    """Return the arguments of a server one by one; the model, given by position, has no name."""
    given, index = [], 0
    while index < len(words):
        if not words[index].startswith("-"):
            given.append(Given("", (words[index],), (words[index],)))
            index += 1
            continue
        found = _read(words[index:], profile)
        given.append(found)
        index += len(found.words)
    return given


def _read(words: Sequence[str], profile: EngineProfile) -> Given:
    spelled, equals, value = words[0].partition("=")
    name, _, dotted = spelled.partition(".")
    if name.startswith("--"):
        name = name.replace("_", "-")
    elif name.startswith("-O"):
        return Given("-O", (), tuple(words[: 2 if words[0] == "-O" else 1]))
    path = tuple(part.replace("-", "_") for part in dotted.split(".")) if dotted else ()
    flag = _flag(name, profile)
    known = flag is not None
    follows = words[1:] if not equals else ()
    if path:
        values = (value,) if equals else tuple(follows[:1])
    else:
        values = (value,) if equals else _values(flag, name, follows, old=_is_old(name, profile))
    taken = 1 + (0 if equals else len(values))
    negated = flag is not None and name not in (flag.name, *_short(flag)) and name.startswith("--no-")
    return Given(flag.name if flag else name, values, tuple(words[:taken]), path, negated=negated, known=known)


def _short(flag: Flag) -> tuple[str, ...]:
    return tuple(name for name in flag.names if not name.startswith("--"))


def _flag(name: str, profile: EngineProfile) -> Flag | None:
    """Return the flag of a name or of its only completion; a flag of older versions is none of these."""
    if name in profile.flags:
        return profile.flags[name]
    if name in profile.removed_flags or not name.startswith("--"):
        return None
    candidates = {profile.flags[known].name for known in profile.flags if known.startswith(name)}
    return profile.flags[candidates.pop()] if len(candidates) == 1 else None


def _is_old(name: str, profile: EngineProfile) -> bool:
    """Whether an earlier version is known to have had a flag."""
    return name in profile.removed_flags or name.startswith("--spec")


def _values(flag: Flag | None, name: str, follows: Sequence[str], *, old: bool) -> tuple[str, ...]:
    most = len(follows)
    for count, word in enumerate(follows):
        if word.startswith("-") and not _is_number(word):
            most = count
            break
    if flag is None:
        if name in _OLD_SWITCHES:
            return ()
        # What stands behind a flag that nobody knows is all its own: better no model than a wrong one.
        alone = old and name not in _OLD_LISTS
        return tuple(follows[: min(most, 1) if alone else most])
    if flag.values == "1":
        # The parser takes JSON and numbers that begin with a dash, too.
        return tuple(follows[:1])
    return tuple(follows[: {"0": 0, "?": min(most, 1)}.get(flag.values, most)])


def _is_number(word: str) -> bool:
    return word.lstrip("-").replace(".", "", 1).isdigit()


def decide_unknown(command: ServerCommand, flags: Iterable[Given], builder: SpecBuilder) -> list[Given]:
    """Return the arguments that the Deployment tells; of the others, people must say what they are.

    Those with a Secret's value are told: the Secret takes their place.
    """
    message = "has its value only in the running container: write the value out, then import again"
    known = []
    for given in flags:
        if command.unknown.isdisjoint(given.words) or given.name in SECRET_FLAGS:
            known.append(given)
        else:
            builder.decide("spec.engine.extraArgs", given.shown, message)
    for name in sorted(name for name, value in command.env.items() if value is None):
        builder.decide("spec.engine.env", name, message)
    return known
