"""Limits of namespaces: what the chart's ValidatingAdmissionPolicy says on a real API server, lint says offline."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from devcluster.chart import template
from devcluster.cluster.cluster import Cluster
from devcluster.cluster.kubectl import Answer
from devcluster.host.errors import ClusterError
from specdecode_operator.api import base
from specdecode_operator.api.base import Body
from specdecode_operator.cli.main import app
from tests.support.admission_cases import deployment
from tests.support.kubectl import Kubectl
from tests.support.limit_cases import ONE_PRODUCT, OPEN, REFUSED, SMALL, TAKEN, TOLD, VALUES
from tests.support.operator_process import USER
from tests.support.waiting import eventually

NAMESPACE = "specdecode-system"


def rendered(folder: Path, values: Body) -> str:
    """What the chart makes of limits: the policy, its ConfigMaps and bindings."""
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    kinds = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "ConfigMap")
    return yaml.safe_dump_all(
        each for each in yaml.safe_load_all(template(f"--values={file}")) if each["kind"] in kinds
    )


class Limited:
    """A cluster with limits, and the file that lint reads them from."""

    def __init__(self, admin: Kubectl, folder: Path) -> None:
        self.admin, self.folder, self.policy = admin, folder, folder / "policy.yaml"
        self.policy.write_text(rendered(folder, VALUES))

    def dry_run(self, namespace: str, spec: Body) -> Answer:
        body = json.dumps(self.object(namespace, spec))
        return self.admin("apply", "--dry-run=server", "--filename=-", f"--namespace={namespace}", stdin=body)

    def linted(self, namespace: str, spec: Body) -> Sequence[Body]:
        file = self.folder / "object.json"
        file.write_text(json.dumps(self.object(namespace, spec)))
        options = (f"--admission-policy={self.policy}", "--allow-host-path=/", "--output=json")
        result = CliRunner().invoke(app, ["lint", str(file), *options])
        found = json.loads(result.stdout)["findings"]
        return [each for each in found if each["rule"] == "AdmissionPolicy"]

    @staticmethod
    def object(namespace: str, spec: Body) -> Body:
        body = deployment(spec)
        return {**body, "metadata": {**body["metadata"], "namespace": namespace}}


@pytest.fixture(scope="module")
def limited(crds: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Limited:
    admin = Kubectl(crds.kubeconfig, NAMESPACE)
    for name in (NAMESPACE, OPEN, SMALL, ONE_PRODUCT):
        admin("create", "namespace", name)
    limited = Limited(admin, tmp_path_factory.mktemp("limits"))
    admin.must("apply", "--filename=-", stdin=limited.policy.read_text())
    first = next(iter(REFUSED.values()))
    eventually(lambda: first[2] in limited.dry_run(*first[:2]).stderr, "the policy is asked")
    elsewhere = REFUSED["a directory elsewhere"]
    eventually(lambda: limited.dry_run(*elsewhere[:2]).returncode != 0, "so is its last binding")
    return limited


def test_spec_within_the_limits_passes_policy_and_lint(limited: Limited) -> None:
    for name, (namespace, spec) in TAKEN.items():
        assert limited.dry_run(namespace, spec).returncode == 0, name
        assert limited.linted(namespace, spec) == [], name


def test_policy_and_lint_refuse_specs_beyond_the_limits_with_equal_messages(limited: Limited) -> None:
    for name, (namespace, spec, words) in REFUSED.items():
        answer = limited.dry_run(namespace, spec)
        assert answer.returncode != 0, name
        assert words in answer.stderr, name
        found = [each["message"] for each in limited.linted(namespace, spec) if each["level"] == "error"]
        # The API server tells the first that does not hold.
        assert found, name
        assert any(each in answer.stderr for each in found), name


def test_limit_with_warn_action_only_warns(limited: Limited) -> None:
    namespace, spec, words = TOLD
    answer = limited.dry_run(namespace, spec)
    assert answer.returncode == 0
    assert answer.stderr.startswith("Warning: ")
    assert words in answer.stderr
    (found,) = limited.linted(namespace, spec)
    assert found["level"] == "warning"
    assert found["message"] in answer.stderr


def test_existing_objects_are_limited_only_on_spec_change(limited: Limited) -> None:
    _, spec, words = REFUSED["another product"]
    users = Kubectl(limited.admin.kubeconfig, "limits-later")
    users.must("create", "namespace", users.namespace)
    body = limited.object(users.namespace, spec)
    users.must("apply", "--filename=-", stdin=json.dumps(body))
    values = {"limits": [{**VALUES["limits"][0], "name": "later"}]}
    values["limits"][0]["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": users.namespace}}
    limited.admin.must("apply", "--filename=-", stdin=rendered(limited.folder, values))
    other = {**body, "metadata": {**body["metadata"], "name": "other"}}
    later = lambda: users("apply", "--dry-run=server", "--filename=-", stdin=json.dumps(other)).stderr  # noqa: E731
    eventually(lambda: words in later(), "the limits hold for new objects")
    users.must("label", "sdd", "chat", "team=serving")
    patch = json.dumps({"spec": {"replicas": 2}})
    assert words in users("patch", "sdd", "chat", "--type=merge", f"--patch={patch}").stderr
    # Who deletes the ConfigMap does not lift the limits.
    limited.admin.must("delete", "configmap", "specdecode-operator-limits-later")
    eventually(lambda: "no params found" in later(), "without its limits nothing passes")
    users.must("delete", "sdd", "chat", "--wait=false")


def test_scale_subresource_cannot_raise_replicas_under_a_gpu_limit(limited: Limited) -> None:
    users = Kubectl(limited.admin.kubeconfig, SMALL)
    users.must("apply", "--filename=-", stdin=json.dumps(limited.object(SMALL, TAKEN["all as allowed"][1])))
    raised = lambda: users("scale", "sdd/chat", "--replicas=2")  # noqa: E731
    eventually(lambda: "write spec.replicas of the object itself" in raised().stderr, "the subresource is held, too")
    users.must("scale", "sdd/chat", "--replicas=0")
    assert users.object("sdd", "chat")["spec"]["replicas"] == 0
    users.must("delete", "sdd", "chat", "--wait=false")


def test_the_operators_autoscaler_alone_may_scale_under_a_gpu_limit(limited: Limited) -> None:
    users = Kubectl(limited.admin.kubeconfig, SMALL)
    autoscaler = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "chat"},
        "spec": {
            "scaleTargetRef": {"apiVersion": base.API_VERSION, "kind": "SpecDecodeDeployment", "name": "chat"},
            "maxReplicas": 100,
        },
    }
    options = ("apply", "--dry-run=server", "--filename=-")
    asked = lambda *more: users(*options, *more, stdin=json.dumps(autoscaler))  # noqa: E731
    eventually(lambda: "set spec.autoscaling" in asked().stderr, "the policy is in force")
    assert asked(f"--as={USER}", "--as-group=system:masters").returncode == 0
    autoscaler["spec"]["scaleTargetRef"] |= {"apiVersion": "apps/v1", "kind": "Deployment"}
    assert asked().returncode == 0, "other targets are not limited"

    users.must("apply", "--filename=-", stdin=json.dumps(limited.object(SMALL, TAKEN["all as allowed"][1])))
    scale = ("scale", "sdd/chat", "--replicas=2", "--as-group=system:masters")
    controller = "system:serviceaccount:kube-system:horizontal-pod-autoscaler"
    assert users(*scale, "--as=somebody").returncode != 0
    assert users(*scale, f"--as={controller}").returncode == 0
    users.must("delete", "sdd", "chat", "--wait=false")


def test_duplicate_limit_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="two entries have the name a"):
        rendered(tmp_path, {"limits": [{"name": "a", "maxGpus": 1}, {"name": "a", "images": ["b/"]}]})


def test_limit_objects_have_unique_names(tmp_path: Path) -> None:
    values = {"limits": [{"name": name, "maxGpus": 1} for name in ("a", "a-scale", "scale", "scale-limits-a")]}
    made = [(each["kind"], each["metadata"]["name"]) for each in yaml.safe_load_all(rendered(tmp_path, values))]
    assert len(made) == len(set(made)) == 3 + 4 * 4


def test_kubernetes_before_1_30_is_refused_by_the_chart() -> None:
    with pytest.raises(ClusterError, match=r"requires kubeVersion: >=1\.30"):
        template("--kube-version=1.29.0")


@pytest.mark.parametrize("value", ["limits", "operatorGuard.enabled"])
def test_missing_validating_admission_policy_api_is_reported_with_the_value(value: str) -> None:
    wanted = {"limits": '--set-json=limits=[{"name": "a", "maxGpus": 1}]'}.get(value, f"--set={value}=true")
    kinds = "--api-versions=v1/Pod,admissionregistration.k8s.io/v1"
    with pytest.raises(ClusterError, match=f"{value}: needs ValidatingAdmissionPolicy"):
        template(wanted, kinds)
    served = f"{kinds},admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy"
    assert "kind: ValidatingAdmissionPolicy" in template(wanted, served)
    assert "kind: ValidatingAdmissionPolicy" in template(wanted), "offline nothing is known"
    assert "kind: Deployment" in template(kinds), "nobody wants a policy"


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "a"},
        {"name": "A", "maxGpus": 1},
        {"name": "a", "maxGpus": 0},
        {"name": "a", "maxGpus": "4"},
        {"name": "a", "products": ["x,y"]},
        {"name": "a", "hostPaths": ["mnt"]},
        {"name": "a", "images": []},
        {"name": "a", "maxGpus": 1, "action": "Allow"},
        {"name": "a", "maxGpu": 1},
    ],
    ids=str,
)
def test_invalid_limits_are_refused(entry: Body, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="/limits/0"):
        rendered(tmp_path, {"limits": [entry]})
