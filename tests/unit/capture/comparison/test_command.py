"""`specdecode capture compare`: the comparison of files, for people and for programs."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdecode_operator.capture.trace_reader import RecordingError, find_trace
from specdecode_operator.cli.main import app
from specdecode_operator.cli.schema import Printed, schema_text
from tests.support.compared_captures import MadeCapture


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MadeCapture(arrivals="closed:4,poisson:20").make(tmp_path_factory.mktemp("capture"))


def test_a_table_has_each_load_of_both_arms_and_the_sentence(folder: Path) -> None:
    done = CliRunner().invoke(app, ["capture", "compare", str(folder)])
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "drafted against plain: Pays"
    assert lines[1].startswith("  goodput +")
    names = [line.split()[0] for line in lines[3:7]]
    assert names == ["closed-4", "closed-4", "poisson-20", "poisson-20"]
    assert "+" in lines[4]
    assert "%" not in lines[3]
    assert any("tokens a verification" in line for line in lines)
    assert "* plain, which the others are compared with; goodput in tokens/s, TTFT and TPOT in ms" in lines


def test_what_wants_one_recording_names_those_of_arms(folder: Path) -> None:
    with pytest.raises(RecordingError) as refused:
        find_trace(folder)
    assert str(refused.value).endswith(f"name one of those below it, such as {folder}/drafted/1 or a trace")


def test_a_price_makes_costs_of_gpu_time(folder: Path) -> None:
    done = CliRunner().invoke(app, ["capture", "compare", str(folder), "--price-per-gpu-hour", "3.6"])
    assert "GPU time for 1,000 tokens (and what it costs) " in done.stdout


def test_json_is_what_the_file_holds_and_its_schema_names(folder: Path) -> None:
    done = CliRunner().invoke(app, ["capture", "compare", str(folder), "--price-per-gpu-hour", "3.6", "-o", "json"])
    found = json.loads(done.stdout)
    schema = json.loads(schema_text(Printed.COMPARISON))
    assert found.keys() == schema["$defs"]["Comparison"]["properties"].keys()
    load = found["arms"][1]["loads"][0]
    assert load.keys() == schema["$defs"]["Load"]["properties"].keys()
    assert load["cost_per_1000_tokens"] == pytest.approx(load["gpu_seconds_per_1000_tokens"] / 1000, rel=1e-3)


def test_what_cannot_be_compared_is_one_line_and_status_2(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["capture", "compare", str(tmp_path)])
    assert done.exit_code == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path}: holds no capture with arms")
