"""What a stolen token of the operator is good for under the chart's guard, and that the operator works under it."""

import json
import re
from collections.abc import Iterable
from copy import deepcopy
from typing import Any
from unittest.mock import AsyncMock

import pytest
import yaml

from specdecode_operator.api.crd_validation import evaluator
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.rights import OPERATOR_RIGHTS, Scope
from specdecode_operator.deployment.pod_security import (
    CAPABILITIES,
    PROFILES,
    SELINUX_TYPES,
    SYSCTLS,
    SYSTEM_TAINTS,
    VOLUMES,
)
from specdecode_operator.handlers.leadership import LeaseName
from specdecode_operator.handlers.settings import Settings
from specdecode_operator.handlers.snapshot import Snapshot
from tests.support.conditions import wait_for
from tests.support.guard import guard, refusal
from tests.support.kubectl import Kubectl
from tests.support.objects import tiny_cpu
from tests.support.operator_process import USER, OperatorProcess
from tests.support.pod_cases import LET_THROUGH, REFUSED, SAFE, UNSAFE, anti_affinity
from tests.support.waiting import eventually

OURS = {"app.kubernetes.io/managed-by": "specdecode-operator"}
NO_PODS_ANYWHERE = [
    "hostNetwork",  # "true", in quotes
    "securityContext.windowsOptions.hostProcess",
    "ephemeralContainers[0].securityContext.privileged",
    "containers[0].securityContext.procMount",
]
"""Of what no guard is asked: no API server takes it as a template of pods, as it is in these cases."""

POD: dict[str, Any] = {"automountServiceAccountToken": False, "containers": [{"name": "c", "image": "i:1"}]}


@pytest.fixture
def stolen(operator: OperatorProcess, kubectl: Kubectl) -> Kubectl:
    """The test's namespace, where the guard is in force as in this whole part."""
    del operator
    return kubectl


def config_map(labels: dict[str, str], namespace: str | None = None) -> dict[str, Any]:
    where = {"namespace": namespace} if namespace else {}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x", "labels": labels, **where}}


def workload(kind: str, pod: dict[str, Any]) -> dict[str, Any]:
    labels = {"a": "b"}
    template = {"metadata": {"labels": labels}, "spec": pod}
    if kind == "Job":
        spec: dict[str, Any] = {"template": {**template, "spec": {**pod, "restartPolicy": "Never"}}}
    else:
        spec = {"selector": {"matchLabels": labels}, "template": template}
    version = "batch/v1" if kind == "Job" else "apps/v1"
    return {"apiVersion": version, "kind": kind, "metadata": {"name": "x", "labels": OURS}, "spec": spec}


def pod_with(change: dict[str, Any]) -> dict[str, Any]:
    """A pod as the operator's are, but for a change; what an API server asks of any pod is filled in."""
    pod = {**deepcopy(POD), **deepcopy(change)}
    for field in ("containers", "initContainers"):
        for container in pod.get(field, ()):
            container.setdefault("image", "i:1")
            handlers = [container.get(f"{each}Probe") for each in ("startup", "readiness", "liveness")]
            handlers += (container.get("lifecycle") or {}).values()
            for handler in filter(None, handlers):
                for action in handler.values():
                    action.setdefault("port", 1)
    return pod


