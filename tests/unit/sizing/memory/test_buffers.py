"""Buffers of the model runners."""

from dataclasses import replace

import pytest

from specdecode_operator.enums import Precision
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.geometry import ModelGeometry, Tower
from specdecode_operator.sizing.memory.activation import activation_bytes, verification_bytes
from specdecode_operator.sizing.memory.budget import graph_bytes, slack_bytes
from specdecode_operator.sizing.memory.buffers import (
    adaptive_graphs,
    capture_sizes,
    captured_sizes,
    cost_profile_s,
    decode_graphs,
    profiled_steps,
    state_bytes,
)
from specdecode_operator.sizing.pair import Pair, Parallelism, without_speculation
from specdecode_operator.sizing.rank_layers import stages
from specdecode_operator.sizing.version_rules import Runner
from tests.unit.sizing.conftest import PairFactory

ONE_GPU = Parallelism()


@pytest.fixture
def fixed(make_pair: PairFactory) -> Pair:
    return replace(make_pair("FP8", max_num_seqs=256, max_num_batched_tokens=8192), num_speculative_tokens=7)


@pytest.fixture
def adaptive(fixed: Pair) -> Pair:
    return replace(fixed, adaptive_verification=True)


def test_adaptive_verification_tables_use_state_and_slack(fixed: Pair, adaptive: Pair) -> None:
    assert state_bytes(adaptive, ONE_GPU) - state_bytes(fixed, ONE_GPU) == 2 * 256 * 7 * 4
    taken = slack_bytes(fixed, 80 * GIB, 70 * GIB, ONE_GPU) - slack_bytes(adaptive, 80 * GIB, 70 * GIB, ONE_GPU)
    assert taken == 3 * 256 * 7 * 4 + (3 * 256 + 1) * 4


@pytest.mark.parametrize(
    ("tokens", "more"),
    # Of 51 sizes and multiples of K + 1: by 8, those below 8 and of 8 are one; by 16, every other one is.
    [(7, 3), (15, 51 - 32), (0, 0)],
)
def test_adaptive_verification_has_a_graph_per_size(adaptive: Pair, tokens: int, more: int) -> None:
    pair = replace(adaptive, num_speculative_tokens=tokens)
    assert adaptive_graphs(pair) == more
    of_graphs = graph_bytes(pair, ONE_GPU) - graph_bytes(replace(pair, adaptive_verification=False), ONE_GPU)
    assert of_graphs == more * 20 * 2**20


def test_timed_steps_count_as_graph_memory_up_to_0_32(adaptive: Pair) -> None:
    older = replace(adaptive, limits=replace(adaptive.limits, engine_version="0.32.0"))
    assert graph_bytes(older, ONE_GPU) - graph_bytes(adaptive, ONE_GPU) == activation_bytes(older, ONE_GPU)


def test_adaptive_graphs_cover_other_draft_lengths(adaptive: Pair) -> None:
    by_batch = replace(adaptive, other_draft_lengths=frozenset({0, 3}))
    assert graph_bytes(by_batch, ONE_GPU) == graph_bytes(adaptive, ONE_GPU)


def test_adaptive_verification_is_capped_at_one_logits_chunk(adaptive: Pair) -> None:
    many = replace(adaptive, limits=replace(adaptive.limits, max_num_seqs=1024))
    rows = 2**30 // (128_256 * 4)
    assert verification_bytes(many, 1) == rows * 128_256 * (2 + 2 + 4)
    assert verification_bytes(replace(many, adaptive_verification=False), 1) == 8192 * 128_256 * (2 + 2) + GIB
    few = replace(adaptive, limits=replace(adaptive.limits, max_num_seqs=16))
    assert verification_bytes(few, 1) == 16 * 8 * 128_256 * (2 + 2 + 4)
    # One row a request is always verified.
    most = replace(adaptive, limits=replace(adaptive.limits, max_num_seqs=4096))
    assert verification_bytes(most, 1) == 4096 * 128_256 * (2 + 2) + GIB


