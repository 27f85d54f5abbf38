"""Read servers from `docker run` commands (podman and nerdctl too) and docker compose files."""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Final

from specdecode_operator.cluster.nodes import GPU_RESOURCE
from specdecode_operator.importing.engine_container import TOKEN_VARIABLES
from specdecode_operator.importing.server_command import Command
from specdecode_operator.importing.spec_builder import (
    SOURCE_KEYS,
    MigrationError,
    Object,
    Remarks,
    Workload,
    operand,
    plain_text,
)
from specdecode_operator.untrusted import mapping, objects, texts, whole_number
from specdecode_operator.vllm.environment import API_KEY_VARIABLE

_MOST_USER_ID: Final = 2**31 - 1
"""Largest runAsUser and runAsGroup that Kubernetes takes (IsValidUserID of k8s.io/apimachinery)."""

_OF_MACHINE: Final = "only applies to the machine that runs it; a pod has its own"


def _as_text(word: str) -> str:
    """Escape text that a pod would expand as a variable."""
    return re.sub(r"\$(?=[$(])", "$$", word)


@dataclass
class _Container:
    body: dict[str, Any] = field(default_factory=lambda: {"name": "vllm"})
    volumes: list[dict[str, Any]] = field(default_factory=list)
    remarks: Remarks = field(default_factory=Remarks)
    gpus: int | None = None
    name: str = ""

    def add_variable(self, name: str, value: str | None) -> None:
        """Add a variable; None is a value that only the machine has that runs it."""
        if value is None and name not in {API_KEY_VARIABLE, *TOKEN_VARIABLES}:
            message = "has its value only on the machine that runs it: write NAME=VALUE, and import again"
            self.remarks.decide("spec.engine.env", name, message)
        else:
            # A token belongs into a Secret, wherever its value comes from.
            self.body.setdefault("env", []).append({"name": name, "value": _as_text(value or "")})

    def add_mount(self, source: str, target: str, *, read_only: bool) -> None:
        name = f"volume-{len(self.volumes)}"
        # docker stores a named volume in its own folder.
        is_folder = source.startswith(("/", ".", "~", "$"))
        path = source if is_folder else f"/var/lib/docker/volumes/{source or 'nameless'}/_data"
        self.volumes.append({"name": name, "hostPath": {"path": path}})
        mount = {"name": name, "mountPath": target} | ({"readOnly": True} if read_only else {})
        self.body.setdefault("volumeMounts", []).append(mount)

    def add_volume(self, text: str) -> None:
        """Add a volume that is written as SOURCE:TARGET or SOURCE:TARGET:ro."""
        source, _, rest = text.partition(":")
        if "${" in source:
            # The default of a variable may contain a colon.
            source, _, rest = text.rpartition(":/")
            rest = f"/{rest}"
        if target := rest.partition(":")[0]:
            self.add_mount(source, target, read_only=rest.endswith(":ro"))

    def limit(self, resource: str, amount: str) -> None:
        if resource == "memory":
            match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?)\s?([bkmgt]?)i?b?", amount.lower())
            units = {"": "", "b": "", "k": "Ki", "m": "Mi", "g": "Gi", "t": "Ti"}
            amount = f"{match[1]}{units[match[2]]}" if match else amount
        self.body.setdefault("resources", {}).setdefault("limits", {})[resource] = amount


def gpus_of_devices(value: str) -> int | None:
    """Return the number of GPUs that ``--gpus`` requests; None for all."""
    text = value.strip("\"'")
    if (number := whole_number(text, 99_999)) is not None:
        return number
    if devices := re.search(r"device=([^\"']+)", text):
        return len([each for each in devices[1].split(",") if each and "=" not in each])
    count = re.search(r"count=(\d{1,5})\b", text)
    return int(count[1]) if count else None


_PROGRAMS: Final = frozenset({"docker", "podman", "nerdctl"})
_RUN: Final = SOURCE_KEYS["docker run"]


def is_docker_run(words: Sequence[str]) -> bool:
    """Test whether a command starts a container."""
    return _image_options(words) is not None


def is_of_docker(words: Sequence[str]) -> bool:
    """Test whether a command is one of docker's, such as docker pull."""
    return any(PurePosixPath(word).name in _PROGRAMS for word in words[:2])


