"""The answer to an AdmissionReview: what the reconcile would refuse is refused, what fits nowhere is told."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specdecode_operator.api.base import Body
from specdecode_operator.cli.main import app
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.cluster.storage_classes import StorageClasses
from specdecode_operator.deployment.models.checkpoint_reader import Checkpoint, Weights
from specdecode_operator.deployment.models.model_facts import SiteFacts
from specdecode_operator.handlers.admission_findings import Terms
from specdecode_operator.handlers.webhook import NoReviewError, answer
from tests.support.admission_cases import (
    ADMITTED,
    REFUSED,
    REFUSED_CAPTURE,
    TOO_LARGE,
    capture,
    deployment,
)
from tests.support.decisions import decide
from tests.support.objects import H100, TINY_CONFIG, pair_70b, parent

NAMES = list(REFUSED)
DEFAULTS = Terms()


def review(body: Body, before: Body | None = None, operation: str = "") -> Body:
    """Return what the API server sends."""
    request = {
        "uid": "u1",
        "operation": operation or ("UPDATE" if before else "CREATE"),
        "namespace": "team",
        "object": body,
        "oldObject": before,
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def asked(body: Body, before: Body | None = None, terms: Terms = DEFAULTS, **more: str) -> Body:
    response: Body = answer(review(body, before, **more), terms)["response"]
    assert response["uid"] == "u1"
    return response


def linted(tmp_path: Path, body: Body, *options: str) -> list[Body]:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(body))
    result = CliRunner().invoke(app, ["lint", str(file), "--output=json", *options])
    found: list[Body] = json.loads(result.stdout)["findings"]
    return found


def test_a_good_object_passes_without_a_word() -> None:
    assert asked(deployment(ADMITTED)) == {"uid": "u1", "allowed": True}


@pytest.mark.parametrize("name", NAMES)
def test_what_the_reconcile_would_refuse_is_refused_in_its_words(name: str) -> None:
    spec, reason = REFUSED[name]
    response = asked(deployment(spec))
    _, _, conditions = decide(parent(spec))
    accepted = conditions["Accepted"]
    assert (accepted.status, accepted.reason) == ("False", reason)
    assert not response["allowed"]
    assert response["status"] == {
        "code": 422,
        "reason": "Invalid",
        "message": f"{accepted.message} [{accepted.reason}]",
    }


@pytest.mark.parametrize("name", NAMES)
def test_lint_says_offline_what_admission_refuses(name: str, tmp_path: Path) -> None:
    spec, reason = REFUSED[name]
    errors = [each for each in linted(tmp_path, deployment(spec)) if each["level"] == "error"]
    assert {each["rule"] for each in errors} == {reason}
    message = "; ".join(each["message"] for each in errors)
    assert asked(deployment(spec))["status"]["message"] == f"{message} [{reason}]"


def test_what_fits_nowhere_is_told_and_passes_unless_it_shall_not(tmp_path: Path) -> None:
    response = asked(deployment(TOO_LARGE))
    (warning,) = response["warnings"]
    assert response["allowed"]
    assert "does not fit" in warning
    refused = asked(deployment(TOO_LARGE), terms=Terms(does_not_fit=False))
    assert not refused["allowed"]
    assert refused["status"]["message"].endswith("[DoesNotFit]")
    (found,) = linted(tmp_path, deployment(TOO_LARGE))
    assert (found["level"], found["rule"]) == ("warning", "DoesNotFit")
    assert found["message"].startswith(warning.removesuffix("…"))
    (found,) = linted(tmp_path, deployment(TOO_LARGE), "--refuse-does-not-fit")
    assert found["level"] == "error"


def test_what_goes_on_by_its_override_passes_however_large() -> None:
    spec = {**TOO_LARGE, "override": {"ignorePlan": True, "reason": "measured"}}
    response = asked(deployment(spec), terms=Terms(does_not_fit=False))
    assert response["allowed"]
    assert "measured" in response["warnings"][0]


def test_the_verdict_is_of_the_fleet_where_it_is_known() -> None:
    spec = pair_70b(parallelism={"tensor": 4})
    assert "warnings" not in asked(deployment(spec))
    small = (NodeFacts("a", H100, 2),)
    assert "NodesTooFew" not in str(asked(deployment(spec)))
    (warning,) = asked(deployment(spec), terms=Terms(nodes=small))["warnings"]
    assert "4 GPUs a replica" in warning


def test_what_the_operator_allows_passes() -> None:
    terms = Terms(host_paths=("/mnt",), pod_template=frozenset({"hostNetwork"}))
    spec = pair_70b(
        models={"volume": {"hostPath": {"path": "/mnt/models"}}}, podTemplate={"spec": {"hostNetwork": True}}
    )
    # Models of a volume are read by a Job, once they are there.
    assert asked(deployment(spec), terms=terms)["allowed"]


def test_a_model_that_nobody_knows_passes_and_what_can_be_told_without_it_is_told() -> None:
    unknown = {"target": {"model": "acme/new"}}
    assert asked(deployment(unknown)) == {"uid": "u1", "allowed": True}
    bad = {**unknown, "engine": {"extraArgs": ["--tensor-parallel-size", "4"]}}
    assert not asked(deployment(bad))["allowed"]


def test_a_model_of_the_operators_facts_files_is_judged_as_a_known_one() -> None:
    weights = Weights(5_771_776, 39, True, {"BF16": 5_771_776}, {})
    terms = Terms(site_facts={"site/tiny": SiteFacts("tiny.json", "1", Checkpoint(TINY_CONFIG, weights))})
    spec = {"target": {"model": "site/tiny"}, "parallelism": {"tensor": 8}}
    assert asked(deployment(spec))["allowed"]
    response = asked(deployment(spec), terms=terms)
    assert not response["allowed"]
    assert "spec.parallelism.tensor" in response["status"]["message"]


def test_a_capture_whose_load_outlasts_its_deadline_is_refused(tmp_path: Path) -> None:
    response = asked(capture(REFUSED_CAPTURE))
    assert not response["allowed"]
    (found,) = linted(tmp_path, capture(REFUSED_CAPTURE))
    assert response["status"]["message"] == f"{found['message']} [WorkloadTooLong]"
    good = {**REFUSED_CAPTURE, "deadlineSeconds": 3600}
    assert asked(capture(good))["allowed"]


CLASSES = StorageClasses({"fast": "WaitForFirstConsumer"})


@pytest.mark.parametrize(
    ("storage", "told"),
    [
        ({"storageClassName": "fats"}, "spec.storage.storageClassName: fats: "),
        ({}, "spec.storage.storageClassName: not set: "),
        ({"storageClassName": "fast"}, ""),
        ({"persistentVolumeClaim": {"claimName": "mine"}}, ""),
    ],
)
def test_a_storage_class_that_the_cluster_lacks_is_warned_of(tmp_path: Path, storage: Body, told: str) -> None:
    body = capture({**REFUSED_CAPTURE, "deadlineSeconds": 3600, "storage": storage})
    assert "warnings" not in asked(body), "nothing is said of classes that are not known"
    response = asked(body, terms=Terms(storage_classes=CLASSES))
    assert response["allowed"]
    assert [each[: len(told)] for each in response.get("warnings", [])] == ([told] if told else [])
    classes = tmp_path / "classes.yaml"
    one = {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "fast"}}
    classes.write_text(json.dumps({"kind": "List", "apiVersion": "v1", "items": [one]}))
    found = linted(tmp_path, body, f"--storage-classes={classes}")
    assert [each["rule"] for each in found] == (["StorageClassNotFound"] if told else [])


def test_that_of_a_schedule_too() -> None:
    template = {
        "workload": REFUSED_CAPTURE["workload"],
        "deadlineSeconds": 3600,
        "storage": {"storageClassName": "fats"},
    }
    spec = {**ADMITTED, "captures": [{"name": "nightly", "schedule": "0 3 * * *", "template": template}]}
    (warning,) = asked(deployment(spec), terms=Terms(storage_classes=CLASSES))["warnings"]
    assert warning.startswith("spec.captures[name=nightly].template.storage.storageClassName: fats: ")


@pytest.mark.parametrize(
    ("before", "changes"),
    [
        (deployment(REFUSED[NAMES[0]][0]), {"labels": {"a": "b"}}),
        (deployment(ADMITTED), {"deletionTimestamp": "2026-01-01T00:00:00Z"}),
    ],
    ids=["its spec stays", "it goes"],
)
def test_an_object_that_is_there_can_be_labelled_and_removed(before: Body, changes: Body) -> None:
    body = deployment(REFUSED[NAMES[0]][0])
    body["metadata"] |= changes
    assert asked(body, before) == {"uid": "u1", "allowed": True}


def test_a_change_for_the_worse_is_refused() -> None:
    assert not asked(deployment(REFUSED[NAMES[0]][0]), deployment(ADMITTED))["allowed"]


def test_other_kinds_and_operations_are_none_of_its_business() -> None:
    bad = deployment(REFUSED[NAMES[0]][0])
    assert asked(bad, operation="DELETE")["allowed"]
    assert asked({**bad, "kind": "Deployment"})["allowed"]


@pytest.mark.parametrize("spec", [None, [], "x", {"target": []}, {"target": {"model": 7}}, {"target": {}}])
def test_a_spec_of_another_form_is_refused_with_its_field(spec: Any) -> None:
    response = asked(deployment(spec))
    assert not response["allowed"]
    assert "spec" in response["status"]["message"]


@pytest.mark.parametrize("broken", [None, [], {}, {"request": {}}, {"request": {"uid": 7}}, "text"])
def test_what_is_no_review_is_refused(broken: Any) -> None:
    document = {**review(deployment(ADMITTED)), **broken} if isinstance(broken, dict) and broken else broken
    with pytest.raises(NoReviewError, match=r"admission\.k8s\.io/v1"):
        answer(document, Terms())


def test_a_long_warning_is_cut_where_the_api_server_would_drop_its_end() -> None:
    spec = {"target": {"model": "meta-llama/Llama-3.1-405B-Instruct"}, "parallelism": {"tensor": 4}}
    (warning,) = asked(deployment({**spec, "accelerator": {"products": [H100]}}))["warnings"]
    assert (len(warning), warning[-1]) == (250, "…")


def test_hostile_text_ends_no_line_and_warnings_stay_short() -> None:
    spec = deepcopy(TOO_LARGE)
    spec["engine"] = {"version": "0.99", "image": "example.org/vllm-openai:v0.30\n\x1b[31m" + "x" * 300}
    response = asked(deployment(spec))
    assert all(each.isprintable() and len(each) <= 250 for each in response["warnings"])
    flag = pair_70b(engine={"extraArgs": ["--port\nWarning: fine", "1"]})
    refused = asked(deployment(flag))
    texts = [*refused.get("warnings", []), refused.get("status", {}).get("message", "")]
    assert all(each.isprintable() for each in texts)


def test_of_thousands_of_refusals_the_first_are_told() -> None:
    volumes = [{"name": f"v{number}", "hostPath": {"path": "/x"}} for number in range(2000)]
    message = asked(deployment(pair_70b(podTemplate={"spec": {"volumes": volumes}})))["status"]["message"]
    assert "; and 1,968 more [" in message
    assert len(message) < 10_000
