"""The commands of the development cluster and what they print."""

import argparse
from collections.abc import Callable
from pathlib import Path

from devcluster.builds import binaries
from devcluster.cluster import nodes
from devcluster.cluster.api import is_ready
from devcluster.cluster.cluster import Cluster, existing
from devcluster.host.errors import ClusterError

Parser = argparse.ArgumentParser


def parser() -> Parser:
    """Return the parser; each command's function is its `run`."""
    top = Parser(
        prog="python -m devcluster", description="A Kubernetes cluster on this machine, for development and tests."
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    up = _command(commands, "up", _up, "start the cluster, or repair it; does nothing when it is healthy")
    up.add_argument("--nodes", default="real", help=f"{nodes.FORMAT} (default: real; none needs no root)")
    minors = ", ".join(binaries.KUBERNETES)
    up.add_argument("--kubernetes", default=binaries.USUAL, help=f"{minors} (default: {binaries.USUAL})")
    _command(commands, "down", _down, "remove the cluster and every trace of it")
    _command(commands, "status", _status, "show what runs, and the nodes")
    logs = _command(commands, "logs", _logs, "show the end of one daemon's log, or of all of them")
    logs.add_argument("component", nargs="?", help="for example kube-apiserver, kubelet, containerd")
    logs.add_argument("--lines", type=int, default=30, help="how many lines of each (default: 30)")
    load = _command(commands, "load-image", _load_image, "import an image archive (OCI or Docker layout)")
    load.add_argument("archive", type=Path)
    change = _command(commands, "nodes", _nodes, "list nodes, add or remove simulated ones")
    choice = change.add_mutually_exclusive_group()
    choice.add_argument("--add", metavar="GROUPS", help="for example 2xH100:8,1xH200:8 (nodes x product : GPUs each)")
    choice.add_argument("--remove", metavar="NAME", nargs="*", help="these simulated nodes; all when none is named")
    _command(commands, "lws", _lws, "add LeaderWorkerSets, for replicas on several nodes: the kind and its controller")
    return top


def _command(
    commands: "argparse._SubParsersAction[Parser]", name: str, run: Callable[[argparse.Namespace], None], text: str
) -> Parser:
    command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    command.add_argument("--name", default="demo", help="the cluster's name (default: demo)")
    command.set_defaults(run=run)
    return command


def _up(arguments: argparse.Namespace) -> None:
    Cluster(arguments.name).up(arguments.nodes, arguments.kubernetes)


def _down(arguments: argparse.Namespace) -> None:
    Cluster(arguments.name).down()


def _status(arguments: argparse.Namespace) -> None:
    cluster = Cluster(arguments.name)
    if cluster.state not in [other.state for other in existing()]:
        others = ", ".join(other.name for other in existing())
        print(f"cluster {cluster.name} is not up" + (f" (up: {others})" if others else ""))
        return
    print(f"cluster {cluster.name}\n  kubeconfig  {cluster.kubeconfig}\n  state       {cluster.state}")
    for component in cluster.components():
        pid = cluster.component_pid(component)
        print(f"  {component:<24} {f'running, pid {pid}' if pid else 'NOT RUNNING: run up to repair'}")
    if cluster.api().ready():
        _print_nodes(cluster)
    else:
        print("  the API server is not ready")


def _logs(arguments: argparse.Namespace) -> None:
    cluster = Cluster(arguments.name)
    for component in [arguments.component] if arguments.component else cluster.components():
        print(f"==> {component}: {cluster.state}/logs/{component}.log <==")
        print("\n".join(cluster.logs(component).splitlines()[-arguments.lines :]))


def _load_image(arguments: argparse.Namespace) -> None:
    if not arguments.archive.is_file():
        raise ClusterError(f"{arguments.archive}: no such file; give an image archive such as build/operator.tar")
    Cluster(arguments.name).load_image(arguments.archive)


def _nodes(arguments: argparse.Namespace) -> None:
    cluster = Cluster(arguments.name)
    if arguments.add is not None:
        cluster.add_fake_nodes(nodes.parse_fake(arguments.add))
    if arguments.remove is not None:
        cluster.remove_fake_nodes(arguments.remove or None)
    _print_nodes(cluster)


def _lws(arguments: argparse.Namespace) -> None:
    Cluster(arguments.name).add_lws()


def _print_nodes(cluster: Cluster) -> None:
    for node in cluster.api().nodes():
        gpus = node["status"].get("capacity", {}).get("nvidia.com/gpu")
        product = node["metadata"].get("labels", {}).get("nvidia.com/gpu.product", "GPU")
        ready = "Ready" if is_ready(node) else "NotReady"
        print(f"  node {node['metadata']['name']:<19} {ready}" + (f", {gpus} x {product}" if gpus else ""))
