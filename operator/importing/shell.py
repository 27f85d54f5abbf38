"""Parse plain shell scripts: simple commands in sequence, and variables whose values are known."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

_PART: Final = re.compile(
    r"""
      (?P<single>'[^']*')
    | (?P<double>"(?:[^"\\]|\\.)*")
    | (?P<gap>(?:\A|(?:\\\n)*+[\s;])(?:[\s;]|\\\n)*+)(?P<comment>\#[^\n]*)?
    | (?P<joint>(?:\\\n)++)
    | \\(?P<escaped>.)
    """,
    re.VERBOSE | re.DOTALL,
)
"""Quotes, what divides words and commands (a comment can only follow that), lines that go on, escapes. Each part takes
its run as a whole and gives nothing back: a long script takes no longer for each of its blanks."""

_LITERAL, _QUOTED, _END, _BLANK, _EMPTY = "\ue000", "\ue001", "\ue002", "\ue003", "\ue004"
"""Stand in for a dollar that is text, a dollar in double quotes, the end of a command, a blank that divides a
variable's value into words, and quotes around nothing: shlex drops the quotes that tell these apart."""

KUBELET_DOLLAR: Final = "\ue005"
"""Stands for the dollar of a variable that the kubelet replaces, in any quotes."""

_SIGNS: Final = (_LITERAL, _QUOTED, _END, _BLANK, _EMPTY, KUBELET_DOLLAR)
_ESCAPED: Final = {"$": _LITERAL, "`": "`", "\n": ""}
_VARIABLE: Final = re.compile(rf"([${_QUOTED}{KUBELET_DOLLAR}])(?:\{{(\w+)\}}|([A-Za-z_]\w*))")
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SUBSTITUTION: Final = re.compile(r"`|\$(?![A-Za-z_]|\{[A-Za-z_]\w*\})")
_BEYOND: Final = {
    "a substitution": _SUBSTITUTION,
    "a here-document": re.compile(r"<<"),
    "a condition": re.compile(r"&&|\|\||(?m:(?:^|;)[ \t]*(?:if|case|!)\s)"),
    "a loop": re.compile(r"(?m:(?:^|;)[ \t]*(?:for|while|until|select)\s)"),
    "a pipe": re.compile(r"\|"),
    "a command in the background": re.compile(r"(?<![<>])&(?!>)"),
    "a redirection": re.compile(r"[<>]"),
    "a function, an array or a subshell": re.compile(r"[()]|(?m:(?:^|;)[ \t]*function\s)"),
    "a pattern or a group": re.compile(rf"[*?]|(?<![${KUBELET_DOLLAR}])\{{"),
}

MAX_CHARACTERS: Final = 65_536
_PRINTING: Final = frozenset({"echo", "printf", "export", "readonly", "declare", "local", "read"})
"""Programs whose first word is never a subcommand."""


class ScriptError(ValueError):
    """A script is more than plain commands; ``text`` says where, without words of the script that may be secret."""

    def __init__(self, text: str, what: str) -> None:
        super().__init__(
            f"holds {what}, which is not followed here: write the server's command with its values, such as"
            " exec vllm serve MODEL --port 8000, in a copy, and import that with -f"
        )
        self.text = text


@dataclass(frozen=True)
class Command:
    """One command with its arguments."""

    words: tuple[str, ...]
    env: Mapping[str, str | None] = field(default_factory=dict)
    """Variables that the script sets for it; None for a value that only the running container knows."""
    unknown: frozenset[str] = frozenset()
    """Words with values that only the running container knows."""


def read_script(text: str, env: Mapping[str, str | None]) -> list[Command]:
    """Return the commands of a script, with its assignments as their variables.

    ``env`` are the container's variables; None is a value that the object does
    not hold.

    Raises ScriptError if it is more than plain commands.
    """
    _reject_length(text)
    with_double = _PART.sub(lambda found: _blank(found, keep_double=True), text)
    plain = _PART.sub(lambda found: _blank(found, keep_double=False), text)
    for what, pattern in _BEYOND.items():
        # Double quotes keep a shell from all but substitutions.
        found = pattern.search(with_double if pattern is _SUBSTITUTION else plain)
        if found is not None:
            sign = found[0].strip("; \t\n")
            line = text.count("\n", 0, found.end() - len(found[0].lstrip())) + 1
            raise ScriptError(f"line {line}, {sign}", what)
    variables, exported = dict(env), set[str]()
    commands = []
    for words in _split(text):
        exports = words[0] == "export"
        assigned, rest = _assigned(words[1:] if exports else words, variables, bare_names=exports)
        if not rest:
            variables |= assigned
            # A variable that the container has is exported already.
            exported |= {name for name in assigned if exports or name in env}
            continue
        expanded = []
        for word in rest:
            value, known = _substitute(word, variables)
            parts = [part for part in value.split(_BLANK) if part] if "$" in word else [value]
            expanded.append(([part.replace(_EMPTY, "") for part in parts], known))
        command = tuple(word for part, _ in expanded for word in part)
        unknown = frozenset(word for part, known in expanded if not known for word in part)
        if command:
            given = {name: value for name, value in variables.items() if name in exported} | assigned
            commands.append(Command(command, given, unknown))
    return commands


def shown(words: Sequence[str]) -> str:
    """Return program and subcommand of a command for messages; any other word may be a secret."""
    program = words[0].rpartition("/")[2] if words else ""
    if not re.fullmatch(r"[$\w.{}+-]{1,40}", program):
        return "…"
    has_subcommand = program not in _PRINTING and len(words) > 1 and re.fullmatch(r"[a-z][a-z-]{0,19}", words[1])
    return f"{program} {words[1]}" if has_subcommand else program


def reject_signs(*texts: str) -> None:
    """Raise ScriptError for the characters that stand for syntax here; no script has a use for them."""
    if any(sign in text for text in texts for sign in _SIGNS):
        raise ScriptError("the script", f"one of the private characters U+E000 to U+E00{len(_SIGNS) - 1}")


def _reject_length(text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise ScriptError(f"{len(text)} characters", f"more than {MAX_CHARACTERS} characters")


def _blank(found: re.Match[str], *, keep_double: bool) -> str:
    """Replace a quoted part with as many dots, so that positions stay the same."""
    if found.lastgroup in {"gap", "joint"}:
        return found[0]
    if found.lastgroup == "comment":
        return found["gap"].ljust(len(found[0]))
    if found.lastgroup == "double" and keep_double:
        return re.sub(r"\\.", "..", found[0], flags=re.DOTALL)
    return "." * len(found[0])


def _split(text: str) -> Iterator[list[str]]:
    """Yield the words of each command, as shlex reads them, with dollars told apart."""
    try:
        words = shlex.split(_PART.sub(_mark, text))
    except ValueError as error:
        raise ScriptError("the script", f"an open quote ({error})") from error
    command: list[str] = []
    for word in [*words, _END]:
        if word != _END:
            command.append(word)
        elif command:
            yield command
            command = []


def _mark(found: re.Match[str]) -> str:
    match found.lastgroup:
        case "single":
            return found[0].replace("$", _LITERAL) if found[0] != "''" else _EMPTY
        case "double":
            inner = re.sub(r"\\(.)", lambda escape: _ESCAPED.get(escape[1], escape[0]), found[0], flags=re.DOTALL)
            return inner.replace("$", _QUOTED) if inner != '""' else _EMPTY
        case "comment":
            # The line ends behind it, and with it the command.
            return f" {_END} "
        case "gap":
            blanks = found[0].replace("\\\n", "")
            return f" {_END} " if ";" in blanks or "\n" in blanks else blanks
        case "joint":
            return ""
        case _:
            return _ESCAPED.get(found["escaped"], found[0])


def _assigned(
    words: list[str], variables: Mapping[str, str | None], *, bare_names: bool
) -> tuple[dict[str, str | None], list[str]]:
    """Return the leading assignments, and the words behind them."""
    assigned: dict[str, str | None] = {}
    for index, word in enumerate(words):
        match = _ASSIGNMENT.fullmatch(word)
        if match is not None:
            # export expands all of its words before it sets the first.
            known = variables if bare_names else {**variables, **assigned}
            text, is_known = _substitute(match[2].replace("$", _QUOTED), known)
            # Values that repeat themselves double with each assignment.
            _reject_length(text)
            assigned[match[1]] = text.replace(_EMPTY, "") if is_known else None
        elif bare_names:
            assigned[word] = variables.get(word)
        else:
            return assigned, words[index:]
    return assigned, []


def _substitute(word: str, variables: Mapping[str, str | None]) -> tuple[str, bool]:
    known = True

    def value_of(found: re.Match[str]) -> str:
        nonlocal known
        value = variables.get(found[2] or found[3])
        if value is None:
            known = False
            return f"${found[0][1:]}"
        return _EMPTY + value if found[1] == _QUOTED else re.sub(r"\s+", _BLANK, value)

    return _VARIABLE.sub(value_of, word).replace(_LITERAL, "$"), known
