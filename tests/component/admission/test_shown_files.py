"""YAML that the documents show and that is no object of ours: what each is for takes it."""

import subprocess
from pathlib import Path

import pytest
import yaml

from devcluster import chart
from tests.support.code_blocks import Block, Check, blocks_for
from tests.support.documents import ROOT
from tests.support.kubectl import Kubectl, program
from tests.support.prometheus import promtool

FOREIGN = ("argoproj.io", "inference.networking.k8s.io", "gateway.networking.k8s.io", "kueue.x-k8s.io")
"""API groups whose kinds no cluster here has."""


@pytest.mark.parametrize("block", blocks_for(Check.VALUES), ids=str)
def test_helm_accepts_documented_values(block: Block, tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(block.text)
    assert "kind: Deployment" in chart.template(f"--values={tmp_path / 'values.yaml'}")


@pytest.mark.parametrize("block", blocks_for(Check.KUSTOMIZATION), ids=str)
def test_kubectl_renders_documented_kustomizations(block: Block, tmp_path: Path) -> None:
    (tmp_path / "specdecode-operator").symlink_to(ROOT)
    shown = {"resources": ["specdecode-operator/manifests"], **yaml.safe_load(block.text)}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(shown))
    plain = kustomize(ROOT / "manifests")
    made = kustomize(tmp_path)
    assert len([*yaml.safe_load_all(made)]) == len([*yaml.safe_load_all(plain)])
    assert made != plain, "it changes something"


def kustomize(folder: Path) -> str:
    """Objects that kubectl makes of a folder."""
    command = [program("kubectl"), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("block", blocks_for(Check.OTHER_OBJECTS), ids=str)
def test_api_server_accepts_documented_objects_of_other_kinds(block: Block, kubectl: Kubectl) -> None:
    bodies = [each for body in yaml.safe_load_all(block.text) for each in body.get("items", [body])]
    known = [body for body in bodies if not body["apiVersion"].startswith(FOREIGN)]
    assert all(body["metadata"]["name"] for body in bodies)
    for body in known:
        body["metadata"].pop("namespace", None)  # another one need not exist here
        kubectl.must("create", "--dry-run=server", "--validate=strict", "--filename=-", stdin=yaml.safe_dump(body))


@pytest.mark.parametrize("block", blocks_for(Check.SCRAPE), ids=str)
def test_prometheus_accepts_documented_scrape_jobs(block: Block, tmp_path: Path) -> None:
    job = {"job_name": "engines", **yaml.safe_load(block.text)}
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": [job]}))
    done = promtool("check", "config", tmp_path / "prometheus.yml")
    assert done.returncode == 0, done.stdout
