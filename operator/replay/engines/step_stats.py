"""What a step was, as vLLM's SchedulerStats have it: for those who write captures of engines without a model."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from specdecode_operator.replay.engines.engine import Load


def scheduler_stats(
    load: Load, begun: int, drafted: Sequence[int], accepted: Sequence[int], num_speculative_tokens: int
) -> dict[str, Any]:
    """Return the statistics of one step.

    Parameters
    ----------
    load
        After the step; tokens of the prefix cache in this step alone.
    begun
        Requests that ran for the first time.
    drafted, accepted
        Of each request that had a draft, in the same order.
    num_speculative_tokens
        K; 0 without speculation.
    """
    return {
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.waiting,
        "step_counter": 0,
        "current_wave": 0,
        "kv_cache_usage": round(load.kv_cache_usage, 6),
        "prefix_cache_stats": {
            "reset": False,
            "requests": begun,
            "queries": load.prefix_cache_queries,
            "hits": load.prefix_cache_hits,
            "preempted_requests": 0,
            "preempted_queries": 0,
            "preempted_hits": 0,
        },
        "kv_cache_eviction_events": [],
        "spec_decoding_stats": _spec_decoding_stats(drafted, accepted, num_speculative_tokens),
        "encoder_cache_usage": 0.0,
        "waiting_lora_adapters": {},
        "running_lora_adapters": {},
    }


def _spec_decoding_stats(drafted: Sequence[int], accepted: Sequence[int], k: int) -> dict[str, Any] | None:
    if not drafted:
        return None
    return {
        "num_spec_tokens": k,
        "num_drafts": len(drafted),
        "num_draft_tokens": sum(drafted),
        "num_accepted_tokens": sum(accepted),
        "num_accepted_tokens_per_pos": _reached(Counter(accepted), k),
        "num_draft_tokens_per_pos": _reached(Counter(drafted), k),
    }


def _reached(counts: Counter[int], k: int) -> list[int]:
    return [sum(count for value, count in counts.items() if value >= position) for position in range(1, k + 1)]
