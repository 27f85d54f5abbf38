"""Read the workers of NVIDIA Dynamo's DynamoGraphDeployment, in its v1alpha1 and v1beta1 forms."""

import shlex
from collections.abc import Callable
from typing import Any, Final

from specdecode_operator.cluster.nodes import GPU_RESOURCE
from specdecode_operator.importing.server_command import script_index, without_log
from specdecode_operator.importing.spec_builder import (
    MigrationError,
    Object,
    Remarks,
    Workload,
    broken,
    in_namespace,
    name_in,
    namespace_of,
    plain_text,
)
from specdecode_operator.problems import MISSING, shown, shown_or_missing
from specdecode_operator.untrusted import mapping, objects, texts, whole_number
from specdecode_operator.vllm.kv_transfer import ServingRole

KIND: Final = "DynamoGraphDeployment"
_MOST_NODES: Final = 1024
_Part = tuple[str, Any, str, Callable[[Object, str, Any, str], Workload | None]]
_ROLES: Final = frozenset(ServingRole)
_OF_DYNAMO: Final = "is read by Dynamo, which the operator does not use"


def read_graph(body: Object) -> list[Workload]:
    """Return the components that define a container, including those that do not run vLLM, such as the frontend."""
    spec = _object(body, "spec", "")
    if "components" in spec:
        listed = spec["components"]
        if not isinstance(listed, list):
            raise MigrationError("spec.components", shown(listed), "must be a list of components")
        parts: list[_Part] = [
            (str(index), part, f"spec.components[{index}]", _component) for index, part in enumerate(listed)
        ]
    else:
        services = _object(spec, "services", "spec.")
        parts = [(str(name), part, f"spec.services.{name}", _service) for name, part in services.items()]
    found = []
    for name, part, where, read in parts:
        try:
            workload = read(body, name, part, where)
        except MigrationError as error:
            workload = broken(KIND, f"{name_in(body)}-{name}".lower(), where, error, namespace_of(body))
        if workload is not None:
            found.append(workload)
    return found


def _component(body: Object, index: str, part: Any, where: str) -> Workload | None:
    """Return a component of v1beta1, which has a complete pod template."""
    part = _checked(part, where)
    if part.get("podTemplate") is None:
        return None
    template = _object(part, "podTemplate", f"{where}.")
    pod = _object(template, "spec", f"{where}.podTemplate.")
    name = str(part.get("name") or index)
    keys = {"type": part.get("type")}
    return _workload(body, name, part, where, pod, f"{where}.podTemplate.spec.containers", (), keys, template)


def _service(body: Object, name: str, part: Any, where: str) -> Workload | None:
    """Return a service of v1alpha1: parts of a pod, and its main container with resources in Dynamo's own form."""
    part = _checked(part, where)
    if part.get("extraPodSpec") is None:
        return None
    extra = _object(part, "extraPodSpec", f"{where}.")
    if extra.get("mainContainer") is None:
        return None
    place = f"{where}.extraPodSpec"
    main = _object(extra, "mainContainer", f"{place}.")
    resources = mapping(main, "resources")
    own = mapping(part, "resources")
    container = {
        **main,
        "name": "main",
        "env": [*objects(part, "envs"), *objects(main, "env")],
        "resources": {kind: {**_amounts(own, kind), **mapping(resources, kind)} for kind in ("requests", "limits")},
    }
    claims = [each for each in objects(part, "volumeMounts") if each.get("mountPoint")]
    container["volumeMounts"] = [
        *({"name": str(each.get("name")), "mountPath": str(each["mountPoint"])} for each in claims),
        *objects(main, "volumeMounts"),
    ]
    volumes = [
        {"name": str(each.get("name")), "persistentVolumeClaim": {"claimName": str(each.get("name"))}}
        for each in claims
    ]
    sidecars = objects(extra, "containers")
    pod = {
        **{key: value for key, value in extra.items() if key != "mainContainer"},
        "containers": [container, *sidecars],
        "volumes": [*volumes, *objects(extra, "volumes")],
    }
    fields = (f"{place}.mainContainer", *(f"{place}.containers[{index}]" for index in range(len(sidecars))))
    keys = {key: part.get(key) for key in ("subComponentType", "componentType")}
    return _workload(body, name, part, where, pod, fields[0], fields, keys, mapping(part, "extraPodMetadata"))


