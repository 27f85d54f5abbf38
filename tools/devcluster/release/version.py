"""Sets the version of everything in one step: `python -m devcluster.release.version 0.2.0` (./just version).

Written by hand it stands in operator/version.py alone. Both charts, what readers copy, and CHANGELOG follow
here; CRDs, manifests, documents and golden files are made anew of these by the recipe.
"""

import argparse
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from devcluster.host.errors import ClusterError, exit_status
from devcluster.host.paths import REPOSITORY
from devcluster.release import changelog

CHARTS: Final = ("charts/specdecode-operator/Chart.yaml", "charts/specdecode-crds/Chart.yaml")
SOURCE: Final = "operator/version.py"
DOCUMENTS: Final = ("README.md", "SECURITY.md", "docs/install/install.md")
"""With commands and kustomizations that set the version for readers."""

_SEMVER: Final = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(?:-rc\.(0|[1-9]\d*))?")
"""Of Semantic Versioning what tags of images, Helm and Python packages write alike: with release candidates."""


def current(root: Path = REPOSITORY) -> str:
    """Return the version of a checkout."""
    match = re.search(r'^__version__ = "(.+)"$', (root / SOURCE).read_text(), re.MULTILINE)
    if not match:
        raise ClusterError(f'{SOURCE}: no line __version__ = "…"')
    return match[1]


def set_version(version: str, root: Path = REPOSITORY) -> list[Path]:
    """Write a version wherever it stands by hand, and return the files; nothing is written where it cannot be.

    Raises
    ------
    ClusterError
        It is no version, older than that of the checkout, tagged or released already.
    """
    before = current(root)
    _check(version, before, root)
    history = root / "CHANGELOG.md"
    files = {history: changelog.release(history.read_text(), version, f"{datetime.now(UTC):%Y-%m-%d}")}
    # Examples name a release for readers to copy: its tag in git, and its image.
    examples = [file for file in sorted((root / "examples").rglob("*")) if file.is_file()]
    for prefix, among in (
        ("", [root / name for name in (SOURCE, *CHARTS)]),
        (r"v|specdecode-operator:|(?:newT|t)ag: ", examples),
        ("VERSION=|newTag: ", [root / name for name in DOCUMENTS]),
    ):
        written = re.compile(rf"(?<![\w.])({prefix}){re.escape(before)}(?![\w.-])")
        texts = {file: file.read_text() for file in among}
        files |= {file: written.sub(rf"\g<1>{version}", text) for file, text in texts.items() if written.search(text)}
    for file, text in files.items():
        file.write_text(text)
    return list(files)


def _check(version: str, before: str, root: Path) -> None:
    if not _SEMVER.fullmatch(version):
        raise ClusterError(f"version {version!r}: write MAJOR.MINOR.PATCH, such as 0.2.0 or 0.2.0-rc.1, without a v")
    if _order(version) < _order(before):
        raise ClusterError(f"version {version!r}: older than {before} of {SOURCE}: choose a newer one")
    tags = ["git", "-C", str(root), "tag", "--list", f"v{version}"]
    if subprocess.run(tags, capture_output=True, text=True, check=True).stdout.strip():
        raise ClusterError(f"version {version!r}: the tag v{version} exists: what is released is not changed")


def _order(version: str) -> tuple[float, ...]:
    match = _SEMVER.fullmatch(version)
    assert match
    candidate = match[4]
    return (*(int(number) for number in match.groups()[:3]), float("inf") if candidate is None else int(candidate))


def main() -> int:
    """Do what the command line says and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m devcluster.release.version", description=__doc__)
    parser.add_argument("version")
    version = parser.parse_args().version
    return exit_status(lambda: print(*(file.relative_to(REPOSITORY) for file in set_version(version)), sep="\n"))


if __name__ == "__main__":
    sys.exit(main())
