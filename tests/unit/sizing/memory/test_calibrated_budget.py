"""What a calibration changes in a budget: exactly what was measured, and nothing without a measurement."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.calibration import Calibration, CalibrationEntry
from specdecode_operator.sizing.devices import Device, find_device
from specdecode_operator.sizing.memory.budget import Pair, Verdict, estimate, estimate_on_cpu
from specdecode_operator.sizing.pair import Parallelism
from specdecode_operator.sizing.plan import GpuPool, plan_on_gpus
from specdecode_operator.vllm.versions import SIZED_VERSIONS
from tests.unit.sizing.conftest import PairFactory
from tests.unit.sizing.test_sizing_properties import ORDER, _budget, devices, pairs, tensors, unhurried

H200 = "NVIDIA-H200"


def entry_of(pair: Pair, device: Device, tensor: int, residual_bytes: int) -> CalibrationEntry:
    """A measurement of just this engine."""
    limits = pair.limits
    return CalibrationEntry(
        product=device.product,
        engine_version=SIZED_VERSIONS[-1],
        runner="V2",
        tensor=tensor,
        enforce_eager=limits.enforce_eager,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        method=pair.method,
        num_speculative_tokens=pair.num_speculative_tokens,
        model=pair.models,
        target_precision=pair.target_precision.value,
        draft_precision=None if pair.draft_precision is None else pair.draft_precision.value,
        residual_bytes=residual_bytes,
    )


def calibrated(pair: Pair, *entries: CalibrationEntry) -> Pair:
    return replace(pair, calibration=Calibration(entries))


@pytest.fixture
def h200() -> Device:
    device = find_device(H200)
    assert device is not None
    return device


def test_the_residual_is_charged_and_told(make_pair: PairFactory, h200: Device) -> None:
    pair = make_pair()
    plain = estimate(pair, h200, 2)
    entry = entry_of(pair, h200, 2, GIB)
    budget = estimate(calibrated(pair, entry), h200, 2)
    assert budget.available_kv_bytes == plain.available_kv_bytes - GIB
    assert budget.non_torch_bytes == plain.non_torch_bytes + GIB
    assert budget.correction_bytes == GIB
    assert budget.margin_bytes < plain.margin_bytes, "this very engine was measured"
    assert budget.calibration is not None
    assert f"a measured start of vLLM {SIZED_VERSIONS[-1]} (V2, tensor 2" in budget.calibration


def test_a_measured_engine_gets_what_it_reported(make_pair: PairFactory, h200: Device) -> None:
    """The residual is predicted less reported, so the corrected prediction is the report."""
    pair = make_pair()
    reported = estimate(pair, h200, 2).available_kv_bytes + 700_000_000
    entry = entry_of(pair, h200, 2, estimate(pair, h200, 2).available_kv_bytes - reported)
    assert estimate(calibrated(pair, entry), h200, 2).available_kv_bytes == reported


@pytest.mark.parametrize("left_over_gib", [10, 512])
def test_a_measurement_gives_no_more_than_the_estimated_terms_take(
    make_pair: PairFactory, h200: Device, left_over_gib: int
) -> None:
    pair = make_pair("FP8")
    plain = estimate(pair, h200, 2)
    budget = estimate(calibrated(pair, entry_of(pair, h200, 2, -left_over_gib * GIB)), h200, 2)
    assert budget.correction_bytes == -plain.estimated_bytes
    assert budget.available_kv_bytes == budget.requested_bytes - budget.weights_bytes - budget.state_bytes
    assert budget.estimated_bytes == plain.estimated_bytes > 0


def test_other_settings_correct_but_keep_the_margin(make_pair: PairFactory, h200: Device) -> None:
    pair = make_pair()
    for change in (
        {"max_num_seqs": 64},
        {"model": "another"},
        {"method": "ngram"},
        {"target_precision": "FP8"},
        {"draft_precision": "FP8"},
        {"num_speculative_tokens": 3},
    ):
        entry = replace(entry_of(pair, h200, 2, GIB), **change)
        budget = estimate(calibrated(pair, entry), h200, 2)
        assert (budget.correction_bytes, budget.margin_bytes) == (GIB, estimate(pair, h200, 2).margin_bytes)


def test_a_measurement_never_makes_the_margin_larger(make_pair: PairFactory, h200: Device) -> None:
    """vLLM 0.19 is known from 25 logs: its margin is smaller than what one measurement allows."""
    pair = make_pair("BF16", None, engine_version="0.19.0")
    entry = replace(entry_of(pair, h200, 2, GIB), engine_version="0.19.0", runner="V1")
    budget = estimate(calibrated(pair, entry), h200, 2)
    assert budget.correction_bytes == GIB
    assert budget.margin_bytes == estimate(pair, h200, 2).margin_bytes == GIB // 2


@pytest.mark.parametrize("split", [Parallelism(2, pipeline=2), Parallelism(2, data=2), Parallelism(4)])
def test_only_tensor_parallelism_is_corrected(make_pair: PairFactory, h200: Device, split: Parallelism) -> None:
    pair = make_pair("BF16", None)
    budget = estimate(calibrated(pair, entry_of(pair, h200, 2, GIB)), h200, split)
    assert budget == estimate(pair, h200, split)
    assert budget.calibration is None


@pytest.mark.parametrize(
    ("graphs", "other_lengths"), [({"graph_mode": "PIECEWISE"}, ()), ({"max_graph_tokens": 64}, ()), ({}, (2,))]
)
def test_graphs_that_were_not_measured_are_not_corrected(
    make_pair: PairFactory, h200: Device, graphs: dict[str, Any], other_lengths: tuple[int, ...]
) -> None:
    """Those that the user names, and those of other lengths that the engine goes over to."""
    pair = replace(make_pair(**graphs), other_draft_lengths=frozenset(other_lengths))
    assert estimate(calibrated(pair, entry_of(pair, h200, 2, GIB)), h200, 2) == estimate(pair, h200, 2)


def test_cpu_has_nothing_to_correct(make_pair: PairFactory, h200: Device) -> None:
    pair = make_pair()
    entry = replace(entry_of(pair, h200, 1, GIB), product="CPU", runner="V1")
    assert estimate_on_cpu(calibrated(pair, entry), 400 * GIB, 40 * GIB) == estimate_on_cpu(pair, 400 * GIB, 40 * GIB)


def test_a_plan_is_judged_and_told_by_what_was_measured(make_pair: PairFactory, h200: Device) -> None:
    pair = make_pair(min_concurrency=20)
    pools = [GpuPool(H200, 8)]
    assert plan_on_gpus(pair, pools, 2).verdict is Verdict.FITS
    corrected = plan_on_gpus(calibrated(pair, entry_of(pair, h200, 2, 20 * GIB)), pools, 2)
    assert corrected.verdict is Verdict.DOES_NOT_FIT
    assert "calibrated: 20.0 GiB more for the engine on each GPU, after a measured start" in corrected.explanation
    assert corrected.fixes, "what helps is found by the same measure"
    assert "calibrated" not in plan_on_gpus(pair, pools, 2).explanation


@unhurried
@given(pairs, devices, tensors, st.integers(0, 200 * GIB), st.booleans())
def test_a_positive_residual_never_gives_more(
    pair: Pair, device: Device, tensor: int, residual_bytes: int, eager: bool
) -> None:
    plain = _budget(pair, device, tensor)
    entry = replace(entry_of(pair, device, tensor, residual_bytes), enforce_eager=eager)
    budget = _budget(calibrated(pair, entry), device, tensor)
    assert budget.kv_cache_tokens <= plain.kv_cache_tokens
    assert budget.available_kv_bytes <= plain.available_kv_bytes
    # The smaller margin may turn Tight into Fits; what does not fit before it is never made to fit.
    if plain.verdict is Verdict.DOES_NOT_FIT:
        assert budget.verdict is Verdict.DOES_NOT_FIT
    if budget.margin_bytes == plain.margin_bytes:
        assert ORDER.index(budget.verdict) <= ORDER.index(plain.verdict)


@unhurried
@given(pairs, devices, tensors)
def test_without_a_measurement_of_the_kind_nothing_changes(pair: Pair, device: Device, tensor: int) -> None:
    plain = _budget(pair, device, tensor)
    assert _budget(calibrated(pair), device, tensor) == plain
    other = replace(entry_of(pair, device, tensor, GIB), product="another")
    assert _budget(calibrated(pair, other), device, tensor) == plain


def test_no_log_confirms_a_gpu_of_which_only_the_memory_is_known(make_pair: PairFactory) -> None:
    pair = make_pair("FP8", None, engine_version="0.19")
    known, by_memory = find_device("NVIDIA-H100-80GB-HBM3"), find_device("GPU of 79.19GiB")
    assert known is not None
    assert by_memory is not None
    measured, taken = estimate(pair, known, 2), estimate(pair, by_memory, 2)
    assert (measured.calibrated, taken.calibrated) == (True, False)
    assert taken.margin_bytes > measured.margin_bytes
    assert taken.available_kv_bytes == measured.available_kv_bytes


def test_no_log_of_a_product_speaks_for_a_gpu_of_so_much_memory(make_pair: PairFactory) -> None:
    """Of versions with logs on Hopper: the margin is that of the newest, which has none, and half of the terms."""
    pair = make_pair("FP8", engine_version="0.19")
    devices = filter(None, map(find_device, ("NVIDIA-H100-80GB-HBM3", "GPU of 79.19GiB")))
    product, by_memory = (estimate(pair, device, 2) for device in devices)
    assert (product.calibrated, by_memory.calibrated) == (True, False)
    assert (product.margin_bytes, by_memory.margin_bytes) == (
        GIB // 2,
        3 * GIB // 2 + round(product.estimated_bytes / 2),
    )
