"""`docker run …`, and podman's and nerdctl's alike, as a container of a pod."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Final

from specdecode_operator.documents.numbers import whole_number
from specdecode_operator.kube.nodes import GPU_RESOURCE
from specdecode_operator.migration.builder import MigrationError
from specdecode_operator.migration.shell import Command
from specdecode_operator.migration.sources.container import (
    MOST_USER_ID,
    add_bind,
    add_variable,
    as_text,
    bytes_quantity,
    gpus_of_devices,
)
from specdecode_operator.migration.sources.workload import Remarks, Workload, operand

_VARIABLE: Final = re.compile(r"\$\{?(\w+)")
_PROGRAMS: Final = frozenset({"docker", "podman", "nerdctl"})
_SWITCHES: Final = frozenset(
    {
        "--detach", "--disable-content-trust", "--help", "--init", "--interactive", "--no-healthcheck",
        "--oom-kill-disable", "--privileged", "--publish-all", "--quiet", "--read-only", "--replace", "--rm",
        "--sig-proxy", "--tty",
    }
)  # fmt: skip
_LETTERS: Final = {
    "a": "--attach", "c": "--cpu-shares", "d": "--detach", "e": "--env", "h": "--hostname", "i": "--interactive",
    "l": "--label", "m": "--memory", "P": "--publish-all", "p": "--publish", "q": "--quiet", "t": "--tty",
    "u": "--user", "v": "--volume", "w": "--workdir",
}  # fmt: skip
_OF_OPERATOR: Final = {
    "--shm-size": "the operator mounts shared memory itself",
    "--ipc": "the operator mounts shared memory itself",
    "--restart": "the kubelet starts an engine again that ends",
    "--runtime": "pods get their GPUs from the device plugin",
    "--publish": "the one port is spec.serving.port, behind a Service",
    "--name": "the object has a name of its own",
    "--health-cmd": "the operator's own probes allow for a long start",
    "--stop-timeout": "the operator adds up the steps in which a pod ends",
}
_HARMLESS: Final = frozenset(
    {
        "--add-host", "--attach", "--cpu-shares", "--detach", "--disable-content-trust", "--dns", "--expose",
        "--health-interval", "--health-retries", "--health-start-period", "--health-timeout", "--hostname", "--init",
        "--interactive", "--label", "--log-driver", "--log-opt", "--memory-swap", "--net", "--network",
        "--no-healthcheck", "--platform", "--publish-all", "--pull", "--quiet", "--replace", "--rm", "--sig-proxy",
        "--tty", "--ulimit",
    }
)  # fmt: skip


@dataclass
class _Run:
    """The container so far."""

    container: dict[str, Any] = field(default_factory=lambda: {"name": "vllm"})
    volumes: list[dict[str, Any]] = field(default_factory=list)
    remarks: Remarks = field(default_factory=Remarks)
    gpus: int | None = None
    name: str = ""


def is_docker_run(words: Sequence[str]) -> bool:
    """Return whether a command starts a container."""
    return _image_options(words) is not None


def is_of_docker(words: Sequence[str]) -> bool:
    """Return whether a command is one of docker's own, such as docker pull."""
    return any(PurePosixPath(word).name in _PROGRAMS for word in words[:2])


def read_docker_run(command: Command) -> Workload:
    """Return the container that one command starts.

    Raises
    ------
    MigrationError
        When it names no image.
    """
    words = list(_image_options(command.words) or ())
    run = _Run()
    while words and words[0].startswith("-") and words[0] != "-":
        for name, value in _option(words):
            _take(name, value, run, command.unknown)
    if words[:1] == ["--"]:
        words.pop(0)
    if not words:
        raise MigrationError("command line", "docker run", "names no image: name the one that holds vLLM")
    if unknown := sorted(command.unknown.intersection(words)):
        names = ", ".join(sorted({name for word in unknown for name in _VARIABLE.findall(word)}))
        raise MigrationError(
            "command line", names, "are filled in where it runs: write the values out, and import again"
        )
    run.container["image"], *args = map(as_text, words)
    if args:
        run.container["args"] = args
    if run.gpus is not None:
        run.container.setdefault("resources", {}).setdefault("limits", {})[GPU_RESOURCE] = str(run.gpus)
    return Workload(
        kind="docker run",
        name=run.name,
        pod={"containers": [run.container], "volumes": run.volumes},
        where="docker run",
        says_gpus=run.gpus is not None,
        outside=True,
        end=f"docker stop {operand(run.name)}" if run.name else "",
        remarks=run.remarks,
    )


