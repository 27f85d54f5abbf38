"""How the commands of each document are run by tests, and which are not, with the reason.

A page's blocks run in their order in one shell, in a folder that looks like a checkout, as a reader would who follows
the page: what one block writes, the next one finds. ``before`` is what the page takes for granted at a block: shell, by
the block's beginning. There, ``$shown`` is a file with the YAML that the page shows last.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tests.support.devices import GPUS, gpu, resource_slice


@dataclass(frozen=True)
class Page:
    """How commands of one document are run."""

    cluster: bool = False
    """Whether they are for a cluster: they get an API server of their own, without nodes, and the chart's Helm."""
    before: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    """What a reader writes in place of a name in capitals."""
    exits: Mapping[str, int] = field(default_factory=dict)
    """Exit codes of blocks that do not end with 0, by their beginning."""
    shows_output: bool = False
    """Whether output that the page shows is what comes out, but for the last digits of figures."""


NOT_HERE: Final = {
    "docker": "needs a container engine and a registry; tests/devcluster builds the operator's image without either",
    "uv": "tests/unit/test_wheel.py installs the wheel in an environment of its own",
}
"""Programs that do nothing when a page calls them, with the reason."""

_SERVED: Final = "for attempt in $(seq 60); do kubectl get sdd,sdc,sdtr --all-namespaces && break; sleep 1; done"
_KINDS: Final = f"kubectl apply --server-side -k crds\n{_SERVED}\n"
_NAMESPACE: Final = "--namespace specdecode-system"
_IMAGE: Final = "image.repository=registry.example.com/team/specdecode-operator"
_CHARTS: Final = f"""
helm install specdecode-crds charts/specdecode-crds {_NAMESPACE} --create-namespace
helm install specdecode-operator charts/specdecode-operator {_NAMESPACE} --set {_IMAGE}
"""
_NO_CHARTS: Final = f"""
helm uninstall --ignore-not-found specdecode-operator specdecode-crds {_NAMESPACE}
kubectl delete -k crds --ignore-not-found
"""
# What a kubelet would do for the pod of a Job that the chart waits for.
_JOB_ENDS: Final = f"""
(
    until kubectl get pods {_NAMESPACE} -l batch.kubernetes.io/job-name -o name | grep . >pod; do sleep 1; done
    kubectl patch {_NAMESPACE} $(cat pod) --subresource=status --patch '{{"status": {{"phase": "Succeeded"}}}}'
) &
"""
_DEVICES: Final = json.dumps({"apiVersion": "v1", "kind": "List", "items": [GPUS, resource_slice("h200-0", gpu())]})
_OPERATOR: Final = "specdecode operator --health-port 0 --metrics-port 0"
_SERVER_ANSWERS: Final = "curl --silent --retry 99 --retry-delay 1 --retry-connrefused localhost:8000/health"
_PAIRS: Final = """
for block in $(seq 20); do
    echo '{"block": '$block', "baseline": 812.3, "candidate": 90'$((block % 5))'}'
done >pairs.jsonl
"""


_TESTS: Final = "PYTHONPATH=specdecode-operator python -c"
_NEW_MODEL: Final = f"""
{_TESTS} 'from pathlib import Path
from tests.support.facts_files import write_model_folder
write_model_folder(Path("models/new"))'
cat >new.yaml <<'NEW'
apiVersion: specdecode.io/v1alpha1
kind: SpecDecodeDeployment
metadata: {{name: new}}
spec: {{target: {{model: my/new}}}}
NEW
"""
_LIVE: Final = f"""
{_TESTS} 'from pathlib import Path
from tests.support.training_captures import write_live
write_live(Path("captures/live"), [[5, 6, number] for number in range(40)])'
"""
_COMPARED: Final = f"""
{_TESTS} 'from pathlib import Path
from tests.support.compared_captures import MadeCapture
MadeCapture(repetitions=2).make(Path("captures/pay"))'
"""
_SERVED_PAIR: Final = f"""
{_TESTS} 'import json
from pathlib import Path
from tests.unit.cli.test_calibrate import LOG
from tests.unit.cli.test_calibrate import serving
Path("status.json").write_text(json.dumps({{"status": serving(1000)["status"]}}))
Path("start.log").write_text(LOG)'
"""


