"""A real vLLM with a real draft model, from `kubectl apply` to proven speculation."""

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster.images.engine_image import VLLM_VERSION
from devcluster.install import NAMESPACE
from tests.support.conditions import condition, wait_for, wait_for_all
from tests.support.kubectl import Kubectl
from tests.support.rest import Rest
from tests.support.small_pair import small_pair
from tests.support.waiting import eventually

EXAMPLES = Path(__file__).parents[3] / "examples"
OURS = "--selector=app.kubernetes.io/managed-by=specdecode-operator"
CLIENT_KEY = "sesame"
ENGINE_DEADLINE_S = 600
FACTS = "specdecode-model-facts"


@dataclass(frozen=True)
class Story:
    """What the object said on its way to Ready."""

    missing_claim: str
    missing_secret: str


@pytest.fixture(scope="module")
def story(kubectl: Kubectl) -> Story:
    """The tiny pair, applied before anything that it needs is there, and an operator killed on the way.

    Nobody describes its models: they are read from the volume.
    """
    body = small_pair()
    for model in (body["spec"]["target"], body["spec"]["speculation"]["draft"]):
        del model["config"]
    body["spec"]["serving"]["apiKeySecret"] = {"name": "clients", "key": "api-key"}
    assert kubectl.apply(yaml.safe_dump(body)).returncode == 0
    missing_claim = wait_for(kubectl, "tiny", "Ready", "WaitingForVolume")
    kubectl.must("apply", f"--filename={EXAMPLES / 'tiny-models.yaml'}")
    missing_secret = wait_for(kubectl, "tiny", "Ready", "WaitingForSecret")
    kubectl.wait("job/tiny-models", "condition=Complete", 300)
    kubectl.must("create", "secret", "generic", "clients", f"--from-literal=api-key={CLIENT_KEY}")
    kill_operator(kubectl)
    kubectl.wait("sdd/tiny", "condition=Ready", ENGINE_DEADLINE_S)
    return Story(missing_claim, missing_secret)


def kill_operator(kubectl: Kubectl) -> None:
    Kubectl(kubectl.kubeconfig, NAMESPACE).must("delete", "pod", "--all", "--grace-period=0", "--force")


def complete(kubectl: Kubectl, prompt: str, key: str = CLIENT_KEY) -> dict[str, Any]:
    """Ask the Service for a completion."""
    question = {"model": "target", "prompt": prompt, "max_tokens": 64, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://{kubectl.service_address('tiny')}/v1/completions",
        json.dumps(question).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=300) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def engine_pods(kubectl: Kubectl) -> list[dict[str, Any]]:
    return kubectl.objects("pods", OURS)


