"""ConfigMaps and Secrets beside a server: the values of variables that it takes from them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from specdecode_operator.kube.untyped import mapping, name_of, objects
from specdecode_operator.migration.sources.workload import Workload, name_in

_VLLM: Final = "vllm"
_WRITTEN_OUT: Final = "its values are written out: a later change of it does not reach the engines"
_Body = Mapping[str, Any]


def with_values(workload: Workload, others: Sequence[_Body]) -> Workload:
    """Return the server with the values of its variables that ConfigMaps of the same file hold.

    Of a Secret only the names of its keys are read: a variable of it stays a reference.
    """
    maps = _named(others, "ConfigMap", workload.namespace)
    secrets = _named(others, "Secret", workload.namespace)
    if not maps and not secrets:
        return workload
    pod, used = dict(workload.pod), set[str]()
    for key in ("containers", "initContainers"):
        if isinstance(pod.get(key), list):
            pod[key] = [
                _resolved(each, maps, secrets, used) if key == "initContainers" or _runs_vllm(each) else each
                for each in pod[key]
            ]
    for name in sorted(used):
        workload.remarks.drop(f"ConfigMap {name}", _WRITTEN_OUT)
    return replace(workload, pod=pod)


def _named(others: Sequence[_Body], kind: str, namespace: str | None) -> dict[str, _Body]:
    near = [each for each in others if each.get("kind") == kind]
    return {name_in(each): each for each in near if mapping(each, "metadata").get("namespace") in (None, namespace)}


def _runs_vllm(container: Any) -> bool:
    return any(_VLLM in str(mapping({"": container}, "").get(key)).lower() for key in ("image", "command", "args"))


def _resolved(container: Any, maps: Mapping[str, _Body], secrets: Mapping[str, _Body], used: set[str]) -> Any:
    if not isinstance(container, dict):
        return container
    from_all: list[dict[str, Any]] = []
    unread = []
    sources = container.get("envFrom")
    for source in sources if isinstance(sources, list) else []:
        found = list(_of_source(source, maps, secrets, used)) if isinstance(source, dict) else []
        from_all += found
        unread += [] if found else [source]
    own = [_of_variable(each, maps, used) for each in objects(container, "env")]
    names = {name_of(each) for each in own}
    env = [*(each for each in from_all if each["name"] not in names), *own]
    rest = {key: value for key, value in container.items() if key not in ("env", "envFrom")}
    return rest | ({"env": env} if env else {}) | ({"envFrom": unread} if unread else {})


def _of_source(
    source: _Body, maps: Mapping[str, _Body], secrets: Mapping[str, _Body], used: set[str]
) -> Iterator[dict[str, Any]]:
    """Return the variables of one envFrom; nothing if its object is not beside the server."""
    prefix = str(source.get("prefix") or "")
    config, secret = name_of(mapping(source, "configMapRef")), name_of(mapping(source, "secretRef"))
    if "configMapRef" in source and config in maps:
        used.add(config)
        for key, value in mapping(maps[config], "data").items():
            yield {"name": f"{prefix}{key}", "value": str(value)}
    elif "secretRef" in source and secret in secrets:
        keys = {**mapping(secrets[secret], "data"), **mapping(secrets[secret], "stringData")}
        for key in keys:
            yield {"name": f"{prefix}{key}", "valueFrom": {"secretKeyRef": {"name": secret, "key": str(key)}}}


def _of_variable(variable: dict[str, Any], maps: Mapping[str, _Body], used: set[str]) -> dict[str, Any]:
    reference = mapping(mapping(variable, "valueFrom"), "configMapKeyRef")
    name, key = name_of(reference), str(reference.get("key"))
    values = mapping(maps.get(name, {}), "data") if reference else {}
    if key not in values:
        return variable
    used.add(name)
    # Two dollars are one to the kubelet: a value of a ConfigMap is text.
    return {"name": name_of(variable), "value": str(values[key]).replace("$(", "$$(")}
