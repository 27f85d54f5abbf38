"""One replica over two ranks on the CPU: an engine that exits at once, one that drafts, and one that never does."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.conditions import condition, wait_for
from tests.support.kubectl import Kubectl
from tests.support.small_pair import small_pair
from tests.support.waiting import eventually

EXAMPLES = Path(__file__).parents[3] / "examples"
ENGINES = "--selector=specdecode.io/deployment=tiny"
ENGINE_DEADLINE_S = 600
WORKERS = 'cat /proc/[0-9]*/cmdline | tr "\\0" "\\n" | grep -c "^VLLM::Worker_TP"'
IMPOSSIBLE = "--watermark=-0.5"
"""A value that only the engine itself checks."""

NEVER = [{"from": 1, "to": 16, "numSpeculativeTokens": 0}]


@pytest.fixture(scope="module")
def tiny(kubectl: Kubectl) -> Kubectl:
    """The tiny pair over two ranks, with an argument that no engine starts with."""
    kubectl.must("apply", f"--filename={EXAMPLES / 'tiny-models.yaml'}")
    kubectl.wait("job/tiny-models", "condition=Complete", 300)
    body = small_pair()
    body["spec"]["parallelism"] = {"tensor": 2}
    body["spec"]["accelerator"] |= {"memoryGiB": 10, "kvCacheGiB": 2}
    # A split embedding is compiled even for eager engines, and the image has no compiler.
    body["spec"]["engine"] |= {"extraArgs": [IMPOSSIBLE], "env": [{"name": "TORCHDYNAMO_DISABLE", "value": "1"}]}
    assert kubectl.apply(yaml.safe_dump(body)).returncode == 0
    return kubectl


def patch(kubectl: Kubectl, **spec: Any) -> None:
    kubectl.must("patch", "sdd", "tiny", "--type=merge", f"--patch={json.dumps({'spec': spec})}")


def generate(kubectl: Kubectl, tokens: int) -> int:
    """Ask the Service for tokens; return how many came."""
    question = {"model": "target", "prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://{kubectl.service_address('tiny')}/v1/completions",
        json.dumps(question | {"temperature": 0}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=300) as response:
        answer: int = json.load(response)["usage"]["completion_tokens"]
    return answer


def engine(kubectl: Kubectl) -> str:
    """Name of the one engine that is left."""

    def lone() -> str | None:
        pods = kubectl.objects("pods", ENGINES)
        return pods[0]["metadata"]["name"] if len(pods) == 1 else None

    return eventually(lone, "one engine is left", ENGINE_DEADLINE_S)


@pytest.mark.long
def test_engine_exit_at_start_is_reported_with_its_cause(tiny: Kubectl) -> None:
    message = wait_for(tiny, "tiny", "Ready", "EngineRefusesArguments", ENGINE_DEADLINE_S)
    assert "watermark" in message
    assert condition(tiny, "tiny", "Stalled")[0] == "True"


@pytest.mark.long
def test_two_ranks_serve_and_draft(tiny: Kubectl) -> None:
    patch(tiny, engine={"extraArgs": []})
    wait_for(tiny, "tiny", "Ready", "Serving", ENGINE_DEADLINE_S)
    assert tiny.must("exec", engine(tiny), "--", "sh", "-c", WORKERS).strip() == "2"
    assert sum(generate(tiny, 64) for _ in range(3)) == 192
    wait_for(tiny, "tiny", "SpeculationActive", "Drafting")
    status = tiny.object("sdd", "tiny")["status"]
    assert status["plan"]["tensor"] == 2
    assert status["observed"]["kvCacheTokens"] == status["plan"]["kvCacheTokens"]
    assert 5 < status["observed"]["acceptancePercent"] < 95


@pytest.mark.long
def test_engine_that_never_drafts_is_reported(tiny: Kubectl) -> None:
    patch(tiny, speculation={"numSpeculativeTokensByBatchSize": NEVER})
    wait_for(tiny, "tiny", "SpeculationActive", "NoTraffic", ENGINE_DEADLINE_S)
    assert sum(generate(tiny, 64) for _ in range(3)) == 192
    message = wait_for(tiny, "tiny", "SpeculationActive", "NotDrafting")
    assert "numSpeculativeTokensByBatchSize" in message
    wait_for(tiny, "tiny", "Ready", "SpeculationInactive")
