"""Pods that reach beyond their namespace, and pods that do not, for the operator's policy and the chart's guard."""

from typing import Any

from specdecode_operator.deployment.pod_security import SYSTEM_TAINTS
from tests.support.objects import Body


def engine(**fields: Any) -> Body:
    return {"containers": [{"name": "engine", **fields}]}


def secured(**context: Any) -> Body:
    return engine(securityContext=context)


def volume(**source: Any) -> Body:
    return {"volumes": [{"name": "v", **source}]}


def projected(**source: Any) -> Body:
    return volume(projected={"sources": [{"configMap": {"name": "c"}}, source]})


REQUIRED_ANTI_AFFINITY = "affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution"


def _term(**fields: Any) -> Body:
    return {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"a": "b"}}, **fields}


def anti_affinity(**fields: Any) -> Body:
    """A pod that other pods may not share a topology with."""
    term = _term(**fields)
    return {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}}


def soft_affinity(**fields: Any) -> Body:
    """A pod with terms that only change scores, or its own place."""
    term = _term(**fields)
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "podAffinityTerm": term}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    return {"affinity": {"podAntiAffinity": preferred, "podAffinity": required}}


_CLAIM: Body = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}


def ephemeral(**fields: Any) -> Body:
    return volume(ephemeral={"volumeClaimTemplate": {"spec": {**_CLAIM, **fields}}})


