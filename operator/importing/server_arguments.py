"""Reads a server's arguments as vLLM's parser does: aliases, prefixes, underscores, ``=``, dotted paths.

What only older versions take is read as they did, and said as the profile's version takes it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from specdecode_operator.documents.json_text import parse_json
from specdecode_operator.documents.limits import UnreadableTextError
from specdecode_operator.engine.profiles import EngineProfile, Flag
from specdecode_operator.migration.builder import HOLDS_ANYWAY, Outcome, SpecBuilder
from specdecode_operator.migration.older_settings import FLAGS, OlderSetting
from specdecode_operator.migration.server_command import ServerCommand
from specdecode_operator.problems import shown, some_of

SECRET_FLAGS: Final = frozenset({"--api-key", "--hf-token"})
"""Flags whose value belongs into a Secret."""

_SEVERAL: Final = frozenset({"", "--model", "--middleware"})
"""The model, of which vLLM has an order of its own, and flags that may stand there several times."""

_OF_GROUPS: Final = frozenset({"--node-rank", "--master-addr", "--master-port"})
_WORDS_OF_SWITCHES: Final = {"true": True, "false": False}
"""What older versions took behind some switches; newer ones have ``--no-…`` for it."""


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
    """Whether it was written as ``--no-…``, or as the ``--disable-…`` of an ``--enable-…``."""

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
        found, taken = _read(words[index:], profile)
        given.append(found)
        index += taken
    return given


def _read(words: Sequence[str], profile: EngineProfile) -> tuple[Argument, int]:
    """Return the argument that comes first, and how many words it takes."""
    spelled, equals, value = words[0].partition("=")
    name, _, dotted = spelled.partition(".")
    if name.startswith("-O"):
        level = tuple(words[: 2 if words[0] == "-O" else 1])
        return Argument("-O", (), level), len(level)
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
    written = tuple(words[: 1 if equals else 1 + len(values)])
    if flag is None:
        return Argument(name, values, written, path, known=False), len(written)
    given = Argument(flag.name, values, written, path, flag.is_undone_by(name))
    return (_switched(given, flag) if flag.values == "0" and values and not path else given), len(written)


def _switched(given: Argument, flag: Flag) -> Argument:
    """Return a switch with a word for on or off as it is written now."""
    on = _WORDS_OF_SWITCHES.get(given.value.lower())
    if on is None:
        return given
    off = tuple(name for name in flag.aliases if flag.is_undone_by(name))[:1]
    # Off is nothing where no name of the flag says it.
    return replace(given, values=(), words=(flag.name,) if on != given.negated else off, negated=on == given.negated)


def _flag(name: str, profile: EngineProfile) -> Flag | None:
    """Return the flag of a name or of its only completion; a flag of older versions is none of these."""
    # From 0.33 on, --disable-log-requests is a spelling of what is off anyway.
    known = profile.flags.get(name)
    if known and not (name in FLAGS and known.is_undone_by(name)):
        return known
    if name in profile.removed_flags or name in FLAGS or not name.startswith("--"):
        return None
    candidates = {profile.flags[known].name for known in profile.flags if known.startswith(name)}
    return profile.flags[candidates.pop()] if len(candidates) == 1 else None


def _values(flag: Flag | None, name: str, follows: Sequence[str], profile: EngineProfile) -> tuple[str, ...]:
    most = next(
        (count for count, word in enumerate(follows) if word.startswith("-") and not _is_number(word)), len(follows)
    )
    if flag is None:
        # What stands behind a flag that nobody knows is all its own: better no model than a wrong one.
        is_old = name in profile.removed_flags or name.startswith("--spec")
        takes = FLAGS[name].takes if name in FLAGS else "1" if is_old else "+"
        return tuple(follows[: {"0": 0, "1": min(most, 1), "?": min(most, 1)}.get(takes, most)])
    if flag.values == "1":
        # The parser takes JSON and numbers that begin with a dash, too.
        return tuple(follows[:1])
    if flag.values == "0":
        return tuple(follows[:1]) if follows and follows[0].lower() in _WORDS_OF_SWITCHES else ()
    return tuple(follows[: {"?": min(most, 1)}.get(flag.values, most)])


def _is_number(word: str) -> bool:
    return word.lstrip("-").replace(".", "", 1).isdigit()


def ask_for_unknown(command: ServerCommand, arguments: Iterable[Argument], builder: SpecBuilder) -> list[Argument]:
    """Return the arguments whose values are in the Deployment or in a Secret; ask for those of the others."""
    message = (
        "has its value only in the running container: write the value out, or put its ConfigMap into the same file,"
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
    """Return the arguments with those of older versions as the profile's version takes them.

    Of what has no successor, say why nothing is lost, or ask.
    """
    current = []
    for given in arguments:
        older = None if given.known else FLAGS.get(given.name)
        if not given.words:
            builder.note(Outcome.OPERATOR, f"{given.name} false", HOLDS_ANYWAY)
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
        builder.note(Outcome.OPERATOR, given.text, HOLDS_ANYWAY)
    elif older.gone:
        builder.drop(given.shown, older.gone)
    elif not words or words[0].partition(".")[0] not in profile.flags:
        known = ", ".join(older.allowed)
        message = older.ask or f"vLLM {profile.version} knows {known}: write one of them, and import again"
        builder.decide("spec.engine.extraArgs", given.shown, message)
    else:
        builder.note(Outcome.OPERATOR, given.shown, f"vLLM {profile.version} calls it {words[0]}")
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
            builder.drop(other, f"vLLM takes the paths under one spelling of a flag, which is {in_force} here")
            continue
        if given.name not in _SEVERAL and same in later:
            builder.drop(given.shown, "is said again behind it, and vLLM takes what is said last")
        elif given.name not in _SEVERAL and not given.path and in_force is not None:
            builder.drop(given.shown, _replaced(given, in_force, arguments))
        else:
            kept.append(given)
        later.add(same)
    return kept[::-1]


def _spelled(given: Argument) -> str:
    """Return the flag of an argument as vLLM's parser tells spellings apart."""
    spelled = given.words[0].partition("=")[0].partition(".")[0]
    return spelled.replace("_", "-") if spelled.startswith("--") else spelled


def _replaced(whole: Argument, spelled: str, arguments: Iterable[Argument]) -> str:
    """Return why a whole JSON value does not count, and which of its keys are lost."""
    why = f"vLLM takes {spelled}.… in its place, wherever they stand"
    again = {given.path[0] for given in arguments if given.path and given.name == whole.name}
    try:
        value = parse_json(whole.value)
    except UnreadableTextError:
        return why
    lost = [shown(key) for key in value if key not in again] if isinstance(value, dict) else []
    return f"{why}; lost with it: {some_of(lost)}" if lost else why


def without_group(arguments: Iterable[Argument], nodes: int, builder: SpecBuilder) -> list[Argument]:
    """Return the arguments without those by which the pods of one server find each other."""
    kept = []
    for given in arguments:
        if nodes > 1 and (given.name in _OF_GROUPS or (given.name, given.value) == ("--nnodes", str(nodes))):
            builder.note(Outcome.OPERATOR, given.shown, "the operator writes it where a replica needs several nodes")
        else:
            kept.append(given)
    return kept
