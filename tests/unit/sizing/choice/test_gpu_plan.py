"""Which GPUs are chosen, how it is explained, and what fixes a plan that does not fit."""

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from specdecode_operator.enums import FP8_ELEMENT_BYTES, Objective, Precision
from specdecode_operator.sizing.arithmetic import GIB, format_gib
from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.errors import PlanError
from specdecode_operator.sizing.memory.budget import Pair, Term, Verdict
from specdecode_operator.sizing.pair import Parallelism
from specdecode_operator.sizing.plan import GpuPool, PlanOptions, plan_on_gpus
from specdecode_operator.sizing.quantization_matrix import quantization_matrix, ranked
from tests.support.named_checkpoints import named

H100 = "NVIDIA-H100-80GB-HBM3"
H200 = "NVIDIA-H200"
EIGHT_H100 = GpuPool(H100, 8)
EIGHT_H200 = GpuPool(H200, 8)
EIGHT_A100 = GpuPool("NVIDIA-A100-SXM4-80GB", 8)

PairFactory = Callable[..., Pair]


def test_bf16_pair_on_two_h100_does_not_fit_and_says_why(make_pair: PairFactory) -> None:
    plan = plan_on_gpus(make_pair(), [EIGHT_H100], 2)
    assert plan.verdict is Verdict.DOES_NOT_FIT
    assert plan.explanation == (
        "2 x NVIDIA-H100-80GB-HBM3 per replica (TP 2) does not fit: weights take 73.2 of 72.9 GiB usable per GPU, "
        "nothing is left for the KV cache; smallest change: target.quantization: FP8 gives 127,024 tokens "
        "(15.5 requests of 8192)"
    )
    assert [(fix.change, fix.tokens) for fix in plan.fixes] == [
        ("target.quantization: FP8", 127_024),
        ("parallelism.tensor: 4", 301_408),
        ("accelerator.products: [NVIDIA-H200]", 238_896),
        ("speculation.draft.model: meta-llama/Llama-3.2-1B-Instruct", 9_456),
        ("speculation.method: none", 18_176),
    ]
    assert [fix.change for fix in plan.fixes if fix.verdict is Verdict.TIGHT] == [plan.fixes[3].change]
    assert plan.fixes[2].sentence.endswith("on 2 x NVIDIA-H200")


def test_bf16_pair_goes_to_h200_where_both_exist(make_pair: PairFactory) -> None:
    plan = plan_on_gpus(make_pair(), [EIGHT_H100, EIGHT_H200], 2)
    assert (plan.verdict, plan.chosen.product, plan.chosen.tensor) == (Verdict.FITS, H200, 2)
    assert plan.fixes == ()
    assert [row.product for row in plan.rows] == [H200, H100]
    assert plan.explanation == (
        "2 x NVIDIA-H200 per replica (TP 2) fits: 238,896 tokens (29.2 requests of 8192) "
        "beside 73.2 GiB of weights per GPU"
    )


def test_fp8_target_takes_the_smaller_device(make_pair: PairFactory) -> None:
    plan = plan_on_gpus(make_pair("FP8"), [EIGHT_H200, EIGHT_H100], 2)
    assert (plan.verdict, plan.chosen.product) == (Verdict.FITS, H100)
    assert plan.chosen.budget.kv_cache_tokens == 127_024


def test_without_a_tensor_the_fewest_gpus_win(make_pair: PairFactory) -> None:
    plan = plan_on_gpus(make_pair(), [EIGHT_H100], None)
    assert (plan.verdict, plan.chosen.tensor) == (Verdict.FITS, 4)
    assert sorted(row.tensor for row in plan.rows) == [1, 2, 4, 8]
    assert plan_on_gpus(make_pair("FP8", "FP8"), [EIGHT_H200], None).chosen.tensor == 1


