"""Caches of `specdecode plan --batch` keep no content of its lines."""

import json
import tracemalloc

from specdecode_operator.sizing.estimate import Sizer
from tests.support.llama import LLAMA_8B_CONFIG

LINES, FILLED_BYTES = 40, 65_000


def line(number: int) -> str:
    """One whose draft has a config.json that no other line has, and that says much of no use."""
    filled = {**LLAMA_8B_CONFIG, "note": f"{number:09}" + "x" * FILLED_BYTES}
    draft = {"method": "draft_model", "model": "draft", "num_speculative_tokens": 3, "model_config": filled}
    case = {"vllm_version": "0.32", "gpu": "H100", "model": "target", "model_config": LLAMA_8B_CONFIG}
    return json.dumps({**case, "speculative": draft})


def test_batch_lines_do_not_stay_in_memory() -> None:
    sizer = Sizer()
    sizer.size(json.loads(line(LINES)), LINES)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(LINES):
            sizer.size(json.loads(line(number)), number)
        grown_bytes = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown_bytes < LINES * FILLED_BYTES / 4
