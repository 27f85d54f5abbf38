"""Puts the operator into a cluster, the way that users do.

`python -m devcluster.install image|install|uninstall` works on the embedded
cluster `demo`, or, with KUBECONTEXT set, on a cluster that the user already
has; its nodes then pull the operator from IMAGE_REGISTRY.
"""

import argparse
import os
import sys
from collections.abc import Callable

from devcluster.builds import binaries
from devcluster.cluster.cluster import Cluster, check_rights, find_programs
from devcluster.cluster.kubectl import Kubectl
from devcluster.host import packages
from devcluster.host.errors import ClusterError
from devcluster.host.paths import REPOSITORY
from devcluster.host.progress import say, step
from devcluster.host.threads import together
from devcluster.images import operator_image, store
from devcluster.images.engine_environment import install_engine_environment
from devcluster.images.engine_image import build_engine_image
from devcluster.images.operator_image import build_operator_image

NAMESPACE = "specdecode-system"
OPERATOR = "specdecode-operator"
CRDS = tuple(f"{kind}.specdecode.io" for kind in ("specdecodedeployments", "specdecodecaptures", "specdecodetrainings"))
EMBEDDED = "demo"
_ROLLOUT_DEADLINE_S = 300


def prepare() -> None:
    """Install and build all that a cluster with a real node needs: the slow part of a first run."""
    check_rights("real")
    # Compilers need processors; images and packages often wait for downloads.
    together(build_programs, prepare_images)


def build_programs() -> None:
    """Build the programs of a cluster with a real node, and kubectl, if the machine has none."""
    find_programs("real")
    binaries.find("kubectl")


def prepare_images() -> None:
    """Install the packages of a real node, and make the images and the engine's environment."""
    packages.ensure((*packages.REAL_NODE, *packages.IMAGE_BUILD))
    install_engine_environment()
    build_engine_image()
    build_operator_image()


def load_engine_image(cluster: Cluster) -> None:
    """Load the CPU engine's image into an embedded cluster."""
    cluster.load_image(build_engine_image())


def load_operator_image(cluster: Cluster) -> None:
    """Load the operator's image into an embedded cluster; an operator that runs there is started anew from it."""
    operator = Kubectl(cluster.kubeconfig, NAMESPACE)
    if cluster.load_image(build_operator_image()) and operator("get", "deployment", OPERATOR).returncode == 0:
        operator.must("rollout", "restart", f"deployment/{OPERATOR}")


def install_operator(kubectl: Kubectl, image: str = operator_image.REFERENCE) -> None:
    """Install the CRDs, then the operator, and wait until it runs."""
    with step("installing CRDs and operator: kubectl apply --server-side -k crds, -k manifests"):
        kubectl.must("apply", "--server-side", f"--kustomize={REPOSITORY / 'crds'}")
        kubectl.wait_for_crds(*CRDS)
        operator = kubectl.within(NAMESPACE)
        manifests = operator.must("kustomize", str(REPOSITORY / "manifests"))
        manifests = manifests.replace(operator_image.REFERENCE, image)
        operator.must("apply", "--server-side", "--filename=-", stdin=manifests)
        operator.must(
            "rollout", "status", f"deployment/{OPERATOR}", f"--timeout={_ROLLOUT_DEADLINE_S}s",
            timeout_s=_ROLLOUT_DEADLINE_S + 10,
        )  # fmt: skip


def main() -> int:
    """Do what the command line says and return the exit status."""
    commands: dict[str, Callable[[], None]] = {"image": _image, "install": _install, "uninstall": _uninstall}
    parser = argparse.ArgumentParser(prog="python -m devcluster.install", description=__doc__)
    parser.add_argument("command", choices=commands)
    try:
        commands[parser.parse_args().command]()
    except ClusterError as error:
        say(f"error: {error}")
        return 1
    return 0


def _image() -> None:
    """Build the operator's image and bring it to where the cluster's nodes find it."""
    archive = build_operator_image()
    say(f"image {operator_image.REFERENCE}: {archive}")
    if registry := os.environ.get("IMAGE_REGISTRY"):
        with step(f"pushing {_pushed(registry)}"):
            store.push(operator_image.REFERENCE, _pushed(registry))
    elif "KUBECONTEXT" not in os.environ and Cluster(EMBEDDED).state.exists():
        load_operator_image(Cluster(EMBEDDED))


def _install() -> None:
    if context := os.environ.get("KUBECONTEXT"):
        registry = os.environ.get("IMAGE_REGISTRY")
        if not registry:
            raise ClusterError(
                f"IMAGE_REGISTRY: not set: the nodes of {context} pull the operator from a registry;"
                " set it to one that they reach, such as registry.example.com/team"
            )
        _image()
        install_operator(Kubectl(None, context=context), _pushed(registry))
    else:
        cluster = Cluster(EMBEDDED)
        cluster.up()
        load_operator_image(cluster)
        install_operator(Kubectl(cluster.kubeconfig))


def _uninstall() -> None:
    """Remove the operator. The CRDs stay: removing them would delete every object of a user."""
    context = os.environ.get("KUBECONTEXT")
    kubectl = Kubectl(None, context=context) if context else Kubectl(Cluster(EMBEDDED).kubeconfig)
    with step("removing the operator: kubectl delete -k manifests (the CRDs and their objects stay)"):
        kubectl.within(NAMESPACE).must("delete", "--ignore-not-found", f"--kustomize={REPOSITORY / 'manifests'}")


def _pushed(registry: str) -> str:
    return f"{registry.rstrip('/')}/specdecode-operator:dev"


if __name__ == "__main__":
    sys.exit(main())