def _amounts(resources: Object, kind: str) -> dict[str, Any]:
    given = mapping(resources, kind)
    found = {key: given[key] for key in ("cpu", "memory") if given.get(key) is not None}
    if given.get("gpu") is not None:
        found[str(given.get("gpuType") or GPU_RESOURCE)] = plain_text(given["gpu"])
    return found


def _workload(  # noqa: PLR0913, PLR0917  one part each
    body: Object,
    name: str,
    part: Object,
    where: str,
    pod: Object,
    containers: str,
    fields: tuple[str, ...],
    roles: Object,
    metadata: Object,
) -> Workload:
    remarks, nodes = Remarks(), 1
    if part.get("multinode") is not None:
        count = _object(part, "multinode", f"{where}.").get("nodeCount", 2)
        if type(count) is not int or (whole_number(count, _MOST_NODES) or 0) < 1:
            raise MigrationError(f"{where}.multinode.nodeCount", shown(count), f"must be between 1 and {_MOST_NODES}")
        nodes = count
    role_key, role = next(
        ((key, ServingRole(value)) for key, value in roles.items() if isinstance(value, str) and value in _ROLES),
        ("", None),
    )
    engines = pod.get("containers")
    if isinstance(engines, list):
        engines = [_with_command(each) if isinstance(each, dict) else each for each in engines]
    for key in ("modelRef", "eppConfig", "scalingAdapter", "envFromSecret", "sharedMemory", "sharedMemorySize"):
        if part.get(key):
            remarks.drop(f"{where}.{key}", _OF_DYNAMO)
    # Dynamo names a Deployment GRAPH-SERVICE, in lower case.
    named = f"{name_in(body)}-{name}".lower()
    return Workload(
        kind="Dynamo component",
        name=named,
        pod={**pod, "containers": engines},
        where=containers,
        containers=fields,
        metadata={key: mapping(metadata, key) for key in ("labels", "annotations")},
        namespace=namespace_of(body),
        spec={"replicas": part["replicas"]} if part.get("replicas") is not None else {},
        nodes=nodes,
        end=f"kubectl scale deployment/{shlex.quote(named)} --replicas=0{in_namespace(namespace_of(body))}",
        role=role,
        role_field=f"{where}.{role_key}" if role else "",
        remarks=remarks,
    )


def _with_command(container: dict[str, Any]) -> dict[str, Any]:
    """Return a container without its image unless it runs Dynamo's vLLM worker, because the frontend has the same."""
    command, args = texts(container, "command") or ["python3"], texts(container, "args")
    written = [*command, *args]
    script = script_index(written)
    if script is not None:
        # Dynamo's examples pipe the output of a script into a log.
        written[script] = "\n".join(map(without_log, written[script].split("\n")))
    kept = {key: value for key, value in container.items() if key != "image" or "dynamo.vllm" in " ".join(written)}
    if isinstance(container.get("command", []), list) and isinstance(container.get("args", []), list):
        kept |= {"command": written[: len(command)], "args": written[len(command) :]}
    return kept


def _checked(value: Any, where: str) -> Object:
    if not isinstance(value, dict):
        raise MigrationError(where, shown_or_missing(value), "must be an object")
    return value


def _object(body: Object, key: str, prefix: str) -> dict[str, Any]:
    value = body.get(key)
    if not isinstance(value, dict):
        raise MigrationError(f"{prefix}{key}", MISSING if value is None else shown(value), "must be an object")
    return value
