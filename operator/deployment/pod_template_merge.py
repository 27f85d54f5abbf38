"""Merge podTemplate into rendered pods, and reject fields that it may not set.

The merge is a strategic merge patch as in `kubectl patch`: lists with a merge key are merged by element, other
lists are replaced. https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/
Containers run as a non-root user unless podTemplate sets another one.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import PodTemplate, SpecDecodeDeploymentSpec
from specdecode_operator.cluster.nodes import GPU_RESOURCE, PRODUCT_LABEL
from specdecode_operator.cluster.resources import ENGINE_CONTAINER, SIDECAR
from specdecode_operator.enums import Platform
from specdecode_operator.problems import Problem, shown
from specdecode_operator.untrusted import mapping, name_of, objects
from specdecode_operator.vllm.environment import owned_variable_problems

_SPEC = "spec.podTemplate.spec"
_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    **dict.fromkeys(("resourceClaims", "claims"), "name"),
}
_CONFINED: Final = {"securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}}
# Base of added containers: leaving out a securityContext must not grant more than setting one may.
_ADDED: Final[Mapping[str, Any]] = {"containers": _CONFINED, "initContainers": _CONFINED}
_PROTECTED_IN_ENGINE = {
    **dict.fromkeys(("command", "args"), "is set by the operator; use spec.engine.extraArgs for further arguments"),
    "image": "use spec.engine.image",
    "ports": "use spec.serving.port",
    **dict.fromkeys(
        ("startupProbe", "readinessProbe", "livenessProbe"), "is set by the operator, which needs it for rollouts"
    ),
    "lifecycle": "is set by the operator to drain the engine",
    "envFrom": "could override the operator's variables; list single variables in env",
}
CLAIM: Final = "specdecode-gpus"
"""Name of the claim of GPUs in a pod, and of the request in the claim."""
DOWNLOAD_TARGET, DOWNLOAD_DRAFT, DOWNLOAD_ADAPTER = "download-target", "download-draft", "download-adapter"
PREPARE = "prepare-emulation"
FILES_VOLUME, SOCKETS_VOLUME = "specdecode-recorder", "specdecode-sockets"
FILES_PATH, SOCKETS_PATH = "/specdecode/recorder", "/specdecode/sockets"
OWN_VOLUMES = frozenset({"models", "cache", "tmp", "shm", "engine-config", "tls", FILES_VOLUME, SOCKETS_VOLUME})
OWN_MOUNTS = frozenset(
    {
        *("/models", "/tmp", "/dev/shm", "/compiled", "/etc/specdecode", "/etc/specdecode-tls"),  # noqa: S108
        *(FILES_PATH, SOCKETS_PATH),
    }
)
# Nodes and gateways need seconds to notice that a deleted pod left the Service. The engine keeps serving for this long,
# because after TERM it answers new requests with 500 (vllm/v1/engine/core.py, state SHUTTING_DOWN).
PRE_STOP_S = 10
TEARDOWN_S = 20  # From the last answer to the end of the process; 9 s were measured
SHORTEST_GRACE_S = PRE_STOP_S + TEARDOWN_S + 1  # Below this the kubelet would kill an engine that still answers
_PLANNED_RESOURCES = {
    Platform.GPU: {GPU_RESOURCE: "use spec.parallelism"},
    Platform.CPU: {"memory": "use spec.accelerator.memoryGiB", "cpu": "use spec.accelerator.cpuCores"},
}


def merge(base: Any, patch: Any, field: str = "") -> Any:
    """Return ``base``, the value of ``field``, with a strategic merge patch applied; the inputs are not changed."""
    if isinstance(base, dict) and isinstance(patch, dict):
        merged = dict(base)
        for key, value in patch.items():
            if value is None:
                merged.pop(key, None)
            elif key in base or key in _ADDED:
                merged[key] = merge(base.get(key, []), value, key)
            else:
                merged[key] = value
        return merged
    if isinstance(base, list) and isinstance(patch, list) and field in _MERGE_KEYS:
        key = _MERGE_KEYS[field]
        elements = {element[key]: element for element in base}
        for element in patch:
            name = element[key]
            before = elements.get(name, _ADDED.get(field))
            # Replace whole variables: the API server rejects one with both value and valueFrom.
            elements[name] = element if before is None or field == "env" else merge(before, element)
        return list(elements.values())
    return patch


def pod_template_problems(
    template: PodTemplate | None, platform: Platform | None, *, claims: bool = False
) -> list[Problem]:
    """Return the fields that a podTemplate must not set; a replay has no ``platform`` and no planned resources.

    With ``claims``, pods claim their GPUs through accelerator.resourceClaim.
    """
    if template is None:
        return []
    spec, planned = template.spec or {}, _PLANNED_RESOURCES[platform] if platform else {}
    if claims:
        planned = dict.fromkeys(planned, "remove it, because spec.accelerator.resourceClaim provides the GPUs")
    own = [(f"{place}.name", name_of(volume)) for place, volume in _elements(spec, "volumes")]
    return [
        *_pod_problems(spec),
        *_metadata_problems(template.metadata or {}),
        *_list_problems(spec, _SPEC),
        *_init_container_problems(spec, replays=platform is None),
        *_engine_problems(spec, planned),
        *(_claim_problems(spec) if claims else ()),
        *(
            Problem(where, name, "is the name of a volume of the operator; rename it")
            for where, name in own
            if name in OWN_VOLUMES
        ),
    ]


def _claim_problems(spec: dict[str, Any]) -> Iterator[Problem]:
    place = f"{_SPEC}.resourceClaims"
    if "resourceClaims" in spec and spec["resourceClaims"] is None:
        yield Problem(place, "null", "would remove the claim of the GPUs; remove it")
    for where, claim in _elements(spec, "resourceClaims"):
        if name_of(claim) == CLAIM:
            yield Problem(f"{where}.name", CLAIM, "is the name of the claim of the operator; rename it")


def _metadata_problems(metadata: dict[str, Any]) -> Iterator[Problem]:
    for key, value in metadata.items():
        if key not in {"labels", "annotations"} or not isinstance(value, dict):
            fix = "only labels and annotations can be set"
            yield Problem(f"spec.podTemplate.metadata.{key}", shown(value, 64), fix)
    for field, given in metadata.items():
        for name, value in given.items() if isinstance(given, dict) else ():
            if name.startswith(("specdecode.io/", "app.kubernetes.io/managed-by")):
                fix = "is reserved for the operator; remove it"
                yield Problem(f"spec.podTemplate.metadata.{field}.{name}", shown(value, 64), fix)


def _list_problems(value: Any, path: str) -> Iterator[Problem]:
    for field, content in value.items() if isinstance(value, dict) else ():
        where, key = f"{path}.{field}", _MERGE_KEYS.get(field)
        if field.startswith("$"):
            yield Problem(where, shown(content, 64), "patch directives are not supported; write the fields to set")
        elif key is not None and not isinstance(content, list):
            yield Problem(where, shown(content, 64), "must be a list")
        elif key is not None:
            for index, element in enumerate(content):
                if not isinstance(element, dict) or not isinstance(element.get(key), str):
                    yield Problem(f"{where}[{index}]", shown(element, 64), f"must have {key}, which is the merge key")
                else:
                    yield from _list_problems(element, f"{where}[{index}]")


def _pod_problems(spec: dict[str, Any]) -> Iterator[Problem]:
    selector = spec.get("nodeSelector", {})
    if selector is None:
        message = "would remove the plan's GPU product; list further node labels, or remove it"
        yield Problem(f"{_SPEC}.nodeSelector", "null", message)
    elif isinstance(selector, dict) and PRODUCT_LABEL in selector:
        value = str(selector[PRODUCT_LABEL])
        yield Problem(f"{_SPEC}.nodeSelector.{PRODUCT_LABEL}", value, "use spec.accelerator.products")
    # A short grace period would interrupt running requests, and null would mean Kubernetes' default of 30 s.
    grace_s = spec.get("terminationGracePeriodSeconds", SHORTEST_GRACE_S)
    # isinstance would accept a bool.
    if type(grace_s) is not int or grace_s < SHORTEST_GRACE_S:
        message = f"must be an integer of at least {SHORTEST_GRACE_S}, so that engines can finish running requests"
        yield Problem(f"{_SPEC}.terminationGracePeriodSeconds", shown(grace_s, 64), message)
    policy = spec.get("restartPolicy", "Always")
    if policy != "Always":
        yield Problem(f"{_SPEC}.restartPolicy", shown(policy, 64), "must be Always; remove it")


def _init_container_problems(spec: dict[str, Any], *, replays: bool) -> Iterator[Problem]:
    """Yield changes of the operator's init containers; those that download models have the hub token."""
    for where, container in _elements(spec, "initContainers"):
        name = name_of(container)
        if is_download(name) or name in {PREPARE, SIDECAR}:
            for field in ("command", "args", "image", "envFrom", "lifecycle", "volumeMounts"):
                if field in container:
                    yield Problem(f"{where}.{field}", "set", f"{name} is the operator's init container; remove it")
    for where, container in _elements(spec, "initContainers") if replays else ():
        if is_download(name_of(container)):
            yield Problem(
                where, str(name_of(container)), "does not exist, because a replay downloads no models; remove it"
            )


