"""What adaptive verification takes, by hand from vLLM's source; tests/engine holds the graphs against the real one."""

from dataclasses import replace

import pytest

from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.memory.activation import activation_bytes, verification_bytes
from specdecode_operator.sizing.memory.budget import graph_bytes, slack_bytes
from specdecode_operator.sizing.memory.buffers import (
    adaptive_graphs,
    captured_sizes,
    cost_profile_s,
    decode_graphs,
    profiled_steps,
    state_bytes,
)
from specdecode_operator.sizing.pair import Pair, Parallelism, without_speculation
from tests.unit.sizing.conftest import PairFactory

ONE_GPU = Parallelism()


@pytest.fixture
def fixed(make_pair: PairFactory) -> Pair:
    return replace(make_pair("FP8", max_num_seqs=256, max_num_batched_tokens=8192), num_speculative_tokens=7)


@pytest.fixture
def adaptive(fixed: Pair) -> Pair:
    return replace(fixed, adaptive_verification=True)


def test_two_tables_are_charged_and_the_rest_comes_out_of_the_slack(fixed: Pair, adaptive: Pair) -> None:
    assert state_bytes(adaptive, ONE_GPU) - state_bytes(fixed, ONE_GPU) == 2 * 256 * 7 * 4
    taken = slack_bytes(fixed, 80 * GIB, 70 * GIB, ONE_GPU) - slack_bytes(adaptive, 80 * GIB, 70 * GIB, ONE_GPU)
    assert taken == 3 * 256 * 7 * 4 + (3 * 256 + 1) * 4


@pytest.mark.parametrize(
    ("tokens", "more"),
    # Of 51 sizes and multiples of K + 1: by 8, those below 8 and of 8 are one; by 16, every other one is.
    [(7, 3), (15, 51 - 32), (0, 0)],
)
def test_every_size_has_a_graph_of_its_own(adaptive: Pair, tokens: int, more: int) -> None:
    pair = replace(adaptive, num_speculative_tokens=tokens)
    assert adaptive_graphs(pair) == more
    of_graphs = graph_bytes(pair, ONE_GPU) - graph_bytes(replace(pair, adaptive_verification=False), ONE_GPU)
    assert of_graphs == more * 20 * 2**20


def test_up_to_0_32_the_steps_that_are_timed_are_taken_for_graphs(adaptive: Pair) -> None:
    older = replace(adaptive, limits=replace(adaptive.limits, engine_version="0.32.0"))
    assert graph_bytes(older, ONE_GPU) - graph_bytes(adaptive, ONE_GPU) == activation_bytes(older, ONE_GPU)


def test_graphs_of_any_mix_serve_every_length(adaptive: Pair) -> None:
    by_batch = replace(adaptive, other_draft_lengths=frozenset({0, 3}))
    assert graph_bytes(by_batch, ONE_GPU) == graph_bytes(adaptive, ONE_GPU)


def test_no_more_is_verified_than_one_piece_holds(adaptive: Pair) -> None:
    many = replace(adaptive, limits=replace(adaptive.limits, max_num_seqs=1024))
    rows = 2**30 // (128_256 * 4)
    assert verification_bytes(many, 1) == rows * 128_256 * (2 + 2 + 4)
    assert verification_bytes(replace(many, adaptive_verification=False), 1) == 8192 * 128_256 * (2 + 2) + GIB
    few = replace(adaptive, limits=replace(adaptive.limits, max_num_seqs=16))
    assert verification_bytes(few, 1) == 16 * 8 * 128_256 * (2 + 2 + 4)
    # One row a request is always verified.
    most = replace(adaptive, limits=replace(adaptive.limits, max_num_seqs=4096))
    assert verification_bytes(most, 1) == 4096 * 128_256 * (2 + 2) + GIB


def test_each_size_is_timed_five_times_and_doubled_up_to_a_full_step(adaptive: Pair) -> None:
    steps = profiled_steps(adaptive)
    assert steps[:5] == (1,) * 5
    assert [*dict.fromkeys(steps)][-6:] == [512, 768, 1024, 2048, 4096, 8192]
    assert len(steps) == 5 * (51 + 5)


def test_a_short_full_step_is_captured_and_sizes_that_are_asked_for_stay_in_steps_of_8(fixed: Pair) -> None:
    short = replace(fixed, limits=replace(fixed.limits, max_num_batched_tokens=100))
    assert captured_sizes(short)[-2:] == (96, 100)
    asked = replace(fixed, num_speculative_tokens=4, limits=replace(fixed.limits, max_graph_tokens=32))
    assert captured_sizes(asked) == (1, 2, 4, 8, 16, 24, 32)


def test_the_start_takes_longer_by_the_profile(fixed: Pair, adaptive: Pair) -> None:
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
def test_graphs_are_those_of_the_engine(adaptive: Pair, requests: int, tokens: int, whole: int, mixed: int) -> None:
    """What CudaGraphManager of vLLM 0.33 makes of these settings, asked without a GPU."""
    pair = replace(adaptive, num_speculative_tokens=tokens, limits=replace(adaptive.limits, max_num_seqs=requests))
    assert decode_graphs(pair) == whole
    assert decode_graphs(pair) + adaptive_graphs(pair) == mixed
