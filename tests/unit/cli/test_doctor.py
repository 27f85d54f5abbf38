"""`specdecode doctor`."""

from base64 import b64encode
from collections.abc import Sequence
from copy import deepcopy
from datetime import UTC, datetime
from typing import Any

import pytest

from specdecode_operator.api.crds import capture_crd, deployment_crd
from specdecode_operator.cli import doctor
from specdecode_operator.cli.doctor import (
    Finding,
    Grade,
    Unreadable,
    device_findings,
    gpu_findings,
    webhook_findings,
)
from specdecode_operator.version import __version__
from tests.support.certificates import DAY, made_certificate
from tests.support.devices import gpu, resource_slice
from tests.support.objects import H100, H200, pair_70b
from tests.unit.deployment.test_children import pod_spec

DENIED = Unreadable("you may not look")
OK, WARN, FAIL = Grade.OK, Grade.WARN, Grade.FAIL


def check(finding: Finding, grade: Grade, *words: str) -> None:
    assert finding.grade is grade, finding
    assert all(word in f"{finding.what} -> {finding.fix}" for word in words), finding
    assert bool(finding.fix) is (grade is not OK), "what is wrong has a fix, and nothing else has"


def node(name: str = "n-1", gpu: int = 8, product: str = H200, driver: str = "580.65", **labels: str) -> dict[str, Any]:
    known = {"nvidia.com/gpu.product": product, "nvidia.com/cuda.driver-version.full": driver}
    return {
        "metadata": {"name": name, "labels": {key: value for key, value in (known | labels).items() if value}},
        "spec": {},
        "status": {"allocatable": {"nvidia.com/gpu": str(gpu), "cpu": "8"}},
    }


def of(
    subject: str, nodes: list[dict[str, Any]], pods: list[dict[str, Any]] | Unreadable | None = None
) -> list[Finding]:
    found = doctor.gpu_findings(nodes, [] if pods is None else pods)
    return [finding for finding in found if finding.subject == subject]


@pytest.mark.parametrize(
    ("version", "grade"),
    [
        ("v1.38.0", WARN),
        ("v1.37.2", OK),
        ("v1.32.0+k3s1", OK),
        ("v1.30.0", OK),
        ("v1.29.9-eks-1", FAIL),
        ("v2", WARN),
        (DENIED, WARN),
    ],
)
def test_api_server_version_is_graded(version: str | Unreadable, grade: Grade) -> None:
    check(doctor.version_finding(version), grade)


CRDS = pytest.mark.parametrize("own", [deployment_crd(), capture_crd()], ids=lambda own: own["metadata"]["name"])


def installed(own: dict[str, Any], **version: Any) -> dict[str, Any]:
    body = deepcopy(own)
    body["spec"]["versions"][0] |= version
    body["status"] = {"conditions": [{"type": "Established", "status": "True"}]}
    return body


@CRDS
def test_state_of_the_crds_is_graded(own: dict[str, Any]) -> None:
    groups, name = {"specdecode.io": ["v1alpha1"]}, own["metadata"]["name"]
    check(doctor.crd_finding(own, installed(own), groups), OK, f"{name} serves v1alpha1")
    check(doctor.crd_finding(own, None, groups), FAIL, f"{name} is not installed", "specdecode crds | kubectl apply")
    check(doctor.crd_finding(own, installed(own, schema={}), groups), WARN, name, "the schema of", "differs")
    older = installed(own, schema={})
    older["metadata"] = {**older["metadata"], "labels": {"app.kubernetes.io/version": "0.0.1"}}
    check(doctor.crd_finding(own, older, groups), WARN, f"{name} has version 0.0.1, older than this {__version__}")
    check(doctor.crd_finding(own, installed(own, name="v1"), groups), FAIL, f"{name} serves v1, not v1alpha1")
    check(doctor.crd_finding(own, installed(own) | {"status": {}}, groups), FAIL, f"{name} is not established")


@CRDS
def test_unreadable_crd_is_graded_by_served_versions(own: dict[str, Any]) -> None:
    name = own["metadata"]["name"]
    check(
        doctor.crd_finding(own, DENIED, {"specdecode.io": ["v1alpha1"]}),
        WARN,
        "is served",
        name,
        "you may not look",
    )
    check(doctor.crd_finding(own, DENIED, {"apps": ["v1"]}), FAIL, "is not served", name)
    check(doctor.crd_finding(own, DENIED, DENIED), WARN, "you may not look")


