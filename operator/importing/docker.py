"""Read servers from `docker run` commands (podman and nerdctl too) and docker compose files."""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Final

from specdecode_operator.cluster.nodes import GPU_RESOURCE
from specdecode_operator.importing.engine_container import TOKEN_VARIABLES
from specdecode_operator.importing.shell import Command
from specdecode_operator.importing.spec_builder import MigrationError
from specdecode_operator.importing.workload import Remarks, Workload, operand, plain_text
from specdecode_operator.untrusted import mapping, objects, texts, whole_number
from specdecode_operator.vllm.environment import API_KEY_VARIABLE

_UNITS: Final = {"": "", "b": "", "k": "Ki", "m": "Mi", "g": "Gi", "t": "Ti"}
MOST_USER_ID: Final = 2**31 - 1
"""Largest runAsUser and runAsGroup that Kubernetes takes (IsValidUserID of k8s.io/apimachinery)."""

_MOST_GPUS: Final = 99_999
"""More than any machine has."""

_VOLUMES: Final = "/var/lib/docker/volumes"


def as_text(word: str) -> str:
    """Return a word with what a pod would take for the name of a variable written as text."""
    return re.sub(r"\$(?=[$(])", "$$", word)


def add_variable(container: dict[str, Any], name: str, value: str | None, remarks: Remarks) -> None:
    """Give a container a variable; None is one whose value the machine has that runs it."""
    if value is None and name in {API_KEY_VARIABLE, *TOKEN_VARIABLES}:
        # It belongs into a Secret, wherever it comes from.
        value = ""
    if value is None:
        message = "has its value only on the machine that runs it: write NAME=VALUE, and import again"
        remarks.decide("spec.engine.env", name, message)
        return
    container.setdefault("env", []).append({"name": name, "value": as_text(value)})


def add_bind(
    container: dict[str, Any], volumes: list[dict[str, Any]], source: str, target: str, *, read_only: bool
) -> None:
    """Mount a folder of the machine, or a volume by its name, as a pod would."""
    name = f"volume-{len(volumes)}"
    # docker keeps what it calls a volume in a folder of its own.
    is_folder = source.startswith(("/", ".", "~", "$"))
    path = source if is_folder else f"{_VOLUMES}/{source or 'nameless'}/_data"
    volumes.append({"name": name, "hostPath": {"path": path}})
    mount = {"name": name, "mountPath": target} | ({"readOnly": True} if read_only else {})
    container.setdefault("volumeMounts", []).append(mount)


def bytes_quantity(amount: str) -> str:
    """Return docker's amount of memory, such as 20g, as Kubernetes writes it; anything else as it is."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?)\s?([bkmgt]?)i?b?", str(amount).lower())
    return f"{match[1]}{_UNITS[match[2]]}" if match else str(amount)


def gpus_of_devices(value: str) -> int | None:
    """Return how many GPUs ``--gpus`` means; None for all that there are."""
    text = value.strip("\"'")
    if (number := whole_number(text, _MOST_GPUS)) is not None:
        return number
    devices = re.search(r"device=([^\"']+)", text)
    if devices:
        return len([each for each in devices[1].split(",") if each and "=" not in each])
    count = re.search(r"count=(\d{1,5})\b", text)
    return int(count[1]) if count else None


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
_DOCKER_RUN_HARMLESS: Final = frozenset(
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
    elif name in _DOCKER_RUN_HARMLESS:
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


_RESOLVE: Final = "docker compose config writes it out: import what that prints"
_COMPOSE_VARIABLE: Final = re.compile(r"\$(?:\{(\w+)[^}]*\}|(\w+))")
_VLLM: Final = re.compile(r"\bvllm\b", re.IGNORECASE)
_COMPOSE_OF_OPERATOR: Final = {
    "container_name": "the object has a name of its own",
    "depends_on": "an engine waits for nothing but its models",
    "healthcheck": "the operator's own probes allow for a long start",
    "ipc": "the operator mounts shared memory itself",
    "ports": "the one port is spec.serving.port, behind a Service",
    "restart": "the kubelet starts an engine again that ends",
    "runtime": "pods get their GPUs from the device plugin",
    "shm_size": "the operator mounts shared memory itself",
    "stop_grace_period": "the operator adds up the steps in which a pod ends",
}
_HARMLESS: Final = (
    "dns", "expose", "extra_hosts", "hostname", "init", "labels", "logging", "network_mode", "networks", "platform",
    "profiles", "pull_policy", "stdin_open", "stop_signal", "tty", "ulimits",
)  # fmt: skip
_READ: Final = (
    "command", "cpus", "deploy", "entrypoint", "env_file", "environment", "gpus", "image", "mem_limit", "scale",
    "user", "volumes", "working_dir",
)  # fmt: skip


def is_compose(body: Mapping[str, Any]) -> bool:
    """Return whether an object is a file of compose."""
    return "kind" not in body and isinstance(body.get("services"), dict)


def read_compose(body: Mapping[str, Any]) -> list[Workload]:
    """Return the services that start vLLM.

    Raises
    ------
    MigrationError
        When one has values that only compose fills in.
    """
    services = mapping(body, "services")
    return [
        _read(str(name), service)
        for name, service in services.items()
        if isinstance(service, dict) and _runs_vllm(service)
    ]


def _runs_vllm(service: Mapping[str, Any]) -> bool:
    return any(_VLLM.search(str(service.get(key) or "")) for key in ("image", "command", "entrypoint"))


def _read(name: str, service: Mapping[str, Any]) -> Workload:
    where, remarks = f"services.{name}", Remarks()
    container: dict[str, Any] = {"name": "vllm"}
    volumes: list[dict[str, Any]] = []
    for key, entry in (("image", "image"), ("entrypoint", "command"), ("command", "args")):
        if service.get(key):
            words = list(_words(service[key], f"{where}.{key}"))
            container[entry] = words[0] if key == "image" else words
    _take_variables(service, container, remarks, where)
    for source, target, read_only in _binds(service):
        add_bind(container, volumes, source, target, read_only=read_only)
    if service.get("working_dir"):
        container["workingDir"] = str(service["working_dir"])
    if (user := whole_number(service.get("user"), MOST_USER_ID)) is not None:
        container["securityContext"] = {"runAsUser": user}
    elif service.get("user"):
        remarks.decide("spec.podTemplate", f"{where}.user", "a pod takes a user by number: write it so")
    gpus = _take_resources(service, container, remarks, where)
    for key in service:
        if key in _COMPOSE_OF_OPERATOR:
            remarks.own(f"{where}.{key}", _COMPOSE_OF_OPERATOR[key])
        elif key in _HARMLESS:
            remarks.drop(f"{where}.{key}", "is for the machine that runs it: a pod has its own")
    remarks.ask_for_rest(service, (*_READ, *_COMPOSE_OF_OPERATOR, *_HARMLESS), where)
    replicas = mapping(service, "deploy").get("replicas", service.get("scale"))
    return Workload(
        kind="docker compose",
        name=str(service.get("container_name") or name),
        pod={"containers": [container], "volumes": volumes},
        where=where,
        spec={"replicas": replicas} if replicas is not None else {},
        says_gpus=gpus is not None,
        outside=True,
        end=f"docker compose stop {operand(name)}",
        remarks=remarks,
    )


def _words(value: Any, where: str) -> Iterator[str]:
    """Return text as compose splits it, or a list, with what it fills in refused; a pod's own variables are escaped."""
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
            raise MigrationError(where, f"${{{name}}}", f"is filled in from elsewhere: {_RESOLVE}")
        # Two dollars are one to compose and to a pod alike.
        yield word


