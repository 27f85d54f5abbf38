"""Image archives (OCI layout in a tar) from files, without a container engine."""

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def write_single_file_image(program: Path, reference: str, archive: Path) -> None:
    """Write an image `reference` whose one layer is `program` at `/<its name>`, its entry point."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        entry = tarfile.TarInfo(program.name)
        entry.size, entry.mode = program.stat().st_size, 0o755
        with program.open("rb") as content:
            tar.addfile(entry, content)
    blobs = {_digest(layer.getvalue()): layer.getvalue()}
    machine = platform.machine()
    config = _add(blobs, {
        "architecture": ARCHITECTURES.get(machine, machine), "os": "linux",
        "config": {"Entrypoint": [f"/{program.name}"]},
        "rootfs": {"type": "layers", "diff_ids": list(blobs)},
    })  # fmt: skip
    layers = [_descriptor("application/vnd.oci.image.layer.v1.tar", layer.getvalue())]
    manifest = _add(blobs, {
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": _descriptor("application/vnd.oci.image.config.v1+json", config), "layers": layers,
    })  # fmt: skip
    named = _descriptor("application/vnd.oci.image.manifest.v1+json", manifest)
    index = {"schemaVersion": 2, "manifests": [named | {"annotations": {"io.containerd.image.name": reference}}]}
    with tarfile.open(archive, "w") as tar:
        _write(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _write(tar, "index.json", json.dumps(index).encode())
        for digest, blob in blobs.items():
            _write(tar, f"blobs/{digest.replace(':', '/')}", blob)


def _digest(blob: bytes) -> str:
    return "sha256:" + hashlib.sha256(blob).hexdigest()


def _descriptor(media_type: str, blob: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}


def _add(blobs: dict[str, bytes], document: dict[str, object]) -> bytes:
    blob = json.dumps(document).encode()
    blobs[_digest(blob)] = blob
    return blob


def _write(tar: tarfile.TarFile, name: str, blob: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(blob)
    tar.addfile(entry, io.BytesIO(blob))
