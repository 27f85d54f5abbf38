"""Memory budget of one rank."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import msgspec
import pytest

from specdecode_operator.enums import METHODS_WITH_DRAFT, Method, Precision
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.calibration import Calibration, CalibrationEntry
from specdecode_operator.sizing.catalogue import find_geometry, known_models
from specdecode_operator.sizing.data_files import read_data
from specdecode_operator.sizing.devices import GENERATIONS, Device, find_device, known_products, uncalibrated_note
from specdecode_operator.sizing.errors import PlanError, SizingError
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.memory.activation import activation_bytes, on_product, verification_bytes
from specdecode_operator.sizing.memory.budget import (
    Budget,
    Pair,
    Term,
    Verdict,
    estimate,
    graph_bytes,
    graph_pool_bytes,
    non_torch_bytes,
    slack_bytes,
    tightest_grouping,
    tightest_stage,
)
from specdecode_operator.sizing.memory.buffers import charged_state_bytes, further_graphs, state_bytes
from specdecode_operator.sizing.memory.kv_cache import blocks_for, kv_bytes_per_token, stage_weights
from specdecode_operator.sizing.pair import TENSOR_ONLY, EngineLimits, Parallelism, effective_batch
from specdecode_operator.sizing.rank_layers import stages
from tests.unit.sizing.conftest import PairFactory

H100 = "NVIDIA-H100-80GB-HBM3"
H200 = "NVIDIA-H200"
DEVICES = read_data("devices.json")["devices"]

# product, target, draft, weights GiB, available GiB, tokens, concurrency
FITTING_ROWS = [
    (H100, "INT8", "BF16", 41.36, 26.76, 125_280, 15.3),
    (H100, "FP8", "BF16", 41.36, 26.76, 125_280, 15.3),
    (H100, "FP8", "FP8", 38.11, 30.01, 140_480, 17.1),
    (H100, "FP8", "INT4", 36.54, 31.59, 147_856, 18.0),
    (H100, "INT4", "BF16", 25.91, 42.22, 197_632, 24.1),
    (H100, "INT4", "INT4", 21.08, 47.04, 220_208, 26.9),
    (H100, "FP8", None, 33.88, 34.26, 224_528, 27.4),
    (H200, "BF16", "BF16", 73.22, 50.67, 237_168, 29.0),
    (H200, "INT8", "BF16", 41.36, 82.53, 386_304, 47.2),
    (H200, "FP8", "BF16", 41.36, 82.53, 386_304, 47.2),
    (H200, "FP8", "FP8", 38.11, 85.77, 401_504, 49.0),
    (H200, "INT4", "INT4", 21.08, 102.80, 481_232, 58.7),
    (H200, "BF16", None, 65.74, 58.16, 381_168, 46.5),
]

# target, draft, weights GiB, available GiB, what breaks it
REFUSED_ROWS = [
    ("BF16", "BF16", 73.22, -5.10, Term.WEIGHTS),
    ("BF16", "FP8", 69.97, -1.85, Term.OVERHEAD),
    ("BF16", "INT4", 68.40, -0.27, Term.OVERHEAD),
]


def _device(product: str) -> Device:
    device = find_device(product)
    assert device is not None
    return device


@pytest.mark.parametrize(
    ("product", "target", "draft", "weights_gib", "available_gib", "tokens", "concurrency"), FITTING_ROWS
)
def test_budgets_of_pairs_that_fit(
    make_pair: PairFactory,
    product: str,
    target: str,
    draft: str | None,
    weights_gib: float,
    available_gib: float,
    tokens: int,
    concurrency: float,
) -> None:
    budget = estimate(make_pair(target, draft, compiles_anew=True), _device(product), 2)
    assert budget.weights_bytes / GIB == pytest.approx(weights_gib, abs=0.006)
    assert budget.available_kv_bytes / GIB == pytest.approx(available_gib, abs=0.011)
    assert budget.kv_cache_tokens == tokens
    assert budget.max_concurrency == pytest.approx(concurrency, abs=0.05)
    assert budget.kv_bytes_per_token == (163_840 if draft is None else 229_376)
    assert (budget.verdict, budget.binding_term) == (Verdict.FITS, None)


@pytest.mark.parametrize(("target", "draft", "weights_gib", "available_gib", "term"), REFUSED_ROWS)
def test_budgets_of_pairs_that_do_not_fit(
    make_pair: PairFactory, target: str, draft: str, weights_gib: float, available_gib: float, term: Term
) -> None:
    budget = estimate(make_pair(target, draft, compiles_anew=True), _device(H100), 2)
    assert budget.weights_bytes / GIB == pytest.approx(weights_gib, abs=0.006)
    assert budget.available_kv_bytes / GIB == pytest.approx(available_gib, abs=0.011)
    assert (budget.verdict, budget.binding_term) == (Verdict.DOES_NOT_FIT, term)


def test_more_sequences_increase_the_sampler_state(make_pair: PairFactory) -> None:
    few, many = (estimate(make_pair("FP8", max_num_seqs=count), _device(H100), 2) for count in (256, 1024))
    assert many.kv_cache_tokens == 120_432
    assert (many.state_bytes - few.state_bytes) / GIB == pytest.approx(0.46, abs=0.005)


def test_each_term_of_the_h100_row(make_pair: PairFactory) -> None:
    budget = estimate(make_pair("FP8"), _device(H100), 2)
    assert budget.requested_bytes / GIB == pytest.approx(72.85, abs=0.006)
    assert budget.draft_weights_bytes == 8_030_527_488
    assert budget.target_weights_bytes == 36_345_562_528 + 131_072 * 128 * 2
    assert budget.state_bytes / GIB == pytest.approx(0.15, abs=0.005)
    assert budget.activation_bytes / GIB == pytest.approx(0.91, abs=0.005)
    assert budget.cuda_graphs_bytes / GIB == pytest.approx(1.2)
    assert budget.non_torch_bytes / GIB == pytest.approx(2.1)


def test_loaded_bytes_equal_public_logs(make_pair: PairFactory, llama_8b: ModelGeometry) -> None:
    """vLLM 0.19 on H100 logged 33.88 GiB for 70B FP8 at tensor 2 and 14.99 for 8B BF16."""
    assert stage_weights(make_pair("FP8", None), Parallelism(2))[0].target_bytes / GIB == pytest.approx(
        33.88, abs=0.005
    )
    alone = Pair(llama_8b, make_pair().target_precision, None, None, "none", 0, make_pair().limits)
    assert stage_weights(alone, Parallelism(1))[0].target_bytes / GIB == pytest.approx(14.99, abs=0.005)


def test_a_draft_with_another_rotary_table_loads_its_own(
    make_pair: PairFactory, llama_8b: ModelGeometry, llama_1b: ModelGeometry
) -> None:
    shared = stage_weights(make_pair(), Parallelism(2))[0].draft_bytes
    assert shared == 8_030_527_488
    other = replace(make_pair(), draft=llama_1b)
    own_table = 131_072 * 64 * 2
    bytes_of_weights = 2 * (1_235_814_400 - 33 * 2048) // 2 + 33 * 2048 * 2
    assert stage_weights(other, Parallelism(2))[0].draft_bytes == bytes_of_weights + own_table


def test_one_gpu_with_eager_has_no_graphs_and_little_non_torch(make_pair: PairFactory, llama_8b: ModelGeometry) -> None:
    limits = make_pair(enforce_eager=True).limits
    budget = estimate(Pair(llama_8b, make_pair().target_precision, None, None, "none", 0, limits), _device(H100), 1)
    assert budget.cuda_graphs_bytes == 0
    assert budget.non_torch_bytes == GIB // 4


def test_ngram_state_has_a_token_table(make_pair: PairFactory) -> None:
    alone = replace(make_pair("FP8", None), num_speculative_tokens=5)
    ngram = replace(alone, method="ngram")
    table = 256 * 8192 * 4 + 256 * 32 * 8
    assert estimate(ngram, _device(H100), 2).state_bytes - estimate(alone, _device(H100), 2).state_bytes == table


def test_margin_gives_tight_before_does_not_fit(make_pair: PairFactory) -> None:
    """Requests of 8192 at 2.77 GiB available, 1.5 of them kept back: one fits, two are tight, three do not fit."""
    verdicts = [
        estimate(make_pair("BF16", None, min_concurrency=requests), _device(H100), 2).verdict for requests in (1, 2, 3)
    ]
    assert verdicts == [Verdict.FITS, Verdict.TIGHT, Verdict.DOES_NOT_FIT]
    tight = estimate(make_pair("BF16", None, min_concurrency=2), _device(H100), 2)
    assert tight.binding_term is Term.MARGIN
    assert tight.margin_bytes == 3 * GIB // 2


def test_memory_utilization_of_100_percent_does_not_fit(make_pair: PairFactory) -> None:
    full = estimate(make_pair("FP8", memory_utilization_percent=100), _device(H200), 2)
    assert (full.verdict, full.binding_term) == (Verdict.DOES_NOT_FIT, Term.UTILIZATION)
    almost = estimate(make_pair("FP8", memory_utilization_percent=99), _device(H200), 2)
    # It starts, but verification of 256 requests may take more than is free beside the budget.
    assert (almost.verdict, almost.binding_term) == (Verdict.TIGHT, Term.SLACK)


def test_binding_term_changes_at_exact_budget_bytes(make_pair: PairFactory) -> None:
    pair = make_pair("FP8", memory_utilization_percent=50)
    plain = estimate(pair, _device(H200), 2)
    taken = plain.requested_bytes - plain.available_kv_bytes
    served = taken + plain.needed_kv_bytes
    expected = {
        plain.weights_bytes: Term.WEIGHTS,
        plain.weights_bytes + 1: Term.OVERHEAD,
        taken: Term.OVERHEAD,
        taken + 1: Term.KV_CACHE,
        served - 1: Term.KV_CACHE,
        served: Term.MARGIN,
        served + plain.margin_bytes - 1: Term.MARGIN,
        served + plain.margin_bytes: None,
    }
    devices = {requested: replace(_device(H200), total_bytes=2 * requested) for requested in expected}
    assert {requested: estimate(pair, device, 2).binding_term for requested, device in devices.items()} == expected


def test_binding_term_changes_at_exact_slack_bytes(make_pair: PairFactory) -> None:
    """The context before the start, 0.6 GiB; then cuBLAS, tables and fragments, 0.3, and what verification takes."""
    pair = make_pair("FP8", memory_utilization_percent=99)
    context, reserve = round(0.6 * GIB), round(0.3 * GIB) + 32 * 2**20
    overrun = estimate(pair, _device(H200), 2).overrun_bytes
    expected = {
        context - 1: Term.UTILIZATION,
        context: Term.SLACK,
        context + reserve + overrun - 1: Term.SLACK,
        context + reserve + overrun: None,
    }
    devices = {free: replace(_device(H200), total_bytes=100 * free) for free in expected}
    assert {free: estimate(pair, device, 2).binding_term for free, device in devices.items()} == expected


def test_indivisible_tensor_parallel_size_is_refused(make_pair: PairFactory) -> None:
    with pytest.raises(PlanError, match="num_attention_heads 64") as caught:
        estimate(make_pair(), _device(H100), 3)
    assert (caught.value.field, caught.value.value) == ("parallelism.tensor", 3)
    with pytest.raises(PlanError, match="1 or more"):
        estimate(make_pair(), _device(H100), 0)


@pytest.mark.parametrize("entry", DEVICES, ids=lambda entry: entry["product"])
def test_device_entry_has_all_fields(entry: dict[str, Any]) -> None:
    assert set(entry) == {"product", "capability", "nvlink_gpus", "calibrated", "total_gib", "source"}, (
        "it needs these, all of them"
    )
    assert isinstance(entry["nvlink_gpus"], int)
    assert entry["nvlink_gpus"] >= 1
    assert entry["total_gib"] > 0
    assert entry["capability"] in GENERATIONS, "name its generation in operator/sizing/devices.py"


@pytest.mark.parametrize("product", [H100, H200, "NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-SXM4-40GB"])
def test_gpus_with_public_logs_are_calibrated(make_pair: PairFactory, product: str) -> None:
    assert uncalibrated_note(_device(product)) is None
    assert not estimate(make_pair(), replace(_device(H200), calibrated=_device(product).calibrated), 2).uncalibrated_gpu


@pytest.mark.parametrize("product", sorted({each["product"] for each in DEVICES if not each["calibrated"]}))
def test_uncalibrated_gpus_have_a_wider_margin(make_pair: PairFactory, product: str) -> None:
    plain = estimate(make_pair("FP8"), _device(H200), 2)
    uncalibrated = estimate(make_pair("FP8"), replace(_device(H200), calibrated=_device(product).calibrated), 2)
    assert uncalibrated.uncalibrated_gpu
    assert uncalibrated.margin_bytes == plain.margin_bytes + round(plain.estimated_bytes / 2)
    assert msgspec.structs.replace(uncalibrated, margin_bytes=plain.margin_bytes, uncalibrated_gpu=False) == plain
    assert "is uncalibrated" in str(uncalibrated_note(_device(product)))


@pytest.mark.parametrize(
    ("product", "words"),
    [("NVIDIA-B200", "compute capability 10"), ("NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition", "12")],
)
def test_blackwell_note_names_terms_that_are_not_modelled(product: str, words: str) -> None:
    note = uncalibrated_note(_device(product))
    assert note is not None
    assert words in note
    assert "not modelled" in note


def test_memory_size_is_used_only_for_unknown_products() -> None:
    assert find_device("NVIDIA-Unheard-Of") is None
    given = find_device("NVIDIA-Unheard-Of", 48)
    assert given is not None
    assert (given.total_bytes, given.nvlink_gpus, given.calibrated) == (48 * GIB, 1, False)
    assert find_device(H200, 48) == find_device(H200)


def test_devices_are_found_by_exact_product_label() -> None:
    assert {H100, H200, "NVIDIA-H100-NVL"} <= set(known_products())
    assert list(known_products()) == sorted(known_products())
    assert find_device("NVIDIA-H100") is None
    assert find_device("NVIDIA-H100-80GB-HBM3-MIG-1g.10gb") is None
    assert _device(H200).source


@pytest.mark.parametrize("version", ["0.23.0", "0.33.0"])
def test_gpus_without_nvlink_have_less_non_torch_memory(make_pair: PairFactory, version: str) -> None:
    """Public logs of RTX 5060 Ti (0.23) and of two 96 GB cards (0.27) have 0.1 to 0.2 GiB outside torch."""
    pair = make_pair("INT4", None, engine_version=version)
    pcie, nvlink = (
        find_device(product) for product in ("NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition", "NVIDIA-H100-80GB-HBM3")
    )
    assert pcie is not None
    assert nvlink is not None
    assert estimate(pair, pcie, 2).non_torch_bytes < GIB // 2
    assert estimate(pair, nvlink, 2).non_torch_bytes > 2 * GIB


# What is remembered of a pair is used for no other: each term of an estimate is what its own function says.

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
def test_cached_terms_are_not_reused_for_another_length(make_pair: PairFactory, version: str) -> None:
    compared: Counter[str] = Counter()
    for name in known_models():
        # One request has room for as many images as fit into it.
        for pair in pairs_with(name, make_pair("BF16", None, engine_version=version, max_num_seqs=1)):
            for length in (512, 100_000):
                with suppress(SizingError):  # the target has no head, or the draft is none of its
                    assert_every_term_is_its_own(with_limits(pair, max_model_len=length))
                    compared[pair.method] += 1
    assert {*compared} == {*Method}
    assert compared.total() > 500


@pytest.mark.parametrize("field", [each.name for each in fields(EngineLimits)])
def test_cached_terms_are_not_reused_for_another_limit(make_pair: PairFactory, field: str) -> None:
    before = make_pair("FP8")
    estimate(before, a_device(PRODUCTS[0]), 2)
    assert getattr(before.limits, field) != OTHER_LIMITS[field], "nothing would change"
    assert_every_term_is_its_own(make_pair("FP8", **{field: OTHER_LIMITS[field]}), split=Parallelism(2))


@pytest.mark.parametrize("field", OTHER_SETTINGS)
def test_cached_terms_are_not_reused_for_another_pair_setting(make_pair: PairFactory, field: str) -> None:
    before = make_pair("FP8", "FP8")
    estimate(before, a_device(PRODUCTS[0]), 2)
    assert_every_term_is_its_own(replace(before, **{field: OTHER_SETTINGS[field]}), split=Parallelism(2))


def test_cached_terms_are_not_reused_for_another_split(make_pair: PairFactory) -> None:
    pair = make_pair("FP8")
    for split in (Parallelism(2), Parallelism(4), Parallelism(2, pipeline=3), Parallelism(2, data=2)):
        assert_every_term_is_its_own(pair, split=split)


def test_calibration_applies_only_to_its_gpu_product(make_pair: PairFactory) -> None:
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


# Estimates with pipeline stages: each stage has its own terms, and all get the blocks of the tightest.

VERSIONS = ["0.17.0", "0.19.0", "0.21.0", "0.25.0", "0.27.0", "0.32.0"]


def on_h100(pair: Pair, split: Parallelism) -> Budget:
    device = find_device("NVIDIA-H100-80GB-HBM3")
    assert device is not None
    return estimate(pair, device, split)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("tensor", [1, 2])
def test_more_pipeline_stages_hold_more_kv_cache_tokens(make_pair: PairFactory, version: str, tensor: int) -> None:
    pair = make_pair("FP8", None, engine_version=version)
    tokens = [on_h100(pair, Parallelism(tensor, stage_count)).kv_cache_tokens for stage_count in (1, 2, 4)]
    assert tokens == sorted(tokens)
    assert tokens[0] < tokens[-1]


@pytest.mark.parametrize("version", VERSIONS)
def test_terms_add_up_on_the_tightest_stage(make_pair: PairFactory, version: str) -> None:
    budget = on_h100(make_pair("FP8", None, engine_version=version), Parallelism(2, 4))
    terms = budget.weights_bytes + budget.state_bytes + budget.activation_bytes + budget.cuda_graphs_bytes
    assert budget.requested_bytes - terms - budget.non_torch_bytes == budget.available_kv_bytes


def test_last_stage_is_the_tightest_of_equal_stages(make_pair: PairFactory) -> None:
    """1024 requests: the last stage makes their logits; the first has an embedding as large as its output head."""
    pair = make_pair("FP8", None, engine_version="0.19.0", max_num_seqs=1024)
    budget = on_h100(pair, Parallelism(1, 4))
    sampled = 1024 * 128_256 * 14 + 132 * 128_256 * 4 + (8192 + 2 * 1024) * 8192 * 2
    received = 2 * 8192 * 8192 * 2
    assert budget.activation_bytes == 32 * 2**20 + received + sampled


def test_buffers_are_counted_on_the_stages_that_use_them(make_pair: PairFactory) -> None:
    pair, split = make_pair("FP8", None), Parallelism(1, 3)
    first, middle, last = (state_bytes(pair, split, stage) for stage in stages(pair.target, 3))
    assert (first, middle) == (0, 2 * 8192 * 8192 * 2)
    assert last > middle, "the sampler's buffers beside what the stage receives"


@pytest.mark.parametrize(("version", "states"), [("0.32.0", [1, 2, 2]), ("0.19.0", [1, 1, 1])])
def test_v1_has_image_embeddings_on_every_stage(make_pair: PairFactory, version: str, states: list[int]) -> None:
    """V2 has them on the first stage alone; the later ones receive hidden states and residual."""
    target = find_geometry("google/gemma-3-27b-it")
    assert target is not None
    pair = replace(make_pair("BF16", None, engine_version=version, max_num_seqs=1), target=target)
    one = 8192 * target.hidden_size * 2
    assert [state_bytes(pair, Parallelism(1, 3), stage) // one for stage in stages(target, 3)] == states


@pytest.mark.parametrize(("version", "charged"), [("0.25.0", False), ("0.27.0", True)])
def test_buffers_are_charged_to_the_budget_or_the_slack(make_pair: PairFactory, version: str, *, charged: bool) -> None:
    pair = make_pair("FP8", None, engine_version=version)
    budget = on_h100(pair, Parallelism(2))
    assert (budget.state_bytes > 0) is charged
    assert pair.era.charges_state is charged


def test_uncharged_cuda_graphs_reduce_the_slack(make_pair: PairFactory) -> None:
    device = find_device("NVIDIA-H100-80GB-HBM3")
    assert device is not None

    def slack(**limits: Any) -> int:
        return slack_bytes(
            make_pair("FP8", None, **limits), device.total_bytes, device.total_bytes * 9 // 10, Parallelism(2)
        )

    assert slack(engine_version="0.19.0", enforce_eager=True) - slack(engine_version="0.19.0") > GIB
    assert slack(engine_version="0.20.0", enforce_eager=True) == slack(engine_version="0.20.0")


def test_non_torch_memory_grows_with_tensor_ranks(make_pair: PairFactory) -> None:
    pair = make_pair("FP8", None, engine_version="0.19.0")
    sizes = [non_torch_bytes(pair, Parallelism(tensor)) for tensor in (1, 2, 4, 8)]
    assert sizes == sorted(sizes)
    assert sizes[-1] / GIB == pytest.approx(2.15 + 0.0016 * 80)
    assert non_torch_bytes(pair, Parallelism(1, 2)) < sizes[0], "NCCL was set up before vLLM first looks"


def test_graph_bytes_follow_capture_sizes_and_drafts(make_pair: PairFactory) -> None:
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
def test_draft_head_graphs_grow_with_draft_lengths(make_pair: PairFactory, lengths: set[int], more: int) -> None:
    """Its first token comes with the prefill; 0.2 GiB a length."""
    head = find_geometry("sgl-project/SpecForge:configs/llama3-70B-ealge3.json")
    plain = replace(make_pair(), method="eagle3", draft=head)
    pair = replace(plain, other_draft_lengths=frozenset(lengths))
    of_head = graph_bytes(pair, Parallelism(2)) - graph_bytes(plain, Parallelism(2)) - further_graphs(pair) * 20 * 2**20
    assert of_head / GIB == pytest.approx(0.2 * more)


@pytest.mark.parametrize("version", ["0.20.0", "0.32.0"])
def test_only_cudagraph_mode_none_reduces_graph_bytes(make_pair: PairFactory, version: str) -> None:
    usual = make_pair("FP8", engine_version=version)
    for mode in ("PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"):
        chosen = make_pair("FP8", engine_version=version, graph_mode=mode)
        assert graph_bytes(chosen, Parallelism(2)) == graph_bytes(usual, Parallelism(2)) > 0
        assert graph_pool_bytes(chosen, Parallelism(2)) == graph_pool_bytes(usual, Parallelism(2)) > 0
    without = make_pair("FP8", engine_version=version, graph_mode="NONE")
    assert graph_bytes(without, Parallelism(2)) == graph_pool_bytes(without, Parallelism(2)) == 0
    assert activation_bytes(without, Parallelism(2)) == activation_bytes(usual, Parallelism(2)), "still compiled"


def test_sampling_draft_keeps_its_logits(make_pair: PairFactory) -> None:
    """v1/worker/gpu/spec_decode/speculator.py: requests x K x vocabulary, in BF16 here."""
    greedy = make_pair("FP8", engine_version="0.32.0")
    sampling = replace(greedy, samples_drafts=True)
    more = state_bytes(sampling, Parallelism(2)) - state_bytes(greedy, Parallelism(2))
    assert more == greedy.limits.max_num_seqs * greedy.num_speculative_tokens * 128_256 * 2
    without_draft = make_pair("FP8", None, engine_version="0.32.0")
    assert state_bytes(replace(without_draft, samples_drafts=True), Parallelism(2)) == state_bytes(
        without_draft, Parallelism(2)
    )
