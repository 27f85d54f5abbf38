"""Where KServe puts a model: the address of its storage as a volume of the pod, at /mnt/models."""

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from specdecode_operator.kube.untyped import mapping, objects, texts
from specdecode_operator.migration.sources.workload import Remarks

MODEL_PATH: Final = "/mnt/models"
SECRET_ANNOTATION: Final = "serving.kserve.io/secretName"  # noqa: S105 (no password)
"""Names the Secret with the credentials of a model's storage (pkg/credentials of KServe)."""

DRAFT_PATH: Final = "/mnt/speculator"
_FETCH_IMAGE: Final = "kserve/storage-initializer"
_TOKEN_KEY: Final = "HF_TOKEN"  # noqa: S105 (no password)
_VOLUME: Final = "kserve-model"
_DRAFT_VOLUME: Final = "kserve-speculator"


def stored(pod: Mapping[str, Any], uri: str) -> dict[str, Any]:
    """Return the pod with its model where an address says: on the hub, on a claim, or elsewhere."""
    scheme, _, place = uri.partition("://")
    mount: dict[str, Any] = {"name": _VOLUME, "mountPath": MODEL_PATH}
    if scheme == "hf":
        model, _, revision = place.partition(":")
        command = ["hf", "download", model, "--local-dir", MODEL_PATH, *(["--revision", revision] if revision else [])]
        fetch = {"name": "storage-initializer", "image": _FETCH_IMAGE, "command": command}
        found = _mounted(pod, mount, {"emptyDir": {}})
        return {**found, "initContainers": [*objects(pod, "initContainers"), fetch]}
    if scheme == "pvc":
        claim, _, folder = place.partition("/")
        volume = {"persistentVolumeClaim": {"claimName": claim}}
        return _mounted(pod, mount | ({"subPath": folder.strip("/")} if folder.strip("/") else {}), volume)
    # Nothing else is a place that models are taken from: named by its address, the model is asked for.
    address = urlsplit(uri)._replace(query="", fragment="").geturl() if "@" not in uri else f"{scheme}://…"
    containers = [_renamed(each, address) for each in objects(pod, "containers")]
    return {**pod, "containers": containers}


def draft_name(uri: str) -> str:
    """Return how the server names a draft at an address: a hub id, the path of a claim, or the address itself."""
    scheme, _, place = uri.partition("://")
    return {"hf": place, "pvc": DRAFT_PATH}.get(scheme, uri)


def stored_draft(pod: Mapping[str, Any], uri: str) -> dict[str, Any]:
    """Return the pod with the claim of a draft mounted; a draft elsewhere needs no volume."""
    scheme, _, place = uri.partition("://")
    if scheme != "pvc":
        return dict(pod)
    claim, _, folder = place.partition("/")
    mount = {"name": _DRAFT_VOLUME, "mountPath": DRAFT_PATH} | ({"subPath": folder.strip("/")} if folder else {})
    return _mounted(pod, mount, {"persistentVolumeClaim": {"claimName": claim}})


def _mounted(pod: Mapping[str, Any], mount: dict[str, Any], volume: dict[str, Any]) -> dict[str, Any]:
    first, *rest = objects(pod, "containers")
    first = {**first, "volumeMounts": [*objects(first, "volumeMounts"), mount]}
    return {
        **pod,
        "containers": [first, *rest],
        "volumes": [*objects(pod, "volumes"), {**volume, "name": mount["name"]}],
    }


def _renamed(container: Mapping[str, Any], address: str) -> dict[str, Any]:
    words = {
        key: [
            address if word == MODEL_PATH else word.replace(f"={MODEL_PATH}", f"={address}")
            for word in texts(container, key)
        ]
        for key in ("command", "args")
        if key in container
    }
    return {**container, **words}


def with_token(pod: dict[str, Any], body: Mapping[str, Any], remarks: Remarks) -> dict[str, Any]:
    """Return the pod whose download reads the hub's token from the Secret that an annotation of the object names."""
    secret = mapping(mapping(body, "metadata"), "annotations").get(SECRET_ANNOTATION)
    if not secret:
        return pod
    fetches = [each for each in objects(pod, "initContainers") if each.get("image") == _FETCH_IMAGE]
    if not fetches:
        remarks.drop(f"annotation {SECRET_ANNOTATION}", "is for a download, and the model is not downloaded")
        return pod
    remarks.own(f"annotation {SECRET_ANNOTATION}", f"its key {_TOKEN_KEY} is the hub's token")
    reference = {"secretKeyRef": {"name": str(secret), "key": _TOKEN_KEY}}
    fetches[-1]["env"] = [{"name": _TOKEN_KEY, "valueFrom": reference}]
    return pod