def operator(
    image: str = f"r.io/operator:v{__version__}",
    available: int = 1,
    name: str = "o",
    served: Sequence[str] = (),
    label: str = __version__,
) -> dict[str, Any]:
    containers = [{"image": image, "args": ["operator", *(f"--namespace={each}" for each in served)]}]
    return {
        "metadata": {"name": name, "namespace": "specdecode-system", "labels": {"app.kubernetes.io/version": label}},
        "spec": {"template": {"spec": {"containers": containers}}},
        "status": {"availableReplicas": available},
    }


def test_claimable_devices_are_reported_and_replace_the_device_plugin() -> None:
    found = device_findings([resource_slice("a", gpu(), gpu(), {**gpu(), "taints": [{"effect": "NoSchedule"}]})])
    assert [(each.grade, each.what.partition(" for ")[0]) for each in found] == [(Grade.OK, f"2 x {H200}")]
    assert device_findings(Unreadable("no such resource")) == []
    nodes = [{"metadata": {"name": "a"}}]
    assert [each.grade for each in gpu_findings(nodes, [])] == [Grade.FAIL]
    assert [each.grade for each in gpu_findings(nodes, [], can_claim=True)] == [Grade.WARN]


def test_state_of_the_operator_is_graded() -> None:
    check(doctor.operator_finding([operator()]), OK, "specdecode-system/o")
    check(doctor.operator_finding([operator("r.io/operator:dev")]), OK, "dev")
    check(doctor.operator_finding([operator("r.io/operator:9.0.0")]), WARN, "9.0.0", __version__)
    by_digest = f"r.io/operator@sha256:{'a' * 64}"
    check(doctor.operator_finding([operator(by_digest)]), OK, "sha256")
    check(doctor.operator_finding([operator(by_digest, label="9.0.0")]), WARN, "9.0.0", __version__)
    check(doctor.operator_finding([operator(label="9.0.0")]), OK)  # a tag says more of what runs
    check(doctor.operator_finding([operator(available=0)]), FAIL, "not available", "kubectl describe")
    check(doctor.operator_finding([]), FAIL, "not installed", "chart")
    check(
        doctor.operator_finding([operator(), operator(name="p")]),
        FAIL,
        "serve the same namespaces",
        "specdecode-system/p",
    )
    serving = {name: operator(name=name, served=name.split("-")) for name in ("a", "b", "a-c")}
    check(doctor.operator_finding([operator(), serving["a"], serving["b"]]), OK)
    check(doctor.operator_finding([serving["a"], serving["b"], serving["a-c"]]), FAIL, "specdecode-system/a-c serve")
    check(doctor.operator_finding(DENIED), WARN, "you may not look")


def test_missing_permission_of_the_operator_fails() -> None:
    check(doctor.rights_finding("a", []), OK)
    check(doctor.rights_finding("a", ["patch deployments.apps"]), FAIL, "may not patch deployments.apps")
    check(doctor.rights_finding("a", DENIED), WARN)


def test_missing_add_ons_are_ok() -> None:
    groups = (
        *("leaderworkerset.x-k8s.io", "gateway.networking.k8s.io", "keda.sh", "inference.networking.k8s.io"),
        *("kueue.x-k8s.io", "monitoring.coreos.com"),
    )
    there = doctor.optional_findings({group: ["v1"] for group in groups})
    assert [finding.grade for finding in there] == [OK] * len(groups)
    assert all(f"{group} v1" in finding.what for group, finding in zip(groups, there, strict=True))
    absent = doctor.optional_findings({})
    assert [finding.grade for finding in absent] == [OK] * len(groups), "only some need them"
    assert all("not installed" in finding.what for finding in absent[:4])
    check(doctor.optional_findings(DENIED)[0], WARN)


def test_gpu_nodes_are_counted_by_product() -> None:
    found = of("gpus", [node("a"), node("b"), node("c", product=H100)])
    assert [finding.grade for finding in found] == [OK, OK]
    assert found[0].what == f"1 node with 8 x {H100}"
    assert found[1].what == f"2 nodes with 8 x {H200}"


def test_gpu_without_public_logs_is_marked_uncalibrated() -> None:
    (found,) = of("gpus", [node("a", product="NVIDIA-B200")])
    check(found, OK, "8 x NVIDIA-B200, sized uncalibrated")