def test_adaptive_profile_times_each_size_five_times(adaptive: Pair) -> None:
    steps = profiled_steps(adaptive)
    assert steps[:5] == (1,) * 5
    assert [*dict.fromkeys(steps)][-6:] == [512, 768, 1024, 2048, 4096, 8192]
    assert len(steps) == 5 * (51 + 5)


def test_captured_sizes_end_at_the_batch_or_the_requested_size(fixed: Pair) -> None:
    short = replace(fixed, limits=replace(fixed.limits, max_num_batched_tokens=100))
    assert captured_sizes(short)[-2:] == (96, 100)
    asked = replace(fixed, num_speculative_tokens=4, limits=replace(fixed.limits, max_graph_tokens=32))
    assert captured_sizes(asked) == (1, 2, 4, 8, 16, 24, 32)


def test_cost_profile_lengthens_the_start(fixed: Pair, adaptive: Pair) -> None:
    assert cost_profile_s(fixed, 35 * GIB) == 0
    assert cost_profile_s(without_speculation(adaptive), 35 * GIB) == 0
    small, large = cost_profile_s(adaptive, GIB), cost_profile_s(adaptive, 35 * GIB)
    assert 28 < small < 35
    assert large - small == pytest.approx(34 * GIB * sum(profiled_steps(adaptive)) / 50e12, abs=1)
    eager = replace(adaptive, limits=replace(adaptive.limits, enforce_eager=True))
    assert profiled_steps(eager) == ()


@pytest.mark.parametrize(
    ("requests", "tokens", "whole", "mixed"), [(256, 7, 48, 51), (256, 15, 32, 51), (256, 5, 48, 53), (16, 3, 9, 11)]
)
def test_graph_counts_match_vllm(adaptive: Pair, requests: int, tokens: int, whole: int, mixed: int) -> None:
    """What CudaGraphManager of vLLM 0.33 makes of these settings, asked without a GPU."""
    pair = replace(adaptive, num_speculative_tokens=tokens, limits=replace(adaptive.limits, max_num_seqs=requests))
    assert decode_graphs(pair) == whole
    assert decode_graphs(pair) + adaptive_graphs(pair) == mixed


# What model runner V1 holds before the profiling run: room for embeddings, and its drafter's buffers.

OF_TARGET = 8192 * 8192 * 2
"""A step's tokens in the width of Llama-3.1-70B."""
OF_DRAFT = 8192 * 4096 * 2


@pytest.fixture(params=["0.28.0", "0.30.0"])
def drafted(request: pytest.FixtureRequest, make_pair: PairFactory) -> Pair:
    """A draft model in versions that serve it on V1."""
    pair = make_pair("FP8", engine_version=request.param)
    assert pair.era.runner is Runner.V1
    return pair


def test_v1_draft_model_has_hidden_state_and_embedding_buffers(drafted: Pair) -> None:
    assert state_bytes(drafted, ONE_GPU) == OF_TARGET + 2 * OF_DRAFT


def test_v1_draft_buffers_are_on_the_last_stage(drafted: Pair) -> None:
    of_stages = [state_bytes(drafted, Parallelism(1, 3), stage) for stage in stages(drafted.target, 3)]
    assert of_stages == [OF_TARGET, OF_TARGET, OF_TARGET + 2 * OF_DRAFT]


@pytest.mark.parametrize("method", ["ngram", "medusa"])
def test_v1_ngram_and_medusa_have_no_draft_buffers(drafted: Pair, method: str) -> None:
    head = find_geometry("yuhuili/EAGLE-LLaMA3-Instruct-8B") if method == "medusa" else None
    assert state_bytes(replace(drafted, method=method, draft=head), ONE_GPU) == OF_TARGET


def test_parallel_draft_has_the_buffers_of_v1(make_pair: PairFactory) -> None:
    pair = make_pair("FP8", engine_version="0.33.0")
    assert pair.draft is not None
    parallel = replace(pair, draft=replace(pair.draft, drafts_in_parallel=True))
    assert state_bytes(parallel, ONE_GPU) == OF_TARGET + 2 * OF_DRAFT


