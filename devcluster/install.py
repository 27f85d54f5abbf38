"""Puts the operator into a cluster, the way that users do."""

from devcluster.cluster import Cluster
from devcluster.images.engine_environment import install_engine_environment
from devcluster.images.engine_image import build_engine_image
from devcluster.images.operator_image import build_operator_image
from devcluster.kubectl import Kubectl
from devcluster.paths import REPOSITORY
from devcluster.progress import step

NAMESPACE = "specdecode-system"
OPERATOR = "specdecode-operator"
_ROLLOUT_DEADLINE_S = 120


def prepare_images() -> None:
    """Make what pods run, before a cluster needs it: the slow part of a first run."""
    install_engine_environment()
    build_engine_image()
    build_operator_image()


def load_engine_image(cluster: Cluster) -> None:
    """Load the CPU engine's image into a cluster."""
    cluster.load_image(build_engine_image())


def load_operator_image(cluster: Cluster) -> None:
    """Load the operator's image into a cluster; an operator that runs there already is started anew from it."""
    operator = Kubectl(cluster.kubeconfig, NAMESPACE)
    if cluster.load_image(build_operator_image()) and operator("get", "deployment", OPERATOR).returncode == 0:
        operator.must("rollout", "restart", f"deployment/{OPERATOR}")


def install_operator(kubectl: Kubectl) -> None:
    """Install the CRDs, then the operator, and wait until it runs."""
    with step("installing CRDs and operator: kubectl apply --server-side -k crds, -k manifests"):
        kubectl.must("apply", "--server-side", f"--kustomize={REPOSITORY / 'crds'}")
        kubectl.must("wait", "--for=condition=Established", "--timeout=30s", "crd", "specdecodedeployments.specdecode.io")
        operator = Kubectl(kubectl.kubeconfig, NAMESPACE)
        operator.must("apply", "--server-side", f"--kustomize={REPOSITORY / 'manifests'}")
        operator.must(
            "rollout", "status", f"deployment/{OPERATOR}", f"--timeout={_ROLLOUT_DEADLINE_S}s",
            timeout_s=_ROLLOUT_DEADLINE_S + 10,
        )  # fmt: skip
