"""Which row is chosen for each objective, and what never is."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_operator.enums import Objective, Precision
from specdecode_operator.sizing.kernel_support import Available
from specdecode_operator.sizing.memory.budget import Pair, Verdict
from specdecode_operator.sizing.placement import GpuPool
from specdecode_operator.sizing.quantization_matrix import (
    MatrixRow,
    choice_phrase,
    missing_checkpoint,
    quantization_matrix,
    ranked,
)
from tests.support.named_checkpoints import named

H100 = "NVIDIA-H100-80GB-HBM3"
H200 = "NVIDIA-H200"
BOTH = (GpuPool(H100, 8), GpuPool(H200, 8))
QUANTIZED = [each.value for each in Precision if each is not Precision.BF16]
ALL = named(QUANTIZED, QUANTIZED)

PairFactory = Callable[..., Pair]


def _chosen(rows: tuple[MatrixRow, ...], objective: Objective) -> MatrixRow:
    return ranked(rows, objective)[0]


def test_quality_keeps_the_target_whole_and_takes_the_fewest_gpus(make_pair: PairFactory) -> None:
    row = _chosen(quantization_matrix(make_pair(), BOTH, available=ALL), Objective.QUALITY)
    assert (row.target_precision, row.draft_precision, row.kv_cache_dtype) == (Precision.BF16, Precision.BF16, "auto")
    assert (row.product, row.tensor) == (H200, 2)


@pytest.mark.parametrize("objective", [Objective.QUALITY, Objective.COST])
def test_ranks_of_one_layer_are_put_where_nvlink_joins_them(make_pair: PairFactory, objective: Objective) -> None:
    """The PCIe card is the smaller one, and would be taken otherwise."""
    pools = (GpuPool("NVIDIA-H100-PCIe", 8), GpuPool(H100, 8))
    alone, together = (
        _chosen(quantization_matrix(make_pair(), pools, tensor, available=ALL), objective) for tensor in (1, 4)
    )
    assert (together.verdict, together.product) == (Verdict.FITS, H100)
    assert (alone.verdict, alone.product) == (Verdict.FITS, "NVIDIA-H100-PCIe")


def test_quality_takes_eight_bits_before_four(make_pair: PairFactory) -> None:
    on_two = quantization_matrix(make_pair(), [GpuPool(H100, 2)], available=ALL)
    assert _chosen(on_two, Objective.QUALITY).target_precision is Precision.FP8
    available = named(["INT8", "INT4"], QUANTIZED)
    without_fp8 = tuple(
        row
        for row in quantization_matrix(make_pair(), [GpuPool(H100, 2)], available=available)
        if row.target_precision is not Precision.FP8
    )
    assert _chosen(without_fp8, Objective.QUALITY).target_precision is Precision.INT8


def test_quality_quantizes_the_draft_no_less_than_the_target(make_pair: PairFactory) -> None:
    row = _chosen(quantization_matrix(make_pair(), [GpuPool(H100, 2)], available=ALL), Objective.QUALITY)
    assert (row.target_precision, row.draft_precision) == (Precision.FP8, Precision.FP8)


def test_quality_quantizes_the_draft_rather_than_the_target(make_pair: PairFactory) -> None:
    # Two H100 leave nothing beside a BF16 target and a BF16 draft, but something beside a quantized draft.
    pair = make_pair(max_model_len=256, memory_utilization_percent=95)
    row = _chosen(quantization_matrix(pair, [GpuPool(H100, 2)], available=ALL), Objective.QUALITY)
    assert row.target_precision is Precision.BF16
    assert row.draft_precision is not Precision.BF16


def test_quality_takes_more_gpus_before_an_fp8_kv_cache(make_pair: PairFactory) -> None:
    rows = quantization_matrix(make_pair(min_concurrency=40), [GpuPool(H200, 8)])
    smaller = [row for row in rows if row.verdict is Verdict.FITS and (row.gpus, row.target_precision) == (2, "BF16")]
    assert {row.kv_cache_dtype for row in smaller} == {"fp8"}, "the case must be one where two GPUs need it"
    row = _chosen(rows, Objective.QUALITY)
    assert (row.target_precision, row.kv_cache_dtype, row.gpus) == (Precision.BF16, "auto", 4)


def test_capacity_counts_for_each_gpu(make_pair: PairFactory) -> None:
    # With 8 KV heads, 16 GPUs hold copies: hardly more tokens for twice the GPUs.
    rows = quantization_matrix(make_pair(), [GpuPool(H100, 16)])
    assert max(row.tokens for row in rows if row.gpus == 16) > max(row.tokens for row in rows if row.gpus == 8)
    assert _chosen(rows, Objective.CAPACITY).gpus == 8


def test_capacity_takes_the_most_tokens_for_each_gpu(make_pair: PairFactory) -> None:
    rows = quantization_matrix(make_pair(), BOTH, available=ALL)
    best = _chosen(rows, Objective.CAPACITY)
    fitting = [row for row in rows if row.verdict is Verdict.FITS]
    assert best.tokens / best.gpus == max(row.tokens / row.gpus for row in fitting)


def test_cost_takes_one_gpu_and_then_the_gentlest_precision_on_it(make_pair: PairFactory) -> None:
    row = _chosen(quantization_matrix(make_pair(), [GpuPool(H200, 8)], available=ALL), Objective.COST)
    assert (row.gpus, row.target_precision) == (1, Precision.FP8)
    both = _chosen(quantization_matrix(make_pair(), BOTH, available=ALL), Objective.COST)
    assert (both.gpus, both.product) == (1, H100), "the smaller device costs less"


def test_a_fit_comes_before_a_tight_row_of_a_gentler_precision(make_pair: PairFactory) -> None:
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


def test_the_checkpoint_that_would_help_is_named(make_pair: PairFactory) -> None:
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
def test_choice_never_breaks_its_promises(
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


def test_cost_never_takes_more_gpus_than_it_must(make_pair: PairFactory) -> None:
    rows = quantization_matrix(make_pair(min_concurrency=60), BOTH)
    fitting = [row.gpus for row in rows if row.launchable and row.verdict is Verdict.FITS]
    assert _chosen(rows, Objective.COST).gpus == min(fitting) > 1


@pytest.mark.parametrize("objective", list(Objective))
def test_unlaunchable_rows_are_never_taken(make_pair: PairFactory, objective: Objective) -> None:
    rows = quantization_matrix(make_pair(), BOTH)
    refused = [replace(row, problems=("no",)) for row in rows]
    assert ranked(refused, objective) == []
