"""The image of a release as a file: an OCI layout in a tar, the same bytes for the same image."""

import json
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from devcluster.images import store


def write(image: str, archive: Path) -> str:
    """Write an image of the store as an OCI archive, and return the digest of its manifest."""
    with TemporaryDirectory(prefix="specdecode-release-") as folder:
        exported, layout = Path(folder) / "exported.tar", Path(folder) / "layout"
        store.export(image, exported)
        unpack(exported, layout)
        with tarfile.open(archive, "w", format=tarfile.USTAR_FORMAT) as tar:
            for file in sorted(file for file in layout.rglob("*") if file.is_file()):
                # Nothing of when and by whom it was made.
                entry = tarfile.TarInfo(str(file.relative_to(layout)))
                entry.size, entry.mode = file.stat().st_size, 0o644
                with file.open("rb") as content:
                    tar.addfile(entry, content)
        (manifest,) = json.loads((layout / "index.json").read_text())["manifests"]
        return str(manifest["digest"])


def unpack(archive: Path, layout: Path) -> None:
    """Unpack an OCI archive into a folder."""
    with tarfile.open(archive) as tar:
        tar.extractall(layout, filter="data")
