"""How many CUDA graphs are captured, and what the estimate of model runner V1 makes of them."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from specdecode_operator.enums import Precision
from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.memory.budget import Pair, Parallelism, graph_bytes
from specdecode_operator.sizing.memory.buffers import capture_sizes

PairFactory = Callable[..., Pair]

MIB = 2**20


@pytest.mark.parametrize(
    ("model", "requests", "tokens", "sizes"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 1024, 8192, 51),
        ("openai/gpt-oss-20b", 1024, 8192, 83),
        # vllm/model_executor/models/config.py, GptOssForCausalLMConfig: whatever max_num_seqs is.
        ("openai/gpt-oss-20b", 4, 8192, 83),
        ("openai/gpt-oss-20b", 1024, 512, 51),
    ],
)
def test_gpt_oss_is_captured_up_to_1024_tokens(
    make_pair: PairFactory, model: str, requests: int, tokens: int, sizes: int
) -> None:
    geometry = find_geometry(model)
    assert geometry is not None
    pair = make_pair("BF16", None, max_num_seqs=requests, max_num_batched_tokens=tokens)
    assert capture_sizes(replace(pair, target=geometry)) == sizes
    asked = replace(pair, target=geometry, limits=replace(pair.limits, max_graph_tokens=64))
    assert capture_sizes(asked) == 11


def test_a_segment_for_each_size_of_a_parallel_drafter(make_pair: PairFactory) -> None:
    """P-EAGLE in public logs of vLLM 0.26: 2.80 GiB are charged where a head that drafts in turn has 1.19."""
    target, draft = find_geometry("openai/gpt-oss-20b"), find_geometry("meta-llama/Llama-3.2-1B-Instruct")
    assert target is not None
    assert draft is not None
    limits = make_pair(engine_version="0.26.0").limits
    in_turn = Pair(target, Precision.MXFP4, draft, Precision.BF16, "draft_model", 7, limits)
    at_once = replace(in_turn, draft=replace(draft, drafts_in_parallel=True))
    assert graph_bytes(at_once, Parallelism()) - graph_bytes(in_turn, Parallelism()) == 82 * 20 * MIB
