"""What is remembered of a pair is used for no other: each term of an estimate is what its own function says."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from itertools import product as product_of
from typing import Any

import pytest

from specdecode_operator.enums import METHODS_WITH_DRAFT, Method, Precision
from specdecode_operator.sizing.calibration import Calibration, CalibrationEntry
from specdecode_operator.sizing.catalogue import find_geometry, known_models
from specdecode_operator.sizing.devices import Device, find_device
from specdecode_operator.sizing.errors import SizingError
from specdecode_operator.sizing.memory.activation import activation_bytes, on_product, verification_bytes
from specdecode_operator.sizing.memory.budget import (
    estimate,
    graph_bytes,
    non_torch_bytes,
    slack_bytes,
    tightest_grouping,
    tightest_stage,
)
from specdecode_operator.sizing.memory.buffers import charged_state_bytes
from specdecode_operator.sizing.memory.kv_cache import blocks_for, kv_bytes_per_token, stage_weights
from specdecode_operator.sizing.pair import TENSOR_ONLY, EngineLimits, Pair, Parallelism, effective_batch
from specdecode_operator.sizing.rank_layers import stages
from tests.unit.sizing.conftest import PairFactory

PRODUCTS = ("NVIDIA-H200", "NVIDIA-A100-SXM4-80GB")
OTHER_LIMITS: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 4096,
    "block_size": 32,
    "kv_cache_element_bytes": 1,
    "memory_utilization_percent": 70,
    "has_nvlink": False,
    "compiles_anew": True,
    "enforce_eager": True,
    "min_concurrency": 3,
    "engine_version": "0.19.0",
    "dtype_bytes": 4,
    "prefix_caching": False,
    "graph_mode": "NONE",
    "max_graph_tokens": 16,
    "attention_backend": "TRITON_ATTN",
    "may_run_fewer": True,
}
OTHER_SETTINGS: dict[str, Any] = {
    "target_precision": Precision.INT8,
    "draft_precision": Precision.INT4,
    "num_speculative_tokens": 2,
    "maps_vocabulary": True,
    "samples_drafts": True,
    "other_draft_lengths": frozenset({0, 1}),
    "adaptive_verification": True,
    "checks_by_entropy": True,
    "draft_head_quantization": "fp8",
}


def a_device(product: str) -> Device:
    device = find_device(product)
    assert device is not None
    return device


def with_limits(pair: Pair, **changed: Any) -> Pair:
    return replace(pair, limits=replace(pair.limits, **changed))


def assert_every_term_is_its_own(pair: Pair, product: str = PRODUCTS[0], split: Parallelism = TENSOR_ONLY) -> None:
    device = a_device(product)
    budget = estimate(pair, device, split)
    pair = on_product(pair, product)
    number = tightest_stage(pair, split, budget)
    stage, weights = stages(pair.target, split.pipeline)[number], stage_weights(pair, split)[number]
    estimated = (activation_bytes(pair, split, stage), graph_bytes(pair, split))
    assert (budget.target_weights_bytes, budget.draft_weights_bytes) == (weights.target_bytes, weights.draft_bytes)
    assert budget.state_bytes == charged_state_bytes(pair, split, stage)
    assert (budget.activation_bytes, budget.cuda_graphs_bytes) == estimated
    assert budget.non_torch_bytes == non_torch_bytes(pair, split) + budget.correction_bytes
    assert budget.overrun_bytes == verification_bytes(pair, split.tensor)
    assert budget.slack_bytes == slack_bytes(pair, budget.total_bytes, budget.requested_bytes, split)
    assert budget.kv_bytes_per_token == kv_bytes_per_token(pair, split)
    assert budget.effective_batch == effective_batch(pair)
    grouping, limits = tightest_grouping(pair, split, budget), pair.limits
    needed = blocks_for(grouping, limits.max_model_len, limits.min_concurrency) * grouping.bytes_per_block
    assert budget.needed_kv_bytes == needed


def pairs_with(name: str, base: Pair) -> Iterator[Pair]:
    """Yield a model of the catalogue as the target of each method that needs no other, and as the draft of the rest."""
    for method in Method:
        try:
            geometry = find_geometry(name, method if method in METHODS_WITH_DRAFT else None)
        except SizingError:  # no head, or no model that vLLM serves
            continue
        if geometry is None:
            continue
        tokens = 0 if method is Method.NONE else 1
        pair = replace(base, method=method.value, num_speculative_tokens=tokens)
        if method is Method.DRAFT_MODEL or method in METHODS_WITH_DRAFT:
            yield replace(pair, draft=geometry, draft_precision=Precision.BF16)
        else:
            yield replace(pair, target=geometry)


@pytest.mark.parametrize("version", ["0.19.0", "0.33.0"])
def test_the_length_of_requests_counts_wherever_a_term_grows_with_it(make_pair: PairFactory, version: str) -> None:
    compared: Counter[str] = Counter()
    for name in known_models():
        # One request has room for as many images as fit into it.
        for pair in pairs_with(name, make_pair("BF16", None, engine_version=version, max_num_seqs=1)):
            for product, length in product_of(PRODUCTS, (512, 100_000)):
                with suppress(SizingError):  # the target has no head, or the draft is none of its
                    assert_every_term_is_its_own(with_limits(pair, max_model_len=length), product)
                    compared[pair.method] += 1
    assert {*compared} == {*Method}
    assert compared.total() > 1000


@pytest.mark.parametrize("field", [each.name for each in fields(EngineLimits)])
def test_another_limit_is_another_engine(make_pair: PairFactory, field: str) -> None:
    before = make_pair("FP8")
    estimate(before, a_device(PRODUCTS[0]), 2)
    assert getattr(before.limits, field) != OTHER_LIMITS[field], "nothing would change"
    assert_every_term_is_its_own(make_pair("FP8", **{field: OTHER_LIMITS[field]}), split=Parallelism(2))


@pytest.mark.parametrize("field", OTHER_SETTINGS)
def test_another_setting_of_a_pair_is_another_engine(make_pair: PairFactory, field: str) -> None:
    before = make_pair("FP8", "FP8")
    estimate(before, a_device(PRODUCTS[0]), 2)
    assert_every_term_is_its_own(replace(before, **{field: OTHER_SETTINGS[field]}), split=Parallelism(2))


def test_another_split_is_another_engine(make_pair: PairFactory) -> None:
    pair = make_pair("FP8")
    for split in (Parallelism(2), Parallelism(4), Parallelism(2, pipeline=3), Parallelism(2, data=2)):
        assert_every_term_is_its_own(pair, split=split)


def test_a_measurement_of_one_gpu_changes_nothing_on_another(make_pair: PairFactory) -> None:
    pair = make_pair("FP8", None)
    entry = CalibrationEntry(
        *(PRODUCTS[0], pair.limits.engine_version, pair.era.runner.value, 2, False, pair.limits.max_num_seqs),
        *(pair.limits.max_num_batched_tokens, "none", 0, pair.target.name, "FP8", None),
        residual_bytes=2**30,
    )
    measured = replace(pair, calibration=Calibration((entry,)))
    assert estimate(measured, a_device(PRODUCTS[0]), 2).correction_bytes == 2**30
    assert_every_term_is_its_own(measured, split=Parallelism(2))
    for other, product in ((pair, PRODUCTS[0]), (measured, PRODUCTS[1])):
        assert estimate(other, a_device(product), 2).correction_bytes == 0
