"""The memory of an engine on CPU, where the KV cache is given and not what is left."""

from specdecode_operator.sizing.base.devices import memory_coefficients
from specdecode_operator.sizing.base.units import ceil_div
from specdecode_operator.sizing.kv.capacity import pool_blocks, pool_capacity
from specdecode_operator.sizing.kv.layout import cache_layout, parameter_weights
from specdecode_operator.sizing.memory.budget import (
    Budget,
    Term,
    estimated_margin_bytes,
    needed_kv_bytes,
    pair_kv_bytes_per_token,
    verdict_of,
)
from specdecode_operator.sizing.pair.pair import Pair, Parallelism, effective_batch


def estimate_on_cpu(pair: Pair, memory_bytes: int, kv_cache_bytes: int, tensor: int = 1) -> Budget:
    """Return the budget of one rank on CPU; ``memory_bytes`` and ``kv_cache_bytes`` are those of all ranks.

    Blocks and tokens follow exactly from the KV space that each rank is
    given (VLLM_CPU_KVCACHE_SPACE; vllm/v1/worker/cpu_worker.py,
    determine_available_memory, takes it in every rank). Weights, KV space and
    the engine's own processes must fit into the memory.
    """
    memory_bytes, kv_cache_bytes = memory_bytes // tensor, kv_cache_bytes // tensor
    weights = parameter_weights(pair, tensor)
    overhead, margin = _overhead_and_margin_bytes(tensor)
    estimated = estimated_margin_bytes(pair, weights.target_bytes, weights.draft_bytes, 0)
    margin += estimated
    requested = weights.target_bytes + weights.draft_bytes + kv_cache_bytes + overhead
    grouping = cache_layout(pair, Parallelism(tensor))[0]
    capacity = pool_capacity(grouping, pool_blocks([grouping], [kv_cache_bytes]), pair.limits.max_model_len)
    needed = needed_kv_bytes(pair, tensor)
    term = _broken_term(kv_cache_bytes - needed, memory_bytes - requested, margin)
    return Budget(
        total_bytes=memory_bytes,
        requested_bytes=requested,
        target_weights_bytes=weights.target_bytes,
        draft_weights_bytes=weights.draft_bytes,
        state_bytes=0,
        activation_bytes=0,
        cuda_graphs_bytes=0,
        non_torch_bytes=overhead,
        available_kv_bytes=kv_cache_bytes,
        needed_kv_bytes=needed,
        margin_bytes=margin,
        estimated_margin_bytes=estimated,
        kv_bytes_per_token=pair_kv_bytes_per_token(pair, tensor),
        num_blocks=capacity.num_blocks,
        kv_cache_tokens=capacity.tokens,
        max_concurrency=capacity.max_concurrency,
        effective_batch=effective_batch(pair),
        overrun_bytes=0,
        slack_bytes=0,
        calibrated=True,
        verdict=verdict_of(term),
        binding_term=term,
    )


def _overhead_and_margin_bytes(tensor: int) -> tuple[int, int]:
    """Return what the engine's own processes take of each rank's share, and what is kept free of it."""
    coefficients = memory_coefficients()
    further_ranks = (tensor - 1) * coefficients.cpu_rank_overhead_bytes
    overhead = ceil_div(coefficients.cpu_overhead_bytes + further_ranks, tensor)
    return overhead, ceil_div(coefficients.cpu_margin_bytes, tensor)


def _broken_term(spare_kv_bytes: int, spare_memory_bytes: int, margin_bytes: int) -> Term | None:
    if spare_kv_bytes < 0:
        return Term.KV_CACHE
    if spare_memory_bytes < 0:
        return Term.MEMORY
    return Term.MARGIN if spare_memory_bytes < margin_bytes else None
