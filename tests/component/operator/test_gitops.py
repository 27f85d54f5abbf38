"""The GitOps drill: a pair from its pull request to engines, another draft, drift, and changes that get no further.

The test is the kubelet: that real engines do the same is seen in tests/e2e/serving/test_gitops.py.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.component.operator.test_lifecycle import report
from tests.component.operator.test_policy import RUNNING
from tests.support.admission_cases import deployment
from tests.support.gitops.drill import Drill
from tests.support.gitops.repository import Repository
from tests.support.gitops.sync import ServerSideApply
from tests.support.installed_webhook import InstalledWebhook
from tests.support.kubectl import Kubectl
from tests.support.objects import H200, pair_70b
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import eventually

SMALLER = {"method": "draft_model", "numSpeculativeTokens": 5, "draft": {"model": "meta-llama/Llama-3.2-1B-Instruct"}}
NO_DRAFT = {"method": "draft_model", "numSpeculativeTokens": 5}
STRANGER = {**SMALLER, "draft": {"model": "Qwen/Qwen3-8B"}}
"""A draft that speaks another vocabulary: the CRD cannot tell, the webhook can."""
STRANGE_IMAGE = "registry.example.com/engine:other"


@pytest.fixture
def webhook(kubectl: Kubectl, tmp_path: Path) -> Iterator[InstalledWebhook]:
    installed = InstalledWebhook(kubectl.kubeconfig, tmp_path, kubectl.namespace)
    installed.install()
    eventually(lambda: not installed.dry_run(deployment(pair_70b(speculation=STRANGER)))[0], "the webhook is asked")
    yield installed
    installed.remove()


@pytest.fixture
def nodes(kubectl: Kubectl) -> Iterator[str]:
    kubectl.add_node("h200-0", H200)
    yield kubectl.must("get", "nodes", "--output=yaml")
    kubectl.must("delete", "node", "--ignore-not-found", "h200-0")


@pytest.fixture
def drill(kubectl: Kubectl, tmp_path: Path, operator: OperatorProcess) -> Drill:
    def serve() -> None:
        """Be the kubelet of all engines whose image can be pulled."""
        for pod in kubectl.objects("pods", "--selector=specdecode.io/deployment=llama"):
            (engine,) = pod["spec"]["containers"]
            if not pod["spec"].get("nodeName") and engine["image"] != STRANGE_IMAGE:
                report(kubectl, pod["metadata"]["name"], ready=True, state=RUNNING)

    return Drill(kubectl, Repository(tmp_path / "repository"), ServerSideApply(kubectl), "llama", serve)


def pair(name: str = "llama", **changes: object) -> dict[str, str]:
    """A file with a pair."""
    return {f"pairs/{name}.yaml": yaml.safe_dump(deployment(pair_70b(**changes), name))}


@pytest.mark.usefixtures("webhook")
def test_gitops_drill_from_pull_request_to_revert(drill: Drill, nodes: str) -> None:
    first = drill.propose("first", {"nodes.yaml": nodes, **pair()})
    assert first.code == 0
    assert "| `llama` | `2 x H200, TP 2` | `Fits` |" in first.summary
    served = drill.roll_out("first")

    smaller = drill.propose("smaller-draft", pair(speculation=SMALLER))
    assert smaller.code == 0
    assert kv_tokens(smaller.summary) > kv_tokens(first.summary)
    changed = drill.roll_out("smaller-draft")
    assert changed["status"]["plan"]["kvCacheTokens"] > served["status"]["plan"]["kvCacheTokens"]

    drift_is_undone(drill)

    engines = drill.engines
    worse = drill.propose("worse", {**pair(speculation=NO_DRAFT), **pair("other", speculation=STRANGER)})
    assert worse.code == 2
    refused = drill.merge("worse")
    for field, _, words in (each.split(": ", 2) for each in worse.said):
        assert field in refused
        assert words in refused
    assert len(worse.said) == 2
    assert drill.revert() == ""
    drill.be_healthy()
    drill.be_in_sync()
    assert drill.engines == engines


def kv_tokens(summary: str) -> int:
    """Tokens of KV cache in the plan of a summary, on the nodes that there are."""
    (row,) = re.findall(r"^\| `llama` .* \| `([\d,]+) / [\d.]+` \|$", summary, re.MULTILINE)
    return int(row.replace(",", ""))


def drift_is_undone(drill: Drill) -> None:
    """Edit what the operator made; see that engines go on and that it is told."""
    before, kubectl = drill.engines, drill.kubectl
    kubectl.must("scale", "deployment/llama", "--replicas=2")
    eventually(lambda: "spec.replicas" in " ".join(drill.repairs()), "it is told")
    kubectl.must("set", "image", "deployment/llama", f"engine={STRANGE_IMAGE}")
    eventually(lambda: "image" in " ".join(drill.repairs()), "that as well")
    drill.be_healthy()
    eventually(lambda: drill.engines == before, "the engines are those from before")