def _filled_in(text: str) -> str | None:
    """Return the first variable that compose fills in."""
    found = _COMPOSE_VARIABLE.search(text.replace("$$", ""))
    return (found[1] or found[2]) if found else None


def _take_variables(service: Mapping[str, Any], container: dict[str, Any], remarks: Remarks, where: str) -> None:
    given = service.get("environment")
    pairs: Iterator[tuple[str, Any]] = (
        ((str(name), value) for name, value in given.items())
        if isinstance(given, dict)
        else (
            (name, value if equals else None)
            for name, equals, value in (each.partition("=") for each in texts(service, "environment"))
        )
    )
    for name, value in pairs:
        text = None if value is None else plain_text(value)
        is_known = text is not None and _filled_in(text) is None
        add_variable(container, name, str(text).replace("$$", "$") if is_known else None, remarks)
    if service.get("env_file"):
        remarks.decide("spec.engine.env", f"{where}.env_file", f"is not read here: {_RESOLVE}")


def _binds(service: Mapping[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """Return source, target and whether it is only read, of each volume."""
    given = service.get("volumes")
    for each in given if isinstance(given, list) else []:
        if isinstance(each, dict):
            if each.get("type") != "tmpfs" and each.get("target"):
                yield str(each.get("source") or ""), str(each["target"]), each.get("read_only") is True
        elif ":" in str(each):
            source, _, rest = str(each).partition(":")
            # A default of compose holds a colon, too.
            source, rest = (
                (str(each).rpartition(":/")[0], "/" + str(each).rpartition(":/")[2])
                if "${" in source
                else (source, rest)
            )
            yield source, rest.partition(":")[0], rest.endswith(":ro")


def _take_resources(service: Mapping[str, Any], container: dict[str, Any], remarks: Remarks, where: str) -> int | None:
    """Take GPUs, cores and memory; return how many GPUs there are, None where it does not say."""
    resources = mapping(mapping(service, "deploy"), "resources")
    limits = mapping(resources, "limits")
    amounts = {
        "cpu": limits.get("cpus") or service.get("cpus"),
        "memory": limits.get("memory") or service.get("mem_limit"),
    }
    taken = {"cpu": plain_text(amounts["cpu"])} if amounts["cpu"] else {}
    taken |= {"memory": bytes_quantity(plain_text(amounts["memory"]))} if amounts["memory"] else {}
    devices = [
        *objects(mapping(resources, "reservations"), "devices"),
        *objects(service, "gpus"),
    ]
    gpus = [_gpus(each) for each in devices if _is_nvidia(each)]
    for each in devices:
        if not _is_nvidia(each):
            remarks.decide(f"{where}.deploy.resources", str(each.get("driver")), "only NVIDIA GPUs are planned for")
    found = sum(each for each in gpus if each is not None) if gpus and None not in gpus else None
    if found:
        taken[GPU_RESOURCE] = str(found)
    if taken:
        container["resources"] = {"limits": taken}
    rest = {key: value for key, value in mapping(service, "deploy").items() if key not in ("resources", "replicas")}
    for key in rest:
        remarks.drop(
            f"{where}.deploy.{key}", "is for the machines that run it: the operator plans and rolls out itself"
        )
    return found


def _is_nvidia(device: Mapping[str, Any]) -> bool:
    return device.get("driver") in (None, "nvidia", "cdi")


def _gpus(device: Mapping[str, Any]) -> int | None:
    if texts(device, "device_ids"):
        return len(texts(device, "device_ids"))
    return gpus_of_devices(str(device.get("count", "all")))
