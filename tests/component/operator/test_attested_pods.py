"""Engines that start only where their attestation verifies: the example, before a real API server."""

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster.cluster.cluster import Cluster
from devcluster.cluster.settings import free_ports
from specdecode_operator.api.base import Body
from specdecode_operator.deployment.attestation.keys import SigningKey
from specdecode_operator.deployment.attestation.statement import pods_of
from specdecode_operator.untrusted import parse_json_values
from tests.component.operator.test_lifecycle import NEXT, apply, engines, refuse, serve, wanted_hash
from tests.support.attestations import attest, entries, key_pair
from tests.support.certificates import write_certificate
from tests.support.conditions import wait_for
from tests.support.golden import rendered_pods
from tests.support.kubectl import Kubectl
from tests.support.objects import pair_70b, parent
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import eventually

EXAMPLE = Path(__file__).parents[3] / "examples/attestation"
ITS_NAMESPACE = "specdecode-attestation"
NAME = "attestation-webhook"
HOST = f"{NAME}.{ITS_NAMESPACE}.svc"
PRIVATE, PUBLIC = key_pair()
TOKEN_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"


class Webhook:
    """The example, with a process on this machine in the place of its pods, and a certificate of its own."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.admin, self.folder = Kubectl(cluster.kubeconfig, ITS_NAMESPACE), folder
        shutil.copytree(EXAMPLE, folder / "example")
        (folder / "example/cosign.pub").write_bytes(PUBLIC)
        made = self.admin.must("kustomize", str(folder / "example"))
        self.objects = [each for each in yaml.safe_load_all(made) if not each["apiVersion"].startswith("cert-manager")]
        self.trust = write_certificate(folder / "certificate", name=HOST)
        (self.port,) = free_ports(1)

    def one(self, kind: str) -> Body:
        (found,) = (each for each in self.objects if each["kind"] == kind)
        return found

    def install(self) -> None:
        self.one("Service")["spec"] = {
            "type": "ExternalName",
            "externalName": "localhost",
            "ports": [{"name": "webhook", "port": self.port}],
        }
        for webhook in self.one("ValidatingWebhookConfiguration")["webhooks"]:
            webhook["clientConfig"]["service"]["port"] = self.port
            webhook["clientConfig"]["caBundle"] = b64encode(self.trust).decode()
        # Its pods would wait here for a node.
        kept = [each for each in self.objects if each["kind"] != "Deployment"]
        self.admin.must("apply", "--server-side", "--filename=-", stdin=yaml.safe_dump_all(kept))

    def start(self) -> None:
        """Run what the example's container runs, with its rights."""
        token = self.admin.must("create", "token", NAME, "--duration=3h").strip()
        config = yaml.safe_load(Path(str(self.admin.kubeconfig)).read_text())
        config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
        (self.folder / "kubeconfig").write_text(yaml.safe_dump(config))
        (container,) = self.one("Deployment")["spec"]["template"]["spec"]["containers"]
        args = [
            each.replace("/etc/specdecode/keys", str(self.folder / "example")).replace(
                "/etc/specdecode/certificate", str(self.folder / "certificate")
            )
            for each in container["args"]
        ]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "specdecode_operator", *args, f"--port={self.port}", "--metrics-port=0"],
                env={**os.environ, "KUBECONFIG": str(self.folder / "kubeconfig")},
                stdout=log,
                stderr=log,
            )


@pytest.fixture(scope="module")
def webhook(crds: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Webhook]:
    """The example, installed and answering."""
    webhook = Webhook(crds, tmp_path_factory.mktemp("attested"))
    webhook.install()
    webhook.start()
    yield webhook
    kinds = ("ValidatingWebhookConfiguration", "ValidatingAdmissionPolicyBinding", "ValidatingAdmissionPolicy")
    for each in webhook.objects:
        if each["kind"] in kinds:
            webhook.admin.must("delete", each["kind"], each["metadata"]["name"], "--ignore-not-found")
    webhook.process.send_signal(signal.SIGTERM)
    assert webhook.process.wait(timeout=60) == 0, (webhook.folder / "log").read_text()[-4000:]


@pytest.fixture
def gated(webhook: Webhook, kubectl: Kubectl) -> Kubectl:
    """The test's namespace, in which only attested engines start."""
    (namespace, binding) = yaml.safe_load_all((EXAMPLE / "team.yaml").read_text())
    namespace["metadata"]["name"] = binding["metadata"]["namespace"] = kubectl.namespace
    assert kubectl.write(yaml.safe_dump_all([namespace, binding])).returncode == 0
    account = f"--as=system:serviceaccount:{ITS_NAMESPACE}:{NAME}"
    eventually(lambda: kubectl("auth", "can-i", "get", "configmaps", account).returncode == 0, "it has its right")
    engine = a_pod({"spec": {"containers": [{"name": "engine", "image": "i:1"}]}}, deployment="none")
    eventually(lambda: "ConfigMap none-attestation does not exist" in refusal(kubectl, engine), "the webhook is asked")
    return kubectl