def _image_options(words: Sequence[str]) -> Sequence[str] | None:
    """Return what follows ``docker run``."""
    rest = list(words)
    while rest and (rest[0] in {"sudo", "exec"} or re.fullmatch(r"[A-Za-z_]\w*=.*", rest[0])):
        rest.pop(0)
    if not rest or PurePosixPath(rest[0]).name not in _PROGRAMS:
        return None
    rest.pop(0)
    if rest[:1] == ["container"]:
        rest.pop(0)
    return rest[1:] if rest[:1] in (["run"], ["create"]) else None


def _option(words: list[str]) -> Iterator[tuple[str, str]]:
    """Take one word of options off, with the word behind it where that is its value."""
    word = words.pop(0)
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        if not equals and name not in _SWITCHES and words:
            value = words.pop(0)
        yield name, value
        return
    letters = word[1:]
    while letters:
        name, letters = _LETTERS.get(letters[0], f"-{letters[0]}"), letters[1:]
        if name in _SWITCHES:
            yield name, ""
            continue
        # What follows the letter is its value; a flag that is not known here takes none.
        value = letters.removeprefix("=") if letters else words.pop(0) if words and name.startswith("--") else ""
        yield name, value
        return


def _take(name: str, value: str, run: _Run, unknown: frozenset[str]) -> None:
    is_unknown = bool(value) and any(word.endswith(value) for word in unknown)
    if is_unknown and name == "--env":
        add_variable(run.container, value.partition("=")[0], None, run.remarks)
    elif is_unknown and name != "--volume":
        run.remarks.decide("command line", name, "has its value only where it runs: write it out, and import again")
    elif name in _TAKERS:
        _TAKERS[name](value, run)
        if name in _OF_OPERATOR:
            run.remarks.own(name, _OF_OPERATOR[name])
    elif name in _OF_OPERATOR:
        run.remarks.own(name, _OF_OPERATOR[name])
    elif name in _HARMLESS:
        run.remarks.drop(name, "is for the machine that runs it: a pod has its own")
    else:
        message = "gives the container what a pod of the operator has not: say it in podTemplate, or remove it"
        run.remarks.decide("spec.podTemplate", name, message)


def _take_gpus(value: str, run: _Run) -> None:
    run.gpus = gpus_of_devices(value)


def _take_env(value: str, run: _Run) -> None:
    name, equals, text = value.partition("=")
    add_variable(run.container, name, text if equals else None, run.remarks)


def _take_env_file(value: str, run: _Run) -> None:
    message = "holds variables that are not read here: write them as --env NAME=VALUE, and import again"
    run.remarks.decide("spec.engine.env", f"--env-file {value}", message)


def _take_volume(value: str, run: _Run) -> None:
    source, _, rest = value.partition(":")
    target = rest.partition(":")[0]
    if target:
        add_bind(run.container, run.volumes, source, target, read_only=rest.endswith(":ro"))


def _take_mount(value: str, run: _Run) -> None:
    parts = dict(part.partition("=")[::2] for part in value.split(","))
    target = parts.get("target") or parts.get("destination") or parts.get("dst") or ""
    if parts.get("type") == "tmpfs" or not target:
        return
    add_bind(run.container, run.volumes, parts.get("source") or parts.get("src") or "", target, read_only="ro" in parts)


def _take_amount(resource: str, value: str, run: _Run) -> None:
    quantity = value if resource == "cpu" else bytes_quantity(value)
    run.container.setdefault("resources", {}).setdefault("limits", {})[resource] = quantity


def _take_user(value: str, run: _Run) -> None:
    user, _, group = value.partition(":")
    context: Mapping[str, Any] = {
        key: number
        for key, text in (("runAsUser", user), ("runAsGroup", group))
        if (number := whole_number(text, MOST_USER_ID)) is not None
    }
    if context:
        run.container["securityContext"] = dict(context)
    else:
        run.remarks.decide("spec.podTemplate", f"--user {value}", "a pod takes a user by number: write --user UID:GID")


def _set(key: str, value: Any, run: _Run) -> None:
    run.container[key] = value


_TAKERS: Final[Mapping[str, Callable[[str, _Run], None]]] = {
    "--gpus": _take_gpus,
    "--env": _take_env,
    "--env-file": _take_env_file,
    "--volume": _take_volume,
    "--mount": _take_mount,
    "--memory": lambda value, run: _take_amount("memory", value, run),
    "--cpus": lambda value, run: _take_amount("cpu", value, run),
    "--user": _take_user,
    "--workdir": lambda value, run: _set("workingDir", value, run),
    "--entrypoint": lambda value, run: _set("command", [value] if value else [], run),
    "--name": lambda value, run: setattr(run, "name", value),
}
