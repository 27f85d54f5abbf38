"""Parse plain shell scripts, and find the vLLM server in a container's command: command and args, scripts, python -m.

A plain script is a sequence of simple commands, with variables whose values are known.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Final

from specdecode_operator.cluster.manifests import KUBELET_VARIABLE, variables_in
from specdecode_operator.importing.spec_builder import SOURCE_KEYS, MigrationError, Object
from specdecode_operator.untrusted import name_of, objects
from specdecode_operator.vllm.kv_transfer import ServingRole

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
"""Quotes, separators of words and commands (which may precede a comment), line continuations, and escapes.

Quantifiers are possessive, so that a long script takes linear time.
"""

_LITERAL, _QUOTED, _END, _BLANK, _EMPTY = "\ue000", "\ue001", "\ue002", "\ue003", "\ue004"
"""Stand in for a dollar that is text, a dollar in double quotes, the end of a command, a blank that divides a
variable's value into words, and empty quotes: shlex drops the quotes that distinguish these."""

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

_LOG_WORD: Final = re.compile(r"(?:[12&]?>>?[^\s'\"<>|&;]+|[12]>&[12])")
_LOG_WORDS: Final = re.compile(r"(?:[12&]?>>?|\|&?[ \t]+tee(?:[ \t]+-a)?)[ \t]+[^\s'\"<>|&;]+")
MAX_CHARACTERS: Final = 65_536
_PRINTING: Final = frozenset({"echo", "printf", "export", "readonly", "declare", "local", "read"})
"""Programs whose first word is never a subcommand."""


class ScriptError(ValueError):
    """A script is more than plain commands.

    ``text`` locates the problem without words of the script that may be secret.
    """

    def __init__(self, text: str, what: str) -> None:
        super().__init__(
            f"holds {what}, which import does not evaluate: write the server's command with its values, such as"
            " exec vllm serve MODEL --port 8000, in a copy, and import that with -f"
        )
        self.text = text


@dataclass(frozen=True)
class Command:
    """One command with its arguments."""

    words: tuple[str, ...]
    env: Mapping[str, str | None] = field(default_factory=dict)
    """Variables that the script sets for the server; None for a value that only the running container has."""
    unknown: frozenset[str] = frozenset()
    """Words with values that only the running container has."""


def read_script(text: str, env: Mapping[str, str | None]) -> list[Command]:
    """Return the commands of a script, with its assignments as their variables; raise ScriptError for other syntax.

    ``env`` are the container's variables; None is a value that the object does not hold.
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


def without_log(line: str) -> str:
    """Return a line of a script without the redirection, pipe or ampersand that sends its output to a log."""
    kept = line.rstrip(" \t")
    if kept.endswith("&") and not kept.endswith("&&"):
        kept = kept[:-1].rstrip(" \t")
    for _ in range(8):
        words = kept.rsplit(maxsplit=4)
        taken = next((count for count in (4, 3, 2) if _LOG_WORDS.fullmatch(" ".join(words[-count:]))), 0)
        if not taken and _LOG_WORD.fullmatch(words[-1] if words else ""):
            taken = 1
        if not taken or len(words) <= taken:
            break
        kept = kept.rsplit(maxsplit=taken)[0]
    return kept


def shown(words: Sequence[str]) -> str:
    """Return program and subcommand of a command for messages; any other word may be a secret."""
    program = words[0].rpartition("/")[2] if words else ""
    if not re.fullmatch(r"[$\w.{}+-]{1,40}", program):
        return "…"
    has_subcommand = program not in _PRINTING and len(words) > 1 and re.fullmatch(r"[a-z][a-z-]{0,19}", words[1])
    return f"{program} {words[1]}" if has_subcommand else program


def reject_signs(*texts: str) -> None:
    """Raise ScriptError for the placeholder characters of this module, which no script needs."""
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
    """Yield the words of each command, as shlex reads them, with kinds of dollars distinguished."""
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


_SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "zsh"})
_SERVER_MODULES: Final = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server", "dynamo.vllm")
_SERVER_TEXT: Final = re.compile(r"\bvllm\s|vllm[./]entrypoints")
_DYNAMO: Final = SOURCE_KEYS["dynamo.vllm"]
_DYNAMO_ROLES: Final = {"--is-prefill-worker": ServingRole.PREFILL, "--is-decode-worker": ServingRole.DECODE}
_NAMED_VARIABLE: Final = re.compile(r"\$[({]?(\w+)")
_HARMLESS: Final = re.compile(
    r"(set( -[euxo]+| pipefail)+|(ulimit|echo) .*|true|:|#!.*|ray (start|stop|status).*"
    r"|((ba)?sh )?\S*multi-node-serving\.sh (leader|worker).*)",
    re.DOTALL,
)
"""Commands of start scripts that do not change the server. Ray only starts the ranks of several nodes, which the
operator does itself."""


@dataclass
class ServerCommand:
    """How a container starts vLLM's server."""

    arguments: list[str]
    env: dict[str, str | None] = field(default_factory=dict)
    """Variables that the script sets for the server; None for a value that only the running container has."""
    program: str | None = None
    unknown: frozenset[str] = frozenset()
    """Arguments with values that only the running container has."""
    used_variables: set[str] = field(default_factory=set)
    harmless: list[str] = field(default_factory=list)
    """Omitted commands without effect on the server, such as ``ulimit``, as `shown` prints them."""
    others: list[str] = field(default_factory=list)
    """Omitted commands that may have an effect, as `shown` prints them."""
    role: ServingRole | None = None
    """Side of a prefill/decode split that Dynamo's own flags name."""