def test_a_fit_comes_before_a_tight_row_of_fewer_gpus(make_pair: PairFactory) -> None:
    pair = make_pair("BF16", None, min_concurrency=2)
    alone = plan_on_gpus(pair, [GpuPool(H100, 2)], None)
    assert (alone.verdict, alone.chosen.tensor) == (Verdict.TIGHT, 2)
    assert "0.3 GiB per GPU are to spare where the estimate may err by 1.5 GiB" in alone.explanation
    assert alone.fixes == ()
    roomier = plan_on_gpus(pair, [EIGHT_H100], None)
    assert (roomier.verdict, roomier.chosen.tensor) == (Verdict.FITS, 4)


def test_the_order_of_pools_changes_nothing(make_pair: PairFactory) -> None:
    pools = [EIGHT_H100, EIGHT_H200, GpuPool(H100, 2), GpuPool("NVIDIA-A100-SXM4-80GB", 8)]
    for pair in (make_pair(), make_pair("FP8"), make_pair(min_concurrency=2000)):
        assert len({repr(plan_on_gpus(pair, order, None)) for order in permutations(pools)}) == 1


@pytest.mark.parametrize(
    ("model", "needs_triton"),
    [
        ("openai/gpt-oss-120b", "the attention sinks"),
        ("deepseek-ai/DeepSeek-V2-Lite", "the latent attention"),
        ("google/gemma-3-27b-it", "the images"),
        ("google/gemma-4-26B-A4B", "the heads of two widths"),
        ("microsoft/Phi-3.5-mini-instruct", "the heads of width 96"),
    ],
)
def test_fp8_cache_that_no_kernel_of_ampere_reads_is_no_fit_and_no_fix(
    make_pair: PairFactory, model: str, needs_triton: str
) -> None:
    pair = replace(make_pair("BF16", None), target=find_geometry(model), target_precision=None)
    fp8 = replace(pair, limits=replace(pair.limits, kv_cache_element_bytes=FP8_ELEMENT_BYTES))
    with pytest.raises(PlanError) as refused:
        plan_on_gpus(fp8, [EIGHT_A100], None)
    assert (refused.value.field, refused.value.value) == ("serving.kvCacheDtype", "fp8")
    assert needs_triton in refused.value.message
    assert refused.value.message.endswith("use bfloat16")
    # Where both are there, the plan goes where it runs, and no change proposes such a cache.
    assert plan_on_gpus(fp8, [EIGHT_A100, EIGHT_H100], None).chosen.product == H100
    full = replace(pair, limits=replace(pair.limits, min_concurrency=60_000))
    assert not any("kvCacheDtype" in fix.change for fix in plan_on_gpus(full, [EIGHT_A100], None).fixes)


def test_ampere_reads_a_plain_fp8_cache(make_pair: PairFactory) -> None:
    pair = make_pair("BF16", None, kv_cache_element_bytes=FP8_ELEMENT_BYTES)
    assert plan_on_gpus(pair, [EIGHT_A100], None).chosen.product == "NVIDIA-A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("model", "backend", "fp8", "lacks"),
    [
        ("openai/gpt-oss-120b", "FLASH_ATTN", False, "for the sinks"),
        ("openai/gpt-oss-120b", "FLASHINFER", False, "for the sinks"),
        ("openai/gpt-oss-120b", "TRITON_ATTN", False, None),
        ("openai/gpt-oss-120b", None, False, None),
        ("meta-llama/Llama-3.1-8B-Instruct", "FLASH_ATTN", False, None),
        ("meta-llama/Llama-3.1-8B-Instruct", "FLASH_ATTN", True, "no FP8 cache"),
        ("meta-llama/Llama-3.1-8B-Instruct", "TRITON_ATTN", True, "no FP8 cache"),
        ("meta-llama/Llama-3.1-8B-Instruct", "FLASHINFER", True, None),
    ],
)
def test_a_backend_that_is_asked_for_has_its_kernels_on_hopper_and_not_all_on_ampere(
    make_pair: PairFactory, model: str, backend: str | None, fp8: bool, lacks: str | None
) -> None:
    pair = replace(make_pair("BF16", None), target=find_geometry(model), target_precision=None)
    limits = replace(pair.limits, attention_backend=backend, kv_cache_element_bytes=FP8_ELEMENT_BYTES if fp8 else None)
    pair = replace(pair, limits=limits)
    if lacks is None:
        assert plan_on_gpus(pair, [EIGHT_A100], None).verdict is Verdict.FITS
        return
    with pytest.raises(PlanError, match=lacks) as refused:
        plan_on_gpus(pair, [EIGHT_A100], None)
    assert (refused.value.field, refused.value.value) == ("engine.extraArgs", backend)
    assert plan_on_gpus(pair, [EIGHT_A100, EIGHT_H100], None).chosen.product == H100