def workloads(cases: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Deployments and Jobs by turns, by name."""
    found = {}
    for number, change in enumerate(cases):
        body = workload(("Deployment", "Job")[number % 2], pod_with(change))
        body["metadata"] = {**body["metadata"], "name": f"case-{number}"}
        found[f"case-{number}"] = body
    return found


def test_stolen_token_cannot_create_pods_with_refused_pod_template_fields(stolen: Kubectl) -> None:
    # Null takes away what stands in a pod that it is laid over; alone it is nothing. Certificates of pods are a field
    # that this API server drops, before it asks anybody: below they are judged offline.
    cases = [(template, field) for template, field, _ in REFUSED if not re.search("None|podCertificate", str(template))]
    given = workloads(template for template, _ in cases)
    said = refusal(stolen, *given.values())
    lines = {name: re.findall(rf".*\b{name}\b.*", said) for name in given}
    fields = dict(zip(given, (field for _, field in cases), strict=True))
    assert [fields[name] for name, told in lines.items() if not told] == [], "goes through"
    of_the_guard = re.compile("no (pod|container) of the operator")
    others = [fields[name] for name, told in lines.items() if not of_the_guard.search("".join(told))]
    assert others == NO_PODS_ANYWHERE, said


def test_stolen_token_can_create_pods_with_allowed_pod_template_fields(stolen: Kubectl) -> None:
    cases = [template for template in LET_THROUGH if template.get("containers") != "none"]
    assert refusal(stolen, *workloads([{}, *cases]).values()) == ""


def test_stolen_token_can_only_dry_run_pods(stolen: Kubectl) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", "labels": OURS}, "spec": pod_with({})}
    told = stolen("create", "--filename=-", f"--as={USER}", stdin=json.dumps(pod))
    assert "makes no pods itself" in told.stderr
    asked = ("create", "--dry-run=server", "--filename=-", f"--as={USER}")
    assert stolen(*asked, stdin=json.dumps(pod)).returncode == 0
    told = stolen(*asked, stdin=json.dumps({**pod, "spec": pod_with({"hostNetwork": True})}))
    assert "no pod of the operator has hostNetwork" in told.stderr


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({}, ""),
        ({"clusterIP": "None"}, ""),
        ({"externalIPs": ["10.0.0.1"]}, "addresses or ports outside"),
        ({"type": "NodePort"}, "addresses or ports outside"),
        ({"type": "LoadBalancer"}, "addresses or ports outside"),
        ({"type": "ExternalName", "externalName": "example.org"}, "addresses or ports outside"),
    ],
    ids=str,
)
def test_stolen_token_cannot_expose_services_outside_the_cluster(
    stolen: Kubectl, spec: dict[str, Any], told: str
) -> None:
    metadata = {"name": "x", "labels": OURS}
    ports = [{"port": 80}]
    said = refusal(
        stolen, {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": ports, **spec}}
    )
    assert told in said
    assert bool(told) == bool(said)


def test_stolen_token_cannot_select_volumes_by_name_or_labels(stolen: Kubectl) -> None:
    claim: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "x", "labels": OURS},
    }
    claim["spec"] = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    assert refusal(stolen, claim) == ""
    named = {**claim, "spec": {**claim["spec"], "volumeName": "somebodys"}}
    assert "by its name" in refusal(stolen, named)
    assert "by its labels" in refusal(stolen, {**claim, "spec": {**claim["spec"], "selector": {"matchLabels": OURS}}})
    stolen.must("create", "--filename=-", stdin=json.dumps(claim))
    assert "by its name" in refusal(stolen, named), "nor once it is there"
    stolen.must("patch", "pvc", "x", "--type=merge", '--patch={"spec":{"volumeName":"bound"}}')
    claim["metadata"]["labels"] = {**OURS, "changed": "later"}
    assert refusal(stolen, claim) == "", "one that is bound is still changed"


def test_guard_allows_existing_unsafe_fields_and_no_new_ones(stolen: Kubectl) -> None:
    body = workload("Deployment", pod_with({"hostNetwork": True}))
    stolen.must("create", "--filename=-", stdin=json.dumps(body))
    given = {**body, "metadata": {**body["metadata"], "annotations": {"taken": "over"}}}
    assert refusal(stolen, given) == ""
    given["spec"]["template"]["spec"]["hostPID"] = True
    assert "no pod of the operator" in refusal(stolen, given)
    assert refusal(stolen, workload("Deployment", pod_with({"hostNetwork": False}))) == ""


@pytest.mark.parametrize("grant", sorted({grant for *_, grant in REFUSED}))
def test_allowed_pod_template_value_permits_only_the_named_fields(grant: str) -> None:
    (policy,) = [each for each in guard(f"--set=allowedPodTemplate={{{grant}}}") if "Binding" not in each["kind"]]
    for template, field, needed in REFUSED:
        if "None" not in str(template) and template.get("hostNetwork") != "true":
            body = workload("Deployment", pod_with(template))
            assert holds(policy, body) == (grant in (needed, needed.partition(".")[0])), (field, grant)


def test_anti_affinity_may_name_only_its_own_namespace(stolen: Kubectl) -> None:
    for namespaces, let_through in (([stolen.namespace], True), ([stolen.namespace, "kube-system"], False)):
        pod = pod_with(anti_affinity(namespaces=namespaces))
        told = refusal(stolen, workload("Deployment", pod), workload("Job", pod))
        assert (told == "") == let_through, told


@pytest.mark.parametrize("reaching", ["leaderTemplate", "workerTemplate"])
def test_guard_checks_both_leader_worker_set_templates(reaching: str) -> None:
    (policy,) = [each for each in guard() if "Binding" not in each["kind"]]
    templates = {name: {"spec": pod_with({})} for name in ("leaderTemplate", "workerTemplate")}
    body = {"kind": "LeaderWorkerSet", "metadata": {"name": "x", "labels": OURS}}
    assert holds(policy, {**body, "spec": {"leaderWorkerTemplate": templates}})
    templates[reaching] = {"spec": pod_with({"hostNetwork": True})}
    assert not holds(policy, {**body, "spec": {"leaderWorkerTemplate": templates}})


def test_leader_worker_set_may_not_have_volume_claim_templates() -> None:
    (policy,) = [each for each in guard() if "Binding" not in each["kind"]]
    templates: dict[str, Any] = {"workerTemplate": {"spec": pod_with({})}}
    body = {"kind": "LeaderWorkerSet", "metadata": {"name": "x", "labels": OURS}}
    assert holds(policy, {**body, "spec": {"leaderWorkerTemplate": templates}})
    templates["volumeClaimTemplates"] = [{"spec": {"volumeName": "somebodys"}}]
    assert not holds(policy, {**body, "spec": {"leaderWorkerTemplate": templates}})


def test_guard_allows_exactly_the_safe_pod_templates() -> None:
    (policy,) = [each for each in guard() if "Binding" not in each["kind"]]
    for template in (*SAFE, *UNSAFE):
        assert holds(policy, workload("Deployment", pod_with(template))) == (template in SAFE), template


def test_guard_lists_equal_the_pod_template_validation_lists() -> None:
    (policy,) = [each for each in guard() if "Binding" not in each["kind"]]
    rules = [each["expression"] for each in policy["spec"]["validations"]]
    lists = [set(yaml.safe_load(found)) for rule in rules for found in re.findall(r" in (\[[^]]*\])", rule)]
    accounts = [{"", "default"}] * 2
    wanted = [
        {"kube-system", "kube-public", "kube-node-lease"},
        {"SpecDecodeDeployment", "SpecDecodeTraining"},
        {"horizontalpodautoscalers", "scaledobjects"},
        *accounts,
        {*SYSTEM_TAINTS},
        {f"{prefix}{each}" for prefix in ("", "CAP_") for each in CAPABILITIES},
        *map(set, PROFILES.values()),
        {*SELINUX_TYPES},
        {*SYSCTLS},
        {*VOLUMES, "name"},
    ]
    assert lists == wanted


def holds(policy: dict[str, Any], body: dict[str, Any], old: dict[str, Any] | None = None) -> bool:
    """Return whether our CEL evaluator finds that a policy admits the operator's create or update."""
    resource = {"resource": f"{body['kind'].lower()}s"}
    given = {
        "object": body,
        "oldObject": old,
        "request": {"namespace": "n", "operation": "UPDATE" if old else "CREATE", "resource": resource},
    }
    variables: dict[str, Any] = {}
    for each in policy["spec"]["variables"]:
        variables[each["name"]] = evaluator(None, **given, variables=variables)(each["expression"])
    evaluate = evaluator(None, **given, variables=variables)
    return all(evaluate(each["expression"]) for each in policy["spec"]["validations"])


async def test_guard_lets_the_operator_write_its_snapshot() -> None:
    (policy,) = [each for each in guard() if "Binding" not in each["kind"]]
    cluster = AsyncMock()
    await Snapshot(cluster, LeaseName("n", "operator", "pod-1", 15), Cache(), Settings()).keep([])
    (body,) = cluster.apply.await_args.args
    assert holds(policy, body)
    assert holds(policy, body, body)
    unlabelled = {**body, "metadata": {"name": "operator-snapshot"}}
    assert not holds(policy, unlabelled)
    assert not holds(policy, body, unlabelled), "updates of an unlabelled object are rejected"


def test_guard_covers_all_kinds_that_the_operator_may_write() -> None:
    (policy,) = [each for each in guard() if "Binding" not in each["kind"]]
    (rule,) = policy["spec"]["matchConstraints"]["resourceRules"]
    writes = {"create", "patch", "delete"}
    written = {
        right.resource
        for right in OPERATOR_RIGHTS
        if right.scope is Scope.SERVED and writes & {*right.verbs} and not right.resource.endswith("/status")
    }
    assert {each.partition(".")[0] for each in written} == {*rule["resources"]}
    assert {each.partition(".")[2] for each in written} == {*rule["apiGroups"]}


@pytest.mark.parametrize(("owner", "passes"), [("SpecDecodeDeployment", True), ("SpecDecodeCapture", False)])
def test_a_training_belongs_to_a_deployment(owner: str, passes: bool) -> None:
    (policy,) = [each for each in guard() if "Binding" not in each["kind"]]
    owners = [{"apiVersion": "specdecode.io/v1alpha1", "kind": owner, "name": "x", "uid": "u"}]
    metadata = {"name": "x", "labels": OURS, "ownerReferences": owners}
    assert holds(policy, {"kind": "SpecDecodeTraining", "metadata": metadata, "spec": {"deployment": "x"}}) == passes


def test_stolen_token_can_write_only_the_operators_children(stolen: Kubectl) -> None:
    system = stolen.within("kube-system")
    assert "where the cluster itself runs" in refusal(system, config_map(OURS))
    stolen.must("create", "configmap", "theirs")
    theirs = {**config_map(OURS), "data": {"a": "b"}}
    theirs["metadata"]["name"] = "theirs"
    assert "changes and deletes nothing" in refusal(stolen, theirs)
    assert "changes and deletes nothing" in stolen("delete", "configmap", "theirs", f"--as={USER}").stderr
    assert "of a SpecDecodeDeployment or a SpecDecodeTraining alone" in refusal(stolen, capture("x"))


def capture(name: str, **spec: Any) -> dict[str, Any]:
    kind = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeCapture"}
    return {**kind, "metadata": {"name": name}, "spec": {"deployment": "nobody", **spec}}


def test_stolen_token_can_delete_only_captures_with_a_ttl(stolen: Kubectl) -> None:
    stolen.must("create", "--filename=-", stdin=json.dumps(capture("kept")))
    stolen.must("create", "--filename=-", stdin=json.dumps(capture("passing", ttlSecondsAfterFinished=99)))
    for name in ("kept", "passing"):
        assert "changes and deletes nothing" in refusal(stolen, capture(name, suspend=True))
    deletion = ("delete", "specdecodecapture", "--dry-run=server", f"--as={USER}")
    assert "changes and deletes nothing" in stolen(*deletion, "kept").stderr
    stolen.must(*deletion, "passing")


def test_stolen_token_can_create_events_only_for_specdecode_kinds(stolen: Kubectl) -> None:
    def event(kind: str, version: str) -> str:
        about = {"kind": kind, "apiVersion": version, "name": "x", "namespace": stolen.namespace}
        return json.dumps(
            {"apiVersion": "v1", "kind": "Event", "metadata": {"name": "x"}, "involvedObject": about, "reason": "R"}
        )

    creation = ("create", "--filename=-", "--dry-run=server", f"--as={USER}")
    stolen.must(*creation, stdin=event("SpecDecodeCapture", "specdecode.io/v1alpha1"))
    assert "of its own kinds alone" in stolen(*creation, stdin=event("Pod", "v1")).stderr
    system = stolen.within("kube-system")
    said = system(*creation, stdin=event("Pod", "v1").replace(stolen.namespace, "kube-system")).stderr
    assert "where the cluster itself runs" in said


def test_stolen_token_cannot_evict_pods_in_kube_system(stolen: Kubectl) -> None:
    for namespace, told in ((stolen, ""), (stolen.within("kube-system"), "where the cluster itself runs")):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "evicted"}, "spec": POD}
        namespace.must("create", "--filename=-", stdin=json.dumps(pod))
        path = f"/api/v1/namespaces/{namespace.namespace}/pods/evicted/eviction"
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "evicted"}}
        answer = namespace("create", f"--raw={path}", "--filename=-", f"--as={USER}", stdin=json.dumps(eviction))
        assert told in answer.stderr
        assert bool(told) == bool(answer.returncode), answer.stderr