NO_VLLM: Final = "does not run vLLM"
"""Start of the message about a container without a vLLM server."""


def find_server_command(container: Object, where: str) -> ServerCommand | None:
    """Return the command of vLLM's server in a container; None if it starts something else."""
    written = " ".join(_words(container, "command", where) + _words(container, "args", where))
    try:
        commands = container_commands(container, where)
    except ScriptError as error:
        # The script of a sidecar is not imported.
        if not _SERVER_TEXT.search(written) and not _has_vllm_image(container):
            return None
        raise MigrationError(f"{where}.args", error.text, str(error)) from error
    found = [(command, _server_of(command)) for command in commands]
    servers = [(command, server) for command, server in found if server is not None]
    others = [command for command, server in found if server is None]
    if len(servers) > 1:
        fix = "starts vLLM more than once: keep the one to import"
        raise MigrationError(f"{where}.args", shown(servers[1][0].words), fix)
    if servers:
        server = servers[0][1]
        server.used_variables = {found[1] for found in _NAMED_VARIABLE.finditer(written.replace("$$", ""))}
        for each in others:
            (server.harmless if is_harmless(each) else server.others).append(shown(each.words))
        return server
    first = [word for command in commands for word in command.words[:4]]
    if any(PurePosixPath(word).name == "vllm" or word.startswith("vllm.") for word in first):
        fix = f"{NO_VLLM}: import reads vllm serve or the API server, started directly, with exec or with env"
        raise MigrationError(f"{where}.command", "; ".join(shown(each.words) for each in others), fix)
    return None


def is_harmless(command: Command) -> bool:
    """Return whether a command has no effect on the server."""
    return _HARMLESS.fullmatch(" ".join(command.words)) is not None


def container_commands(container: Object, where: str) -> list[Command]:
    """Return the commands that a container runs; raise ScriptError if a script is more than plain commands."""
    command, args = _words(container, "command", where), _words(container, "args", where)
    if not command:
        if not _has_vllm_image(container):
            return []
        # The image's own entrypoint is the server.
        command = ["vllm"] if args[:1] == ["serve"] else ["vllm", "serve"]
    env = environment(container)
    written = [*command, *args]
    script_at = script_index(written)
    if script_at is not None:
        reject_signs(written[script_at], *(value for value in env.values() if value is not None))
        return read_script(_by_kubelet(written[script_at], env, unknown=f"{KUBELET_DOLLAR}{{%s}}"), env)
    words = tuple(_by_kubelet(word, env, unknown="$(%s)") for word in written)
    unknown = [
        word
        for word, before in zip(words, written, strict=True)
        if any(env.get(name) is None for name in variables_in(before))
    ]
    return [Command(words, {}, frozenset(unknown))]


def plain_environment(container: Object) -> dict[str, str]:
    """Return the container's variables that have their value in the object."""
    return {name: value for name, value in environment(container).items() if value is not None}


