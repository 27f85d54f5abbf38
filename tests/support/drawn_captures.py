"""Captures to draw: small, of known figures, with everything that a report has a picture of."""

import json
import random
from pathlib import Path
from typing import Any

from tests.support.traces import record, write_trace

K = 4
META = {
    "model": "org/model",
    "gpu": "H200",
    "vllm_version": "0.32.0",
    "config_hash": "0123456789abcdef",
    "capture": "team/demo",
    "speculative": {"method": "draft_model", "num_speculative_tokens": K},
}
PLAN = {
    "product": "NVIDIA-H200",
    "kvCacheTokens": 1000,
    "perGpu": {
        "totalBytes": 140 * 2**30,
        "requestedBytes": 126 * 2**30,
        "targetWeightsBytes": 70 * 2**30,
        "draftWeightsBytes": 8 * 2**30,
        "stateBytes": 2**29,
        "activationBytes": 2 * 2**30,
        "cudaGraphsBytes": 2**30,
        "nonTorchBytes": 2**30,
        "availableKvBytes": 43 * 2**30,
        "marginBytes": 2**30,
    },
}


def step(ts_ms: float, accepted: list[int], *, running: int = 2, usage: float = 0.5, preempted: int = 0) -> Any:
    """Return a line of step statistics of a batch whose drafts of K tokens were so accepted, by position."""
    cache = dict.fromkeys(("requests", "queries", "hits", "preempted_queries", "preempted_hits"), 0)
    drafting = {
        "num_spec_tokens": K,
        "num_drafts": running,
        "num_draft_tokens": running * K,
        "num_accepted_tokens": sum(accepted),
        "num_accepted_tokens_per_pos": accepted,
    }
    return {
        "ts_ms": ts_ms,
        "duration_ms": 10.0,
        "scheduler": {
            "num_running_reqs": running,
            "num_waiting_reqs": 1,
            "step_counter": 0,
            "current_wave": 0,
            "kv_cache_usage": usage,
            "prefix_cache_stats": cache | {"reset": False, "preempted_requests": preempted},
            "kv_cache_eviction_events": [],
            "spec_decoding_stats": drafting,
        },
    }


def manifest(**changes: Any) -> Any:
    """Return the fields of a manifest that a report reads."""
    return {
        "namespace": "team",
        "capture": "demo",
        "model": "org/model",
        "gpu": "NVIDIA H200",
        "vllm": "0.32.0",
        "config_hash": "0123456789abcdef",
        "context": {"plan": PLAN},
        "engine_counters": {"kv_cache_tokens": 990},
    } | changes


def write_capture(folder: Path, requests: int = 60, *, gap_ms: float = 10.0, bursts: int = 8, **changes: Any) -> Path:
    """Write a capture of two phases whose steps took so long, whatever they gave."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(requests)
    records, client = [], []
    for index in range(requests):
        sizes = [chance.randint(1, K + 1) for _ in range(bursts)]
        arrival_ms = 40.0 * index
        records.append(
            record(
                prompt_tokens=100 + index,
                output_tokens=1 + sum(sizes),
                itl_ms=[gap_ms] * len(sizes),
                itl_tokens=sizes,
                itl_ctx={"num_running": [2] * len(sizes), "prefill_tokens": [0] * len(sizes)},
                arrival_ms=arrival_ms,
                scheduled_ms=arrival_ms + 5,
                phase="first" if index < requests // 2 else "second",
                preemptions=int(index == 0),
            )
        )
        client.append({"id": f"r-{index}", "phase": "first", "index": index, "outcome": "completed", "ttft_ms": 33.0})
    write_trace(folder / "trace.jsonl", records, META)
    steps = [step(20.0 * index, [2, 1, 1, 0], preempted=int(index == 3)) for index in range(requests * 2)]
    _write(folder / "step-stats.jsonl", steps)
    _write(folder / "client.jsonl", client)
    (folder / "manifest.json").write_text(json.dumps(manifest(**changes)))
    return folder


def _write(path: Path, lines: list[Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
