"""The whole operator against an API server in memory: what it asks for, its start, its health and its end."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode_operator.cluster.resources import (
    CHILDREN,
    DEPLOYMENT,
    JOB,
    LEADER_WORKER_SET,
    NODE,
    PERSISTENT_VOLUME_CLAIM,
    POD,
    SPECDECODE_CAPTURE,
    SPECDECODE_DEPLOYMENT,
)
from specdecode_operator.handlers.own_image import IMAGE_VARIABLE
from specdecode_operator.labels import CAPTURE_LABEL, CAPTURED_DEPLOYMENT_LABEL, PUBLISHED_LABEL, SCHEDULE_LABEL
from specdecode_operator.services.doctor.install import OPERATOR_RIGHTS
from specdecode_operator.services.manifests import child_labels, owned, owner_reference
from specdecode_operator.services.parent import read_parent
from tests.support.api_server import ApiServer, role_rights
from tests.support.captures import capture_spec
from tests.support.embedded_operator import embedded_operator, eventually
from tests.support.objects import H100, Body, tiny_cpu
from tests.unit.services.test_group_rollout import WIDE, spec_at
from tests.unit.services.test_model_facts import undescribed

ROOT = Path(__file__).parents[3]
LISTED = frozenset(f"{verb} {resource}" for resource, verbs in OPERATOR_RIGHTS.items() for verb in verbs)
"""What the operator is said to need."""


def metadata(name: str, namespace: str = "team", **more: Any) -> Body:
    return {"metadata": {"namespace": namespace, "name": name, "creationTimestamp": "2026-01-01T00:00:00Z", **more}}


def add(api: ApiServer, name: str, spec: Body, **more: Any) -> Body:
    return api.create(SPECDECODE_DEPLOYMENT, {**metadata(name), "spec": spec, **more})


def ready(api: ApiServer, name: str) -> Body:
    body = api.find(SPECDECODE_DEPLOYMENT, name) or {}
    return next((each for each in body.get("status", {}).get("conditions", []) if each["type"] == "Ready"), {})


def add_nodes(api: ApiServer) -> None:
    for number in range(2):
        node = {"metadata": {"name": f"n{number}", "labels": {"nvidia.com/gpu.product": H100}}}
        api.create(NODE, {**node, "status": {"allocatable": {"nvidia.com/gpu": "8"}}})


def add_leftovers(api: ApiServer, body: Body) -> None:
    """Let an object own one child of each kind that its spec does not want."""
    owner = read_parent(body)
    for resource in CHILDREN:
        child = owned(
            {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": {"name": "leftover"}, "spec": {}},
            owner.key,
            owner.uid,
        )
        api.create(resource, child)


def add_scheduled(api: ApiServer, body: Body) -> None:
    """Let a schedule have a capture that runs, and two that succeeded with a claim each."""
    key = read_parent(body).key
    for name, phase in (("running", "Loading"), ("older", "Succeeded"), ("newer", "Succeeded")):
        labels = {SCHEDULE_LABEL: "often"}
        meta = metadata(name, labels=labels, ownerReferences=[owner_reference(key, body["metadata"]["uid"])])
        meta["metadata"]["creationTimestamp"] = f"2026-01-0{1 + (name == 'newer')}T00:00:00Z"
        ended = {"type": "Succeeded", "status": "True" if phase == "Succeeded" else "Unknown", "reason": "R"}
        ended |= {"message": "", "observedGeneration": 1, "lastTransitionTime": "2026-01-01T00:00:00Z"}
        status = {"phase": phase, "conditions": [ended]}
        api.create(SPECDECODE_CAPTURE, {**meta, "spec": {"deployment": key.name}, "status": status})
        if phase == "Succeeded":
            owner = {**child_labels(key), CAPTURE_LABEL: name, CAPTURED_DEPLOYMENT_LABEL: key.name}
            claim = metadata(f"{name}-capture", labels={**owner, **labels, PUBLISHED_LABEL: "true"})
            claim["metadata"]["creationTimestamp"] = meta["metadata"]["creationTimestamp"]
            api.create(PERSISTENT_VOLUME_CLAIM, claim)


OFTEN = {
    "name": "often",
    "schedule": "* * * * *",
    "concurrencyPolicy": "Replace",
    "successfulHistoryLimit": 1,
    "retention": {"count": 1},
}


def undone(api: ApiServer) -> list[str]:
    """Name what the operator has not done yet."""
    captures, claims, jobs = (api.names(each) for each in (SPECDECODE_CAPTURE, PERSISTENT_VOLUME_CLAIM, JOB))
    phase = (api.find(SPECDECODE_CAPTURE, "asked") or {}).get("status", {}).get("phase")
    done = {
        "engines": {"tiny", "timed"} <= {*api.names(DEPLOYMENT)} and "wide-lws" in api.names(LEADER_WORKER_SET),
        "leftovers": "leftover" not in api.names(*CHILDREN),
        "reading": any(name.startswith("unknown-") for name in jobs),
        "capture": "asked-capture" in jobs and "asked-capture" in claims and phase is not None,
        "scheduled capture": any(name.startswith("timed-often-") for name in captures),
        "history": "older" not in captures,
        "retention": "older-capture" not in claims,
        "cancellation": (api.find(SPECDECODE_CAPTURE, "running") or {})["spec"].get("suspend") is True,
        "statuses": all(ready(api, name) for name in ("tiny", "wide", "unknown", "timed")),
        "watches": {each for each in LISTED if each.startswith("watch ")} <= api.used,
    }
    return [what for what, is_done in done.items() if not is_done]


async def test_the_operator_needs_exactly_the_rights_that_are_listed(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does all that it ever does: what it asked for then is what it needs."""
    monkeypatch.delenv(IMAGE_VARIABLE)
    monkeypatch.setenv("POD_NAMESPACE", "specdecode-system")
    monkeypatch.setenv("POD_NAME", "operator-1")
    own = metadata("operator-1", namespace="specdecode-system")
    api.create(POD, {**own, "spec": {"containers": [{"name": "operator", "image": "operator:1"}]}})
    add_nodes(api)
    add_leftovers(api, add(api, "tiny", tiny_cpu(replicas=2)))
    add(api, "wide", spec_at(WIDE))
    add(api, "unknown", undescribed())
    since = {"name": "often", "schedule": "* * * * * UTC", "since": "2026-01-01T00:00:00Z"}
    add_scheduled(api, add(api, "timed", tiny_cpu(captures=[OFTEN]), status={"captures": [since]}))
    asked = {**metadata("asked"), "spec": capture_spec(deployment="tiny")}
    api.create(SPECDECODE_CAPTURE, asked)

    async with embedded_operator(monkeypatch):
        await eventually(
            lambda: not undone(api), lambda: f"{undone(api)} are done; rights not used: {LISTED - api.used}"
        )
    assert {"unused": LISTED - api.used, "not listed": api.used - LISTED} == {"unused": set(), "not listed": set()}


@pytest.mark.parametrize(
    "file", ["manifests/operator-role.yaml", "charts/specdecode-operator/templates/operator-role.yaml"]
)
def test_the_role_grants_exactly_the_rights_that_are_listed(file: str) -> None:
    # The rules of the chart hold no template.
    rules = (ROOT / file).read_text().partition("\nrules:\n")[2].partition("\n---\n")[0]
    assert role_rights(yaml.safe_load(rules)) == LISTED
