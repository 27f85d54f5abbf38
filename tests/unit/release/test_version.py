"""`./just version` sets all that is written by hand, or nothing."""

import shutil
import subprocess
from pathlib import Path

import pytest

from devcluster.host.errors import ClusterError
from devcluster.release import changelog
from devcluster.release.version import CHARTS, DOCUMENTS, SOURCE, current, set_version

ROOT = Path(__file__).parents[3]
CHANGES = """# Changelog

## [Unreleased]

### Added

- Something.

## [0.3.0] - 2026-01-02

### Fixed

- Something else.
"""


EXAMPLE = """
uses: example/specdecode@v{0} # not v0.3.0-rc.1, nor v0.3.01
image: r.io/specdecode-operator:{0}
source: {{image: {{tag: {0}}}, ref: {{tag: v{0}}}}}
newTag: {0}
engine: vllm/vllm-openai:v0.3.0.1 0.3.0
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of version 0.3.0, where an example names its tag."""
    for name in (SOURCE, *CHARTS):
        (tmp_path / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, tmp_path / name)
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text.replace(current(ROOT), "0.3.0"))
    (tmp_path / "docs/install").mkdir(parents=True)
    for name in DOCUMENTS:
        (tmp_path / name).write_text("Of vLLM 0.3.0:\n\n    REGISTRY=r.io/team VERSION=0.3.0\n")
    (tmp_path / "CHANGELOG.md").write_text(CHANGES)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/ci.yml").write_text(EXAMPLE.format("0.3.0"))
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    return tmp_path


def contents(folder: Path) -> dict[Path, str]:
    return {file: file.read_text() for file in folder.rglob("*") if file.is_file() and ".git" not in file.parts}


@pytest.mark.parametrize("version", ["0.3.1", "0.4.0", "0.4.0-rc.1", "10.0.0"])
def test_new_version_is_written_to_all_files(checkout: Path, version: str) -> None:
    assert len(set_version(version, checkout)) == 8
    assert current(checkout) == version
    for name in CHARTS:
        assert f"\nversion: {version}\n" in (text := (checkout / name).read_text())
        assert f'\nappVersion: "{version}"\n' in text
    text = (checkout / "examples/ci.yml").read_text()
    assert text == EXAMPLE.format(version)
    for name in DOCUMENTS:
        assert (checkout / name).read_text() == f"Of vLLM 0.3.0:\n\n    REGISTRY=r.io/team VERSION={version}\n"
    text = (checkout / "CHANGELOG.md").read_text()
    assert changelog.released(text) == [version, "0.3.0"]
    assert changelog.notes(text, version) == "### Added\n\n- Something."
    assert changelog.notes(text, "Unreleased") == ""


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("0.4", "write MAJOR.MINOR.PATCH"),
        ("v0.4.0", "without a v"),
        ("0.4.0+build", "write MAJOR"),
        ("0.04.0", "write MAJOR"),
        ("0.4.0-beta", "write MAJOR"),
        ("0.4.0\n", "write MAJOR"),
        ("0.2.9", "older than 0.3.0"),
        ("0.3.0-rc.2", "older than 0.3.0"),
        ("0.3.0", "has a section already"),
        ("0.5.0", "the tag v0.5.0 exists"),
    ],
)
def test_invalid_next_version_is_refused_and_changes_nothing(checkout: Path, version: str, why: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    for command in (("commit", "--quiet", "--allow-empty", "--message=a"), ("tag", "v0.5.0")):
        subprocess.run(["git", "-C", checkout, *identity, *command], check=True)
    before = contents(checkout)
    with pytest.raises(ClusterError, match=why):
        set_version(version, checkout)
    assert contents(checkout) == before


def test_empty_unreleased_section_cannot_be_released(checkout: Path) -> None:
    set_version("0.4.0", checkout)
    with pytest.raises(ClusterError, match=r"nothing stands under \[Unreleased\]"):
        set_version("0.5.0", checkout)
