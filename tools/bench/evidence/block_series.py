"""Block series as real engines give them: captures of vLLM, cut into blocks, for tests and figures of `verdict`."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

REQUESTS_A_BLOCK: Final = 4


def goodput(trace: Path) -> list[float]:
    """Return the tokens/s of successive blocks of requests, from their arrival to their last token, in tokens/s."""
    requests = list(_requests(trace))
    blocks = [requests[at : at + REQUESTS_A_BLOCK] for at in range(0, len(requests), REQUESTS_A_BLOCK)]
    return [round(_goodput(each), 2) for each in blocks if len(each) == REQUESTS_A_BLOCK]


def _requests(trace: Path) -> Iterator[dict[str, Any]]:
    with trace.open(encoding="utf-8") as lines:
        yield from sorted((each for each in map(json.loads, lines) if "arrival_ms" in each), key=_arrival)


def _arrival(request: dict[str, Any]) -> float:
    return float(request["arrival_ms"])


def _goodput(requests: list[dict[str, Any]]) -> float:
    took_ms = sum(each["ttft_ms"] + sum(each["itl_ms"]) for each in requests)
    return float(1000 * sum(each["output_tokens"] for each in requests) / took_ms)


if __name__ == "__main__":
    print(json.dumps({Path(each).name: goodput(Path(each) / "trace.jsonl") for each in sys.argv[1:]}))
