"""What runs on nodes: containerd, kubelet and kube-proxy on the real one, KWOK for simulated ones."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from devcluster.builds.binaries import kwok_stages
from devcluster.cluster.control_plane import NODE_NAME
from devcluster.cluster.settings import Settings
from devcluster.host import packages
from devcluster.host.paths import engine_environment

COMPONENTS = ("containerd", "kubelet", "kube-proxy", "volume-modes")
PAUSE_IMAGE = "localhost/specdecode-pause:1"
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
ENGINE_MOUNT = "/opt/vllm-cpu"


def write_files(state: Path, settings: Settings, cgroup: str) -> None:
    """Write the configuration files of the real node."""
    config = state / "config"
    (config / "containerd.toml").write_text(_containerd_config(state))
    (config / "container.json").write_text(json.dumps(_base_container()))
    (config / "cni").mkdir(exist_ok=True)
    (config / "cni" / "10-pods.conflist").write_text(json.dumps(_pod_network(settings)))
    # The machine's name servers are none of a pod's business, and out of its reach.
    (config / "resolv.conf").write_text("")
    (config / "kubelet.json").write_text(json.dumps(_kubelet_config(state, settings, cgroup)))
    (config / "kube-proxy.json").write_text(json.dumps(_proxy_config(state, settings)))


def containerd(program: Path, state: Path) -> list[str]:
    """Return containerd's command line."""
    return [str(program), "--config", str(state / "config" / "containerd.toml")]


def kubelet(program: Path, state: Path, settings: Settings) -> list[str]:
    """Return the kubelet's command line."""
    return [
        str(program),
        f"--config={state / 'config' / 'kubelet.json'}",
        f"--kubeconfig={state / 'config' / 'kubelet.kubeconfig'}",
        f"--hostname-override={NODE_NAME}",
        f"--node-ip={settings.addresses.node}",
    ]


def kube_proxy(program: Path, state: Path) -> list[str]:
    """Return kube-proxy's command line."""
    return [str(program), f"--config={state / 'config' / 'kube-proxy.json'}"]


def volume_modes(state: Path) -> list[str]:
    """Return the command line of the daemon that opens provisioned volumes to all users."""
    return [sys.executable, str(Path(__file__).with_name("volume_modes.py")), str(state / "volumes")]


def kwok(program: Path, state: Path, settings: Settings) -> list[str]:
    """Return KWOK's command line: it plays the kubelet of annotated nodes."""
    return [
        str(program),
        f"--kubeconfig={state / 'config' / 'kwok.kubeconfig'}",
        "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
        f"--cidr={settings.addresses.fake_pods}",
        f"--node-ip={settings.addresses.node}",
        "--node-lease-duration-seconds=40",
        *(f"--config={stage}" for stage in kwok_stages()),
    ]


def ctr(*arguments: str) -> list[str]:
    """Return a command line of containerd's client for Kubernetes' images and containers."""
    return ["ctr", "--address", CONTAINERD_SOCKET, "--namespace", "k8s.io", *arguments]


def _containerd_config(state: Path) -> str:
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""version = 2
root = "{state / "containerd"}"
state = "/run/containerd/state"
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{state / "containerd" / "opt"}"
[{cri}]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  [{cri}.cni]
    bin_dir = "{packages.cni_dir()}"
    conf_dir = "{state / "config" / "cni"}"
  [{cri}.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    base_runtime_spec = "{state / "config" / "container.json"}"
"""


def _base_container() -> dict[str, object]:
    """Return containerd's default container with the engine's Python environment mounted read-only."""
    environment = engine_environment()
    if not environment.exists() and not environment.is_symlink():
        environment.mkdir(parents=True)
    base = json.loads(subprocess.check_output(["ctr", "oci", "spec"], text=True))
    base["mounts"].append(
        {
            "destination": ENGINE_MOUNT,
            "type": "bind",
            "source": str(environment),
            "options": ["rbind", "ro"],
        }
    )
    return base  # type: ignore[no-any-return]


def _pod_network(settings: Settings) -> dict[str, object]:
    pods = settings.addresses.pods
    routes = [{"dst": "0.0.0.0/0"}]
    return {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            # Point to point, not a bridge: every packet passes kube-proxy's rules on its way back too.
            {"type": "ptp", "ipam": {"type": "host-local", "ranges": [[{"subnet": pods}]], "routes": routes}},
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def _kubelet_config(state: Path, settings: Settings, cgroup: str) -> dict[str, object]:
    pki = state / "pki"
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": settings.addresses.node,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(pki / "kubelet-server.crt"),
        "tlsPrivateKeyFile": str(pki / "kubelet-server.key"),
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup}",
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        "localStorageCapacityIsolation": False,
        # A developer's disk may be nearly full, and locally built images cannot be pulled again.
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        # There is no cluster DNS. An address that refuses at once beats a warning on every pod.
        "clusterDNS": [settings.addresses.node],
        "resolvConf": str(state / "config" / "resolv.conf"),
        "volumePluginDir": str(state / "flex-volumes"),
        "nodeStatusUpdateFrequency": "4s",
        # The kubelet updates ConfigMaps in a running pod when it syncs the pod, by default once a minute.
        "syncFrequency": "10s",
    }


def _proxy_config(state: Path, settings: Settings) -> dict[str, object]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": str(state / "config" / "kube-proxy.kubeconfig")},
        "clusterCIDR": settings.addresses.pods,
        "hostnameOverride": NODE_NAME,
        # Zero leaves the machine's connection tracking limits alone.
        "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }


def import_image(enter: Sequence[str], archive: Path) -> str:
    """Import an image archive into containerd and return what ctr said (empty when it worked)."""
    with archive.open("rb") as content:  # the machine's file: namespaces may hide its path
        command = [*enter, *ctr("images", "import", "-")]
        done = subprocess.run(command, stdin=content, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit status {done.returncode}"
