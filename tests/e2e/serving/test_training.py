"""A draft head from captured answers, through a real trainer and a real vLLM: trained, judged, served, rolled back."""

import json
import re
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

from devcluster.cluster.cluster import Cluster
from devcluster.demo import specdecode
from devcluster.images.trainer_image import build_trainer_image
from tests.support.conditions import condition, wait_for
from tests.support.kubectl import Kubectl
from tests.support.waiting import eventually

EXAMPLES: Final = Path(__file__).parents[3] / "examples"
ENGINE_DEADLINE_S: Final = 900
TRAINING_DEADLINE_S: Final = 3600
WORDS_OF_TODAY: Final = range(514, 1024)
"""Words of the language that the capture contains: examples/tiny_language.py."""

pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Served:
    """What an engine answered, and how it drafted."""

    answers: list[str]
    acceptance: float


def prompts() -> list[str]:
    """Prompts that no capture has sent."""
    random = Random(7)
    return [" ".join(f"w{random.choice(WORDS_OF_TODAY)}" for _ in range(16)) for _ in range(12)]


def get(kubectl: Kubectl, path: str, question: Any = None) -> bytes:
    request = urllib.request.Request(
        f"http://{kubectl.service_address('language')}{path}",
        None if question is None else json.dumps(question).encode(),
        {"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=300) as response:
        body: bytes = response.read()
    return body


def drafted(kubectl: Kubectl) -> tuple[float, float]:
    """Accepted and drafted tokens so far, by the engine's own counters."""
    text = get(kubectl, "/metrics").decode()
    accepted, total = (
        sum(map(float, re.findall(rf"^vllm:spec_decode_num_{name}_tokens_total{{[^}}]*}} (\S+)$", text, re.MULTILINE)))
        for name in ("accepted", "draft")
    )
    return accepted, total


def serve(kubectl: Kubectl) -> Served:
    accepted, total = drafted(kubectl)
    question = {"model": "target", "max_tokens": 32, "temperature": 0, "ignore_eos": True}
    answers = [
        json.loads(get(kubectl, "/v1/completions", {**question, "prompt": each}))["choices"][0]["text"]
        for each in prompts()
    ]
    accepted_then, total_then = drafted(kubectl)
    return Served(answers, (accepted_then - accepted) / (total_then - total))


def trained_draft(kubectl: Kubectl) -> dict[str, Any]:
    found: dict[str, Any] = kubectl.object("sdd", "language")["status"].get("trainedDraft", {})
    return found


@pytest.fixture(scope="module")
def before(cluster: Cluster, kubectl: Kubectl) -> Served:
    """The engine with its untrained head."""
    cluster.load_image(build_trainer_image())
    kubectl.must("apply", f"--filename={EXAMPLES / 'tiny-language.yaml'}")
    kubectl.wait("job/tiny-language", "condition=Complete", 300)
    kubectl.must("apply", f"--filename={EXAMPLES / 'tiny-language-cpu.yaml'}")
    kubectl.wait("sdd/language", "condition=Ready", ENGINE_DEADLINE_S)
    return serve(kubectl)


@pytest.fixture(scope="module")
def training(kubectl: Kubectl, before: Served) -> dict[str, Any]:
    """A training on a capture of today's traffic, after its measurement."""
    assert before.acceptance < 0.1
    kubectl.must("apply", f"--filename={EXAMPLES / 'capture-language.yaml'}")
    kubectl.wait("sdc/today", "condition=Succeeded", ENGINE_DEADLINE_S)
    kubectl.must("apply", f"--filename={EXAMPLES / 'training-tiny.yaml'}")

    def ended() -> dict[str, Any] | None:
        body: dict[str, Any] = kubectl.object("sdtr", "today")
        return body if body.get("status", {}).get("phase") in {"Complete", "Failed"} else None

    return eventually(ended, "the training has ended", TRAINING_DEADLINE_S)


@pytest.fixture(scope="module")
def after(kubectl: Kubectl, training: dict[str, Any]) -> Served:
    """The engine with the head that the operator promoted."""
    assert training["status"]["phase"] == "Complete"
    wait_for(kubectl, "today", "Promoted", "Promoted", ENGINE_DEADLINE_S, kind="sdtr")
    kubectl.wait("sdd/language", "condition=Ready", ENGINE_DEADLINE_S)
    return serve(kubectl)


def test_head_is_better_on_held_out_prompts_with_an_interval_that_excludes_no_change(
    kubectl: Kubectl, training: dict[str, Any]
) -> None:
    assert condition(kubectl, "today", "Better", "sdtr")[:2] == ("True", "Better")
    steps = training["status"]["verdict"]["tokensPerStep"]
    assert steps["stepCost"] in {"Equal", "Lower"}
    assert 1.5 < float(steps["low"]) <= float(steps["ratio"]) <= float(steps["high"])
    assert training["status"]["rows"]["holdout"] >= 30


def test_promoted_head_is_accepted_on_new_prompts_and_answers_are_the_same(before: Served, after: Served) -> None:
    assert after.acceptance > 0.7
    assert after.answers == before.answers


def test_status_names_the_head_and_the_spec_is_the_users(
    kubectl: Kubectl, training: dict[str, Any], after: Served
) -> None:
    assert after.acceptance > 0
    found = trained_draft(kubectl)
    assert (found["training"], found["sha256"]) == ("today", training["status"]["head"]["sha256"])
    assert kubectl.object("sdd", "language")["spec"]["speculation"]["draft"]["model"] == "head"


def test_rollback_on_purpose_brings_the_draft_of_the_spec_back(kubectl: Kubectl, before: Served, after: Served) -> None:
    assert after.acceptance > 0
    specdecode(kubectl, "training", "rollback", "today", f"--namespace={kubectl.namespace}")
    eventually(lambda: "training" not in trained_draft(kubectl), "the head is withdrawn", ENGINE_DEADLINE_S)

    def served_by_one_engine() -> bool:
        status = kubectl.object("sdd", "language")["status"]
        pods = kubectl.objects("pods", "--selector=specdecode.io/deployment=language")
        commands = [" ".join(each["spec"]["containers"][0].get("command", [])) for each in pods]
        is_ready = any(each["type"] == "Ready" and each["status"] == "True" for each in status["conditions"])
        return is_ready and len(commands) == 1 and "today/head" not in commands[0]

    eventually(served_by_one_engine, "only the engine of the spec serves", ENGINE_DEADLINE_S)
    back = serve(kubectl)
    assert back.acceptance < 0.1
    assert back.answers == before.answers
