"""Real engines that change, shrink, die and fail to start: no request is lost, and the conditions tell the story."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster.install import NAMESPACE, OPERATOR
from tests.support.conditions import condition, current, wait_for, wait_for_all
from tests.support.engine_core import kill_engine_core
from tests.support.kubectl import Kubectl
from tests.support.small_pair import small_pair
from tests.support.traffic import Traffic
from tests.support.waiting import eventually

EXAMPLES = Path(__file__).parents[3] / "examples"
ENGINES = "--selector=specdecode.io/deployment=tiny"
ENGINE_DEADLINE_S = 600


@pytest.fixture(scope="module")
def tiny(kubectl: Kubectl) -> Iterator[Kubectl]:
    """Two engines of the tiny pair that serve, on a machine that may have two cores only."""
    system = kubectl.within(NAMESPACE)
    system.must("set", "resources", f"deployment/{OPERATOR}", "--requests=cpu=0")
    system.must("rollout", "status", f"deployment/{OPERATOR}", "--timeout=300s", timeout_s=310)
    kubectl.must("apply", f"--filename={EXAMPLES / 'tiny-models.yaml'}")
    kubectl.wait("job/tiny-models", "condition=Complete", 300)
    body = small_pair()
    body["spec"]["replicas"] = 2
    assert kubectl.apply(yaml.safe_dump(body)).returncode == 0
    wait_for(kubectl, "tiny", "Ready", "Serving", ENGINE_DEADLINE_S)
    yield kubectl
    kubectl.must("delete", "sdd", "tiny")
    eventually(lambda: not engines(kubectl), "the engines are gone")
    system.must("set", "resources", f"deployment/{OPERATOR}", "--requests=cpu=50m")
    system.must("rollout", "status", f"deployment/{OPERATOR}", "--timeout=300s", timeout_s=310)


def engines(kubectl: Kubectl) -> list[dict[str, Any]]:
    return kubectl.objects("pods", ENGINES)


def patch(kubectl: Kubectl, **spec: Any) -> None:
    kubectl.must("patch", "sdd", "tiny", "--type=merge", f"--patch={json.dumps({'spec': spec})}")


def traffic(kubectl: Kubectl) -> Traffic:
    url = f"http://{kubectl.service_address('tiny')}/v1/completions"
    question = {"model": "target", "prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}
    return Traffic(url, [{**question, "max_tokens": tokens} for tokens in (32, 900)])


def lone_engine(kubectl: Kubectl) -> dict[str, Any]:
    """The one engine that is left when one is asked for, once it serves."""
    patch(kubectl, replicas=1)
    eventually(lambda: len(engines(kubectl)) == 1, "one engine is left")
    wait_for(kubectl, "tiny", "Ready", "Serving", ENGINE_DEADLINE_S)
    (pod,) = engines(kubectl)
    return pod


def drafted(pod: dict[str, Any]) -> int:
    """K that an engine was started with."""
    command = pod["spec"]["containers"][0]["command"]
    k: int = json.loads(command[command.index("--speculative-config") + 1])["num_speculative_tokens"]
    return k


@pytest.mark.long
def test_no_request_is_lost_during_rollout_and_scale_down(tiny: Kubectl) -> None:
    with traffic(tiny) as requests:
        eventually(lambda: requests.complete > 2, "requests are answered")
        patch(tiny, speculation={"numSpeculativeTokens": 2})
        wait_for(tiny, "tiny", "Ready", "Serving", 2 * ENGINE_DEADLINE_S)
        assert "successfully" in tiny.must("rollout", "status", "deployment/tiny", "--timeout=100s")
        eventually(lambda: len(engines(tiny)) == 2, "the old engines are gone")
        assert {drafted(pod) for pod in engines(tiny)} == {2}
        before = requests.complete
        tiny.must("scale", "sdd", "tiny", "--replicas=1")
        eventually(lambda: len(engines(tiny)) == 1, "one engine is gone")
        after = requests.complete
        eventually(lambda: requests.complete > after + 2, "the other one serves")
    assert requests.failures == []
    assert requests.complete > before > 0


@pytest.mark.long
def test_killed_engine_is_reported_and_restarted(tiny: Kubectl) -> None:
    pod = lone_engine(tiny)
    name = pod["metadata"]["name"]
    kill_engine_core(tiny, name)
    message = wait_for(tiny, "tiny", "Ready", "ReplicasLost")
    assert "0 of 1 engines ready" in message
    assert condition(tiny, "tiny", "Reconciling")[0] == "True"
    wait_for(tiny, "tiny", "Ready", "Serving", ENGINE_DEADLINE_S)
    (pod,) = engines(tiny)
    assert pod["metadata"]["name"] == name
    assert [status["restartCount"] for status in pod["status"]["containerStatuses"]] == [1]


@pytest.mark.long
def test_spec_that_cannot_start_is_rolled_back_with_its_cause(tiny: Kubectl) -> None:
    lone_engine(tiny)
    patch(tiny, target={"model": "pair/gone"})
    wait_for(tiny, "tiny", "Ready", "RolledBack", ENGINE_DEADLINE_S)
    served = {"Ready": ("False", "RolledBack"), "Stalled": "True", "Available": "True"}
    message = current(wait_for_all(tiny, "tiny", ENGINE_DEADLINE_S, **served), "Ready")[2]
    assert "ModelMissing" in message
    assert "pair/gone" in message
    with traffic(tiny) as requests:
        eventually(lambda: requests.complete > 0, "the earlier engine answers")
    assert requests.failures == []
