"""Traces for tests of what reads them."""

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.recordings import scheduler_stats

Line = Mapping[str, Any]

META: Line = {"model": "tiny", "max_num_seqs": 8, "speculative": {"method": "ngram", "num_speculative_tokens": 4}}


def record(**fields: Any) -> dict[str, Any]:
    """Return a record of three chunks, 1, 3 and 2 tokens; its fields as given."""
    usual: dict[str, Any] = {
        "prompt_tokens": 20,
        "output_tokens": 6,
        "ttft_ms": 30.0,
        "itl_ms": [10.0, 12.5],
        "itl_tokens": [3, 2],
        "arrival_ms": 0.0,
        "finish_reason": "length",
    }
    return usual | fields


def write_trace(path: Path, records: Iterable[Line], meta: Line | None = META) -> Path:
    """Write a trace, compressed where its name says so."""
    lines = [*([{"meta": meta}] if meta is not None else []), *records]
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def step(
    ts_ms: float, *, running: int, drafts: int = 0, drafted: int = 0, per_position: Sequence[int] = ()
) -> dict[str, Any]:
    """Return a line of step statistics."""
    stats = scheduler_stats(running, list(per_position), drafts, len(per_position))
    if drafts:
        stats["spec_decoding_stats"]["num_draft_tokens"] = drafted
    return {"ts_ms": ts_ms, "scheduler": stats, "engine": 0}


def write_steps(path: Path, steps: Iterable[Line]) -> Path:
    """Write step statistics."""
    path.write_text("".join(json.dumps(line) + "\n" for line in steps))
    return path
