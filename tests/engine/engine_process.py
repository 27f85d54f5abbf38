"""Running a script where the real vLLM can be imported."""

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from devcluster.host.errors import ClusterError
from devcluster.images.engine_environment import install_engine_environment

HERE = Path(__file__).parent
DEADLINE_S = 600
START_S = 1200
"""A vLLM that starts on two cores beside other work has taken more than 400 s. Only a test that fails waits so long."""
ENGINE_VARIABLE = "SPECDECODE_ENGINE"
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


@dataclass(frozen=True)
class Engine:
    """An interpreter that knows vLLM, by itself or through a folder of packages."""

    python: Path
    packages: Path | None = None
    more: tuple[Path, ...] = ()  # folders of packages that come first

    @classmethod
    def at(cls, place: Path) -> "Engine":
        """Return the engine that a python executable, or a folder of installed packages, makes."""
        return cls(Path(sys.executable), place) if place.is_dir() else cls(place)

    def beside(self, *packages: Path) -> "Engine":
        """Return the same with further packages, which go before its own."""
        return replace(self, more=packages)

    @property
    def path(self) -> str:
        """Where its Python looks for modules first."""
        return os.pathsep.join(str(folder) for folder in (*self.more, self.packages, HERE) if folder)

    def has_vllm(self) -> bool:
        """Decide without importing it, which takes long."""
        look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
        return self.python.exists() and self._start("-c", look, text_in="").returncode == 0

    def run(self, *arguments: str, text_in: str = "") -> str:
        """Return the standard output of a script; fail the test with its last words if it fails."""
        done = self._start(*arguments, text_in=text_in)
        if done.returncode:
            pytest.fail(f"{arguments} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return done.stdout

    def _start(self, *arguments: str, text_in: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, *arguments],
            input=text_in,
            env=os.environ | QUIET | {"PYTHONPATH": self.path},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )


def engine_here() -> Engine:
    """Return where vLLM can be imported: where the variable says, or the development cluster's environment.

    Skips, visibly, where it cannot: without root there is no such environment,
    and it is made for the Python of the engine image.
    """
    try:
        place = Path(os.environ.get(ENGINE_VARIABLE) or install_engine_environment())
    except ClusterError as error:
        pytest.skip(f"no vLLM here ({error}); set {ENGINE_VARIABLE} to the python, or the package folder, that has it")
    engine = Engine.at(place)
    if not engine.has_vllm():
        pytest.skip(f"{engine.python} cannot use the vLLM in {place}; set {ENGINE_VARIABLE} to a python that has it")
    return engine
