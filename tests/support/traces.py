"""Traces for tests of what reads them."""

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

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
