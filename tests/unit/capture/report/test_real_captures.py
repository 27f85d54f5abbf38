"""Captures of a real vLLM: the figures are those that the capture's own summary has."""

import json
from pathlib import Path

import pytest

from specdecode_operator.capture.report.capture_reader import read_capture
from specdecode_operator.capture.report.report import measures_of

CAPTURES = sorted(path.parent for path in (Path(__file__).parents[3] / "data/captures").glob("*/manifest.json"))


@pytest.mark.parametrize("folder", CAPTURES, ids=lambda folder: folder.name)
def test_figures_are_those_of_the_manifest(folder: Path) -> None:
    summary = json.loads((folder / "manifest.json").read_text())["summary"]
    capture = read_capture(folder)
    found = {name: measure.value for name, measure in measures_of(capture).items()}
    assert capture.warnings == []
    assert found["requests"] == summary["records"]
    assert found["output tokens"] == summary["output_tokens"]
    assert found["acceptance"] == pytest.approx(summary["speculation"]["acceptance"], abs=5e-5)
    assert found["output tokens a second"] == pytest.approx(summary["output_tokens_per_second"], abs=0.01)
    for share in (50, 90, 99):
        for name in ("ttft", "tpot"):
            assert found[f"{name.upper()} P{share}"] == pytest.approx(
                summary["engine"][f"{name}_ms"][f"p{share}"], abs=1e-3
            )
    assert capture.steps is not None
    assert capture.steps.per_position == pytest.approx(summary["speculation"]["per_position"], abs=5e-5)
    assert capture.client is not None
    assert capture.client.outcomes == {name: count for name, count in summary["requests"].items() if name != "sent"}
