"""The pinned requirements: complete, hashed, and free of addresses. `./just pins` writes them."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from specdecode_operator.vllm.versions import LAUNCHED_VERSIONS, release

ROOT = Path(__file__).parents[2]
PINNED = sorted(path for path in (ROOT / "requirements").glob("*.txt") if "overrides" not in path.name)


def pins(path: Path) -> dict[str, str]:
    """What each requirement of a file says beside its name and version, continuation lines joined."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"([a-z0-9-]+)==\S+ (.*)", line)
        assert match is not None, f"{path.name}: {line[:80]}"
        found[match[1]] = match[2]
    return found


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[A-Za-z0-9-]+", each)[0].lower() for each in requirements}  # type: ignore[index]


@pytest.mark.parametrize("path", PINNED, ids=lambda path: path.name)
def test_requirements_are_hashed_and_name_no_index(path: Path) -> None:
    assert all("--hash=sha256:" in rest for rest in pins(path).values())
    text = path.read_text()
    assert not re.findall(r"^-.*|.*https?://.*", text, re.MULTILINE), "options and addresses are those of one machine"


def test_all_dependencies_of_the_project_are_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = {
        "runtime.txt": project["project"]["dependencies"],
        "dev.txt": [*project["project"]["dependencies"], *project["dependency-groups"]["dev"], *extras["plot"]],
        "engine.txt": [*project["project"]["dependencies"], *extras["engine"]],
        "build.txt": project["build-system"]["requires"],
    }
    for file, requirements in wanted.items():
        missing = names(requirements) - set(pins(ROOT / "requirements" / file))
        assert not missing, f"{file} lacks {sorted(missing)}: run ./just pins"


def test_engine_extra_allows_up_to_the_newest_launched_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (engine,) = map(Requirement, project["project"]["optional-dependencies"]["engine"])
    newest = LAUNCHED_VERSIONS[-1]
    assert engine.specifier.contains(f"{newest}.0")
    major, minor = release(newest)
    assert not engine.specifier.contains(f"{major}.{minor + 1}.0"), "nobody knows its memory"
    pinned = re.search(r"^vllm==(\S+)", (ROOT / "requirements" / "engine.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert engine.specifier.contains(pinned[1])


def test_dev_and_engine_requirements_pin_the_runtime_versions() -> None:
    """One environment may hold the project with its extras, each from its own file."""
    versions = {
        path.name: dict(re.findall(r"^([a-z0-9-]+)==(\S+) (?:;.*)?\\$", path.read_text(), re.MULTILINE))
        for path in PINNED
    }
    for file in ("dev.txt", "engine.txt"):
        shared = versions["runtime.txt"].items()
        assert {(name, version) for name, version in shared if versions[file].get(name) != version} == set(), file
