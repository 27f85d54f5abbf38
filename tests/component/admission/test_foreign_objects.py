"""`specdecode plan` sizes objects of other projects as a real API server returns them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.kubectl import Kubectl

FILES = sorted((Path(__file__).parents[3] / "examples/foreign").glob("*.yaml"))
DYNAMO = "dynamographdeployments.nvidia.com"
OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
# Dynamo's CRD is part of a container image, so this one stands in for it.
CRD = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": DYNAMO},
    "spec": {
        "group": "nvidia.com",
        "scope": "Namespaced",
        "names": {"kind": "DynamoGraphDeployment", "plural": "dynamographdeployments"},
        "versions": [{"name": "v1alpha1", "served": True, "storage": True, "schema": {"openAPIV3Schema": OPEN}}],
    },
}


@pytest.fixture(scope="module")
def _dynamo(crds: Any) -> Iterator[None]:
    kubectl = Kubectl(crds.kubeconfig)
    kubectl.must("apply", "--filename=-", stdin=yaml.safe_dump(CRD))
    kubectl.wait_for_crds(DYNAMO)
    yield
    kubectl.must("delete", "crd", DYNAMO)


def planned(text: str) -> dict[str, Any]:
    """Return the verdict, the settings that are not counted, and the candidates of each server in a manifest."""
    command = [sys.executable, "-m", "specdecode_operator", "plan", "-f", "-", "-o", "json"]
    answer = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return {
        each["name"]: (each["verdict"], each["source"]["unread"], each["candidates"])
        for each in json.loads(answer.stdout)["objects"]
    }


@pytest.mark.usefixtures("_dynamo")
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_example_has_the_same_plan_from_the_cluster(kubectl: Kubectl, file: Path) -> None:
    kubectl.must("apply", f"--filename={file}")
    found = planned(kubectl.must("get", f"--filename={file}", "--output=yaml"))
    assert found == planned(file.read_text())
    assert {verdict for verdict, _, _ in found.values()} == {"Fits"}
    kubectl.must("delete", f"--filename={file}", "--wait=false")
