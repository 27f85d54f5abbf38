"""What Argo CD's own code makes of our objects: in sync by all its ways of comparing, wave after wave, pruned."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml

from specdecode_operator.api.base import API_VERSION
from specdecode_operator.api.capture import KIND as CAPTURE
from specdecode_operator.api.deployment import KIND as DEPLOYMENT
from tests.support.gitops.argo import ArgoCD
from tests.support.golden import EXAMPLES
from tests.support.kubectl import Kubectl
from tests.support.lives import STATES
from tests.support.objects import Body
from tests.support.waiting import eventually

pytestmark = pytest.mark.long


def examples() -> list[Body]:
    """Objects of both kinds in all examples, each name once: they share a namespace."""
    found = [body for file in sorted(EXAMPLES.glob("*.yaml")) for body in yaml.safe_load_all(file.read_text())]
    ours = {(each["kind"], each["metadata"]["name"]): each for each in found if each["apiVersion"] == API_VERSION}
    assert len(ours) > 10
    return list(ours.values())


def look(kubectl: Kubectl, body: Body, state: str) -> None:
    """Write what the operator says of such an object in some state."""
    kind = {DEPLOYMENT: "sdd", CAPTURE: "sdc"}[body["kind"]]
    name = body["metadata"]["name"]
    kubectl.patch_status(name, STATES[f"{body['kind']}: {state}"].body["status"], kind)


@pytest.mark.parametrize(
    ("server_side_apply", "replace"),
    [(False, False), (True, False), (False, True)],
    ids=["client-side", "server-side", "replace"],
)
def test_every_example_is_in_sync_for_each_apply_method(
    kubectl: Kubectl, *, server_side_apply: bool, replace: bool
) -> None:
    argo = ArgoCD(kubectl, server_side_apply=server_side_apply, replace=replace)
    assert argo.sync_objects(examples()) == ""
    for body in examples():
        look(kubectl, body, "first look")
    assert argo.out_of_sync(examples()) == ""
    before = versions(kubectl)
    assert len(before) == len(examples())
    assert argo.sync_objects(examples()) == ""
    assert versions(kubectl) == before


def edit(kubectl: Kubectl, **spec: object) -> None:
    """Change an object in the cluster, as a person does."""
    kubectl.must("patch", "sdd", "chat", "--type=merge", f"--patch={json.dumps({'spec': spec})}")


def test_edit_of_a_field_in_git_is_out_of_sync_and_reset_by_sync(kubectl: Kubectl) -> None:
    argo, (pair, _) = ArgoCD(kubectl), in_waves()
    assert argo.sync_objects([pair]) == ""
    edit(kubectl, suspend=True)
    assert argo.out_of_sync([pair]) == "", "git says nothing of it"
    edit(kubectl, serving={"maxModelLen": 8192})
    out_of_sync = json.loads(argo.out_of_sync([pair]))
    assert set(out_of_sync) == {"client-side", "structured", "server-side"}
    assert [each["object"] for found in out_of_sync.values() for each in found] == ["SpecDecodeDeployment/chat"] * 3
    look(kubectl, pair, "serving")
    assert argo.sync_objects([pair]) == ""
    assert argo.out_of_sync([pair]) == ""
    assert kubectl.object("sdd", "chat")["spec"]["serving"]["maxModelLen"] == 16384


def test_objects_removed_from_git_are_pruned_unless_prune_is_false(kubectl: Kubectl) -> None:
    argo, (pair, _) = ArgoCD(kubectl), in_waves()
    pair["metadata"]["annotations"] |= {"argocd.argoproj.io/sync-options": "Prune=false,Delete=false"}
    assert argo.sync_objects([pair]) == ""
    look(kubectl, pair, "serving")
    assert argo.sync_objects([]) == ""
    assert set(versions(kubectl)) == {"SpecDecodeDeployment chat"}
    del pair["metadata"]["annotations"]["argocd.argoproj.io/sync-options"]
    assert argo.sync_objects([pair]) == ""
    assert argo.sync_objects([]) == ""
    eventually(lambda: versions(kubectl) == {}, "it is pruned")


def in_waves() -> list[Body]:
    """The example's pair, and the capture that measures it."""
    return [*yaml.safe_load_all((EXAMPLES / "argo-cd/sync-waves.yaml").read_text())]


def test_capture_wave_waits_until_its_deployment_serves(kubectl: Kubectl) -> None:
    pair, capture = wanted = in_waves()
    argo = ArgoCD(kubectl)
    with ThreadPoolExecutor() as pool:
        syncing = pool.submit(argo.sync_objects, wanted)
        eventually(lambda: kubectl.objects("sdd"), "the first wave is applied")
        look(kubectl, pair, "first look")
        assert argo.health(wanted) == {f"SpecDecodeDeployment/{pair['metadata']['name']}": "Progressing"}
        assert kubectl.objects("sdc") == []
        look(kubectl, pair, "serving")
        eventually(lambda: kubectl.objects("sdc"), "the second wave is applied")
        look(kubectl, capture, "succeeded")
        assert syncing.result() == ""


def versions(kubectl: Kubectl) -> dict[str, tuple[str, int]]:
    found = {f"{each['kind']} {each['metadata']['name']}": each["metadata"] for each in kubectl.objects("sdd,sdc")}
    return {name: (each["resourceVersion"], each["generation"]) for name, each in found.items()}