@pytest.fixture
def signing(operator_process: OperatorProcess, gated: Kubectl, tmp_path: Path) -> Iterator[OperatorProcess]:
    """The operator with a signing key, in the place of that of other tests."""
    operator_process.stop()
    (tmp_path / "key.pem").write_bytes(PRIVATE)
    arguments = (f"--signing-key={tmp_path / 'key.pem'}",)
    process = OperatorProcess(operator_process.kubeconfig, tmp_path / "log", "pod-1", arguments)
    process.start()
    yield process
    gated.remove("sdd")
    assert process.stop() == 0


def a_pod(template: Body, **labels: str) -> Body:
    """Return a pod of a template, as somebody makes it by hand."""
    metadata = copy.deepcopy(template.get("metadata") or {})
    named = {f"specdecode.io/{name}": value for name, value in labels.items()}
    kept = {"annotations": metadata.get("annotations") or {}, "labels": {**(metadata.get("labels") or {}), **named}}
    spec = copy.deepcopy(template["spec"])
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "by-hand", **kept}, "spec": spec}


def refusal(kubectl: Kubectl, pod: Body) -> str:
    """Return what is said to who creates a pod; empty where it would start. Nothing is stored."""
    answer = kubectl("create", "--dry-run=server", "--filename=-", stdin=json.dumps(pod))
    return answer.stderr if answer.returncode else ""


def test_attested_rollout_and_rollback_are_admitted_and_altered_pods_refused(
    gated: Kubectl, signing: OperatorProcess
) -> None:
    apply(gated)
    serve(gated)
    wait_for(gated, "tiny", "Ready", "Serving")
    good = wanted_hash(gated)
    apply(gated, **NEXT)
    eventually(lambda: wanted_hash(gated) != good, "the new spec is tried")
    refuse(gated)
    eventually(lambda: wanted_hash(gated) == good, "the template that served is back")
    serve(gated)
    wait_for(gated, "tiny", "Ready", "RolledBack")
    assert len(gated.object("configmap", "tiny-attestation")["data"]) == 2

    template = gated.object("deployment", "tiny")["spec"]["template"]
    assert refusal(gated, a_pod(template)) == ""
    for change, says in (
        ({"image": "evil:1"}, "container engine: image: evil:1"),
        ({"args": ["--trust-remote-code"]}, "container engine: args"),
        ({"env": [{"name": "LD_PRELOAD", "value": "/x.so"}]}, "container engine: env (SHA-256)"),
        ({"volumeMounts": []}, "container engine: volumes and workingDir (SHA-256)"),
    ):
        pod = a_pod(template)
        pod["spec"]["containers"][0] |= change
        said = refusal(gated, pod)
        assert says in said
        assert "is not as attested in ConfigMap tiny-attestation" in said
    linked, covered = a_pod(template), a_pod(template)
    linked["spec"]["enableServiceLinks"] = True
    assert "enableServiceLinks" in refusal(gated, linked)
    covered["spec"]["volumes"].append({"name": "kube-api-access-x2k4", "secret": {"secretName": "theirs"}})
    mount = {"name": "kube-api-access-x2k4", "mountPath": TOKEN_FOLDER, "readOnly": True}
    covered["spec"]["containers"][0]["volumeMounts"].append(mount)
    assert "container engine: volumes and workingDir (SHA-256)" in refusal(gated, covered)
    (running,) = engines(gated, 1)
    debugged = gated("debug", running, "--image=evil:1", "--container=debugger", "--attach=false")
    assert "container debugger" in debugged.stderr
    rewritten = gated("annotate", "pod", running, "specdecode.io/engine-watch=x", "--overwrite")
    assert "container engine: volumes and workingDir (SHA-256)" in rewritten.stderr, "it is a script that engines run"
    gated.must("annotate", "pod", running, "note=x")
    assert refusal(gated, {**a_pod(template), "metadata": {"name": "nobodys"}}) == "", "it is not asked of others"
    assert "attestations of rollouts are written by the operator alone" in writing_refused(gated, "tiny-attestation")
    gated.must("label", "configmap", "tiny-attestation", "a=b")
    gated.must("delete", "sdd", "tiny", "--cascade=orphan")
    assert not gated.object("configmap", "tiny-attestation")["metadata"].get("ownerReferences")