def test_experts_cut_within_a_block_have_no_kernel_on_ampere(make_pair: PairFactory) -> None:
    fp8 = find_geometry("Qwen/Qwen3-235B-A22B-FP8")
    pair = replace(make_pair("BF16", None), target=fp8, target_precision=None)
    with pytest.raises(PlanError, match="cut within a block") as refused:
        plan_on_gpus(pair, [EIGHT_A100], 8)
    assert (refused.value.field, refused.value.value) == ("parallelism.tensor", 8)
    assert plan_on_gpus(pair, [EIGHT_A100], 4).chosen.tensor == 4
    assert plan_on_gpus(pair, [EIGHT_H100], 8).chosen.tensor == 8
    whole = PlanOptions(spread=Parallelism(expert=True))
    assert plan_on_gpus(pair, [EIGHT_A100], 8, whole).chosen.tensor == 8


def test_sparse_attention_is_refused_on_ampere(make_pair: PairFactory) -> None:
    pair = replace(make_pair("BF16", None), target=find_geometry("deepseek-ai/DeepSeek-V3.2"), target_precision=None)
    with pytest.raises(PlanError, match="no kernel on it for the sparse attention") as refused:
        plan_on_gpus(pair, [EIGHT_A100], 8)
    assert refused.value.field == "accelerator.products"


def test_when_nothing_fits_the_nearest_row_is_shown(make_pair: PairFactory) -> None:
    plan = plan_on_gpus(make_pair(min_concurrency=60_000), [EIGHT_H100, EIGHT_H200], None)
    assert (plan.verdict, plan.chosen.product, plan.chosen.tensor) == (Verdict.DOES_NOT_FIT, H200, 8)
    lacking = [row.budget.needed_kv_bytes - row.budget.available_kv_bytes for row in plan.rows]
    assert lacking == sorted(lacking)


def test_every_fix_does_what_it_says(make_pair: PairFactory) -> None:
    pair = make_pair("FP8", min_concurrency=20, max_model_len=8192)
    plan = plan_on_gpus(pair, [EIGHT_H100], 2)
    assert plan.verdict is Verdict.DOES_NOT_FIT
    assert "20 requests of 8192 tokens" in plan.explanation
    fixes = {fix.change: fix for fix in plan.fixes}
    assert next(iter(fixes)) == "serving.kvCacheDtype: fp8"
    assert fixes["serving.kvCacheDtype: fp8"].tokens == 254_048
    for change, field in (("serving.minConcurrency", "min_concurrency"), ("serving.maxModelLen", "max_model_len")):
        value = next(int(key.split(": ")[1]) for key in fixes if key.startswith(change))
        assert _verdict(pair, **{field: value}) is Verdict.FITS
        step = 16 if field == "max_model_len" else 1
        assert _verdict(pair, **{field: value + step}) is not Verdict.FITS


def _verdict(pair: Pair, **limits: Any) -> Verdict:
    return plan_on_gpus(replace(pair, limits=replace(pair.limits, **limits)), [EIGHT_H100], 2).verdict


def test_fewer_sequences_come_before_changes_of_quality(make_pair: PairFactory) -> None:
    plan = plan_on_gpus(make_pair("BF16", None, max_num_seqs=4096, engine_version="0.32.0"), [EIGHT_H100], 2)
    assert plan.verdict is Verdict.DOES_NOT_FIT
    changes = [fix.change for fix in plan.fixes]
    assert changes[:2] == ["serving.gpuMemoryUtilizationPercent: 95", "serving.maxNumSeqs: 256"]
    assert changes[2].startswith("target.quantization")


