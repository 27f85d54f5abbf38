"""A Kubernetes cluster on this machine, for development and tests.

Everything about it lies in one state directory, one pair of namespaces and one cgroup, and
every process carries its mark: `up` starts whatever is missing, `down` removes everything.
"""

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path

from devcluster.builds import binaries
from devcluster.cluster import control_plane, lws, node, nodes, oci
from devcluster.cluster.api import Api, is_ready
from devcluster.cluster.settings import Settings
from devcluster.host import packages, processes, sandbox
from devcluster.host.errors import ClusterError
from devcluster.host.locks import exclusive
from devcluster.host.paths import state_root
from devcluster.host.progress import say, step

_MACHINE_LOCK = Path("/run/specdecode-devcluster.lock")
_START_DEADLINE_S = 300.0
_LOG_TAIL_LINES = 15


class Cluster:
    """The cluster of this name: `demo` for the demo, `test-…` for tests."""

    def __init__(self, name: str) -> None:
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?", name):
            raise ClusterError(f"cluster name {name!r}: use lower case letters, digits and dashes, 40 at most")
        self.name = name
        self.state = state_root() / name
        self.kubeconfig = self.state / "kubeconfig"

    # --- up and down

    def up(self, nodes: str = "real", kubernetes: str = binaries.USUAL) -> None:
        """Start the cluster, or start again what is missing of it; return when it is ready."""
        started = time.monotonic()
        _check_kubernetes(kubernetes, nodes)
        check_rights(nodes)
        with self._locked():
            settings = Settings.load(self.state)
            if settings and settings.complete:
                if (settings.nodes, settings.kubernetes) != (nodes, kubernetes):
                    runs = f"runs with --nodes {settings.nodes} --kubernetes {settings.kubernetes}"
                    raise ClusterError(f"cluster {self.name} {runs}: take it down first")
                if self._healthy(settings):
                    say(f"cluster {self.name} is already up")
                    return
                self._repair(settings)
            else:
                self._create(nodes, kubernetes)
        say(f"cluster {self.name} is up ({time.monotonic() - started:.1f} s): export KUBECONFIG={self.kubeconfig}")

    def down(self) -> None:
        """Remove the cluster and every trace of it, whatever state it is in."""
        started = time.monotonic()
        with self._locked():
            found = self.state.exists() or bool(processes.marked(self.state))
            self._remove()
        with suppress(OSError):  # other clusters are in it
            self.state.parent.rmdir()
        elapsed_s = time.monotonic() - started
        say(f"cluster {self.name} is down ({elapsed_s:.1f} s)" if found else f"cluster {self.name} is not up")

    def _create(self, wanted: str, kubernetes: str) -> None:
        self._remove()  # what an interrupted attempt left
        plan = nodes.parse(wanted)
        packages.ensure(
            packages.REAL_NODE if plan.real else packages.NAMESPACE if plan.needs_root else packages.CONTROL_PLANE
        )
        find_programs(wanted, kubernetes)  # builds can take minutes: before anything starts
        for directory in ("logs", "config"):
            (self.state / directory).mkdir(parents=True)
        if plan.needs_root:
            with exclusive(_MACHINE_LOCK, "another cluster is being set up"):
                settings = Settings.new(wanted, sandbox.free_index(_indexes_in_use()), kubernetes)
                settings.save(self.state)
                self._sandbox(settings).create()
        else:
            settings = Settings.new(wanted, None, kubernetes)
            settings.save(self.state)
        control_plane.write_files(self.state, settings)
        if plan.real:
            node.write_files(self.state, settings, self._sandbox(settings).cgroup)
        self._start(settings)
        self._add_missing_fake_nodes(settings)
        self._wait_until_usable(settings)
        replace(settings, complete=True).save(self.state)

    def _repair(self, settings: Settings) -> None:
        if settings.index is not None and not self._sandbox(settings).exists():
            say(f"cluster {self.name} has lost its namespaces: making it anew")
            self._create(settings.nodes, settings.kubernetes)
            return
        missing = [name for name in self.components(settings) if self.component_pid(name) is None]
        say(f"cluster {self.name} is not healthy (not running: {', '.join(missing) or 'none'}): repairing it")
        try:
            self._start(settings)
            self._wait_until_usable(settings)
        except ClusterError as error:
            say(f"repair failed ({error}); making the cluster anew")
            self._create(settings.nodes, settings.kubernetes)

    def _remove(self) -> None:
        if os.geteuid() == 0:
            settings = Settings.load(self.state) or Settings.new("none", None)
            with exclusive(_MACHINE_LOCK, "another cluster is being set up or removed"):
                self._sandbox(settings).destroy()
        else:
            processes.kill_all(lambda: processes.marked(self.state))
        if self.state.exists():
            shutil.rmtree(self.state)

    # --- what runs in it

    def components(self, settings: Settings | None = None) -> list[str]:
        """Return the names of the daemons that the cluster consists of."""
        settings = settings or self._settings()
        names = list(control_plane.COMPONENTS)
        if settings.plan.real:
            names += node.COMPONENTS
        if settings.simulates:
            names.append("kwok")
        if settings.lws_port is not None:
            names.append(lws.COMPONENT)
        return names

    def component_pid(self, name: str) -> int | None:
        """Return the pid of a daemon such as `kube-apiserver`, None where it does not run."""
        return processes.find(self.state, name)

    def logs(self, component: str) -> str:
        """Return what a daemon has logged."""
        file = self.state / "logs" / f"{component}.log"
        if not file.exists():
            known = ", ".join(sorted(f.stem for f in file.parent.glob("*.log"))) or "none: the cluster is not up"
            raise ClusterError(f"no log of {component!r} in cluster {self.name}. There are: {known}")
        return file.read_text(errors="replace")

    def in_namespace(self, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command inside the cluster's namespaces and return what it said."""
        # Marked, so that `down` ends it too: it would keep the namespaces alive.
        environment = os.environ | {processes.CLUSTER_MARK: str(self.state)}
        command = [*self._enter(self._settings()), *argv]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    def start_beside(self, component: str, argv: Sequence[str]) -> int:
        """Start a daemon that is the caller's own inside the cluster's namespaces; it goes with the cluster."""
        log = self.state / "logs" / f"{component}.log"
        return processes.start(self.state, component, [*self._enter(self._settings()), *argv], log)

    def load_image(self, archive: Path) -> bool:
        """Import an image archive (OCI or Docker layout); return False where the same file was imported before."""
        with archive.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        record = self.state / "images.json"
        loaded: dict[str, str] = json.loads(record.read_text()) if record.exists() else {}
        if digest in loaded:
            return False
        with step(f"loading {archive.name} into cluster {self.name}"):
            if problem := node.import_image(self._enter(self._settings()), archive):
                raise ClusterError(f"loading {archive} into cluster {self.name} failed: {problem}")
        record.write_text(json.dumps(loaded | {digest: archive.name}))
        return True

    def api(self) -> Api:
        """Return the API server as its administrator sees it."""
        return Api(self._settings().api_url, self.state / "pki")

    # --- simulated nodes

    def add_fake_nodes(self, groups: Sequence[nodes.FakeNodes]) -> list[str]:
        """Add simulated nodes, wait until they are Ready, and return their names."""
        settings = self._settings()
        if settings.index is None:
            message = f"cluster {self.name} has no namespace for simulated nodes: up with --nodes kwok=… or real"
            raise ClusterError(message)
        settings = replace(settings, simulates=True)
        settings.save(self.state)
        self._start(settings)
        api = self.api()
        added = nodes.manifests(groups, taken=[n["metadata"]["name"] for n in api.nodes()])
        for name, manifest in added.items():
            api.apply(f"/api/v1/nodes/{name}", manifest)
        self._wait_until_usable(settings)
        return list(added)

    def remove_fake_nodes(self, names: Sequence[str] | None = None) -> None:
        """Remove the named simulated nodes, all of them by default."""
        api = self.api()
        existing = [n["metadata"]["name"] for n in api.nodes(nodes.FAKE_SELECTOR)]
        unknown = sorted(set(names or ()) - set(existing))
        if unknown:
            raise ClusterError(f"no simulated node {', '.join(unknown)}. There are: {', '.join(existing) or 'none'}")
        for name in existing if names is None else names:
            api.delete(f"/api/v1/nodes/{name}")

    def _add_missing_fake_nodes(self, settings: Settings) -> None:
        api = self.api()
        for name, manifest in nodes.manifests(settings.plan.fake).items():
            api.apply(f"/api/v1/nodes/{name}", manifest)

    # --- groups of pods

    def add_lws(self) -> None:
        """Add LeaderWorkerSets: the kind, and the controller that makes groups of pods of them."""
        settings = self._settings().with_lws()
        binaries.find(lws.COMPONENT)  # a build takes minutes: before anything starts
        settings.save(self.state)
        self._start_lws(settings)

    def _start_lws(self, settings: Settings) -> None:
        api, program = self.api(), binaries.find(lws.COMPONENT)[lws.COMPONENT]
        lws.apply_crd(api)
        self._wait(lambda: lws.established(api), "LeaderWorkerSets are served", ["kube-apiserver"])
        lws.write_files(self.state, settings)
        self._ensure(settings, lws.COMPONENT, lws.command(program, self.state))
        host, port = settings.api_address, settings.lws_port or 0
        self._wait(lambda: _reachable(host, port), "the LeaderWorkerSet controller answers", [lws.COMPONENT])
        lws.apply_hooks(api, self.state, settings)
        self._wait(lambda: lws.hooks_answer(api), "the webhooks of LeaderWorkerSets are called", [lws.COMPONENT])

    # --- starting parts

    def _start(self, settings: Settings) -> None:
        """Start what does not run, in the order in which the parts need each other."""
        program = _programs(settings.plan, settings.kubernetes, simulates=settings.simulates)
        state, api = self.state, self.api()
        self._ensure(settings, "etcd", control_plane.etcd(program["etcd"], state, settings))
        if settings.plan.real:
            self._ensure(settings, "containerd", node.containerd(Path(packages.which("containerd") or ""), state))
        apiserver = control_plane.kube_apiserver(program["kube-apiserver"], state, settings)
        self._ensure(settings, "kube-apiserver", apiserver)
        if settings.plan.real:
            self._load_pause_image(settings, program["pause"])
        self._wait(api.ready, "the API server is ready", ["etcd", "kube-apiserver"])
        manager = control_plane.kube_controller_manager(program["kube-controller-manager"], state, settings)
        self._ensure(settings, "kube-controller-manager", manager)
        scheduler = control_plane.kube_scheduler(program["kube-scheduler"], state, settings)
        self._ensure(settings, "kube-scheduler", scheduler)
        if settings.plan.real:
            self._ensure(settings, "kubelet", node.kubelet(program["kubelet"], state, settings))
            self._ensure(settings, "kube-proxy", node.kube_proxy(program["kube-proxy"], state))
            self._ensure(settings, "volume-modes", node.volume_modes(state))
        if settings.index is not None:  # without namespaces, volumes would lie in the machine's /tmp
            api.apply("/apis/storage.k8s.io/v1/storageclasses/standard", control_plane.STORAGE_CLASS)
        if settings.simulates:
            self._ensure(settings, "kwok", node.kwok(program["kwok"], state, settings))
        if settings.lws_port is not None:
            self._start_lws(settings)

    def _ensure(self, settings: Settings, component: str, command: list[str]) -> None:
        if self.component_pid(component) is None:
            log = self.state / "logs" / f"{component}.log"
            processes.start(self.state, component, [*self._enter(settings), *command], log)

    def _load_pause_image(self, settings: Settings, program: Path) -> None:
        archive = program.with_name("pause.tar")
        if not archive.exists():
            partial = archive.with_name(f"pause.tar.partial-{os.getpid()}")
            oci.write_single_file_image(program, node.PAUSE_IMAGE, partial)
            partial.rename(archive)
        enter = self._enter(settings)

        def imported() -> bool:
            return not node.import_image(enter, archive)

        self._wait(imported, "containerd takes images", ["containerd"])

    def _wait_until_usable(self, settings: Settings) -> None:
        api = self.api()
        # Without it the first pod that somebody creates is refused.
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        self._wait(lambda: api.exists(account), "pods are admitted", ["kube-controller-manager"])
        if settings.plan.real:
            self._wait(
                lambda: _node_ready(api, control_plane.NODE_NAME), "the node is Ready", ["kubelet", "kube-apiserver"]
            )
            service = settings.addresses.api_service
            self._wait(lambda: _reachable(service, 443), "Services have addresses that work", ["kube-proxy"])
        if settings.simulates:
            self._wait(
                lambda: all(map(is_ready, api.nodes(nodes.FAKE_SELECTOR))),
                "the simulated nodes are Ready", ["kwok", "kube-apiserver"],
            )  # fmt: skip

    def _wait(self, condition: Callable[[], bool], what: str, needed: Sequence[str]) -> None:
        """Wait for a condition; fail at once when a daemon that it needs has ended."""
        deadline = time.monotonic() + _START_DEADLINE_S
        while not _holds(condition):
            ended = [name for name in needed if self.component_pid(name) is None]
            if ended or time.monotonic() > deadline:
                why = f"{ended[0]} has ended" if ended else f"{_START_DEADLINE_S:.0f} s have passed"
                shown = ended[0] if ended else needed[0]
                tail = "\n".join(self.logs(shown).splitlines()[-_LOG_TAIL_LINES:])
                message = f"waiting until {what}: {why}. The end of {self.state}/logs/{shown}.log:\n{tail}"
                raise ClusterError(message)
            time.sleep(0.05)

    def _healthy(self, settings: Settings) -> bool:
        if settings.index is not None and not self._sandbox(settings).exists():
            return False
        if any(self.component_pid(name) is None for name in self.components(settings)):
            return False
        api = self.api()
        return api.ready() and (not settings.plan.real or _node_ready(api, control_plane.NODE_NAME))

    # --- small things

    def _settings(self) -> Settings:
        if settings := Settings.load(self.state):
            return settings
        raise ClusterError(f"cluster {self.name} is not up: run up first")

    def _sandbox(self, settings: Settings) -> sandbox.Sandbox:
        return sandbox.Sandbox(self.state, settings.addresses)

    def _enter(self, settings: Settings) -> list[str]:
        return [] if settings.index is None else self._sandbox(settings).enter()

    def _locked(self) -> AbstractContextManager[None]:
        return exclusive(self.state.with_name(f".{self.name}.lock"), f"another command works on cluster {self.name}")


def check_rights(wanted: str) -> None:
    """Raise an error if this user cannot start a cluster with these nodes."""
    if nodes.parse(wanted).needs_root and os.geteuid() != 0:
        message = f"--nodes {wanted} needs root (namespaces, cgroups). As an ordinary user: --nodes none"
        raise ClusterError(message)


def find_programs(wanted: str, kubernetes: str = binaries.USUAL) -> dict[str, Path]:
    """Return the paths of the programs of a cluster with these nodes, building the missing ones."""
    plan = nodes.parse(wanted)
    return _programs(plan, kubernetes, simulates=bool(plan.fake))


def existing() -> list[Cluster]:
    """Return the clusters of this user that are up, wholly or in part."""
    return [Cluster(file.parent.name) for file in sorted(state_root().glob("*/cluster.json"))]


def _holds(condition: Callable[[], bool]) -> bool:
    """Decide whether a condition holds; not while the API server fails to answer."""
    with suppress(ClusterError):
        return condition()
    return False


def _indexes_in_use() -> set[int]:
    found = (Settings.load(cluster.state) for cluster in existing())
    return {settings.index for settings in found if settings and settings.index is not None}


def _programs(plan: nodes.NodePlan, kubernetes: str, *, simulates: bool) -> dict[str, Path]:
    """Return the paths of the programs that such a cluster needs."""
    names = list(control_plane.COMPONENTS)
    if plan.real:
        names += ["kubelet", "kube-proxy", "pause"]
    if simulates:
        names.append("kwok")
    return binaries.find(*names, kubernetes=kubernetes)


def _reachable(address: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((address, port), timeout=0.2):
        return True
    return False


def _node_ready(api: Api, name: str) -> bool:
    return any(n["metadata"]["name"] == name and is_ready(n) for n in api.nodes())


def _check_kubernetes(kubernetes: str, wanted: str) -> None:
    if kubernetes not in binaries.KUBERNETES:
        raise ClusterError(f"--kubernetes {kubernetes}: use one of {', '.join(binaries.KUBERNETES)}")
    if nodes.parse(wanted).real and kubernetes != binaries.USUAL:
        message = f"--kubernetes {kubernetes} has no kubelet here: --nodes none or kwok=…, or {binaries.USUAL}"
        raise ClusterError(message)