def test_cluster_without_gpus_fails() -> None:
    check(of("gpus", [node(gpu=0, product="")])[0], FAIL, "0 of 1 nodes", "GPU operator")
    check(doctor.gpu_findings(DENIED, DENIED)[0], WARN, "you may not look")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (node("bad", product=""), "no label nvidia.com/gpu.product"),
        (node("bad", product=f"{H100}-MIG-1g.10gb"), "MIG"),
        (node("bad", product=f"{H100}-SHARED"), "shared"),
        (node("bad", product="NVIDIA-H100-80GB-HBM3-ODD"), "is unknown"),
        (node("bad") | {"spec": {"unschedulable": True}}, "cordoned"),
    ],
)
def test_node_that_cannot_be_planned_gives_a_warning(bad: dict[str, Any], words: str) -> None:
    alone, beside = of("gpus", [bad]), of("gpus", [bad, node("good")])
    assert [finding.grade for finding in alone] == [FAIL, WARN]
    assert [finding.grade for finding in beside] == [OK, WARN]
    check(alone[1], WARN, "bad", words)


@pytest.mark.parametrize(
    ("driver", "grade"), [("580.65.06", OK), ("590", OK), ("550.54.15", WARN), ("470.1", FAIL), ("", WARN)]
)
def test_driver_version_is_graded(driver: str, grade: Grade) -> None:
    (finding,) = of("driver", [node(driver=driver)])
    check(finding, grade, "n-1")


def test_older_driver_label_is_read() -> None:
    (finding,) = of("driver", [node(driver="", **{"nvidia.com/cuda.driver.major": "470"})])
    check(finding, FAIL, "470")


def taking(gpu: int, phase: str = "Running") -> dict[str, Any]:
    containers = [{"resources": {"limits": {"nvidia.com/gpu": str(gpu)}}}]
    return {"spec": {"nodeName": "n-1", "containers": containers}, "status": {"phase": phase}}


def test_free_gpus_are_counted() -> None:
    check(of("free gpus", [node()], [taking(2), taking(4, "Succeeded")])[0], OK, "6 of 8")
    check(of("free gpus", [node()], [taking(8)])[0], WARN, "0 of 8")
    check(of("free gpus", [node()], DENIED)[0], WARN, "of 8")


def named(name: str, **body: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, **body}


def storage_class(name: str, mode: str = "WaitForFirstConsumer", *, default: bool = True) -> dict[str, Any]:
    annotations = {"storageclass.kubernetes.io/is-default-class": "true"} if default else {}
    return {"metadata": {"name": name, "annotations": annotations}, "volumeBindingMode": mode}


def test_storage_classes_are_graded() -> None:
    def judged(*classes: dict[str, Any]) -> Finding:
        (finding,) = doctor.storage_findings(classes)
        return finding

    check(judged(storage_class("fast")), OK, "fast")
    check(judged(), WARN, "no StorageClass", "captures then need spec.storage.persistentVolumeClaim")
    check(
        judged(storage_class("fast", default=False)),
        WARN,
        "no default StorageClass among fast",
        "spec.storage.storageClassName",
    )
    check(judged(storage_class("a"), storage_class("b")), WARN, "a, b")
    check(judged(storage_class("a", "Immediate")), WARN, "binds immediately")
    check(doctor.storage_findings(DENIED)[0], WARN)


def test_access_modes_of_claims_are_graded() -> None:
    shared = named("shared", spec={"accessModes": ["ReadOnlyMany"]})
    single = named("single", spec={"accessModes": ["ReadWriteOnce"]})
    check(doctor.claim_finding([]), OK)
    check(doctor.claim_finding([shared]), OK, "all 1")
    check(doctor.claim_finding([shared, single]), WARN, "single")
    exclusive = named("exclusive", spec={"accessModes": ["ReadWriteOncePod"]})
    check(doctor.claim_finding([shared, exclusive]), WARN, "only one pod", "exclusive")
    writable = named("writable", spec={"accessModes": ["ReadWriteMany"]})
    check(doctor.claim_finding([shared, writable]), OK, "spec.models.cache can use writable")
    check(doctor.claim_finding([shared]), OK, "spec.models.cache cannot use them")
    check(doctor.claim_finding(DENIED), WARN)
    for label in ("specdecode.io/capture", "specdecode.io/training"):
        single["metadata"]["labels"] = {label: "night"}
        check(doctor.claim_finding([shared, single]), OK, "all 1")


def labelled(level: str) -> dict[str, Any]:
    return {"metadata": {"name": "x", "labels": {"pod-security.kubernetes.io/enforce": level}}}


def test_pod_security_level_is_graded() -> None:
    check(doctor.security_finding("x", labelled("baseline")), OK)
    check(doctor.security_finding("x", named("x")), OK, "privileged")
    check(doctor.security_finding("x", labelled("restricted")), OK, "restricted", "hostPath")
    check(doctor.security_finding("x", None), FAIL, "does not exist", "kubectl create namespace x")
    check(doctor.security_finding("x", DENIED), WARN)


