"""Makes dist/, all that a release is: `python -m devcluster.release.package --registry REGISTRY` (./just release).

Wheel, charts, manifests, the operator's image and what it is made of, notes and checksums. Two runs on one base write
the same bytes. Nothing leaves the machine: that is what `./just publish` is for.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from devcluster import chart, supply_chain
from devcluster.builds import binaries
from devcluster.host.errors import ClusterError
from devcluster.host.locks import exclusive
from devcluster.host.paths import REPOSITORY, cache_dir
from devcluster.host.progress import step
from devcluster.images import operator_image, store
from devcluster.images.base import ensure_base
from devcluster.images.pip_settings import pip_volumes
from devcluster.release import archive, changelog
from devcluster.release.version import current

DIST: Final = REPOSITORY / "dist"
RECORD: Final = "release.json"
CHECKSUMS: Final = "SHA256SUMS"
NOTES: Final = "release-notes.md"

_EPOCH: Final = 315532800
"""Seconds since 1970 that stand for the time of everything: 1980, as in Containerfile, the first year of zip files."""

_BY_DIGEST: Final = re.compile(r"[^@]+@sha256:[0-9a-f]{64}")
_REGISTRY: Final = re.compile(r"[a-z0-9.-]+(:\d+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*")


@dataclass(frozen=True)
class Release:
    """What was made, for where, and on which base; release.json."""

    version: str
    registry: str
    """Where images and charts are to lie: registry.example.com/team."""
    digest: str
    """Of the image's manifest."""
    base: str

    @property
    def repository(self) -> str:
        """Return the image's name without tag and digest."""
        return f"{self.registry}/specdecode-operator"

    @property
    def image(self) -> str:
        """Return the image by its digest."""
        return f"{self.repository}@{self.digest}"

    @property
    def archive(self) -> str:
        """Return the name of the image's file in dist/."""
        return f"specdecode-operator-image-{self.version}.tar"

    @property
    def sbom(self) -> str:
        """Return the name of the file that says what the image is made of."""
        return f"specdecode-operator-image-{self.version}.cdx.json"

    def chart(self, name: str) -> str:
        """Return the name of a chart's file."""
        return f"{name}-{self.version}.tgz"

    @classmethod
    def of(cls, folder: Path) -> "Release":
        """Return what a folder says of the release in it."""
        try:
            return cls(**json.loads((folder / RECORD).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ClusterError(f"{folder / RECORD}: {error}: ./just release makes it") from None


def make(registry: str, base: str | None, tag: str | None, folder: Path = DIST) -> Release:
    """Make a release in a folder, which is emptied before.

    Parameters
    ----------
    registry
        Where image and charts are to lie.
    base
        Image to build on, by its digest. Without one this machine's packages make it, and `publish` refuses it.
    tag
        Tag of the release, which has to be that of this version, with its section in CHANGELOG.md.
    """
    version = current()
    text = _checked(registry, base, tag, version)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    image = f"{registry}/specdecode-operator:{version}"
    base = _build(image, base)
    release = Release(
        version, registry, archive.write(image, folder / f"specdecode-operator-image-{version}.tar"), base
    )
    supply_chain.write_sbom(folder / release.sbom, image)
    _charts(release, folder)
    _manifests(release, folder)
    _wheel(folder)
    (folder / NOTES).write_text(_notes(release, text))
    (folder / RECORD).write_text(json.dumps(asdict(release), indent=1) + "\n")
    files = sorted(folder.iterdir())
    (folder / CHECKSUMS).write_text("".join(f"{_sha256(file)}  {file.name}\n" for file in files))
    return release


def _checked(registry: str, base: str | None, tag: str | None, version: str) -> str:
    """Return the notes of the release; or say why it may not be made."""
    if not _REGISTRY.fullmatch(registry):
        raise ClusterError(f"--registry {registry!r}: write a host and a path in lower case, such as ghcr.io/team")
    if base is not None and not _BY_DIGEST.fullmatch(base):
        raise ClusterError(f"--base {base!r}: no digest: write NAME@sha256:…, which `crane digest {base}` prints")
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    if tag is None:
        return changelog.notes(text, version if version in changelog.released(text) else "Unreleased")
    if tag != f"v{version}":
        raise ClusterError(f"--tag {tag!r}: this checkout is v{version}: tag the commit that ./just version made")
    if base is None:
        raise ClusterError("--base: not given: what is tagged is built on a base that others can get, by its digest")
    return changelog.notes(text, version)


def _build(image: str, base: str | None) -> str:
    """Build the operator's image and return what it was built on."""
    with exclusive(cache_dir() / "images.lock", "another image build"):
        if base is None:
            base = ensure_base()
        else:
            with step(f"getting {base}"):
                store.pull(base)
        with step(f"building {image}"), pip_volumes() as volumes:
            # Of nothing that an earlier build has left.
            store.build(REPOSITORY, REPOSITORY / "Containerfile", base, image, volumes, anew=True)
    return base


def _charts(release: Release, folder: Path) -> None:
    with TemporaryDirectory(prefix="specdecode-charts-") as copies:
        for source in (chart.CHART, chart.CRDS):
            copy = Path(shutil.copytree(source, Path(copies) / source.name))
            if source == chart.CHART:
                _edit(copy / "values.yaml", partial(with_image, release=release))
                _edit(copy / "templates/NOTES.txt", partial(_with_crds, release=release))
            helm = [str(binaries.find("helm")["helm"]), "package", str(copy), f"--destination={folder}"]
            _run(helm, {"SOURCE_DATE_EPOCH": str(_EPOCH)})
            # Helm takes it for the time when the chart was made, and writes that with what it pushes.
            os.utime(folder / release.chart(source.name), (_EPOCH, _EPOCH))


def with_image(values: str, release: Release) -> str:
    """Return the chart's values with the image of a release in place of that of development."""
    name, _, tag = operator_image.REFERENCE.rpartition(":")
    lines = {
        f"  repository: {name}\n": f"  repository: {release.repository}\n",
        f"  tag: {tag}\n": f'  tag: "{release.version}"\n',
        '  digest: ""\n': f"  digest: {release.digest}\n",
    }
    return _replaced(values, lines, "values.yaml")


def _with_crds(notes: str, release: Release) -> str:
    """Return what Helm tells after an installation, with the CRDs of a release in place of those of a checkout."""
    local = f"charts/{chart.CRDS.name} "
    return _replaced(
        notes, {local: f"oci://{release.registry}/{local}--version {release.version} "}, "templates/NOTES.txt"
    )


def _replaced(text: str, changes: Mapping[str, str], name: str) -> str:
    for before, after in changes.items():
        if text.count(before) != 1:
            raise ClusterError(f"charts/specdecode-operator/{name}: not once {before.strip()!r}")
        text = text.replace(before, after)
    return text


def _edit(file: Path, change: Callable[[str], str]) -> None:
    file.write_text(change(file.read_text()))


def _manifests(release: Release, folder: Path) -> None:
    kubectl = str(binaries.find("kubectl")["kubectl"])
    operator = _run([kubectl, "kustomize", str(chart.MANIFESTS)])
    if operator_image.REFERENCE not in operator:
        raise ClusterError(f"manifests/: nothing runs {operator_image.REFERENCE}: ./just manifests")
    (folder / "install.yaml").write_text(operator.replace(operator_image.REFERENCE, release.image))
    (folder / "crds.yaml").write_text(_run([kubectl, "kustomize", str(REPOSITORY / "crds")]))


def _wheel(folder: Path) -> None:
    with TemporaryDirectory(prefix="specdecode-wheel-") as made:
        just = [
            str(REPOSITORY / "just"),
            "--uv",
            "build",
            "--quiet",
            "--wheel",
            f"--out-dir={made}",
            "--require-hashes",
        ]
        _run([*just, f"--build-constraints={REPOSITORY / 'requirements/build.txt'}", str(REPOSITORY)])
        (wheel,) = Path(made).glob("*.whl")  # uv adds a .gitignore
        shutil.copy(wheel, folder)


def _notes(release: Release, changes: str) -> str:
    charts = f"{release.registry}/charts"
    return f"""{changes}

### What this release is

- Image: `{release.image}`, built on `{release.base}`
- Charts, version {release.version}: `oci://{charts}/{chart.CRDS.name}`, `oci://{charts}/{chart.CHART.name}`
- How to verify it: SECURITY.md, "Verify a release". How to install it: docs/how-to/install.md.
"""


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _run(command: list[str], environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ClusterError(f"{Path(command[0]).name} {command[1]} failed:\n{done.stderr.strip()[-2000:]}")
    return done.stdout


def main() -> int:
    """Do what the command line says and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m devcluster.release.package", description=__doc__)
    parser.add_argument(
        "--registry", required=True, help="where image and charts are to lie: registry.example.com/team"
    )
    parser.add_argument("--base", help="image to build on, by its digest: NAME@sha256:…")
    parser.add_argument("--tag", help="tag of the release, which has to be that of this version")
    given = parser.parse_args()
    try:
        release = make(given.registry.rstrip("/"), given.base, given.tag)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{DIST.relative_to(REPOSITORY)}/: {release.image}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
