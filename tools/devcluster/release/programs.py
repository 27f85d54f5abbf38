"""Programs that make and publish releases."""

import os
import subprocess
from pathlib import Path

from devcluster.builds import binaries
from devcluster.host.errors import ClusterError


def run(program: str | Path, *arguments: str, **environment: str) -> str:
    """Run a program, of clusters by its name or any by its path, and return what it prints."""
    path = program if isinstance(program, Path) else binaries.find(program)[program]
    done = subprocess.run(
        [str(path), *arguments], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ClusterError(f"{path.name} {arguments[0]} failed:\n{done.stderr.strip()[-2000:]}")
    return done.stdout
