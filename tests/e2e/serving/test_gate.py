"""The gate of a rollout, on a real vLLM: engines that serve as well roll out, those with a worse draft do not."""

import json
from typing import Any

import pytest
import yaml

from tests.e2e.serving.test_capture import EXAMPLES
from tests.support.conditions import condition, wait_for
from tests.support.kubectl import Kubectl
from tests.support.small_pair import small_pair
from tests.support.waiting import eventually

# Seven engines start one after the other.
pytestmark = pytest.mark.long

DEADLINE_S = 1800
ENGINES = "--selector=specdecode.io/deployment=tiny"
ROOM_FOR_NOISE = {"goodput": 90, "stepTime": 90, "latency": 90, "acceptance": 30}
"""What a busy machine does to times says nothing of an engine."""


def models() -> list[dict[str, Any]]:
    """The tiny pair, and another one whose draft knows nothing of the target."""
    objects: list[dict[str, Any]] = list(yaml.safe_load_all((EXAMPLES / "tiny-models.yaml").read_text()))
    stranger = json.loads(json.dumps(next(each for each in objects if each["kind"] == "Job")))
    stranger["metadata"]["name"] = "stranger"
    stranger["spec"]["template"]["spec"]["containers"][0]["args"] = ["--out=/models/stranger", "--seed=1"]
    return [*objects, stranger]


def golden() -> dict[str, Any]:
    body: dict[str, Any] = yaml.safe_load((EXAMPLES / "capture-tiny.yaml").read_text())
    body["metadata"]["name"] = "golden"
    workload = body["spec"]["workload"]
    workload["prompts"]["synthetic"]["outputTokens"] = 32
    workload["phases"] = [{"name": "closed-2", "pattern": "Closed", "concurrency": 2, "requests": 48}]
    return body


def change(kubectl: Kubectl, **spec: Any) -> None:
    kubectl.must("patch", "sdd", "tiny", "--type=merge", f"--patch={json.dumps({'spec': spec})}")


def served_by(kubectl: Kubectl) -> list[str]:
    """What the one engine was started with, once it serves and no other is left."""

    def look() -> list[str] | None:
        pods = kubectl.objects("pods", ENGINES)
        assert len(pods) == 1
        conditions = {each["type"]: each["status"] for each in pods[0]["status"]["conditions"]}
        assert conditions["Ready"] == "True"
        command: list[str] = pods[0]["spec"]["containers"][0]["command"]
        return command

    return eventually(look, "one engine serves", DEADLINE_S)


@pytest.fixture(scope="module")
def guarded(kubectl: Kubectl) -> Kubectl:
    """A deployment that serves behind a gate, and its golden capture."""
    assert kubectl.apply(yaml.safe_dump_all(models())).returncode == 0
    for job in ("tiny-models", "stranger"):
        kubectl.wait(f"job/{job}", "condition=Complete", 300)
    tiny = small_pair()
    tiny["spec"]["rollout"] = {"gate": {"capture": "golden", "maxLossPercent": ROOM_FOR_NOISE}}
    assert kubectl.apply(yaml.safe_dump(tiny)).returncode == 0
    wait_for(kubectl, "tiny", "Ready", "Serving", DEADLINE_S)
    assert kubectl.apply(yaml.safe_dump(golden())).returncode == 0
    kubectl.wait("sdc/golden", "condition=Succeeded", DEADLINE_S)
    return kubectl


def test_gate_passes_engines_with_equal_goodput(guarded: Kubectl) -> None:
    change(guarded, serving={"maxNumBatchedTokens": 1024})
    said = wait_for(guarded, "tiny", "Gate", "Passed", DEADLINE_S)
    assert said.startswith("holds: goodput in phase closed-2 ")
    wait_for(guarded, "tiny", "Ready", "Serving", DEADLINE_S)
    command = served_by(guarded)
    assert command[command.index("--max-num-batched-tokens") + 1] == "1024"


def test_gate_fails_engines_with_a_worse_draft(guarded: Kubectl) -> None:
    before = served_by(guarded)
    change(guarded, speculation={"draft": {"model": "stranger/draft"}})
    said = wait_for(guarded, "tiny", "Gate", "GateFailed", DEADLINE_S)
    assert "Regressed: " in said
    assert "accept" in said
    assert condition(guarded, "tiny", "Ready")[1] == "GateFailed"
    assert served_by(guarded) == before