def test_operator_works_under_its_guard(stolen: Kubectl) -> None:
    body = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "metadata": {"name": "tiny"}}
    assert stolen.apply(yaml.safe_dump({**body, "spec": tiny_cpu(replicas=2)})).returncode == 0
    wait_for(stolen, "tiny", "Planned", "Fits")
    eventually(lambda: stolen.objects("deployments"), "engines are started")
    stolen.must("patch", "service", "tiny", "--type=merge", '--patch={"spec":{"sessionAffinity":"ClientIP"}}')
    stolen.must("label", "deployment", "tiny", "app.kubernetes.io/managed-by-")
    eventually(
        lambda: (
            stolen.object("service", "tiny")["spec"]["sessionAffinity"] == "None"
            and stolen.object("deployment", "tiny")["metadata"]["labels"].items() >= OURS.items()
        ),
        "what somebody changed is put right",
    )
    assert stolen.apply(yaml.safe_dump({**body, "spec": tiny_cpu()})).returncode == 0
    eventually(lambda: not stolen.objects("poddisruptionbudgets"), "a child that is no longer wanted is deleted")
    asked = {**body, "kind": "SpecDecodeCapture", "spec": {"deployment": "tiny", "deploymentDuringCapture": "Suspend"}}
    assert stolen.apply(yaml.safe_dump(asked)).returncode == 0
    eventually(lambda: stolen.objects("jobs") and stolen.objects("pvc"), "a capture gets its claim and its Job")


