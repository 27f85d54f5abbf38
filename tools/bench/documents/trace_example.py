"""Render the example in docs/reference/trace-format.md: one request of a real capture, and its figures."""

import gzip
import json
from pathlib import Path
from typing import Any, Final

_TRACE: Final = Path(__file__).parents[3] / "tests/data/captures/draft_model/trace.jsonl.gz"
_SHOWN: Final = 4


def trace_example() -> str:
    """Return the request with the fewest chunks, with cut arrays, and the figures that follow from it."""
    with gzip.open(_TRACE, "rt") as lines:
        _, *records = [json.loads(line) for line in lines]
    record = min(records, key=lambda each: len(each["itl_ms"]))
    output, later, gaps = record["output_tokens"], sum(record["itl_tokens"]), len(record["itl_ms"])
    first_ms, decoding_ms = record["ttft_ms"], sum(record["itl_ms"])
    tpot_ms = decoding_ms / (output - 1)
    longer_ms = record["client_ttft_ms"] - first_ms
    fields = ",\n  ".join(f'"{name}": {_cut(value)}' for name, value in record.items())
    return f"""```
{{ {fields} }}
```

- The first chunk came {first_ms:.1f} ms after arrival. The client measured {longer_ms:.1f} ms more, from sending.
- {gaps} chunks with {later} tokens followed, so the first chunk had {output} - {later} = {output - later}.
- The gaps add up to {decoding_ms:,.1f} ms: {tpot_ms:.2f} ms per token (TPOT), {later / gaps:.2f} tokens per step.
"""


def _cut(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{name}": {_cut(each)}' for name, each in value.items()) + "}"
    if isinstance(value, list) and len(value) > _SHOWN:
        return json.dumps(value[:_SHOWN])[:-1] + ", …]"
    return json.dumps(value)