def read_docker_run(command: Command) -> Workload:
    """Return the container that one command starts; raise MigrationError if it names no image."""
    words = list(_image_options(command.words) or ())
    run = _Container()
    while words and words[0].startswith("-") and words[0] != "-":
        for name, value in _option(words):
            _take(name, value, run, command.unknown)
    if words[:1] == ["--"]:
        words.pop(0)
    if not words:
        raise MigrationError("command line", "docker run", "names no image: name the one that holds vLLM")
    if unknown := sorted(command.unknown.intersection(words)):
        names = ", ".join(sorted({name for word in unknown for name in re.findall(r"\$\{?(\w+)", word)}))
        raise MigrationError(
            "command line", names, "are replaced on the machine that runs it: write the values, and import again"
        )
    run.body["image"], *args = map(_as_text, words)
    if args:
        run.body["args"] = args
    if run.gpus is not None:
        run.limit(GPU_RESOURCE, str(run.gpus))
    return Workload(
        kind="docker run",
        name=run.name,
        pod={"containers": [run.body], "volumes": run.volumes},
        where="docker run",
        says_gpus=run.gpus is not None,
        outside=True,
        end=f"docker stop {operand(run.name)}" if run.name else "",
        remarks=run.remarks,
    )


def _image_options(words: Sequence[str]) -> Sequence[str] | None:
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
    word = words.pop(0)
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        if not equals and name not in _RUN["switches"] and words:
            value = words.pop(0)
        yield name, value
        return
    letters = word[1:]
    while letters:
        name, letters = _RUN["letters"].get(letters[0], f"-{letters[0]}"), letters[1:]
        if name in _RUN["switches"]:
            yield name, ""
            continue
        # The rest is the letter's value; an unknown letter takes no further word.
        value = letters.removeprefix("=") if letters else words.pop(0) if words and name.startswith("--") else ""
        yield name, value
        return


def _take(name: str, value: str, run: _Container, unknown: frozenset[str]) -> None:
    is_unknown = bool(value) and any(word.endswith(value) for word in unknown)
    if is_unknown and name == "--env":
        run.add_variable(value.partition("=")[0], None)
    elif is_unknown and name != "--volume":
        run.remarks.decide(
            "command line", name, "has its value only on the machine that runs it: write the value, and import again"
        )
    elif name in _TAKERS or name in _RUN["own"]:
        if name in _TAKERS:
            _TAKERS[name](value, run)
        if name in _RUN["own"]:
            run.remarks.own(name, _RUN["own"][name])
    elif name in _RUN["dropped"]:
        run.remarks.drop(name, _OF_MACHINE)
    else:
        message = "is a setting that the pods of the operator do not have: set it in podTemplate, or remove it"
        run.remarks.decide("spec.podTemplate", name, message)


def _take_mount(value: str, run: _Container) -> None:
    parts = dict(part.partition("=")[::2] for part in value.split(","))
    target = parts.get("target") or parts.get("destination") or parts.get("dst")
    if target and parts.get("type") != "tmpfs":
        run.add_mount(parts.get("source") or parts.get("src") or "", target, read_only="ro" in parts)


def _take_user(value: str, run: _Container) -> None:
    user, _, group = value.partition(":")
    numbers = {"runAsUser": whole_number(user, _MOST_USER_ID), "runAsGroup": whole_number(group, _MOST_USER_ID)}
    context = {key: number for key, number in numbers.items() if number is not None}
    if context:
        run.body["securityContext"] = context
    else:
        run.remarks.decide("spec.podTemplate", f"--user {value}", "a pod needs a numeric user: write --user UID:GID")


_ENV_FILE: Final = "contains variables that import does not read: write them as --env NAME=VALUE, and import again"
_TAKERS: Final[Mapping[str, Callable[[str, _Container], None]]] = {
    "--gpus": lambda value, run: setattr(run, "gpus", gpus_of_devices(value)),
    "--env": lambda value, run: run.add_variable(*(value.split("=", 1) if "=" in value else (value, None))),
    "--env-file": lambda value, run: run.remarks.decide("spec.engine.env", f"--env-file {value}", _ENV_FILE),
    "--volume": lambda value, run: run.add_volume(value),
    "--mount": _take_mount,
    "--memory": lambda value, run: run.limit("memory", value),
    "--cpus": lambda value, run: run.limit("cpu", value),
    "--user": _take_user,
    "--workdir": lambda value, run: run.body.update(workingDir=value),
    "--entrypoint": lambda value, run: run.body.update(command=[value] if value else []),
    "--name": lambda value, run: setattr(run, "name", value),
}


_RESOLVE: Final = "import the output of docker compose config, which contains it"
_COMPOSE: Final = SOURCE_KEYS["docker compose"]


def is_compose(body: Object) -> bool:
    """Test whether an object is a compose file."""
    return "kind" not in body and isinstance(body.get("services"), dict)


def read_compose(body: Object) -> list[Workload]:
    """Return the services that start vLLM; raise MigrationError if one has values that only compose fills in."""
    return [
        _read(str(name), service)
        for name, service in mapping(body, "services").items()
        if isinstance(service, dict)
        and any(re.search(r"(?i)\bvllm\b", str(service.get(key) or "")) for key in ("image", "command", "entrypoint"))
    ]


