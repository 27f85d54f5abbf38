"""The peak of a forward pass, tensor by tensor: what stands around attention, beside rows, and in workspaces."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from specdecode_operator.enums import Precision
from specdecode_operator.sizing.geometry import (
    DeltaNet,
    DenseMlp,
    Experts,
    LatentAttention,
    Layer,
    ModelGeometry,
    SelectiveScan,
    SelfAttention,
    SingleMixer,
    StateSpace,
)
from specdecode_operator.sizing.memory.activation import expert_workspace_bytes, forward_bytes
from specdecode_operator.sizing.pair import Pair, Parallelism
from specdecode_operator.sizing.rank_layers import Stage

PairFactory = Callable[..., Pair]

HIDDEN, TOKENS = 1000, 8192
TWO = Parallelism(2)
AROUND_ATTENTION: dict[str, tuple[SingleMixer, Parallelism, int]] = {
    "queries, keys, values, output": (SelfAttention(64, 8, 128), TWO, 32 * 128 + 4 * (128 + 128) + 32 * 128),
    "copies of keys and values": (SelfAttention(64, 4, 128), Parallelism(8), 8 * 128 + (128 + 128) + 8 * 128),
    "a gate as wide as the queries": (
        SelfAttention(64, 8, 128, gated=True),
        TWO,
        2 * 32 * 128 + 4 * (128 + 128) + 32 * 128,
    ),
    "narrow values": (SelfAttention(64, 8, 192, value_head_dim=128), TWO, 32 * 192 + 4 * (192 + 128) + 32 * 128),
    "a linear state": (
        DeltaNet(16, 32, 128, 128, 4),
        TWO,
        (2 * 16 * 128 + 2 * 32 * 128) // 2 + 2 * 32 * 128 // 2,
    ),
    "a state of Mamba 2": (
        StateSpace(128, 64, 8, 128, 4),
        TWO,
        (2 * 8192 + 128) // 2 + 2 * 4 * 128 + 8192 // 2 + 2 * (8192 + 2 * 8 * 128) // 2,
    ),
    "a state of Mamba 1": (SelectiveScan(8192, 16, 160, 4), TWO, 2 * 8192 // 2 + 2 * 8192 // 2),
}


def with_layer(model: ModelGeometry, layer: Layer) -> tuple[ModelGeometry, Stage]:
    """Return the model as one layer, and its one stage."""
    return replace(model, hidden_size=HIDDEN, layers=(layer,)), Stage((layer,), is_first=True, is_last=True)


def peak(pair: Pair, layer: Layer, split: Parallelism, precision: Precision = Precision.BF16) -> int:
    model, stage = with_layer(pair.target, layer)
    return forward_bytes(pair, model, stage, precision, split)


@pytest.mark.parametrize(("mixer", "split", "width"), AROUND_ATTENTION.values(), ids=AROUND_ATTENTION)
def test_the_residual_and_what_attention_reads_and_returns(
    make_pair: PairFactory, mixer: SingleMixer, split: Parallelism, width: int
) -> None:
    assert peak(make_pair(), Layer(mixer, None), split) == TOKENS * (HIDDEN + width) * 2


@pytest.mark.parametrize(
    ("changes", "context"),
    [({"max_model_len": 2048}, 8 * 2048), ({"max_model_len": 1024}, 4 * 256 * 16), ({"max_model_len": 9000}, 65536)],
    ids=["eight full requests", "four blocks a request", "64 Ki tokens at most"],
)
def test_latent_attention_sets_a_chunk_of_context_up(
    make_pair: PairFactory, changes: dict[str, int], context: int
) -> None:
    latent = LatentAttention(128, 1536, 512, 128, 64, 96)
    around = HIDDEN + 64 * (128 + 64) + 512 + 64 + 64 * 96
    expected = (TOKENS * around + context * 64 * (128 + 96)) * 2
    assert peak(make_pair(**changes), Layer(latent, None), TWO) == expected


SMALL = SelfAttention(2, 2, 8)
RETURNED = 8
FEED_FORWARD = {
    "gated": (DenseMlp(9000), Precision.BF16, (2 * HIDDEN + 3 * 4500 + RETURNED) * 2),
    "not gated": (DenseMlp(9000, gated=False), Precision.BF16, (2 * HIDDEN + 2 * 4500 + RETURNED) * 2),
    "inputs in eight bits": (DenseMlp(9000), Precision.INT8, (2 * HIDDEN + 3 * 4500 + RETURNED) * 2 + HIDDEN + 4500),
    "experts": (
        Experts(8, 2, 3000, shared_intermediate_size=5000),
        Precision.BF16,
        (3 * HIDDEN + 3 * 2500 + RETURNED) * 2,
    ),
    "experts without gates": (
        Experts(8, 2, 3000, shared_intermediate_size=5000, gated=False),
        Precision.BF16,
        (3 * HIDDEN + 2 * 2500 + RETURNED) * 2,
    ),
    "inputs of experts in eight bits": (
        Experts(8, 2, 3000),
        Precision.INT8,
        (3 * HIDDEN + RETURNED) * 2 + HIDDEN + 2 * 1500,
    ),
    "inputs of shared experts in eight bits": (
        Experts(8, 2, 3000, shared_intermediate_size=9000),
        Precision.INT8,
        (3 * HIDDEN + 3 * 4500 + RETURNED) * 2 + HIDDEN + 4500,
    ),
}


@pytest.mark.parametrize(("feed_forward", "precision", "row"), FEED_FORWARD.values(), ids=FEED_FORWARD)
def test_rows_of_the_feed_forward_layer_and_what_stands_beside_them(
    make_pair: PairFactory, feed_forward: DenseMlp | Experts, precision: Precision, row: int
) -> None:
    older = make_pair("BF16", None, engine_version="0.19.0", enforce_eager=True)
    assert peak(older, Layer(SMALL, feed_forward), TWO, precision) == TOKENS * row


def test_the_widest_layer_decides(make_pair: PairFactory) -> None:
    pair = make_pair("BF16", None, engine_version="0.19.0", enforce_eager=True)
    layers = (Layer(SMALL, DenseMlp(9000)), Layer(SMALL, None), Layer(SMALL, DenseMlp(2000)))
    stage = Stage(layers, is_first=True, is_last=True)
    model = replace(pair.target, hidden_size=HIDDEN, layers=layers)
    row = (2 * HIDDEN + 3 * 4500 + RETURNED) * 2
    assert forward_bytes(pair, model, stage, Precision.BF16, TWO) == TOKENS * row


WORKSPACES = {
    "split over ranks": (Experts(8, 2, 3000), TWO, 2 * (1500 + 3000)),
    "whole": (Experts(8, 2, 3000), Parallelism(2, expert=True), 2 * (3000 + 6000)),
    "narrower than the hidden state": (Experts(8, 2, 600), TWO, 2 * (HIDDEN + HIDDEN)),
    "without gates": (Experts(8, 2, 3000, gated=False), TWO, 2 * (1500 + 1500)),
    "of a compressed hidden state": (Experts(8, 2, 600, latent_size=400), TWO, 2 * (400 + 600)),
    "tokens of all copies": (Experts(8, 2, 6000), Parallelism(2, data=2), 2 * 2 * (1500 + 3000)),
}


@pytest.mark.parametrize(("experts", "split", "row"), WORKSPACES.values(), ids=WORKSPACES)
def test_workspaces_of_experts(llama_8b: ModelGeometry, experts: Experts, split: Parallelism, row: int) -> None:
    model, stage = with_layer(llama_8b, Layer(SMALL, experts))
    assert expert_workspace_bytes(model, stage, Precision.BF16, 100, split) == 100 * row * 2
    dense, its_stage = with_layer(llama_8b, Layer(SMALL, DenseMlp(9000)))
    assert expert_workspace_bytes(dense, its_stage, Precision.BF16, 100, split) == 0
