"""How far the KV cache of running engines is from what was predicted."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.engine.metrics import EngineReading, Reading
from specdecode_operator.sizing.base.eras import Runner
from specdecode_operator.sizing.choice.plan import Plan, Row
from specdecode_operator.sizing.memory.budget import tightest_grouping
from specdecode_operator.sizing.pair.pair import Pair

_MOST_BYTES: Final = 2**60
"""Far more than a GPU has: an engine may say what it likes, and the API server takes no number of any size."""


@dataclass(frozen=True)
class BudgetResidual:
    """Predicted less reported KV cache of the smallest engine: positive where too much was promised."""

    product: str
    engine_version: str
    runner: str
    tensor: int
    predicted_tokens: int
    reported_tokens: int

    residual_bytes: int
    """On one GPU."""

    @property
    def percent(self) -> str | None:
        """The residual as a share of the prediction, as people read it; None where nothing was predicted."""
        return share(self.predicted_tokens, self.reported_tokens)


def share(predicted_tokens: int, reported_tokens: int) -> str | None:
    """Return predicted less reported as a share of the prediction: ``+1.5%``; None where nothing was predicted."""
    if not predicted_tokens:
        return None
    return f"{(predicted_tokens - reported_tokens) / predicted_tokens:+.1%}"


def budget_residual(facts: Facts, plan: Plan, readings: Mapping[str, Reading]) -> BudgetResidual | None:
    """Return the residual of the smallest engine; None while none reports its KV cache, and of a replay.

    A replay says what the plan told it.
    """
    if facts.replay is not None:
        return None
    engines = [reading for reading in readings.values() if isinstance(reading, EngineReading)]
    reported = [(engine.kv_cache_tokens, engine) for engine in engines if engine.kv_cache_tokens is not None]
    if not reported:
        return None
    smallest_tokens, smallest = min(reported, key=lambda engine: engine[0])
    return BudgetResidual(
        product=plan.chosen.product,
        engine_version=facts.profile.version,
        # V2 needs Triton, so V1 serves on the CPU (vllm/config/vllm.py, use_v2_model_runner).
        runner=(Runner.V1 if facts.on_cpu else facts.pair.era.runner).value,
        tensor=plan.chosen.tensor,
        predicted_tokens=plan.chosen.budget.kv_cache_tokens,
        reported_tokens=smallest_tokens,
        residual_bytes=max(_residual_bytes(facts.pair, plan.chosen, smallest, smallest_tokens), -_MOST_BYTES),
    )


def _residual_bytes(pair: Pair, chosen: Row, engine: EngineReading, reported_tokens: int) -> int:
    """Return predicted less reported KV cache in bytes: blocks count, and tokens where the engine tells no blocks.

    Layers with a window or a state take no bytes for each token, so their
    tokens say little. An engine whose blocks are of another size than was
    predicted has other bytes in them: then tokens are the better measure. It
    reports the smallest size of all groups (vLLM, v1/engine/core.py).
    """
    budget = chosen.budget
    grouping = tightest_grouping(pair, chosen.split, budget)
    predicted_size = min((group.block_size for group in grouping.groups if group.block_size), default=None)
    if engine.num_gpu_blocks is None or engine.block_size not in (None, predicted_size):
        return (budget.kv_cache_tokens - reported_tokens) * budget.kv_bytes_per_token
    return (budget.num_blocks - engine.num_gpu_blocks) * grouping.bytes_per_block
