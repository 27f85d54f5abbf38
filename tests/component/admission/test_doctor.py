"""`specdecode doctor` and `specdecode import` against a real API server, with simulated nodes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from devcluster.cluster import nodes
from devcluster.cluster.cluster import Cluster
from specdecode_operator.cli.main import app
from tests.support.kubectl import Kubectl
from tests.support.kubernetes import MINOR
from tests.support.objects import H100, H200
from tests.support.waiting import eventually

FAILED, INVALID = 4, 2
MANIFESTS = Path(__file__).parents[3] / "manifests"
IMPORT_DATA = Path(__file__).parents[2] / "unit/cli/import_data"
ANYBODY = "system:serviceaccount:default:anybody"


@pytest.fixture
def kubectl(bare_cluster: Cluster) -> Kubectl:
    return Kubectl(bare_cluster.kubeconfig)


@pytest.fixture
def specdecode(bare_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("KUBECONFIG", str(bare_cluster.kubeconfig))

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, list(arguments))

    return run


def findings(specdecode: Any, *options: str) -> dict[str, list[dict[str, str]]]:
    """Findings by subject; the exit code is that of the worst."""
    result = specdecode("doctor", "-o", "json", *options)
    found: dict[str, list[dict[str, str]]] = {}
    for each in json.loads(result.stdout)["findings"]:
        found.setdefault(each["subject"], []).append(each)
    failed = any(each["grade"] == "FAIL" for several in found.values() for each in several)
    assert result.exit_code == (FAILED if failed else 0), result.output
    return found


def grades(found: dict[str, list[dict[str, str]]], subject: str) -> list[str]:
    return [each["grade"] for each in found[subject]]


def graded(specdecode: Any, subject: str, grade: str) -> dict[str, list[dict[str, str]]]:
    """Findings once a subject has a grade: what RBAC grants and denies counts a little after it is written."""

    def look() -> dict[str, list[dict[str, str]]]:
        found = findings(specdecode)
        assert grades(found, subject) == [grade], found[subject]
        return found

    return eventually(look, f"{subject} is {grade}")


def create_nodes(kubectl: Kubectl, text: str, **labels: str) -> None:
    """Nodes as devcluster simulates them, but without anybody who keeps them ready."""
    for manifest in nodes.manifests(nodes.parse_fake(text)).values():
        manifest["metadata"]["labels"] |= labels  # type: ignore[index]
        kubectl.must("create", "--filename=-", stdin=json.dumps(manifest))


def test_doctor_grades_an_empty_and_an_installed_cluster(specdecode: Any, kubectl: Kubectl) -> None:
    empty = findings(specdecode)
    assert grades(empty, "kubernetes") == ["OK"]
    assert empty["kubernetes"][0]["what"].startswith(f"v{MINOR}."), "the tests run on what they were asked to"
    assert grades(empty, "crd") == ["FAIL"] * 3
    assert grades(empty, "operator") == ["FAIL"]
    assert grades(empty, "gpus") == ["FAIL"]
    assert "permissions" not in empty, "there is nobody whose rights could be judged"

    kubectl.install_crds()
    operator = kubectl.within("specdecode-system")
    operator.must("apply", "--server-side", f"--kustomize={MANIFESTS}")
    create_nodes(kubectl, "1xH100:8,1xH200:8", **{"nvidia.com/cuda.driver-version.full": "580.65.06"})
    installed = graded(specdecode, "permissions", "OK")
    assert grades(installed, "crd") == ["OK"] * 3
    assert grades(installed, "operator") == ["FAIL"], "installed, but no pod of it runs here"
    assert grades(installed, "gpus") == ["OK", "OK"]
    assert [H100 in each["what"] or H200 in each["what"] for each in installed["gpus"]] == [True, True]
    assert grades(installed, "driver") == ["OK"]
    assert installed["free gpus"][0]["what"] == "16 of 16"

    kubectl.must("delete", "clusterrolebinding", "specdecode-operator")
    bare = graded(specdecode, "permissions", "FAIL")
    assert "list specdecodedeployments.specdecode.io" in bare["permissions"][0]["what"]


def test_doctor_names_both_operators_if_a_second_takes_the_binding(
    specdecode: Any, kubectl: Kubectl, tmp_path: Path
) -> None:
    kubectl.within("specdecode-system").must("apply", "--server-side", f"--kustomize={MANIFESTS}")
    shutil.copytree(MANIFESTS, tmp_path / "manifests")
    second = {"namespace": "second", "resources": ["manifests"]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(second))
    arguments = ("apply", "--server-side", "--field-manager=argocd-controller", f"--kustomize={tmp_path}")
    refused = kubectl.within("second")(*arguments)
    assert "conflict" in refused.stderr
    assert ".subjects" in refused.stderr
    kubectl.within("second").must(*arguments, "--force-conflicts")
    (subject,) = kubectl.object("clusterrolebinding", "specdecode-operator")["subjects"]
    assert subject["namespace"] == "second"
    (told,) = findings(specdecode)["operator"]
    assert told["grade"] == "FAIL"
    assert "serve the same namespaces" in told["what"]
    assert "second/specdecode-operator" in told["what"]
    assert "specdecode-system/specdecode-operator" in told["what"]


@pytest.mark.parametrize("kind", ["specdecodedeployments", "specdecodecaptures", "specdecodetrainings"])
def test_doctor_warns_of_changed_crd_and_fails_on_missing_crd(specdecode: Any, kubectl: Kubectl, kind: str) -> None:
    kubectl.install_crds()
    name = f"{kind}.specdecode.io"

    def told() -> dict[str, str]:
        """The grade by CRD: each line names its own."""
        return {
            next(word for word in each["what"].split() if word.startswith("specdecode")).partition(".")[0]: each[
                "grade"
            ]
            for each in findings(specdecode)["crd"]
        }

    good = dict.fromkeys(("specdecodedeployments", "specdecodecaptures", "specdecodetrainings"), "OK")
    assert told() == good
    path = "/spec/versions/0/schema/openAPIV3Schema/description"
    change = json.dumps([{"op": "replace", "path": path, "value": "Of another version."}])
    kubectl.must("patch", "crd", name, "--type=json", f"-p={change}")
    assert told() == good | {kind: "WARN"}
    kubectl.must("delete", "crd", name)
    assert told() == good | {kind: "FAIL"}
    kubectl.install_crds()
    assert told() == good


def test_mig_node_is_a_doctor_warning(specdecode: Any, kubectl: Kubectl) -> None:
    body = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "mig", "labels": {"nvidia.com/gpu.product": f"{H100}-MIG-1g.10gb"}},
        "status": {"allocatable": {"nvidia.com/gpu": "7"}, "capacity": {"nvidia.com/gpu": "7"}},
    }
    kubectl.must("create", "--filename=-", stdin=json.dumps(body))
    try:
        found = findings(specdecode)
    finally:
        kubectl.must("delete", "node", "mig")
    assert "WARN" in grades(found, "gpus")
    assert any("mig: is a MIG slice" in each["what"] for each in found["gpus"])
    assert "WARN" in grades(found, "driver"), "no label tells the driver of that node"


def test_doctor_grades_pod_security_quota_limits_and_claims(specdecode: Any, kubectl: Kubectl) -> None:
    assert grades(findings(specdecode, "-n", "nowhere"), "namespace") == ["FAIL"]
    kubectl.must("create", "namespace", "strict")
    before = findings(specdecode, "-n", "strict")
    assert grades(before, "pod security") == ["OK"]
    assert grades(before, "quota") == ["OK"]
    kubectl.must("label", "namespace", "strict", "pod-security.kubernetes.io/enforce=restricted")
    strict = kubectl.within("strict")
    strict.must("create", "quota", "gpus", "--hard=requests.nvidia.com/gpu=0")
    limits = {"limits": [{"type": "Container", "default": {"memory": "8Gi"}}]}
    body = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "small"}, "spec": limits}
    strict.must("create", "--filename=-", stdin=json.dumps(body))
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    body = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "mine"}, "spec": claim}
    strict.must("create", "--filename=-", stdin=json.dumps(body))
    after = findings(specdecode, "-n", "strict")
    assert grades(after, "pod security") == ["OK"]
    assert "restricted, which engine pods satisfy" in json.dumps(after)
    assert grades(after, "quota") == ["FAIL"]
    assert grades(after, "limits") == ["WARN"]
    assert grades(after, "claims") == ["WARN"]


def test_doctor_grades_storage_classes(specdecode: Any, kubectl: Kubectl) -> None:
    assert "no StorageClass exists" in findings(specdecode)["storage"][0]["what"]
    body = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": "fast", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
        "provisioner": "example.com/none",
        "volumeBindingMode": "WaitForFirstConsumer",
    }
    kubectl.must("create", "--filename=-", stdin=json.dumps(body))
    try:
        found = findings(specdecode)
    finally:
        kubectl.must("delete", "storageclass", "fast")
    assert grades(found, "storage") == ["OK"]


def test_doctor_reports_whether_leader_worker_set_is_installed(specdecode: Any, kubectl: Kubectl) -> None:
    assert "not installed" in findings(specdecode)["leaderworkerset"][0]["what"]
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": {"type": "object"}},
    }
    group, plural = "leaderworkerset.x-k8s.io", "leaderworkersets"
    names = {"kind": "LeaderWorkerSet", "plural": plural}
    annotations = {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/lws"}
    body = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}", "annotations": annotations},
        "spec": {"group": group, "names": names, "scope": "Namespaced", "versions": [version]},
    }
    kubectl.must("create", "--filename=-", stdin=json.dumps(body))
    kubectl.wait_for_crds(f"{plural}.{group}")
    eventually(lambda: f"{group} v1" in findings(specdecode)["leaderworkerset"][0]["what"], "the add-on is served")


def test_user_without_read_rights_gets_doctor_warnings(
    specdecode: Any, kubectl: Kubectl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl.install_crds()
    kubectl("create", "serviceaccount", "anybody")
    token = kubectl.must("create", "token", "anybody").strip()
    config = yaml.safe_load(kubectl.kubeconfig.read_text())  # type: ignore[union-attr]
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    config["contexts"][0]["context"]["namespace"] = "default"
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    found = findings(specdecode)
    assert grades(found, "kubernetes") == ["OK"]
    assert grades(found, "crd") == ["WARN"] * 3
    for subject in ("operator", "gpus", "storage", "claims", "pod security", "quota", "limits"):
        assert grades(found, subject) == ["WARN"], subject
    for subject in ("operator", "gpus", "storage", "quota"):
        assert "you may not list" in found[subject][0]["what"]
    told = specdecode("import", "deployment/x")
    assert told.exit_code == INVALID
    assert "you may not get deployments.apps" in told.stderr


def test_doctor_text_has_one_line_per_finding(specdecode: Any) -> None:
    result = specdecode("doctor")
    lines = result.stdout.splitlines()
    assert all(line.split()[0] in {"OK", "WARN", "FAIL"} for line in lines)
    assert all(" -> " in line for line in lines if not line.startswith("OK"))


def test_doctor_and_import_report_wrong_context_and_unreachable_server(
    specdecode: Any, tmp_path: Path, kubectl: Kubectl, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (("doctor",), ("import", "deployment/x")):
        wrong = specdecode(*command, "--context", "nowhere")
        assert wrong.exit_code == INVALID
        assert "error: --context: nowhere: " in wrong.stderr
    config = yaml.safe_load(kubectl.kubeconfig.read_text())  # type: ignore[union-attr]
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    for file, words in (
        (tmp_path / "config", "cannot reach the API server at 127.0.0.1:1 (Connection refused)"),
        (tmp_path / "absent", "KUBECONFIG: "),
    ):
        monkeypatch.setenv("KUBECONFIG", str(file))
        for command in (("doctor",), ("import", "deployment/x")):
            down = specdecode(*command)
            assert down.exit_code == INVALID, down.output
            assert words in down.stderr


def test_live_deployment_is_imported_like_its_file(specdecode: Any, kubectl: Kubectl) -> None:
    text = (IMPORT_DATA / "shell-string.yaml").read_text()
    kubectl.must("apply", "--filename=-", stdin=text)
    live = specdecode("import", "deployment/chat")
    assert live.exit_code == 0, live.stderr
    (file,) = [specdecode("import", "-f", str(IMPORT_DATA / "shell-string.yaml"))]
    assert yaml.safe_load(live.stdout) == yaml.safe_load(file.stdout), "what the API server fills in is no wish"
    assert "kubectl patch service chat -n default" in live.stderr
    kubectl.install_crds()
    kubectl.must("apply", "--dry-run=server", "--filename=-", stdin=live.stdout)
    nobody = specdecode("import", "deployment/nobody")
    assert nobody.exit_code == INVALID
    assert "deployment/nobody: not found in namespace default" in nobody.stderr


def test_printed_service_patch_moves_traffic_to_the_import(specdecode: Any, kubectl: Kubectl) -> None:
    text = (IMPORT_DATA / "shell-string.yaml").read_text()
    kubectl.must("apply", "--filename=-", stdin=text)
    said = specdecode("import", "deployment/chat").stderr
    (command,) = [line.strip() for line in said.splitlines() if "kubectl patch service" in line]
    before, _, patch = command.partition(" -p ")
    kubectl.must(*before.split()[1:], "-p", patch.strip("'"))
    spec = kubectl.object("service", "chat")["spec"]
    assert spec["selector"]["specdecode.io/deployment"] == "chat-sdd"
    assert "app" not in spec["selector"]
    assert spec["ports"][0]["targetPort"] == "http"
