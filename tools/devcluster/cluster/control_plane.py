"""etcd, API server, controller manager and scheduler: certificates, files and command lines."""

import base64
import json
from pathlib import Path

from devcluster.builds.binaries import OLDEST
from devcluster.cluster import metrics
from devcluster.cluster.pki import Identity, create
from devcluster.cluster.settings import Settings

NODE_NAME = "node1"
COMPONENTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
_LOOPBACK = "127.0.0.1"
_MOST_ETCD_BYTES = 8 * 2**30
"""etcd's default of 2 GiB is full when 5,000 deployments and their pods start: it keeps versions of some minutes."""

AUTHENTICATION = {
    "apiVersion": "apiserver.config.k8s.io/v1beta1",
    "kind": "AuthenticationConfiguration",
    "anonymous": {"enabled": True, "conditions": [{"path": path} for path in ("/livez", "/readyz", "/healthz")]},
}
"""Strangers may ask whether the API server is healthy, and nothing else."""

AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "omitManagedFields": True,
    "rules": [
        {"level": "Metadata", "userGroups": ["system:serviceaccounts:specdecode-system"]},
        {"level": "Metadata", "users": ["lws"]},
        {"level": "None"},
    ],
}
"""What the operator asks the API server for is written down, whoever it was that sent it away, and what the controller
of LeaderWorkerSets asks for, which it is measured against: no bodies, no others."""

STORAGE_CLASS = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {
        "name": "standard",
        "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
    },
    # The controller manager's own provisioner: a directory on the node for each claim.
    "provisioner": "kubernetes.io/host-path",
    "reclaimPolicy": "Delete",
    "volumeBindingMode": "Immediate",
}


def _identities(settings: Settings) -> list[Identity]:
    names = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
    addresses = tuple(dict.fromkeys([_LOOPBACK, settings.api_address, settings.addresses.api_service]))
    return [
        Identity("etcd", "etcd", names=("localhost",), addresses=(_LOOPBACK,)),
        Identity("apiserver", "kube-apiserver", names=names, addresses=addresses),
        Identity("apiserver-client", "kube-apiserver", ("system:masters",)),
        Identity("admin", "admin", ("system:masters",)),
        Identity("kube-controller-manager", "system:kube-controller-manager"),
        Identity("kube-scheduler", "system:kube-scheduler"),
        Identity("kube-proxy", "system:kube-proxy"),
        Identity("kwok", "kwok", ("system:masters",)),
        Identity("lws", "lws", ("system:masters",), addresses=(settings.api_address,)),
        Identity("front-proxy", "front-proxy"),
        Identity("metrics-adapter", "metrics-adapter", ("system:masters",), names=(metrics.SERVICE_NAME,)),
        Identity("kubelet", f"system:node:{NODE_NAME}", ("system:nodes",)),
        Identity("kubelet-server", NODE_NAME, names=(NODE_NAME,), addresses=(settings.api_address,)),
    ]


def write_files(state: Path, settings: Settings) -> None:
    """Write certificates, kubeconfigs and configuration files of the control plane."""
    create(state / "pki", _identities(settings))
    for user in (
        "kube-controller-manager",
        "kube-scheduler",
        "kube-proxy",
        "kwok",
        "lws",
        "metrics-adapter",
        "kubelet",
    ):
        write_kubeconfig(state / "config" / f"{user}.kubeconfig", state, settings, user)
    write_kubeconfig(state / "kubeconfig", state, settings, "admin")
    (state / "config" / "authentication.json").write_text(json.dumps(AUTHENTICATION))
    (state / "config" / "audit-policy.json").write_text(json.dumps(AUDIT_POLICY))


def audit_log(state: Path) -> Path:
    """File to which the API server writes each request of the operator and of LeaderWorkerSets, one a line."""
    return state / "logs" / "operator-audit.jsonl"


def write_kubeconfig(file: Path, state: Path, settings: Settings, user: str) -> None:
    """Write a kubeconfig that carries its certificates, so that it works from anywhere."""
    pki, context = state / "pki", f"specdecode-{state.name}"

    def inline(name: str) -> str:
        return base64.b64encode((pki / name).read_bytes()).decode()

    cluster = {"server": settings.api_url, "certificate-authority-data": inline("ca.crt")}
    credentials = {"client-certificate-data": inline(f"{user}.crt"), "client-key-data": inline(f"{user}.key")}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": context,
        "clusters": [{"name": context, "cluster": cluster}],
        "users": [{"name": context, "user": credentials}],
        "contexts": [{"name": context, "context": {"cluster": context, "user": context}}],
    }
    file.touch(mode=0o600)
    file.write_text(json.dumps(document, indent=2))