def is_download(name: object) -> bool:
    """Return whether an init container of this name downloads a model; those of adapters end with their number."""
    return name in {DOWNLOAD_TARGET, DOWNLOAD_DRAFT} or str(name).startswith(f"{DOWNLOAD_ADAPTER}-")


def _engine_problems(spec: dict[str, Any], planned_resources: Mapping[str, str]) -> Iterator[Problem]:
    for where, container in _elements(spec, "containers"):
        if container.get("name") == SIDECAR:
            yield Problem(f"{where}.name", SIDECAR, "is the name of the operator's sidecar; rename it")
        if container.get("name") != ENGINE_CONTAINER:
            if "image" not in container:
                message = f"is an added container without an image; set one, or use the name {ENGINE_CONTAINER}"
                yield Problem(where, str(container.get("name")), f"{message} to change the engine's container")
            continue
        for field, fix in _PROTECTED_IN_ENGINE.items():
            if field in container:
                yield Problem(f"{where}.{field}", "set", fix)
        names = [str(variable.get("name")) for _, variable in _elements(container, "env")]
        yield from owned_variable_problems(names, f"{where}.env")
        yield from _resource_problems(container.get("resources", {}), f"{where}.resources", planned_resources)
        for place, mount in _elements(container, "volumeMounts", where):
            if str(mount.get("mountPath")).rstrip("/") in OWN_MOUNTS:
                message = "is used by the operator; choose another path"
                yield Problem(f"{place}.mountPath", mount["mountPath"], message)


