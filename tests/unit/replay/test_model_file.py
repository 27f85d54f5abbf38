"""Files of fitted models."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.replay.model_file import (
    FittedCapture,
    FittedModel,
    Limits,
    ModelFileError,
    Origin,
    Range,
    decode_model,
    encode_model,
    read_model,
)
from specdecode_operator.untrusted import UnreadableTextError

MODEL = FittedModel(
    schema=1,
    origin=Origin(model="tiny", limits=Limits(max_num_seqs=8), captures=[FittedCapture(name="a", requests=3)]),
)


def test_written_model_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(encode_model(MODEL))
    assert read_model(path) == MODEL


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("[]", "is not a fitted model"),
        ('{"schema": 1}', "is not a fitted model"),
        ('{"schema": 2, "origin": {}}', "schema: 2: this specdecode reads 1: fit it again"),
        ('{"schema": 1, "origin": {"tp": -1}}', "$.origin.tp"),
        ('{"schema": 1, "origin": {}, "origin": {}}', "there twice"),
        (" " * (9 * 2**20), "has more than 8 MiB"),
    ],
)
def test_invalid_model_file_is_refused_with_its_path(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(ModelFileError) as caught:
        read_model(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert says in message
    assert "\n" not in message


def test_missing_model_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="nowhere: No such file"):
        read_model(tmp_path / "nowhere")


def test_fifo_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.json")
    with pytest.raises(ModelFileError, match="FIFO"):
        read_model(tmp_path / "model.json")


def test_unknown_section_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"schema": 1, "origin": {}, "of_tomorrow": [1]}))
    assert read_model(path) == FittedModel(schema=1, origin=Origin())


def test_value_outside_fitted_range_is_described_with_ratio() -> None:
    fitted_on = Range(1, 8)
    assert fitted_on.outside("running", 8) is None
    assert fitted_on.outside("running", 8.1) is None, "not 1.0 times that"
    assert "3.0 times" in (fitted_on.outside("running", 24) or "")
    assert "1 at least" in (fitted_on.outside("running", 0.5) or "")


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"step_time": {"curve": []}}, "step_time: .*curve"),
        ({"acceptance": {}}, "acceptance: .*num_spec"),
    ],
)
def test_invalid_engine_section_is_refused(section: dict[str, Any], words: str) -> None:
    text = json.dumps({"schema": 1, "origin": {}} | section).encode()
    with pytest.raises(UnreadableTextError, match=f"{words}.*fit it again"):
        decode_model(text)


def test_engine_sections_are_kept_unchanged() -> None:
    section = {"curve": [[1, 8.0]], "host_ms": 0.5}
    model = decode_model(json.dumps({"schema": 1, "origin": {}, "step_time": section}).encode())
    assert decode_model(encode_model(model)).step_time == section
