"""Finds vLLM's server in what a container starts: command and args, shell scripts, python -m."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Final

from specdecode_operator.migration.ledger import AdoptionError
from specdecode_operator.migration.shell import Command, Script, read_script

_SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "zsh"})
_SERVER_MODULES: Final = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_KUBELET_VARIABLE: Final = re.compile(r"\$\$|\$\(([^)\s]*)\)")
"""third_party/forked/golang/expansion/expand.go in Kubernetes: two dollars are one, $(NAME) is a variable."""

_NAMED_VARIABLE: Final = re.compile(r"\$[({]?(\w+)")
_BEFORE_COMMANDS: Final = frozenset({"exec", "env", "nohup", "time"})
_HARMLESS: Final = frozenset(
    {"set", "exec", "true", ":", "ulimit", "echo", "unset", "wait", "if", "fi", "[", "[[", "test", "}"}
)
"""What scripts do beside starting the engine that leaves no trace in it."""


@dataclass
class Start:
    """How a container starts vLLM's server.

    Attributes
    ----------
    words
        What follows ``vllm serve``, or the module of the server.
    env
        Variables that the script sets for it.
    program
        What was written for vLLM, where it is a path of the image.
    beside
        Commands that the script runs beside it, shortened.
    variables
        Variables of the container whose values the words hold.
    unknown
        Words that hold what only the running container knows.
    unknown_variables
        Variables of the script that do.
    """

    words: list[str]
    env: dict[str, str] = field(default_factory=dict)
    program: str | None = None
    beside: list[str] = field(default_factory=list)
    variables: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    unknown_variables: set[str] = field(default_factory=set)


def find_start(container: Mapping[str, Any], where: str) -> Start | None:
    """Return how a container starts vLLM's server; None when it starts something else.

    Raises
    ------
    AdoptionError
        When command or args are no lists of text, or the script cannot be read.
    """
    env = plain_environment(container)
    command, args = (_words(container, key, where, env) for key in ("command", "args"))
    if command:
        start = _of_command([*command, *args], env, where)
    else:
        # The image's own entrypoint is the server.
        start = _of_image(str(container.get("image") or ""), args)
    if start is not None:
        written = " ".join(str(word) for key in ("command", "args") for word in container.get(key) or [])
        start.unknown |= _unknown(container, env).intersection(start.words)
        start.variables = {found[1] for found in _NAMED_VARIABLE.finditer(written.replace("$$", ""))}
    return start


def plain_environment(container: Mapping[str, Any]) -> dict[str, str]:
    """Return the container's variables that have their value in the object."""
    variables = container.get("env")
    return {
        str(each["name"]): str(each.get("value") or "")
        for each in (variables if isinstance(variables, list) else [])
        if isinstance(each, dict) and "name" in each and "valueFrom" not in each
    }


def container_commands(container: Mapping[str, Any]) -> Script:
    """Return what a container runs; nothing where its script cannot be read."""
    env = plain_environment(container)
    words = [word for key in ("command", "args") for word in _words(container, key, "container", env)]
    script = _script(words) if words else None
    if script is None:
        return Script([Command(tuple(words), {})], unknown=_unknown(container, env))
    try:
        return read_script(*script, env)
    except ValueError:
        return Script()


def secret_variable(word: str) -> str | None:
    """Return the variable that a whole word stands for, where its value is not in the object."""
    found = re.fullmatch(r"\$\((\w+)\)|\$\{?(\w+)\}?", word)
    return (found[1] or found[2]) if found else None


def _words(container: Mapping[str, Any], key: str, where: str, env: Mapping[str, str]) -> list[str]:
    given = container.get(key)
    if given is None:
        return []
    if not isinstance(given, list):
        raise AdoptionError(f"{where}.{key}", str(given), "must be a list of text, one argument each")
    return [_KUBELET_VARIABLE.sub(lambda found: _kubelet(found, env), str(word)) for word in given]


