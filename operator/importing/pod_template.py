"""Convert the rest of a pod to spec.podTemplate."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from specdecode_operator.cluster.nodes import GPU_RESOURCE, PRODUCT_LABEL
from specdecode_operator.cluster.resources import ENGINE_CONTAINER
from specdecode_operator.deployment.pod_security import needed_grants
from specdecode_operator.deployment.pod_template_merge import OWN_MOUNTS, OWN_VOLUMES, SHORTEST_GRACE_S
from specdecode_operator.importing.server_arguments import Argument
from specdecode_operator.importing.spec_builder import OWN_GRACE, OWN_PROBES, UNDOES, Object, Outcome, SpecBuilder
from specdecode_operator.untrusted import mapping, name_of, objects, texts

_TEMPLATE: Final = "spec.podTemplate.spec"
_OWN_LABELS: Final = ("specdecode.io/", "app.kubernetes.io/managed-by", "pod-template-hash")
_OWN_ANNOTATIONS: Final = ("specdecode.io/", "kubectl.kubernetes.io/restartedAt")
_GPU_TOLERATION: Final = {"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}
_HANDLED: Final = ("containers", "initContainers", "volumes", "nodeSelector", "tolerations", "serviceAccount")

_AS_IT_IS_ANYWAY: Final[Mapping[str, tuple[Any, ...]]] = {
    "restartPolicy": ("Always",),
    "dnsPolicy": ("ClusterFirst",),
    "schedulerName": ("default-scheduler",),
    "securityContext": ({}, {"seccompProfile": {"type": "RuntimeDefault"}}),
    "automountServiceAccountToken": (False,),
    "enableServiceLinks": (False,),
    "serviceAccountName": ("default",),
}
"""Values that the API server defaults or the operator sets."""

_OF_ENGINE_ANYWAY: Final[Mapping[str, tuple[Any, ...]]] = {
    "terminationMessagePath": ("/dev/termination-log",),
    "terminationMessagePolicy": ("File", "FallbackToLogsOnError"),
    "imagePullPolicy": ("IfNotPresent",),
    "securityContext": ({}, {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}),
}
_OF_OPERATOR: Final = {
    "startupProbe": OWN_PROBES,
    "readinessProbe": OWN_PROBES,
    "livenessProbe": OWN_PROBES,
    "lifecycle": "the operator lets requests finish before a pod stops",
    "ports": "the only port is spec.serving.port, named http",
}

_FILE: Final = re.compile(r"(?:/|\.{1,2}/|~)[^\s{}]+|[^\s{}:]+\.(?:jinja2?|j2|py|json|ya?ml|txt)")
"""Matches file names in arguments, by path or extension."""

_NO_FILES: Final = frozenset({"--root-path", "--disable-access-log-for-endpoints"})

_OF_IMAGE: Final = "/vllm-workspace/"
"""Folder of vLLM's images with its examples: the new engine runs the same image."""


@dataclass
class Omitted:
    """Parts of a pod that the operator brings itself."""

    volumes: set[str]
    caches: set[str]
    init_containers: set[str]
    arguments: list[str]
    """Arguments that are passed on: a mount that one of them names is kept."""


def mount_of(path: str, container: Object) -> Object | None:
    """Return the mount that a path lies under, the deepest first."""
    mounts = [each for each in objects(container, "volumeMounts") if each.get("mountPath")]
    above = [each for each in mounts if f"{path}/".startswith(f"{str(each['mountPath']).rstrip('/')}/")]
    return max(above, key=lambda each: len(str(each["mountPath"])), default=None)


def ask_for_files(passed_on: Iterable[Argument], container: Object, builder: SpecBuilder) -> None:
    """Ask for each file that an argument names and no mount of the container has: the new pod would not have it."""
    for given in passed_on:
        for file in _files(given):
            path = file if file.startswith(("/", "~")) else f"{container.get('workingDir') or ''}/{file}"
            mount = mount_of(path, container)
            held = mount is not None and str(mount["mountPath"]).rstrip("/") not in OWN_MOUNTS
            if held or (container.get("image") and file.startswith(_OF_IMAGE)):
                continue
            message = (
                "is in the image, or on the machine: mount it in spec.podTemplate, from a ConfigMap or a"
                " PersistentVolumeClaim, and name its path there"
            )
            builder.decide("spec.engine.extraArgs", f"{given.name} {file}", message)


