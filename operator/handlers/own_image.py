"""The image that this operator runs from: pods of captures and replays run the same code."""

import os

from specdecode_operator.cluster.client import Cluster
from specdecode_operator.kube.resources import POD

IMAGE_VARIABLE = "SPECDECODE_OPERATOR_IMAGE"
"""Names the image where the operator runs in no pod, or other pods shall take it from elsewhere."""

_CONTAINER = "operator"


async def own_image(cluster: Cluster) -> str | None:
    """Return the image that the environment names, or else that of the operator's own pod; None without both.

    Its pod knows best: whoever installs it names the image in one place, whatever the tool.

    Raises
    ------
    ClusterError
        When the pod cannot be read.
    """
    if image := os.environ.get(IMAGE_VARIABLE):
        return image
    namespace, name = os.environ.get("POD_NAMESPACE"), os.environ.get("POD_NAME")
    pod = await cluster.get(POD, namespace, name) if namespace and name else None
    if pod is None:
        return None
    containers = {each["name"]: each["image"] for each in pod["spec"]["containers"]}
    return containers.get(_CONTAINER)