def test_utilization_is_brought_back_to_the_default(make_pair: PairFactory) -> None:
    too_low = plan_on_gpus(make_pair("FP8", memory_utilization_percent=50), [EIGHT_H100], 2)
    too_high = plan_on_gpus(make_pair("FP8", memory_utilization_percent=100), [EIGHT_H100], 2)
    for plan in (too_low, too_high):
        assert plan.verdict is Verdict.DOES_NOT_FIT
        assert plan.fixes[0].change == "serving.gpuMemoryUtilizationPercent: 92"
        assert plan.fixes[0].tokens == 127_024
    assert "more than is free when it starts" in too_high.explanation


def test_a_quantized_checkpoint_is_never_told_to_become_fp8(make_pair: PairFactory) -> None:
    pair = make_pair("INT8", "INT8", min_concurrency=30)
    held = named(["INT8"], ["INT8"])
    plan = plan_on_gpus(replace(pair, target=held.target[0], draft=held.draft[0]), [EIGHT_H100], 2)
    assert plan.verdict is Verdict.DOES_NOT_FIT
    assert not [fix for fix in plan.fixes if "quantization" in fix.change]


def test_no_single_change_helps(make_pair: PairFactory) -> None:
    plan = plan_on_gpus(make_pair(), [GpuPool(H100, 1)], None)
    assert plan.fixes == ()
    assert plan.explanation.endswith("; no single change and no two settings make it fit")


def test_a_fix_never_needs_more_gpus_than_a_node_has(make_pair: PairFactory) -> None:
    plan = plan_on_gpus(make_pair(), [GpuPool(H100, 2)], 2)
    assert not [fix for fix in plan.fixes if fix.change.startswith("parallelism")]


FREE = frozenset({Precision.BF16, Precision.FP8, Precision.INT4})


def test_quality_quantizes_the_target_only_where_it_must(make_pair: PairFactory) -> None:
    options = PlanOptions(Objective.QUALITY, target=FREE, available=named(["INT4"]))
    on_h100 = plan_on_gpus(make_pair(), [EIGHT_H100], 2, options)
    assert on_h100.chosen.target_precision is Precision.FP8
    assert "Quality takes FP8 target, BF16 draft: the least quantized target that fits" in on_h100.explanation
    with_h200 = plan_on_gpus(make_pair(), [EIGHT_H100, EIGHT_H200], 2, options)
    assert (with_h200.chosen.product, with_h200.chosen.target_precision) == (H200, Precision.BF16)


def test_capacity_and_cost_take_other_rows(make_pair: PairFactory) -> None:
    pools, free = [EIGHT_H100, EIGHT_H200], named(["INT4"])
    capacity = plan_on_gpus(
        make_pair(), pools, None, PlanOptions(Objective.CAPACITY, target=FREE, available=free)
    ).chosen
    cost = plan_on_gpus(make_pair(), pools, None, PlanOptions(Objective.COST, target=FREE, available=free)).chosen
    assert capacity.target_precision is Precision.INT4
    assert cost.tensor == 1
    assert capacity.budget.kv_cache_tokens / capacity.tensor > cost.budget.kv_cache_tokens / cost.tensor


def test_the_plan_takes_the_row_that_the_matrix_puts_first(make_pair: PairFactory) -> None:
    pools, free = [EIGHT_H100, EIGHT_H200], named(["INT4"], ["INT4"])
    for objective in Objective:
        options = PlanOptions(objective, target=FREE, draft=FREE, available=free)
        chosen = plan_on_gpus(make_pair(), pools, None, options).chosen
        rows = quantization_matrix(make_pair(), pools, available=free)
        allowed = [
            row for row in rows if row.kv_cache_dtype == "auto" and {row.target_precision, row.draft_precision} <= FREE
        ]
        best = ranked(allowed, objective)[0]
        assert best.budget == chosen.budget
        assert (best.product, best.tensor, best.target_precision) == (
            chosen.product,
            chosen.tensor,
            chosen.target_precision,
        )


