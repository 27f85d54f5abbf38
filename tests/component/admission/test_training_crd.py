"""A real API server and SpecDecodeTrainings: good ones, bad ones, and what may be changed."""

import json
from typing import Any

import pytest
import yaml

from specdecode_operator.api.crd_validation import object_problems
from specdecode_operator.api.spec_problems import admitted_training
from specdecode_operator.api.training import SpecDecodeTrainingSpec
from specdecode_operator.problems import InvalidSpecError
from tests.support.kubectl import Kubectl
from tests.support.trainings import training_spec

HEADER = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeTraining"}
ROWS = {"configMap": {"name": "rows"}, "path": "rows.jsonl"}
ON_A_CLAIM = {"persistentVolumeClaim": {"claimName": "rows"}, "path": "team/rows.jsonl"}
WITHOUT_CAPTURES = {"captures": []}


def with_rows(**changes: Any) -> dict[str, Any]:
    return training_spec(**WITHOUT_CAPTURES, dataset={**ROWS, **changes})


def continued(**head: Any) -> dict[str, Any]:
    return training_spec(**{"from": head})


GOOD = {
    "captures": training_spec(captures=["a", "b"]),
    "file": with_rows(),
    "file on a claim": training_spec(**WITHOUT_CAPTURES, dataset=ON_A_CLAIM),
    "from the Hub": continued(model="team/head", revision="main"),
    "from a claim": continued(model="default/old/head", persistentVolumeClaim={"claimName": "heads"}),
    "own claim": training_spec(storage={"size": "1Ti", "storageClassName": "fast"}),
    "given claim": training_spec(storage={"persistentVolumeClaim": {"claimName": "mine"}, "retain": False}),
    # As many as the schema takes: the rules over them must stay within the API server's cost limit.
    "many captures": training_spec(captures=[f"capture-{number}" for number in range(16)]),
}
BAD = {
    "no rows": (training_spec(captures=[]), "spec.captures", "set one of captures and dataset"),
    "two sources": (training_spec(dataset=ROWS), "spec.captures", "set one of captures and dataset"),
    "a capture twice": (training_spec(captures=["a", "b", "a"]), "spec.captures", "listed twice: remove one"),
    "file without a source": (
        training_spec(**WITHOUT_CAPTURES, dataset={"path": "a"}),
        "spec.dataset.configMap",
        "set one of configMap and persistentVolumeClaim",
    ),
    "file with two sources": (
        with_rows(persistentVolumeClaim={"claimName": "rows"}),
        "spec.dataset.configMap",
        "set one of configMap and persistentVolumeClaim",
    ),
    "path outside the volume": (with_rows(path="../a"), "spec.dataset.path", "without leading / and without .."),
    "absolute path": (with_rows(path="/a"), "spec.dataset.path", "without leading / and without .."),
    "head outside its volume": (continued(model="a/../../b"), "spec.from.model", "without leading / or -"),
    "head that looks like an option": (continued(model="--help"), "spec.from.model", "without leading / or -"),
    "absolute head": (continued(model="/heads/a"), "spec.from.model", "without leading / or -"),
    "head in the parent folder": (continued(model="a/.."), "spec.from.model", "without leading / or -"),
    "revision of a head on a claim": (
        continued(model="a", revision="main", persistentVolumeClaim={"claimName": "heads"}),
        "spec.from.revision",
        "is for models of the Hub",
    ),
    "claim with a size": (
        training_spec(storage={"size": "1Gi", "persistentVolumeClaim": {"claimName": "mine"}}),
        "spec.storage.persistentVolumeClaim",
        "cannot be combined with size",
    ),
}


def body(spec: dict[str, Any], name: str = "head") -> str:
    return yaml.safe_dump({**HEADER, "metadata": {"name": name}, "spec": spec})