@pytest.mark.usefixtures("story")
class TestServing:
    def test_missing_claim_and_secret_were_reported(self, story: Story) -> None:
        assert '"tiny-models" not found' in story.missing_claim
        assert 'secret "clients" not found' in story.missing_secret

    def test_model_facts_were_read_and_their_jobs_removed(self, kubectl: Kubectl) -> None:
        entries = kubectl.object("configmap", FACTS)["data"]
        layers = {name.rpartition("-")[0]: json.loads(entry)["checkpoint"] for name, entry in entries.items()}
        assert {name: found["config"]["num_hidden_layers"] for name, found in layers.items()} == {
            "pair.target": 4,
            "pair.draft": 1,
        }
        eventually(lambda: not kubectl.objects("jobs", OURS), "their Jobs are removed")
        assert "hold" not in condition(kubectl, "tiny", "Planned")[2], "the files are those that config.json describes"

    def test_request_with_wrong_api_key_is_refused(self, kubectl: Kubectl) -> None:
        with pytest.raises(urllib.error.HTTPError) as refused:
            complete(kubectl, "Hello", key="wrong")
        assert refused.value.code == 401

    def test_observed_kv_cache_equals_the_plan(self, kubectl: Kubectl) -> None:
        status = wait_for_all(kubectl, "tiny", BudgetAccurate="True", SettingsInForce="True")["status"]
        assert status["observed"]["engineVersion"] == VLLM_VERSION, "it says so to those without the key, too"
        assert status["observed"]["kvCacheTokens"] == status["plan"]["kvCacheTokens"]

    def test_traffic_makes_speculation_active(self, kubectl: Kubectl) -> None:
        for prompt in ("The quick brown fox", "Speculative decoding", "Once upon a time"):
            assert complete(kubectl, prompt)["usage"]["completion_tokens"] == 64
        wait_for(kubectl, "tiny", "SpeculationActive", "Drafting")
        status = kubectl.object("sdd", "tiny")["status"]
        observed, rows = status["observed"], {row["feature"]: row["inForce"] for row in status["speculation"]}
        assert rows["method"] == "True"
        assert rows["numSpeculativeTokens"] != "False"
        assert 5 < observed["acceptancePercent"] < 95, "the pair was made to agree sometimes"
        assert observed["acceptedTokens"] < observed["draftTokens"]

    def test_kubectl_get_prints_the_documented_columns(self, kubectl: Kubectl) -> None:
        header, row = kubectl.must("get", "sdd").splitlines()
        assert header.split() == ["NAME", "READY", "STATUS", "MODEL", "METHOD", "K", "ACCEPTANCE", "AGE"]
        name, ready, reason, _, method, k, *_ = row.split()
        assert (name, ready, reason, method, k) == ("tiny", "1/1", "Serving", "draft_model", "3")

    def test_killed_operator_does_not_change_engine_pods(self, kubectl: Kubectl) -> None:
        before = [pod["metadata"]["uid"] for pod in engine_pods(kubectl)]
        kill_operator(kubectl)
        kubectl.must("label", "sdd", "tiny", "touched=1", "--overwrite")
        Kubectl(kubectl.kubeconfig, NAMESPACE).must("rollout", "status", "deployment/specdecode-operator")
        kubectl.must("scale", "sdd", "tiny", "--replicas=1")
        # Its status says of the operator before that it serves.
        Rest(kubectl).settle()
        wait_for_all(kubectl, "tiny", Ready=("True", "Serving"))
        assert [pod["metadata"]["uid"] for pod in engine_pods(kubectl)] == before

    def test_second_server_side_apply_changes_nothing(self, kubectl: Kubectl) -> None:
        body = kubectl.object("sdd", "tiny")
        manifest = {
            "apiVersion": body["apiVersion"],
            "kind": body["kind"],
            "metadata": {"name": "tiny"},
            "spec": body["spec"],
        }
        kubectl.must("apply", "--server-side", "--force-conflicts", "--filename=-", stdin=json.dumps(manifest))
        first = kubectl.object("sdd", "tiny")
        kubectl.must("apply", "--server-side", "--filename=-", stdin=json.dumps(manifest))
        second = kubectl.object("sdd", "tiny")
        for each in (first, second):
            del each["metadata"]["resourceVersion"], each["status"]  # figures of the engine are written meanwhile
        assert second == first
        assert second["metadata"]["generation"] == body["metadata"]["generation"]


@pytest.mark.usefixtures("story")
class TestChange:
    """Runs after the others: the engine goes. How one takes another's place: test_replay.py."""

    def test_suspend_removes_pods_and_keeps_service_and_plan(self, kubectl: Kubectl) -> None:
        kubectl.must("patch", "sdd", "tiny", "--type=merge", '--patch={"spec":{"suspend":true}}')
        wait_for(kubectl, "tiny", "Ready", "Suspended")
        eventually(lambda: not engine_pods(kubectl), "no engine pod is left")
        assert kubectl.object("service", "tiny")
        assert kubectl.object("sdd", "tiny")["status"]["plan"]["verdict"] == "Fits"

    def test_deletion_leaves_only_the_model_facts(self, kubectl: Kubectl) -> None:
        kubectl.must("delete", "sdd", "tiny")
        kinds = "deployments,services,configmaps,poddisruptionbudgets,jobs,pods"

        def left() -> set[str]:
            return {body["metadata"]["name"] for body in kubectl.objects(kinds, OURS)}

        eventually(lambda: left() == {FACTS}, "all children are gone")