_TRAINED: Final = f"""
{_TESTS} 'import json
from pathlib import Path
from tests.support.better_trainings import asking, better_training, head
training = better_training("chat")
training["metadata"] = {{"name": "chat"}}
status = training.pop("status") | {{"head": head("chat", "default")}}
spec = asking()
for name, body in {{"training": training, "status": {{"status": status}}, "llama": {{
    "apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment",
    "metadata": {{"name": "llama"}}, "spec": spec
}}}}.items():
    Path(name + ".json").write_text(json.dumps(body))'
kubectl apply -f llama.json -f training.json
kubectl patch sdtr chat --subresource=status --type=merge --patch-file=status.json
"""


def _status(kind: str, name: str, status: str, options: str = "") -> str:
    """Return what writes a part of an object's status, as the operator does."""
    return f"kubectl patch {kind} {name} {options} --subresource=status --type=merge --patch '{{\"status\": {status}}}'"


def _condition(kind: str, reason: str) -> str:
    return (
        f'{{"type": "{kind}", "status": "True", "reason": "{reason}", "message": "as it is said", '
        '"lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1}'
    )


_SERVES: Final = (
    f'{{"observed": {{"engines": 1, "kvCacheTokens": 127008}}, "conditions": [{_condition("Ready", "Serving")}]}}'
)
_PLANNED_AND_SERVES: Final = f'{{"conditions": [{_condition("Planned", "Fits")}, {_condition("Ready", "Serving")}]}}'
_COUNTS: Final = ("right", "wrong", "unconfirmed", "failed", "generatedTokensPerHour", "promptTokensPerHour")
_ANSWERS: Final = json.dumps({"canaries": dict.fromkeys(_COUNTS, 0)})
_FIGURES: Final = _status("sdd", "llama-70b", '{"figures": {"source": "Pods", "overSeconds": 300}}')
_PAIR_NAMES: Final = {"NAME": "llama-70b", "NAMESPACE": "default"}
_SERVER: Final = """
kubectl create namespace models
kubectl create deployment chat -n models --image vllm/vllm-openai:v0.33.0 -- vllm serve Qwen/Qwen3-32B
kubectl set resources deployment chat -n models --limits nvidia.com/gpu=2
"""
_COMPOSE: Final = """
echo 'services: {chat: {image: "vllm/vllm-openai:v0.33.0", command: [--model, Qwen/Qwen3-8B], gpus: all}}' >compose.yaml
"""
_ONE_H100_NODE: Final = """
kubectl apply -f - <<'NODE'
apiVersion: v1
kind: Node
metadata: {name: gpus, labels: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}}
NODE
kubectl patch node gpus --subresource=status --patch '{"status": {"allocatable": {"nvidia.com/gpu": "8"}}}'
"""

_CERT_MANAGER: Final = """
for kind in Issuer Certificate; do
    sed "s/KIND/$kind/; s/PLURAL/${kind,,}s/g; s/SINGULAR/${kind,,}/" <<'CRD'
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: PLURAL.cert-manager.io}
spec:
  group: cert-manager.io
  scope: Namespaced
  names: {kind: KIND, plural: PLURAL, singular: SINGULAR}
  versions:
  - name: v1
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
---
CRD
done | kubectl apply -f -
kubectl wait crd/issuers.cert-manager.io crd/certificates.cert-manager.io --for=condition=Established --timeout=60s
"""

