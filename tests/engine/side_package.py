"""Packages that long tests ask beside vLLM's environment, which has not got them and stays as it is."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from devcluster.host.paths import cache_dir
from devcluster.host.progress import step
from devcluster.images.engine_environment import UV

READY = ".ready"
"""Written last, with the requirements that were installed."""


@dataclass(frozen=True)
class SidePackage:
    """Pinned packages in a folder of their own, to be put on the path before vLLM's."""

    name: str
    requirements: str  # with hashes, one a line; nothing that they depend on comes with them
    doing: str  # what is said while it is installed

    def find(self) -> Path | None:
        """Return the folder to put on the path, or None where it is not installed."""
        ready = self._folder / READY
        return self._folder if ready.exists() and ready.read_text() == self.requirements else None

    def install(self) -> None:
        """Install it, where it is missing; end the process with a reason where that fails."""
        if self.find():
            return
        shutil.rmtree(self._folder, ignore_errors=True)
        command = [*UV, "pip", "install", "--quiet", "--no-deps", "--require-hashes", f"--target={self._folder}"]
        command += [f"--python={sys.executable}", "--requirements=-"]
        with step(self.doing):
            done = subprocess.run(command, input=self.requirements, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"uv could not install {self.name}:\n{done.stderr.strip()[-2000:]}")
        (self._folder / READY).write_text(self.requirements)

    @property
    def _folder(self) -> Path:
        return cache_dir() / f"engine-{self.name}"