def etcd(program: Path, state: Path, settings: Settings) -> list[str]:
    """Return etcd's command line: loopback only, client certificates required."""
    pki = state / "pki"
    client, peer = (f"https://{_LOOPBACK}:{port}" for port in (settings.etcd_port, settings.etcd_peer_port))
    pair = {"cert-file": pki / "etcd.crt", "key-file": pki / "etcd.key", "trusted-ca-file": pki / "ca.crt"}
    return [
        str(program),
        f"--data-dir={state / 'etcd'}",
        "--unsafe-no-fsync",  # the data need not survive a power cut
        f"--quota-backend-bytes={_MOST_ETCD_BYTES}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--client-cert-auth",
        "--peer-client-cert-auth",
        *(f"--{prefix}{flag}={file}" for prefix in ("", "peer-") for flag, file in pair.items()),
    ]


def kube_apiserver(program: Path, state: Path, settings: Settings) -> list[str]:
    """Return the API server's command line."""
    pki = state / "pki"
    on_loopback = settings.index is None
    return [
        str(program),
        f"--etcd-servers=https://{_LOOPBACK}:{settings.etcd_port}",
        f"--etcd-cafile={pki / 'ca.crt'}",
        f"--etcd-certfile={pki / 'apiserver-client.crt'}",
        f"--etcd-keyfile={pki / 'apiserver-client.key'}",
        f"--secure-port={settings.api_port}",
        f"--bind-address={_LOOPBACK if on_loopback else '0.0.0.0'}",
        f"--advertise-address={settings.api_address}",
        # Nothing but the machine itself reaches a loopback address: no Endpoints for it.
        f"--endpoint-reconciler-type={'none' if on_loopback else 'lease'}",
        f"--tls-cert-file={pki / 'apiserver.crt'}",
        f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--client-ca-file={pki / 'ca.crt'}",
        *_authentication(state, settings),
        # By these, an API server that it asks for metrics knows on whose behalf it does.
        f"--requestheader-client-ca-file={pki / 'ca.crt'}",
        "--requestheader-allowed-names=front-proxy",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={pki / 'front-proxy.crt'}",
        f"--proxy-client-key-file={pki / 'front-proxy.key'}",
        "--authorization-mode=Node,RBAC",
        f"--audit-policy-file={state / 'config' / 'audit-policy.json'}",
        f"--audit-log-path={audit_log(state)}",
        "--enable-admission-plugins=NodeRestriction",
        f"--service-account-key-file={pki / 'service-accounts.pub'}",
        f"--service-account-signing-key-file={pki / 'service-accounts.key'}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-cluster-ip-range={settings.addresses.services}",
        "--allow-privileged=true",
        "--kubelet-preferred-address-types=InternalIP",  # node names do not resolve
        f"--kubelet-certificate-authority={pki / 'ca.crt'}",
        f"--kubelet-client-certificate={pki / 'apiserver-client.crt'}",
        f"--kubelet-client-key={pki / 'apiserver-client.key'}",
        "--profiling=false",
    ]


def _authentication(state: Path, settings: Settings) -> list[str]:
    # Before 1.31 strangers cannot be limited to some paths: RBAC gives them the same ones, and the version.
    return [] if settings.kubernetes == OLDEST else [f"--authentication-config={state / 'config/authentication.json'}"]


def kube_controller_manager(program: Path, state: Path, settings: Settings) -> list[str]:
    """Return the controller manager's command line."""
    return [
        str(program),
        f"--kubeconfig={state / 'config' / 'kube-controller-manager.kubeconfig'}",
        f"--root-ca-file={state / 'pki' / 'ca.crt'}",
        f"--service-account-private-key-file={state / 'pki' / 'service-accounts.key'}",
        "--use-service-account-credentials",
        # The default of 20 requests a second delays the first service account by five seconds.
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
        # Its default of 15 s is for clusters where a look costs something.
        "--horizontal-pod-autoscaler-sync-period=1s",
        f"--cluster-cidr={settings.addresses.pods}",
        "--enable-hostpath-provisioner",
        f"--flex-volume-plugin-dir={state / 'flex-volumes'}",
        # Where no node can run, nodes are objects that nobody tends, or names in a pod: the one would be tainted
        # after a minute, and the pods of the other removed.
        *(
            ["--controllers=*,-node-lifecycle-controller,-pod-garbage-collector-controller"]
            if settings.index is None
            else []
        ),
        "--secure-port=0",
        "--leader-elect=false",
        "--profiling=false",
    ]


def kube_scheduler(program: Path, state: Path, _settings: Settings) -> list[str]:
    """Return the scheduler's command line."""
    return [
        str(program),
        f"--kubeconfig={state / 'config' / 'kube-scheduler.kubeconfig'}",
        # A claim that is bound while its pod is being looked at is sometimes missed, and then for five minutes.
        # (Deprecated in 1.34; there is no other way yet.)
        "--pod-max-in-unschedulable-pods-duration=10s",
        "--secure-port=0",
        "--leader-elect=false",
        "--profiling=false",
    ]
