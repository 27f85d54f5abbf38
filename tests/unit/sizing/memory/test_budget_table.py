"""Llama-3.1-70B with an 8B draft on two GPUs: the published worked example, every row."""

# ruff: noqa: PLR0913, PLR0917 - one argument a column of the table

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.data_files import read_data
from specdecode_operator.sizing.devices import GENERATIONS, Device, find_device, known_products, uncalibrated_note
from specdecode_operator.sizing.errors import PlanError
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.memory.budget import Pair, Term, Verdict, estimate
from specdecode_operator.sizing.memory.kv_cache import stage_weights
from specdecode_operator.sizing.pair import Parallelism

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

PairFactory = Callable[..., Pair]


def _device(product: str) -> Device:
    device = find_device(product)
    assert device is not None
    return device


@pytest.mark.parametrize(
    ("product", "target", "draft", "weights_gib", "available_gib", "tokens", "concurrency"), FITTING_ROWS
)
def test_rows_that_start(
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
def test_rows_that_do_not_start(
    make_pair: PairFactory, target: str, draft: str, weights_gib: float, available_gib: float, term: Term
) -> None:
    budget = estimate(make_pair(target, draft, compiles_anew=True), _device(H100), 2)
    assert budget.weights_bytes / GIB == pytest.approx(weights_gib, abs=0.006)
    assert budget.available_kv_bytes / GIB == pytest.approx(available_gib, abs=0.011)
    assert (budget.verdict, budget.binding_term) == (Verdict.DOES_NOT_FIT, term)


@pytest.mark.parametrize(("product", "tokens"), [(H100, 250_576), (H200, 772_624)])
def test_fp8_kv_doubles_the_tokens(make_pair: PairFactory, product: str, tokens: int) -> None:
    pair = make_pair("FP8", kv_cache_element_bytes=1, compiles_anew=True)
    assert estimate(pair, _device(product), 2).kv_cache_tokens == tokens


def test_more_sequences_cost_sampler_state(make_pair: PairFactory) -> None:
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


def test_one_gpu_has_little_outside_torch_and_eager_has_no_graphs(
    make_pair: PairFactory, llama_8b: ModelGeometry
) -> None:
    limits = make_pair(enforce_eager=True).limits
    budget = estimate(Pair(llama_8b, make_pair().target_precision, None, None, "none", 0, limits), _device(H100), 1)
    assert budget.cuda_graphs_bytes == 0
    assert budget.non_torch_bytes == GIB // 4


def test_ngram_keeps_a_table_of_tokens(make_pair: PairFactory) -> None:
    alone = replace(make_pair("FP8", None), num_speculative_tokens=5)
    ngram = replace(alone, method="ngram")
    table = 256 * 8192 * 4 + 256 * 32 * 8
    assert estimate(ngram, _device(H100), 2).state_bytes - estimate(alone, _device(H100), 2).state_bytes == table


def test_the_margin_makes_it_tight_before_it_breaks(make_pair: PairFactory) -> None:
    """Requests of 8192 at 2.77 GiB available, 1.5 of them kept back: one fits, two are tight, three do not fit."""
    verdicts = [
        estimate(make_pair("BF16", None, min_concurrency=requests), _device(H100), 2).verdict for requests in (1, 2, 3)
    ]
    assert verdicts == [Verdict.FITS, Verdict.TIGHT, Verdict.DOES_NOT_FIT]
    tight = estimate(make_pair("BF16", None, min_concurrency=2), _device(H100), 2)
    assert tight.binding_term is Term.MARGIN
    assert tight.margin_bytes == 3 * GIB // 2


def test_a_share_that_is_not_free_at_start_does_not_fit(make_pair: PairFactory) -> None:
    full = estimate(make_pair("FP8", memory_utilization_percent=100), _device(H200), 2)
    assert (full.verdict, full.binding_term) == (Verdict.DOES_NOT_FIT, Term.UTILIZATION)
    almost = estimate(make_pair("FP8", memory_utilization_percent=99), _device(H200), 2)
    # It starts, but verification of 256 requests may take more than is free beside the budget.
    assert (almost.verdict, almost.binding_term) == (Verdict.TIGHT, Term.SLACK)


def test_what_breaks_a_budget_is_told_to_the_byte(make_pair: PairFactory) -> None:
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


def test_what_must_be_free_beside_the_budget_is_told_to_the_byte(make_pair: PairFactory) -> None:
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


def test_a_split_that_does_not_divide_is_refused(make_pair: PairFactory) -> None:
    with pytest.raises(PlanError, match="num_attention_heads 64") as caught:
        estimate(make_pair(), _device(H100), 3)
    assert (caught.value.field, caught.value.value) == ("parallelism.tensor", 3)
    with pytest.raises(PlanError, match="1 or more"):
        estimate(make_pair(), _device(H100), 0)


@pytest.mark.parametrize("entry", DEVICES, ids=lambda entry: entry["product"])
def test_an_entry_of_a_device_is_whole(entry: dict[str, Any]) -> None:
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
def test_gpus_without_public_logs_keep_back_half_of_what_is_estimated(make_pair: PairFactory, product: str) -> None:
    plain = estimate(make_pair("FP8"), _device(H200), 2)
    uncalibrated = estimate(make_pair("FP8"), replace(_device(H200), calibrated=_device(product).calibrated), 2)
    assert uncalibrated.uncalibrated_gpu
    assert uncalibrated.margin_bytes == plain.margin_bytes + round(plain.estimated_bytes / 2)
    assert replace(uncalibrated, margin_bytes=plain.margin_bytes, uncalibrated_gpu=False) == plain
    assert "is uncalibrated" in str(uncalibrated_note(_device(product)))


@pytest.mark.parametrize(
    ("product", "words"),
    [("NVIDIA-B200", "compute capability 10"), ("NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition", "12")],
)
def test_blackwell_is_not_sized_silently_with_hoppers_terms(product: str, words: str) -> None:
    note = uncalibrated_note(_device(product))
    assert note is not None
    assert words in note
    assert "not modelled" in note


def test_a_memory_makes_a_device_of_an_unknown_product_only() -> None:
    assert find_device("NVIDIA-Unheard-Of") is None
    given = find_device("NVIDIA-Unheard-Of", 48)
    assert given is not None
    assert (given.total_bytes, given.nvlink_gpus, given.calibrated) == (48 * GIB, 1, False)
    assert find_device(H200, 48) == find_device(H200)


def test_devices_are_known_by_exact_label() -> None:
    assert {H100, H200, "NVIDIA-H100-NVL"} <= set(known_products())
    assert list(known_products()) == sorted(known_products())
    assert find_device("NVIDIA-H100") is None
    assert find_device("NVIDIA-H100-80GB-HBM3-MIG-1g.10gb") is None
    assert _device(H200).source


@pytest.mark.parametrize("version", ["0.23.0", "0.33.0"])
def test_cards_without_nvlink_have_nothing_of_its_buffers(make_pair: PairFactory, version: str) -> None:
    """Public logs of RTX 5060 Ti (0.23) and of two 96 GB cards (0.27) have 0.1 to 0.2 GiB outside torch."""
    pair = make_pair("INT4", None, engine_version=version)
    pcie, nvlink = (
        find_device(product) for product in ("NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition", "NVIDIA-H100-80GB-HBM3")
    )
    assert pcie is not None
    assert nvlink is not None
    assert estimate(pair, pcie, 2).non_torch_bytes < GIB // 2
    assert estimate(pair, nvlink, 2).non_torch_bytes > 2 * GIB
