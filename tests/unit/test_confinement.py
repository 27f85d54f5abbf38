"""What confines every container that we start: in the examples, the chart and manifests/."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from devcluster.host.paths import REPOSITORY
from tests.support.golden import rendered_examples

FOLDERS = ("tests/golden/chart", "manifests")
FILES = [file for folder in FOLDERS for file in sorted((REPOSITORY / folder).glob("*.yaml"))]
OBJECTS = {**rendered_examples(), **{file.name: [*yaml.safe_load_all(file.read_text())] for file in FILES}}
WRITES_ITS_ROOT = {"engine", "download-model", "download-target", "download-draft"}
"""They run an image of somebody's, whose libraries write where they like. All others run ours."""

CALLS_THE_API_SERVER = {"operator", "certificate"}


def pods(body: Any) -> Iterator[dict[str, Any]]:
    """Specs of pods, wherever they are in an object."""
    if isinstance(body, dict):
        if isinstance(body.get("containers"), list):
            yield body
        for part in body.values():
            yield from pods(part)
    elif isinstance(body, list):
        for part in body:
            yield from pods(part)


PODS = [(name, pod) for name, objects in OBJECTS.items() for body in objects for pod in pods(body)]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def test_pods_of_every_kind_are_checked() -> None:
    names = {each["name"] for _, pod in PODS for each in containers(pod)}
    assert names >= {"operator", "engine", "prepare", "load", "download-target"}, names


@pytest.mark.parametrize(("file", "pod"), PODS, ids=lambda value: value if isinstance(value, str) else "")
def test_pods_and_containers_are_confined(file: str, pod: dict[str, Any]) -> None:
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not any(pod.get(field) for field in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"))
    for each in containers(pod):
        context = each["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert not context.get("privileged")
        assert context.get("readOnlyRootFilesystem") is True or each["name"] in WRITES_ITS_ROOT, each["name"]
        assert pod.get("automountServiceAccountToken") is False or each["name"] in CALLS_THE_API_SERVER, file
