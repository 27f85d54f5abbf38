"""What `manifests/` and `charts/` install: the same objects, with no more rights than are needed."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.core import TyperGroup
from typer.main import get_command

from devcluster import chart
from devcluster.host.errors import ClusterError
from specdecode_operator.cli.input_files import read_nodes
from specdecode_operator.cli.main import app
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.cluster.rights import SERVES, Scope, permissions
from specdecode_operator.deployment.pod_security import GRANTS
from specdecode_operator.version import __version__
from tests.support.kubectl import program
from tests.support.rights import role_rights

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts" / "specdecode-operator"
NAME = "specdecode-operator"
NAMESPACE = "specdecode-system"
Object = dict[str, Any]
Objects = dict[tuple[str, str], Object]


def render(*command: str | Path) -> Objects:
    """Objects that a command prints, by kind and name."""
    answer = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, cwd=ROOT)
    assert answer.returncode == 0, answer.stderr
    return by_key(answer.stdout)


def by_key(text: str) -> Objects:
    """Index the objects of a YAML text by kind and name."""
    documents = [document for document in yaml.safe_load_all(text) if document]
    return {(document["kind"], document["metadata"]["name"]): document for document in documents}


def kustomize(folder: str = "manifests") -> Objects:
    """Objects of a kustomization."""
    return render(program("kubectl"), "kustomize", folder)


def helm(*options: str, release: str = NAME) -> Objects:
    """Objects of the chart."""
    return by_key(chart.template(*options, release=release))


def without_tool_labels(item: Object) -> Object:
    """The object less what says which tool made it: the only labels in which the two may differ."""
    tools = {"app.kubernetes.io/managed-by", "helm.sh/chart"}
    for owner in (item, item.get("spec", {}).get("template", {})):
        if labels := owner.get("metadata", {}).get("labels"):
            owner["metadata"]["labels"] = {key: value for key, value in labels.items() if key not in tools}
    return item


def operator_container(objects: Objects) -> Object:
    """The operator's container."""
    (container,) = objects["Deployment", NAME]["spec"]["template"]["spec"]["containers"]
    found: Object = container
    return found


def test_chart_and_manifests_render_the_same_objects() -> None:
    from_manifests = kustomize()
    # Helm makes the namespace itself (--create-namespace), so the chart cannot hold it.
    del from_manifests["Namespace", NAMESPACE]
    from_chart = helm()
    assert set(from_chart) == set(from_manifests)
    for key, item in from_manifests.items():
        assert without_tool_labels(from_chart[key]) == without_tool_labels(item)


def test_manifests_are_up_to_date_with_the_chart() -> None:
    made = chart.manifests()
    found = {file.name: file.read_text() for file in chart.MANIFESTS.iterdir() if file.name not in chart.BY_HAND}
    assert found == made, "stale: ./just manifests"
    kustomization = yaml.safe_load((chart.MANIFESTS / "kustomization.yaml").read_text())
    assert sorted(kustomization["resources"]) == sorted(["namespace.yaml", *made])


def test_namespace_enforces_restricted_pod_security() -> None:
    labels = kustomize()["Namespace", NAMESPACE]["metadata"]["labels"]
    assert {labels[f"pod-security.kubernetes.io/{each}"] for each in ("enforce", "audit", "warn")} == {"restricted"}