def secret_variable(word: str) -> str | None:
    """Return the variable that a whole word refers to, if its value is not in the object."""
    found = re.fullmatch(r"\$\((\w+)\)|\$\{?(\w+)\}?", word)
    return (found[1] or found[2]) if found else None


def environment(container: Object) -> dict[str, str | None]:
    """Return the container's variables as its kubelet sets them; None for a value from elsewhere."""
    env: dict[str, str | None] = {}
    for each in objects(container, "env"):
        if "name" not in each:
            continue
        value = str(each.get("value") or "")
        unknown = each.get("valueFrom") is not None
        unknown |= any(name in env and env[name] is None for name in variables_in(value))
        # A value may name the variables above it.
        env[name_of(each)] = None if unknown else _by_kubelet(value, env, unknown="")
    return env


def _words(container: Object, key: str, where: str) -> list[str]:
    given = container.get(key)
    if given is None:
        return []
    if not isinstance(given, list):
        raise MigrationError(
            f"{where}.{key}", shown(str(given).split()), "must be a list of strings, one for each argument"
        )
    return [str(word) for word in given]


def _by_kubelet(text: str, env: Mapping[str, str | None], *, unknown: str) -> str:
    def value_of(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        value = env.get(found[1])
        return value if value is not None else unknown % found[1] if found[1] in env else found[0]

    return KUBELET_VARIABLE.sub(value_of, text)


def script_index(words: Sequence[str]) -> int | None:
    """Return the index of the script that a shell receives with ``-c``, also combined with other letters."""
    if PurePosixPath(words[0]).name not in _SHELLS:
        return None
    for index, word in enumerate(words[1:-1], start=1):
        if re.fullmatch(r"-\w*c", word):
            return index + 1
    return None


def _has_vllm_image(container: Object) -> bool:
    return "vllm" in str(container.get("image")).lower()


def _server_of(command: Command) -> ServerCommand | None:
    words, env = list(command.words), dict(command.env)
    while words and PurePosixPath(words[0]).name in {"exec", "env"}:
        words.pop(0)
        while words and (match := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[0], re.DOTALL)):
            env[match[1]] = None if words.pop(0) in command.unknown else match[2]
    if not words:
        return None
    name = PurePosixPath(words[0]).name
    arguments = None
    if name == "vllm" and words[1:2] == ["serve"]:
        arguments = words[2:]
    elif re.fullmatch(r"python[\d.]*", name):
        arguments = _of_python(words[1:])
    if arguments is None:
        return None
    program = words[0] if "/" in words[0] else None
    role = None
    if "dynamo.vllm" in words[: len(words) - len(arguments)]:
        arguments, role = _without_dynamo(arguments)
    return ServerCommand(arguments, env, program, command.unknown.intersection(arguments), role=role)


def _without_dynamo(words: Sequence[str]) -> tuple[list[str], ServingRole | None]:
    """Return vLLM's arguments of a worker of Dynamo, and its side of a prefill/decode split."""
    kept: list[str] = []
    role, rest = None, list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        flag = name.replace("_", "-").replace("--no-", "--", 1) if name.startswith("--") else name
        if flag in _DYNAMO["values"]:
            while not equals and rest and not rest[0].startswith("-"):
                value = rest.pop(0)
            if flag == "--disaggregation-mode" and value in set(ServingRole):
                role = ServingRole(value)
        elif flag in _DYNAMO["switches"]:
            role = _DYNAMO_ROLES.get(name.replace("_", "-"), role)
        else:
            kept.append(word)
    return kept, role


def _of_python(words: Sequence[str]) -> list[str] | None:
    for index, word in enumerate(words):
        if word == "-m":
            module = words[index + 1 : index + 2]
            if module and module[0] in _SERVER_MODULES:
                return list(words[index + 2 :])
            is_cli = module in (["vllm"], ["vllm.entrypoints.cli.main"])
            return list(words[index + 3 :]) if is_cli and words[index + 2 : index + 3] == ["serve"] else None
        if word.endswith("vllm/entrypoints/openai/api_server.py"):
            return list(words[index + 1 :])
        if not word.startswith("-"):
            return None
    return None