def _files(given: Argument) -> Iterator[str]:
    if given.path or given.name in _NO_FILES:
        return
    yield from (value for value in given.values if _FILE.fullmatch(value))


def take_product(pod: Object, builder: SpecBuilder) -> None:
    """Take the GPU products that a pod is pinned to, by nodeSelector or by node affinity."""
    source, products = values_of_label(pod, PRODUCT_LABEL)
    if products:
        builder.take(f"{source} {PRODUCT_LABEL}", "accelerator.products", products)


def values_of_label(pod: Object, label: str) -> tuple[str, list[str]]:
    """Return the values of a node label that a pod is pinned to, and the field that pins it."""
    selected = mapping(pod, "nodeSelector").get(label)
    if selected:
        return "nodeSelector", [str(selected)]
    affinity = mapping(mapping(pod, "affinity"), "nodeAffinity")
    terms = objects(mapping(affinity, "requiredDuringSchedulingIgnoredDuringExecution"), "nodeSelectorTerms")
    listed = [
        texts(each, "values")
        for term in terms
        for each in objects(term, "matchExpressions")
        if each.get("key") == label and each.get("operator") == "In"
    ]
    # Terms are alternatives: a term without the label would allow any value.
    if listed and len(listed) == len(terms):
        return "nodeAffinity", list(dict.fromkeys(value for values in listed for value in values))
    return "", []


def take_metadata(metadata: Object, selectors: Iterable[Mapping[str, str]], builder: SpecBuilder) -> None:
    """Take labels and annotations of the pods, except labels that Services or the old owner select by."""
    selected = {key for selector in selectors for key in selector}
    labels, annotations = mapping(metadata, "labels"), mapping(metadata, "annotations")
    for key in labels:
        if key in selected:
            why = "Services and the old controller use it to select pods: move the traffic with the steps below"
            builder.drop(f"label {key}", why)
    labels = {key: value for key, value in labels.items() if key not in selected}
    for kind, words, own in (("label", labels, _OWN_LABELS), ("annotation", annotations, _OWN_ANNOTATIONS)):
        kept = {key: value for key, value in words.items() if not key.startswith(own)}
        for key in sorted(words.keys() - kept.keys()):
            builder.own(f"{kind} {key}", "Kubernetes or the operator writes it")
        if kept:
            builder.set(f"podTemplate.metadata.{kind}s", kept)
        for key in kept:
            builder.note(Outcome.POD, f"{kind} {key}", f"spec.podTemplate.metadata.{kind}s")


def note_selecting(pod: Object, selectors: Iterable[Mapping[str, str]], builder: SpecBuilder) -> None:
    """Report placement rules that select pods by labels that the new ones do not have."""
    labels = {key for selector in selectors for key in selector}
    for field in ("affinity", "topologySpreadConstraints"):
        text = json.dumps(pod.get(field))
        named = sorted(label for label in labels if json.dumps(label) in text)
        if named:
            why = f"selects pods by {', '.join(named)}, which the new pods lack: use specdecode.io/deployment there"
            builder.drop(f"the labelSelector in {field}", why)


def take_pod(pod: Object, container: Object, omitted: Omitted, builder: SpecBuilder) -> None:
    """Take the rest of the pod: scheduling, sidecars, volumes, resources."""
    on_gpu = builder.get("accelerator.type") != "CPU"
    template: dict[str, Any] = {}
    for key, value in pod.items():
        if key == "terminationGracePeriodSeconds" and not (isinstance(value, int) and value >= SHORTEST_GRACE_S):
            builder.own(f"{key} {value}", OWN_GRACE)
        elif key not in _HANDLED and value not in _AS_IT_IS_ANYWAY.get(key, ()):
            template[key] = value
    selector = {key: value for key, value in mapping(pod, "nodeSelector").items() if key != PRODUCT_LABEL}
    engine = _engine(container, omitted, builder, on_gpu=on_gpu)
    sidecars = []
    for each in objects(pod, "containers"):
        if each is not container:
            name = {"name": f"{ENGINE_CONTAINER}-sidecar"} if name_of(each) == ENGINE_CONTAINER else {}
            mounts = [_with_own_volume(mount) for mount in objects(each, "volumeMounts")]
            sidecars.append({**each, **name} | ({"volumeMounts": mounts} if mounts else {}))
    init = [each for each in objects(pod, "initContainers") if name_of(each) not in omitted.init_containers]
    containers = [*([engine] if len(engine) > 1 else []), *sidecars]
    parts = {
        "nodeSelector": selector,
        "tolerations": _tolerations(pod, builder, on_gpu=on_gpu),
        "containers": containers,
        "initContainers": init,
        "volumes": _volumes(pod, [*containers, *init], omitted, builder),
    }
    template |= {key: part for key, part in parts.items() if part}
    for key, part in template.items():
        listed = part if isinstance(part, list) else []
        named = [name_of(each) for each in listed if isinstance(each, dict) and "name" in each]
        names = f" ({', '.join(named)})" if named else ""
        grants = ",".join(dict.fromkeys(needed_grants({"spec": {key: part}}).values()))
        remark = f", if the operator allows it (--allow-pod-template={grants})" if grants else ""
        builder.note(Outcome.POD, key, f"{_TEMPLATE}.{key}{names}{remark}")
    if template:
        builder.set("podTemplate.spec", template)


