"""The residual between predicted and reported KV cache: status, condition and metric."""

import urllib.request
from typing import Any

import pytest

from specdecode_operator.api.deployment import Key
from specdecode_operator.api.deployment_status import SpecDecodeDeploymentStatus
from specdecode_operator.cluster.cache import Cache
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.deployment.desired_state import Launch
from specdecode_operator.deployment.observed.engine_reports import BudgetResidual
from specdecode_operator.deployment.observed.observation import Observation, observed_residual
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.status import compose_status
from specdecode_operator.handlers.metrics import OperatorMetrics, serve_metrics
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.vllm.engine_metrics import EngineReading, Reading, Unreachable
from tests.support.decisions import NOW, desired_state
from tests.support.objects import H200, deployment, pair_70b, parent

NODES = (NodeFacts("h200-0", H200, 8),)


GEMMA = {"target": {"model": "google/gemma-3-27b-it"}, "speculation": {"method": "none"}}


def reading(tokens: int | None, blocks: int | None = None, block_size: int | None = None) -> EngineReading:
    return EngineReading(
        num_gpu_blocks=blocks,
        block_size=block_size,
        kv_cache_tokens=tokens,
        kv_cache_max_concurrency=None,
        speculation=None,
        generation_tokens=0,
        requests_running=0,
        requests_waiting=0,
    )


def report(
    *tokens: int | EngineReading | None, spec: dict[str, Any] | None = None
) -> tuple[BudgetResidual | None, Any, str]:
    owner = parse_deployment(parent(spec or pair_70b()))
    desired = desired_state(owner, NODES)
    readings: dict[str, Reading] = {
        f"llama-{index}": told if isinstance(told, EngineReading) else reading(told)
        for index, told in enumerate(tokens)
    }
    observation = Observation(deployment(replicas=1, updated=1, available=1), readings=readings)
    status: SpecDecodeDeploymentStatus = compose_status(owner, desired, observation, NOW)
    message = next(found.message for found in status.conditions if found.type == "BudgetAccurate")
    return observed_residual(desired, observation), status, message


def predicted() -> int:
    _, status, _ = report()
    assert status.plan is not None
    return int(status.plan.kv_cache_tokens)


def test_implausible_kv_cache_size_gives_a_valid_int64_residual() -> None:
    for told in (reading(2**53), reading(2**53, blocks=2**53)):
        residual, status, _ = report(told)
        assert residual is not None
        assert -(2**63) < status.observed.kv_cache_residual_bytes == residual.residual_bytes < -(2**50)


def test_residual_of_the_smallest_engine_is_the_same_everywhere() -> None:
    tokens = predicted()
    residual, status, message = report(tokens - 10_000, tokens + 500)
    assert residual is not None
    assert (residual.product, residual.engine_version, residual.runner, residual.tensor) == (H200, "0.33", "V2", 2)
    assert residual.residual_bytes == 10_000 * status.plan.kv_bytes_per_token
    assert status.observed.kv_cache_residual_bytes == residual.residual_bytes
    assert status.observed.kv_cache_residual == f"{10_000 / tokens:+.1%}"
    assert f"{tokens - 10_000:,}" in message
    assert f"{tokens:,} predicted" in message
    assert f"{residual.residual_bytes / GIB:.1f} GiB less on each GPU" in message


def test_larger_kv_cache_than_predicted_is_a_negative_residual() -> None:
    tokens = predicted()
    residual, _, message = report(tokens + 10_000)
    assert residual is not None
    assert residual.residual_bytes < 0
    assert "GiB more on each GPU" in message
    assert "(exactly)" in report(tokens)[2]


@pytest.mark.parametrize("blocks_of_model", [16, 32])
def test_residual_of_sliding_window_models_is_counted_in_blocks(blocks_of_model: int) -> None:
    """Gemma 3: five of six layers forget what is beyond 1024 tokens, so its tokens are no measure of bytes."""
    spec = pair_70b(**GEMMA)
    desired = desired_state(parse_deployment(parent(spec)), NODES)
    assert isinstance(desired.outcome, Launch)
    budget = desired.outcome.plan.chosen.budget
    less = budget.num_blocks // 10
    engine = reading(int(budget.kv_cache_tokens * 0.9), budget.num_blocks - less, blocks_of_model)
    residual, _, message = report(engine, spec=spec)
    assert residual is not None
    in_tokens = (budget.kv_cache_tokens - (engine.kv_cache_tokens or 0)) * budget.kv_bytes_per_token
    in_blocks = residual.residual_bytes / budget.available_kv_bytes
    if blocks_of_model == 16:
        assert in_blocks == pytest.approx(0.1, abs=1e-4)
        assert residual.residual_bytes != in_tokens
    else:
        assert residual.residual_bytes == in_tokens, "blocks of another size hold other bytes"
    assert ", margin " in message


def test_no_residual_without_a_report_or_a_plan() -> None:
    for tokens in ((), (None,)):
        residual, status, _ = report(*tokens)
        assert residual is None
        assert status.observed is None or status.observed.kv_cache_residual_bytes is None
    owner = parse_deployment(parent(pair_70b()))
    silent = Observation(readings={"llama-0": Unreachable("no answer")})
    assert observed_residual(desired_state(owner, NODES), silent) is None
    assert observed_residual(desired_state(owner, ()), Observation(readings={"llama-0": reading(5)})) is None


def scrape(collector: OperatorMetrics) -> list[str]:
    port = serve_metrics(0, collector)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=120) as response:
        text = response.read().decode()
    return [line for line in text.splitlines() if line.startswith("specdecode_budget_residual_bytes")]


def residual_of(reported: int, tensor: int = 2) -> BudgetResidual:
    return BudgetResidual(H200, "0.33", "V2", tensor, 1000, reported, 16 * (1000 - reported))


def test_residual_metric_has_one_series_per_kind_of_engine() -> None:
    collector = OperatorMetrics(Cache())
    for name, residual in (("a", residual_of(900)), ("b", residual_of(1100)), ("c", residual_of(2000, tensor=4))):
        collector.set_residual(Key("default", name), residual)
    labels = f'engine_version="0.33",product="{H200}",runner="V2"'
    assert scrape(collector) == [
        f'specdecode_budget_residual_bytes{{{labels},tensor="2"}} 1600.0',
        f'specdecode_budget_residual_bytes{{{labels},tensor="4"}} -16000.0',
    ]
    collector.set_residual(Key("default", "a"), None)
    assert scrape(collector)[0].endswith(" -1600.0"), "what is gone no longer counts"
