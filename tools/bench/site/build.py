"""Builds the docs site into site/, strictly, or serves it on this machine. `./just site` runs this.

    python -m bench.site.build [--serve [PORT]]

`SITE_REPOSITORY` is the address of the repository, to which links lead that leave the documents (`SITE_REVISION` of it:
a branch, a tag or a commit). Without it they are text. `SITE_URL` is the address of the site, from which the page that
says that one is not there finds its style.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import yaml

from bench.site.navigation import navigation
from bench.site.pages import ROOT, LinkError, Repository, write_pages
from devcluster.images.engine_environment import UV

SITE: Final = ROOT / "site"
CONFIGURATION: Final = Path(__file__).with_name("zensical.yml")
ENVIRONMENT: Final = ROOT / ".venv-docs"

_WORK: Final = ROOT / "build/site"
_PINS: Final = ROOT / "requirements/docs.txt"


def generator() -> Path:
    """Return the generator of the site, installed in an environment of its own when its pins changed.

    Raises
    ------
    subprocess.CalledProcessError
        When it cannot be installed.
    """
    python, ready = ENVIRONMENT / "bin/python", ENVIRONMENT / ".ready"
    if not ready.exists() or ready.read_text() != _PINS.read_text():
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        _run(*UV, "venv", "--quiet", f"--python={sys.executable}", str(ENVIRONMENT)).check_returncode()
        _run(*UV, "pip", "sync", "--quiet", "--require-hashes", f"--python={python}", str(_PINS)).check_returncode()
        ready.write_text(_PINS.read_text())
    return ENVIRONMENT / "bin/zensical"


def prepare(repository: Repository, work: Path = _WORK) -> Path:
    """Write the pages and their configuration into a folder, and return the latter."""
    write_pages(work / "pages", repository)
    told = {"nav": navigation(), "docs_dir": "pages", "site_dir": "site"}
    if repository.url:
        told["repo_url"] = repository.url
    written = work / "zensical.yml"
    written.write_text(f"{CONFIGURATION.read_text()}\n{yaml.safe_dump(told, sort_keys=False)}")
    return written


def build(configuration: Path) -> subprocess.CompletedProcess[str]:
    """Build the site beside its configuration; what is wrong stands in the output, and the status is then not 0."""
    return _run(str(generator()), "build", "--strict", "--clean", f"--config-file={configuration}", quiet=True)


def _run(*command: str, quiet: bool = False) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"NO_COLOR": "1"}
    return subprocess.run(command, capture_output=quiet, text=True, check=False, env=environment)  # noqa: S603  ours


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(prog="./just site", description="Build the docs site into site/, strictly.")
    parser.add_argument(
        "--serve", nargs="?", const=8000, type=int, metavar="PORT", help="then serve it on 127.0.0.1 (8000)"
    )
    arguments = parser.parse_args()
    repository = Repository(os.environ.get("SITE_REPOSITORY"), os.environ.get("SITE_REVISION", "main"))
    try:
        configuration = prepare(repository)
    except LinkError as error:
        sys.exit(f"site: {error}")
    done = build(configuration)
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        return 1
    shutil.rmtree(SITE, ignore_errors=True)
    shutil.move(configuration.parent / "site", SITE)
    print(f"site: {sum(1 for _ in SITE.rglob('*.html'))} pages in {SITE}")
    if arguments.serve is None:
        return 0
    port = str(arguments.serve)
    return _run(sys.executable, "-m", "http.server", "--bind=127.0.0.1", f"--directory={SITE}", port).returncode


if __name__ == "__main__":
    sys.exit(main())