def _read(name: str, service: Object) -> Workload:
    where, container = f"services.{name}", _Container()
    remarks = container.remarks
    for key, entry in (("image", "image"), ("entrypoint", "command"), ("command", "args")):
        if service.get(key):
            words = list(_words(service[key], f"{where}.{key}"))
            container.body[entry] = words[0] if key == "image" else words
    _take_variables(service, container, where)
    _take_volumes(service, container)
    if service.get("working_dir"):
        container.body["workingDir"] = str(service["working_dir"])
    if (user := whole_number(service.get("user"), _MOST_USER_ID)) is not None:
        container.body["securityContext"] = {"runAsUser": user}
    elif service.get("user"):
        remarks.decide("spec.podTemplate", f"{where}.user", "a pod needs a numeric user: write UID:GID")
    _take_resources(service, container, where)
    for key in service:
        if key in _COMPOSE["own"]:
            remarks.own(f"{where}.{key}", _COMPOSE["own"][key])
        elif key in _COMPOSE["dropped"]:
            remarks.drop(f"{where}.{key}", _OF_MACHINE)
    remarks.ask_for_rest(service, (*_COMPOSE["read"], *_COMPOSE["own"], *_COMPOSE["dropped"]), where)
    replicas = mapping(service, "deploy").get("replicas", service.get("scale"))
    return Workload(
        kind="docker compose",
        name=str(service.get("container_name") or name),
        pod={"containers": [container.body], "volumes": container.volumes},
        where=where,
        spec={"replicas": replicas} if replicas is not None else {},
        says_gpus=container.gpus is not None,
        outside=True,
        end=f"docker compose stop {operand(name)}",
        remarks=remarks,
    )


def _words(value: Any, where: str) -> Iterator[str]:
    if isinstance(value, str):
        try:
            words = shlex.split(value)
        except ValueError as error:
            raise MigrationError(where, "the text", f"holds an open quote ({error}): close it") from error
    else:
        words = [plain_text(each) for each in value] if isinstance(value, list) else []
    for word in words:
        name = _filled_in(word)
        if name is not None:
            raise MigrationError(where, f"${{{name}}}", f"is filled in from another place: {_RESOLVE}")
        # Compose and a pod both read two dollars as one.
        yield word


def _filled_in(text: str) -> str | None:
    found = re.search(r"\$(?:\{(\w+)[^}]*\}|(\w+))", text.replace("$$", ""))
    return (found[1] or found[2]) if found else None


def _take_variables(service: Object, container: _Container, where: str) -> None:
    given = service.get("environment")
    if isinstance(given, dict):
        pairs = [(str(name), value) for name, value in given.items()]
    else:
        written = [each.partition("=") for each in texts(service, "environment")]
        pairs = [(name, value if equals else None) for name, equals, value in written]
    for name, value in pairs:
        text = None if value is None else plain_text(value)
        is_known = text is not None and _filled_in(text) is None
        container.add_variable(name, str(text).replace("$$", "$") if is_known else None)
    if service.get("env_file"):
        container.remarks.decide("spec.engine.env", f"{where}.env_file", f"is not read by import: {_RESOLVE}")


def _take_volumes(service: Object, container: _Container) -> None:
    given = service.get("volumes")
    for each in given if isinstance(given, list) else []:
        if not isinstance(each, dict):
            container.add_volume(str(each))
        elif each.get("type") != "tmpfs" and each.get("target"):
            source, read_only = str(each.get("source") or ""), each.get("read_only") is True
            container.add_mount(source, str(each["target"]), read_only=read_only)


def _take_resources(service: Object, container: _Container, where: str) -> None:
    resources = mapping(mapping(service, "deploy"), "resources")
    limits = mapping(resources, "limits")
    if cpus := limits.get("cpus") or service.get("cpus"):
        container.limit("cpu", plain_text(cpus))
    if memory := limits.get("memory") or service.get("mem_limit"):
        container.limit("memory", plain_text(memory))
    gpus: list[int | None] = []
    for device in [*objects(mapping(resources, "reservations"), "devices"), *objects(service, "gpus")]:
        if device.get("driver") not in (None, "nvidia", "cdi"):
            message = "the operator only supports NVIDIA GPUs"
            container.remarks.decide(f"{where}.deploy.resources", str(device.get("driver")), message)
        elif ids := texts(device, "device_ids"):
            gpus.append(len(ids))
        else:
            gpus.append(gpus_of_devices(str(device.get("count", "all"))))
    known = [each for each in gpus if each is not None]
    if gpus and len(known) == len(gpus):
        container.gpus = sum(known)
    if container.gpus:
        container.limit(GPU_RESOURCE, str(container.gpus))
    for key in mapping(service, "deploy"):
        if key not in ("resources", "replicas"):
            message = "only applies to the machines that run it; the operator plans and rolls out itself"
            container.remarks.drop(f"{where}.deploy.{key}", message)
