"""The operator's image, built from the same Containerfile that docker and podman use."""

from pathlib import Path

from devcluster.host.locks import exclusive
from devcluster.host.paths import REPOSITORY, cache_dir
from devcluster.host.progress import step
from devcluster.images import store
from devcluster.images.base import base_reference, ensure_base
from devcluster.images.fingerprint import fingerprint, forget_others
from devcluster.images.pip_settings import pip_volumes

REFERENCE = "localhost/specdecode/operator:dev"
INPUTS = (
    "Containerfile",
    ".dockerignore",
    "LICENSE",
    "README.md",
    "operator",
    "pyproject.toml",
    "requirements/build.txt",
    "requirements/runtime.txt",
)


def build_operator_image() -> Path:
    """Return the archive of the operator's image, built when one of its inputs changed."""
    images = cache_dir() / "images"
    archive = images / f"specdecode-operator-{fingerprint(REPOSITORY, INPUTS, base_reference())}.tar"
    if archive.exists():
        return archive
    with exclusive(cache_dir() / "images.lock", "another image build"):
        base = ensure_base()
        with step(f"building {REFERENCE}"), pip_volumes() as volumes:
            store.build(REPOSITORY, REPOSITORY / "Containerfile", base, REFERENCE, volumes)
            store.export(REFERENCE, archive)
    forget_others(archive, "specdecode-operator-*.tar")
    return archive
