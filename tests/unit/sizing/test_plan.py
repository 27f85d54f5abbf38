"""Plans of a pair on GPUs and CPUs, and what would make it fit."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.enums import FP8_ELEMENT_BYTES, Objective, Precision
from specdecode_operator.sizing.arithmetic import GIB, format_gib
from specdecode_operator.sizing.catalogue import PublishedHead, find_entry, find_geometry, published_heads
from specdecode_operator.sizing.devices import Device, find_device, memory_coefficients
from specdecode_operator.sizing.errors import PlanError
from specdecode_operator.sizing.families.architectures import head_from_config
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.kernel_support import NOTHING_NAMED, Available
from specdecode_operator.sizing.memory.budget import EngineLimits, Pair, Term, Verdict, estimate, tightest_grouping
from specdecode_operator.sizing.memory.kv_cache import blocks_for
from specdecode_operator.sizing.other_drafts import DraftHead, known_heads, smaller_drafts
from specdecode_operator.sizing.pair import TENSOR_ONLY, Parallelism, effective_batch, spread_problems
from specdecode_operator.sizing.plan import (
    Change,
    Changes,
    Fix,
    GpuPool,
    PlanOptions,
    Question,
    fewer_batched_tokens,
    find_fixes,
    plan_on_cpu,
    plan_on_gpus,
)
from specdecode_operator.sizing.quantization_matrix import PLACE_ONLY, candidate_rows, quantization_matrix, ranked
from specdecode_operator.sizing.rank_layers import Split, whole_model
from specdecode_operator.sizing.tensor_parallel import supported_tensors, tensor_problems
from specdecode_operator.sizing.weights import weight_bytes
from tests.support.named_checkpoints import named

H100 = "NVIDIA-H100-80GB-HBM3"
H200 = "NVIDIA-H200"
EIGHT_H100 = GpuPool(H100, 8)
EIGHT_H200 = GpuPool(H200, 8)
EIGHT_A100 = GpuPool("NVIDIA-A100-SXM4-80GB", 8)

PairFactory = Callable[..., Pair]


def test_bf16_pair_on_two_h100_does_not_fit_and_gets_fixes(make_pair: PairFactory) -> None:
    plan = plan_on_gpus(make_pair(), [EIGHT_H100], 2)
    assert plan.verdict is Verdict.DOES_NOT_FIT
    assert plan.explanation == (
        "2 x NVIDIA-H100-80GB-HBM3 per replica (TP 2) does not fit: weights take 73.2 of 72.9 GiB usable per GPU, "
        "nothing is left for the KV cache; smallest change that fits: target.quantization: FP8 gives 127,024 tokens "
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


def test_bf16_pair_is_planned_on_h200_if_both_exist(make_pair: PairFactory) -> None:
    plan = plan_on_gpus(make_pair(), [EIGHT_H100, EIGHT_H200], 2)
    assert (plan.verdict, plan.chosen.product, plan.chosen.tensor) == (Verdict.FITS, H200, 2)
    assert plan.fixes == ()
    assert [row.product for row in plan.rows] == [H200, H100]
    assert plan.explanation == (
        "2 x NVIDIA-H200 per replica (TP 2) fits: 238,896 tokens (29.2 requests of 8192) "
        "beside 73.2 GiB of weights per GPU"
    )


def test_fp8_target_is_planned_on_the_smaller_gpu(make_pair: PairFactory) -> None:
    plan = plan_on_gpus(make_pair("FP8"), [EIGHT_H200, EIGHT_H100], 2)
    assert (plan.verdict, plan.chosen.product) == (Verdict.FITS, H100)
    assert plan.chosen.budget.kv_cache_tokens == 127_024


def test_plan_without_a_tensor_size_uses_the_fewest_gpus(make_pair: PairFactory) -> None:
    plan = plan_on_gpus(make_pair(), [EIGHT_H100], None)
    assert (plan.verdict, plan.chosen.tensor) == (Verdict.FITS, 4)
    assert sorted(row.tensor for row in plan.rows) == [1, 2, 4, 8]
    assert plan_on_gpus(make_pair("FP8", "FP8"), [EIGHT_H200], None).chosen.tensor == 1


def test_fitting_row_ranks_before_a_tight_row_of_fewer_gpus(make_pair: PairFactory) -> None:
    pair = make_pair("BF16", None, min_concurrency=2)
    alone = plan_on_gpus(pair, [GpuPool(H100, 2)], None)
    assert (alone.verdict, alone.chosen.tensor) == (Verdict.TIGHT, 2)
    assert "0.3 GiB per GPU are to spare where the estimate may err by 1.5 GiB" in alone.explanation
    assert alone.fixes == ()
    roomier = plan_on_gpus(pair, [EIGHT_H100], None)
    assert (roomier.verdict, roomier.chosen.tensor) == (Verdict.FITS, 4)


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
def test_fp8_cache_without_an_ampere_kernel_is_refused(make_pair: PairFactory, model: str, needs_triton: str) -> None:
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


def test_ampere_supports_an_fp8_cache_of_dense_attention(make_pair: PairFactory) -> None:
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
def test_attention_backend_without_an_ampere_kernel_is_refused(
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


def test_experts_split_within_a_quantization_block_fail_on_ampere(make_pair: PairFactory) -> None:
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


def test_nearest_row_is_shown_if_nothing_fits(make_pair: PairFactory) -> None:
    plan = plan_on_gpus(make_pair(min_concurrency=60_000), [EIGHT_H100, EIGHT_H200], None)
    assert (plan.verdict, plan.chosen.product, plan.chosen.tensor) == (Verdict.DOES_NOT_FIT, H200, 8)
    lacking = [row.budget.needed_kv_bytes - row.budget.available_kv_bytes for row in plan.rows]
    assert lacking == sorted(lacking)


def test_fixes_are_the_largest_values_that_fit(make_pair: PairFactory) -> None:
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


def test_fewer_sequences_are_proposed_before_quantization(make_pair: PairFactory) -> None:
    plan = plan_on_gpus(make_pair("BF16", None, max_num_seqs=4096, engine_version="0.32.0"), [EIGHT_H100], 2)
    assert plan.verdict is Verdict.DOES_NOT_FIT
    changes = [fix.change for fix in plan.fixes]
    assert changes[:2] == ["serving.gpuMemoryUtilizationPercent: 95", "serving.maxNumSeqs: 256"]
    assert changes[2].startswith("target.quantization")


def test_memory_utilization_fix_is_the_default(make_pair: PairFactory) -> None:
    too_low = plan_on_gpus(make_pair("FP8", memory_utilization_percent=50), [EIGHT_H100], 2)
    too_high = plan_on_gpus(make_pair("FP8", memory_utilization_percent=100), [EIGHT_H100], 2)
    for plan in (too_low, too_high):
        assert plan.verdict is Verdict.DOES_NOT_FIT
        assert plan.fixes[0].change == "serving.gpuMemoryUtilizationPercent: 92"
        assert plan.fixes[0].tokens == 127_024
    assert "more than is free when it starts" in too_high.explanation


def test_fix_that_changes_the_gpu_product_names_both_products(make_pair: PairFactory, llama_8b: ModelGeometry) -> None:
    pair = replace(make_pair("BF16", None, memory_utilization_percent=1), target=llama_8b)
    plan = plan_on_gpus(pair, [EIGHT_H100, EIGHT_H200], None)
    assert plan.chosen.place == f"8 x {H200}"
    assert plan.fixes[0].change == "serving.gpuMemoryUtilizationPercent: 92"
    assert plan.fixes[0].effect.endswith(f" on 1 x {H100} instead of 8 x {H200}")


def test_no_quantization_fix_for_a_quantized_checkpoint(make_pair: PairFactory) -> None:
    pair = make_pair("INT8", "INT8", min_concurrency=30)
    held = named(["INT8"], ["INT8"])
    plan = plan_on_gpus(replace(pair, target=held.target[0], draft=held.draft[0]), [EIGHT_H100], 2)
    assert plan.verdict is Verdict.DOES_NOT_FIT
    assert not [fix for fix in plan.fixes if "quantization" in fix.change]


def test_no_fix_is_reported_if_no_change_helps(make_pair: PairFactory) -> None:
    plan = plan_on_gpus(make_pair(), [GpuPool(H100, 1)], None)
    assert plan.fixes == ()
    assert plan.explanation.endswith("; no single change and no two settings make it fit")


def test_fixes_need_no_more_gpus_than_a_node_has(make_pair: PairFactory) -> None:
    plan = plan_on_gpus(make_pair(), [GpuPool(H100, 2)], 2)
    assert not [fix for fix in plan.fixes if fix.change.startswith("parallelism")]


FREE = frozenset({Precision.BF16, Precision.FP8, Precision.INT4})


def test_quality_quantizes_the_target_only_if_needed(make_pair: PairFactory) -> None:
    options = PlanOptions(Objective.QUALITY, target=FREE, available=named(["INT4"]))
    on_h100 = plan_on_gpus(make_pair(), [EIGHT_H100], 2, options)
    assert on_h100.chosen.target_precision is Precision.FP8
    assert "Quality takes FP8 target, BF16 draft: the least quantized target that fits" in on_h100.explanation
    with_h200 = plan_on_gpus(make_pair(), [EIGHT_H100, EIGHT_H200], 2, options)
    assert (with_h200.chosen.product, with_h200.chosen.target_precision) == (H200, Precision.BF16)


def test_capacity_and_cost_choose_different_rows(make_pair: PairFactory) -> None:
    pools, free = [EIGHT_H100, EIGHT_H200], named(["INT4"])
    capacity = plan_on_gpus(
        make_pair(), pools, None, PlanOptions(Objective.CAPACITY, target=FREE, available=free)
    ).chosen
    cost = plan_on_gpus(make_pair(), pools, None, PlanOptions(Objective.COST, target=FREE, available=free)).chosen
    assert capacity.target_precision is Precision.INT4
    assert cost.tensor == 1
    assert capacity.budget.kv_cache_tokens / capacity.tensor > cost.budget.kv_cache_tokens / cost.tensor


def test_plan_chooses_the_first_row_of_the_matrix(make_pair: PairFactory) -> None:
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


def test_nearest_row_has_an_available_checkpoint(make_pair: PairFactory) -> None:
    plan = plan_on_gpus(make_pair(), [GpuPool(H100, 1)], None, PlanOptions(target=FREE))
    assert plan.verdict is Verdict.DOES_NOT_FIT
    assert plan.chosen.target_precision is Precision.FP8, "INT4 has no checkpoint"


@pytest.mark.parametrize(
    ("pools", "tensor", "field", "words"),
    [
        ([], None, "accelerator.products", "none"),
        ([GpuPool("NVIDIA-T4", 8)], None, "accelerator.products", "NVIDIA-T4"),
        ([GpuPool(H100, 0)], None, "accelerator.products", "Other GPUs"),
        ([EIGHT_H100], 3, "parallelism.tensor", "num_attention_heads 64"),
        ([EIGHT_H100], 16, "parallelism.tensor", "largest has 8"),
    ],
)
def test_impossible_requests_are_refused(
    make_pair: PairFactory, pools: list[GpuPool], tensor: int | None, field: str, words: str
) -> None:
    with pytest.raises(PlanError) as caught:
        plan_on_gpus(make_pair(), pools, tensor)
    assert caught.value.field == field
    assert words in str(caught.value)


def test_unknown_product_with_a_memory_size_is_uncalibrated(make_pair: PairFactory) -> None:
    plan = plan_on_gpus(make_pair("FP8"), [GpuPool("Mystery-GPU", 8, memory_gib=80)], 2)
    assert (plan.chosen.product, plan.chosen.budget.total_bytes) == ("Mystery-GPU", 80 * GIB)
    assert plan.chosen.budget.uncalibrated_gpu
    assert "uncalibrated" in plan.explanation


def test_unknown_products_without_a_memory_size_are_skipped(make_pair: PairFactory) -> None:
    plan = plan_on_gpus(make_pair("FP8"), [GpuPool("Mystery-GPU", 8), EIGHT_H100], 2)
    assert {row.product for row in plan.rows} == {H100}


def test_fp8_draft_is_proposed_first(make_pair: PairFactory) -> None:
    # 15.5 requests fit with the BF16 draft, 17.4 with it in FP8: enough for 16 also after the margin.
    plan = plan_on_gpus(make_pair("FP8", min_concurrency=16), [EIGHT_H100], 2)
    precisions = [fix for fix in plan.fixes if "quantization" in fix.change or "kvCacheDtype" in fix.change]
    assert precisions[0].change == "speculation.draft.quantization: FP8"
    assert precisions[0].tokens == 142_224


def test_tight_fix_is_marked_and_not_the_smallest_that_fits(make_pair: PairFactory) -> None:
    # 17 of the 17.4 requests that an FP8 draft leaves room for would eat into the margin.
    plan = plan_on_gpus(make_pair("FP8", min_concurrency=17), [EIGHT_H100], 2)
    fixes = {fix.change: fix for fix in plan.fixes}
    draft = fixes["speculation.draft.quantization: FP8"]
    assert (draft.verdict, draft.sentence.endswith("(tight)")) == (Verdict.TIGHT, True)
    assert fixes["serving.kvCacheDtype: fp8"].verdict is Verdict.FITS
    assert "smallest change that fits: serving.kvCacheDtype: fp8 gives" in plan.explanation


def test_tight_slack_is_explained(make_pair: PairFactory) -> None:
    """Plenty of KV cache is left: the sentence must not speak of its margin."""
    pair = make_pair("FP8", memory_utilization_percent=99)
    budget = plan_on_gpus(pair, [GpuPool(H200, 8)], 2)
    chosen = budget.chosen.budget
    assert chosen.binding_term is Term.SLACK
    assert "may err" not in budget.explanation
    assert f"verifying drafts at full batch takes {format_gib(chosen.overrun_bytes)} GiB per GPU" in budget.explanation
    assert f"where {format_gib(chosen.slack_bytes)} GiB are free; lower serving.maxNumSeqs" in budget.explanation


# Pipeline stages, data-parallel copies and spread experts beside the tensor parallelism that a plan chooses.

EIGHT_H100_SPREAD = (GpuPool("NVIDIA-H100-80GB-HBM3", 8),)
MOE = "Qwen/Qwen3-30B-A3B"


@pytest.fixture
def h200() -> Device:
    device = find_device("NVIDIA-H200")
    assert device is not None
    return device


@pytest.fixture
def experts() -> ModelGeometry:
    """128 experts of width 768."""
    geometry = find_geometry(MOE)
    assert geometry is not None
    return geometry


@pytest.mark.parametrize(
    ("split", "label"),
    [
        (Parallelism(2), "TP 2"),
        (Parallelism(4, pipeline=2), "TP 4, PP 2"),
        (Parallelism(1, data=8, expert=True), "TP 1, DP 8, EP"),
    ],
)
def test_parallelism_label(split: Parallelism, label: str) -> None:
    assert split.label == label
    assert split.at(1).at(split.tensor) == split


def test_expert_flag_and_too_many_stages_of_a_dense_model_are_refused(llama_70b: ModelGeometry) -> None:
    found = spread_problems(llama_70b, Parallelism(pipeline=81, expert=True), "0.33.0")
    assert [(each.field, each.value) for each in found] == [("parallelism.pipeline", 81), ("parallelism.expert", True)]
    assert spread_problems(llama_70b, Parallelism(pipeline=80), "0.28.0") == ()


@pytest.mark.parametrize(("version", "starts"), [("0.28.0", False), ("0.29.1", False), ("0.30.0", True)])
@pytest.mark.parametrize("model", ["Qwen/Qwen3-VL-2B-Instruct", "Qwen/Qwen3-VL-30B-A3B-Instruct"])
def test_qwen3_vl_with_pipeline_stages_is_refused_before_0_30(model: str, version: str, *, starts: bool) -> None:
    geometry = find_geometry(model)
    assert geometry is not None
    assert spread_problems(geometry, Parallelism(4), version) == ()
    found = spread_problems(geometry, Parallelism(4, pipeline=2), version)
    assert [(each.field, each.value) for each in found] == [("parallelism.pipeline", 2)] * (not starts)
    assert all("use 1, or vLLM 0.30 or newer" in each.message for each in found)


def test_estimate_refuses_invalid_pipeline_or_expert_splits(make_pair: PairFactory, h200: Device) -> None:
    pair = make_pair("BF16", None)
    for split in (Parallelism(2, pipeline=81), Parallelism(2, expert=True)):
        with pytest.raises(PlanError, match=r"parallelism\.(pipeline|expert)"):
            estimate(pair, h200, split)


def test_experts_are_split_over_data_ranks_unless_expert_parallel(experts: ModelGeometry) -> None:
    """768 is a multiple of 4 x 64, not of 4 x 128: sliced so experts would break, whole ones do not."""
    assert tensor_problems(experts, 4, data=64) == ()
    assert "tensor 4 x data 128" in tensor_problems(experts, 4, data=128)[0].message
    assert tensor_problems(experts, 4, data=128, expert=True) == ()
    assert 4 in supported_tensors([(experts, None)], data=128, expert=True)
    assert 4 not in supported_tensors([(experts, None)], data=128)


def test_split_and_whole_experts_weigh_the_same(experts: ModelGeometry) -> None:
    bf16 = experts.weight_format().precision
    sliced = weight_bytes(experts, bf16, Split(2, data=4), stage=whole_model(experts))
    whole = weight_bytes(experts, bf16, Split(2, experts=8, data=4), stage=whole_model(experts))
    alone = weight_bytes(experts, bf16, Split(2), stage=whole_model(experts))
    assert sliced == whole < 0.35 * alone


def test_plan_tries_every_tensor_size_that_fits_a_node(make_pair: PairFactory) -> None:
    pair = make_pair("BF16", None)
    rows = candidate_rows(pair, EIGHT_H100_SPREAD, None, PlanOptions(spread=Parallelism(pipeline=2)))
    assert sorted((row.tensor, row.gpus) for row in rows) == [(1, 2), (2, 4), (4, 8)]
    assert all(row.split.pipeline == 2 for row in rows)
    plan = plan_on_gpus(pair, EIGHT_H100_SPREAD, None, PlanOptions(spread=Parallelism(pipeline=2)))
    assert sorted((row.tensor, row.gpus) for row in plan.rows) == [(1, 2), (2, 4), (4, 8)]


@pytest.mark.parametrize("spread", [Parallelism(pipeline=16), Parallelism(pipeline=2, data=8)])
def test_parallelism_beyond_the_largest_node_is_refused(make_pair: PairFactory, spread: Parallelism) -> None:
    pair = make_pair("BF16", None)
    with pytest.raises(PlanError, match="the largest node has 8"):
        plan_on_gpus(pair, EIGHT_H100_SPREAD, None, PlanOptions(spread=spread))
    with pytest.raises(PlanError, match="the largest node has 8"):
        candidate_rows(pair, EIGHT_H100_SPREAD, 1, PlanOptions(spread=spread))


def test_fixes_keep_the_pipeline_stages(make_pair: PairFactory) -> None:
    pair = make_pair("BF16", None, min_concurrency=60)
    plan = plan_on_gpus(pair, EIGHT_H100_SPREAD, 1, PlanOptions(spread=Parallelism(pipeline=2)))
    assert plan.verdict is Verdict.DOES_NOT_FIT
    fix = next(fix for fix in plan.fixes if fix.change.startswith("parallelism.tensor"))
    assert fix.change == "parallelism.tensor: 4"
    assert "on 8 x NVIDIA-H100" in fix.sentence


@pytest.mark.parametrize("split", [Parallelism(2), Parallelism(1, pipeline=3), Parallelism(2, pipeline=4)])
def test_budget_is_that_of_the_tightest_stage(make_pair: PairFactory, h200: Device, split: Parallelism) -> None:
    pair = make_pair()
    budget = estimate(replace(pair, method="ngram", draft=None, draft_precision=None), h200, split)
    grouping = tightest_grouping(replace(pair, method="ngram", draft=None, draft_precision=None), split, budget)
    limits = pair.limits
    needed = blocks_for(grouping, limits.max_model_len, limits.min_concurrency) * grouping.bytes_per_block
    assert needed == budget.needed_kv_bytes


def test_tensor_only_parallelism_has_one_group() -> None:
    assert TENSOR_ONLY.at(4) == Parallelism(4)
    assert TENSOR_ONLY.groups == 1


def test_data_parallel_experts_need_nccl_memory(make_pair: PairFactory, experts: ModelGeometry, h200: Device) -> None:
    """NCCL takes its memory where experts lie on the GPUs of other copies, though the rest of no layer does."""
    dense = make_pair("BF16", None)
    moe = replace(dense, target=experts)
    copies = Parallelism(1, data=4)
    assert estimate(dense, h200, copies).non_torch_bytes == estimate(dense, h200, Parallelism(1)).non_torch_bytes
    assert estimate(moe, h200, copies).non_torch_bytes == estimate(moe, h200, Parallelism(2)).non_torch_bytes


# An engine on CPU: the KV space is given, the memory must hold everything.


@pytest.fixture
def pair(llama_1b: ModelGeometry, limits: EngineLimits) -> Pair:
    return Pair(llama_1b, Precision.BF16, None, None, "none", 0, replace(limits, block_size=128, max_model_len=1024))


def test_cpu_pair_fits(pair: Pair) -> None:
    plan = plan_on_cpu(pair, 8 * GIB, 1 * GIB)
    assert (plan.verdict, plan.chosen.product, plan.chosen.tensor) == (Verdict.FITS, "CPU", 1)
    budget = plan.chosen.budget
    assert budget.target_weights_bytes == 1_235_814_400 * 2 + 131_072 * 64 * 2
    assert budget.non_torch_bytes == memory_coefficients().cpu_overhead_bytes
    assert budget.kv_cache_tokens == 32_768
    assert plan.explanation == (
        "CPU with 8.0 GiB per replica fits: 32,768 tokens (32.0 requests of 1024) in 1.0 GiB of KV cache"
    )


def test_cpu_memory_fix_is_the_smallest_whole_gib(pair: Pair) -> None:
    plan = plan_on_cpu(pair, 4 * GIB, 1 * GIB)
    assert (plan.verdict, plan.chosen.budget.binding_term) == (Verdict.DOES_NOT_FIT, Term.MEMORY)
    assert [fix.change for fix in plan.fixes] == ["accelerator.memoryGiB: 7"]
    assert plan_on_cpu(pair, 7 * GIB, 1 * GIB).verdict is Verdict.FITS
    assert "make 6.3 GiB; smallest change that fits: accelerator.memoryGiB: 7" in plan.explanation


def test_cpu_memory_within_the_margin_is_tight(pair: Pair) -> None:
    needed = plan_on_cpu(pair, 8 * GIB, 1 * GIB).chosen.budget.requested_bytes
    assert plan_on_cpu(pair, needed, 1 * GIB).verdict is Verdict.TIGHT
    assert plan_on_cpu(pair, needed - 1, 1 * GIB).verdict is Verdict.DOES_NOT_FIT
    assert plan_on_cpu(pair, needed + GIB // 2, 1 * GIB).verdict is Verdict.FITS


def test_cpu_kv_cache_fix_raises_memory_if_needed(pair: Pair) -> None:
    longer = replace(pair, limits=replace(pair.limits, max_model_len=65_536))
    plan = plan_on_cpu(longer, 7 * GIB, 1 * GIB)
    assert plan.chosen.budget.binding_term is Term.KV_CACHE
    assert [fix.change for fix in plan.fixes] == ["accelerator.kvCacheGiB: 3, accelerator.memoryGiB: 9"]
    assert plan.fixes[0].verdict is Verdict.FITS
    assert plan_on_cpu(longer, 9 * GIB, 3 * GIB).verdict is Verdict.FITS
    roomy = plan_on_cpu(longer, 16 * GIB, 1 * GIB)
    assert [fix.change for fix in roomy.fixes] == ["accelerator.kvCacheGiB: 3"]
    enough_bytes = roomy.chosen.budget.requested_bytes + 2 * GIB + roomy.chosen.budget.margin_bytes
    just, lacking = plan_on_cpu(longer, enough_bytes, 1 * GIB), plan_on_cpu(longer, enough_bytes - 1, 1 * GIB)
    assert [fix.change for fix in just.fixes] == ["accelerator.kvCacheGiB: 3"]
    assert "accelerator.memoryGiB" in lacking.fixes[0].change


def test_cpu_ranks_share_memory_and_kv_cache(pair: Pair) -> None:
    """The real engine, with the tiny pair at TP 2 and 1 GiB of KV space a rank, holds twice what one rank holds."""
    one, two = plan_on_cpu(pair, 8 * GIB, 1 * GIB).chosen, plan_on_cpu(pair, 16 * GIB, 2 * GIB, 2).chosen
    assert (two.product, two.tensor) == ("CPU", 2)
    assert two.budget.kv_cache_tokens == 2 * one.budget.kv_cache_tokens
    assert two.budget.available_kv_bytes == 1 * GIB
    assert 0.5 < two.budget.target_weights_bytes / one.budget.target_weights_bytes < 0.52, "norms lie on both"
    overheads = memory_coefficients().cpu_overhead_bytes + memory_coefficients().cpu_rank_overhead_bytes
    assert 2 * two.budget.non_torch_bytes == overheads


def test_cpu_fixes_are_totals_of_all_ranks(pair: Pair) -> None:
    plan = plan_on_cpu(pair, 6 * GIB, 2 * GIB, 2)
    assert [fix.change for fix in plan.fixes] == ["accelerator.memoryGiB: 9"]
    assert plan_on_cpu(pair, 9 * GIB, 2 * GIB, 2).verdict is Verdict.FITS
    longer = replace(pair, limits=replace(pair.limits, max_model_len=131_072))
    fix = plan_on_cpu(longer, 16 * GIB, 2 * GIB, 2).fixes[0]
    assert fix.change == "accelerator.kvCacheGiB: 6"
    assert fix.verdict is Verdict.FITS


# How settings and pairs of them are searched for what makes a pair fit.


def test_utilization_is_never_proposed_beyond_95_percent(make_pair: PairFactory) -> None:
    for present in (92, 95, 97):
        pair = make_pair("FP8", min_concurrency=18, memory_utilization_percent=present)
        plan = plan_on_gpus(pair, [EIGHT_H100], 2)
        text = " ".join(fix.change for fix in plan.fixes)
        proposed = {int(each) for each in re.findall(r"gpuMemoryUtilizationPercent: (\d+)", text)}
        assert proposed <= set(range(92, 96)) - {present}


def test_no_pair_of_settings_is_proposed_if_one_is_enough(make_pair: PairFactory) -> None:
    enough = plan_on_gpus(make_pair("FP8", min_concurrency=16), [EIGHT_H100], 2)
    assert enough.fixes[0].change == "serving.gpuMemoryUtilizationPercent: 95"
    assert not [fix for fix in enough.fixes if fix.change.count("serving.gpuMemoryUtilizationPercent: 95,")]


def test_second_setting_joins_max_model_len_only_for_a_large_gain(make_pair: PairFactory) -> None:
    def beside_a_length(percent: int) -> bool:
        pair = make_pair("FP8", min_concurrency=40, memory_utilization_percent=percent)
        found = [fix.change for fix in plan_on_gpus(pair, [EIGHT_H100], 2).fixes]
        return any("maxModelLen" in change and "gpuMemoryUtilizationPercent" in change for change in found)

    assert beside_a_length(87)
    assert not beside_a_length(90), "requests would get a sixth longer"


def test_batched_tokens_fix_holds_a_full_decoding_batch(make_pair: PairFactory) -> None:
    """256 requests of K = 5 take 1792 places of a step, 7 each: 4096 is the smallest step down, and enough."""
    plan = plan_on_gpus(make_pair("FP8", min_concurrency=17), [EIGHT_H100], 2)
    text = " ".join(fix.change for fix in plan.fixes)
    assert set(re.findall(r"maxNumBatchedTokens: (\d+)", text)) == {"4096"}


def test_batched_tokens_fixes_keep_the_effective_batch(make_pair: PairFactory) -> None:
    question = Question(make_pair("FP8"), (EIGHT_H100,), 2, PLACE_ONLY)
    steps = [each.pair for each in fewer_batched_tokens(question)]
    assert [pair.limits.max_num_batched_tokens for pair in steps] == [4096, 2048], "with 1024 fewer would decode"
    assert {effective_batch(pair) for pair in steps} == {effective_batch(question.pair)}


def test_no_kv_cache_dtype_fix_for_an_fp8_cache(make_pair: PairFactory) -> None:
    by_spec = make_pair("FP8", min_concurrency=40, kv_cache_element_bytes=1)
    whole = make_pair("FP8", min_concurrency=40)
    by_checkpoint = replace(whole, target=replace(whole.target, cache_element_bytes=1))
    for pair in (by_spec, by_checkpoint):
        plan = plan_on_gpus(pair, [EIGHT_H100], 2)
        assert plan.fixes
        assert "kvCacheDtype" not in " ".join(fix.change for fix in plan.fixes)


def test_refused_changes_are_not_proposed(make_pair: PairFactory) -> None:
    """The next step of the same kind takes its place, and what has to go along is said."""

    def admit(_: Pair, asked: Changes) -> Changes | None:
        utilization = {change.value for change in asked if change.field == "serving.gpuMemoryUtilizationPercent"}
        return None if 92 in utilization else (*asked, Change("more", None))

    pair = make_pair("FP8", memory_utilization_percent=50)
    plan = plan_on_gpus(pair, [EIGHT_H100], 2, admit=admit)
    freely = plan_on_gpus(pair, [EIGHT_H100], 2)
    assert freely.fixes[0].change == "serving.gpuMemoryUtilizationPercent: 92"
    assert plan.fixes[0].change == "serving.gpuMemoryUtilizationPercent: 93, no more"
    assert plan_on_gpus(pair, [EIGHT_H100], 2, admit=lambda *_: None).fixes == ()


# What is proposed when a pair does not fit, with what it gives back.


def _fixes(pair: Pair, available: Available = NOTHING_NAMED, heads: Sequence[DraftHead] = ()) -> dict[str, Fix]:
    chosen = candidate_rows(pair, EIGHT_H100_SPREAD, 2)[0]
    assert chosen.budget.verdict is Verdict.DOES_NOT_FIT
    options = PlanOptions(available=available)
    return {fix.change: fix for fix in find_fixes(pair, EIGHT_H100_SPREAD, 2, chosen, heads, options=options)}


def test_every_fix_has_gained_bytes_and_tokens(make_pair: PairFactory) -> None:
    pair = make_pair("FP8", min_concurrency=20)
    chosen = candidate_rows(pair, EIGHT_H100_SPREAD, 2)[0].budget
    lacking = chosen.needed_kv_bytes - chosen.available_kv_bytes
    fixes = _fixes(pair)
    assert len(fixes) >= 5
    for fix in fixes.values():
        assert fix.gained_bytes > lacking
        assert fix.tokens > 0
    # Half of the need is gained, nothing is freed.
    assert fixes["serving.kvCacheDtype: fp8"].gained_bytes == chosen.needed_kv_bytes // 2


def test_fixes_are_ordered_by_harm(make_pair: PairFactory, llama_1b: ModelGeometry) -> None:
    heads = (DraftHead("eagle3", replace(llama_1b, name="org/head")),)
    pair = make_pair("FP8", "BF16", min_concurrency=16, max_num_seqs=64)
    starts = [change.split(":")[0] for change in _fixes(pair, named(["INT4"], ["INT4"]), heads)]
    wanted = [
        "serving.gpuMemoryUtilizationPercent",
        "serving.maxNumBatchedTokens",
        "serving.maxNumSeqs",
        "speculation.draft.quantization",
        "serving.kvCacheDtype",
        "target.quantization",
        "serving.minConcurrency",
        "serving.maxModelLen",
        "parallelism.tensor",
        "accelerator.products",
        "speculation.draft.model",
        "speculation.method",
    ]
    assert [start for start in wanted if start in starts] == list(dict.fromkeys(starts))
    assert {"speculation.draft.quantization", "target.quantization", "speculation.draft.model"} <= set(starts)


def test_smallest_helpful_target_quantization_is_proposed(make_pair: PairFactory) -> None:
    eight = named(["INT8", "INT4"])
    without = [change for change in _fixes(make_pair("FP8", min_concurrency=20)) if change.startswith("target")]
    assert without == []
    fixes = _fixes(make_pair("FP8", min_concurrency=20), eight)
    # INT8 weighs what FP8 does, so only INT4 helps here.
    assert [change for change in fixes if change.startswith("target")] == ["target.quantization: INT4"]
    whole = _fixes(make_pair("BF16"), eight)
    assert [change for change in whole if change.startswith("target")] == ["target.quantization: FP8"]


def test_smaller_draft_of_the_same_family_is_proposed(make_pair: PairFactory) -> None:
    fix = _fixes(make_pair("FP8", min_concurrency=20))["speculation.draft.model: meta-llama/Llama-3.2-1B-Instruct"]
    assert fix.verdict is Verdict.FITS
    assert fix.concurrency >= 20


def test_smaller_drafts_have_the_same_family_and_vocabulary(
    llama_70b: ModelGeometry, llama_8b: ModelGeometry, llama_1b: ModelGeometry
) -> None:
    found = [geometry.name for geometry in smaller_drafts(llama_70b, llama_8b)]
    assert "meta-llama/Llama-3.2-1B-Instruct" in found
    assert all(name.startswith("meta-llama/") and name.endswith("-Instruct") for name in found)
    assert smaller_drafts(llama_70b, llama_1b) == ()
    assert smaller_drafts(replace(llama_70b, vocab_size=32_000), llama_8b) == ()
    assert smaller_drafts(llama_70b, replace(llama_8b, name="other/Model-8B-Instruct")) == ()


def test_head_is_proposed_only_if_made_for_the_target(make_pair: PairFactory, llama_1b: ModelGeometry) -> None:
    pair = make_pair("FP8", min_concurrency=20)
    assert not [change for change in _fixes(pair) if "eagle" in change]
    head = replace(llama_1b, name="org/EAGLE3-70B")
    fixes = _fixes(pair, heads=(DraftHead("eagle3", head),))
    fix = fixes["speculation.method: eagle3, speculation.draft.model: org/EAGLE3-70B"]
    assert fix.concurrency >= 20


@pytest.mark.parametrize("precision", ["INT8", "INT4"])
def test_precision_without_a_checkpoint_is_not_proposed(make_pair: PairFactory, precision: str) -> None:
    changes = _fixes(make_pair("FP8", min_concurrency=20))
    assert changes
    assert [change for change in changes if precision in change] == []


def test_known_heads_list_one_head_per_method() -> None:
    """Three EAGLE-3 heads are published for Llama 3.1 8B, all of one size, and an older EAGLE head."""
    heads = [(head.method, head.geometry.name) for head in known_heads("meta-llama/Llama-3.1-8B-Instruct")]
    assert heads == [
        ("eagle3", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
        ("eagle", "yuhuili/EAGLE-LLaMA3.1-Instruct-8B"),
    ]
    assert known_heads("nobody/nothing") == ()


def _with_draft(pair: Pair, target_id: str, draft_id: str) -> Pair:
    target, draft = find_geometry(target_id), find_geometry(draft_id)
    assert target is not None
    assert draft is not None
    return replace(pair, target=target, draft=draft)


def test_a_published_head_is_proposed_for_its_target(make_pair: PairFactory) -> None:
    base = make_pair("BF16", "BF16", min_concurrency=35, max_num_seqs=64)
    pair = _with_draft(base, "Qwen/Qwen3-8B", "Qwen/Qwen3-1.7B")
    plan = plan_on_gpus(pair, EIGHT_H100_SPREAD, 1)
    fixes = {fix.change: fix for fix in plan.fixes}
    head = fixes["speculation.method: eagle3, speculation.draft.model: AngelSlim/Qwen3-8B_eagle3"]
    assert head.verdict is Verdict.FITS
    other = plan_on_gpus(replace(pair, target=replace(pair.target, name="org/another")), EIGHT_H100_SPREAD, 1)
    assert not any("eagle3" in fix.change for fix in other.fixes)


def test_mtp_is_proposed_for_targets_with_mtp_layers(make_pair: PairFactory) -> None:
    base = make_pair("BF16", "BF16", min_concurrency=100, max_num_seqs=128)
    pair = _with_draft(base, "Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3-8B")
    changes = [fix.change for fix in plan_on_gpus(pair, EIGHT_H100_SPREAD, 4).fixes]
    assert "speculation.method: mtp" in changes
    plain = _with_draft(base, "Qwen/Qwen3-14B", "Qwen/Qwen3-8B")
    assert "speculation.method: mtp" not in [fix.change for fix in plan_on_gpus(plain, EIGHT_H100_SPREAD, 1).fixes]


def test_serving_without_speculation_is_proposed_for_stages_of_dspark(make_pair: PairFactory) -> None:
    target = find_geometry("deepseek-ai/DeepSeek-V4-Flash-DSpark")
    assert target is not None
    base = make_pair("FP8", min_concurrency=40, max_num_seqs=64)
    pair = replace(base, target=target, draft=None, draft_precision=None, method="dspark", num_speculative_tokens=5)
    changes = [fix.change for fix in plan_on_gpus(pair, EIGHT_H100_SPREAD, 4).fixes]
    assert "speculation.method: none" in changes


@pytest.mark.parametrize("published", published_heads(), ids=lambda published: published.head)
def test_published_head_matches_the_width_of_its_targets(published: PublishedHead) -> None:
    for target_id in published.targets:
        target = find_geometry(target_id)
        if target is None:
            continue  # read from the hub when it is served
        entry = find_entry(published.head)
        assert entry is not None
        head = head_from_config(published.head, entry.config, published.method)
        assert head.head is not None
        assert head.head.reads_width == target.hidden_size
        assert head.vocab_size == target.vocab_size
        assert known_heads(target_id)
