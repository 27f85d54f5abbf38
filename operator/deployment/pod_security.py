"""Check a podTemplate: reject settings that reach beyond the namespace, unless allowed by name.

A user who may create our objects need not be allowed to create pods, so an object's pods must not reach further
than the user. The standard is the restricted level of the Pod Security Standards, except for settings that affect
only the pod itself, such as running as root: https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from specdecode_operator.problems import Problem, shown
from specdecode_operator.untrusted import mapping, name_of, objects, texts

NONE_ALLOWED: Final[frozenset[str]] = frozenset()
_SWITCHES: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "hostNetwork": ((False, None), "shares the node's network and bypasses every NetworkPolicy"),
    "hostPID": ((False, None), "shows the processes of the node"),
    "hostIPC": ((False, None), "shares memory with the processes of the node"),
    "nodeName": (("", None), "bypasses the scheduler with its taints and resources: use nodeSelector or affinity"),
    "serviceAccountName": (("", "default", None), "gives the pod the permissions of another account"),
    "serviceAccount": (("", "default", None), "gives the pod the permissions of another account"),
    # Null would remove the operator's own false.
    "automountServiceAccountToken": ((False,), "gives the pod access to the API server with a token"),
}
_CONTAINER_SWITCHES: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "privileged": ((False, None), "gives the container full access to the node"),
    "allowPrivilegeEscalation": ((False,), "lets processes gain more privileges than the container has"),
    "procMount": (("Default", None), "shows /proc of the node unmasked"),
}
PROFILES: Final[Mapping[str, tuple[Any, ...]]] = {
    "seccompProfile": ("RuntimeDefault", "Localhost"),
    "appArmorProfile": ("RuntimeDefault", "Localhost"),
}
SELINUX_TYPES: Final = ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")
CAPABILITIES: Final = ("NET_BIND_SERVICE",)
SYSCTLS: Final = frozenset(
    {
        "kernel.shm_rmid_forced",
        *(f"net.ipv4.{name}" for name in ("ip_local_port_range", "ip_unprivileged_port_start", "ping_group_range")),
        *(f"net.ipv4.tcp_{name}" for name in ("syncookies", "keepalive_time", "fin_timeout", "keepalive_intvl")),
        *(f"net.ipv4.{name}" for name in ("ip_local_reserved_ports", "tcp_keepalive_probes", "tcp_rmem", "tcp_wmem")),
    }
)
VOLUMES: Final = frozenset(
    {
        *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected"),
        # hostPath is checked by its path (--allow-host-path).
        *("secret", "hostPath"),
    }
)
# Keys of taints for nodes that run only pods of the cluster itself.
SYSTEM_TAINTS: Final = frozenset(
    {
        # Control-plane nodes of kubeadm, RKE and k3s.
        *(f"node-role.kubernetes.io/{role}" for role in ("control-plane", "controlplane", "etcd", "master")),
        "CriticalAddonsOnly",
        # Set by `kubectl cordon`.
        "node.kubernetes.io/unschedulable",
    }
)
_APP_ARMOR_ANNOTATION: Final = "container.apparmor.security.beta.kubernetes.io/"
GRANTS: Final = (
    *(name for name in _SWITCHES if name != "serviceAccount"),
    *_CONTAINER_SWITCHES,
    *PROFILES,
    *("seLinuxOptions", "windowsOptions", "capabilities", "sysctls", "hostPort", "probeHost", "priorityClassName"),
    *("serviceAccountToken", "volumes", "volumeName", "podAntiAffinity", "tolerations"),
)
# Grants that can be limited to one element, such as capabilities.IPC_LOCK.
_WITH_PART: Final = ("capabilities", "sysctls", "volumes")


def is_grant(name: str) -> bool:
    """Whether a name is a valid grant; volumes.hostPath is not, because host paths are allowed by path."""
    whole, dot, part = name.partition(".")
    return name in GRANTS or (whole in _WITH_PART and bool(dot and part) and part not in VOLUMES)


def pod_problems(
    pod: Mapping[str, Any], where: str, allowed: frozenset[str] = NONE_ALLOWED, namespace: str = ""
) -> list[Problem]:
    """Return the fields of a pod's metadata and spec that are not allowed, below ``where``, each with its fix.

    A pod may also be a patch for another pod, in which null removes a field. ``namespace`` is the namespace of the pod;
    if empty, every namespace counts as another one.
    """
    fix = "leave it out, or ask the operator's administrator to allow it with --allow-pod-template"
    return [
        Problem(f"{where}.{field}", shown(value, 64), f"{why}; {fix}={grant}")
        for field, value, why, grant in _findings(pod, namespace)
        if grant not in allowed and grant.partition(".")[0] not in allowed
    ]


def needed_grants(pod: Mapping[str, Any]) -> dict[str, str]:
    """Return the grants that a pod needs, by field."""
    return {field: grant for field, _, _, grant in _findings(pod, "")}


_Found = tuple[str, Any, str, str]  # Field, value, effect and grant


def _findings(pod: Mapping[str, Any], namespace: str) -> Iterator[_Found]:
    spec = mapping(pod, "spec")
    yield from _of_pod(spec)
    yield from _of_anti_affinity(mapping(mapping(spec, "affinity"), "podAntiAffinity"), namespace)
    yield from _of_tolerations(spec)
    annotations = mapping(mapping(pod, "metadata"), "annotations")
    for name, value in annotations.items():
        if name.startswith(_APP_ARMOR_ANNOTATION) and not str(value).startswith(("runtime/default", "localhost/")):
            yield f"metadata.annotations.{name}", value, "removes the profile", "appArmorProfile"
    for field in ("containers", "initContainers", "ephemeralContainers"):
        for index, container in enumerate(objects(spec, field)):
            for place, *rest in _of_container(container):
                yield f"spec.{field}[{index}].{place}", *rest


def _of_pod(spec: Mapping[str, Any]) -> Iterator[_Found]:
    for field, (harmless, why) in _SWITCHES.items():
        if field in spec and spec[field] not in harmless:
            yield f"spec.{field}", spec[field], why, "serviceAccountName" if field == "serviceAccount" else field
    if str(spec.get("priorityClassName")).startswith("system-"):
        why = "lets the pod preempt all other pods, including system pods"
        yield "spec.priorityClassName", spec["priorityClassName"], why, "priorityClassName"
    yield from _of_security("spec.securityContext", spec)
    for index, sysctl in enumerate(objects(mapping(spec, "securityContext"), "sysctls")):
        if (name := name_of(sysctl)) not in SYSCTLS:
            why = "may change the kernel for other pods"
            yield f"spec.securityContext.sysctls[{index}]", name, why, f"sysctls.{name}"
    for index, volume in enumerate(objects(spec, "volumes")):
        for place, *rest in _of_volume(volume):
            yield f"spec.volumes[{index}].{place}", *rest


def _of_anti_affinity(terms: Mapping[str, Any], namespace: str) -> Iterator[_Found]:
    """Yield required terms that select other namespaces.

    The scheduler applies these both ways: it does not place a pod that they select in the topology of the pod that has
    them (interpodaffinity, satisfyExistingPodsAntiAffinity). Preferred terms and affinity only change scores, and
    topologySpreadConstraints count pods of the same namespace (podtopologyspread).
    """
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    why = "keeps pods of other namespaces off the nodes where this pod runs"
    for index, term in enumerate(objects(terms, required)):
        where = f"spec.affinity.podAntiAffinity.{required}[{index}]"
        if term.get("namespaceSelector") is not None:
            yield f"{where}.namespaceSelector", term["namespaceSelector"], why, "podAntiAffinity"
        names = term.get("namespaces") or []
        if not isinstance(names, list) or any(name != namespace for name in names):
            yield f"{where}.namespaces", names, why, "podAntiAffinity"


def _of_tolerations(spec: Mapping[str, Any]) -> Iterator[_Found]:
    for index, toleration in enumerate(objects(spec, "tolerations")):
        why, key = "", toleration.get("key")
        if key in ("", None):
            why = "tolerates every taint, so the pod may run on control-plane and cordoned nodes; set a key"
        elif str(key) in SYSTEM_TAINTS:
            why = "lets the pod run on cordoned nodes or nodes that are reserved for pods of the cluster itself"
        if why:
            yield f"spec.tolerations[{index}]", toleration, why, "tolerations"


def _of_volume(volume: Mapping[str, Any]) -> Iterator[_Found]:
    for kind in volume.keys() - VOLUMES - {"name"}:
        why = "mounts storage without a PersistentVolume of the cluster's administrators: use a persistentVolumeClaim"
        yield kind, "set", why, f"volumes.{kind}"
    for index, source in enumerate(objects(mapping(volume, "projected"), "sources")):
        for token in ("serviceAccountToken", "podCertificate"):
            if token in source:
                yield f"projected.sources[{index}].{token}", "set", "gives the pod an identity", "serviceAccountToken"
    claim = mapping(mapping(mapping(volume, "ephemeral"), "volumeClaimTemplate"), "spec")
    for field in ("volumeName", "selector"):
        if claim.get(field) not in ("", None):
            why = "binds a PersistentVolume that may be meant for another namespace: set storageClassName instead"
            yield f"ephemeral.volumeClaimTemplate.spec.{field}", claim[field], why, "volumeName"


def _of_container(container: Mapping[str, Any]) -> Iterator[_Found]:
    yield from _of_security("securityContext", container)
    context = mapping(container, "securityContext")
    for field, (harmless, why) in _CONTAINER_SWITCHES.items():
        if field in context and context[field] not in harmless:
            yield f"securityContext.{field}", context[field], why, field
    if "capabilities" in context:
        yield from _of_capabilities(mapping(context, "capabilities"))
    for index, port in enumerate(objects(container, "ports")):
        if port.get("hostPort") or port.get("hostIP"):
            yield f"ports[{index}].hostPort", port.get("hostPort"), "opens a port of the node", "hostPort"
    probes = {probe: mapping(container, probe) for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
    hooks = {f"lifecycle.{hook}": mapping(mapping(container, "lifecycle"), hook) for hook in ("postStart", "preStop")}
    for place, handler in (probes | hooks).items():
        for kind in ("httpGet", "tcpSocket"):
            if host := mapping(handler, kind).get("host"):
                why = "makes the kubelet connect to an address other than the pod's"
                yield f"{place}.{kind}.host", host, why, "probeHost"


def _of_capabilities(given: Mapping[str, Any]) -> Iterator[_Found]:
    for name in texts(given, "add"):
        if name.upper().removeprefix("CAP_") not in CAPABILITIES:
            grant = f"capabilities.{name.upper().removeprefix('CAP_')}"
            yield "securityContext.capabilities.add", name, "adds a kernel capability", grant
    if "drop" in given or not given:
        dropped = texts(given, "drop")
        if "ALL" not in map(str.upper, dropped):
            why = "keeps capabilities: set it to [ALL]"
            yield "securityContext.capabilities.drop", ", ".join(dropped) or "none", why, "capabilities"


def _of_security(where: str, holder: Mapping[str, Any]) -> Iterator[_Found]:
    if "securityContext" not in holder:
        return
    if holder["securityContext"] is None:
        yield where, None, "removes the operator's settings", "seccompProfile"
    context = mapping(holder, "securityContext")
    for field, types in PROFILES.items():
        if field in context and mapping(context, field).get("type") not in types:
            yield f"{where}.{field}", mapping(context, field).get("type"), "removes the profile", field
    options = mapping(context, "seLinuxOptions")
    if options.get("user") or options.get("role") or options.get("type", "") not in SELINUX_TYPES:
        yield f"{where}.seLinuxOptions", "set", "leaves the SELinux domain of containers", "seLinuxOptions"
    if mapping(context, "windowsOptions").get("hostProcess"):
        yield f"{where}.windowsOptions.hostProcess", True, "runs on the node itself", "windowsOptions"