def test_engine_containers_run_as_non_root() -> None:
    """Otherwise doctor would be wrong; tests/component/admission/test_pod_security.py asks an API server."""
    pod = pod_spec(pair_70b())
    assert pod["initContainers"]
    for container in (*pod["initContainers"], *pod["containers"]):
        assert container["securityContext"].items() >= {"runAsNonRoot": True, "runAsUser": 2000}.items()


def quota(used: str = "0", **hard: str) -> dict[str, Any]:
    return named("q", spec={"hard": hard}, status={"used": dict.fromkeys(hard, used)})


def test_resource_quotas_are_graded() -> None:
    def judged(body: dict[str, Any], *limits: dict[str, Any]) -> Finding:
        (finding,) = doctor.quota_findings([body], limits)
        return finding

    check(judged(quota("2", **{"requests.nvidia.com/gpu": "8"})), OK, "2 of 8")
    check(judged(quota("8", **{"requests.nvidia.com/gpu": "8"})), FAIL, "8 of 8", "raise")
    check(judged(quota("0", **{"requests.nvidia.com/gpu": "0"})), FAIL)
    check(judged(quota("0", **{"requests.nvidia.com/gpu": "9" * 5000})), OK)
    check(judged(quota(**{"limits.memory": "64Gi"})), WARN, "limits.memory")
    defaults = named("l", spec={"limits": [{"type": "Container", "default": {"memory": "8Gi"}}]})
    check(judged(quota(**{"limits.memory": "64Gi"}), defaults), OK)
    requests = named("l", spec={"limits": [{"type": "Container", "defaultRequest": {"memory": "8Gi"}}]})
    check(judged(quota(**{"requests.memory": "64Gi"}), requests), OK)
    check(judged(quota(pods="9")), OK)
    check(doctor.quota_findings(DENIED, [])[0], WARN)


def test_default_memory_limit_gives_a_warning() -> None:
    limits = [named("l", spec={"limits": [{"type": "Container", "default": {"memory": "8Gi"}}]})]
    found = doctor.limit_findings(limits)
    check(found[0], WARN, "8Gi")
    assert doctor.limit_findings([named("l", spec={"limits": [{"type": "Pod"}]})]) == []
    assert "counts" in doctor.shared_memory_finding(found).what
    check(doctor.limit_findings(DENIED)[0], WARN)


def test_pods_bring_their_own_shared_memory() -> None:
    (shm,) = (volume for volume in pod_spec(pair_70b())["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}, "on two GPUs"
    assert "1 GiB per GPU" in doctor.shared_memory_finding([]).what


# What doctor says of the admission webhook.

NOW = datetime.now(UTC).replace(microsecond=0)


def bundle(*days: int) -> str:
    """A bundle of certificates that end in so many days."""
    return b64encode(b"".join(made_certificate(NOW + each * DAY)[0] for each in days)).decode()


def configuration(trusted: Any, policy: str | None = "Ignore") -> dict[str, Any]:
    webhook = {"name": "validate.specdecode.io", "failurePolicy": policy, "clientConfig": {"caBundle": trusted}}
    return {"metadata": {"name": "ours"}, "webhooks": [webhook]}


@pytest.mark.parametrize(
    ("trusted", "policy", "grade", "words"),
    [
        (bundle(80), "Fail", Grade.OK, "is trusted until"),
        (bundle(80, -1), "Fail", Grade.OK, "is trusted until"),
        (bundle(5), "Fail", Grade.WARN, "expires on"),
        (bundle(-1), "Ignore", Grade.WARN, "expired on"),
        (bundle(-1), "Fail", Grade.FAIL, "objects cannot be stored"),
        (bundle(-1), None, Grade.FAIL, "objects cannot be stored"),
        (None, "Ignore", Grade.WARN, "trusts no certificate of webhook ours: objects are not validated"),
        ("no base64", "Fail", Grade.FAIL, "trusts no certificate"),
        (b64encode(b"no PEM").decode(), "Fail", Grade.FAIL, "trusts no certificate"),
        (7, "Fail", Grade.FAIL, "trusts no certificate"),
    ],
)
def test_webhook_certificate_is_graded(trusted: Any, policy: str | None, grade: Grade, words: str) -> None:
    (finding,) = webhook_findings([configuration(trusted, policy)], NOW)
    assert (finding.grade, finding.subject) == (grade, "admission")
    assert words in finding.what
    assert bool(finding.fix) == (grade is not Grade.OK)


def test_missing_webhook_gives_no_finding() -> None:
    assert webhook_findings([], NOW) == []


def test_unreadable_webhooks_give_a_warning() -> None:
    (finding,) = webhook_findings(Unreadable("you may not list them"), NOW)
    assert finding.grade is Grade.WARN
