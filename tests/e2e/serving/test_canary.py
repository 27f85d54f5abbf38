"""A canary in a real cluster, under traffic through the Service: one is promoted, and a slower one is rolled back.

The engines replay recordings, so their speed does not depend on the machine.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.conditions import condition, wait_for
from tests.support.kubectl import Kubectl
from tests.support.traffic import Traffic
from tests.support.waiting import eventually

# A verdict takes 7 blocks of a minute.
pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).parents[3] / "examples/replay.yaml"
VERDICT_DEADLINE_S = 1800
ENGINES = "--selector=specdecode.io/deployment=replay"
TOKENS = 60  # after the first one
CLIENTS = 4
ROOM_FOR_NOISE = {"tpot": 40, "ttft": 80, "errors": 5}
"""Limits that delays on a busy machine do not exceed."""


def recording(k: int, step_ms: float) -> str:
    """Return a recording of steps with K accepted tokens."""
    meta = {"model": "synthetic", "schema": 1, "source": "synthetic"}
    speculative = {"method": "draft_model", "num_speculative_tokens": k}
    steps = TOKENS // (k + 1)
    record = {
        "arrival_ms": 0.0,
        "prompt_tokens": 400,
        "output_tokens": TOKENS + 1,
        "ttft_ms": 40.0,
        "itl_ms": [step_ms] * steps,
        "itl_tokens": [k + 1] * steps,
        "finish_reason": "length",
    }
    return "".join(f"{json.dumps(line)}\n" for line in ({"meta": {**meta, "speculative": speculative}}, record))


RECORDINGS = {
    "k5.jsonl": recording(5, 30.0),
    "k2.jsonl": recording(2, 15.0),  # half the tokens in half the time
    "slow.jsonl": recording(5, 60.0),
}


@pytest.fixture(scope="module")
def serving(kubectl: Kubectl) -> Iterator[Kubectl]:
    """Two engines that serve with K = 5 and strategy Canary."""
    config_map, deployment = yaml.safe_load_all(EXAMPLE.read_text())
    config_map["data"] = RECORDINGS
    deployment["spec"] |= {
        "replicas": 2,
        "rollout": {"strategy": "Canary", "canary": {"maxLossPercent": ROOM_FOR_NOISE}},
    }
    deployment["spec"]["engine"]["replay"]["trace"]["path"] = "k5.jsonl"
    assert kubectl.apply(yaml.safe_dump_all([config_map, deployment])).returncode == 0
    wait_for(kubectl, "replay", "Ready", "Serving")
    assert condition(kubectl, "replay", "Canary")[:2] == ("True", "NothingToCompare")
    yield kubectl
    kubectl.must("delete", "sdd", "replay")


def change(kubectl: Kubectl, k: int, path: str, **replay: Any) -> None:
    spec = {"speculation": {"numSpeculativeTokens": k}, "engine": {"replay": {"trace": {"path": path}, **replay}}}
    kubectl.must("patch", "sdd", "replay", "--type=merge", f"--patch={json.dumps({'spec': spec})}")


def recordings_served(kubectl: Kubectl) -> dict[str, str]:
    """Return the recording that each engine replays, by pod."""
    pods = kubectl.objects("pods", ENGINES)
    return {pod["metadata"]["name"]: Path(pod["spec"]["containers"][0]["command"][3]).name for pod in pods}


def ready_endpoints(kubectl: Kubectl) -> set[str]:
    """Return the pods to which the Service sends new connections."""
    slices = kubectl.objects("endpointslices", "--selector=kubernetes.io/service-name=replay")
    endpoints = (each for found in slices for each in found["endpoints"] or ())
    return {each["targetRef"]["name"] for each in endpoints if each["conditions"]["ready"]}


def served_alike(kubectl: Kubectl, before: dict[str, str]) -> None:
    """Wait until the canary is gone, and check that the same engines serve."""
    eventually(lambda: recordings_served(kubectl) == before, "the canary is gone, and the same engines are left")
    assert condition(kubectl, "replay", "Ready")[:2] == ("False", "RolledBack")
    assert condition(kubectl, "replay", "Available")[0] == "True"
    assert {each["metadata"]["name"] for each in kubectl.objects("deployments")} == {"replay"}


def worse(kubectl: Kubectl) -> set[str]:
    figures = kubectl.object("sdd", "replay")["status"]["canary"]["figures"]
    return {each["name"] for each in figures if each["verdict"] == "Worse"}


def events(kubectl: Kubectl) -> list[str]:
    return [each["reason"] for each in kubectl.objects("events") if each["involvedObject"]["name"] == "replay"]


def traffic(kubectl: Kubectl) -> Traffic:
    question = {"model": "llama-70b", "prompt": "Once upon a time", "ignore_eos": True, "max_tokens": TOKENS + 1}
    return Traffic(f"http://{kubectl.service_address('replay')}/v1/completions", [question] * CLIENTS)


def test_a_canary_that_is_not_worse_is_promoted_and_no_request_fails(serving: Kubectl) -> None:
    before = recordings_served(serving)
    with traffic(serving) as requests:
        change(serving, 2, "k2.jsonl")
        wait_for(serving, "replay", "Canary", "CanaryComparing")
        both = recordings_served(serving)
        assert before.items() <= both.items(), "the earlier engines serve on"
        assert [both[each] for each in both.keys() - before.keys()] == ["k2.jsonl"]
        eventually(lambda: ready_endpoints(serving) == both.keys(), "the Service distributes over both pools")
        assert condition(serving, "replay", "Available")[0] == "True"

        wait_for(serving, "replay", "Canary", "Promoted", VERDICT_DEADLINE_S)
        wait_for(serving, "replay", "Ready", "Serving")
        eventually(
            lambda: sorted(recordings_served(serving).values()) == ["k2.jsonl"] * 2, "only changed engines are left"
        )
        answered = requests.complete
        eventually(lambda: requests.complete > answered + CLIENTS, "the changed engines answer")
    assert requests.failures == []
    assert {each["metadata"]["name"] for each in serving.objects("deployments")} == {"replay"}
    assert "Promoted" in events(serving)
    canary = serving.object("sdd", "replay")["status"]["canary"]
    assert {each["name"]: each["verdict"] for each in canary["figures"]} == dict.fromkeys(ROOM_FOR_NOISE, "Holds")
    assert (float(canary["tokensPerStep"]), float(canary["earlierTokensPerStep"])) == (3.0, 6.0)
    assert 0.8 <= float(canary["loadRatio"]) <= 1.25


def test_a_slower_canary_goes_and_the_earlier_engines_serve_on(serving: Kubectl) -> None:
    before = recordings_served(serving)
    with traffic(serving) as requests:
        change(serving, 5, "slow.jsonl")
        wait_for(serving, "replay", "Canary", "CanaryComparing")
        assert "slow.jsonl" in recordings_served(serving).values()
        wait_for(serving, "replay", "Canary", "CanaryFailed", VERDICT_DEADLINE_S)
        served_alike(serving, before)
        answered = requests.complete
        eventually(lambda: requests.complete > answered + CLIENTS, "the earlier engines answer")
    assert requests.failures == []
    assert events(serving).count("CanaryFailed") == 1
    assert worse(serving) == {"tpot"}


def test_a_canary_that_rejects_requests_goes(serving: Kubectl) -> None:
    before = recordings_served(serving)
    with traffic(serving) as requests:
        change(serving, 5, "k5.jsonl", failures={"errorPercent": 50})
        wait_for(serving, "replay", "Canary", "CanaryFailed", VERDICT_DEADLINE_S)
        served_alike(serving, before)
        failed, answered = len(requests.failures), requests.complete
        eventually(lambda: requests.complete > answered + 10 * CLIENTS, "the earlier engines answer")
        assert len(requests.failures) == failed, "only the canary failed requests"
    assert {each.split(":")[0] for each in requests.failures} == {"HTTP 500"}
    assert "errors" in worse(serving)
