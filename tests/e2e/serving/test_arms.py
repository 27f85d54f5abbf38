"""Whether speculation pays, asked of a real vLLM on CPU: without it and with n-grams, by turns in one pod."""

from typing import Any

import pytest
import yaml

from specdecode_operator.api.capture_status import ArmVerdict
from tests.e2e.serving.test_capture import EXAMPLES, deployment, on_the_volume
from tests.support.conditions import condition
from tests.support.kubectl import Kubectl
from tests.support.waiting import eventually

# Four engines start one after the other.
pytestmark = pytest.mark.long

REQUESTS = 16
REPETITIONS = 2
DEADLINE_S = 1800
PARTS = {f"{arm}/{repetition + 1}" for arm in ("plain", "ngram") for repetition in range(REPETITIONS)}


@pytest.fixture(scope="module")
def compared(kubectl: Kubectl) -> dict[str, Any]:
    """A capture with two arms that has ended; of a deployment that is suspended, which has no engine to lend."""
    kubectl.must("apply", f"--filename={EXAMPLES / 'tiny-models.yaml'}")
    kubectl.wait("job/tiny-models", "condition=Complete", 300)
    tiny = deployment()
    ngram = tiny["spec"].pop("speculation")
    tiny["spec"] |= {"suspend": True}
    assert kubectl.apply(yaml.safe_dump(tiny)).returncode == 0
    body: dict[str, Any] = yaml.safe_load((EXAMPLES / "does-it-pay-tiny.yaml").read_text())
    body["spec"]["repetitions"] = REPETITIONS
    body["spec"]["arms"] = [{"name": "plain"}, {"name": "ngram", "speculation": ngram}]
    workload = body["spec"]["workload"]
    workload["prompts"]["synthetic"]["outputTokens"] = 32
    workload["phases"][0]["requests"] = REQUESTS
    body["spec"]["checks"] = {"greedyPrompts": 1, "structuredRequests": 0}
    assert kubectl.apply(yaml.safe_dump(body)).returncode == 0

    def ended() -> dict[str, Any] | None:
        found = kubectl.object("sdc", "does-it-pay")
        return found if found.get("status", {}).get("phase") in {"Succeeded", "Failed"} else None

    found = eventually(ended, "the capture has ended", DEADLINE_S)
    assert found["status"]["phase"] == "Succeeded", condition(kubectl, "does-it-pay", "Succeeded", kind="sdc")
    return found


def test_comparison_has_a_verdict_with_figures(kubectl: Kubectl, compared: dict[str, Any]) -> None:
    comparison = compared["status"]["comparison"]
    (arm,) = comparison["arms"]
    assert (comparison["baseline"], arm["name"]) == ("plain", "ngram")
    _, reason, message = condition(kubectl, "does-it-pay", "Pays", kind="sdc")
    assert reason == arm["verdict"] in {*ArmVerdict}
    assert message == f"ngram against plain: {arm['message']}"
    (load,) = arm["loads"]
    assert load["phase"] == "closed-2"
    assert float(load["goodput"]) > 0
    assert float(load["low"]) <= float(load["ratio"]) <= float(load["high"])


def test_ngram_drafts_are_accepted_and_answers_unchanged(compared: dict[str, Any]) -> None:
    (arm,) = compared["status"]["comparison"]["arms"]
    assert arm["outputs"] in {"Equal", "Explained"}
    assert arm["acceptancePercent"] > 0
    assert compared["status"]["summary"]["requests"]["completed"] == REQUESTS


def test_each_repetition_of_each_arm_has_its_own_files(kubectl: Kubectl, compared: dict[str, Any]) -> None:
    folder = f"/capture/{compared['status']['path']}"
    found = on_the_volume(
        kubectl, "look", "find", folder, "-name", "manifest.json", "-printf", "%P\n", claim="does-it-pay-capture"
    )
    assert set(found.split()) == {f"{part}/manifest.json" for part in PARTS}