@pytest.mark.parametrize(
    ("rule", "passes"),
    [
        ({"backendRefs": [{"name": "x", "port": 8000}]}, True),
        ({"backendRefs": [{"name": "other", "port": 8000}]}, False),
        ({"backendRefs": [{"name": "x", "namespace": "theirs", "port": 8000}]}, False),
        ({"backendRefs": [{"name": "x", "kind": "ConfigMap"}]}, False),
        ({"backendRefs": [{"name": "x", "kind": "InferencePool", "group": "inference.networking.k8s.io"}]}, True),
        ({"backendRefs": [{"name": "y", "kind": "InferencePool", "group": "inference.networking.k8s.io"}]}, False),
        ({"backendRefs": [{"name": "x", "filters": [{"type": "RequestMirror"}]}]}, False),
        ({"backendRefs": [{"name": "x"}], "filters": [{"type": "RequestRedirect"}]}, False),
    ],
)
def test_a_route_reaches_the_engines_of_its_object_alone(rule: dict[str, Any], passes: bool) -> None:
    (policy,) = [each for each in guard() if "Binding" not in each["kind"]]
    assert (
        holds(policy, {"kind": "HTTPRoute", "metadata": {"name": "x", "labels": OURS}, "spec": {"rules": [rule]}})
        == passes
    )


