"""The condition SettingsInForce: what engines changed by themselves, and what the plan counts with."""

from typing import Any

import pytest

from specdecode_operator.api.deployment_status import Condition
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.observed.speculation_in_force import _CHANGES
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.status import compose_status
from specdecode_operator.vllm.engine_metrics import EngineReading, Reading, Unreachable
from specdecode_operator.vllm.logging_config import CHANGED_SETTINGS
from tests.support.decisions import NOW, desired_state
from tests.support.objects import H200, deployment, pair_70b, parent, tiny_cpu

NODES = (NodeFacts("h200-0", H200, 8),)


def engine(*changed: str, says: bool = True) -> EngineReading:
    return EngineReading(
        num_gpu_blocks=None,
        block_size=None,
        kv_cache_tokens=None,
        kv_cache_max_concurrency=None,
        speculation=None,
        generation_tokens=0,
        requests_running=0,
        requests_waiting=0,
        changed_settings=frozenset(changed) if says else None,
    )


def condition(*engines: Reading, spec: dict[str, Any] | None = None) -> Condition:
    owner = parse_deployment(parent(spec or pair_70b()))
    readings = {f"llama-{number}": each for number, each in enumerate(engines)}
    seen = Observation(deployment(replicas=1, updated=1, available=1), readings=readings)
    status = compose_status(owner, desired_state(owner, NODES), seen, NOW)
    return next(found for found in status.conditions if found.type == "SettingsInForce")


@pytest.mark.parametrize("change", CHANGED_SETTINGS)
def test_a_change_is_told_with_the_engine_and_the_field_to_mend(change: str) -> None:
    found = condition(engine(), engine(change))
    assert (found.status, found.reason) == ("False", _CHANGES[change][0])
    assert found.message.startswith("llama-1: ")
    assert "spec." in found.message


def test_several_changes_are_told_once_each() -> None:
    found = condition(engine("draft_graphs", "max_model_len"), engine("max_model_len"))
    assert found.reason == "LengthReduced"
    assert found.message.count("spec.serving.maxModelLen") == 2
    assert "CUDA graphs" in found.message
    assert "llama-1" not in found.message


def test_engines_that_changed_nothing_prove_it() -> None:
    assert (condition(engine()).status, condition(engine()).reason) == ("True", "AsAsked")


def test_an_engine_that_does_not_say_proves_nothing() -> None:
    assert condition(engine(), engine(says=False)).reason == "NotSaid"
    assert condition().reason == "EngineNotReady"
    assert condition(Unreachable("no")).reason == "Unreachable"


def test_what_the_plan_counts_with_is_no_news() -> None:
    ngram = tiny_cpu(speculation={"method": "ngram", "numSpeculativeTokens": 3})
    planned = engine("async_scheduling", "model_runner", "cudagraph_mode_with_schedule")
    assert condition(planned, spec=ngram).status == "True"
    short = pair_70b(serving={"maxModelLen": 8192, "maxNumSeqs": 512, "maxNumBatchedTokens": 2048})
    assert condition(engine("max_num_seqs"), spec=short).status == "True"
    stages = {
        "target": {"model": "Qwen/Qwen3-30B-A3B"},
        "speculation": {"method": "none"},
        "parallelism": {"tensor": 1, "pipeline": 2},
        "engine": {"version": "0.28"},
    }
    assert condition(engine("async_scheduling"), spec=stages).status == "True"
    assert condition(engine("async_scheduling")).reason == "NotAsynchronous"
    assert condition(engine("model_runner")).reason == "RunnerChanged"