def _resource_problems(resources: Any, where: str, planned: Mapping[str, str]) -> list[Problem]:
    parts = [(where, resources)]
    if isinstance(resources, dict):
        parts += [(f"{where}.{kind}", amounts) for kind, amounts in resources.items()]
    nothing = [path for path, amounts in parts if amounts is None]
    if nothing or not isinstance(resources, dict):
        return [Problem(path, "null", "would remove the planned resources; remove it") for path in nothing]
    return [
        Problem(f"{where}.{kind}.{name}", str(amounts[name]), f"is set by the plan; {fix}")
        for kind, amounts in resources.items()
        if isinstance(amounts, dict)
        for name, fix in planned.items()
        if name in amounts
    ]


def _elements(parent: dict[str, Any], field: str, path: str = _SPEC) -> Iterator[tuple[str, dict[str, Any]]]:
    content = parent.get(field)
    for index, element in enumerate(content if isinstance(content, list) else []):
        if isinstance(element, dict):
            yield f"{path}.{field}[{index}]", element


# User vllm of vLLM's images (docker/Dockerfile), which do not set a default user. Other images do not need this user to
# exist, because HOME and USER are set.
ENGINE_USER_ID: Final = 2000


def container_user(spec: SpecDecodeDeploymentSpec, container: str, user_id: int = ENGINE_USER_ID) -> Body:
    """Return the user settings for the security context of a container.

    Pod-wide settings of podTemplate are left out, because container settings would override them.
    """
    given = _given(spec)
    context = dict(mapping(given, "securityContext"))
    for each in (*objects(given, "containers"), *objects(given, "initContainers")):
        if name_of(each) == container:
            context |= mapping(each, "securityContext")
    user = context.get("runAsUser")
    if user == 0 or context.get("runAsNonRoot") is False:
        return {}
    return {"runAsNonRoot": True} if user is not None else {"runAsNonRoot": True, "runAsUser": user_id}


def volume_group(spec: SpecDecodeDeploymentSpec) -> Body:
    """Return the fsGroup settings for the security context of a pod with a model cache."""
    if spec.models.cache is None or "fsGroup" in mapping(_given(spec), "securityContext"):
        return {}
    return {"fsGroup": ENGINE_USER_ID, "fsGroupChangePolicy": "OnRootMismatch"}


def _given(spec: SpecDecodeDeploymentSpec) -> Mapping[str, Any]:
    return (spec.pod_template.spec if spec.pod_template else None) or {}
