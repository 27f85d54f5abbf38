"""Pipeline stages, data-parallel copies and spread experts beside the tensor parallelism that a plan chooses."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.devices import Device, find_device
from specdecode_operator.sizing.errors import PlanError
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.memory.budget import Pair, Verdict, estimate, tightest_grouping
from specdecode_operator.sizing.memory.kv_cache import blocks_for
from specdecode_operator.sizing.pair import TENSOR_ONLY, Parallelism, spread_problems
from specdecode_operator.sizing.plan import GpuPool, PlanOptions, plan_on_gpus
from specdecode_operator.sizing.quantization_matrix import candidate_rows
from specdecode_operator.sizing.rank_layers import Split, whole_model
from specdecode_operator.sizing.tensor_parallel import supported_tensors, tensor_problems
from specdecode_operator.sizing.weights import weight_bytes

PairFactory = Callable[..., Pair]
EIGHT_H100 = (GpuPool("NVIDIA-H100-80GB-HBM3", 8),)
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
def test_a_split_has_a_name(split: Parallelism, label: str) -> None:
    assert split.label == label
    assert split.at(1).at(split.tensor) == split


def test_a_dense_model_has_no_experts_and_each_stage_needs_a_layer(llama_70b: ModelGeometry) -> None:
    found = spread_problems(llama_70b, Parallelism(pipeline=81, expert=True), "0.33.0")
    assert [(each.field, each.value) for each in found] == [("parallelism.pipeline", 81), ("parallelism.expert", True)]
    assert spread_problems(llama_70b, Parallelism(pipeline=80), "0.28.0") == ()


@pytest.mark.parametrize(("version", "starts"), [("0.28.0", False), ("0.29.1", False), ("0.30.0", True)])
@pytest.mark.parametrize("model", ["Qwen/Qwen3-VL-2B-Instruct", "Qwen/Qwen3-VL-30B-A3B-Instruct"])
def test_0_28_and_0_29_end_with_qwen3_vl_on_several_stages(model: str, version: str, *, starts: bool) -> None:
    geometry = find_geometry(model)
    assert geometry is not None
    assert spread_problems(geometry, Parallelism(4), version) == ()
    found = spread_problems(geometry, Parallelism(4, pipeline=2), version)
    assert [(each.field, each.value) for each in found] == [("parallelism.pipeline", 2)] * (not starts)
    assert all("use 1, or vLLM 0.30 or newer" in each.message for each in found)


def test_a_budget_is_refused_for_them_too(make_pair: PairFactory, h200: Device) -> None:
    pair = make_pair("BF16", None)
    for split in (Parallelism(2, pipeline=81), Parallelism(2, expert=True)):
        with pytest.raises(PlanError, match=r"parallelism\.(pipeline|expert)"):
            estimate(pair, h200, split)


def test_experts_are_sliced_over_all_copies_unless_they_are_whole(experts: ModelGeometry) -> None:
    """768 is a multiple of 4 x 64, not of 4 x 128: sliced so experts would break, whole ones do not."""
    assert tensor_problems(experts, 4, data=64) == ()
    assert "tensor 4 x data 128" in tensor_problems(experts, 4, data=128)[0].message
    assert tensor_problems(experts, 4, data=128, expert=True) == ()
    assert 4 in supported_tensors([(experts, None)], data=128, expert=True)
    assert 4 not in supported_tensors([(experts, None)], data=128)


def test_sliced_and_whole_experts_weigh_the_same(experts: ModelGeometry) -> None:
    bf16 = experts.weight_format().precision
    sliced = weight_bytes(experts, bf16, Split(2, data=4), stage=whole_model(experts))
    whole = weight_bytes(experts, bf16, Split(2, experts=8, data=4), stage=whole_model(experts))
    alone = weight_bytes(experts, bf16, Split(2), stage=whole_model(experts))
    assert sliced == whole < 0.35 * alone


def test_a_plan_tries_every_tensor_that_a_node_has_room_for(make_pair: PairFactory) -> None:
    pair = make_pair("BF16", None)
    rows = candidate_rows(pair, EIGHT_H100, None, PlanOptions(spread=Parallelism(pipeline=2)))
    assert sorted((row.tensor, row.gpus) for row in rows) == [(1, 2), (2, 4), (4, 8)]
    assert all(row.split.pipeline == 2 for row in rows)
    plan = plan_on_gpus(pair, EIGHT_H100, None, PlanOptions(spread=Parallelism(pipeline=2)))
    assert sorted((row.tensor, row.gpus) for row in plan.rows) == [(1, 2), (2, 4), (4, 8)]


@pytest.mark.parametrize("spread", [Parallelism(pipeline=16), Parallelism(pipeline=2, data=8)])
def test_more_than_a_node_has_is_refused(make_pair: PairFactory, spread: Parallelism) -> None:
    pair = make_pair("BF16", None)
    with pytest.raises(PlanError, match="the largest node has 8"):
        plan_on_gpus(pair, EIGHT_H100, None, PlanOptions(spread=spread))
    with pytest.raises(PlanError, match="the largest node has 8"):
        candidate_rows(pair, EIGHT_H100, 1, PlanOptions(spread=spread))


def test_fixes_keep_the_spread(make_pair: PairFactory) -> None:
    pair = make_pair("BF16", None, min_concurrency=60)
    plan = plan_on_gpus(pair, EIGHT_H100, 1, PlanOptions(spread=Parallelism(pipeline=2)))
    assert plan.verdict is Verdict.DOES_NOT_FIT
    fix = next(fix for fix in plan.fixes if fix.change.startswith("parallelism.tensor"))
    assert fix.change == "parallelism.tensor: 4"
    assert "on 8 x NVIDIA-H100" in fix.sentence


@pytest.mark.parametrize("split", [Parallelism(2), Parallelism(1, pipeline=3), Parallelism(2, pipeline=4)])
def test_the_budget_is_of_the_tightest_stage(make_pair: PairFactory, h200: Device, split: Parallelism) -> None:
    pair = make_pair()
    budget = estimate(replace(pair, method="ngram", draft=None, draft_precision=None), h200, split)
    grouping = tightest_grouping(replace(pair, method="ngram", draft=None, draft_precision=None), split, budget)
    limits = pair.limits
    needed = blocks_for(grouping, limits.max_model_len, limits.min_concurrency) * grouping.bytes_per_block
    assert needed == budget.needed_kv_bytes


def test_one_group_is_tensor_parallelism_alone() -> None:
    assert TENSOR_ONLY.at(4) == Parallelism(4)
    assert TENSOR_ONLY.groups == 1


def test_copies_that_share_experts_talk_to_each_other(
    make_pair: PairFactory, experts: ModelGeometry, h200: Device
) -> None:
    """NCCL takes its memory where experts lie on the GPUs of other copies, though the rest of no layer does."""
    dense = make_pair("BF16", None)
    moe = replace(dense, target=experts)
    copies = Parallelism(1, data=4)
    assert estimate(dense, h200, copies).non_torch_bytes == estimate(dense, h200, Parallelism(1)).non_torch_bytes
    assert estimate(moe, h200, copies).non_torch_bytes == estimate(moe, h200, Parallelism(2)).non_torch_bytes
