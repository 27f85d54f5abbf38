"""The calibration file: what it takes in, and which measurement counts."""

import json
from dataclasses import replace

import pytest

from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.calibration import (
    Calibration,
    CalibrationEntry,
    CalibrationError,
    EngineKind,
    parse_calibration,
    serialize_calibration,
)

ENTRY = CalibrationEntry(
    "NVIDIA-H200", "0.32", "V2", 2, False, 256, 8192, "draft_model", 5, "70B + 8B", "FP8", "BF16", GIB
)
KIND = EngineKind("NVIDIA-H200", "0.32", "V2", 2, False, 256, 8192, "draft_model", 5, "70B + 8B", "FP8", "BF16")


def test_what_is_written_is_read_back() -> None:
    other = replace(ENTRY, residual_bytes=-5, max_num_seqs=64)
    text = serialize_calibration(Calibration((ENTRY, other)))
    assert set(parse_calibration(text).entries) == {ENTRY, other}
    assert serialize_calibration(Calibration((other, ENTRY))) == text


def test_an_equal_engine_gives_its_residual_and_a_smaller_margin() -> None:
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
def test_another_kind_of_engine_says_nothing(other: dict[str, str | int]) -> None:
    assert Calibration((replace(ENTRY, **other),)).find(KIND) is None  # type: ignore[arg-type]


def test_patch_versions_are_the_same_kind_of_engine() -> None:
    assert Calibration((ENTRY,)).find(replace(KIND, engine_version="0.32.1")) is not None
    assert Calibration((replace(ENTRY, engine_version="0.32.0"),)).find(KIND) is not None


def test_another_model_corrects_but_does_not_make_the_margin_smaller() -> None:
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
def test_what_another_engine_left_over_is_not_promised(other: dict[str, str | int]) -> None:
    spare = Calibration((replace(ENTRY, residual_bytes=-GIB),))
    same, unlike = spare.find(KIND), spare.find(replace(KIND, **other))  # type: ignore[arg-type]
    assert same is not None
    assert unlike is not None
    assert (same.residual_bytes, unlike.residual_bytes) == (-GIB, 0)


def test_the_nearest_counts_and_keeps_the_usual_margin() -> None:
    near, far = replace(ENTRY, max_num_seqs=128, residual_bytes=1), replace(ENTRY, max_num_seqs=16, residual_bytes=2)
    other_method = replace(ENTRY, method="none", residual_bytes=3)
    found = Calibration((far, near, other_method)).find(KIND)
    assert found is not None
    assert (found.residual_bytes, found.margin_bytes) == (1, None)


def test_of_equally_near_measurements_the_most_pessimistic_counts() -> None:
    found = Calibration((ENTRY, replace(ENTRY, model="other", residual_bytes=2 * GIB))).find(KIND)
    assert found is not None
    assert found.residual_bytes == 2 * GIB
    assert len(found.entries) == 2


def test_a_newer_measurement_replaces_the_old_one_of_the_same_settings() -> None:
    newer = replace(ENTRY, residual_bytes=7)
    assert Calibration((ENTRY,)).with_entries([newer]).entries == (newer,)


@pytest.mark.parametrize(
    "other", [{"target_precision": "BF16"}, {"draft_precision": None}, {"num_speculative_tokens": 3}]
)
def test_another_precision_or_k_is_another_measurement(other: dict[str, str | int | None]) -> None:
    more = replace(ENTRY, residual_bytes=7, **other)  # type: ignore[arg-type]
    assert set(Calibration((ENTRY,)).with_entries([more]).entries) == {ENTRY, more}
    assert set(parse_calibration(serialize_calibration(Calibration((ENTRY, more)))).entries) == {ENTRY, more}


@pytest.mark.parametrize(
    "other", [{"target_precision": "BF16"}, {"draft_precision": "FP8"}, {"num_speculative_tokens": 3}]
)
def test_another_precision_or_k_corrects_but_does_not_make_the_margin_smaller(other: dict[str, str | int]) -> None:
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
def test_what_is_wrong_is_named(text: str, field: str) -> None:
    with pytest.raises(CalibrationError) as caught:
        parse_calibration(text)
    assert caught.value.field == field
