"""What a release is made of, and what is refused before anything is built or pushed."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from devcluster import chart, supply_chain
from devcluster.host.errors import ClusterError
from devcluster.host.paths import REPOSITORY
from devcluster.release import archive, charts, package
from devcluster.release.charts import with_image, with_images
from devcluster.release.package import CHECKSUMS, make
from devcluster.release.publish import publish
from devcluster.release.record import RECORD, Release
from specdecode_operator.version import __version__

DIGEST = f"sha256:{'a' * 64}"
BASE = f"docker.io/library/python:3.13-slim@sha256:{'b' * 64}"
RELEASE = Release("0.4.0", "registry.example.com/team", DIGEST, BASE)


def test_released_chart_uses_the_released_image() -> None:
    before = (chart.CHART / "values.yaml").read_text()
    after = with_image(before, RELEASE)
    values = yaml.safe_load(after)
    image = {"repository": "registry.example.com/team/specdecode-operator", "digest": DIGEST}
    assert values["image"] == {**yaml.safe_load(before)["image"], **image}
    assert {**values, "image": {}} == {**yaml.safe_load(before), "image": {}}
    assert after.count("\n#") == before.count("\n#"), "comments stay"
    with pytest.raises(ClusterError, match=r"repository: .* stands 0 times"):
        with_image(after, RELEASE)


def test_artifact_hub_annotations_list_image_and_crds() -> None:
    metadata = yaml.safe_load(with_images((chart.CHART / "Chart.yaml").read_text(), RELEASE))
    annotations = metadata["annotations"]
    assert all(isinstance(value, str) for value in annotations.values()), "Helm rejects other types"
    (image,) = yaml.safe_load(annotations["artifacthub.io/images"])
    assert image == {"name": "operator", "image": RELEASE.image}
    crds = [yaml.safe_load(file.read_text()) for file in (chart.CRDS / "files").glob("*.yaml")]
    known = {
        (crd["spec"]["names"]["kind"], version["name"], crd["metadata"]["name"])
        for crd in crds
        for version in crd["spec"]["versions"]
    }
    shown = yaml.safe_load(annotations["artifacthub.io/crds"])
    assert {(each["kind"], each["version"], each["name"]) for each in shown} == known
    assert "home" not in metadata
    source = "https://github.com/team/operator"
    known_source = replace(RELEASE, source=source)
    metadata = yaml.safe_load(with_images((chart.CHART / "Chart.yaml").read_text(), known_source))
    assert (metadata["home"], metadata["sources"]) == (source, [source])
    (example,) = yaml.safe_load(annotations["artifacthub.io/crdsExamples"])
    assert example == yaml.safe_load((REPOSITORY / "examples/qwen3-8b-eagle3.yaml").read_text())


@pytest.mark.parametrize(
    ("registry", "base", "tag", "why"),
    [
        ("https://registry.example.com", None, None, "--registry 'https://registry.example.com': write a host"),
        ("registry.example.com/Team", None, None, "in lower case"),
        ("registry.example.com/team/", None, None, "write a host"),
        ("r.io", "docker.io/library/python:3.13", None, "--base 'docker.io/library/python:3.13': no digest"),
        ("r.io", "python@sha256:12", None, "no digest"),
        ("r.io", f"@{DIGEST}", None, "no digest"),
        ("r.io", BASE, "v9.9.9", f"--tag 'v9.9.9': this checkout is v{__version__}"),
        ("r.io", BASE, __version__, "this checkout is v"),
        ("r.io", None, f"v{__version__}", "--base: not given"),
    ],
)
def test_invalid_release_options_are_refused_before_building(
    registry: str, base: str | None, tag: str | None, why: str, tmp_path: Path
) -> None:
    (tmp_path / "kept").touch()
    with pytest.raises(ClusterError, match=why):
        make(registry, base, tag, tmp_path)
    assert (tmp_path / "kept").exists()


def test_a_release_has_the_olm_bundle_and_the_kubectl_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "_build", lambda image, base: BASE)
    monkeypatch.setattr(archive, "write", lambda image, file: DIGEST)
    monkeypatch.setattr(supply_chain, "write_sbom", lambda file, image: None)
    for module, name in ((charts, "package"), (package, "_manifests")):
        monkeypatch.setattr(module, name, lambda release, folder: None)
    monkeypatch.setattr(package, "_wheel", lambda folder: None)
    folder = tmp_path / "dist"
    release = make("r.io/team", BASE, None, folder, source="https://github.com/team/operator")
    assert Release.of(folder) == release
    bundle, plugin = f"olm-bundle-{__version__}.tar.gz", f"kubectl-specdecode-{__version__}.tar.gz"
    assert {bundle, plugin, "specdecode.yaml"} <= {file.name for file in folder.iterdir()}
    sums, notes = ((folder / name).read_text() for name in (CHECKSUMS, package.NOTES))
    assert all(name in sums for name in (bundle, plugin, "specdecode.yaml"))
    assert all(name in notes for name in (bundle, plugin))


def test_tag_without_a_changelog_section_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "REPOSITORY", tmp_path)
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n\n- Something.\n")
    with pytest.raises(ClusterError, match=rf"no section \[{__version__}\]"):
        make("r.io", BASE, f"v{__version__}", tmp_path / "dist")


@pytest.mark.parametrize("base", ["localhost/specdecode/base:bookworm", "docker.io/library/python:3.13-slim"])
def test_release_with_an_unpinned_base_image_is_not_published(base: str, tmp_path: Path) -> None:
    local = Release("0.4.0", "registry.example.com/team", DIGEST, base)
    (tmp_path / RECORD).write_text(json.dumps(asdict(local)))
    with pytest.raises(ClusterError, match="which nobody can get by its digest"):
        publish(tmp_path)


def test_a_changed_file_is_not_published(tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text(json.dumps(asdict(RELEASE)))
    (tmp_path / CHECKSUMS).write_text(f"{'0' * 64}  {RECORD}\n")
    with pytest.raises(ClusterError, match=r"release\.json: FAILED"):
        publish(tmp_path)


@pytest.mark.parametrize("record", [None, "{}", "[]", "no", '{"version": "0.4.0"}'])
def test_publishing_another_folder_says_how_to_make_a_release(record: str | None, tmp_path: Path) -> None:
    if record is not None:
        (tmp_path / RECORD).write_text(record)
    with pytest.raises(ClusterError, match=r"\./just release makes it"):
        publish(tmp_path)