REFUSED: list[tuple[Body, str, str]] = [
    ({"hostNetwork": True}, "hostNetwork", "hostNetwork"),
    ({"hostNetwork": "true"}, "hostNetwork", "hostNetwork"),
    ({"hostPID": True}, "hostPID", "hostPID"),
    ({"hostIPC": True}, "hostIPC", "hostIPC"),
    ({"nodeName": "n"}, "nodeName", "nodeName"),
    ({"serviceAccountName": "admin"}, "serviceAccountName", "serviceAccountName"),
    ({"serviceAccount": "admin"}, "serviceAccount", "serviceAccountName"),
    ({"automountServiceAccountToken": True}, "automountServiceAccountToken", "automountServiceAccountToken"),
    ({"automountServiceAccountToken": None}, "automountServiceAccountToken", "automountServiceAccountToken"),
    ({"priorityClassName": "system-node-critical"}, "priorityClassName", "priorityClassName"),
    (anti_affinity(namespaceSelector={}), f"{REQUIRED_ANTI_AFFINITY}[0].namespaceSelector", "podAntiAffinity"),
    (
        anti_affinity(namespaceSelector={"matchLabels": {"team": "b"}}),
        f"{REQUIRED_ANTI_AFFINITY}[0].namespaceSelector",
        "podAntiAffinity",
    ),
    (anti_affinity(namespaces=["team-b"]), f"{REQUIRED_ANTI_AFFINITY}[0].namespaces", "podAntiAffinity"),
    (anti_affinity(namespaces=["n", "team-b"]), f"{REQUIRED_ANTI_AFFINITY}[0].namespaces", "podAntiAffinity"),
    ({"tolerations": [{"operator": "Exists"}]}, "tolerations[0]", "tolerations"),
    (
        {"tolerations": [{"key": "a", "operator": "Exists"}, {"operator": "Exists", "effect": "NoExecute"}]},
        "tolerations[1]",
        "tolerations",
    ),
    ({"tolerations": [{"key": "", "operator": "Exists"}]}, "tolerations[0]", "tolerations"),
    *(
        ({"tolerations": [{"key": key, "operator": "Exists", "effect": "NoSchedule"}]}, "tolerations[0]", "tolerations")
        for key in sorted(SYSTEM_TAINTS)
    ),
    ({"securityContext": None}, "securityContext", "seccompProfile"),
    (
        {"securityContext": {"seccompProfile": {"type": "Unconfined"}}},
        "securityContext.seccompProfile",
        "seccompProfile",
    ),
    ({"securityContext": {"seccompProfile": None}}, "securityContext.seccompProfile", "seccompProfile"),
    (
        {"securityContext": {"appArmorProfile": {"type": "Unconfined"}}},
        "securityContext.appArmorProfile",
        "appArmorProfile",
    ),
    (
        {"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}},
        "securityContext.sysctls[0]",
        "sysctls.kernel.msgmax",
    ),
    (
        {"securityContext": {"seLinuxOptions": {"type": "spc_t"}}},
        "securityContext.seLinuxOptions",
        "seLinuxOptions",
    ),
    (secured(seLinuxOptions={"user": "u"}), "containers[0].securityContext.seLinuxOptions", "seLinuxOptions"),
    (secured(seLinuxOptions={"role": "r"}), "containers[0].securityContext.seLinuxOptions", "seLinuxOptions"),
    (
        {"securityContext": {"windowsOptions": {"hostProcess": True}}},
        "securityContext.windowsOptions.hostProcess",
        "windowsOptions",
    ),
    (secured(privileged=True), "containers[0].securityContext.privileged", "privileged"),
    (
        {
            "initContainers": [
                {"name": "a", "image": "i"},
                {"name": "b", "image": "i", "securityContext": {"privileged": True}},
            ]
        },
        "initContainers[1].securityContext.privileged",
        "privileged",
    ),
    (
        {"ephemeralContainers": [{"name": "a", "image": "i", "securityContext": {"privileged": True}}]},
        "ephemeralContainers[0].securityContext.privileged",
        "privileged",
    ),
    (
        secured(allowPrivilegeEscalation=True),
        "containers[0].securityContext.allowPrivilegeEscalation",
        "allowPrivilegeEscalation",
    ),
    (
        secured(allowPrivilegeEscalation=None),
        "containers[0].securityContext.allowPrivilegeEscalation",
        "allowPrivilegeEscalation",
    ),
    (engine(securityContext=None), "containers[0].securityContext", "seccompProfile"),
    (secured(procMount="Unmasked"), "containers[0].securityContext.procMount", "procMount"),
    (secured(seccompProfile={"type": "Unconfined"}), "containers[0].securityContext.seccompProfile", "seccompProfile"),
    (
        secured(capabilities={"add": ["IPC_LOCK"]}),
        "containers[0].securityContext.capabilities.add",
        "capabilities.IPC_LOCK",
    ),
    (
        secured(capabilities={"add": ["NET_BIND_SERVICE", "CAP_sys_admin"]}),
        "containers[0].securityContext.capabilities.add",
        "capabilities.SYS_ADMIN",
    ),
    (secured(capabilities={"drop": []}), "containers[0].securityContext.capabilities.drop", "capabilities"),
    (secured(capabilities={"drop": ["NET_RAW"]}), "containers[0].securityContext.capabilities.drop", "capabilities"),
    (secured(capabilities=None), "containers[0].securityContext.capabilities.drop", "capabilities"),
    (
        {"containers": [{"name": "more", "image": "i", "ports": [{"containerPort": 1, "hostPort": 1}]}]},
        "containers[0].ports[0].hostPort",
        "hostPort",
    ),
    (
        {"containers": [{"name": "more", "image": "i", "ports": [{"containerPort": 1, "hostIP": "10.0.0.1"}]}]},
        "containers[0].ports[0].hostPort",
        "hostPort",
    ),
    (
        {"containers": [{"name": "more", "image": "i", "livenessProbe": {"httpGet": {"host": "10.0.0.1", "port": 1}}}]},
        "containers[0].livenessProbe.httpGet.host",
        "probeHost",
    ),
    (
        {
            "containers": [
                {"name": "more", "image": "i", "lifecycle": {"postStart": {"tcpSocket": {"host": "h", "port": 1}}}}
            ]
        },
        "containers[0].lifecycle.postStart.tcpSocket.host",
        "probeHost",
    ),
    (
        engine(lifecycle={"preStop": {"httpGet": {"host": "h", "port": 1}}}),
        "containers[0].lifecycle.preStop.httpGet.host",
        "probeHost",
    ),
    (engine(startupProbe={"httpGet": {"host": "h"}}), "containers[0].startupProbe.httpGet.host", "probeHost"),
    (engine(readinessProbe={"tcpSocket": {"host": "h"}}), "containers[0].readinessProbe.tcpSocket.host", "probeHost"),
    (volume(nfs={"server": "s", "path": "/"}), "volumes[0].nfs", "volumes.nfs"),
    (volume(flexVolume={"driver": "d"}), "volumes[0].flexVolume", "volumes.flexVolume"),
    (
        projected(serviceAccountToken={"path": "t"}),
        "volumes[0].projected.sources[1].serviceAccountToken",
        "serviceAccountToken",
    ),
    (
        projected(podCertificate={"keyType": "k"}),
        "volumes[0].projected.sources[1].podCertificate",
        "serviceAccountToken",
    ),
    (
        ephemeral(volumeName="somebodys"),
        "volumes[0].ephemeral.volumeClaimTemplate.spec.volumeName",
        "volumeName",
    ),
    (
        ephemeral(selector={"matchLabels": {"for": "somebody"}}),
        "volumes[0].ephemeral.volumeClaimTemplate.spec.selector",
        "volumeName",
    ),
]

LET_THROUGH: list[Body] = [
    {"hostNetwork": False, "hostPID": False, "nodeName": "", "serviceAccountName": "default"},
    {"priorityClassName": "high", "runtimeClassName": "nvidia", "schedulerName": "volcano"},
    {"tolerations": [{"key": "a", "operator": "Exists", "effect": "NoExecute"}]},
    anti_affinity(),
    anti_affinity(namespaces=[]),
    soft_affinity(namespaceSelector={}),
    {"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "a", "whenUnsatisfiable": "DoNotSchedule"}]},
    anti_affinity(matchLabelKeys=["pod-template-hash"]),
    anti_affinity(mismatchLabelKeys=["team"]),
    {"tolerations": [{"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}]},
    {"tolerations": [{"key": "node-role.kubernetes.io/gpu", "operator": "Exists"}]},
    {"schedulingGates": [{"name": "example.org/quota"}], "preemptionPolicy": "Never"},
    {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "gpu"}]},
    {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["192.0.2.1"]}},
    {"hostAliases": [{"ip": "1.2.3.4", "hostnames": ["h"]}]},
    {"securityContext": {"runAsUser": 0, "runAsNonRoot": False, "fsGroup": 1, "supplementalGroups": [1]}},
    {"securityContext": {"seccompProfile": {"type": "Localhost", "localhostProfile": "p"}}},
    {"securityContext": {"sysctls": [{"name": "net.ipv4.tcp_keepalive_time", "value": "1"}]}},
    {"securityContext": {"seLinuxOptions": {"level": "s0:c1,c2"}}},
    secured(privileged=False, allowPrivilegeEscalation=False, readOnlyRootFilesystem=True),
    secured(capabilities={"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}),
    volume(emptyDir={}),
    volume(persistentVolumeClaim={"claimName": "c"}),
    projected(secret={"name": "s"}),
    ephemeral(storageClassName="fast", volumeName=""),
    {"containers": [{"name": "more", "image": "i", "readinessProbe": {"httpGet": {"path": "/", "port": 1}}}]},
    {"containers": "none", "volumes": [3], "securityContext": {}},
]


def _sysctl(name: str) -> Body:
    return {"securityContext": {"sysctls": [{"name": name, "value": "1"}]}}


_SAFE_SYSCTLS = (
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_wmem",
)
_OTHER_SYSCTLS = (
    "fs.mqueue.msg_max",
    "kernel.msgmax",
    "kernel.sem",
    "kernel.shmmax",
    "net.core.somaxconn",
    "net.ipv4.ip_forward",
    "net.ipv4.tcp_max_syn_backlog",
    "net.ipv4.tcp_tw_reuse",
    "vm.overcommit_memory",
)
_SAFE_VOLUMES = (
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected"),
    "secret",
)
_OTHER_VOLUMES = (
    *("awsElasticBlockStore", "azureDisk", "azureFile", "cephfs", "cinder", "fc", "flexVolume", "flocker"),
    *("gcePersistentDisk", "gitRepo", "glusterfs", "iscsi", "nfs", "photonPersistentDisk", "portworxVolume"),
    *("quobyte", "rbd", "scaleIO", "storageos", "vsphereVolume"),
)

SAFE: list[Body] = [*map(_sysctl, _SAFE_SYSCTLS), *(volume(**{kind: {}}) for kind in _SAFE_VOLUMES)]
"""Sysctls and volumes that the level restricted of the Pod Security Standards lets through, and images.

https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

UNSAFE: list[Body] = [*map(_sysctl, _OTHER_SYSCTLS), *(volume(**{kind: {}}) for kind in _OTHER_VOLUMES)]
"""Sysctls that reach the node or that the level does not name, and all other volumes of core/v1 but hostPath."""
