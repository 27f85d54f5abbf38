"""Where KServe puts a model: the address of its storage as a volume of the pod, at /mnt/models."""

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from specdecode_operator.kube.untyped import objects, texts

MODEL_PATH: Final = "/mnt/models"
_VOLUME: Final = "kserve-model"


def stored(pod: Mapping[str, Any], uri: str) -> dict[str, Any]:
    """Return the pod with its model where an address says: on the hub, on a claim, or elsewhere."""
    scheme, _, place = uri.partition("://")
    mount: dict[str, Any] = {"name": _VOLUME, "mountPath": MODEL_PATH}
    if scheme == "hf":
        model, _, revision = place.partition(":")
        command = ["hf", "download", model, "--local-dir", MODEL_PATH, *(["--revision", revision] if revision else [])]
        fetch = {"name": "storage-initializer", "image": "kserve/storage-initializer", "command": command}
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


def _mounted(pod: Mapping[str, Any], mount: dict[str, Any], volume: dict[str, Any]) -> dict[str, Any]:
    first, *rest = objects(pod, "containers")
    first = {**first, "volumeMounts": [*objects(first, "volumeMounts"), mount]}
    return {**pod, "containers": [first, *rest], "volumes": [*objects(pod, "volumes"), {"name": _VOLUME, **volume}]}


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
