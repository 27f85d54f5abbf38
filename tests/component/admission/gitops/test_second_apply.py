"""A second sync shows no difference, however the first was made: no tool has to be told what to ignore.

Argo CD compares as `kubectl apply` does (three ways, by what was applied last), or by a dry run of a server-side apply;
Flux by such a dry run.
"""

import json

import pytest
import yaml

from tests.component.admission.acceptance_cases import LLAMA, MINIMAL
from tests.support.golden import EXAMPLES
from tests.support.kubectl import Kubectl
from tests.support.lives import STATES
from tests.support.objects import Body

HEADER = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment"}
MANAGER = "argocd-controller"
SERVER_SIDE = ("apply", "--server-side", f"--field-manager={MANAGER}")
OBJECTS: list[Body] = [
    {**HEADER, "metadata": {"name": "minimal"}, "spec": yaml.safe_load(MINIMAL)},
    {**HEADER, "metadata": {"name": "llama"}, "spec": yaml.safe_load(LLAMA)},
    *yaml.safe_load_all((EXAMPLES / "argo-cd/sync-waves.yaml").read_text()),
    *yaml.safe_load_all((EXAMPLES / "does-it-pay.yaml").read_text()),
]
MANIFEST = yaml.safe_dump_all(OBJECTS)


def look(kubectl: Kubectl) -> None:
    """Write what the operator says of an object, whichever it is."""
    for kind, resource in (("SpecDecodeDeployment", "sdd"), ("SpecDecodeCapture", "sdc")):
        status = STATES[f"{kind}: first look"].body["status"]
        patch = json.dumps({"status": status})
        names = [each["metadata"]["name"] for each in OBJECTS if each["kind"] == kind]
        kubectl.must("patch", resource, *names, "--subresource=status", "--type=merge", f"--patch={patch}")


def versions(kubectl: Kubectl) -> dict[str, tuple[str, int]]:
    found = [each["metadata"] for each in kubectl.objects("sdd,sdc")]
    return {each["name"]: (each["resourceVersion"], each["generation"]) for each in found}


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (("apply",), ("apply",)),
        (SERVER_SIDE, SERVER_SIDE),
        (("create",), ("replace",)),
    ],
    ids=["client-side", "server-side", "replace"],
)
def test_second_sync_shows_no_diff_and_changes_nothing(
    kubectl: Kubectl, first: tuple[str, ...], again: tuple[str, ...]
) -> None:
    kubectl.must(*first, "--filename=-", stdin=MANIFEST)
    look(kubectl)
    before = versions(kubectl)
    assert len(before) == len(OBJECTS)
    for compared in ((), ("--server-side", "--force-conflicts", f"--field-manager={MANAGER}")):
        answer = kubectl("diff", *compared, "--filename=-", stdin=MANIFEST)
        assert answer.returncode == 0, answer.stdout + answer.stderr
    kubectl.must(*again, "--filename=-", stdin=MANIFEST)
    assert versions(kubectl) == before
    assert {generation for _, generation in before.values()} == {1}