PAGES: Final[dict[str, Page]] = {
    "README.md": Page(
        cluster=True,
        before={
            "REGISTRY=": f"""
{_ONE_H100_NODE}
(
    until kubectl get sdd qwen3-8b-eagle3; do sleep 1; done
    {_status("sdd", "qwen3-8b-eagle3", _SERVES)}
) &
"""
        },
    ),
    "docs/get-started/quickstart-gpus.md": Page(
        cluster=True,
        before={
            "kubectl get nodes": _ONE_H100_NODE,
            "kubectl apply": f"""
(
    until kubectl get sdd qwen3-8b-eagle3; do sleep 1; done
    {_status("sdd", "qwen3-8b-eagle3", _PLANNED_AND_SERVES)}
) &
""",
        },
    ),
    "docs/operate/admission.md": Page(
        cluster=True,
        before={
            "helm template": """
cp charts/specdecode-operator/examples/admission.yaml my-values.yaml
echo 'image: {repository: registry.example.com/team/specdecode-operator}' >>my-values.yaml
mkdir pairs
cp examples/llama-70b-fp8.yaml pairs
""",
            "helm upgrade": f"{_CHARTS}{_JOB_ENDS}",
        },
    ),
    "docs/install/air-gapped.md": Page(
        cluster=True,
        before={
            "kubectl create namespace": 'cp "$shown" values.yaml; export REGISTRY_PASSWORD=x',
            "kubectl apply -f llama": 'cp "$shown" llama-70b.yaml',
        },
        exits={"specdecode doctor": 4},  # no node has GPUs
    ),
    "docs/operate/alerts.md": Page(
        cluster=True,
        names=_PAIR_NAMES,
        before={
            "kubectl get sdd NAME": f"""
{_KINDS}
kubectl apply -f examples/llama-70b.yaml
{_FIGURES}
""",
        },
    ),
    "docs/operate/check-answers.md": Page(
        cluster=True,
        names=_PAIR_NAMES,
        before={
            "kubectl get sdd NAME": f"""
{_KINDS}
kubectl apply -f examples/llama-70b.yaml
{_status("sdd", "llama-70b", _ANSWERS)}
""",
        },
    ),
    "docs/operate/operator-health.md": Page(
        cluster=True,
        names={"NAMESPACE": "default"},
        before={"kubectl get deployment": _CHARTS},
        exits={"specdecode doctor": 4},  # no node has GPUs
    ),
    "docs/operate/back-up.md": Page(
        cluster=True,
        before={
            "helm install": """
mkdir pairs
cp examples/llama-70b.yaml pairs
echo 'image: {repository: r.example/o}' >values.yaml
"""
        },
    ),
    "docs/measure/calibrate.md": Page(
        cluster=True,
        before={
            "# from a running": f"""
{_KINDS}
{_SERVED_PAIR}
kubectl apply -f examples/llama-70b.yaml
kubectl patch sdd llama-70b --subresource=status --type=merge --patch-file=status.json
""",
            "kubectl create configmap": "kubectl create namespace specdecode-system",
        },
    ),
    "docs/measure/captures.md": Page(
        cluster=True,
        before={
            "kubectl apply": _KINDS,
            "specdecode capture report": """
for name in demo before after replay; do specdecode replay synth --out captures/$name --requests 20; done
""",
        },
    ),
    "docs/measure/live-captures.md": Page(
        cluster=True,
        before={
            "kubectl apply": _KINDS,
            "specdecode capture report": "specdecode replay synth --out captures/llama-70b-live --requests 20",
        },
    ),
    "docs/measure/export.md": Page(
        before={
            "specdecode capture export captures/demo --format vllm": (
                "specdecode replay synth --out captures/demo --requests 20"
            ),
            "specdecode capture export captures/live": _LIVE,
        }
    ),
    "docs/serve/trained-drafts.md": Page(cluster=True, before={"specdecode training status": f"{_KINDS}\n{_TRAINED}"}),
    "docs/serve/train-a-draft.md": Page(cluster=True, before={"kubectl apply": _KINDS}),
    "docs/serve/autoscale.md": Page(
        cluster=True, before={"kubectl scale": f"{_KINDS}\nkubectl apply -f examples/llama-70b.yaml"}
    ),
    "docs/serve/turn-speculation-off.md": Page(
        cluster=True,
        names=_PAIR_NAMES,
        before={
            "saved=$(kubectl get sdd NAME": f"{_KINDS}\nkubectl apply -f examples/llama-70b.yaml",
        },
    ),
    "docs/serve/migrate.md": Page(
        cluster=True, before={"specdecode import deployment": _SERVER, "specdecode import -f": _COMPOSE}
    ),
    "docs/serve/storage.md": Page(),
    "docs/serve/size-a-node.md": Page(
        cluster=True,
        before={
            "specdecode plan -f examples/foreign": "kubectl apply -f examples/foreign/vllm-deployment.yaml",
            "kubectl get nodes": f'{_ONE_H100_NODE}\ncp "$shown" llama-70b-h100.yaml',
            "kubectl get configmap": f"""
{_KINDS}
kubectl apply -f examples/llama-70b.yaml
{_OPERATOR} &
timeout 60 sh -c 'until kubectl get configmap llama-70b-plan; do sleep 1; done'
""",
        },
    ),
    "docs/measure/does-it-pay.md": Page(
        cluster=True,
        before={
            "kubectl apply": _KINDS,
            "kubectl wait": _status(
                "sdc",
                "qwen3-8b-does-it-pay",
                f'{{"conditions": [{_condition("Succeeded", "Completed")}, {_condition("Pays", "Pays")}], '
                '"comparison": {"baseline": "baseline", "levelPercent": 95, "arms": [{"name": "k3", "verdict": "Pays", '
                '"message": "18.2 % more goodput", "outputs": "Equal"}]}}',
            ),
            "specdecode capture report": _COMPARED,
            "specdecode verdict": _PAIRS,
        },
    ),
    "docs/measure/capture-loads.md": Page(
        cluster=True, before={"kubectl create configmap": """echo '{"prompt": "Hello"}' >prompts.jsonl"""}
    ),
    "docs/simulate/emulate.md": Page(
        before={"specdecode replay fit": "specdecode replay synth --out captures/demo --requests 20"}
    ),
    "docs/simulate/forecast.md": Page(
        exits={"specdecode replay compare captures/tomorrow sixteen --check": 1}, shows_output=True
    ),
    "docs/operate/gitops.md": Page(
        cluster=True,
        before={
            "kubectl patch": "kubectl create namespace argocd; kubectl create configmap argocd-cm --namespace argocd",
            "kubectl get events": f"""
{_KINDS}
kubectl apply -f examples/llama-70b.yaml
{_status("sdd", "llama-70b", f'{{"conditions": [{_condition("ChildrenInSync", "ChildrenInSync")}]}}')}
""",
        },
    ),
    "docs/install/install.md": Page(
        cluster=True,
        before={_KINDS: _NO_CHARTS, "kubectl apply --server-side -k .": 'cp "$shown" kustomization.yaml'},
    ),
    "docs/install/high-availability.md": Page(cluster=True, before={"helm upgrade": _CHARTS}),
    "docs/install/model-facts.md": Page(
        cluster=True,
        before={"specdecode models add": f"kubectl create namespace specdecode-system\n{_NEW_MODEL}"},
    ),
    "docs/install/namespaces.md": Page(cluster=True),
    "docs/install/argo-cd.md": Page(cluster=True, before={"kubectl delete secret": _CHARTS}),
    "docs/serve/access.md": Page(cluster=True, names={"NAMESPACE": "default"}),
    "docs/serve/lora-adapters.md": Page(cluster=True, before={"kubectl apply -f examples": _KINDS}),
    "docs/serve/dynamic-resource-allocation.md": Page(
        cluster=True,
        before={
            "kubectl apply -f examples": _KINDS,
            "kubectl get nodes,resourceslices": f"kubectl apply -f - <<'EOF'\n{_DEVICES}\nEOF\n",
        },
    ),
    "docs/serve/expose.md": Page(cluster=True, before={"kubectl create secret": _KINDS}),
    "docs/install/run-locally.md": Page(
        cluster=True, before={"kubectl --namespace specdecode-system scale": f"{_NO_CHARTS}{_CHARTS}"}
    ),
    "docs/install/uninstall.md": Page(cluster=True, before={"helm uninstall": _CHARTS}),
    "docs/install/upgrade.md": Page(cluster=True, before={"helm upgrade": _CHARTS}),
    "docs/operate/scale.md": Page(cluster=True),
    "docs/operate/monitor.md": Page(
        cluster=True,
        before={
            "kubectl get sdd": f"""
{_KINDS}
kubectl create namespace models
kubectl apply -n models -f examples/llama-70b.yaml
{_FIGURES} -n models
"""
        },
    ),
    "docs/simulate/replay.md": Page(before={"uv": "specdecode replay synth --out captures/demo --requests 20"}),
    "docs/serve/serve-a-pair.md": Page(
        cluster=True,
        before={
            "kubectl create secret": f"""
{_KINDS}
(
    until kubectl get sdd llama-70b-fp8; do sleep 1; done
    {_status("sdd", "llama-70b-fp8", _SERVES)}
) &
"""
        },
    ),
    "docs/simulate/test-clients.md": Page(before={"specdecode replay drive": _SERVER_ANSWERS}),
    "docs/operate/troubleshoot.md": Page(
        cluster=True,
        names=_PAIR_NAMES,
        before={
            "kubectl get sdd -A": f"{_KINDS}kubectl apply -f examples/llama-70b.yaml",
            "kubectl get sdd NAME -n NAMESPACE -o jsonpath='{.status.plan.fixes}'": f"""
{_ONE_H100_NODE}
{_OPERATOR} &
kubectl wait sdd/llama-70b --for=condition=Planned=False --timeout=60s
""",
        },
    ),
    "docs/operate/troubleshoot-speculation.md": Page(
        cluster=True,
        names=_PAIR_NAMES,
        before={
            "kubectl get sdd NAME -n NAMESPACE -o jsonpath='{.status.figures}'": f"""
{_KINDS}
kubectl apply -f examples/llama-70b.yaml
{_FIGURES}
{_status("sdd", "llama-70b", '{"speculation": [{"feature": "k", "asked": "x", "inForce": "True", "message": ""}]}')}
""",
        },
    ),
    "docs/operate/verify-a-rollout.md": Page(
        cluster=True,
        before={
            "cosign generate-key-pair": f"{_CHARTS}export COSIGN_PASSWORD=x",
            # The other way to make a key: the operator gets that of before, as the chart mounts it.
            "openssl": f"""
kubectl get secret specdecode-signing {_NAMESPACE} -o json >secret.json
for entry in cosign.key cosign.password; do
    jq -r --arg entry $entry '.data[$entry] | @base64d' secret.json >$entry
done
mv cosign.pub of-cosign.pub
kubectl delete secret specdecode-signing {_NAMESPACE}
""",
            "kubectl get configmap llama-attestation -o yaml": f"""
sed 's/name: llama-70b$/name: llama/' examples/llama-70b.yaml | kubectl apply -f -
{_ONE_H100_NODE.replace("H100-80GB-HBM3", "H200")}
{_OPERATOR} --signing-key cosign.key --signing-key-password-file cosign.password &
mv of-cosign.pub cosign.pub
timeout 60 sh -c 'until kubectl get configmap llama-attestation; do sleep 1; done'
""",
            "cp cosign.pub": f"rm examples; cp -r specdecode-operator/examples examples\n{_CERT_MANAGER}",
        },
    ),
    "docs/reference/cli.md": Page(
        cluster=True,
        before={
            "specdecode import deployment": _SERVER,
            "specdecode models add": _NEW_MODEL,
            "specdecode import -f": _COMPOSE,
            "kubectl get storageclasses": "cp examples/capture-tiny.yaml capture.yaml",
        },
    ),
    "examples/README.md": Page(cluster=True),
}

