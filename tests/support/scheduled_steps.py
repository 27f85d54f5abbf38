"""Steps as vLLM's scheduler sends them, without vLLM."""

from types import SimpleNamespace
from typing import Any


def new(req_id: str, prompt: int, computed: int = 0, *, prefill: int | None = None, **params: Any) -> SimpleNamespace:
    """A request that is scheduled for the first time; `prefill` as model runner V2 gets one that was preempted."""
    return SimpleNamespace(
        req_id=req_id,
        prompt_token_ids=[5] * prompt,
        prefill_token_ids=None if prefill is None else [5] * prefill,
        num_computed_tokens=computed,
        sampling_params=SimpleNamespace(
            **{"temperature": 0.0, "num_logprobs": None, "all_stop_token_ids": {1}} | params
        ),
    )


def step(  # noqa: PLR0913  each is a part of a step
    counts: dict[str, int],
    *,
    new: tuple[Any, ...] = (),
    drafts: dict[str, list[int]] | None = None,
    width: int = 0,
    resumed: dict[str, tuple[int, int]] | None = None,
    finished: tuple[str, ...] = (),
) -> SimpleNamespace:
    """One step; `resumed` has a length and what is computed of it, by request."""
    again = resumed or {}
    cached = SimpleNamespace(
        req_ids=list(again),
        resumed_req_ids=set(again),
        all_token_ids={req_id: [5] * length for req_id, (length, _) in again.items()},
        num_computed_tokens=[computed for _, computed in again.values()],
    )
    return SimpleNamespace(
        finished_req_ids=set(finished),
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens=drafts or {},
        num_spec_tokens_to_schedule=width,
    )
