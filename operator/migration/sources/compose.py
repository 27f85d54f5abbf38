"""A file of docker compose: each of its services that starts vLLM."""

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Final

from specdecode_operator.documents.numbers import whole_number
from specdecode_operator.kube.nodes import GPU_RESOURCE
from specdecode_operator.kube.untyped import mapping, objects, texts
from specdecode_operator.migration.builder import MigrationError
from specdecode_operator.migration.sources.container import (
    MOST_USER_ID,
    add_bind,
    add_variable,
    bytes_quantity,
    gpus_of_devices,
)
from specdecode_operator.migration.sources.workload import Remarks, Workload, operand, plain_text

_RESOLVE: Final = "docker compose config writes it out: import what that prints"
_VARIABLE: Final = re.compile(r"\$(?:\{(\w+)[^}]*\}|(\w+))")
_VLLM: Final = re.compile(r"\bvllm\b", re.IGNORECASE)
_OF_OPERATOR: Final = {
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
        if key in _OF_OPERATOR:
            remarks.own(f"{where}.{key}", _OF_OPERATOR[key])
        elif key in _HARMLESS:
            remarks.drop(f"{where}.{key}", "is for the machine that runs it: a pod has its own")
    remarks.ask_for_rest(service, (*_READ, *_OF_OPERATOR, *_HARMLESS), where)
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
    found = _VARIABLE.search(text.replace("$$", ""))
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
