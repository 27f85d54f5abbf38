"""The kubectl plugin of a release: `kubectl specdecode`, and its manifest for krew.

The command line is a Python package, which krew cannot install. So the plugin only runs the installed command
`specdecode`, and explains how to install it if it is missing.
"""

import hashlib
from pathlib import Path
from typing import Any, Final

import yaml

from devcluster.host.paths import REPOSITORY
from devcluster.release.record import Release
from devcluster.release.tarball import tarball

MANIFEST: Final = "specdecode.yaml"
"""krew requires that the file has the name of the plugin."""

_PROGRAM: Final = "kubectl-specdecode"
_INSTALL: Final = "uv tool install ./specdecode_operator-*.whl"
_SCRIPT: Final = """#!/bin/sh
# kubectl plugin: runs the command `specdecode`.
if ! command -v specdecode >/dev/null; then
    echo "specdecode: not installed; download the wheel of the release, and run: {install}" >&2
    exit 127
fi
exec specdecode "$@"
"""


def archive_name(release: Release) -> str:
    """Return the name of the plugin's archive in dist/."""
    return f"{_PROGRAM}-{release.version}.tar.gz"


def archive() -> bytes:
    """Return the plugin's archive: the script and the license, which krew requires."""
    files = {_PROGRAM: _SCRIPT.format(install=_INSTALL), "LICENSE": (REPOSITORY / "LICENSE").read_text()}
    return tarball(files, executable=frozenset({_PROGRAM}))


def manifest(release: Release) -> dict[str, Any]:
    """Return the plugin's manifest."""
    homepage = release.source_or_placeholder
    platform = {
        "selector": {"matchExpressions": [{"key": "os", "operator": "In", "values": ["darwin", "linux"]}]},
        "uri": f"{homepage}/releases/download/v{release.version}/{archive_name(release)}",
        "sha256": hashlib.sha256(archive()).hexdigest(),
        "files": [{"from": name, "to": "."} for name in (_PROGRAM, "LICENSE")],
        "bin": _PROGRAM,
    }
    return {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": Path(MANIFEST).stem},
        "spec": {
            "version": f"v{release.version}",
            "homepage": homepage,
            "shortDescription": "Plan, check and measure vLLM with speculation",
            "description": (
                "Plans whether a target model and a draft fit in GPU memory, checks manifests of specdecode-operator,\n"
                "and manages captures. Runs the command `specdecode`, which you install separately.\n"
            ),
            "caveats": f"Download the wheel of the release, and run: {_INSTALL}\n",
            "platforms": [platform],
        },
    }


def write(release: Release, folder: Path) -> None:
    """Write the plugin's archive and manifest into a folder."""
    (folder / archive_name(release)).write_bytes(archive())
    (folder / MANIFEST).write_text(yaml.safe_dump(manifest(release), sort_keys=False))
