"""Reads shell scripts: where one command ends, what its words are, and which of them nobody can tell beforehand."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

_TOKEN: Final = re.compile(
    r"""
      (?P<joined>\\\n)
    | \\(?P<escaped>.)
    | '(?P<single>[^']*)'
    | "(?P<double>(?:[^"\\]|\\.)*)"
    | (?P<comment>(?<![^\s;&|()])\#[^\n]*)
    | (?P<here><<)
    | (?P<redirection>(?:(?<![^\s;&|()])\d)?(?:&>>?|>>?|<)(?P<stream>&[\d-])?)
    | (?P<array>(?<![^\s;&|()])\w+\+?=\((?:[^()'"]|'[^']*'|"(?:[^"\\]|\\.)*")*\))
    | (?P<plain>\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`|\$\{[^}]*\}|\$(?:\w+|[@*?!$-])?
               |[^\s;&|()'"\\`<>$\#]+|\#)
    | (?P<separator>[;&|()\n]+)
    | (?P<blank>[ \t\r\f\v]+)
    """,
    re.VERBOSE | re.DOTALL,
)
_IN_DOUBLE_QUOTES: Final = re.compile(r'\\(?P<escaped>[$`"\\])|\\\n|(?P<text>(?:[^\\]|\\(?![$`"\\\n]))+)', re.DOTALL)
_VARIABLE: Final = re.compile(
    r"\$(?:\{(?P<braced>[A-Za-z_]\w*)(?:(?P<empty>:?)-(?P<default>[^}]*))?\}|(?P<name>[A-Za-z_]\w*))"
    r"|(?P<unknown>`[^`]*`|\$[\w{(@*\#?$!-])"
)
_ALL_ARGUMENTS: Final = frozenset({"$@", "${@}", "$*", "${*}"})
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.DOTALL)
_OPENING: Final = frozenset({"if", "for", "while", "until", "case", "select"})
_CLOSING: Final = frozenset({"fi", "done", "esac"})
_BEFORE: Final = frozenset({"then", "else", "elif", "do", "{", "!"})
_NAMING: Final = frozenset({"for", "select", "read", "unset", "declare", "typeset", "local", "readonly", "mapfile"})
"""Commands that change variables in ways that are not followed here."""

_SUCCEEDING: Final = frozenset({"set", "cd", "mkdir", "ulimit", "echo", "true", ":"})
"""Commands behind which && is no question."""


@dataclass(frozen=True)
class Command:
    """One command of a script.

    Attributes
    ----------
    words
        Its words as the shell passes them on; a variable that nobody can tell stays as it is written.
    assigned
        Variables that are set for it alone; None for a value that nobody can tell.
    """

    words: tuple[str, ...]
    assigned: Mapping[str, str | None]


@dataclass
class Script:
    """What a script does, as far as its text tells.

    Attributes
    ----------
    commands
        Its commands, those of all branches.
    exported
        Variables that it sets for what it starts.
    unknown
        Words that hold what only the running container knows.
    unknown_variables
        Variables that it sets for what it starts to such a value.
    """

    commands: list[Command] = field(default_factory=list)
    exported: dict[str, str] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    unknown_variables: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Piece:
    """Part of a word: whether its variables are put in, and whether their values are split into words."""

    text: str
    expands: bool = True
    splits: bool = True


_Word = list[_Piece]


@dataclass
class _Statement:
    """A command as written, and the separator before it."""

    after: str
    words: list[_Word] = field(default_factory=list)


def read_script(text: str, arguments: Sequence[str], env: Mapping[str, str]) -> Script:
    """Return what a script does that is given these arguments and variables.

    Raises
    ------
    ValueError
        When it cannot be read.
    """
    run = _Run(dict(env), tuple(arguments))
    for statement in _statements(text):
        run.do(statement)
    return run.script


def _statements(text: str) -> list[_Statement]:
    """Return the commands as written, without comments and redirections."""
    statements = [_Statement("")]
    word: _Word | None = None
    dropped = False
    for found in _tokens(text):
        kind = found.lastgroup if found.lastgroup != "stream" else "redirection"
        if kind in {"blank", "separator", "redirection"}:
            if word is not None and not dropped:
                statements[-1].words.append(word)
            # What stands behind > is a file, also after a blank.
            dropped = dropped and word is None and kind == "blank"
            word = None
        if kind == "separator":
            if statements[-1].words:
                statements.append(_Statement(""))
            statements[-1].after += found[0].strip()
        elif kind == "redirection":
            dropped = found["stream"] is None
        elif kind not in {"blank", "joined", "comment"}:
            word = [*(word or []), *_pieces(found)]
    if word is not None and not dropped:
        statements[-1].words.append(word)
    return [statement for statement in statements if statement.words]


def _tokens(text: str) -> Iterator[re.Match[str]]:
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            odd = text[position]
            raise ValueError("No closing quotation" if odd in "'\"`" else f"{odd} is not understood")
        if found["here"] is not None:
            raise ValueError("it holds a here-document")
        yield found
        position = found.end()


def _pieces(found: re.Match[str]) -> Iterator[_Piece]:
    if found["double"] is not None:
        yield _Piece("", expands=False)
        for part in _IN_DOUBLE_QUOTES.finditer(found["double"]):
            if part["escaped"] is not None:
                yield _Piece(part["escaped"], expands=False)
            elif part["text"] is not None:
                yield _Piece(part["text"], splits=False)
    elif found["escaped"] is not None or found["single"] is not None:
        yield _Piece(found["escaped"] if found["single"] is None else found["single"], expands=False)
    else:
        yield _Piece(found[0])


class _Run:
    """Goes through a script, command by command."""

    def __init__(self, env: dict[str, str], arguments: tuple[str, ...]) -> None:
        self.script = Script()
        self._env = env
        self._arguments = arguments
        self._depth = 0
        self._chain_is_certain = True
        self._chained: set[str] = set()

    def do(self, statement: _Statement) -> None:
        """Take in one command."""
        if not any(sign in statement.after for sign in ("&&", "||")):
            self._end_chain()
        words = statement.words
        while words and _plain(words[0]) in _BEFORE:
            words = words[1:]
        first = _plain(words[0]) if words else ""
        self._depth += (first in _OPENING) - (first in _CLOSING)
        # Who can tell whether it happens?
        certain = self._depth == 0 and "||" not in statement.after
        if first in _NAMING:
            self._assign(dict.fromkeys(_ASSIGNMENT.split(_plain(word))[0] for word in words[1:]))
        if first == "export":
            self._export(words[1:], certain=certain)
            return
        assigned, rest = self._assignments(words)
        if not rest:
            self._assign(assigned if certain else dict.fromkeys(assigned))
            return
        if expanded := tuple(self._expanded(rest)):
            self.script.commands.append(Command(expanded, assigned))
        self._chain_is_certain = self._chain_is_certain and first in _SUCCEEDING

    def _end_chain(self) -> None:
        """What && made depend on a command holds only in that chain: the script goes on also where it failed."""
        for name in self._chained:
            self._set(name, None)
        self._chained.clear()
        self._chain_is_certain = True

    def _export(self, words: list[_Word], *, certain: bool) -> None:
        for word in words:
            assigned, bare = self._assignments([word])
            self._assign(assigned if certain else dict.fromkeys(assigned))
            for name in (*assigned, *(_plain(each) for each in bare)):
                if name in self._env:
                    self.script.exported[name] = self._env[name]
                elif name in assigned:
                    self.script.unknown_variables.add(name)

    def _assign(self, assigned: Mapping[str, str | None]) -> None:
        for name, value in assigned.items():
            self._set(name, value)
        if not self._chain_is_certain:
            self._chained.update(assigned)

    def _set(self, name: str, value: str | None) -> None:
        """Set a variable; None: to what nobody can tell."""
        exported = self.script.exported
        if value is not None:
            self._env[name] = value
            exported.update({name: value} if name in exported else {})
            return
        self._env.pop(name, None)
        if exported.pop(name, None) is not None:
            self.script.unknown_variables.add(name)

    def _assignments(self, words: list[_Word]) -> tuple[dict[str, str | None], list[_Word]]:
        """Return the variables that are set before a command, and the command."""
        assigned: dict[str, str | None] = {}
        for index, word in enumerate(words):
            match = _ASSIGNMENT.match(word[0].text) if word[0].expands and word[0].splits else None
            if match is None:
                return assigned, words[index:]
            value, known = self._value([_Piece(word[0].text[match.end() :]), *word[1:]])
            is_array = word[0].text[match.end() :].startswith("(")
            before = self._env.get(match[1]) if match[2] else ""
            assigned[match[1]] = None if is_array or not known or before is None else before + value
        return assigned, []

    def _value(self, word: _Word) -> tuple[str, bool]:
        """Return what is assigned, which is not split, and whether all of it is known."""
        parts = [part for piece in word for part in self._parts(piece)]
        return "".join(text for text, _, _ in parts), all(known for _, _, known in parts)

    def _expanded(self, words: list[_Word]) -> Iterator[str]:
        for word in words:
            if _plain(word) in _ALL_ARGUMENTS and word[-1].expands:
                yield from self._arguments
                continue
            parts = [part for piece in word for part in self._parts(piece)]
            fields = _fields(parts)
            if not all(known for _, _, known in parts):
                self.script.unknown.update(fields)
            yield from fields

    def _parts(self, piece: _Piece) -> Iterator[tuple[str, bool, bool]]:
        """Text of a piece, whether it is split into words, and whether it is known."""
        if not piece.expands:
            yield piece.text, False, True
            return
        position = 0
        for found in _VARIABLE.finditer(piece.text):
            if found.start() > position:
                yield piece.text[position : found.start()], False, True
            position = found.end()
            value = self._env.get(found["braced"] or found["name"] or "")
            if found["default"] is not None and (value is None or (found["empty"] and not value)):
                yield from self._parts(_Piece(found["default"], splits=piece.splits))
            else:
                yield (found[0], False, False) if value is None else (value, piece.splits, True)
        if position < len(piece.text):
            yield piece.text[position:], False, True


def _plain(word: _Word) -> str:
    return "".join(piece.text for piece in word)


def _fields(parts: list[tuple[str, bool, bool]]) -> list[str]:
    """Return the words that one word becomes: an unquoted value is split at its blanks."""
    fields: list[str] = []
    current: str | None = None
    for text, splits, _ in parts:
        first, *others = re.split(r"\s+", text) if splits else [text]
        if first or not splits:
            current = (current or "") + first
        for other in others:
            if current is not None:
                fields.append(current)
            current = other or None
    return fields if current is None else [*fields, current]
