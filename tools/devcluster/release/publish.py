"""Pushes and signs what lies in dist/: `python -m devcluster.release.publish --key cosign.key` (./just publish).

To the registry that the release was made for, because its chart names it. What is there already by the same name is
left if it is the same, and never replaced.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from devcluster import chart
from devcluster.builds import binaries
from devcluster.host.errors import ClusterError, exit_status
from devcluster.host.progress import say, step
from devcluster.images import store
from devcluster.release import archive
from devcluster.release.package import CHECKSUMS, DIST
from devcluster.release.programs import run
from devcluster.release.record import BY_DIGEST, Release

BUNDLE: Final = f"{CHECKSUMS}.sigstore.json"
"""The signature of all files of the release."""

Signer = Callable[..., None]


def publish(folder: Path = DIST, *, key: str | None = None, keyless: bool = False) -> list[str]:
    """Push image and charts of a release, sign them where told to, and return their names by digest.

    Parameters
    ----------
    key
        What cosign signs with: a file, or the address of a key in a KMS. Nothing goes to a transparency log.
    keyless
        Whether cosign asks Fulcio for a certificate of who runs this, and Rekor to log each signature.
    """
    release = Release.of(folder)
    _check(release, folder)
    with step(f"pushing {release.repository}:{release.version}"):
        published = [_push_image(release, folder)]
    for name in (chart.CRDS.name, chart.CHART.name):
        with step(f"pushing oci://{release.registry}/charts/{name}"):
            published.append(_push_chart(release, folder, name))
    if not key and not keyless:
        say("not signed: --key FILE signs with a key, --keyless with an identity")
        return published
    sign = partial(_cosign, release, _identity(key))
    for image in published:
        with step(f"signing {image}"):
            sign("sign", image)
    with step("attesting what the image is made of"):
        sign("attest", "--type=cyclonedx", f"--predicate={folder / release.sbom}", release.image)
    sign("sign-blob", f"--bundle={folder / BUNDLE}", str(folder / CHECKSUMS), registry=False)
    return published


def _check(release: Release, folder: Path) -> None:
    """Refuse what others cannot make again, and files that are not those of the release."""
    if not BY_DIGEST.fullmatch(release.base):
        raise ClusterError(f"{folder}: built on {release.base}, which nobody can get by its digest: "
                           "what ./just release --base NAME@sha256:… makes is published")  # fmt: skip
    done = subprocess.run(
        ["sha256sum", "--check", "--quiet", CHECKSUMS], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ClusterError(f"{folder}: not what ./just release made: {done.stdout.strip() or done.stderr.strip()}")


def _push_image(release: Release, folder: Path) -> str:
    """Push the very bytes of the archive, so that the digest is that of the release."""
    name = f"{release.repository}:{release.version}"
    there = _digest(name)
    if there is None:
        with TemporaryDirectory(prefix="specdecode-release-") as layout:
            archive.unpack(folder / release.archive, Path(layout))
            run("crane", "push", *_plain(release, "--insecure"), layout, name)
        there = _digest(name)
    if there != release.digest:
        raise ClusterError(f"{name} is {there} there and {release.digest} here: a version is published once")
    return release.image


def _push_chart(release: Release, folder: Path, name: str) -> str:
    """Push a chart; where its version is there, see that it is the same one."""
    remote = f"{release.registry}/charts/{name}"
    tagged = f"{remote}:{release.version}"
    if _digest(tagged) is None:
        # Helm writes the time of the file, in this machine's time zone.
        target = f"oci://{release.registry}/charts"
        run("helm", "push", *_plain(release, "--plain-http"), str(folder / release.chart(name)), target, TZ="UTC")
    # By its digest: a tag may name another one a moment later, and what was looked at is what is signed.
    published = f"{remote}@{_digest(tagged)}"
    with TemporaryDirectory(prefix="specdecode-release-") as pulled:
        run("helm", "pull", f"oci://{published}", f"--destination={pulled}", *_plain(release, "--plain-http"))
        (chart_file,) = Path(pulled).iterdir()
        if chart_file.read_bytes() != (folder / release.chart(name)).read_bytes():
            raise ClusterError(f"{tagged} is another chart there than here: a version is published once")
    return published


def _identity(key: str | None) -> list[str]:
    # Without a signing config cosign asks nobody: a key of one's own is to work without the internet.
    return [f"--key={key}", "--use-signing-config=false", "--tlog-upload=false"] if key else []


def _cosign(release: Release, identity: list[str], command: str, *arguments: str, registry: bool = True) -> None:
    plain = _plain(release, "--allow-http-registry") if registry else []
    run("cosign", command, "--yes", *identity, *plain, *arguments)


def _digest(name: str) -> str | None:
    """Return the digest of what a registry has by this name, None where it has nothing."""
    crane = str(binaries.find("crane")["crane"])
    insecure = ["--insecure"] if store.speaks_http(name) else []
    done = subprocess.run([crane, "digest", *insecure, name], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout.strip()
    # GHCR says DENIED of what is not there yet to who may not see it; then the push says so.
    if any(word in done.stderr for word in ("MANIFEST_UNKNOWN", "NAME_UNKNOWN", "404", "DENIED")):
        return None
    raise ClusterError(f"{name}: {done.stderr.strip()[-500:]}")


def _plain(release: Release, option: str) -> list[str]:
    """Return a program's option for registries without TLS, which only those of this machine may be."""
    return [option] if store.speaks_http(release.registry) else []


def main() -> int:
    """Do what the command line says and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m devcluster.release.publish", description=__doc__)
    parser.add_argument("--folder", type=Path, default=DIST, help="what ./just release made")
    signed = parser.add_mutually_exclusive_group()
    signed.add_argument("--key", help="what cosign signs with: a file, or the address of a key in a KMS")
    signed.add_argument("--keyless", action="store_true", help="sign as who runs this (OIDC), into the public log")
    given = parser.parse_args()
    return exit_status(lambda: print(*publish(given.folder, key=given.key, keyless=given.keyless), sep="\n"))


if __name__ == "__main__":
    sys.exit(main())