@pytest.mark.parametrize(("fields", "passes"), [({"count": 2}, True), ({"adminAccess": True}, False)])
def test_a_claim_does_not_take_devices_of_others(fields: dict[str, Any], passes: bool) -> None:
    (policy,) = [each for each in guard() if "Binding" not in each["kind"]]
    requests = [{"name": "gpus", "exactly": {"deviceClassName": "gpu.nvidia.com", **fields}}]
    body = {"kind": "ResourceClaimTemplate", "metadata": {"name": "x", "labels": OURS}}
    assert holds(policy, {**body, "spec": {"spec": {"devices": {"requests": requests}}}}) == passes


@pytest.mark.parametrize(
    ("kind", "changes", "passes"),
    [
        ("HorizontalPodAutoscaler", {}, True),
        ("HorizontalPodAutoscaler", {"scaleTargetRef": {"kind": "SpecDecodeDeployment", "name": "other"}}, False),
        ("HorizontalPodAutoscaler", {"scaleTargetRef": {"kind": "Deployment", "name": "x"}}, False),
        ("ScaledObject", {}, True),
        ("ScaledObject", {"scaleTargetRef": {"kind": "Deployment", "name": "x"}}, False),
        ("ScaledObject", {"triggers": [{"type": "aws-sqs-queue"}]}, False),
        ("ScaledObject", {"triggers": [{"type": "prometheus", "authenticationRef": {"name": "own"}}]}, True),
        (
            "ScaledObject",
            {
                "triggers": [
                    {
                        "type": "prometheus",
                        "authenticationRef": {"name": "all", "kind": "ClusterTriggerAuthentication"},
                    }
                ]
            },
            False,
        ),
    ],
)
def test_an_autoscaler_scales_its_object_alone(kind: str, changes: dict[str, Any], passes: bool) -> None:
    (policy,) = [each for each in guard() if "Binding" not in each["kind"]]
    target = {"kind": "SpecDecodeDeployment", "name": "x"}
    spec = {"scaleTargetRef": target, "triggers": [{"type": "prometheus"}], **changes}
    assert holds(policy, {"kind": kind, "metadata": {"name": "x", "labels": OURS}, "spec": spec}) == passes


@pytest.mark.parametrize(
    ("labels", "passes"), [({"specdecode.io/deployment": "x"}, True), ({"specdecode.io/deployment": "y"}, False)]
)
def test_a_pool_selects_the_engines_of_its_object_alone(labels: dict[str, str], passes: bool) -> None:
    (policy,) = [each for each in guard() if "Binding" not in each["kind"]]
    spec = {"selector": {"matchLabels": labels}}
    assert holds(policy, {"kind": "InferencePool", "metadata": {"name": "x", "labels": OURS}, "spec": spec}) == passes
