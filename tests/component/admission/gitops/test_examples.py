"""The examples for Argo CD and Flux name what there is, in an order that works."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode_operator.version import __version__
from tests.support.golden import EXAMPLES, ROOT
from tests.support.kubectl import program

APPS = EXAMPLES / "argo-cd/app-of-apps"
WAVE = "argocd.argoproj.io/sync-wave"
OURS = re.compile(r"/specdecode-operator(\.git)?$")


def documents(*files: Path) -> list[dict[str, Any]]:
    return [body for file in files for body in yaml.safe_load_all(file.read_text())]


def application(name: str) -> dict[str, Any]:
    (body,) = documents(APPS / f"{name}.yaml")
    return body


def test_crds_operator_and_pairs_are_in_ascending_sync_waves() -> None:
    crds, operator, pairs = (
        int(application(name)["metadata"]["annotations"][WAVE]) for name in ("crds", "operator", "pairs")
    )
    assert crds < operator < pairs
    assert application("crds")["spec"]["syncPolicy"]["automated"]["prune"] is False


def test_capture_is_in_a_later_sync_wave_than_its_deployment() -> None:
    pair, capture = documents(EXAMPLES / "argo-cd/sync-waves.yaml")
    assert capture["spec"]["deployment"] == pair["metadata"]["name"]
    assert int(pair["metadata"]["annotations"][WAVE]) < int(capture["metadata"]["annotations"][WAVE])


def test_chart_accepts_the_values_of_the_argo_cd_application() -> None:
    source = application("operator")["spec"]["source"]
    values = json.dumps(source["helm"]["valuesObject"])
    command = [program("helm"), "template", source["helm"]["releaseName"], ROOT / source["path"], "--values=-"]
    answer = subprocess.run(command, input=values, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert f"{source['helm']['valuesObject']['image']['repository']}:{__version__}" in answer.stdout


@pytest.mark.parametrize("body", documents(*APPS.glob("*.yaml")), ids=lambda body: body["metadata"]["name"])
def test_applications_name_existing_folders_and_the_current_version(body: dict[str, Any]) -> None:
    source = body["spec"]["source"]
    if OURS.search(source["repoURL"]):
        assert (ROOT / source["path"]).is_dir()
        assert source["targetRevision"] == f"v{__version__}"


def test_flux_example_installs_crds_before_operator_and_pairs() -> None:
    found = {
        (each["kind"], each["metadata"]["name"]): each["spec"] for each in documents(EXAMPLES / "flux/operator.yaml")
    }
    crds, operator = (found["Kustomization", f"specdecode-{name}"] for name in ("crds", "operator"))
    assert operator["dependsOn"] == [{"name": "specdecode-crds"}]
    assert crds["prune"] is False
    for each in (crds, operator):
        assert (ROOT / each["path"] / "kustomization.yaml").exists()
        (source,) = (spec for (kind, _), spec in found.items() if kind == "GitRepository")
        assert source["ref"] == {"tag": f"v{__version__}"}
    (image,) = operator["images"]
    assert image["newTag"] == __version__
    (deployment,) = (each for each in documents(ROOT / "manifests/deployment.yaml") if each["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"].partition(":")[0] == image["name"]
    (_, pairs) = documents(EXAMPLES / "flux/pairs.yaml")
    assert pairs["spec"]["wait"] is True, "else its expressions are about nothing"
    assert ("Kustomization", pairs["spec"]["dependsOn"][0]["name"]) in found
