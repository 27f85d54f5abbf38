"""Find the vLLM server in a container's command: command and args, shell scripts, python -m."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Final

from specdecode_operator.importing.shell import KUBELET_DOLLAR, Command, ScriptError, read_script, reject_signs, shown
from specdecode_operator.importing.spec_builder import MigrationError, Object
from specdecode_operator.untrusted import name_of, objects

_SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "zsh"})
_SERVER_MODULES: Final = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")
_SERVER_TEXT: Final = re.compile(r"\bvllm\s|vllm[./]entrypoints")
_KUBELET_VARIABLE: Final = re.compile(r"\$\$|\$\(([^)\s]{0,255}+)\)")
"""third_party/forked/golang/expansion/expand.go in Kubernetes: two dollars are one, $(NAME) is a variable."""

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
    """Variables that the script sets for it; None for a value that only the running container knows."""
    program: str | None = None
    unknown: frozenset[str] = frozenset()
    """Arguments with values that only the running container knows."""
    used_variables: set[str] = field(default_factory=set)
    harmless: list[str] = field(default_factory=list)
    """Commands beside it that are left out, such as ``ulimit``, as `shown` prints them."""
    others: list[str] = field(default_factory=list)
    """Commands beside it that may matter, as `shown` prints them."""


def find_server_command(container: Object, where: str) -> ServerCommand | None:
    """Return how a container starts vLLM's server; None if it starts something else.

    Raises MigrationError if command or args are not lists of text, or the script is more than plain commands.
    """
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
        fix = "runs no vLLM server: only vllm serve and its API server are, started directly, by exec or by env"
        raise MigrationError(f"{where}.command", "; ".join(shown(each.words) for each in others), fix)
    return None


def is_harmless(command: Command) -> bool:
    """Return whether a server is the same without this command beside it."""
    return _HARMLESS.fullmatch(" ".join(command.words)) is not None


def container_commands(container: Object, where: str) -> list[Command]:
    """Return the commands that a container runs, as its kubelet and its shell read them.

    Raises MigrationError if command or args are not lists of text, ScriptError if a script is more than plain commands.
    """
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
    """Return the variable that a whole word stands for, if its value is not in the object."""
    found = re.fullmatch(r"\$\((\w+)\)|\$\{?(\w+)\}?", word)
    return (found[1] or found[2]) if found else None


def variables_in(text: str) -> set[str]:
    """Return the variables that the kubelet replaces in a word, or in the value of another variable."""
    return {found[1] for found in _KUBELET_VARIABLE.finditer(text) if found[1] is not None}


def environment(container: Object) -> dict[str, str | None]:
    """Return the container's variables as its kubelet sets them; None for a value from elsewhere."""
    env: dict[str, str | None] = {}
    for each in objects(container, "env"):
        if "name" not in each:
            continue
        value = str(each.get("value") or "")
        unknown = any(name in env and env[name] is None for name in variables_in(value))
        # A value may name the variables above it.
        env[name_of(each)] = None if "valueFrom" in each or unknown else _by_kubelet(value, env, unknown="")
    return env


def _words(container: Object, key: str, where: str) -> list[str]:
    given = container.get(key)
    if given is None:
        return []
    if not isinstance(given, list):
        raise MigrationError(f"{where}.{key}", shown(str(given).split()), "must be a list of text, one argument each")
    return [str(word) for word in given]


def _by_kubelet(text: str, env: Mapping[str, str | None], *, unknown: str) -> str:
    def value_of(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        value = env.get(found[1])
        return value if value is not None else unknown % found[1] if found[1] in env else found[0]

    return _KUBELET_VARIABLE.sub(value_of, text)


def script_index(words: Sequence[str]) -> int | None:
    """Return which word is the script that a shell is given by ``-c``, alone or with other letters."""
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
    return ServerCommand(arguments, env, program, command.unknown.intersection(arguments))


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
