"""Where each Kubernetes program comes from.

In this order: the directory KUBEBUILDER_ASSETS, PATH where the version fits, the per-user
cache, and a build from the Go module (pinned by go.mod and go.sum in `tools/`) into the cache.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from devcluster.builds import golang
from devcluster.host.locks import exclusive
from devcluster.host.paths import TOOLS, cache_dir
from devcluster.host.progress import say, step

Version = tuple[int, int]


@dataclass(frozen=True)
class Group:
    """Programs of one Go module, built with the same versions and flags."""

    name: str
    version: str
    packages: dict[str, str]
    """Program name -> Go package."""
    fits: Callable[[Version], bool]
    """Whether a version found on the machine does as well."""
    version_arguments: tuple[str, ...] = ("--version",)
    flags: str = "-s -w"
    rarely: bool = False
    """Whether only long tests and releases need them: nobody builds them for the others."""

    @property
    def directory(self) -> Path:
        """Return where the built programs lie."""
        return cache_dir() / "bin" / f"{self.name}-{self.version}"


KUBERNETES = {"1.37": "1.37.2", "1.34": "1.34.4", "1.30": "1.30.14"}
"""Release of each minor that clusters can be made of: the newest, that of nodes, the oldest that the charts allow."""
NEWEST, USUAL, OLDEST = KUBERNETES

ETCD = "3.6.5"

_CONTROL_PLANE = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
_NODE = ("kubelet", "kube-proxy")
_ALL_IN_ONE = "specdecode.io/devcluster/tools/kubernetes"
"""One program that acts as etcd and each daemon, depending on its name."""


def _servers(name: str, minor: str, packages: dict[str, str]) -> Group:
    """All of one minor version, whatever their source: then no combination is outside Kubernetes' skew policy."""
    stamp, number = "-X k8s.io/component-base/version.git", int(minor.removeprefix("1."))
    flags = f"-s -w {stamp}Version=v{KUBERNETES[minor]} {stamp}Major=1 {stamp}Minor={number}"
    return Group(name, KUBERNETES[minor], packages, lambda version: version == (1, number), flags=flags)


_USUAL = _servers("kubernetes", USUAL, dict.fromkeys(_CONTROL_PLANE + _NODE, _ALL_IN_ONE))
CONTROL_PLANES = {
    minor: _servers(f"kubernetes-{age}", minor, {each: f"k8s.io/kubernetes/cmd/{each}" for each in _CONTROL_PLANE})
    for age, minor in (("newest", NEWEST), ("oldest", OLDEST))
}
"""Of the other minors, without a node: what our objects meet there is the API server and the controllers."""


GROUPS = (
    _USUAL,
    replace(
        _USUAL,
        packages={"kubectl": "k8s.io/kubernetes/cmd/kubectl"},
        fits=lambda version: version >= (1, 30),
        version_arguments=("version", "--client"),
    ),
    # Older etcd lacks RequestWatchProgress: streaming lists fail once, then fall back.
    replace(_USUAL, packages={"etcd": _ALL_IN_ONE}, fits=lambda version: version >= (3, 6)),
    Group("kwok", "0.7.0", {"kwok": "sigs.k8s.io/kwok/cmd/kwok"}, lambda version: version == (0, 7)),
    Group(
        "helm",
        "4.3.1",
        {"helm": "helm.sh/helm/v4/cmd/helm"},
        lambda version: (4, 0) <= version < (5, 0),
        ("version", "--short"),
    ),
    Group("lws", "0.8.0", {"lws-manager": "sigs.k8s.io/lws/cmd"}, lambda _: False),
    Group(
        "kubeconform",
        "0.8.0",
        {"kubeconform": "github.com/yannh/kubeconform/cmd/kubeconform"},
        lambda version: version >= (0, 8),
        ("-v",),
    ),
    # What releases and attestations are signed with: ten minutes of compiling.
    Group(
        "cosign",
        "3.1.3",
        {"cosign": "github.com/sigstore/cosign/v3/cmd/cosign"},
        lambda version: (3, 0) <= version < (4, 0),
        ("version",),
        "-s -w -X sigs.k8s.io/release-utils/version.gitVersion=v3.1.3",
        rarely=True,
    ),
    # Who gives certificates to those that sign without a key.
    Group(
        "fulcio",
        "1.8.8",
        {"fulcio": "github.com/sigstore/fulcio"},
        lambda _: False,
        ("version",),
        rarely=True,
    ),
    # Pushes images by the bytes that they have, and serves a registry.
    Group(
        "crane",
        "0.22.1",
        {"crane": "github.com/google/go-containerregistry/cmd/crane"},
        lambda version: version >= (0, 20),
        ("version",),
        "-s -w -X github.com/google/go-containerregistry/cmd/crane/cmd.Version=v0.22.1",
        rarely=True,
    ),
    # Serves metrics of Prometheus to HorizontalPodAutoscalers.
    Group(
        "prometheus-adapter",
        "0.12.0",
        {"prometheus-adapter": "sigs.k8s.io/prometheus-adapter/cmd/adapter"},
        lambda _: False,
        rarely=True,
    ),
    # Ours, of the libraries of GitOps tools: what they make of a status.
    Group("health", "1", {"health": "specdecode.io/devcluster/tools/health"}, lambda _: False),
    # Ours, of Argo CD's libraries: what it does with an application.
    Group("argo", "1", {"argo": "specdecode.io/devcluster/tools/argo"}, lambda _: False, rarely=True),
    Group("pause", "1", {"pause": "specdecode.io/devcluster/tools/pause"}, lambda _: False),
)


