"""The version stands in operator/version.py, and all else says the same."""

import re
from pathlib import Path

import pytest
import yaml

from devcluster.release.changelog import released
from devcluster.release.version import CHARTS, DOCUMENTS
from specdecode_operator.version import __version__

ROOT = Path(__file__).parents[3]
LABEL = "app.kubernetes.io/version"
NAMED = re.compile(r"\bv?(\d+\.\d+\.\d+[\w.-]*)")


@pytest.mark.parametrize("name", CHARTS)
def test_chart_and_app_version_are_the_operator_version(name: str) -> None:
    chart = yaml.safe_load((ROOT / name).read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


@pytest.mark.parametrize("file", sorted((ROOT / "crds").glob("*_*.yaml")), ids=lambda file: file.name)
def test_crd_has_the_version_label(file: Path) -> None:
    assert yaml.safe_load(file.read_text())["metadata"]["labels"][LABEL] == __version__


def test_generated_manifests_have_the_version_label() -> None:
    files = [
        file
        for file in (ROOT / "manifests").glob("*.yaml")
        if file.name not in ("kustomization.yaml", "namespace.yaml")
    ]
    bodies = [body for file in files for body in yaml.safe_load_all(file.read_text())]
    assert len(bodies) > 5
    assert {body["metadata"]["labels"][LABEL] for body in bodies} == {__version__}
    (deployment,) = (body for body in bodies if body["kind"] == "Deployment")
    assert deployment["spec"]["template"]["metadata"]["labels"][LABEL] == __version__
    assert LABEL not in deployment["spec"]["selector"]["matchLabels"], "a selector cannot change"


def test_examples_to_copy_name_the_version_tag() -> None:
    """The action of action.yml installs its own checkout: its version is the tag that `uses:` names."""
    folders = ("examples/argo-cd", "examples/flux", "examples/ci")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.y*ml")]
    ours = [
        line
        for file in files
        for line in file.read_text().splitlines()
        if re.search("specdecode|targetRevision|[tT]ag:", line)
    ]
    assert {version for line in ours for version in NAMED.findall(line)} == {__version__}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_to_copy_set_the_version(name: str) -> None:
    assert set(re.findall(r"VERSION=(\S+)", (ROOT / name).read_text())) == {__version__}


def test_newest_release_in_the_changelog_is_the_version() -> None:
    assert released((ROOT / "CHANGELOG.md").read_text())[:1] in ([], [__version__])
