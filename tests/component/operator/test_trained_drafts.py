"""Heads of trainings replace the draft of a deployment on a real API server; the kubelet's part is played here."""

import json
from typing import Any

import pytest
import yaml

from tests.component.operator.test_lifecycle import (
    apply,
    capture,
    end_capture,
    judge,
    looked_at,
    refuse,
    serve,
    wanted_hash,
)
from tests.support.better_trainings import asking, better_training, head
from tests.support.conditions import condition, wait_for, wait_for_all
from tests.support.kubectl import Kubectl
from tests.support.objects import Body
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import eventually

CLAIM = "heads"
GATED: Body = {"rollout": {"gate": {"capture": "golden"}}}


@pytest.fixture(autouse=True)
def _running(operator: OperatorProcess) -> None:
    pass


def offer(kubectl: Kubectl, **status: Any) -> None:
    """Create a training that does not run, and write the status of one whose head is better."""
    body = better_training(
        "chat", spec={"deployment": "tiny", "suspend": True, "storage": {"persistentVolumeClaim": {"claimName": CLAIM}}}
    )
    told = body.pop("status")
    body["metadata"] = {"name": "chat"}
    answer = kubectl.write(yaml.safe_dump(body))
    assert answer.returncode == 0, answer.stderr
    wait_for(kubectl, "chat", "Ready", "Suspended", kind="sdtr")
    kubectl.patch_status("chat", {**told, "claim": CLAIM, "head": own_head(kubectl), **status}, kind="sdtr")


def own_head(kubectl: Kubectl, **changes: Any) -> Body:
    return head("chat", kubectl.namespace, **changes)


def deploy(kubectl: Kubectl, **changes: Any) -> str:
    """Let the engines of a spec that asks for trained drafts serve; return the hash of their template."""
    apply(kubectl, speculation=asking()["speculation"], **changes)
    serve(kubectl)
    wait_for(kubectl, "tiny", "Ready", "Serving")
    return wanted_hash(kubectl)


def trained_draft(kubectl: Kubectl, reason: str) -> Body:
    """Wait for what the deployment says of the head."""

    def look() -> Body:
        found: Body = kubectl.object("sdd", "tiny").get("status", {}).get("trainedDraft") or {}
        assert found.get("reason") == reason, found
        return found

    return eventually(look, f"status.trainedDraft is {reason}")


def engine_mounts(kubectl: Kubectl) -> dict[str, str]:
    """Claims that the wanted engines mount, by path."""
    (deployment,) = kubectl.objects("deployments")
    pod = deployment["spec"]["template"]["spec"]
    claims = {each["name"]: each.get("persistentVolumeClaim", {}).get("claimName") for each in pod["volumes"]}
    (engine,) = (each for each in pod["containers"] if each["name"] == "engine")
    return {each["mountPath"]: claims[each["name"]] for each in engine["volumeMounts"] if claims[each["name"]]}


def test_better_head_passes_the_gate_and_returns_on_request(kubectl: Kubectl) -> None:
    written = deploy(kubectl, **GATED)
    spec = kubectl.object("sdd", "tiny")["spec"]
    capture(kubectl, "golden", seed=7, storage={"persistentVolumeClaim": {"claimName": "files"}})
    end_capture(kubectl, looked_at(kubectl, "golden"))
    offer(kubectl)

    wait_for(kubectl, "tiny", "Ready", "GateCapturing")
    assert wanted_hash(kubectl) == written
    assert condition(kubectl, "chat", "Promoted", kind="sdtr")[:2] == ("Unknown", "RolloutInProgress")
    first = looked_at(kubectl, "tiny-gate-")
    judge(kubectl, first, "Holds")
    eventually(lambda: wanted_hash(kubectl) != written, "the head is rolled out")
    assert engine_mounts(kubectl)[f"/drafts/{CLAIM}"] == CLAIM
    serve(kubectl)
    wait_for_all(kubectl, "tiny", Ready=("True", "Serving"), Gate=("True", "Passed"))
    told = trained_draft(kubectl, "Promoted")
    assert (told["training"], told["claim"]) == ("chat", CLAIM)
    assert told["path"] == f"{kubectl.namespace}/chat/head"
    wait_for(kubectl, "chat", "Promoted", "Promoted", kind="sdtr")
    assert condition(kubectl, "chat", "Promoted", kind="sdtr")[0] == "True"
    assert kubectl.object("sdd", "tiny")["spec"] == spec
    assert "chat" in kubectl.must("get", "sdd", "tiny", "--output=wide")

    kubectl.must("patch", "sdtr", "chat", "--type=merge", f"--patch={json.dumps({'spec': {'promote': 'Manual'}})}")
    judge(kubectl, looked_at(kubectl, "tiny-gate-", but=first), "Holds")
    eventually(lambda: wanted_hash(kubectl) == written, "the draft of the spec is back")
    serve(kubectl)
    trained_draft(kubectl, "NoHeadOffered")
    wait_for(kubectl, "chat", "Promoted", "Manual", kind="sdtr")
    assert f"/drafts/{CLAIM}" not in engine_mounts(kubectl)


def test_head_whose_engines_fail_is_withdrawn_for_good(kubectl: Kubectl, operator: OperatorProcess) -> None:
    written = deploy(kubectl)
    offer(kubectl)
    eventually(lambda: wanted_hash(kubectl) != written, "the head is rolled out")
    refuse(kubectl)
    trained_draft(kubectl, "RolledBack")
    eventually(lambda: wanted_hash(kubectl) == written, "the draft of the spec is back")
    serve(kubectl)
    wait_for(kubectl, "tiny", "Ready", "Serving")
    wait_for(kubectl, "chat", "Promoted", "RolledBack", kind="sdtr")
    operator.kill()
    operator.start()
    kubectl.must("annotate", "sdd", "tiny", "look=again")
    kubectl.must("annotate", "sdtr", "chat", "look=again")
    wait_for(kubectl, "tiny", "Ready", "Serving")
    assert trained_draft(kubectl, "RolledBack")["failed"]
    assert wanted_hash(kubectl) == written


@pytest.mark.parametrize("path", ["../../other/chat/head", "/etc", "{namespace}/other/head"])
def test_status_of_a_training_cannot_choose_a_mount(kubectl: Kubectl, path: str) -> None:
    written = deploy(kubectl)
    offer(kubectl, head=own_head(kubectl, path=path.format(namespace=kubectl.namespace)))
    assert "status.head.path" in trained_draft(kubectl, "HeadInvalid")["message"]
    wait_for(kubectl, "chat", "Promoted", "HeadInvalid", kind="sdtr")
    assert wanted_hash(kubectl) == written


def test_deleted_training_returns_the_draft_of_the_spec(kubectl: Kubectl) -> None:
    written = deploy(kubectl)
    offer(kubectl)
    eventually(lambda: wanted_hash(kubectl) != written, "the head is rolled out")
    serve(kubectl)
    trained_draft(kubectl, "Promoted")
    kubectl.must("delete", "sdtr", "chat")
    eventually(lambda: wanted_hash(kubectl) == written, "the draft of the spec is back")
