"""Real engines whose drafts are never accepted, and that crash again and again."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.conditions import condition, wait_for
from tests.support.engine_core import kill_engine_core
from tests.support.kubectl import Kubectl
from tests.support.small_pair import small_pair
from tests.support.traffic import Traffic
from tests.support.waiting import eventually

pytestmark = pytest.mark.long
EXAMPLES = Path(__file__).parents[3] / "examples"
ENGINES = "--selector=specdecode.io/deployment=tiny"
DEADLINE_S = 1200
EVIDENCE_DEADLINE_S = 3600
"""For 250 windows of 512 steps, which take 5 to 20 minutes on 2 cores. Only a test that fails waits so long."""
CLIENTS = 64
"""All run at once. A step of the tiny pair takes about as long for 64 requests as for one."""


@pytest.fixture(scope="module")
def tiny(kubectl: Kubectl) -> Iterator[Kubectl]:
    """An engine of a pair that never agrees: its noise drowns the layer that both models have."""
    models = (EXAMPLES / "tiny-models.yaml").read_text()
    assert kubectl.apply(models.replace("--agreement-noise=0.1", "--agreement-noise=10")).returncode == 0
    kubectl.wait("job/tiny-models", "condition=Complete", 300)
    body = small_pair()
    body["spec"]["policy"] = {"onCrashLoop": "ServeWithoutSpeculation"}
    body["spec"]["serving"]["maxNumSeqs"] = CLIENTS
    # Sending each token by itself would take more of the core than the models do.
    body["spec"]["engine"]["extraArgs"] = ["--stream-interval=64"]
    assert kubectl.apply(yaml.safe_dump(body)).returncode == 0
    wait_for(kubectl, "tiny", "Ready", "Serving", DEADLINE_S)
    yield kubectl
    kubectl.must("delete", "sdd", "tiny")
    eventually(lambda: not kubectl.objects("pods", ENGINES), "the engines are gone")


def engine(kubectl: Kubectl) -> dict[str, Any]:
    (pod,) = kubectl.objects("pods", ENGINES)
    return pod


def test_rejected_drafts_are_reported_with_likely_causes(tiny: Kubectl) -> None:
    url = f"http://{tiny.service_address('tiny')}/v1/completions"
    question = {"model": "target", "temperature": 0, "ignore_eos": True, "max_tokens": 250}
    looks = iter(range(100_000))

    def reported() -> bool:
        # Each change of the object makes the operator read the engines, so the windows fill in minutes.
        tiny.must("annotate", "sdd", "tiny", f"look={next(looks)}", "--overwrite")
        conditions = tiny.object("sdd", "tiny")["status"]["conditions"]
        return any(each["reason"] == "BelowBreakEven" for each in conditions)

    questions = [{**question, "prompt": f"Story {each}: once upon a time"} for each in range(CLIENTS)]
    with Traffic(url, questions) as requests:
        eventually(reported, "the operator has enough evidence", EVIDENCE_DEADLINE_S)
    assert requests.failures == []
    status, _, message = condition(tiny, "tiny", "SpeculationEffective")
    assert status == "False"
    assert "(1) the draft was made for another target" in message
    assert tiny.object("sdd", "tiny")["status"]["observed"]["acceptancePercent"] < 5
    assert condition(tiny, "tiny", "SpeculationActive")[:2] == ("True", "Drafting")


def test_crash_looping_engine_restarts_without_speculation(tiny: Kubectl) -> None:
    assert "--speculative-config" in engine(tiny)["spec"]["containers"][0]["command"]
    for crashes in range(1, 4):
        pod = engine(tiny)
        kill_engine_core(tiny, pod["metadata"]["name"])
        if crashes < 3:
            eventually(lambda: engine(tiny)["status"]["containerStatuses"][0]["restartCount"] == crashes, "it restarts")  # noqa: B023
            wait_for(tiny, "tiny", "Ready", "Serving", DEADLINE_S)
    assert "3 times" in wait_for(tiny, "tiny", "SpeculationEffective", "CrashLoop", DEADLINE_S)
    wait_for(tiny, "tiny", "SpeculationActive", "Disabled", DEADLINE_S)
    wait_for(tiny, "tiny", "Ready", "Serving", DEADLINE_S)
    eventually(lambda: len(tiny.objects("pods", ENGINES)) == 1, "the earlier engine is gone")
    assert "--speculative-config" not in engine(tiny)["spec"]["containers"][0]["command"]
    events = tiny.objects("events", "--field-selector=reason=PolicyActed")
    assert any("crashed 3 times" in each["note" if "note" in each else "message"] for each in events)
    assert (
        json.loads(tiny.must("get", "sdd", "tiny", "--output=json"))["spec"]["speculation"]["method"] == "draft_model"
    )