def _tolerations(pod: Object, builder: SpecBuilder, *, on_gpu: bool) -> list[dict[str, Any]]:
    tolerations = objects(pod, "tolerations")
    if tolerations == [_GPU_TOLERATION]:
        builder.own(f"toleration {GPU_RESOURCE}", "the operator sets it on its pods")
        return []
    if tolerations and on_gpu and not any(each.get("key") in (GPU_RESOURCE, None) for each in tolerations):
        # The list replaces the operator's own.
        return [*tolerations, _GPU_TOLERATION]
    return tolerations


def _volumes(
    pod: Object, containers: list[dict[str, Any]], omitted: Omitted, builder: SpecBuilder
) -> list[dict[str, Any]]:
    """Return the volumes that these containers use, and those that no container used before."""
    before = [*objects(pod, "containers"), *objects(pod, "initContainers")]
    mounted = {name_of(mount) for each in before for mount in objects(each, "volumeMounts")}
    used = {name_of(mount) for each in containers for mount in objects(each, "volumeMounts")}
    kept = []
    for volume in objects(pod, "volumes"):
        renamed = _with_own_volume(volume)
        if renamed["name"] in used or name_of(volume) not in mounted:
            kept.append(renamed)
        elif name_of(volume) not in omitted.volumes:
            builder.drop(f"volume {name_of(volume)}", "no container of the new pods mounts it")
    return kept


def _engine(container: Object, omitted: Omitted, builder: SpecBuilder, *, on_gpu: bool) -> dict[str, Any]:
    engine: dict[str, Any] = {"name": ENGINE_CONTAINER}
    for key, value in container.items():
        if key in {"name", "image", "command", "args", "env", "resources", "volumeMounts"}:
            continue
        if key in _OF_OPERATOR:
            builder.own(key, _OF_OPERATOR[key])
        elif key == "envFrom":
            sources = [(each, kind) for each in objects(container, "envFrom") for kind in each if kind != "prefix"]
            names = ", ".join(name_of(mapping(each, kind)) for each, kind in sources)
            builder.decide(f"{_TEMPLATE}.containers[engine].envFrom", names or "nothing", UNDOES)
        elif value not in _OF_ENGINE_ANYWAY.get(key, ()):
            engine[key] = value
    owned = {GPU_RESOURCE} if on_gpu else {"cpu", "memory"}
    resources = {}
    for kind in ("limits", "requests"):
        amounts = mapping(mapping(container, "resources"), kind)
        if kept := {name: amount for name, amount in amounts.items() if name not in owned}:
            resources[kind] = kept
    mounts = [
        _with_own_volume(mount) for mount in objects(container, "volumeMounts") if _keeps(mount, omitted, builder)
    ]
    parts = {"resources": resources, "volumeMounts": mounts}
    return engine | {key: part for key, part in parts.items() if part}


def _keeps(mount: Object, omitted: Omitted, builder: SpecBuilder) -> bool:
    path = str(mount.get("mountPath")).rstrip("/")
    if path in OWN_MOUNTS:
        builder.own(f"mount {path}", "the operator mounts its own volume there")
        return False
    if any(f"{path}/" in f"{argument}/" for argument in omitted.arguments):
        return True
    if any(f"{cache}/".startswith(f"{path}/") for cache in omitted.caches):
        builder.own(f"mount {path}", "was the cache of downloads from the hub")
        return False
    return name_of(mount) not in omitted.volumes


def _with_own_volume(body: Object) -> dict[str, Any]:
    name = name_of(body)
    return {**body, "name": f"{name}-volume" if name in OWN_VOLUMES else name}
