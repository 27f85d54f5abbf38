"""The environment that has vLLM, and its server as a process of it."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from specdecode_operator.capture.job.recorder_bundle import RECORDER
from specdecode_operator.replay.launch.emulation import PLUGIN, NotEmulatedError

_VARIABLES: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Nothing is computed: threads that wait for work would take the cores of those that schedule and serve.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

_UNSET: Final = ("VLLM_TARGET_DEVICE", "VLLM_CPU_KVCACHE_SPACE", "VLLM_USE_V2_MODEL_RUNNER")
"""What would keep vLLM from looking for a platform, or have it size the cache by itself."""

_LOOK_S: Final = 60


@dataclass(frozen=True)
class EngineEnvironment:
    """An interpreter that knows vLLM, by itself or through a folder of packages."""

    python: Path
    packages: Path | None = None

    @classmethod
    def at(cls, place: Path | None) -> "EngineEnvironment":
        """Return what a python executable, or a folder of installed packages, makes; None: this interpreter."""
        if place is None:
            return cls(Path(sys.executable))
        return cls(Path(sys.executable), place) if place.is_dir() else cls(place)

    def version(self) -> str:
        """Return the version of its vLLM.

        Raises
        ------
        NotEmulatedError
            When it has none.
        """
        look = "import importlib.metadata as m, importlib.util as u; print(u.find_spec('vllm') and m.version('vllm'))"
        try:
            done = subprocess.run(  # noqa: S603  what the user names is what runs
                [self.python, "-c", look],
                env=self.variables((), {}),
                capture_output=True,
                text=True,
                timeout=_LOOK_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotEmulatedError(f"--engine {self.python}: cannot be run: name the python that has vLLM") from error
        version = done.stdout.strip()
        if done.returncode or not version[:1].isdigit():
            place = self.packages or self.python
            raise NotEmulatedError(f"--engine {place}: has no vLLM: name the python, or the packages, that have it")
        return version

    def variables(self, plugins: Sequence[Path], more: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a process with plugins in these folders."""
        inherited = {name: value for name, value in os.environ.items() if name not in _UNSET}
        if "VLLM_PLUGINS" in inherited:  # which then lists all that vLLM may load
            listed = [inherited["VLLM_PLUGINS"], PLUGIN.package, RECORDER.package]
            inherited["VLLM_PLUGINS"] = ",".join(filter(None, listed))
        # The plugins come first: no package of the environment may take their place.
        path = [*plugins, *([self.packages] if self.packages else []), inherited.get("PYTHONPATH")]
        return {**inherited, **_VARIABLES, **more, "PYTHONPATH": os.pathsep.join(str(each) for each in path if each)}

    def serve(self, arguments: Sequence[str], variables: Mapping[str, str]) -> int:
        """Run vLLM's server until it ends, with the signals that this process gets; return its exit status."""
        command = [str(self.python), "-m", "vllm.entrypoints.cli.main", "serve", *arguments]
        process = subprocess.Popen(command, env=dict(variables), start_new_session=True)  # noqa: S603  as above

        def forward(number: int, _: FrameType | None) -> None:
            process.send_signal(number)

        before = {each: signal.signal(each, forward) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            return process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


_START: Final = """\
import json, os, sys

TOLD = json.loads({told!r})
for name in TOLD["unset"]:
    os.environ.pop(name, None)
paths = [TOLD["plugins"], os.environ.get("PYTHONPATH")]
os.environ.update(TOLD["variables"], PYTHONPATH=os.pathsep.join(filter(None, paths)))
command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *TOLD["arguments"], *sys.argv[1:]]
os.execv(sys.executable, command)
"""


def start_script(plugins: Path, arguments: Sequence[str]) -> str:
    """Return a program that becomes vLLM's server with plugins and arguments, and needs nothing else of ours."""
    told = {
        "plugins": str(plugins.resolve()),
        "arguments": list(arguments),
        "variables": _VARIABLES,
        "unset": _UNSET,
    }
    return _START.format(told=json.dumps(told))


def free_port(host: str) -> int:
    """Return a port at which nobody listens now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
