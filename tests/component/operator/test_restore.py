"""A restore as backup tools and git make it: claims and objects come back without status and with other UIDs."""

from typing import Any

import yaml

from tests.component.operator.test_captures import CLAIM, SUMMARY, capture, finish, ready, serve
from tests.support.kubectl import Kubectl
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import eventually

PUBLISHED = "specdecode.io/published"


def backed_up(kubectl: Kubectl, kind: str, name: str) -> dict[str, Any]:
    """What a backup has of an object that is restored without its status."""
    body = kubectl.object(kind, name)
    metadata = {field: body["metadata"].get(field) for field in ("name", "labels", "ownerReferences")}
    spec = {field: value for field, value in body["spec"].items() if not field.startswith("clusterIP")}
    return {"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": metadata, "spec": spec}


def test_restore_recreates_engines_and_does_not_rerun_finished_captures(
    kubectl: Kubectl, operator: OperatorProcess
) -> None:
    serve(kubectl)
    capture(kubectl)
    finish(kubectl, 0, {"summary": SUMMARY})
    ready(kubectl, "Captured")
    eventually(lambda: PUBLISHED in kubectl.object("pvc", CLAIM)["metadata"]["labels"], "the claim says what it holds")
    bodies = [backed_up(kubectl, *each) for each in (("pvc", CLAIM), ("service", "tiny"), ("sdd", "tiny"))]
    capture_again = backed_up(kubectl, "sdc", "demo")
    operator.kill()
    kubectl.must("delete", "sdc,sdd,pvc", "--all")
    eventually(lambda: not kubectl.objects("deployments,services,jobs"), "what belonged to them goes")

    for body in [*bodies, capture_again]:
        answer = kubectl.write(yaml.safe_dump(body))
        assert answer.returncode == 0, answer.stderr
    operator.start()
    uid = eventually(lambda: kubectl.object("sdd", "tiny")["metadata"]["uid"], "it is back")
    eventually(lambda: owners(kubectl) == {uid}, "its children are its own, whoever owned what was restored of them")
    assert CLAIM in ready(kubectl, "AlreadyPublished")
    assert kubectl.objects("jobs") == []


def owners(kubectl: Kubectl) -> set[str]:
    """UIDs of whoever owns the Deployment and the Service, if both are there."""
    found = kubectl.objects("deployments,services")
    kinds = {body["kind"] for body in found}
    uids = {owner["uid"] for body in found for owner in body["metadata"].get("ownerReferences") or []}
    return uids if kinds == {"Deployment", "Service"} else set()
