"""Evaluate ValidatingAdmissionPolicies offline."""

import copy
from typing import Any

import pytest

from specdecode_operator.api.base import Body
from specdecode_operator.handlers.admission_findings import Level, Policies, Remark
from tests.support.admission_cases import ADMITTED, deployment

POLICY: Body = {
    "kind": "ValidatingAdmissionPolicy",
    "metadata": {"name": "ours"},
    "spec": {
        "matchConstraints": {
            "resourceRules": [
                {
                    "apiGroups": ["specdecode.io"],
                    "apiVersions": ["*"],
                    "resources": ["specdecodedeployments"],
                    "operations": ["CREATE", "UPDATE"],
                }
            ]
        },
        "variables": [{"name": "tensor", "expression": "object.spec.parallelism.tensor"}],
        "validations": [{"expression": "variables.tensor < 2", "message": "spec.parallelism.tensor: 2: use 1"}],
    },
}
LABELLED = {"matchLabels": {"tier": "small"}}


def binding(**spec: Any) -> Body:
    return {
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": "ours"},
        "spec": {"policyName": "ours", "validationActions": ["Deny"], **spec},
    }


def said(
    *objects: Body, policy: Body = POLICY, resource: str = "specdecodedeployments", **metadata: str
) -> list[Remark]:
    body = deployment(ADMITTED)
    body["metadata"] |= metadata
    return [*Policies.of([policy, *objects]).remarks(body, resource)]


def changed(**spec: Any) -> Body:
    policy = copy.deepcopy(POLICY)
    policy["spec"] |= spec
    return policy


def test_failed_validation_is_reported_with_its_field() -> None:
    (remark,) = said(binding())
    assert remark.level is Level.ERROR
    assert remark.problem.field == "spec.parallelism.tensor"
    assert remark.sentence == "spec.parallelism.tensor: 2: use 1"


@pytest.mark.parametrize(
    ("actions", "level"),
    [(["Deny", "Audit"], Level.ERROR), (["Warn", "Audit"], Level.WARNING), (["Audit"], Level.NOTE)],
    ids=str,
)
def test_validation_action_sets_the_level(actions: list[str], level: Level) -> None:
    (remark,) = said(binding(validationActions=actions))
    assert remark.level is level


def test_policy_without_binding_reports_nothing() -> None:
    assert said() == []
    assert said(binding(policyName="another")) == []


def test_other_kinds_and_operations_are_not_evaluated() -> None:
    assert said(binding(), resource="specdecodecaptures") == []
    constraints = copy.deepcopy(POLICY["spec"]["matchConstraints"])
    constraints["resourceRules"][0]["operations"] = ["DELETE"]
    assert said(binding(), policy=changed(matchConstraints=constraints)) == []


@pytest.mark.parametrize(
    "match",
    [
        {"objectSelector": LABELLED},
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "elsewhere"}}},
        {"excludeResourceRules": POLICY["spec"]["matchConstraints"]["resourceRules"]},
        {"resourceRules": [{**POLICY["spec"]["matchConstraints"]["resourceRules"][0], "resourceNames": ["another"]}]},
    ],
    ids=lambda match: next(iter(match)),
)
def test_policy_and_binding_can_each_exclude_an_object(match: Body) -> None:
    assert said(binding(matchResources=match), namespace="team") == []
    narrowed = {**POLICY["spec"]["matchConstraints"], **match}
    assert said(binding(), policy=changed(matchConstraints=narrowed), namespace="team") == []
    assert said(binding(matchResources={"objectSelector": {}}), namespace="team")


def test_unmet_match_condition_skips_the_policy() -> None:
    never = [{"name": "later", "expression": "oldObject != null && object.spec != oldObject.spec"}]
    assert said(binding(), policy=changed(matchConditions=never)) == []


@pytest.mark.parametrize(
    ("selector", "level"),
    [
        (LABELLED, Level.ERROR),
        ({"matchLabels": {"tier": "large"}}, None),
        ({"matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["large"]}]}, Level.ERROR),
        ({"matchExpressions": [{"key": "tier", "operator": "DoesNotExist"}]}, None),
        ({"matchExpressions": [{"key": "tier", "operator": "Exists"}]}, Level.ERROR),
        ({"matchLabels": {"kubernetes.io/metadata.name": "team"}}, Level.ERROR),
    ],
    ids=str,
)
def test_binding_applies_to_namespaces_with_matching_labels(selector: Body, level: Level | None) -> None:
    space = {"kind": "Namespace", "metadata": {"name": "team", "labels": {"tier": "small"}}}
    found = said(binding(matchResources={"namespaceSelector": selector}), space, namespace="team")
    assert [each.level for each in found] == ([level] if level else [])


@pytest.mark.parametrize("metadata", [{}, {"namespace": "team"}], ids=["nowhere", "unknown labels"])
def test_unknown_namespace_labels_make_it_a_warning(metadata: dict[str, str]) -> None:
    (remark,) = said(binding(matchResources={"namespaceSelector": LABELLED}), **metadata)
    assert remark.level is Level.WARNING
    assert "where ours is bound to its namespace" in remark.sentence
    named = {"matchLabels": {"kubernetes.io/metadata.name": "elsewhere"}}
    assert said(binding(matchResources={"namespaceSelector": named}), namespace="team") == []


def test_missing_param_config_map_is_a_warning() -> None:
    (remark,) = said(binding(paramRef={"name": "limits", "namespace": "ops"}))
    assert remark.level is Level.WARNING
    assert "ConfigMap limits" in remark.sentence
    limits = {"kind": "ConfigMap", "metadata": {"name": "limits", "namespace": "ops"}, "data": {"most": "4"}}
    policy = changed(validations=[{"expression": "variables.tensor <= int(params.data.most)"}])
    assert said(binding(paramRef={"name": "limits", "namespace": "ops"}), limits, policy=policy) == []


def test_expression_that_cannot_be_evaluated_is_a_warning() -> None:
    policy = changed(validations=[{"expression": "authorizer.group('').resource('pods').check('get').allowed()"}])
    (remark,) = said(binding(), policy=policy)
    assert remark.level is Level.WARNING
    assert "ours cannot be evaluated here" in remark.sentence


def test_message_is_one_line_and_defaults_to_the_expression() -> None:
    hostile = [{"expression": "false", "messageExpression": "'a\\nb'"}]
    (remark,) = said(binding(), policy=changed(validations=hostile))
    assert remark.sentence.isprintable()
    (remark,) = said(binding(), policy=changed(validations=[{"expression": "1 > 2"}]))
    assert remark.sentence == "failed expression: 1 > 2"


@pytest.mark.parametrize(
    "broken", [[], [{}], [{"kind": "ConfigMap"}], [{"kind": "ValidatingAdmissionPolicyBinding"}]], ids=str
)
def test_malformed_policy_objects_are_ignored(broken: list[Body]) -> None:
    assert [*Policies.of(broken).remarks(deployment(ADMITTED), "specdecodedeployments")] == []
