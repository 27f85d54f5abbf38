"""Makes dist/, all that a release is: `python -m devcluster.release.package --registry REGISTRY` (./just release).

Wheel, charts, manifests, the operator's image and its list of packages, the OLM bundle, the kubectl plugin, notes and
checksums. Two runs on one base write the same bytes. Nothing leaves the machine: that is what `./just publish` is for.
"""

import argparse
import hashlib
import json
import re
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from devcluster import chart, supply_chain
from devcluster.host.errors import ClusterError, exit_status
from devcluster.host.locks import exclusive
from devcluster.host.paths import REPOSITORY, cache_dir
from devcluster.host.progress import step
from devcluster.images import operator_image, store
from devcluster.images.base import ensure_base
from devcluster.images.pip_settings import pip_volumes
from devcluster.release import archive, changelog, charts, krew, olm_bundle
from devcluster.release.programs import run
from devcluster.release.record import BY_DIGEST, RECORD, Release
from devcluster.release.tarball import tarball
from devcluster.release.version import current

DIST: Final = REPOSITORY / "dist"
CHECKSUMS: Final = "SHA256SUMS"
NOTES: Final = "release-notes.md"

_REGISTRY: Final = re.compile(r"[a-z0-9.-]+(:\d+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*")


def make(registry: str, base: str | None, tag: str | None, folder: Path = DIST, *, source: str = "") -> Release:
    """Make a release in a folder, which is emptied before.

    Parameters
    ----------
    registry
        Where image and charts are to lie.
    base
        Image to build on, by its digest. Without one this machine's packages make it, and `publish` refuses it.
    tag
        Tag of the release, which has to be that of this version, with its section in CHANGELOG.md.
    source
        Address of the repository whose release has the files, for the charts and the kubectl plugin.
    """
    version = current()
    text = _checked(registry, base, tag, version)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    image = f"{registry}/specdecode-operator:{version}"
    base = _build(image, base)
    digest = archive.write(image, folder / f"specdecode-operator-image-{version}.tar")
    release = Release(version, registry, digest, base, source)
    supply_chain.write_sbom(folder / release.sbom, image)
    charts.package(release, folder)
    _manifests(release, folder)
    krew.write(release, folder)
    (folder / olm_bundle.archive_name(version)).write_bytes(tarball(olm_bundle.bundle(release.image)))
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
    if base is not None and not BY_DIGEST.fullmatch(base):
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


def _manifests(release: Release, folder: Path) -> None:
    operator = run("kubectl", "kustomize", str(chart.MANIFESTS))
    if operator_image.REFERENCE not in operator:
        raise ClusterError(f"manifests/: nothing runs {operator_image.REFERENCE}: ./just manifests")
    (folder / "install.yaml").write_text(operator.replace(operator_image.REFERENCE, release.image))
    (folder / "crds.yaml").write_text(run("kubectl", "kustomize", str(REPOSITORY / "crds")))


def _wheel(folder: Path) -> None:
    with TemporaryDirectory(prefix="specdecode-wheel-") as made:
        pinned = ("--require-hashes", f"--build-constraints={REPOSITORY / 'requirements/build.txt'}")
        run(REPOSITORY / "just", "--uv", "build", "--quiet", "--wheel", f"--out-dir={made}", *pinned, str(REPOSITORY))
        (wheel,) = Path(made).glob("*.whl")  # uv adds a .gitignore
        shutil.copy(wheel, folder)


def _notes(release: Release, changes: str) -> str:
    where = f"oci://{release.registry}/charts"
    return f"""{changes}

### What this release is

- Image: `{release.image}`, built on `{release.base}`
- Charts, version {release.version}: `{where}/{chart.CRDS.name}`, `{where}/{chart.CHART.name}`
- kubectl plugin: `kubectl krew install --manifest={krew.MANIFEST} --archive={krew.archive_name(release)}`. It runs the
  command `specdecode`, which `uv tool install` installs from the wheel.
- Operator Lifecycle Manager: unpack `{olm_bundle.archive_name(release.version)}`, and build the bundle image with
  `docker build -f bundle.Dockerfile .`. Tests check the bundle against the rules of OLM, but have not installed it.
- How to verify it: SECURITY.md, "Verify a release". How to install it: docs/install/install.md.
"""


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def main() -> int:
    """Do what the command line says and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m devcluster.release.package", description=__doc__)
    parser.add_argument(
        "--registry", required=True, help="where image and charts are to lie: registry.example.com/team"
    )
    parser.add_argument("--base", help="image to build on, by its digest: NAME@sha256:…")
    parser.add_argument("--tag", help="tag of the release, which has to be that of this version")
    parser.add_argument(
        "--source", default="", help="repository whose release gets the files: https://github.com/OWNER/REPOSITORY"
    )
    given = parser.parse_args()
    source = given.source.rstrip("/")
    return exit_status(lambda: print(make(given.registry.rstrip("/"), given.base, given.tag, source=source).image))


if __name__ == "__main__":
    sys.exit(main())
