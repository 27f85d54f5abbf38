"""A command line or a start script: `vllm serve …` as text, or as the words of one command."""

import re
import shlex
from collections.abc import Sequence
from typing import Final

from specdecode_operator.migration.builder import MigrationError
from specdecode_operator.migration.server_command import is_harmless, script_index
from specdecode_operator.migration.shell import MAX_CHARACTERS, Command, ScriptError, read_script, shown
from specdecode_operator.migration.sources.docker_run import is_docker_run, is_of_docker, read_docker_run
from specdecode_operator.migration.sources.workload import Workload

_STARTS: Final = re.compile(
    r"^[ \t]*(?:(?:[A-Za-z_]\w*=\S*|sudo|exec|env|nohup|time)[ \t]+)*"
    r"(?:(?:\S*/)?(?:docker|podman|nerdctl)[ \t]|(?:\S*/)?vllm[ \t]+serve\b|(?:\S*/)?python[\d.]*[ \t].*\bvllm\b)",
    re.MULTILINE,
)
_OBJECT: Final = re.compile(r"^(?:apiVersion|kind|services|servingEngineSpec)[ \t]*:|\A\s*\{", re.MULTILINE)
_PROMPT: Final = re.compile(r"^[ \t]*[$#][ \t]+(?=\S+[ \t])(?=(?:sudo |docker |podman |nerdctl |vllm ))", re.MULTILINE)

_NOHUP: Final = re.compile(r"^([ \t]*(?:[A-Za-z_]\w*=\S*[ \t]+|sudo[ \t]+)*)nohup[ \t]+", re.MULTILINE)
_LOG_WORD: Final = re.compile(r"(?:[12&]?>>?[^\s'\"<>|&;]+|[12]>&[12])")
_LOG_WORDS: Final = re.compile(r"(?:[12&]?>>?|\|&?[ \t]+tee(?:[ \t]+-a)?)[ \t]+[^\s'\"<>|&;]+")
_MOST_LOGS: Final = 8
_TEE_WORDS: Final = 4


def is_command_text(text: str) -> bool:
    """Return whether a text is a command line or a script that starts vLLM, and no YAML."""
    if len(text) > MAX_CHARACTERS:
        return False
    return _OBJECT.search(text) is None and _STARTS.search(_PROMPT.sub("", text)) is not None


def read_command_text(text: str) -> Workload:
    """Return the server that a command line or a script starts, in a container or not.

    Raises
    ------
    MigrationError
        When the script is more than plain commands, or starts several containers.
    """
    # Where its log goes, and that the shell goes on, is no part of the server.
    text = "\n".join(map(_without_log, _NOHUP.sub(r"\1", _PROMPT.sub("", text)).split("\n")))
    try:
        commands = read_script(text, {})
    except ScriptError as error:
        raise MigrationError("command line", error.text, str(error)) from error
    if len(commands) == 1 and (script := _script_of(commands[0])) is not None:
        return read_command_text(script)
    runs = [command for command in commands if is_docker_run(command.words)]
    if len(runs) > 1:
        raise MigrationError("command line", f"{len(runs)} containers", "import them one at a time")
    if runs:
        workload = read_docker_run(runs[0])
        for command in commands:
            if command is not runs[0] and not is_of_docker(command.words) and not is_harmless(command):
                message = "only the container is imported: do it in the image, or in an init container"
                workload.remarks.decide("command line", shown(command.words), message)
        return workload
    # What a pod would take for the name of a variable is the shell's here.
    return _started_by(["bash", "-c", text.replace("$$", "$$$$")])


def read_words(words: Sequence[str]) -> Workload:
    """Return the server that the words of one command start.

    Raises
    ------
    MigrationError
        As `read_command_text`.
    """
    # All of it in one word is a line in quotes.
    return read_command_text(words[0] if len(words) == 1 else shlex.join(words))


def _script_of(command: Command) -> str | None:
    """Return the script that a shell is given, where nothing beside it matters."""
    at = script_index(command.words)
    if at is None or at + 1 < len(command.words) or command.env or command.unknown:
        return None
    return command.words[at]


def _started_by(command: list[str]) -> Workload:
    container = {"name": "vllm", "command": command}
    return Workload(
        kind="command line",
        name="",
        pod={"containers": [container]},
        where="command line",
        says_gpus=False,
        outside=True,
    )


def _without_log(line: str) -> str:
    """Return a line without what sends a log to a file at its end, and the server into the background."""
    kept = line.rstrip(" \t")
    if kept.endswith("&") and not kept.endswith("&&"):
        kept = kept[:-1].rstrip(" \t")
    for _ in range(_MOST_LOGS):
        words = kept.rsplit(maxsplit=_TEE_WORDS)
        taken = next((count for count in (4, 3, 2) if _LOG_WORDS.fullmatch(" ".join(words[-count:]))), 0)
        if not taken and _LOG_WORD.fullmatch(words[-1] if words else ""):
            taken = 1
        if not taken or len(words) <= taken:
            break
        kept = kept.rsplit(maxsplit=taken)[0]
    return kept
