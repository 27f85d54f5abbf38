"""Reject podTemplate fields that reach beyond the namespace, unless they are allowed by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specdecode_operator.capture.observation import ObservedDeployment
from specdecode_operator.capture.preconditions import captured_deployment
from specdecode_operator.cli.main import app
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.pod_security import GRANTS, is_grant, pod_problems
from tests.support.decisions import desired_state
from tests.support.golden import rendered_pods
from tests.support.model_caches import NODES, cached
from tests.support.objects import Body, parent, tiny_cpu
from tests.support.pod_cases import LET_THROUGH, REFUSED, SAFE, UNSAFE, anti_affinity, secured
from tests.support.replay_field_cases import replaying
from tests.unit.deployment.models.test_model_facts import undescribed


def accepted(spec: Body, **cluster: Any) -> tuple[str, str, str]:
    """Status, reason and message of the condition."""
    desired = desired_state(parse_deployment(parent(spec)), (), **cluster)
    found = next(each for each in desired.conditions if each.type == "Accepted")
    return found.status.value, found.reason, found.message


@pytest.mark.parametrize(("template", "field", "grant"), REFUSED, ids=str)
def test_pod_template_field_is_refused_unless_its_grant_is_allowed(template: Body, field: str, grant: str) -> None:
    (problem,) = pod_problems({"spec": template}, "spec.podTemplate")
    assert problem.field == f"spec.podTemplate.spec.{field}"
    assert f"--allow-pod-template={grant}" in problem.message
    assert pod_problems({"spec": template}, "spec.podTemplate", frozenset({grant})) == []
    assert pod_problems({"spec": template}, "", frozenset({grant.partition(".")[0]})) == [], "all of its kind"
    assert pod_problems({"spec": template}, "", frozenset(GRANTS) - {grant.partition(".")[0]}), "but nothing else"


def test_every_grant_has_a_refused_example() -> None:
    assert {grant.partition(".")[0] for *_, grant in REFUSED} == set(GRANTS)


@pytest.mark.parametrize("template", LET_THROUGH, ids=str)
def test_fields_that_affect_only_the_pod_are_accepted(template: Body) -> None:
    assert pod_problems({"spec": template}, "spec.podTemplate") == []


def test_only_volumes_and_sysctls_of_restricted_are_accepted() -> None:
    for template in (*SAFE, *UNSAFE):
        assert (pod_problems({"spec": template}, "") == []) == (template in SAFE), template


def test_anti_affinity_may_name_only_its_own_namespace() -> None:
    own, both = (
        tiny_cpu(podTemplate={"spec": anti_affinity(namespaces=names)})
        for names in (["default"], ["default", "team-b"])
    )
    assert accepted(own)[0] == "True"
    assert accepted(both)[1] == "PodTemplateNotAllowed"
    workload = desired_state(parse_deployment(parent(own)), ()).workload
    assert workload is not None
    term = workload["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"]
    assert term == own["podTemplate"]["spec"]["affinity"]["podAntiAffinity"]


def test_unconfined_app_armor_annotation_is_refused() -> None:
    name = "container.apparmor.security.beta.kubernetes.io/engine"
    (problem,) = pod_problems({"metadata": {"annotations": {name: "unconfined"}}}, "spec.podTemplate")
    assert problem.field == f"spec.podTemplate.metadata.annotations.{name}"
    assert pod_problems({"metadata": {"annotations": {name: "localhost/mine", "team": "a"}}}, "") == []


def test_refused_pod_template_is_named_in_accepted_without_children() -> None:
    spec = tiny_cpu(podTemplate={"spec": {"hostNetwork": True, "hostPID": True}})
    status, reason, message = accepted(spec)
    assert (status, reason) == ("False", "PodTemplateNotAllowed")
    assert "spec.podTemplate.spec.hostNetwork: true: shares the node's network" in message
    assert "spec.podTemplate.spec.hostPID: true" in message
    assert desired_state(parse_deployment(parent(spec)), ()).children == []
    assert accepted(spec, pod_template=frozenset({"hostNetwork", "hostPID"}))[0] == "True"


PATHS = {
    "engine": (tiny_cpu(), "Deployment"),
    "download": (cached(), "Job"),
    "resolver": (undescribed(), "Job"),
    "replay": (replaying(), "Deployment"),
}
"""Specs by whose pods a podTemplate is used first, with the kind that runs these pods."""


@pytest.mark.parametrize("path", PATHS)
def test_refused_pod_template_creates_no_pods_of_any_kind(path: str) -> None:
    spec, kind = PATHS[path]
    refused = {"podTemplate": {"spec": anti_affinity(namespaceSelector={})}}
    assert kind in {child["kind"] for child in desired_state(parse_deployment(parent(spec)), NODES).children}
    owner = parse_deployment(parent(spec | refused))
    desired = desired_state(owner, NODES)
    assert desired.children == []
    assert accepted(spec | refused)[1] == "PodTemplateNotAllowed"
    observed = ObservedDeployment(owner.key, owner.uid, owner.generation, desired)
    blocked = captured_deployment("llama", observed)
    assert isinstance(blocked, Blocked), "its captures start no pod either"
    assert "PodTemplateNotAllowed" in blocked.message


def test_pods_rendered_by_the_operator_pass_the_check() -> None:
    assert [problem for template in rendered_pods() for problem in pod_problems(template, "")] == []


class TestCommandLine:
    @pytest.fixture
    def file(self, tmp_path: Path) -> str:
        spec = tiny_cpu(podTemplate={"spec": secured(capabilities={"add": ["IPC_LOCK"]})})
        body = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "metadata": {"name": "a"}}
        path = tmp_path / "a.json"
        path.write_text(json.dumps({**body, "spec": spec}))
        return str(path)

    @pytest.mark.parametrize("command", ["plan", "render"])
    def test_plan_and_render_refuse_the_field_without_a_grant(self, file: str, command: str) -> None:
        answer = CliRunner().invoke(app, [command, file])
        assert answer.exit_code == 2
        assert "spec.podTemplate.spec.containers[0].securityContext.capabilities.add" in answer.output
        assert "--allow-pod-template=capabilities.IPC_LOCK" in answer.output
        allow = "--allow-pod-template=hostNetwork, capabilities.IPC_LOCK"
        assert CliRunner().invoke(app, [command, file, allow]).exit_code == 0

    @pytest.mark.parametrize(
        "name", ["hostnetwork", "capabilities.", "hostNetwork.x", "", "hostPath", "volumes.hostPath"]
    )
    def test_unknown_grant_name_is_refused(self, file: str, name: str) -> None:
        assert not is_grant(name)
        answer = CliRunner().invoke(app, ["plan", file, f"--allow-pod-template={name}"])
        assert answer.exit_code == 2
        assert "cannot be allowed" in answer.output
