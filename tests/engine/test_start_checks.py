"""What the real vLLM checks once it knows its memory, which sizing checks before: message and limit."""

import pytest

from specdecode_operator.deployment.rollout.engine_errors import find_error
from specdecode_operator.enums import CudagraphMode
from tests.engine.contract_cases import GPU
from tests.engine.contract_checks import Vllm
from tests.support.engine_settings import replace

BLOCKS = 308
"""As in `engine_later.py`."""


@pytest.mark.parametrize("mode", [CudagraphMode.FULL, CudagraphMode.FULL_DECODE_ONLY, CudagraphMode.FULL_AND_PIECEWISE])
def test_stateful_model_needs_one_block_per_request_with_full_cudagraphs(vllm: Vllm, mode: CudagraphMode) -> None:
    enough = vllm.line(replace(GPU, max_num_seqs=BLOCKS, cudagraph_mode=mode))
    one_more = vllm.line(replace(GPU, max_num_seqs=BLOCKS + 1, cudagraph_mode=mode))
    assert vllm.h100.ask("after_start", enough, "state_blocks").error is None
    error = vllm.h100.ask("after_start", one_more, "state_blocks").error or ""
    found = find_error(f"ValueError: {error}")
    assert found is not None
    assert found[0].reason == "TooFewBlocks"


@pytest.mark.parametrize("mode", [CudagraphMode.NONE, CudagraphMode.PIECEWISE])
def test_stateful_model_needs_no_block_per_request_without_full_cudagraphs(vllm: Vllm, mode: CudagraphMode) -> None:
    line = vllm.line(replace(GPU, max_num_seqs=BLOCKS + 1, cudagraph_mode=mode))
    assert vllm.h100.ask("after_start", line, "state_blocks").error is None


def test_unchunked_multimodal_item_must_fit_one_step(vllm: Vllm) -> None:
    whole = replace(GPU, max_num_seqs=16, max_num_batched_tokens=2495, extra_args=("--disable-chunked-mm-input",))
    for settings in (replace(whole, max_num_batched_tokens=2496), replace(whole, extra_args=())):
        assert vllm.h100.ask("after_start", vllm.line(settings), "largest_item").error is None
    error = vllm.h100.ask("after_start", vllm.line(whole), "largest_item").error or ""
    found = find_error(f"ValueError: {error}")
    assert found is not None
    assert found[0].reason == "ItemExceedsStep"
