"""Calibration of estimates by measurements."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.calibration import (
    Calibration,
    CalibrationEntry,
    CalibrationError,
    EngineKind,
    parse_calibration,
    serialize_calibration,
)
from specdecode_operator.sizing.devices import Device, find_device
from specdecode_operator.sizing.memory.budget import Pair, Verdict, estimate
from specdecode_operator.sizing.pair import Parallelism
from specdecode_operator.sizing.plan import GpuPool, plan_on_gpus
from specdecode_operator.vllm.versions import SIZED_VERSIONS
from tests.unit.sizing.conftest import PairFactory
from tests.unit.sizing.test_sizing_properties import ORDER, _budget, devices, pairs, tensors, unhurried

ENTRY = CalibrationEntry(
    "NVIDIA-H200", "0.32", "V2", 2, False, 256, 8192, "draft_model", 5, "70B + 8B", "FP8", "BF16", GIB
)
KIND = EngineKind("NVIDIA-H200", "0.32", "V2", 2, False, 256, 8192, "draft_model", 5, "70B + 8B", "FP8", "BF16")


def test_calibration_survives_a_round_trip() -> None:
    other = replace(ENTRY, residual_bytes=-5, max_num_seqs=64)
    text = serialize_calibration(Calibration((ENTRY, other)))
    assert set(parse_calibration(text).entries) == {ENTRY, other}
    assert serialize_calibration(Calibration((other, ENTRY))) == text


def test_equal_engine_gives_residual_and_smaller_margin() -> None:
    found = Calibration((ENTRY,)).find(KIND)
    assert found is not None
    assert found.residual_bytes == GIB
    assert found.margin_bytes is not None
    assert 0 < found.margin_bytes < 1.5 * GIB
    assert "NVIDIA-H200" in found.sentence


@pytest.mark.parametrize(
    "other",
    [
        {"product": "NVIDIA-H100-80GB-HBM3"},
        {"engine_version": "0.31"},
        {"runner": "V1"},
        {"tensor": 4},
        {"enforce_eager": True},
    ],
)
def test_measurements_of_another_engine_kind_are_ignored(other: dict[str, str | int]) -> None:
    assert Calibration((replace(ENTRY, **other),)).find(KIND) is None  # type: ignore[arg-type]


def test_another_model_corrects_but_keeps_the_margin() -> None:
    found = Calibration((ENTRY,)).find(replace(KIND, model="8B + 1B"))
    assert found is not None
    assert (found.residual_bytes, found.margin_bytes) == (GIB, None)


@pytest.mark.parametrize(
    "other",
    [
        {"model": "8B + 1B"},
        {"max_num_seqs": 128},
        {"method": "none"},
        {"num_speculative_tokens": 3},
        {"target_precision": "BF16"},
        {"draft_precision": "INT4"},
        {"draft_precision": None},
    ],
)
def test_spare_memory_of_another_engine_is_not_promised(other: dict[str, str | int]) -> None:
    spare = Calibration((replace(ENTRY, residual_bytes=-GIB),))
    same, unlike = spare.find(KIND), spare.find(replace(KIND, **other))  # type: ignore[arg-type]
    assert same is not None
    assert unlike is not None
    assert (same.residual_bytes, unlike.residual_bytes) == (-GIB, 0)


def test_nearest_measurement_corrects_and_keeps_the_margin() -> None:
    near, far = replace(ENTRY, max_num_seqs=128, residual_bytes=1), replace(ENTRY, max_num_seqs=16, residual_bytes=2)
    other_method = replace(ENTRY, method="none", residual_bytes=3)
    found = Calibration((far, near, other_method)).find(KIND)
    assert found is not None
    assert (found.residual_bytes, found.margin_bytes) == (1, None)


def test_largest_residual_of_equally_near_measurements_counts() -> None:
    found = Calibration((ENTRY, replace(ENTRY, model="other", residual_bytes=2 * GIB))).find(KIND)
    assert found is not None
    assert found.residual_bytes == 2 * GIB
    assert len(found.entries) == 2


def test_newer_measurement_replaces_the_older_of_equal_settings() -> None:
    newer = replace(ENTRY, residual_bytes=7)
    assert Calibration((ENTRY,)).with_entries([newer]).entries == (newer,)


@pytest.mark.parametrize(
    "other", [{"target_precision": "BF16"}, {"draft_precision": None}, {"num_speculative_tokens": 3}]
)
def test_other_precision_or_k_is_kept_as_another_measurement(other: dict[str, str | int | None]) -> None:
    more = replace(ENTRY, residual_bytes=7, **other)  # type: ignore[arg-type]
    assert set(Calibration((ENTRY,)).with_entries([more]).entries) == {ENTRY, more}
    assert set(parse_calibration(serialize_calibration(Calibration((ENTRY, more)))).entries) == {ENTRY, more}


@pytest.mark.parametrize(
    "other", [{"target_precision": "BF16"}, {"draft_precision": "FP8"}, {"num_speculative_tokens": 3}]
)
def test_other_precision_or_k_corrects_but_keeps_the_margin(other: dict[str, str | int]) -> None:
    found = Calibration((ENTRY,)).find(replace(KIND, **other))  # type: ignore[arg-type]
    assert found is not None
    assert (found.residual_bytes, found.margin_bytes) == (GIB, None)


def broken(**change: object) -> str:
    content = json.loads(serialize_calibration(Calibration((ENTRY,))))
    content["entries"][0].update(change)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("{", "calibration"),
        ("[]", "format"),
        ('{"format": 2, "entries": []}', "format"),
        ('{"format": 1, "entries": {}}', "entries"),
        ('{"format": 1, "entries": [{}]}', "entries[0]"),
        (broken(typo=1), "entries[0]"),
        (broken(residual_bytes=1.5), "entries[0].residual_bytes"),
        (broken(residual_bytes=float("nan")), "entries[0].residual_bytes"),
        (broken(residual_bytes=2**63), "entries[0].residual_bytes"),
        (broken(residual_bytes=-32 * GIB), "entries[0].residual_bytes"),
        (broken(residual_bytes=-512 * GIB), "entries[0].residual_bytes"),
        (broken(num_speculative_tokens=-1), "entries[0].num_speculative_tokens"),
        (broken(target_precision="FP16"), "entries[0].target_precision"),
        (broken(target_precision=None), "entries[0].target_precision"),
        (broken(draft_precision=""), "entries[0].draft_precision"),
        (broken(tensor=0), "entries[0].tensor"),
        (broken(tensor=True), "entries[0].tensor"),
        (broken(max_num_seqs="256"), "entries[0].max_num_seqs"),
        (broken(runner="V3"), "entries[0].runner"),
        (broken(product=""), "entries[0].product"),
        (broken(engine_version="latest"), "entries[0].engine_version"),
        (broken(enforce_eager=0), "entries[0].enforce_eager"),
    ],
)
def test_invalid_calibration_field_is_named(text: str, field: str) -> None:
    with pytest.raises(CalibrationError) as caught:
        parse_calibration(text)
    assert caught.value.field == field


# What a calibration changes in a budget: exactly what was measured, and nothing without a measurement.

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


def test_residual_is_charged_and_described(make_pair: PairFactory, h200: Device) -> None:
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


def test_corrected_prediction_equals_the_report(make_pair: PairFactory, h200: Device) -> None:
    """The residual is predicted less reported, so the corrected prediction is the report."""
    pair = make_pair()
    reported = estimate(pair, h200, 2).available_kv_bytes + 700_000_000
    entry = entry_of(pair, h200, 2, estimate(pair, h200, 2).available_kv_bytes - reported)
    assert estimate(calibrated(pair, entry), h200, 2).available_kv_bytes == reported


@pytest.mark.parametrize("left_over_gib", [10, 512])
def test_correction_is_capped_at_the_estimated_terms(make_pair: PairFactory, h200: Device, left_over_gib: int) -> None:
    pair = make_pair("FP8")
    plain = estimate(pair, h200, 2)
    budget = estimate(calibrated(pair, entry_of(pair, h200, 2, -left_over_gib * GIB)), h200, 2)
    assert budget.correction_bytes == -plain.estimated_bytes
    assert budget.available_kv_bytes == budget.requested_bytes - budget.weights_bytes - budget.state_bytes
    assert budget.estimated_bytes == plain.estimated_bytes > 0


def test_measurement_of_other_settings_keeps_the_margin(make_pair: PairFactory, h200: Device) -> None:
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


def test_measurement_never_widens_the_margin(make_pair: PairFactory, h200: Device) -> None:
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
def test_unmeasured_cuda_graph_settings_are_not_corrected(
    make_pair: PairFactory, h200: Device, graphs: dict[str, Any], other_lengths: tuple[int, ...]
) -> None:
    """Those that the user names, and those of other lengths that the engine goes over to."""
    pair = replace(make_pair(**graphs), other_draft_lengths=frozenset(other_lengths))
    assert estimate(calibrated(pair, entry_of(pair, h200, 2, GIB)), h200, 2) == estimate(pair, h200, 2)


def test_plan_uses_and_describes_the_calibration(make_pair: PairFactory, h200: Device) -> None:
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
def test_positive_residual_never_increases_the_kv_cache(
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
def test_calibration_without_a_matching_kind_changes_nothing(pair: Pair, device: Device, tensor: int) -> None:
    plain = _budget(pair, device, tensor)
    assert _budget(calibrated(pair), device, tensor) == plain
    other = replace(entry_of(pair, device, tensor, GIB), product="another")
    assert _budget(calibrated(pair, other), device, tensor) == plain


def test_gpu_known_only_by_memory_is_uncalibrated(make_pair: PairFactory) -> None:
    pair = make_pair("FP8", None, engine_version="0.19")
    known, by_memory = find_device("NVIDIA-H100-80GB-HBM3"), find_device("GPU of 79.19GiB")
    assert known is not None
    assert by_memory is not None
    measured, taken = estimate(pair, known, 2), estimate(pair, by_memory, 2)
    assert (measured.calibrated, taken.calibrated) == (True, False)
    assert taken.margin_bytes > measured.margin_bytes
    assert taken.available_kv_bytes == measured.available_kv_bytes


def test_gpu_known_only_by_memory_has_the_widest_margin(make_pair: PairFactory) -> None:
    """Of versions with logs on Hopper: the margin is that of the newest, which has none, and half of the terms."""
    pair = make_pair("FP8", engine_version="0.19")
    devices = filter(None, map(find_device, ("NVIDIA-H100-80GB-HBM3", "GPU of 79.19GiB")))
    product, by_memory = (estimate(pair, device, 2) for device in devices)
    assert (product.calibrated, by_memory.calibrated) == (True, False)
    assert (product.margin_bytes, by_memory.margin_bytes) == (
        GIB // 2,
        3 * GIB // 2 + round(product.estimated_bytes / 2),
    )