_MEASURED: Final = "figures of one machine, measured by hand: minutes to hours"
_DEMO: Final = "the demo's own cluster: .github/workflows/empty-machine.yml runs ./just demo"
_ENGINE: Final = "asks running engines: tests/engine/test_figures.py"
_ENGINE_LOG: Final = "needs the pod of an engine that crashed"
_VLLM: Final = "needs vLLM: tests/engine/test_replay_clients.py does it"
_READERS: Final = "needs the tool: tests/engine/test_export_readers.py has its reader read an export"
_CAPTURE: Final = (
    "needs an engine and a volume: tests/e2e/serving/test_capture.py and tests/component/operator/test_capture_verbs.py"
)
_FULCIO: Final = "needs a certificate authority: tests/unit/deployment/attestation/test_cosign.py has a Fulcio for it"
_NO_NODES: Final = "waits for pods, and has no nodes here: tests/component/admission/test_doctor.py runs doctor"
_GPUS: Final = "needs GPUs; tests/e2e/serving sends requests to a tiny pair"
_ARGO: Final = "needs Argo CD: tests/component/admission/gitops runs its code and checks the applications"
_RELEASE: Final = "needs a release in a registry: tests/devcluster/test_publish.py runs it there"
_OF_OPERATOR: Final = "needs a running operator: tests/component/operator starts replicas"
_INSTALL: Final = "docs/install/install.md has the same commands, which run on an API server"
_ADAPTER: Final = "needs Prometheus and a metrics adapter: tests/e2e/serving/test_autoscaling.py runs both"
NOT_RUN: Final[dict[tuple[str, str], str]] = {
    ("docs/serve/autoscale.md", "helm install prometheus-adapter"): _ADAPTER,
    ("docs/serve/autoscale.md", "kubectl get --raw"): _ADAPTER,
    ("docs/serve/autoscale.md", "kubectl get sdd llama-70b -o jsonpath"): _ADAPTER,
    ("README.md", "kubectl port-forward"): _GPUS,
    ("charts/specdecode-crds/README.md", "helm install"): _INSTALL,
    ("charts/specdecode-operator/README.md", "helm install"): _INSTALL,
    ("docs/reference/helm-values.md", "helm upgrade"): _INSTALL,
    ("SECURITY.md", "REGISTRY=registry.example.com"): _RELEASE,
    ("SECURITY.md", "REGISTRY=ghcr.io"): "takes identities of GitHub's, and Fulcio and Rekor",
    ("SECURITY.md", "for signed in"): _RELEASE,
    ("docs/install/install.md", "REGISTRY="): _RELEASE,
    ("docs/operate/verify-a-rollout.md", "specdecode attestation verify"): _FULCIO,
    ("docs/operate/verify-a-rollout.md", "cosign verify-blob-attestation --bundle"): _FULCIO,
    ("docs/design/benchmarks.md", "./just bench"): _MEASURED,
    (
        "docs/design/benchmarks.md",
        "git fetch origin bench-history",
    ): "needs the branch: tests/unit/test_workflows.py has one",
    ("docs/design/replay-accuracy.md", ".venv/bin/python -m bench.replay.fidelity"): _MEASURED,
    ("docs/design/decay.md", "$ .venv/bin/python -m bench.evidence.decay"): _MEASURED,
    ("docs/design/policy.md", "$ .venv/bin/python -m bench.evidence.policy"): _MEASURED,
    ("docs/design/verdict.md", "$ .venv/bin/python -m bench.evidence.verdict"): _MEASURED,
    ("docs/design/verdict-starts.md", "$ .venv/bin/python -m bench.evidence.comparison"): _MEASURED,
    (
        "docs/serve/canary.md",
        "kubectl get sdd NAME",
    ): "needs a canary: tests/component/operator/test_canary.py reads its status",
    ("docs/measure/calibrate.md", "# on a machine with GPUs"): "needs a GPU",
    ("docs/measure/capture-loads.md", "kubectl apply -f datasets.yaml"): "copies files through a pod: no nodes here",
    ("docs/measure/captures.md", "specdecode capture up"): _CAPTURE,
    (
        "docs/measure/live-captures.md",
        "specdecode capture live",
    ): "needs running engines: tests/unit/cli/capture/test_live.py",
    ("docs/measure/does-it-pay.md", "specdecode capture fetch"): _CAPTURE,
    ("docs/serve/train-a-draft.md", "specdecode training status"): "follows a training that runs: no nodes here",
    ("docs/install/install.md", "KUBECONTEXT="): "needs a registry; the demo and end-to-end tests install so",
    ("docs/get-started/quickstart-gpus.md", "kubectl --namespace specdecode-system rollout status"): _NO_NODES,
    ("docs/get-started/quickstart-gpus.md", "./just setup"): _NO_NODES,
    ("docs/get-started/quickstart-gpus.md", "kubectl port-forward"): _GPUS,
    ("docs/install/install.md", "kubectl --namespace specdecode-system rollout status"): _NO_NODES,
    ("docs/install/argo-cd.md", "kubectl apply --filename root.yaml"): _ARGO,
    ("docs/install/argo-cd.md", "argocd app delete"): _ARGO,
    ("docs/serve/access.md", "API_KEY="): _GPUS,
    ("docs/install/run-locally.md", "KUBECONFIG="): "runs until it ends: tests/support/operator_process.py starts it",
    ("docs/operate/monitor.md", "specdecode metrics"): _ENGINE,
    ("docs/operate/alerts.md", "kubectl get pods"): _ENGINE_LOG,
    ("docs/operate/check-answers.md", "kubectl logs"): "needs the pod of an engine",
    ("docs/operate/operator-health.md", "kubectl exec"): _OF_OPERATOR,
    ("docs/operate/operator-health.md", "kubectl get lease"): _OF_OPERATOR,
    ("docs/operate/operator-health.md", "kubectl logs"): _OF_OPERATOR,
    ("docs/operate/operator-health.md", "kubectl port-forward"): _OF_OPERATOR,
    ("docs/serve/turn-speculation-off.md", "kubectl wait"): "waits for engines: no nodes here",
    ("docs/simulate/emulate.md", "specdecode replay serve --mode"): "needs vLLM: tests/engine/test_emulated.py",
    ("docs/serve/serve-a-pair.md", "kubectl port-forward"): "needs GPUs; tests/e2e/serving asks a tiny pair so",
    ("docs/measure/export.md", "PYTHONHASHSEED=0 vllm bench"): _READERS,
    ("docs/measure/export.md", "guidellm"): _READERS,
    ("docs/measure/export.md", "aiperf"): _READERS,
    ("docs/measure/export.md", "kubectl port-forward"): "needs an engine and a capture of it; " + _READERS,
    ("docs/measure/export.md", "export AWS_ACCESS_KEY_ID"): "tests/unit/cli/capture/test_push.py pushes to a server",
    ("docs/simulate/test-clients.md", "from openai"): _VLLM,
    ("docs/simulate/test-clients.md", "guidellm"): _VLLM,
    ("docs/simulate/test-clients.md", "vllm bench"): _VLLM,
    ("docs/operate/troubleshoot-speculation.md", "specdecode metrics"): _ENGINE,
    ("docs/reference/status.md", "$ kubectl get sdd chat"): "output of engines with GPUs",
    ("docs/measure/borrow-gpus.md", "$ kubectl get sdd chat"): "output while a capture has the GPUs of an engine",
    ("docs/get-started/first-deployment.md", ""): _DEMO,
}
