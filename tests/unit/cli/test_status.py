"""`specdecode status`: what a screen and a table show, and what untrusted text cannot do."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml

from specdecode_operator.cli.options import ExitCode
from tests.unit.cli.capture.conftest import Cluster
from tests.unit.cli.conftest import Specdecode

GIB = 2**30


def ago(**time: int) -> str:
    return (datetime.now(UTC) - timedelta(**time)).strftime("%Y-%m-%dT%H:%M:%SZ")


def chat(name: str = "chat", *, message: str = "2 of 2 engines ready", **status: Any) -> dict[str, Any]:
    """Return a deployment of two replicas that serve."""
    memory = {
        "totalBytes": 140 * GIB,
        "requestedBytes": 126 * GIB,
        "targetWeightsBytes": 66 * GIB,
        "draftWeightsBytes": 8 * GIB,
        "availableKvBytes": 50 * GIB,
    }
    plan = {
        "verdict": "Fits",
        "product": "NVIDIA-H200",
        "tensor": 2,
        "gpusPerReplica": 2,
        "targetQuantization": "BF16",
        "maxModelLen": 32_768,
        "maxConcurrency": "12.3",
        "kvCacheTokens": 402_000,
        "perGpu": memory,
    }
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "Serving",
        "message": message,
        "lastTransitionTime": ago(hours=3),
    }
    figures = [{"name": "output_tokens_per_second", "value": "1234"}, {"name": "preemptions_per_second", "value": "0"}]
    return {
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"{name}-uid",
            "generation": 2,
            "creationTimestamp": ago(days=3),
            "managedFields": [{"manager": "kubectl"}],
        },
        "spec": {
            "target": {"model": "meta-llama/Llama-3.1-70B-Instruct"},
            "speculation": {"method": "DraftModel", "numSpeculativeTokens": 5, "draft": {"model": "meta-llama/8B"}},
            "replicas": 2,
        },
        "status": {
            "observedGeneration": 2,
            "ready": "2/2",
            "conditions": [ready],
            "plan": plan,
            "observed": {"kvCacheTokens": 398_112},
            "acceptance": {"text": "71%", "meanLength": "3.13", "measuredWith": "draft_model, K=5"},
            "figures": {"source": "Pods", "overSeconds": 300, "values": figures},
            "policy": {
                "mode": "Advise",
                "action": "Keep",
                "outcome": "Kept",
                "reason": "BestArm",
                "message": "no change",
            },
            **status,
        },
    }


def event(number: int, **changes: Any) -> dict[str, Any]:
    metadata = {"name": f"e{number}", "managedFields": []}
    told = {"type": "Normal", "reason": f"Reason{number}", "message": "m", "lastTimestamp": ago(days=number + 2)}
    return {"metadata": metadata, **told, **changes}


def holds(cluster: Cluster, *bodies: dict[str, Any], events: int = 0) -> None:
    found = {f"specdecodedeployment/{each['metadata']['name']}": each for each in bodies}
    cluster.holds(**found, **{f"event/{number}": event(number) for number in range(events)})


def section(text: str, title: str) -> list[str]:
    """Return the lines under a title."""
    block = next(block for block in text.split("\n\n") if block.startswith(title))
    return [line.strip() for line in block.splitlines()[1:]]


def test_screen_shows_planned_and_measured_startup(cluster: Cluster, specdecode: Specdecode) -> None:
    planned = {
        "preparation": {"fastestSeconds": 0, "slowestSeconds": 760},
        "engine": {"fastestSeconds": 18, "slowestSeconds": 820},
        "deadlineSeconds": 1035,
    }
    body = chat()
    body["status"]["plan"]["startup"] = planned
    body["status"]["observed"]["startup"] = {"pod": "chat-0", "engineSeconds": 113, "loadSeconds": 15}
    holds(cluster, body)
    (line,) = (each for each in section(specdecode("status", "chat").stdout, "Plan") if each.startswith("Start-up"))
    assert line.split(":", 1)[1].strip() == "18 to 820 s planned (limit 1,035 s); measured engine 113 s, load 15 s"
    del body["status"]["plan"]["startup"], body["status"]["observed"]["startup"]
    holds(cluster, body)
    assert "Start-up" not in specdecode("status", "chat").stdout


def test_screen_shows_every_section_of_a_deployment(cluster: Cluster, specdecode: Specdecode) -> None:
    holds(cluster, chat(), events=2)
    answer = specdecode("status", "chat", "-n", "team")
    assert answer.exit_code == 0, answer.stderr
    header = dict(line.split(":", 1) for line in section(answer.stdout, "SpecDecodeDeployment team/chat"))
    assert {key: value.strip() for key, value in header.items()} == {
        "Model": "meta-llama/Llama-3.1-70B-Instruct",
        "Method": "DraftModel, K 5",
        "Draft": "meta-llama/8B",
        "GPUs": "4 x NVIDIA-H200",
        "Ready": "2/2 replicas",
        "Age": "3d",
    }
    assert section(answer.stdout, "Conditions")[1].split(None, 4) == [
        "Ready",
        "True",
        "Serving",
        "3h",
        "2 of 2 engines ready",
    ]
    plan = " ".join(section(answer.stdout, "Plan"))
    for words in (
        "Fits",
        "2 x NVIDIA-H200 per replica (TP 2)",
        "126.0 of 140.0 GiB",
        "KV cache 50.0",
        "402,000",
        "398,112",
    ):
        assert words in plan
    measured = section(answer.stdout, "Acceptance and throughput (over 300 s, from Pods)")
    assert "71%, mean acceptance length 3.13" in measured[0]
    assert measured[1].split() == ["output_tokens_per_second:", "1234", "tokens/s"]
    assert len(measured) == 2, "other figures are those of specdecode metrics"
    assert "Keep: Kept (BestArm)" in " ".join(section(answer.stdout, "Policy"))
    assert [line.split()[:3] for line in section(answer.stdout, "Events")[1:]] == [
        ["2d", "Normal", "Reason0"],
        ["3d", "Normal", "Reason1"],
    ]
    (asked,) = [call for call in cluster.calls("get") if "events" in call]
    assert "--field-selector=involvedObject.uid=chat-uid" in asked
    assert "\x1b" not in answer.output


def test_only_the_newest_events_are_shown(cluster: Cluster, specdecode: Specdecode) -> None:
    holds(cluster, chat(), events=12)
    found = json.loads(specdecode("status", "chat", "-o", "json").stdout)["deployments"][0]
    assert [each["reason"] for each in found["events"]] == [f"Reason{number}" for number in range(8)]


def test_method_chosen_by_the_policy_is_shown(cluster: Cluster, specdecode: Specdecode) -> None:
    chosen = {"mode": "Enforce", "arm": "k3", "speculation": {"method": "DraftModel", "numSpeculativeTokens": 3}}
    holds(cluster, chat(policy=chosen))
    (method,) = [line for line in specdecode("status", "chat").stdout.splitlines() if "Method:" in line]
    assert "K 3 (chosen by the policy)" in method


def test_deployment_without_a_status_is_shown(cluster: Cluster, specdecode: Specdecode) -> None:
    body = chat()
    del body["status"], body["spec"]["speculation"]
    holds(cluster, body)
    answer = specdecode("status", "chat")
    assert answer.exit_code == 0, answer.output
    assert section(answer.stdout, "Plan") == ["none"]
    assert section(answer.stdout, "Events") == ["none"]
    assert specdecode("status").exit_code == 0


def test_status_of_an_earlier_generation_is_marked(cluster: Cluster, specdecode: Specdecode) -> None:
    holds(cluster, chat(observedGeneration=1))
    assert "Conditions (of generation 1, but the spec has generation 2)" in specdecode("status", "chat").stdout


@pytest.mark.parametrize("status", [{}, {"observedGeneration": -1}], ids=["none", "default of the CRD"])
def test_object_that_no_operator_has_seen_says_so(
    cluster: Cluster, specdecode: Specdecode, status: dict[str, Any]
) -> None:
    holds(cluster, {**chat(), "status": status})
    text = specdecode("status", "chat").stdout
    assert section(text, "Conditions\n") == ["no operator has reconciled it yet"]
    assert "generation" not in text


def test_messages_are_whole_and_folded_to_the_width(
    cluster: Cluster, specdecode: Specdecode, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = " ".join(f"word{number}" for number in range(100))
    body = chat(message=message)
    body["status"]["policy"]["message"] = message
    cluster.holds(**{"specdecodedeployment/chat": body, "event/1": event(1, message=message)})
    monkeypatch.delenv("COLUMNS", raising=False)
    assert specdecode("status", "chat").stdout.count(message) == 3
    monkeypatch.setenv("COLUMNS", "120")
    lines = specdecode("status", "chat").stdout.splitlines()
    assert max(map(len, lines)) <= 120
    assert sum(line.split().count("word99") for line in lines) == 3


def test_status_without_a_name_has_a_row_per_deployment(cluster: Cluster, specdecode: Specdecode) -> None:
    holds(cluster, chat(), chat("code", plan={"verdict": "Fits", "product": "CPU"}))
    heading, *rows = specdecode("status", "-A", "-l", "team=chat").stdout.splitlines()
    assert heading.split()[:4] == ["NAMESPACE", "NAME", "READY", "STATUS"]
    row = "team chat 2/2 Serving meta-llama/Llama-3.1-70B-Instruct DraftModel 5 Fits 4 x NVIDIA-H200 71% 3d"
    assert " ".join(rows[0].split()) == row
    assert rows[1].split()[1] == "code"
    (call,) = cluster.calls("get")
    assert {"--all-namespaces", "--selector=team=chat"} <= set(call)
    assert specdecode("status").stdout.split()[0] == "NAME"


def test_json_and_yaml_hold_the_object_and_its_events(cluster: Cluster, specdecode: Specdecode) -> None:
    body = chat()
    holds(cluster, body, events=1)
    (found,) = yaml.safe_load(specdecode("status", "chat", "-o", "yaml").stdout)["deployments"]
    assert found["deployment"]["status"] == body["status"]
    assert "managedFields" not in found["deployment"]["metadata"]
    assert len(found["events"]) == 1
    (listed,) = json.loads(specdecode("status", "-o", "json").stdout)["deployments"]
    assert listed == {"deployment": found["deployment"], "events": None}


@pytest.mark.parametrize("arguments", [("chat",), (), ("chat", "-o", "json"), ("chat", "-o", "yaml")])
def test_control_characters_in_the_object_are_escaped(
    cluster: Cluster, specdecode: Specdecode, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    attack = "a\x1b[2J\u202eb\nReady  True  Forged\x9b2K"
    body = chat(message=attack, ready=attack, acceptance={"text": attack, "measuredWith": attack})
    body["spec"]["target"]["model"] = attack
    cluster.holds(**{"specdecodedeployment/chat": body, "event/1": event(1, message=attack, reason=attack)})
    monkeypatch.setenv("NO_COLOR", "1")
    answer = specdecode("status", *arguments)
    assert answer.exit_code == 0, answer.output
    assert answer.stdout.replace("\n", "").isprintable()
    assert not any(line.lstrip().startswith("Ready  True  Forged") for line in answer.stdout.splitlines())


def test_watch_prints_again_after_a_change(
    cluster: Cluster, specdecode: Specdecode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdecode_operator.cli.terminal._POLL_S", 0.0)
    cluster.holds(**{"specdecodedeployment/chat": [chat(), chat(), chat(ready="1/2"), None]})
    answer = specdecode("status", "chat", "-w")
    assert answer.exit_code == ExitCode.INVALID, "the API server is away"
    ready = [line.split()[1] for line in answer.stdout.splitlines() if line.strip().startswith("Ready:")]
    assert ready == ["2/2", "1/2"]


def test_mistyped_name_suggests_a_similar_one(cluster: Cluster, specdecode: Specdecode) -> None:
    holds(cluster, chat())
    answer = specdecode("status", "caht")
    assert answer.exit_code == ExitCode.INVALID
    assert "did you mean chat?" in answer.stderr


def test_canary_counts_are_shown_with_the_policy(cluster: Cluster, specdecode: Specdecode) -> None:
    counts = {"right": 41, "wrong": 2, "unconfirmed": 1, "failed": 0}
    holds(cluster, chat(canaries={**counts, "unsupported": "HTTP 400"}))
    policy = section(specdecode("status", "chat", "-n", "team").stdout, "Policy")
    assert policy[-1].split(None, 1)[1] == "41 right, 2 wrong, 1 unconfirmed, 0 failed, not asked: HTTP 400"
