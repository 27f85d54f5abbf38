"""Models from a hub by way of a shared claim, served over HTTPS: Jobs, engines and the operator, all of them real."""

import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster.cluster.pki import Identity, create
from tests.e2e.serving import hub_server
from tests.support.conditions import condition, wait_for
from tests.support.kubectl import Kubectl
from tests.support.small_pair import small_pair
from tests.support.waiting import eventually

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[3] / "examples"
IMAGE = "localhost/specdecode/engine-cpu:0.32.0"
ENGINE_DEADLINE_S = 600

HUB = f"""
apiVersion: v1
kind: Service
metadata: {{name: hub}}
spec:
  selector: {{app: hub}}
  ports: [{{port: 8080}}]
---
apiVersion: v1
kind: Pod
metadata: {{name: hub, labels: {{app: hub}}}}
spec:
  terminationGracePeriodSeconds: 0
  containers:
  - name: hub
    image: {IMAGE}
    command: [python3, /script/hub_server.py, /models]
    readinessProbe: {{tcpSocket: {{port: 8080}}, periodSeconds: 1}}
    volumeMounts:
    - {{name: models, mountPath: /models, readOnly: true}}
    - {{name: script, mountPath: /script}}
  volumes:
  - {{name: models, persistentVolumeClaim: {{claimName: tiny-models}}}}
  - {{name: script, configMap: {{name: hub}}}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: cache}}
spec: {{accessModes: [ReadWriteOnce], resources: {{requests: {{storage: 1Gi}}}}}}
"""


@pytest.fixture(scope="module")
def endpoint(kubectl: Kubectl) -> str:
    """Address of a hub that has the tiny pair."""
    kubectl.must("apply", f"--filename={EXAMPLES / 'tiny-models.yaml'}")
    kubectl.wait("job/tiny-models", "condition=Complete", 300)
    kubectl.must("create", "configmap", "hub", f"--from-file={hub_server.__file__}")
    assert kubectl.apply(HUB).returncode == 0
    kubectl.wait("pod/hub", "condition=Ready", 240)
    return f"http://{kubectl.object('service', 'hub')['spec']['clusterIP']}:8080"


def sdd(name: str, endpoint: str, **changes: Any) -> str:
    """The tiny pair from the hub; nobody describes its models."""
    body = small_pair()
    body["metadata"]["name"] = name
    spec = body["spec"]
    for model in (spec["target"], spec["speculation"]["draft"]):
        del model["config"]
    spec["models"] = {
        "cache": {"persistentVolumeClaim": {"claimName": "cache"}},
        "hubTokenSecret": {"name": "hub-token", "key": "token"},
    }
    spec["engine"]["env"] = [{"name": "HF_ENDPOINT", "value": endpoint}]
    spec["serving"]["tlsSecret"] = {"name": "certificate"}
    return yaml.safe_dump({**body, "spec": spec | changes})


def token(kubectl: Kubectl, value: str) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub-token"}, "stringData": {"token": value}}
    assert kubectl.apply(yaml.safe_dump(secret)).returncode == 0


def sent(kubectl: Kubectl) -> list[str]:
    """Files that the hub has sent whole."""
    return sorted(line.removeprefix("sent ") for line in kubectl.must("logs", "hub").splitlines() if "sent " in line)


def engine(kubectl: Kubectl) -> dict[str, Any]:
    (pod,) = kubectl.objects("pods", "--selector=specdecode.io/deployment=tiny")
    return pod


def within(kubectl: Kubectl, *command: str) -> str:
    return kubectl.must("exec", engine(kubectl)["metadata"]["name"], "--container=engine", "--", *command)


def files(kubectl: Kubectl, folder: str) -> set[str]:
    """Paths of the files below a folder of the engine."""
    walk = "import pathlib, sys; p = pathlib.Path(sys.argv[1]); print(*(f.relative_to(p) for f in p.rglob('*.*')))"
    return set(within(kubectl, "python3", "-c", walk, folder).split())


def complete(kubectl: Kubectl, authority: Path) -> dict[str, Any]:
    """Ask the Service over HTTPS, with its name and authority verified."""
    question = {"model": "target", "prompt": "Once", "max_tokens": 64, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"https://{kubectl.service_address('tiny')}/v1/completions",
        json.dumps(question).encode(),
        {"Content-Type": "application/json"},
    )
    handler = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=str(authority)))
    with urllib.request.build_opener(urllib.request.ProxyHandler({}), handler).open(request, timeout=300) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