def test_every_object_is_labelled() -> None:
    for key, item in kustomize().items():
        labels = item["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == NAME, key
        assert labels["app.kubernetes.io/part-of"] == "specdecode", key
        # This value means: a child of a SpecDecodeDeployment. The operator must not take itself for one.
        assert labels["app.kubernetes.io/managed-by"] != NAME, key


KEPT = {
    "kustomize.toolkit.fluxcd.io/prune": "disabled",
    "argocd.argoproj.io/sync-options": "Prune=false,Delete=false",
}
"""What GitOps tools do not delete with what they applied it with: with a CRD or a namespace goes all that is in it."""


def test_gitops_tools_prune_neither_crds_nor_the_namespace() -> None:
    for crd in kustomize("crds").values():
        assert crd["metadata"]["annotations"] == KEPT
    annotated = {
        key for key, item in kustomize().items() if KEPT.items() <= item["metadata"].get("annotations", {}).items()
    }
    assert annotated == {("Namespace", NAMESPACE)}, "what the operator itself is made of goes with it"
    own = '--set-json=extraAnnotations={"argocd.argoproj.io/sync-options":"Prune=confirm"}'
    for crd in render(program("helm"), "template", "crds", chart.CRDS, own).values():
        assert crd["metadata"]["annotations"]["argocd.argoproj.io/sync-options"] == "Prune=confirm"


def test_charts_contain_the_crds_and_the_current_version() -> None:
    from_chart = render(program("helm"), "template", "crds", chart.CRDS, "--set=extraLabels.a=b,extraAnnotations.c=d")
    from_folder = kustomize("crds")
    assert set(from_chart) == set(from_folder)
    for key, crd in from_chart.items():
        metadata = crd.pop("metadata")
        assert crd.items() <= from_folder[key].items(), "stale: ./just crds"
        assert from_folder[key]["metadata"]["labels"].items() | {("a", "b")} <= metadata["labels"].items()
        assert metadata["annotations"] == {"helm.sh/resource-policy": "keep", "c": "d", **KEPT}
    for folder in (chart.CRDS, CHART):
        metadata = yaml.safe_load((folder / "Chart.yaml").read_text())
        assert (metadata["version"], metadata["appVersion"]) == (__version__, __version__)


def test_crds_folder_is_a_kustomization_of_all_crds() -> None:
    assert set(kustomize("crds")) == {
        ("CustomResourceDefinition", "specdecodedeployments.specdecode.io"),
        ("CustomResourceDefinition", "specdecodecaptures.specdecode.io"),
        ("CustomResourceDefinition", "specdecodetrainings.specdecode.io"),
    }


def test_operator_role_has_no_unlisted_write_permissions() -> None:
    objects = kustomize()
    rules = objects["ClusterRole", NAME]["rules"]
    granted = {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert not any("*" in part for grant in granted for part in grant), "no wildcards"
    assert "secrets" not in {resource for _, resource, _ in granted}
    writable = {resource for _, resource, verb in granted if verb not in ("get", "list", "watch")}
    assert writable == {
        "specdecodedeployments/status", "specdecodecaptures", "specdecodecaptures/status", "specdecodetrainings",
        "specdecodetrainings/status", "resourceclaimtemplates", "configmaps", "services",
        "deployments", "leaderworkersets", "jobs", "persistentvolumeclaims", "poddisruptionbudgets", "events",
        "pods/eviction", "httproutes", "inferencepools", "horizontalpodautoscalers", "scaledobjects",
        "pods",  # the guard takes dry runs alone
    }  # fmt: skip
    assert ("specdecode.io", "specdecodecaptures", "delete") in granted, "those whose time is over"
    assert lease_names(rules) == [SERVES], "of the Leases of a cluster none but its own kind"
    (subject,) = objects["ClusterRoleBinding", NAME]["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": NAME, "namespace": NAMESPACE}


def lease_names(rules: list[Object]) -> list[str]:
    """Names of the Leases that a role is about; ``*`` where it is about all."""
    leases = [rule for rule in rules if "leases" in rule["resources"] and rule["verbs"] != ["create"]]
    return [name for rule in leases for name in rule.get("resourceNames", ["*"])]


TEAMS = ("--set=watchNamespaces={team-a,team-b}",)
FLEET = '--set-json=fleet.nodes=[{"name":"h","product":"NVIDIA-H200","gpus":8,"count":2}]'


def test_watch_namespaces_creates_namespaced_roles_only() -> None:
    printed = chart.template(*TEAMS, "--set=userRoles.create=false")
    objects = [each for each in yaml.safe_load_all(printed) if each]
    assert not [each["kind"] for each in objects if "namespace" not in each["metadata"]]
    roles = {each["metadata"]["namespace"]: role_rights(each["rules"]) for each in objects if each["kind"] == "Role"}
    served = {*permissions(Scope.SERVED, Scope.NAMED)}
    assert [each["metadata"]["name"] for each in objects if each["kind"] == "Lease"] == [SERVES, SERVES]
    assert roles == {"team-a": served, "team-b": served, NAMESPACE: {*permissions(Scope.OWN)}}
    names = {each["metadata"]["namespace"]: lease_names(each["rules"]) for each in objects if each["kind"] == "Role"}
    assert names == {"team-a": [SERVES], "team-b": [SERVES], NAMESPACE: [NAME]}
    bound = {each["metadata"]["namespace"] for each in objects if each["kind"] == "RoleBinding"}
    assert bound == roles.keys()
    (pod,) = (each["spec"]["template"]["spec"] for each in objects if each["kind"] == "Deployment")
    given = [each for each in pod["containers"][0]["args"] if each.startswith(("--namespace", "--nodes"))]
    assert given == ["--namespace=team-a", "--namespace=team-b"]


def test_fleet_values_are_read_by_the_operator(tmp_path: Path) -> None:
    objects = helm(*TEAMS, FLEET)
    (config_map,) = (each for (kind, _), each in objects.items() if kind == "ConfigMap")
    (tmp_path / "nodes.json").write_text(config_map["data"]["nodes.json"])
    assert read_nodes(str(tmp_path / "nodes.json")) == tuple(NodeFacts(f"h-{i}", "NVIDIA-H200", 8) for i in range(2))
    pod = objects["Deployment", NAME]["spec"]["template"]["spec"]
    assert {"name": "fleet", "configMap": {"name": config_map["metadata"]["name"]}} in pod["volumes"]
    (mount,) = (each for each in operator_container(objects)["volumeMounts"] if each["name"] == "fleet")
    assert f"--nodes={mount['mountPath']}/nodes.json" in operator_container(objects)["args"]
    with pytest.raises(ClusterError, match=r"fleet\.nodes: can only be used with watchNamespaces"):
        chart.template(FLEET)


def test_user_roles_aggregate_to_view_and_edit() -> None:
    objects = kustomize()
    view, edit = (objects["ClusterRole", f"{NAME}-{role}"] for role in ("view", "edit"))
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert edit["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"
    assert {verb for rule in view["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    # The status is the operator's.
    assert "specdecodedeployments/status" not in {name for rule in edit["rules"] for name in rule["resources"]}


def test_image_can_be_replaced_by_kustomize_and_helm(tmp_path: Path) -> None:
    overlay = {
        "resources": ["manifests"],
        "images": [{"name": "localhost/specdecode/operator", "newName": "example.org/operator", "newTag": "1.0"}],
    }
    (tmp_path / "manifests").mkdir()
    for file in (ROOT / "manifests").iterdir():
        (tmp_path / "manifests" / file.name).write_text(file.read_text())
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    from_manifests = render(program("kubectl"), "kustomize", tmp_path)
    from_chart = helm("--set=image.repository=example.org/operator", "--set-string=image.tag=1.0")
    assert operator_container(from_manifests)["image"] == "example.org/operator:1.0"
    assert operator_container(from_chart)["image"] == "example.org/operator:1.0"


def test_chart_values_reach_the_pod(tmp_path: Path) -> None:
    values = {
        "imagePullSecrets": [{"name": "registry"}],
        "serviceAccount": {"annotations": {"a": "b"}},
        "resources": {"limits": {"memory": "1Gi"}},
        "podLabels": {"team": "serving"},
        "podAnnotations": {"c": "d"},
        "nodeSelector": {"pool": "system"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
    }
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    objects = helm(f"--values={tmp_path / 'values.yaml'}")
    template = objects["Deployment", NAME]["spec"]["template"]
    assert template["metadata"]["labels"]["team"] == "serving"
    assert template["metadata"]["annotations"] == {"c": "d"}
    for key in ("imagePullSecrets", "nodeSelector", "tolerations", "affinity"):
        assert template["spec"][key] == values[key]
    assert operator_container(objects)["resources"]["limits"] == {"memory": "1Gi"}
    assert objects["ServiceAccount", NAME]["metadata"]["annotations"] == {"a": "b"}


def test_metrics_port_is_named_and_passed_to_the_operator() -> None:
    for objects, port in ((kustomize(), 8081), (helm("--set=metrics.port=9100"), 9100)):
        container = operator_container(objects)
        assert {"name": "metrics", "containerPort": port} in container["ports"]
        assert f"--metrics-port={port}" in container["args"]


def test_pod_monitor_selects_the_operator_and_is_off_by_default() -> None:
    assert not [kind for kind, _ in helm() if kind == "PodMonitor"], "clusters without its CRD would refuse the chart"
    options = ("--set=metrics.podMonitor.enabled=true", "--set=metrics.podMonitor.labels.release=prometheus")
    objects = helm(*options)
    monitor = objects["PodMonitor", NAME]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    pod = objects["Deployment", NAME]["spec"]["template"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in operator_container(objects)["ports"]}


def test_calibration_is_mounted_from_an_optional_config_map() -> None:
    for objects, name in ((kustomize(), "specdecode-calibration"), (helm("--set=calibration.configMap=mine"), "mine")):
        pod = objects["Deployment", NAME]["spec"]["template"]["spec"]
        assert {"name": "calibration", "configMap": {"name": name, "optional": True}} in pod["volumes"]
        container = operator_container(objects)
        (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == "calibration")
        # A subPath would never be updated.
        assert "subPath" not in mount
        assert f"--calibration={mount['mountPath']}/calibration.json" in container["args"]


def test_allowed_host_paths_are_passed_and_empty_by_default() -> None:
    flag = "--allow-host-path="
    assert not [each for each in operator_container(helm())["args"] if each.startswith(flag)]
    args = operator_container(helm("--set=allowedHostPaths={/mnt/models,/srv/a b}"))["args"]
    assert [each for each in args if each.startswith(flag)] == [f"{flag}/mnt/models", f"{flag}/srv/a b"]


def test_prometheus_url_and_token_are_passed_only_if_set() -> None:
    flag = "--prometheus"
    assert not [each for each in operator_container(helm())["args"] if each.startswith(flag)]
    objects = helm("--set=prometheus.url=http://p:9090", "--set=prometheus.tokenSecret.name=s")
    container = operator_container(objects)
    (mount,) = (each for each in container["volumeMounts"] if each["name"] == "prometheus-token")
    given = [each for each in container["args"] if each.startswith(flag)]
    assert given == [f"{flag}=http://p:9090", f"{flag}-token-file={mount['mountPath']}/token"]
    volumes = objects["Deployment", NAME]["spec"]["template"]["spec"]["volumes"]
    secret = {"secretName": "s", "items": [{"key": "token", "path": "token"}]}
    assert {"name": "prometheus-token", "secret": secret} in volumes


def test_allowed_pod_template_fields_are_passed_and_empty_by_default() -> None:
    flag = "--allow-pod-template="
    assert not [each for each in operator_container(helm())["args"] if each.startswith(flag)]
    args = operator_container(helm("--set=allowedPodTemplate={hostNetwork,capabilities.IPC_LOCK}"))["args"]
    assert [each for each in args if each.startswith(flag)] == [f"{flag}hostNetwork", f"{flag}capabilities.IPC_LOCK"]


@pytest.mark.parametrize("name", [*GRANTS, "capabilities.IPC_LOCK", "sysctls.net.core.somaxconn", "volumes.nfs"])
def test_chart_accepts_each_pod_template_grant(name: str) -> None:
    assert f"--allow-pod-template={name}" in operator_container(helm(f"--set=allowedPodTemplate={{{name}}}"))["args"]


def test_token_ids_are_allowed_per_namespace_and_off_by_default() -> None:
    flag = "--allow-token-ids="
    assert not [each for each in operator_container(helm())["args"] if each.startswith(flag)]
    given = "--set-json=liveCapture.tokenIds=" + json.dumps([{"namespace": "a"}, {"namespace": "b", "prompts": True}])
    args = operator_container(helm(given))["args"]
    assert [each for each in args if each.startswith(flag)] == [f"{flag}a=answers", f"{flag}b=answers,prompts"]


def test_values_that_prevent_operator_start_are_refused() -> None:
    with pytest.raises(ClusterError, match="/liveCapture/tokenIds/0"):
        chart.template('--set-json=liveCapture.tokenIds=[{"namespace": "a=b"}]')
    with pytest.raises(ClusterError, match="/allowedPodTemplate/0"):
        chart.template("--set=allowedPodTemplate={hostnetwork}")
    with pytest.raises(ClusterError, match=r"webhook\.port: .* metrics\.port"):
        chart.template("--set=webhook.enabled=true", "--set=webhook.port=8081")


def test_operator_command_accepts_the_container_arguments() -> None:
    arguments = operator_container(kustomize())["args"]
    options = {option.partition("=")[0] for option in arguments[1:]}
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    known = {name for parameter in group.commands["operator"].params for name in parameter.opts}
    assert options <= known


def test_chart_can_use_an_existing_service_account() -> None:
    objects = helm("--set=serviceAccount.create=false", "--set=serviceAccount.name=mine")
    assert ("ServiceAccount", NAME) not in objects
    assert objects["Deployment", NAME]["spec"]["template"]["spec"]["serviceAccountName"] == "mine"
    assert objects["ClusterRoleBinding", NAME]["subjects"][0]["name"] == "mine"


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ("imge.tag=1", "imge"),
        ("image.pullPolicy=Sometimes", "/image/pullPolicy"),
        ("serviceAccount.create=false", "/serviceAccount/name"),
        ("metrics.port=8080", "/metrics/port"),
        ("metrics.podMonitor.interval=often", "/metrics/podMonitor/interval"),
        ("calibration.configMap=", "/calibration/configMap"),
        ("replicas=many", "/replicas"),
        ("replicas=0", "/replicas"),
        ("image.digest=sha256:abc", "/image/digest"),
        ("probes.liveness.periodSeconds=0", "/probes/liveness/periodSeconds"),
        ("podDisruptionBudget.maxUnavailable=most", "/podDisruptionBudget/maxUnavailable"),
        ("topologySpreadConstraints[0].maxSkew=1", "/topologySpreadConstraints/0"),
        ("extraLabels.app\\.kubernetes\\.io/name=mine", "app.kubernetes.io/name"),
        ("resources.cpu=1", "/resources"),
        ("resources.limits.memry=1Gi", "'memry' not allowed"),
        ("watchNamespaces={Team}", "/watchNamespaces/0"),
        ("fleet.nodes[0].name=h", "/fleet/nodes/0"),
        ("webhook.certificate.from=Secret,webhook.certificate.secretName=mine", "/webhook/certificate/caBundle"),
        ("webhook.certificate.from=Secret", "/webhook/certificate/secretName"),
    ],
)
def test_chart_refuses_invalid_values_with_their_field(value: str, field: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(field)):
        chart.template(f"--set={value}")


def test_second_release_gets_its_own_object_names() -> None:
    objects = helm(release="staging")
    assert objects.pop(("ClusterRoleBinding", NAME)), "of one name, for a cluster has one operator for all namespaces"
    names = {re.sub("-(view|edit|own)$", "", name) for _, name in objects}
    assert names == {"staging-specdecode-operator"}
    (container,) = objects["Deployment", "staging-specdecode-operator"]["spec"]["template"]["spec"]["containers"]
    assert "--leader-election=staging-specdecode-operator" in container["args"], "two releases of a namespace"
