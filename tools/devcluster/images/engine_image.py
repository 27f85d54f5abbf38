"""The CPU engine's image: libraries and an entry point; vLLM itself is mounted from the node."""

from pathlib import Path

from devcluster.host.locks import exclusive
from devcluster.host.paths import cache_dir
from devcluster.host.progress import step
from devcluster.images import store
from devcluster.images.base import base_reference, ensure_base
from devcluster.images.fingerprint import fingerprint, forget_others

VLLM_VERSION = "0.32.0"
REFERENCE = f"localhost/specdecode/engine-cpu:{VLLM_VERSION}"
CONTEXT = Path(__file__).parent / "engine-cpu"
INPUTS = ("Containerfile", "vllm")


def build_engine_image() -> Path:
    """Return the archive of the CPU engine's image, built when one of its inputs changed."""
    images = cache_dir() / "images"
    archive = images / f"specdecode-engine-cpu-{fingerprint(CONTEXT, INPUTS, base_reference())}.tar"
    if archive.exists():
        return archive
    with exclusive(cache_dir() / "images.lock", "another image build"):
        base = ensure_base()
        with step(f"building {REFERENCE}"):
            store.build(CONTEXT, CONTEXT / "Containerfile", base, REFERENCE, volumes={})
            store.export(REFERENCE, archive)
    forget_others(archive, "specdecode-engine-cpu-*.tar")
    return archive
