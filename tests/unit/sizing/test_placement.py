"""Placement on products and nodes."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_operator.enums import Objective, Precision
from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.errors import PlanError
from specdecode_operator.sizing.families.architectures import geometry_from_config
from specdecode_operator.sizing.kernel_support import Available, adaptive_doubt, adaptive_problem
from specdecode_operator.sizing.memory.budget import Pair, Verdict
from specdecode_operator.sizing.pair import Parallelism
from specdecode_operator.sizing.placement import GpuPool, nodes_needed, place_phrase
from specdecode_operator.sizing.plan import plan_on_gpus
from specdecode_operator.sizing.quantization_matrix import (
    MatrixRow,
    choice_phrase,
    missing_checkpoint,
    quantization_matrix,
    ranked,
)
from tests.support.named_checkpoints import named
from tests.support.objects import STATES_CONFIG

H100 = "NVIDIA-H100-80GB-HBM3"
H200 = "NVIDIA-H200"
BOTH = (GpuPool(H100, 8), GpuPool(H200, 8))
QUANTIZED = [each.value for each in Precision if each is not Precision.BF16]
ALL = named(QUANTIZED, QUANTIZED)

PairFactory = Callable[..., Pair]


def _chosen(rows: tuple[MatrixRow, ...], objective: Objective) -> MatrixRow:
    return ranked(rows, objective)[0]


def test_quality_keeps_a_bf16_target_on_the_fewest_gpus(make_pair: PairFactory) -> None:
    row = _chosen(quantization_matrix(make_pair(), BOTH, available=ALL), Objective.QUALITY)
    assert (row.target_precision, row.draft_precision, row.kv_cache_dtype) == (Precision.BF16, Precision.BF16, "auto")
    assert (row.product, row.tensor) == (H200, 2)


@pytest.mark.parametrize("objective", [Objective.QUALITY, Objective.COST])
def test_tensor_ranks_are_placed_on_nvlink_gpus(make_pair: PairFactory, objective: Objective) -> None:
    """The PCIe card is the smaller one, and would be taken otherwise."""
    pools = (GpuPool("NVIDIA-H100-PCIe", 8), GpuPool(H100, 8))
    alone, together = (
        _chosen(quantization_matrix(make_pair(), pools, tensor, available=ALL), objective) for tensor in (1, 4)
    )
    assert (together.verdict, together.product) == (Verdict.FITS, H100)
    assert (alone.verdict, alone.product) == (Verdict.FITS, "NVIDIA-H100-PCIe")


def test_quality_prefers_8_bits_to_4(make_pair: PairFactory) -> None:
    on_two = quantization_matrix(make_pair(), [GpuPool(H100, 2)], available=ALL)
    assert _chosen(on_two, Objective.QUALITY).target_precision is Precision.FP8
    available = named(["INT8", "INT4"], QUANTIZED)
    without_fp8 = tuple(
        row
        for row in quantization_matrix(make_pair(), [GpuPool(H100, 2)], available=available)
        if row.target_precision is not Precision.FP8
    )
    assert _chosen(without_fp8, Objective.QUALITY).target_precision is Precision.INT8


def test_quality_quantizes_the_draft_at_least_as_much_as_the_target(make_pair: PairFactory) -> None:
    row = _chosen(quantization_matrix(make_pair(), [GpuPool(H100, 2)], available=ALL), Objective.QUALITY)
    assert (row.target_precision, row.draft_precision) == (Precision.FP8, Precision.FP8)


def test_quality_quantizes_the_draft_before_the_target(make_pair: PairFactory) -> None:
    # Two H100 leave nothing beside a BF16 target and a BF16 draft, but something beside a quantized draft.
    pair = make_pair(max_model_len=256, memory_utilization_percent=95)
    row = _chosen(quantization_matrix(pair, [GpuPool(H100, 2)], available=ALL), Objective.QUALITY)
    assert row.target_precision is Precision.BF16
    assert row.draft_precision is not Precision.BF16


def test_quality_prefers_more_gpus_to_an_fp8_kv_cache(make_pair: PairFactory) -> None:
    rows = quantization_matrix(make_pair(min_concurrency=40), [GpuPool(H200, 8)])
    smaller = [row for row in rows if row.verdict is Verdict.FITS and (row.gpus, row.target_precision) == (2, "BF16")]
    assert {row.kv_cache_dtype for row in smaller} == {"fp8"}, "the case must be one where two GPUs need it"
    row = _chosen(rows, Objective.QUALITY)
    assert (row.target_precision, row.kv_cache_dtype, row.gpus) == (Precision.BF16, "auto", 4)


def test_capacity_is_counted_per_gpu(make_pair: PairFactory) -> None:
    # With 8 KV heads, 16 GPUs hold copies: hardly more tokens for twice the GPUs.
    rows = quantization_matrix(make_pair(), [GpuPool(H100, 16)])
    assert max(row.tokens for row in rows if row.gpus == 16) > max(row.tokens for row in rows if row.gpus == 8)
    assert _chosen(rows, Objective.CAPACITY).gpus == 8


def test_capacity_maximizes_kv_cache_tokens_per_gpu(make_pair: PairFactory) -> None:
    rows = quantization_matrix(make_pair(), BOTH, available=ALL)
    best = _chosen(rows, Objective.CAPACITY)
    fitting = [row for row in rows if row.verdict is Verdict.FITS]
    assert best.tokens / best.gpus == max(row.tokens / row.gpus for row in fitting)


def test_cost_minimizes_gpus_and_then_quantization(make_pair: PairFactory) -> None:
    row = _chosen(quantization_matrix(make_pair(), [GpuPool(H200, 8)], available=ALL), Objective.COST)
    assert (row.gpus, row.target_precision) == (1, Precision.FP8)
    both = _chosen(quantization_matrix(make_pair(), BOTH, available=ALL), Objective.COST)
    assert (both.gpus, both.product) == (1, H100), "the smaller device costs less"


def test_fitting_row_ranks_before_a_tight_less_quantized_row(make_pair: PairFactory) -> None:
    pair = make_pair("BF16", None, min_concurrency=2)
    rows = quantization_matrix(pair, [GpuPool(H100, 2)])
    tight = [row for row in rows if row.target_precision is Precision.BF16 and row.verdict is Verdict.TIGHT]
    assert tight, "the case must be one where BF16 is tight"
    assert _chosen(rows, Objective.QUALITY).verdict is Verdict.FITS
    assert _chosen(tuple(tight), Objective.QUALITY).verdict is Verdict.TIGHT


def test_the_choice_is_explained(make_pair: PairFactory) -> None:
    best = _chosen(quantization_matrix(make_pair(), BOTH), Objective.QUALITY)
    phrase = choice_phrase(best, Objective.QUALITY)
    assert phrase.startswith("Quality takes BF16 target, BF16 draft: the least quantized target that fits")
    nearest = _chosen(quantization_matrix(make_pair(), [GpuPool(H100, 1)]), Objective.QUALITY)
    assert choice_phrase(nearest, Objective.QUALITY) == "no precision fits, FP8 target, FP8 draft lacks least"


def test_missing_checkpoint_that_would_fit_is_named(make_pair: PairFactory) -> None:
    missing = missing_checkpoint(quantization_matrix(make_pair(), [GpuPool(H100, 1)]), Objective.QUALITY)
    assert any(f"{precision} target" in missing for precision in ("NVFP4", "INT4"))
    assert "needs a checkpoint" in missing
    hopeless = quantization_matrix(make_pair(min_concurrency=100_000), BOTH)
    assert missing_checkpoint(hopeless, Objective.COST) == ""


precisions = st.frozensets(st.sampled_from(QUANTIZED))
availabilities = st.builds(named, precisions, precisions)
changes = st.fixed_dictionaries(
    {"max_model_len": st.sampled_from([256, 8192, 65_536]), "min_concurrency": st.sampled_from([1, 8, 200])}
)


@settings(deadline=None, max_examples=40)
@given(availabilities, changes, st.sampled_from([1, 2, 8]), st.randoms(use_true_random=False))
def test_best_row_fits_and_order_of_input_is_irrelevant(
    make_pair: PairFactory, available: Available, changed: dict[str, int], gpus: int, shuffler: random.Random
) -> None:
    pair = make_pair(**changed)
    rows = quantization_matrix(pair, [GpuPool(H100, gpus), GpuPool(H200, gpus)], available=available)
    usable = [row for row in rows if row.launchable and row.verdict is not Verdict.DOES_NOT_FIT]
    best = Verdict.FITS if any(row.verdict is Verdict.FITS for row in usable) else Verdict.TIGHT
    shuffled = list(rows)
    shuffler.shuffle(shuffled)
    for objective in Objective:
        order = ranked(rows, objective)
        if usable:
            assert order[0] in usable
            assert order[0].concurrency >= pair.limits.min_concurrency
            assert order[0].verdict is best
        assert ranked(shuffled, objective) == order


def test_cost_uses_the_minimum_number_of_gpus(make_pair: PairFactory) -> None:
    rows = quantization_matrix(make_pair(min_concurrency=60), BOTH)
    fitting = [row.gpus for row in rows if row.launchable and row.verdict is Verdict.FITS]
    assert _chosen(rows, Objective.COST).gpus == min(fitting) > 1


@pytest.mark.parametrize("objective", list(Objective))
def test_unlaunchable_rows_are_never_chosen(make_pair: PairFactory, objective: Objective) -> None:
    rows = quantization_matrix(make_pair(), BOTH)
    refused = [replace(row, problems=("no",)) for row in rows]
    assert ranked(refused, objective) == []


# Over how many nodes a replica lies: as few as can be, and cut where nothing is torn apart.


@pytest.mark.parametrize(
    ("tensor", "spread", "nodes"),
    [
        (8, Parallelism(), 1),
        (4, Parallelism(pipeline=2), 1),
        (8, Parallelism(pipeline=2), 2),
        (8, Parallelism(pipeline=4), 4),
        # Two stages of four fit a node, so that three stages take three nodes of one each, not two of one and a half.
        (4, Parallelism(pipeline=3), 3),
        (4, Parallelism(pipeline=6), 3),
        (16, Parallelism(), 2),
        (64, Parallelism(), 8),
        (16, Parallelism(pipeline=2), 4),
        (8, Parallelism(data=2), 2),
        (2, Parallelism(data=6), 2),
        (1, Parallelism(data=16, expert=True), 2),
        (4, Parallelism(pipeline=2, data=3), 3),
        # A copy that is larger than a node.
        (8, Parallelism(pipeline=2, data=2), None),
        (16, Parallelism(data=2), None),
        # No two nodes have the same share.
        (12, Parallelism(), 2),
        (3, Parallelism(pipeline=3), 3),
        (11, Parallelism(), 11),
        (128, Parallelism(), None),
    ],
)
def test_nodes_needed_with_eight_gpus_per_node(tensor: int, spread: Parallelism, nodes: int | None) -> None:
    assert nodes_needed(GpuPool(H200, 8, 12), tensor, spread) == nodes


def test_nodes_needed_is_none_beyond_the_existing_nodes() -> None:
    assert nodes_needed(GpuPool(H200, 8, 2), 8, Parallelism(pipeline=2)) == 2
    assert nodes_needed(GpuPool(H200, 8, 1), 8, Parallelism(pipeline=2)) is None
    assert nodes_needed(GpuPool(H200, 8, 2), 8, Parallelism(pipeline=3)) is None


SPREADS = st.builds(Parallelism, pipeline=st.integers(1, 8), data=st.integers(1, 8))


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 64), SPREADS)
def test_node_shares_are_even_and_split_no_group(per_node: int, nodes: int, tensor: int, spread: Parallelism) -> None:
    needed = nodes_needed(GpuPool(H200, per_node, nodes), tensor, spread)
    gpus = tensor * spread.groups
    assert (needed == 1) == (gpus <= per_node)
    if needed is None or needed == 1:
        return
    share, rest = divmod(gpus, needed)
    assert rest == 0
    assert share <= per_node
    assert needed <= nodes
    if tensor <= per_node:
        assert share % tensor == 0, "whole groups that share layers"
    if spread.data > 1:
        assert share % (tensor * spread.pipeline) == 0, "whole copies"


def test_placement_phrase() -> None:
    assert place_phrase(8, 1, H200) == "8 x NVIDIA-H200"
    assert place_phrase(16, 2, H200) == "2 nodes x 8 x NVIDIA-H200"


# Verifying only as many drafted tokens as pay: what the target's layers and the GPU's kernels make of it.

HOPPER, A100 = "NVIDIA-H100-80GB-HBM3", "NVIDIA-A100-SXM4-80GB"


def adapting(pair: Pair, model: str | None = None, version: str = "0.33.0", backend: str | None = None) -> Pair:
    target = pair.target if model is None else find_geometry(model)
    assert target is not None, model
    limits = replace(pair.limits, engine_version=version, attention_backend=backend)
    return replace(pair, target=target, limits=limits, adaptive_verification=True)


def message(pair: Pair, product: str = HOPPER) -> str:
    problem = adaptive_problem(product, pair)
    return "" if problem is None else f"{problem.field}: {problem.message}"


def test_adaptive_verification_of_dense_attention_needs_triton_on_ampere(make_pair: PairFactory) -> None:
    pair = make_pair()
    assert message(adapting(pair)) == ""
    on_ampere = message(adapting(pair), A100)
    assert on_ampere.startswith("speculation.adaptiveVerification: on NVIDIA-A100-SXM4-80GB vLLM 0.33.0 chooses")
    assert "add --attention-backend TRITON_ATTN to engine.extraArgs" in on_ampere
    assert message(adapting(pair, backend="TRITON_ATTN"), A100) == ""
    assert message(adapting(pair, "openai/gpt-oss-20b"), A100) == "", "vLLM chooses Triton for sinks"
    assert message(replace(adapting(pair), adaptive_verification=False), A100) == ""
    assert message(adapting(pair), "48GiB") == "", "a GPU of which nothing is known"


def test_adaptive_verification_refuses_flashinfer(make_pair: PairFactory) -> None:
    said = message(adapting(make_pair(), backend="FLASHINFER"))
    assert said.startswith("engine.extraArgs: with speculation.adaptiveVerification vLLM 0.33.0 refuses")
    assert "FLASH_ATTN, " in said
    assert "FLASH_ATTN," not in message(adapting(make_pair(), backend="FLASH_ATTN"), A100)


@pytest.mark.parametrize("product", [HOPPER, A100])
def test_adaptive_verification_is_refused_for_latent_attention(make_pair: PairFactory, product: str) -> None:
    assert "has no kernel on" in message(adapting(make_pair(), "deepseek-ai/DeepSeek-V3"), product)


@pytest.mark.parametrize(
    ("model", "first"),
    [
        ("nvidia/Nemotron-H-56B-Base-8K", "0.33.0"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", None),
    ],
)
def test_adaptive_verification_supports_mamba_2_since_0_33(
    make_pair: PairFactory, model: str, first: str | None
) -> None:
    assert "plans the states of" in message(adapting(make_pair(), model, "0.32.0"))
    assert (message(adapting(make_pair(), model, "0.33.0")) == "") == (first == "0.33.0")


@pytest.mark.parametrize("architecture", ["Qwen3XPressModel", "DFlashQwen3XPressModel"])
def test_adaptive_verification_is_refused_for_xpress_heads(make_pair: PairFactory, architecture: str) -> None:
    pair = adapting(make_pair())
    assert pair.draft is not None
    refined = replace(pair, method="dflash", draft=replace(pair.draft, architecture=architecture))
    assert "does not ask" in message(refined)


def test_adaptive_verification_is_accepted_without_attention(make_pair: PairFactory) -> None:
    pair = replace(make_pair(), target=geometry_from_config("states", STATES_CONFIG))
    assert message(adapting(pair), A100) == ""


def test_adaptive_verification_needs_0_28(make_pair: PairFactory) -> None:
    assert "needs vLLM 0.28 or later" in message(adapting(make_pair(), version="0.20.0"))


def test_plan_skips_gpus_without_an_adaptive_kernel(make_pair: PairFactory) -> None:
    pair = adapting(make_pair())
    assert plan_on_gpus(pair, [GpuPool(A100, 8), GpuPool(HOPPER, 8)], None).chosen.product == HOPPER
    with pytest.raises(PlanError, match="add --attention-backend TRITON_ATTN"):
        plan_on_gpus(pair, [GpuPool(A100, 8)], None)


def test_unknown_adaptive_kernels_on_a_gpu_raise_a_doubt(make_pair: PairFactory) -> None:
    pair = adapting(make_pair())
    assert adaptive_doubt(HOPPER, pair) is None
    assert "NVIDIA-B200 was not read" in str(adaptive_doubt("NVIDIA-B200", pair))
    assert adaptive_doubt("NVIDIA-B200", make_pair()) is None