@pytest.fixture(scope="module")
def authority(kubectl: Kubectl, endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pair, served; on its way a token that the hub refuses, and a certificate that comes late."""
    token(kubectl, "somebody else's")
    assert kubectl.apply(sdd("tiny", endpoint)).returncode == 0
    refused = wait_for(kubectl, "tiny", "Ready", "HubRefused")
    assert "spec.models.hubTokenSecret" in refused
    token(kubectl, hub_server.TOKEN)
    kubectl.must("delete", "jobs", "--all")  # or the reader would be started again only after its back-off
    kubectl.must("annotate", "sdd", "tiny", "look=again")
    missing = wait_for(kubectl, "tiny", "Ready", "WaitingForSecret")
    assert 'secret "certificate" not found' in missing
    folder = tmp_path_factory.mktemp("pki") / "pki"
    address = kubectl.object("service", "tiny")["spec"]["clusterIP"]
    create(folder, [Identity("tiny", "tiny", names=("tiny",), addresses=(address,))])
    kubectl.must(
        "create", "secret", "tls", "certificate", f"--cert={folder / 'tiny.crt'}", f"--key={folder / 'tiny.key'}"
    )
    wait_for(kubectl, "tiny", "Ready", "Serving", ENGINE_DEADLINE_S)
    return folder / "ca.crt"


def test_engines_serve_from_the_cache_without_the_hub_token(kubectl: Kubectl, authority: Path) -> None:
    pod = engine(kubectl)
    command = " ".join(pod["spec"]["containers"][0]["command"])
    for model in ("target", "draft"):
        assert f"/models/hub/models--pair--{model}/snapshots/{hub_server.COMMIT}" in command
    assert "HF_TOKEN" not in json.dumps(pod["spec"])
    written = kubectl("exec", pod["metadata"]["name"], "--container=engine", "--", "touch", "/models/hub/of-the-engine")
    assert "Read-only file system" in written.stderr
    kept = kubectl.object("configmap", "tiny-downloads")["data"]
    assert {json.loads(each)["commit"] for each in kept.values()} == {hub_server.COMMIT}
    assert authority.exists()


def test_clients_and_operator_use_https(kubectl: Kubectl, authority: Path) -> None:
    assert complete(kubectl, authority)["usage"]["completion_tokens"] == 64
    wait_for(kubectl, "tiny", "SpeculationActive", "Drafting")
    assert condition(kubectl, "tiny", "BudgetAccurate")[0] == "True"


def test_second_deployment_reuses_downloaded_models(kubectl: Kubectl, endpoint: str, authority: Path) -> None:
    before = sent(kubectl)
    assert [name for name in before if name.endswith("safetensors")] == [
        "pair/draft/model.safetensors",
        "pair/target/model.safetensors",
    ]
    assert kubectl.apply(sdd("other", endpoint, suspend=True)).returncode == 0

    def fetched() -> bool:
        found = kubectl.objects("configmaps", "--field-selector=metadata.name=other-downloads")
        return bool(found) and len(found[0]["data"]) == len(("target", "draft"))

    eventually(fetched, "its models are there")
    assert sent(kubectl) == before
    assert authority.exists()


def test_next_engine_gets_the_compile_cache(kubectl: Kubectl, authority: Path) -> None:
    eventually(lambda: "vllm" in within(kubectl, "ls", "/compiled").split(), "its cache is published")
    first = engine(kubectl)["metadata"]["name"]
    kubectl.must("delete", "pod", first)
    eventually(lambda: engine(kubectl)["metadata"]["name"] != first, "another engine starts")
    wait_for(kubectl, "tiny", "Ready", "Serving", ENGINE_DEADLINE_S)
    environment = within(kubectl, "cat", "/proc/1/environ")
    assert "VLLM_CACHE_ROOT=/tmp/vllm-cache" in environment.split("\0")
    published = files(kubectl, "/compiled/vllm")
    assert published
    assert published <= files(kubectl, "/tmp/vllm-cache")
    assert authority.exists()
