"""Pods that reach beyond their namespace, and pods that do not, for the operator's policy and the chart's guard."""

from typing import Any

from tests.support.objects import Body


def engine(**fields: Any) -> Body:
    return {"containers": [{"name": "engine", **fields}]}


def secured(**context: Any) -> Body:
    return engine(securityContext=context)


def volume(**source: Any) -> Body:
    return {"volumes": [{"name": "v", **source}]}


def projected(**source: Any) -> Body:
    return volume(projected={"sources": [{"configMap": {"name": "c"}}, source]})


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
]

LET_THROUGH: list[Body] = [
    {"hostNetwork": False, "hostPID": False, "nodeName": "", "serviceAccountName": "default"},
    {"priorityClassName": "high", "runtimeClassName": "nvidia", "schedulerName": "volcano"},
    {"tolerations": [{"operator": "Exists"}], "hostAliases": [{"ip": "1.2.3.4", "hostnames": ["h"]}]},
    {"securityContext": {"runAsUser": 0, "runAsNonRoot": False, "fsGroup": 1, "supplementalGroups": [1]}},
    {"securityContext": {"seccompProfile": {"type": "Localhost", "localhostProfile": "p"}}},
    {"securityContext": {"sysctls": [{"name": "net.ipv4.tcp_keepalive_time", "value": "1"}]}},
    {"securityContext": {"seLinuxOptions": {"level": "s0:c1,c2"}}},
    secured(privileged=False, allowPrivilegeEscalation=False, readOnlyRootFilesystem=True),
    secured(capabilities={"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}),
    volume(emptyDir={}),
    volume(persistentVolumeClaim={"claimName": "c"}),
    projected(secret={"name": "s"}),
    {"containers": [{"name": "more", "image": "i", "readinessProbe": {"httpGet": {"path": "/", "port": 1}}}]},
    {"containers": "none", "volumes": [3], "securityContext": {}},
]
