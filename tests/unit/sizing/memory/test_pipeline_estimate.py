"""Estimates with pipeline stages: each stage has its own terms, and all get the blocks of the tightest."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.devices import find_device
from specdecode_operator.sizing.memory.activation import activation_bytes
from specdecode_operator.sizing.memory.budget import (
    Budget,
    Pair,
    Parallelism,
    estimate,
    graph_bytes,
    graph_pool_bytes,
    non_torch_bytes,
    slack_bytes,
)
from specdecode_operator.sizing.memory.buffers import further_graphs, state_bytes
from specdecode_operator.sizing.rank_layers import stages

PairFactory = Callable[..., Pair]
VERSIONS = ["0.17.0", "0.19.0", "0.21.0", "0.25.0", "0.27.0", "0.32.0"]


def on_h100(pair: Pair, split: Parallelism) -> Budget:
    device = find_device("NVIDIA-H100-80GB-HBM3")
    assert device is not None
    return estimate(pair, device, split)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("tensor", [1, 2])
def test_more_stages_hold_more_tokens(make_pair: PairFactory, version: str, tensor: int) -> None:
    pair = make_pair("FP8", None, engine_version=version)
    tokens = [on_h100(pair, Parallelism(tensor, stage_count)).kv_cache_tokens for stage_count in (1, 2, 4)]
    assert tokens == sorted(tokens)
    assert tokens[0] < tokens[-1]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_identity_holds_on_the_tightest_stage(make_pair: PairFactory, version: str) -> None:
    budget = on_h100(make_pair("FP8", None, engine_version=version), Parallelism(2, 4))
    terms = budget.weights_bytes + budget.state_bytes + budget.activation_bytes + budget.cuda_graphs_bytes
    assert budget.requested_bytes - terms - budget.non_torch_bytes == budget.available_kv_bytes


def test_the_stage_that_samples_is_the_tightest_of_equal_layers(make_pair: PairFactory) -> None:
    """1024 requests: the last stage makes their logits; the first has an embedding as large as its output head."""
    pair = make_pair("FP8", None, engine_version="0.19.0", max_num_seqs=1024)
    budget = on_h100(pair, Parallelism(1, 4))
    sampled = 1024 * 128_256 * 14 + 132 * 128_256 * 4 + (8192 + 2 * 1024) * 8192 * 2
    received = 2 * 8192 * 8192 * 2
    assert budget.activation_bytes == 32 * 2**20 + received + sampled


def test_buffers_lie_on_the_stages_that_use_them(make_pair: PairFactory) -> None:
    pair, split = make_pair("FP8", None), Parallelism(1, 3)
    first, middle, last = (state_bytes(pair, split, stage) for stage in stages(pair.target, 3))
    assert (first, middle) == (0, 2 * 8192 * 8192 * 2)
    assert last > middle, "the sampler's buffers beside what the stage receives"


@pytest.mark.parametrize(("version", "states"), [("0.32.0", [1, 2, 2]), ("0.19.0", [1, 1, 1])])
def test_embeddings_that_images_are_put_into_lie_on_each_stage_of_v1(
    make_pair: PairFactory, version: str, states: list[int]
) -> None:
    """V2 has them on the first stage alone; the later ones receive hidden states and residual."""
    target = find_geometry("google/gemma-3-27b-it")
    assert target is not None
    pair = replace(make_pair("BF16", None, engine_version=version, max_num_seqs=1), target=target)
    one = 8192 * target.hidden_size * 2
    assert [state_bytes(pair, Parallelism(1, 3), stage) // one for stage in stages(target, 3)] == states


@pytest.mark.parametrize(("version", "charged"), [("0.25.0", False), ("0.27.0", True)])
def test_buffers_are_charged_or_eat_the_slack(make_pair: PairFactory, version: str, *, charged: bool) -> None:
    pair = make_pair("FP8", None, engine_version=version)
    budget = on_h100(pair, Parallelism(2))
    assert (budget.state_bytes > 0) is charged
    assert pair.era.charges_state is charged


def test_graphs_that_are_not_charged_eat_the_slack(make_pair: PairFactory) -> None:
    device = find_device("NVIDIA-H100-80GB-HBM3")
    assert device is not None

    def slack(**limits: Any) -> int:
        return slack_bytes(
            make_pair("FP8", None, **limits), device.total_bytes, device.total_bytes * 9 // 10, Parallelism(2)
        )

    assert slack(engine_version="0.19.0", enforce_eager=True) - slack(engine_version="0.19.0") > GIB
    assert slack(engine_version="0.20.0", enforce_eager=True) == slack(engine_version="0.20.0")


def test_libraries_take_more_with_more_ranks(make_pair: PairFactory) -> None:
    pair = make_pair("FP8", None, engine_version="0.19.0")
    sizes = [non_torch_bytes(pair, Parallelism(tensor)) for tensor in (1, 2, 4, 8)]
    assert sizes == sorted(sizes)
    assert sizes[-1] / GIB == pytest.approx(2.15 + 0.0016 * 80)
    assert non_torch_bytes(pair, Parallelism(1, 2)) < sizes[0], "NCCL was set up before vLLM first looks"


def test_fewer_capture_sizes_and_drafts_change_the_graphs(make_pair: PairFactory) -> None:
    for version in ("0.20.0", "0.32.0"):
        alone = make_pair("FP8", None, engine_version=version)
        few = replace(alone, limits=replace(alone.limits, max_num_seqs=8))
        assert 0 < graph_bytes(few, Parallelism(2)) < graph_bytes(alone, Parallelism(2))
        told = replace(alone, limits=replace(alone.limits, max_graph_tokens=16))
        assert 0 < graph_bytes(told, Parallelism(2)) == graph_bytes(few, Parallelism(2)), "twice the 8 requests"
        most = replace(alone, limits=replace(alone.limits, max_graph_tokens=1024))
        assert graph_bytes(most, Parallelism(2)) > graph_bytes(alone, Parallelism(2))
    v1 = make_pair("FP8", engine_version="0.20.0")
    assert graph_bytes(v1, Parallelism(2)) > graph_bytes(
        make_pair("FP8", None, engine_version="0.20.0"), Parallelism(2)
    )
    assert graph_bytes(make_pair("FP8", enforce_eager=True), Parallelism(2)) == 0


def test_graphs_of_other_draft_lengths_are_counted(make_pair: PairFactory) -> None:
    alone = replace(make_pair("FP8"), num_speculative_tokens=5)
    alone = replace(alone, limits=replace(alone.limits, max_num_seqs=256))
    without, two, three = (replace(alone, other_draft_lengths=frozenset(tokens)) for tokens in ((0,), (2,), (0, 2)))
    # Of 51 sizes up to 512, those up to the 256 requests; in threes, every size but 512 and 504, which round to 504.
    assert further_graphs(without) == 35
    assert further_graphs(two) == len({-(-size // 3) for size in (1, 2, 4, *range(8, 256, 8), *range(256, 512, 16))})
    assert further_graphs(three) == further_graphs(without) + further_graphs(two)
    more = graph_bytes(three, Parallelism(2)) - graph_bytes(alone, Parallelism(2))
    assert more == further_graphs(three) * 20 * 2**20
    on_v1 = replace(three, limits=replace(three.limits, engine_version="0.30"))
    assert graph_bytes(on_v1, Parallelism(2)) == graph_bytes(
        replace(on_v1, other_draft_lengths=frozenset()), Parallelism(2)
    )


@pytest.mark.parametrize(("lengths", "more"), [({0}, 0), ({1}, 0), ({2}, 1), ({0, 1, 2, 3}, 2)])
def test_a_head_has_graphs_for_each_length_at_which_it_decodes(
    make_pair: PairFactory, lengths: set[int], more: int
) -> None:
    """Its first token comes with the prefill; 0.2 GiB a length."""
    head = find_geometry("sgl-project/SpecForge:configs/llama3-70B-ealge3.json")
    plain = replace(make_pair(), method="eagle3", draft=head)
    pair = replace(plain, other_draft_lengths=frozenset(lengths))
    of_head = graph_bytes(pair, Parallelism(2)) - graph_bytes(plain, Parallelism(2)) - further_graphs(pair) * 20 * 2**20
    assert of_head / GIB == pytest.approx(0.2 * more)


@pytest.mark.parametrize("version", ["0.20.0", "0.32.0"])
def test_only_the_mode_without_graphs_takes_less_than_the_usual_one(make_pair: PairFactory, version: str) -> None:
    usual = make_pair("FP8", engine_version=version)
    for mode in ("PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"):
        chosen = make_pair("FP8", engine_version=version, graph_mode=mode)
        assert graph_bytes(chosen, Parallelism(2)) == graph_bytes(usual, Parallelism(2)) > 0
        assert graph_pool_bytes(chosen, Parallelism(2)) == graph_pool_bytes(usual, Parallelism(2)) > 0
    without = make_pair("FP8", engine_version=version, graph_mode="NONE")
    assert graph_bytes(without, Parallelism(2)) == graph_pool_bytes(without, Parallelism(2)) == 0
    assert activation_bytes(without, Parallelism(2)) == activation_bytes(usual, Parallelism(2)), "still compiled"


def test_a_draft_that_samples_keeps_its_logits(make_pair: PairFactory) -> None:
    """v1/worker/gpu/spec_decode/speculator.py: requests x K x vocabulary, in BF16 here."""
    greedy = make_pair("FP8", engine_version="0.32.0")
    sampling = replace(greedy, samples_drafts=True)
    more = state_bytes(sampling, Parallelism(2)) - state_bytes(greedy, Parallelism(2))
    assert more == greedy.limits.max_num_seqs * greedy.num_speculative_tokens * 128_256 * 2
    without_draft = make_pair("FP8", None, engine_version="0.32.0")
    assert state_bytes(replace(without_draft, samples_drafts=True), Parallelism(2)) == state_bytes(
        without_draft, Parallelism(2)
    )
