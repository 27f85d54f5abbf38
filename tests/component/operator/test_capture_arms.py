"""Captures with several arms against a real API server: what is refused, the Job, and the verdict. No engine runs."""

import json
from typing import Any

import pytest

from tests.component.operator.test_captures import (
    SUMMARY,
    capture,
    captures_pod,
    finish,
    ready,
    said,
    serve,
)
from tests.support.kubectl import Kubectl
from tests.support.objects import TINY_CONFIG
from tests.support.operator_process import OperatorProcess

PLAIN = {"name": "plain", "speculation": {"method": "none"}}
NGRAM = {"name": "ngram", "speculation": {"method": "ngram", "numSpeculativeTokens": 4}}
LARGE = {"model": "org/large", "config": {**TINY_CONFIG, "num_hidden_layers": 1000, "intermediate_size": 65536}}
TOO_LARGE = {"name": "large", "speculation": {"method": "draft_model", "numSpeculativeTokens": 2, "draft": LARGE}}
VERDICT = {"name": "ngram", "verdict": "DoesNotPay", "message": "goodput -9 % (95 %: -12 … -6 %)", "outputs": "Equal"}


@pytest.fixture(autouse=True)
def _running(operator: OperatorProcess) -> None:
    pass


def test_capture_with_an_arm_that_does_not_fit_creates_nothing(kubectl: Kubectl) -> None:
    serve(kubectl)
    capture(kubectl, arms=[PLAIN, TOO_LARGE], deploymentDuringCapture="Suspend")
    message = ready(kubectl, "ArmDoesNotFit")
    assert message.startswith("spec.arms[1] (large): DoesNotFit: ")
    assert said(kubectl, "Accepted")[0] == "False"
    assert said(kubectl, "Pays")[:2] == ("Unknown", "NotCompared")
    assert kubectl.objects("jobs", "--selector=specdecode.io/capture=demo") == []
    assert kubectl.objects("pvc", "--selector=specdecode.io/capture") == []
    assert kubectl.object("deployment", "tiny")["spec"]["replicas"] == 1


def test_capture_with_two_arms_reports_its_verdict(kubectl: Kubectl) -> None:
    serve(kubectl)
    capture(kubectl, arms=[PLAIN, NGRAM], slo={"tpotMs": 50})
    pod = captures_pod(kubectl)
    containers = {each["name"]: each for each in [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]}
    assert "startupProbe" not in containers["engine"]
    (text,) = (each["value"] for each in containers["load"]["env"] if each["name"] == "SPECDECODE_CAPTURE")
    told: dict[str, Any] = json.loads(text)
    assert ["--speculative-config" in arm["command"] for arm in told["arms"]] == [False, True]
    assert (told["repetitions"], told["slo"]) == (2, {"tpotMs": 50})
    comparison = {"baseline": "plain", "levelPercent": 95, "arms": [VERDICT]}
    finish(kubectl, 0, {"summary": SUMMARY, "comparison": comparison})
    ready(kubectl, "Captured")
    assert said(kubectl, "Pays") == ("False", "DoesNotPay", f"ngram against plain: {VERDICT['message']}")
    status = kubectl.object("sdc", "demo")["status"]
    assert status["comparison"]["arms"][0]["verdict"] == "DoesNotPay"
    assert status["path"] == f"{kubectl.namespace}/demo"
    assert "DoesNotPay" in kubectl.must("get", "sdc")