def test_pods_cannot_gain_or_lose_engine_labels_or_change_scripts(gated: Kubectl, signing: OperatorProcess) -> None:
    apply(gated)
    (running,) = engines(gated, 1)
    template = gated.object("deployment", "tiny")["spec"]["template"]
    attested, labels = template["spec"]["containers"][0]["image"], template["metadata"]["labels"]
    stranger = a_pod(template)
    stranger["metadata"]["labels"] = {}
    stranger["spec"] |= {"schedulerName": "none"}
    stranger["spec"]["containers"][0]["image"] = "unasked:1"
    gated.must("create", "--filename=-", stdin=json.dumps(stranger))

    never, unread = (
        "of a pod cannot change after its creation",
        "neither the status of a pod nor a Binding changes",
    )
    swapped = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "engine", "image": attested}]}}
    rewritten = {"metadata": {"annotations": {"specdecode.io/engine-watch": "x"}}}
    removed = {"metadata": {"annotations": {"specdecode.io/engine-watch": None}}}
    status = ("--subresource=status",)
    tried = ("patch", "pod", running, *status, "--dry-run=server", f"--patch={json.dumps(rewritten)}")
    eventually(lambda: unread in gated(*tried).stderr, "the policy is asked")
    for pod, change, options, says in (
        ("by-hand", {"metadata": {"labels": labels}}, (), never),
        ("by-hand", swapped, (), never),
        ("by-hand", {"metadata": {"labels": labels}}, status, unread),
        (running, {"metadata": {"labels": {"specdecode.io/deployment": None}}}, (), never),
        (running, {"metadata": {"labels": {"specdecode.io/computes-for": "tiny"}}}, (), never),
        (running, rewritten, status, unread),
        (running, removed, status, unread),
    ):
        answer = gated("patch", "pod", pod, *options, f"--patch={json.dumps(change)}")
        assert says in answer.stderr, (pod, change, answer)
    for change in ({"labels": labels}, rewritten["metadata"]):
        assert unread in bound(gated, "by-hand", "pods/by-hand/binding", **change)
        assert unread in bound(gated, "by-hand", "bindings", **change)
    assert bound(gated, "by-hand", "pods/by-hand/binding", annotations={"note": "x"}) == ""
    noted = json.dumps({"metadata": {"annotations": {"note": "x"}}, "status": {"message": "x"}})
    gated.must("patch", "pod", running, "--subresource=status", f"--patch={noted}")


def bound(kubectl: Kubectl, pod: str, path: str, **metadata: Any) -> str:
    """Return what is said to who binds a pod to a node as a scheduler does; empty where it is bound."""
    target = {"apiVersion": "v1", "kind": "Node", "name": "n1"}
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod, **metadata}, "target": target}
    place = f"--raw=/api/v1/namespaces/{kubectl.namespace}/{path}"
    answer = kubectl("create", place, "--filename=-", stdin=json.dumps(body))
    return answer.stderr if answer.returncode else ""


def test_pods_without_valid_attestation_of_this_deployment_are_refused(
    gated: Kubectl, signing: OperatorProcess
) -> None:
    apply(gated)
    engines(gated, 1)
    template = gated.object("deployment", "tiny")["spec"]["template"]
    kept = gated.object("configmap", "tiny-attestation")
    assert signing.stop() == 0
    gated.must("label", "namespace", str(gated.namespace), "specdecode.io/attested-pods=all", "--overwrite")
    nobodys = {**a_pod(template), "metadata": {"name": "nobodys"}}
    eventually(lambda: "has no label specdecode.io/deployment" in refusal(gated, nobodys), "all pods are asked")
    assert refusal(gated, a_pod(template)) == ""

    gated.must("delete", "validatingadmissionpolicybinding", "specdecode-attestation")
    eventually(lambda: not writing_refused(gated, "tiny-attestation"), "anybody may write it")
    theirs, earlier = parent(pair_70b(), name="tiny"), parent(pair_70b(), name="tiny")
    theirs["metadata"]["namespace"] = "theirs"
    earlier["metadata"]["namespace"] = gated.namespace
    ours, another = SigningKey.read(PRIVATE), SigningKey.read(key_pair()[0])
    oversized = {f"{number}.intoto.json": "x" * 180_000 for number in range(5)}
    for data, says in (
        (entries(attest(earlier, another)), "was signed with another key"),
        (entries(attest(theirs, ours)), "one is of theirs/tiny"),
        (entries(attest(earlier, ours)), "one is of an earlier object of this name"),
        (oversized, "has 5 attestations"),
    ):
        gated.must("replace", "--filename=-", stdin=json.dumps({**kept, "data": data, "metadata": named(kept)}))
        assert says in refusal(gated, a_pod(template))
    gated.must("delete", "configmap", "tiny-attestation")
    assert "ConfigMap tiny-attestation does not exist" in refusal(gated, a_pod(template))


