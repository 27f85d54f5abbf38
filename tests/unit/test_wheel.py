"""The wheel holds the whole package and runs wherever it is installed; pages name nothing that is not published."""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import pytest

from specdecode_operator.version import __version__

ROOT = Path(__file__).parents[2]
PAGES = (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("operator/*.md"), *ROOT.glob("examples/**/*"))
COMMAND = (
    "from importlib.metadata import entry_points;"
    "(script,) = entry_points(group='console_scripts', name='specdecode'); script.load()()"
)
"""What the script does that an installer makes of the wheel."""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built once by the build backend of pyproject.toml."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The command of the installed wheel, in an environment whose dependencies are those of this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    # Files named .pth are read in the environment's own folder alone: the editable install here stays out of it.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [folder / "bin/python", *arguments]
        return subprocess.run(
            command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False, timeout=120
        )

    return run


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = (path for path in (ROOT / "operator").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert names == {f"specdecode_operator/{path.relative_to(ROOT / 'operator')}" for path in files}


def test_wheel_metadata_matches_the_project(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(wheel) as archive:
        (information,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata = Parser().parsestr(archive.read(f"{information}/METADATA").decode())
        entry_points = archive.read(f"{information}/entry_points.txt").decode()
        assert f"{information}/licenses/LICENSE" in archive.namelist()
    assert (metadata["Name"], metadata["Version"]) == ("specdecode-operator", __version__)
    assert set(metadata.get_all("Provides-Extra") or []) == set(project["optional-dependencies"])
    assert len([each for each in metadata.get_all("Requires-Dist") or [] if "extra ==" not in each]) == len(
        project["dependencies"]
    )
    assert "specdecode = specdecode_operator.cli.main:main" in entry_points


def test_the_installed_command_needs_no_checkout(installed: Run) -> None:
    where = installed("-c", "import specdecode_operator.version as v; print(v.__file__)").stdout
    assert "environment" in where
    assert str(ROOT) not in where
    command = ("-c", COMMAND)
    assert installed("-m", "specdecode_operator", "--version").stdout == installed(*command, "--version").stdout
    assert installed(*command, "--version").stdout == f"specdecode {__version__}\n"
    planned = installed(*command, "plan", "-f", str(ROOT / "examples/llama-70b.yaml"))
    assert planned.returncode == 0, planned.stderr
    assert "2 x H200, TP 2" in planned.stdout
    assert installed(*command, "crds").stdout.count("kind: CustomResourceDefinition") == 3
    rendered = installed(*command, "render", "-f", str(ROOT / "examples/llama-70b.yaml"))
    assert "kind: Deployment" in rendered.stdout, rendered.stderr


INSTALLS = re.compile(r"\b(?:pip install|pipx (?:install|run)|uv tool (?:install|run)|uvx|uv add)\s+([^\n`#]*)")


def test_pages_install_only_from_a_clone_or_a_wheel() -> None:
    """Nothing is published: what is installed is a clone, or a wheel that somebody has fetched."""
    named = {}
    for page in (path for path in PAGES if path.is_file()):
        for words in INSTALLS.findall(page.read_text()):
            if "--require-hashes" in words:
                continue  # pinned packages of others
            packages = [word.strip("'\".,;:)") or "." for word in words.split() if not word.startswith("-")]
            foreign = [each for each in packages[:1] if not re.fullmatch(r"\.?(\[\w+\])?|.*\.whl(\[\w+\])?", each)]
            named |= {f"{page.name}: {each}": words for each in foreign}
    assert named == {}


def test_cli_page_starts_with_installation() -> None:
    page = (ROOT / "docs/reference/cli.md").read_text()
    first = page.split("\n## ")[1]
    assert first.startswith("Install\n")
    assert "uv tool install" in first
    assert "pipx install" in first