def groups(kubernetes: str = USUAL) -> tuple[Group, ...]:
    """Return what a cluster of this minor is made of; where two have a program, the first one's is taken."""
    return (CONTROL_PLANES[kubernetes], *GROUPS) if kubernetes in CONTROL_PLANES else GROUPS


def find(*names: str, kubernetes: str = USUAL) -> dict[str, Path]:
    """Return the path of each named program, building what neither the machine nor the cache has."""
    of = {name: next(group for group in groups(kubernetes) if name in group.packages) for name in names}
    found = {name: path for name, group in of.items() if (path := _on_machine(name, group) or _cached(name, group))}
    missing = [name for name in of if name not in found]
    if missing:
        with exclusive(cache_dir() / "bin" / "build.lock", "another process builds cluster programs"):
            for name in missing:
                found[name] = _cached(name, of[name]) or _build(name, of[name])
    return found


def kwok_stages() -> list[Path]:
    """Return KWOK's stage files: how simulated nodes and pods become ready (the program has none built in)."""
    directory = next(group.directory for group in GROUPS if group.name == "kwok")
    stages = directory / "stages-with-ids"
    if not stages.exists():
        say("reading KWOK's stage files from its Go module")
        source = golang.module_dir(TOOLS / "kwok", "sigs.k8s.io/kwok") / "kustomize" / "stage"
        partial = directory / f"stages.partial-{os.getpid()}"
        partial.mkdir(parents=True)
        for file in [source / "node/fast/node-initialize.yaml", *(source / "pod/general").glob("pod-*.yaml")]:
            (partial / file.name).write_text(_with_container_ids(file.read_text()))
        partial.rename(stages)
    return sorted(stages.glob("*.yaml"))


def _with_container_ids(stage: str) -> str:
    """Give containers that run an ID, as kubelets do: by it the operator tells starts of an engine apart."""
    runs = "name: {{ $item.name | Quote }}\n        ready: true\n        restartCount: 0\n        started: true"
    of_pod = 'containerID: {{ printf "kwok://%s/%s" $root.metadata.uid $item.name | Quote }}'
    return stage.replace(runs, f"{of_pod}\n        {runs}")


def lws_sources() -> Path:
    """Return the folder of the LeaderWorkerSet module that has its CRD and its webhooks: the program holds neither."""
    return golang.module_dir(TOOLS / "lws", "sigs.k8s.io/lws") / "config"


def gateway_api_crds(*, oldest: bool = False) -> Path:
    """Return the folder with the CRDs of the Gateway API's standard channel; ``oldest`` lacks timeouts of routes."""
    module = TOOLS / ("gateway-api-oldest" if oldest else "gateway-api")
    return golang.module_dir(module, "sigs.k8s.io/gateway-api") / "config" / "crd" / "standard"


def inference_extension_crds(*, oldest: bool = False) -> Path:
    """Return the folder with the CRDs of the Inference Extension; ``oldest`` has InferencePools of v1alpha2 only."""
    module = TOOLS / ("inference-extension-oldest" if oldest else "inference-extension")
    return golang.module_dir(module, "sigs.k8s.io/gateway-api-inference-extension") / "config" / "crd" / "bases"


def keda_crds() -> Path:
    """Return the folder of KEDA's module that has its CRDs: nothing of it is built."""
    return golang.module_dir(TOOLS / "keda", "github.com/kedacore/keda/v2") / "config" / "crd" / "bases"


def prometheus_operator_crds() -> Path:
    """Return the folder of the Prometheus operator's module that has its CRDs: nothing of it is built."""
    source = golang.module_dir(TOOLS / "prometheus-operator", "github.com/prometheus-operator/prometheus-operator")
    return source / "example" / "prometheus-operator-crd"


def _on_machine(name: str, group: Group) -> Path | None:
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    for origin, path in [("KUBEBUILDER_ASSETS", shutil.which(name, path=assets) if assets else None),
                         ("PATH", shutil.which(name))]:  # fmt: skip
        if path and (version := _version(Path(path), group.version_arguments)):
            if group.fits(version):
                return Path(path)
            if origin == "KUBEBUILDER_ASSETS":
                say(f"KUBEBUILDER_ASSETS: {name} is {version[0]}.{version[1]}, not used: {group.version} is needed")
    return None


def _version(path: Path, arguments: tuple[str, ...]) -> Version | None:
    try:
        answer = subprocess.run([str(path), *arguments], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\bv?(\d+)\.(\d+)\.\d+", answer.stdout)
    return (int(match[1]), int(match[2])) if match else None


def _cached(name: str, group: Group) -> Path | None:
    path = group.directory / name
    return path if path.exists() else None


def _build(name: str, group: Group) -> Path:
    """Build a program, and add the other names of its package in the same directory."""
    package, directory = group.packages[name], group.directory
    directory.mkdir(parents=True, exist_ok=True)
    same = (each for other in GROUPS if other.directory == directory for each in other.packages.items())
    names = dict.fromkeys([name, *(each for each, of in same if of == package and not (directory / each).exists())])
    partial = directory / f".{name}.partial"
    with step(f"building {', '.join(names)} of {group.name} {group.version} from Go modules (kept in {directory})"):
        golang.build(TOOLS / group.name, package, partial, group.flags)
        for each in names:
            (directory / each).hardlink_to(partial)
        partial.unlink()
    return directory / name