def writing_refused(kubectl: Kubectl, name: str) -> str:
    """Return what is said to who writes something into a ConfigMap; empty where it is taken."""
    answer = kubectl("patch", "configmap", name, "--type=merge", '--patch={"data":{"a":"b"}}')
    return answer.stderr if answer.returncode else ""


def named(body: Body) -> Body:
    return {name: body["metadata"][name] for name in ("name", "namespace", "ownerReferences")}


def test_without_signing_key_no_engine_starts_and_ready_reports_why(gated: Kubectl, operator: OperatorProcess) -> None:
    del operator
    apply(gated)
    message = wait_for(gated, "tiny", "Ready", "PodsRefused")
    assert "ConfigMap tiny-attestation does not exist: an operator with a signing key writes it" in message


def test_unreachable_webhook_blocks_new_engines_and_not_deletion(
    gated: Kubectl, signing: OperatorProcess, webhook: Webhook
) -> None:
    apply(gated)
    (running,) = engines(gated, 1)
    template = gated.object("deployment", "tiny")["spec"]["template"]
    gated.must("patch", "pod", running, "--type=merge", '--patch={"metadata":{"finalizers":["example.org/held"]}}')
    webhook.process.send_signal(signal.SIGSTOP)
    try:
        assert "failed calling webhook" in refusal(gated, a_pod(template))
        # It is bound and reports, as by its scheduler and its kubelet.
        gated.patch_pod_status(running, {"message": "x"})
        gated.must("delete", "pod", running, "--wait=false")
        gated.must("patch", "pod", running, "--type=merge", '--patch={"metadata":{"finalizers":null}}')
    finally:
        webhook.process.send_signal(signal.SIGCONT)
    eventually(lambda: refusal(gated, a_pod(template)) == "", "it answers again")


def test_missing_config_map_permission_is_named_in_the_refusal(gated: Kubectl) -> None:
    gated.must("delete", "rolebinding", "specdecode-attestation-webhook")
    engine = a_pod({"spec": {"containers": [{"name": "engine", "image": "i:1"}]}}, deployment="none")
    says = f"let the webhook get ConfigMaps in namespace {gated.namespace}"
    eventually(lambda: says in refusal(gated, engine), "its right is gone")


def test_webhook_pods_are_admitted_by_pod_security(webhook: Webhook) -> None:
    assert refusal(webhook.admin, a_pod(webhook.one("Deployment")["spec"]["template"])) == ""


def test_api_server_defaults_do_not_change_the_attested_pod(kubectl: Kubectl) -> None:
    templates = [a_pod(each) for each in rendered()]
    # This API server drops the images of volumes.
    templates = [each for each in templates if not any("image" in volume for volume in each["spec"]["volumes"])]
    for number, each in enumerate(templates):
        each["metadata"]["name"] = f"p{number}"
    assert len(templates) >= 15
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": templates})
    made = kubectl.must("create", "--dry-run=server", "--filename=-", "--output=json", stdin=listed)
    for template, pod in zip(templates, parse_json_values(made), strict=True):
        assert pods_of(pod) == pods_of(template), (template, pod)


def rendered() -> Iterator[Body]:
    """All pods of the examples, and one with a volume of each kind that is not refused."""
    yield from rendered_pods()
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1024Mi"}}}
    field: dict[str, Any] = {"path": "f", "fieldRef": {"fieldPath": "metadata.annotations['specdecode.io/a']"}}
    cores: dict[str, Any] = {"path": "r", "resourceFieldRef": {"containerName": "engine", "resource": "limits.cpu"}}
    sources: tuple[Body, ...] = (
        {"configMap": {"name": "c"}},
        {"secret": {"secretName": "s", "optional": False}},
        {"emptyDir": {"medium": "Memory", "sizeLimit": "2048Mi"}},
        {"ephemeral": {"volumeClaimTemplate": {"spec": claim}}},
        {"csi": {"driver": "d.example", "readOnly": False, "volumeAttributes": {"a": "b"}}},
        {"hostPath": {"path": "/mnt"}},
        {"persistentVolumeClaim": {"claimName": "p"}},
        {"downwardAPI": {"items": [field, cores]}},
        {"projected": {"sources": [{"serviceAccountToken": {"path": "t"}}, {"downwardAPI": {"items": [field]}}]}},
    )
    mounts = [
        {"name": f"v{number}", "mountPath": f"/v{number}", "readOnly": bool(number % 2)}
        for number in range(len(sources))
    ]
    probe = {"exec": {"command": ["true"]}}
    engine = {"name": "engine", "image": "i:1", "volumeMounts": mounts, "startupProbe": probe, "workingDir": "/v2"}
    volumes = [{"name": f"v{number}", **source} for number, source in enumerate(sources)]
    yield {"metadata": {"annotations": {"specdecode.io/a": "x"}}, "spec": {"containers": [engine], "volumes": volumes}}