@pytest.mark.parametrize("spec", GOOD.values(), ids=GOOD)
def test_valid_trainings_are_stored_and_parse(kubectl: Kubectl, spec: dict[str, Any]) -> None:
    answer = kubectl.write(body(spec))
    assert answer.returncode == 0, answer.stderr
    stored = SpecDecodeTrainingSpec.parse(kubectl.object("sdtr", "head")["spec"])
    assert object_problems(stored) == []


@pytest.mark.parametrize(("spec", "field", "fix"), BAD.values(), ids=BAD)
def test_invalid_trainings_are_refused_with_field_and_fix(
    kubectl: Kubectl, spec: dict[str, Any], field: str, fix: str
) -> None:
    answer = kubectl.create(body(spec))
    assert answer.returncode != 0
    assert f"{field}:" in answer.stderr
    assert fix in answer.stderr
    with pytest.raises(InvalidSpecError) as offline:
        admitted_training({"metadata": {"name": "head"}, "spec": spec})
    assert [each for each in offline.value.problems if each.field == field and fix in each.message]


@pytest.mark.parametrize("name", ["Head", "a.b", "a" * 53])
def test_names_invalid_for_a_job_are_refused(kubectl: Kubectl, name: str) -> None:
    answer = kubectl.create(body(training_spec(), name))
    assert "metadata.name" in answer.stderr
    with pytest.raises(InvalidSpecError):
        admitted_training({"metadata": {"name": name}, "spec": training_spec()})


def test_defaults_are_filled_in(kubectl: Kubectl) -> None:
    kubectl.write(body(training_spec()))
    stored = kubectl.object("sdtr", "head")["spec"]
    assert stored["method"] == "eagle3"
    assert stored["promote"] == "Manual"
    assert stored["judgement"]["enabled"] is True
    assert stored["storage"] == {"retain": True}
    assert (stored["deadlineSeconds"], stored["backoffLimit"], stored["suspend"]) == (86_400, 1, False)


MUTABLE = {"suspend": True, "promote": "OnBetter", "storage": {"retain": False}}
IMMUTABLE = {
    "deployment": "other",
    "captures": ["other"],
    "dataset": ROWS,
    "method": "dflash",
    "from": {"model": "team/head"},
    "trainer": {"image": "localhost/trainer:2"},
    "holdoutPercent": 20,
    "minRows": 1,
    "maxTokens": 1000,
    "judgement": {"enabled": False},
    "seed": 1,
    "storage": {"size": "1Ti"},
    "deadlineSeconds": 60,
    "backoffLimit": 0,
}


@pytest.mark.parametrize("field", MUTABLE)
def test_fields_not_used_by_the_job_are_mutable(kubectl: Kubectl, field: str) -> None:
    kubectl.write(body(training_spec()))
    answer = kubectl.write(body(training_spec(**{field: MUTABLE[field]})))
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("field", IMMUTABLE)
def test_fields_used_by_the_job_are_immutable(kubectl: Kubectl, field: str) -> None:
    kubectl.write(body(training_spec()))
    answer = kubectl.write(body(training_spec(**{field: IMMUTABLE[field]})))
    assert answer.returncode != 0
    assert "cannot be changed: another run is another object" in answer.stderr


def test_kubectl_get_prints_phase_and_verdict(kubectl: Kubectl) -> None:
    kubectl.write(body(training_spec()))
    common = {"message": "", "observedGeneration": 1, "lastTransitionTime": "2026-01-01T00:00:00Z"}
    better = {"type": "Better", "status": "True", "reason": "Better", **common}
    status = {"status": {"phase": "Complete", "conditions": [better]}}
    kubectl.must("patch", "sdtr", "head", "--subresource=status", "--type=merge", f"--patch={json.dumps(status)}")
    header, row = kubectl.must("get", "sdtr").splitlines()
    assert header.split() == ["NAME", "PHASE", "DEPLOYMENT", "METHOD", "BETTER", "AGE"]
    assert row.split()[:5] == ["head", "Complete", "llama", "eagle3", "True"]