def _unknown(container: Mapping[str, Any], env: Mapping[str, str]) -> set[str]:
    """Words with a variable of the kubelet whose value is not in the object."""
    written = [str(word) for key in ("command", "args") for word in container.get(key) or []]
    return {
        _KUBELET_VARIABLE.sub(lambda found: _kubelet(found, env), word)
        for word in written
        if any(found[0] != "$$" and found[1] not in env for found in _KUBELET_VARIABLE.finditer(word))
    }


def _kubelet(found: re.Match[str], env: Mapping[str, str]) -> str:
    return "$" if found[0] == "$$" else env.get(found[1], found[0])


def _of_image(image: str, args: Sequence[str]) -> Start | None:
    if "vllm" not in image.lower():
        return None
    words = list(args[1:] if args[:1] == ["serve"] else args)
    return Start(words)


def _of_command(words: list[str], env: Mapping[str, str], where: str) -> Start | None:
    script = _script(words)
    if script is None:
        start = _of_statement(words)
        if start is None and any("vllm" in PurePosixPath(word).name for word in words[:4]):
            raise AdoptionError(
                f"{where}.command", " ".join(words[:4]), "runs no vLLM server: only vllm serve and its API server are"
            )
        return start
    try:
        return _of_script(*script, env, where)
    except ValueError as error:
        raise AdoptionError(f"{where}.args", script[0][:60], f"cannot be read as a shell script: {error}") from error


def _script(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """Return the script that a shell is given, and its own arguments."""
    if PurePosixPath(words[0]).name not in _SHELLS:
        return None
    for index, word in enumerate(words[1:], start=1):
        if word.startswith("-") and not word.startswith("--") and word.endswith("c"):
            # The word after the script is $0.
            return (words[index + 1], list(words[index + 3 :])) if index + 1 < len(words) else None
    return None


def _of_script(text: str, arguments: Sequence[str], env: Mapping[str, str], where: str) -> Start | None:
    found: Start | None = None
    beside: list[str] = []
    script = read_script(text, arguments, env)
    for command in script.commands:
        start = _of_statement(command.words)
        if start is not None and found is not None:
            raise AdoptionError(f"{where}.args", text[:60], "starts vLLM more than once: keep the one to import")
        if start is not None:
            found = _with_variables(start, command, script)
        elif command.words[0] not in _HARMLESS:
            beside.append(" ".join(command.words[:4]))
    if found is not None:
        found.beside = beside
        found.unknown = script.unknown.intersection(found.words)
    return found


def _with_variables(start: Start, command: Command, script: Script) -> Start:
    """Add to the start what its script sets for it: by export, before the command, and through env."""
    given = {**script.exported, **command.assigned, **start.env}
    unknown = {name for name, value in given.items() if value is None or f"{name}={value}" in script.unknown}
    start.env = {name: value for name, value in given.items() if value is not None and name not in unknown}
    start.unknown_variables = script.unknown_variables | unknown
    return start


def _assignments(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables that env is given before a command, and the command."""
    assigned: dict[str, str] = {}
    for index, word in enumerate(words):
        match = _ASSIGNMENT.fullmatch(word)
        if match is None:
            return assigned, list(words[index:])
        assigned[match[1]] = match[2]
    return assigned, []


def _of_statement(words: Sequence[str]) -> Start | None:
    """Return the start in one command, after exec, env and the like."""
    words, env = list(words), dict[str, str]()
    while words and PurePosixPath(words[0]).name in _BEFORE_COMMANDS:
        assigned, words = _assignments(words[1:])
        env |= assigned
    if not words:
        return None
    name = PurePosixPath(words[0]).name
    program = words[0] if "/" in words[0] else None
    if name == "vllm":
        return Start(list(words[2:]), env, program) if words[1:2] == ["serve"] else None
    if re.fullmatch(r"python[\d.]*", name):
        rest = _of_python(words[1:])
        return None if rest is None else Start(rest, env, program)
    return None


def _of_python(words: Sequence[str]) -> list[str] | None:
    """Return what follows the server's module or file."""
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
