"""Engines that replay a recording, in a real cluster: ready at once, they serve, change and drain as vLLM's do."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster.images import engine_image
from tests.support.conditions import condition, wait_for, wait_for_all
from tests.support.kubectl import Kubectl, program
from tests.support.traffic import Traffic
from tests.support.waiting import eventually

EXAMPLE = Path(__file__).parents[3] / "examples/replay.yaml"
ENGINE_DEADLINE_S = 600
MODEL = {
    "schema": 1,
    "origin": {"model": "made-up", "gpu": "NVIDIA-H200", "tp": 2},
    "step_time": {"curve": [[1, 6.0]], "request_us": 20.0, "ranges": {"requests": [1, 64]}},
    "acceptance": {
        "num_speculative_tokens": 5,
        "outcomes": [[5, accepted] for accepted in range(6)],
        "classes": [{"share": 1, "outcomes": [0.2, 0.2, 0.18, 0.12, 0.1, 0.2]}],
    },
}
"""Steps of 6 ms, and drafts of which 2.32 tokens of 5 are accepted."""

ENGINES = "--selector=specdecode.io/deployment=replay"


@pytest.fixture(scope="module")
def deployed(kubectl: Kubectl) -> Iterator[Kubectl]:
    """Two engines of the example that serve."""
    documents = list(yaml.safe_load_all(EXAMPLE.read_text()))
    documents[-1]["spec"]["replicas"] = 2
    assert kubectl.apply(yaml.safe_dump_all(documents)).returncode == 0
    wait_for(kubectl, "replay", "Ready", "Serving")
    yield kubectl
    kubectl.must("delete", "sdd", "replay")


def engines(kubectl: Kubectl) -> list[dict[str, Any]]:
    return kubectl.objects("pods", ENGINES)


def patch(kubectl: Kubectl, **replay: Any) -> None:
    body = json.dumps({"spec": {"engine": {"replay": replay}}})
    kubectl.must("patch", "sdd", "replay", "--type=merge", f"--patch={body}")


def traffic(kubectl: Kubectl) -> Traffic:
    """Clients that stream answers as short and as long as recorded ones are at most."""
    question = {"model": "llama-70b", "prompt": "Once upon a time", "ignore_eos": True}
    url = f"http://{kubectl.service_address('replay')}/v1/completions"
    return Traffic(url, [{**question, "max_tokens": tokens} for tokens in (8, 79)])


def figures(kubectl: Kubectl) -> dict[str, Any]:
    """What the command says that the engines do."""
    command = [str(Path(sys.executable).with_name("specdecode")), "metrics", "replay", "--over=3", "--output=json"]
    path = f"{Path(program('kubectl')).parent}:{os.environ['PATH']}"
    environment = os.environ | {"KUBECONFIG": str(kubectl.kubeconfig), "PATH": path}
    options = (f"--namespace={kubectl.namespace}",)
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_replay_is_planned_for_absent_gpus_and_reported_as_replay(deployed: Kubectl) -> None:
    body = wait_for_all(deployed, "replay", Ready=("True", "Serving"), BudgetAccurate=("Unknown", "Replayed"))
    assert "replaying a recording (spec.engine.replay)" in condition(deployed, "replay", "Ready")[2]
    plan = body["status"]["plan"]
    assert (plan["product"], plan["gpusPerReplica"], plan["verdict"]) == ("NVIDIA-H200", 2, "Fits")


def test_clients_stream_from_replay_and_status_shows_recorded_values(deployed: Kubectl) -> None:
    with traffic(deployed) as requests:
        eventually(lambda: requests.complete > 4, "requests are answered")
    assert requests.failures == []
    assert "from the replayed recording" in wait_for(deployed, "replay", "SpeculationActive", "Replayed")
    status = deployed.object("sdd", "replay")["status"]
    assert status["observed"]["kvCacheTokens"] == status["plan"]["kvCacheTokens"]
    assert status["observed"]["numSpeculativeTokens"] == 5
    assert 20 < status["observed"]["acceptancePercent"] < 90


def test_figures_of_all_replay_engines_are_read_through_the_api_server(deployed: Kubectl) -> None:
    with traffic(deployed) as requests:
        eventually(lambda: requests.complete, "requests are answered")
        told = figures(deployed)
    assert told["engines"] == 2
    assert told["left_out"] == []
    values = {each["name"]: each["value"] for each in told["figures"]}
    assert values["output_tokens_per_second"] > 0
    assert 1 < values["mean_acceptance_length"] < 6


def test_spec_change_during_rollout_ends_at_the_last_spec_without_lost_requests(
    deployed: Kubectl,
) -> None:
    with traffic(deployed) as requests:
        for seed in (2, 4):
            patch(deployed, seed=seed)
        wait_for(deployed, "replay", "Ready", "Serving")
        eventually(lambda: len(engines(deployed)) == 2, "the earlier engines are gone")
        assert all("--seed=4" in pod["spec"]["containers"][0]["command"] for pod in engines(deployed))
        before = requests.complete
        deployed.must("scale", "sdd", "replay", "--replicas=1")
        eventually(lambda: len(engines(deployed)) == 1, "one engine is gone")
        after = requests.complete
        eventually(lambda: requests.complete > after + 2, "the other one serves")
    assert requests.failures == []
    assert requests.complete > before > 0


@pytest.mark.long
def test_emulated_vllm_serves_the_plan_without_weights_and_gpus(kubectl: Kubectl) -> None:
    body = list(yaml.safe_load_all(EXAMPLE.read_text()))[-1] | {"metadata": {"name": "emulated"}}
    trace = {"configMap": {"name": "model"}, "path": "model.json"}
    body["spec"]["engine"] = {
        "version": "0.32",
        "image": engine_image.REFERENCE,
        "replay": {"mode": "Emulated", "trace": trace},
    }
    model = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "model"}}
    model["data"] = {"model.json": json.dumps(MODEL)}
    assert kubectl.apply(yaml.safe_dump_all([model, body])).returncode == 0
    wait_for(kubectl, "emulated", "Ready", "Serving", ENGINE_DEADLINE_S)
    url = f"http://{kubectl.service_address('emulated')}/v1/completions"
    question = {"model": "llama-70b", "prompt": "Once upon a time", "max_tokens": 64, "ignore_eos": True}
    with Traffic(url, [question] * 4) as requests:
        eventually(lambda: requests.complete > 16, "requests are answered")
    assert requests.failures == []
    wait_for(kubectl, "emulated", "SpeculationActive", "Replayed")
    status = kubectl.object("sdd", "emulated")["status"]
    assert status["observed"]["kvCacheTokens"] == status["plan"]["kvCacheTokens"] > 300_000

    def acceptance() -> int:
        return int(kubectl.object("sdd", "emulated")["status"]["observed"]["acceptancePercent"])

    # What was read first may be of a few drafts.
    eventually(lambda: acceptance() in range(36, 57), "of the model, 46 %")
    kubectl.must("delete", "sdd", "emulated")
