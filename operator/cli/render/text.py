"""Rendered objects as text: YAML that people read, and the command lines of engines as a shell takes them."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import yaml

from specdecode_operator.api.base import Body
from specdecode_operator.cli.outputs.printing import yaml_text
from specdecode_operator.deployment.objects.workload import WORKLOAD_KINDS
from specdecode_operator.deployment.spec.pod_template_merge import ENGINE_CONTAINER
from specdecode_operator.kube.resources import DEPLOYMENT
from specdecode_operator.problems import printable

_LINE_WIDTH: Final = 120
_ENGINE: Final = "vllm"


def documents_text(objects: Iterable[Body]) -> str:
    """Return objects as documents of one YAML file, each after ``---``."""
    return "".join(f"---\n{yaml_text(body, Dumper=_Readable, sort_keys=True, width=_LINE_WIDTH)}" for body in objects)


def command_text(objects: Sequence[Body]) -> str:
    """Return what each engine of the objects is started with: image, environment, and a line an argument."""
    return "\n\n".join(
        _command(f"{body['kind']} {body['metadata']['name']}{role}", pod)
        for body in objects
        if body["kind"] in WORKLOAD_KINDS
        for role, pod in _pods(body)
    )


def _pods(workload: Body) -> Iterator[tuple[str, Body]]:
    if workload["kind"] == DEPLOYMENT.kind:
        yield "", workload["spec"]["template"]["spec"]
    else:
        group = workload["spec"]["leaderWorkerTemplate"]
        yield ", leader", group["leaderTemplate"]["spec"]
        yield ", workers", group["workerTemplate"]["spec"]


def _command(title: str, pod: Body) -> str:
    (engine,) = (each for each in pod["containers"] if each["name"] == ENGINE_CONTAINER)
    words = [*engine.get("command", []), *engine.get("args", [])]
    # With a cache of models a script comes first, which becomes the engine.
    words = words[words.index(_ENGINE) :] if _ENGINE in words else words
    variables = [f"{each['name']}={_in_shell(each['value'])}" for each in engine.get("env", []) if "value" in each]
    lines = [*variables, *_by_argument(words)]
    return f"# {title}: {printable(engine['image'])}\n" + " \\\n  ".join(lines)


def _by_argument(words: Sequence[str]) -> list[str]:
    """Return a line an argument, its values behind it; the first has the command."""
    lines: list[str] = []
    for word in words:
        if lines and not word.startswith("--"):
            lines[-1] += f" {_in_shell(word)}"
        else:
            lines.append(_in_shell(word))
    return lines


def _in_shell(word: str) -> str:
    """Return a container's argument as a shell takes it: the kubelet makes one dollar of two."""
    plain = word.replace("$$", "$")
    if plain.replace("\n", "").isprintable():
        return shlex.quote(plain)
    # What would do something to a terminal, as bash, zsh and POSIX's shell of 2024 write it.
    return f"$'{''.join(map(_in_dollar_quotes, plain))}'"


def _in_dollar_quotes(character: str) -> str:
    if character in "'\\":
        return f"\\{character}"
    return character if character.isprintable() else "".join(f"\\{byte:03o}" for byte in character.encode())


class _Readable(yaml.SafeDumper):
    """Writes texts of several lines as such, and equal values out each time."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002  yaml's signature
        return True


def _text(dumper: yaml.SafeDumper, value: Any) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Readable.add_representer(str, _text)
_Readable.add_multi_representer(str, _text)
