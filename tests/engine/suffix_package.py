"""Where the package for suffix decoding is, which vLLM's environment does not have, and how it gets there.

    .venv/bin/python -m tests.engine.suffix_package

Snowflake's arctic-inference comes as source only: it is built here, with a torch of its own that is downloaded for
that (3 GB, once). It lies in a folder beside vLLM's environment, which stays as it is.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from devcluster.host.errors import ClusterError
from devcluster.host.paths import cache_dir
from devcluster.host.progress import step
from devcluster.images.engine_environment import UV

SOURCE_SHA256 = "36857e2fbe3ead34821a04be98dfab95086050c1e38199c8fdfe308234fdcf63"
REQUIREMENT = f"arctic-inference==0.1.1 --hash=sha256:{SOURCE_SHA256}"
"""The version that vLLM 0.32 asks for (vllm/config/speculative.py, SpeculativeConfig._validate_suffix_decoding)."""

READY = ".ready"
"""Written last, with the requirement that was installed."""


def find_package() -> Path | None:
    """Return the folder to put on the path, or None where it is not installed."""
    folder = _folder()
    ready = folder / READY
    return folder if ready.exists() and ready.read_text() == REQUIREMENT else None


def install() -> None:
    """Build and install it, where it is missing."""
    if find_package():
        return
    folder = _folder()
    shutil.rmtree(folder, ignore_errors=True)
    command = [*UV, "pip", "install", "--quiet", "--no-deps", "--require-hashes", f"--target={folder}"]
    command += [f"--python={sys.executable}", "--requirements=-"]
    with step("building arctic-inference (two minutes; downloads a torch to build with)"):
        done = subprocess.run(command, input=REQUIREMENT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"uv could not install {REQUIREMENT}:\n{done.stderr.strip()[-2000:]}")
    (folder / READY).write_text(REQUIREMENT)


def _folder() -> Path:
    return cache_dir() / "engine-suffix"


if __name__ == "__main__":
    try:
        install()
    except ClusterError as error:
        sys.exit(str(error))
