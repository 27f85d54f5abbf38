"""Objects that are made to end the operator: it serves everybody, and any tenant may write one."""

import json
from pathlib import Path

import pytest

from specdecode_operator.cluster.resources import DEPLOYMENT_LABEL, MANAGED_BY_LABEL, MANAGER
from tests.support.conditions import wait_for
from tests.support.kubectl import Kubectl
from tests.support.objects import tiny_cpu
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import eventually


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ("[" * 150 + "]" * 150, "is nested more than 32 deep"),
        ('{"a":' * 9_900 + "1" + "}" * 9_900, "is nested more than 32 deep"),
        (json.dumps([{}] * 20_000, separators=(",", ":")), "has more than 10,000 values"),
        (json.dumps([{}] * 450_000, separators=(",", ":")), "bytes: has more than 50,000 values"),
    ],
    ids=["deep", "as deep as the API server takes", "wide", "as wide as etcd takes"],
)
def test_oversized_or_deep_object_is_reported_without_affecting_others(
    operator: OperatorProcess, kubectl: Kubectl, tmp_path: Path, added: str, said: str
) -> None:
    before = operator.log.stat().st_size
    spec = {**tiny_cpu(), "podTemplate": {"spec": {"containers": "HERE"}}}
    body = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "metadata": {"name": "hostile"}}
    file = tmp_path / "hostile.json"
    file.write_text(json.dumps({**body, "spec": spec}).replace('"HERE"', added))
    path = f"/apis/specdecode.io/v1alpha1/namespaces/{kubectl.namespace}/specdecodedeployments"
    kubectl.must("create", f"--raw={path}", f"--filename={file}")
    kubectl.write(json.dumps({**body, "metadata": {"name": "tiny"}, "spec": tiny_cpu()}))
    wait_for(kubectl, "tiny", "Planned", "Fits")
    path = "-o=jsonpath={.status.conditions[?(@.type=='Ready')].message}"  # by kubectl: no Python reads all of it
    eventually(lambda: said in kubectl.must("get", "sdd/hostile", path), "the object says what is wrong with it")
    assert b"Traceback" not in operator.log.read_bytes()[before:]


def test_field_owners_that_are_nested_too_deeply_end_nothing(
    operator: OperatorProcess, kubectl: Kubectl, tmp_path: Path
) -> None:
    """Anybody who may create a Service may name the owners of its fields."""
    before = operator.log.stat().st_size
    entry = {"apiVersion": "v1", "fieldsType": "FieldsV1", "fieldsV1": {"f:spec": "DEEP"}}
    entries = [{"manager": "specdecode-operator", "operation": "Apply"}, {"manager": "vim", "operation": "Update"}]
    labels = {MANAGED_BY_LABEL: MANAGER, DEPLOYMENT_LABEL: "tiny"}
    metadata = {"name": "hostile", "labels": labels, "managedFields": [entry | each for each in entries]}
    body = {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": [{"port": 80}]}}
    file = tmp_path / "hostile.json"
    file.write_text(json.dumps(body).replace('"DEEP"', '{"f:a":' * 200 + "{}" + "}" * 200))
    kubectl.must("create", f"--raw=/api/v1/namespaces/{kubectl.namespace}/services", f"--filename={file}")
    kept = kubectl.must("get", "service/hostile", "--output=json", "--show-managed-fields")
    assert kept.count('"f:a"') >= 400, "the API server keeps them"
    deployment = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "metadata": {"name": "tiny"}}
    kubectl.write(json.dumps({**deployment, "spec": tiny_cpu()}))
    wait_for(kubectl, "tiny", "Planned", "Fits")
    assert b"Traceback" not in operator.log.read_bytes()[before:]
