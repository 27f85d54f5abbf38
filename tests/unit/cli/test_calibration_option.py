"""--calibration of `plan`, `explain` and `estimate`: they say what measurements say, and name them."""

import json
from pathlib import Path

import pytest

from specdecode_operator.sizing.calibration import Calibration, CalibrationEntry, serialize_calibration
from tests.support.objects import H100
from tests.unit.cli.conftest import Specdecode, WriteObject, manifest
from tests.unit.cli.test_explain import figures

GIB = 2**30
TARGET, DRAFT = "meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"
ENTRY = CalibrationEntry(
    H100, "0.33", "V2", 2, False, 256, 8192, "draft_model", 5, f"{TARGET} + {DRAFT}", "FP8", "BF16", GIB
)
FP8 = {"target": {"model": TARGET, "quantization": "FP8"}}


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    file = tmp_path / "calibration.json"
    file.write_text(serialize_calibration(Calibration((ENTRY,))))
    return file


def test_plan_corrects_the_products_that_were_measured(
    specdecode: Specdecode, write: WriteObject, calibration: Path
) -> None:
    path = write("a.yaml", manifest("a", **FP8))
    plain, corrected = (
        json.loads(specdecode("plan", "-f", path, "-o", "json", *more).stdout)["objects"][0]["candidates"]
        for more in ([], ["--calibration", calibration])
    )
    tens = {candidate["product"]: candidate for candidate in plain if candidate["tensor"] == 2}
    for candidate in corrected:
        if candidate["tensor"] != 2:
            assert candidate in plain
            continue
        more = GIB if candidate["product"] == H100 else 0
        before = tens[candidate["product"]]
        assert candidate["correction_bytes"] == more
        assert candidate["per_gpu"]["available_kv"] == before["per_gpu"]["available_kv"] - more
        assert (candidate["calibration"] is not None) == bool(more)
    text = specdecode("plan", "-f", path, "--calibration", calibration).stdout
    assert "2 x H100, TP 2: calibrated: 1.0 GiB more for the engine on each GPU, after a measured start" in text
    assert "calibrated" not in specdecode("plan", "-f", path).stdout


def test_plan_says_where_no_measurement_was_of_use(
    specdecode: Specdecode, write: WriteObject, calibration: Path
) -> None:
    path = write("a.yaml", manifest("a", parallelism={"tensor": 4}))
    told = specdecode("plan", "-f", path, "--calibration", calibration).stderr
    assert f"warning: --calibration: {calibration}: none of its entries is of engines like these" in told
    used = write("b.yaml", manifest("b", **FP8))
    assert "warning" not in specdecode("plan", "-f", used, "--calibration", calibration).stderr


def test_explain_has_a_line_for_it_and_adds_up(specdecode: Specdecode, write: WriteObject, calibration: Path) -> None:
    path = write("a.yaml", manifest("a", **FP8))
    plain, corrected = (
        figures(specdecode("explain", "-f", path, *more).stdout) for more in ([], ["--calibration", calibration])
    )
    assert corrected["- correction"] == GIB
    assert corrected["- non-torch"] == plain["- non-torch"]
    assert "- correction" not in plain
    charged = sum(size for name, size in corrected.items() if name.startswith("- "))
    assert corrected["budget"] - charged == corrected["= left for KV cache"] == plain["= left for KV cache"] - GIB


def test_estimate_corrects_each_case(specdecode: Specdecode, calibration: Path) -> None:
    case = {
        "gpu": "H100",
        "model": TARGET,
        "quantization": "fp8",
        "tp": 2,
        "max_num_seqs": 256,
        "speculative": {"method": "draft_model", "num_speculative_tokens": 5, "model": DRAFT},
    }
    lines = "\n".join(json.dumps(each) for each in (case, {**case, "tp": 4}))
    plain, corrected = (
        [
            json.loads(line)
            for line in specdecode("estimate", "--in", "-", "--out", "-", *more, stdin=lines).stdout.splitlines()
        ]
        for more in ([], ["--calibration", calibration])
    )
    assert corrected[0]["per_gpu"]["available_kv"] == plain[0]["per_gpu"]["available_kv"] - GIB
    assert "a measured start" in corrected[0]["calibration"]
    assert corrected[1] == plain[1], "nobody measured four GPUs"


@pytest.mark.parametrize("command", ["plan", "explain", "estimate"])
def test_a_file_that_cannot_be_used_is_an_error(
    specdecode: Specdecode, write: WriteObject, tmp_path: Path, command: str
) -> None:
    arguments = ["-f", write("a.yaml", manifest("a"))] if command != "estimate" else ["--in", "-", "--out", "-"]
    for content, words in ((None, "No such file"), ("{", "is no JSON"), ("{}", "format")):
        file = tmp_path / "bad.json"
        if content is not None:
            file.write_text(content)
        done = specdecode(command, *arguments, "--calibration", file, stdin="{}")
        assert done.exit_code == 2
        assert words in done.stderr
        assert str(file) in done.stderr
        assert not done.stdout.strip()