def test_what_is_lacking_is_told_of_the_nearest_checkpoint(make_pair: PairFactory) -> None:
    plan = plan_on_gpus(make_pair(), [GpuPool(H100, 1)], None, PlanOptions(target=FREE))
    assert plan.verdict is Verdict.DOES_NOT_FIT
    assert plan.chosen.target_precision is Precision.FP8, "INT4 has no checkpoint"


@pytest.mark.parametrize(
    ("pools", "tensor", "field", "words"),
    [
        ([], None, "accelerator.products", "none"),
        ([GpuPool("NVIDIA-T4", 8)], None, "accelerator.products", "NVIDIA-T4"),
        ([GpuPool(H100, 0)], None, "accelerator.products", "known are"),
        ([EIGHT_H100], 3, "parallelism.tensor", "num_attention_heads 64"),
        ([EIGHT_H100], 16, "parallelism.tensor", "largest has 8"),
    ],
)
def test_questions_without_a_plan(
    make_pair: PairFactory, pools: list[GpuPool], tensor: int | None, field: str, words: str
) -> None:
    with pytest.raises(PlanError) as caught:
        plan_on_gpus(make_pair(), pools, tensor)
    assert caught.value.field == field
    assert words in str(caught.value)


def test_an_unknown_product_with_a_memory_is_sized_and_labelled(make_pair: PairFactory) -> None:
    plan = plan_on_gpus(make_pair("FP8"), [GpuPool("Mystery-GPU", 8, memory_gib=80)], 2)
    assert (plan.chosen.product, plan.chosen.budget.total_bytes) == ("Mystery-GPU", 80 * GIB)
    assert plan.chosen.budget.uncalibrated_gpu
    assert "uncalibrated" in plan.explanation


def test_unknown_products_are_passed_over(make_pair: PairFactory) -> None:
    plan = plan_on_gpus(make_pair("FP8"), [GpuPool("Mystery-GPU", 8), EIGHT_H100], 2)
    assert {row.product for row in plan.rows} == {H100}


def test_the_draft_is_made_fp8_before_the_target(make_pair: PairFactory) -> None:
    # 15.5 requests fit with the BF16 draft, 17.4 with it in FP8: enough for 16 also after the margin.
    plan = plan_on_gpus(make_pair("FP8", min_concurrency=16), [EIGHT_H100], 2)
    precisions = [fix for fix in plan.fixes if "quantization" in fix.change or "kvCacheDtype" in fix.change]
    assert precisions[0].change == "speculation.draft.quantization: FP8"
    assert precisions[0].tokens == 142_224


def test_a_change_that_ends_tight_says_so_and_is_not_the_least_that_fits(make_pair: PairFactory) -> None:
    # 17 of the 17.4 requests that an FP8 draft leaves room for would eat into the margin.
    plan = plan_on_gpus(make_pair("FP8", min_concurrency=17), [EIGHT_H100], 2)
    fixes = {fix.change: fix for fix in plan.fixes}
    draft = fixes["speculation.draft.quantization: FP8"]
    assert (draft.verdict, draft.sentence.endswith("(tight)")) == (Verdict.TIGHT, True)
    assert fixes["serving.kvCacheDtype: fp8"].verdict is Verdict.FITS
    assert "smallest change: serving.kvCacheDtype: fp8 gives" in plan.explanation


def test_what_is_tight_outside_the_budget_is_told_so(make_pair: PairFactory) -> None:
    """Plenty of KV cache is left: the sentence must not speak of its margin."""
    pair = make_pair("FP8", memory_utilization_percent=99)
    budget = plan_on_gpus(pair, [GpuPool(H200, 8)], 2)
    chosen = budget.chosen.budget
    assert chosen.binding_term is Term.SLACK
    assert "may err" not in budget.explanation
    assert f"verifying drafts at full batch takes {format_gib(chosen.overrun_bytes)} GiB per GPU" in budget.explanation
    assert f"where {format_gib(chosen.slack_bytes)} GiB are free; lower serving.maxNumSeqs" in budget.explanation
