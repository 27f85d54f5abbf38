"""Tells the load generator of a capture which image its engine runs: the digest, which only the node knows.

A tag can be moved, so the manifest shall say what it stood for. The kubelet writes that into the pod's status, which
the operator reads anyway, and shows a ConfigMap to the pod as a file that it keeps up to date. An annotation of the pod
would do as well, but for it the operator would need the right to change every pod of the cluster.
"""

from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.capture.control.capture import Capture
from specdecode_operator.capture.job.image import IMAGE_ID_FILE
from specdecode_operator.deployment.spec.pod_template_merge import ENGINE_CONTAINER
from specdecode_operator.kube.manifests import owned

FOLDER: Final = str(IMAGE_ID_FILE.parent)
_FILE: Final = IMAGE_ID_FILE.name


def image_id_volume(capture: Capture) -> Body:
    """Return the volume that shows the image's id as a file; the ConfigMap comes only after the pod."""
    items = [{"key": _FILE, "path": _FILE}]
    return {"configMap": {"name": _name(capture), "items": items, "optional": True}}


def image_id_config_map(capture: Capture, pod: Body | None) -> Body | None:
    """Return the ConfigMap that says which image the engine of a pod runs; None before its node knows.

    There is one for all attempts of a capture, so it says of which pod it speaks.
    """
    image_id = _image_id(pod) if pod is not None else None
    if pod is None or not image_id:
        return None
    data = {_FILE: f"{pod['metadata']['uid']} {image_id}\n"}
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": _name(capture)}, "data": data}
    return owned(config_map, capture.key, capture.uid)


def _name(capture: Capture) -> str:
    """Return the ConfigMap's name: that of the claim and the Job."""
    return capture.job_name


def _image_id(pod: Body) -> str | None:
    """Return what the node calls the engine's image; empty or None before it has it."""
    statuses = pod.get("status", {}).get("initContainerStatuses") or []
    return next((each.get("imageID") for each in statuses if each["name"] == ENGINE_CONTAINER), None)