# How many CUDA graphs are captured, and what the estimate of model runner V1 makes of them.

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
def test_gpt_oss_capture_sizes_reach_1024_tokens(
    make_pair: PairFactory, model: str, requests: int, tokens: int, sizes: int
) -> None:
    geometry = find_geometry(model)
    assert geometry is not None
    pair = make_pair("BF16", None, max_num_seqs=requests, max_num_batched_tokens=tokens)
    assert capture_sizes(replace(pair, target=geometry)) == sizes
    asked = replace(pair, target=geometry, limits=replace(pair.limits, max_graph_tokens=64))
    assert capture_sizes(asked) == 11


def test_parallel_draft_has_a_graph_segment_per_size(make_pair: PairFactory) -> None:
    """P-EAGLE in public logs of vLLM 0.26: 2.80 GiB are charged where a head that drafts in turn has 1.19."""
    target, draft = find_geometry("openai/gpt-oss-20b"), find_geometry("meta-llama/Llama-3.2-1B-Instruct")
    assert target is not None
    assert draft is not None
    limits = make_pair(engine_version="0.26.0").limits
    in_turn = Pair(target, Precision.MXFP4, draft, Precision.BF16, "draft_model", 7, limits)
    at_once = replace(in_turn, draft=replace(draft, drafts_in_parallel=True))
    assert graph_bytes(at_once, Parallelism()) - graph_bytes(in_turn, Parallelism()) == 82 * 20 * MIB


# What stands for a draft before the profiling run, tensor by tensor.

TOKENS = 8192


def catalogued(name: str) -> ModelGeometry:
    geometry = find_geometry(name)
    assert geometry is not None
    return geometry


def drafting_itself(pair: Pair, target: ModelGeometry) -> Pair:
    alone = replace(pair, target=target, target_precision=Precision.BF16, draft=None, draft_precision=None)
    return replace(alone, method="mtp", num_speculative_tokens=1)


def drafter_bytes(pair: Pair) -> int:
    """What is there with the draft; masks of one more proposed token a request aside."""
    alone = replace(pair, method="none", num_speculative_tokens=0)
    masks = pair.limits.max_num_seqs * pair.num_speculative_tokens * (pair.target.vocab_size // 32) * 4
    return state_bytes(pair, ONE_GPU) - state_bytes(alone, ONE_GPU) - masks


def test_qwen3_5_mtp_has_a_second_image_embedding_buffer(make_pair: PairFactory) -> None:
    """Their embeddings are put together once more for the draft; a target that reads text has no such."""
    target = catalogued("Qwen/Qwen3.5-27B")
    states = TOKENS * target.hidden_size * 2
    assert drafter_bytes(drafting_itself(make_pair(), target)) == 2 * states
    assert drafter_bytes(drafting_itself(make_pair(), replace(target, tower=Tower()))) == states


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_eagle_heads_have_no_image_embedding_buffer(make_pair: PairFactory, method: str) -> None:
    target = catalogued("Qwen/Qwen3.5-27B")
    head = catalogued("sgl-project/SpecForge:configs/qwen3.5-35b-a3b-eagle3.json")
    pair = replace(make_pair(), target=target, draft=head, method=method, num_speculative_tokens=1)
    assert drafter_bytes(pair) == TOKENS * head.hidden_size * 2


def test_vocabulary_mapping_has_three_tables(make_pair: PairFactory) -> None:
    """From each to the other in 8 bytes a token, and a byte for each token of the draft's: whether both have it."""
    pair = replace(make_pair(), draft=catalogued("Qwen/Qwen3-0.6B"))
    tables = state_bytes(replace(pair, maps_vocabulary=True), ONE_GPU) - state_bytes(
        replace(pair, maps_vocabulary=False, limits=replace(pair.limits, engine_version="0.30.0")), ONE_GPU
    )
    assert tables == (128_256 + 151_936) * 8 + 151_936
